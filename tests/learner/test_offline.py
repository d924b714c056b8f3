"""The teacher's rollouts in the student's batches: how many, in which order, which not; and what they do to a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from stillhouse.learner.batch import TrainItem
from stillhouse.learner.config import LearnerConfig
from stillhouse.learner.objectives.config import OfflineConfig
from stillhouse.learner.objectives.options import Capped, Distributions, LogRatio
from stillhouse.learner.offline import OfflineMixer, open_mixer
from stillhouse.learner.step.train_step import NonFiniteError, Trainer
from stillhouse.protocol.settings import Member
from stillhouse.recording.format import RecordedRollout, RecordError
from stillhouse.recording.reader import Recording
from tests.learner.conftest import make_item, tiny_student
from tests.learner.records import VOCABULARY, record, rollout
from tests.learner.settings import learner_config
from tests.learner.step.gradients import assert_close, of_loss, step_gradients

Mixing = Callable[..., OfflineMixer]
SGD_LIKE: dict[str, Any] = {"max_grad_norm": 0.0, "warmup_steps": 0, "schedule": "constant"}
LENGTHS = [3, 50, 7, 1, 20, 11, 90, 5]


@pytest.fixture
def teachers_file(tmp_path: Path) -> Path:
    rollouts = [rollout(f"t{n}", n) for n in LENGTHS]
    return record(tmp_path / "teacher", [rollouts[:5], rollouts[5:]], writer="teacher")


def offline(file: Path, student_fraction: float = 0.5, **settings: Any) -> OfflineConfig:
    return OfflineConfig(file=str(file), student_fraction=student_fraction, **settings)


@pytest.fixture
def mixer() -> Iterator[Mixing]:
    """`mixer(file, student_fraction, seed)`: one that is closed behind the test."""
    with ExitStack() as stack:

        def make(file: Path, student_fraction: float = 0.5, seed: int = 0) -> OfflineMixer:
            recording = stack.enter_context(Recording(file))
            return OfflineMixer(recording, offline(file, student_fraction), seed=seed)

        yield make


def ids(taken: list[tuple[RecordedRollout, TrainItem]]) -> list[str]:
    return [rollout.item.rollout_id for rollout, _ in taken]


# ------------------------------------------------------------------------------------------------------- how many


@pytest.mark.parametrize("student_fraction", [0.9, 0.5, 0.25, 0.03])
def test_the_fraction_holds_at_every_step_to_half_a_rollout(
    mixer: Mixing, teachers_file: Path, student_fraction: float
) -> None:
    mixed, random = mixer(teachers_file, student_fraction), np.random.default_rng(1)
    own = theirs = 0
    for _ in range(60):
        n = int(random.integers(1, 200))
        own += n
        theirs += sum(item.n_trained for _, item in mixed.take(n))
        assert abs(theirs - own * (1 - student_fraction) / student_fraction) <= max(LENGTHS) / 2
    assert own / (own + theirs) == pytest.approx(student_fraction, abs=max(LENGTHS) / 2 / own)
    assert mixed.tokens_total == theirs == mixed.figures["offline/tokens_total"]


def test_every_pass_has_every_rollout_once_in_an_order_of_its_own(mixer: Mixing, teachers_file: Path) -> None:
    mixed, one_pass = mixer(teachers_file), sum(LENGTHS)
    taken = [name for _ in range(3 * one_pass) for name in ids(mixed.take(1))]
    passes = [taken[i : i + len(LENGTHS)] for i in range(0, 2 * len(LENGTHS), len(LENGTHS))]
    assert all(Counter(names) == Counter(f"t{n}" for n in LENGTHS) for names in passes)
    assert passes[0] != passes[1]
    other = mixer(teachers_file, seed=1)
    assert [name for _ in range(3 * one_pass) for name in ids(other.take(1))] != taken


def test_it_goes_on_where_the_checkpoint_was(mixer: Mixing, teachers_file: Path) -> None:
    undisturbed, first, second = (mixer(teachers_file, 0.4) for _ in range(3))
    expected = [ids(undisturbed.take(n)) for n in (30, 50, 70, 40)]
    assert [ids(first.take(n)) for n in (30, 50)] == expected[:2]
    second.load_state(first.state())
    assert [ids(second.take(n)) for n in (70, 40)] == expected[2:]
    assert second.figures == undisturbed.figures


def test_another_file_is_begun_while_the_counts_go_on(mixer: Mixing, teachers_file: Path, tmp_path: Path) -> None:
    former = mixer(teachers_file)
    former.take(100)
    other = record(tmp_path / "other", [[rollout("x", 4)]], writer="teacher", run="other")
    mixed = mixer(other)
    mixed.load_state(former.state())
    assert mixed.tokens_total == former.tokens_total
    assert set(ids(mixed.take(100))) == {"x"} and abs(mixed.tokens_total - 200) <= 2


def test_what_cannot_be_trained_is_passed_over_and_counted(mixer: Mixing, tmp_path: Path) -> None:
    rollouts = [rollout("good", 4), rollout("idle", 0), rollout("bare", 4, teachers=())]
    mixed = mixer(record(tmp_path / "r", [rollouts], writer="teacher"))
    for _ in range(6):
        assert set(ids(mixed.take(4))) == {"good"}
    figures = mixed.figures
    assert figures["offline/skipped_nothing_to_train_total"] >= 5 <= figures["offline/skipped_unscored_total"]
    nothing = mixer(record(tmp_path / "n", [rollouts[1:]], writer="teacher"))
    with pytest.raises(RecordError, match="none of its 2 rollouts can be trained"):
        nothing.take(4)


def test_files_that_do_not_serve_are_refused(mixer: Mixing, teachers_file: Path, tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="written by the student"):
        mixer(record(tmp_path / "own", [[rollout("a")]]))
    with pytest.raises(RecordError, match="another vocabulary"):
        open_mixer(offline(teachers_file), "cd" * 32, seed=0)
    opened = open_mixer(offline(teachers_file), VOCABULARY, seed=0)
    assert opened is not None and open_mixer(OfflineConfig(), "", seed=0) is None
    opened.close()


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"student_fraction": 0.5}, "without a file"),
        ({"file": "f"}, "would not be used"),
        ({"file": "f", "student_fraction": 1.5}, "student_fraction: got 1.5, expected float >= 0 and <= 1"),
        ({"importance": Capped()}, "cross-entropy is on the text"),
        ({"divergence": Member(name="k9")}, r"did you mean 'k[123]'"),
        ({"divergence": LogRatio(kl_student="behaviour")}, "mu of these tokens is the teacher's log-prob"),
        ({"divergence": LogRatio(baseline="expected_cost")}, "would change the expected gradient"),
        ({"divergence": Distributions(context_cap=2.0)}, "context_cap: got 2.0, expected 0"),
        ({"coef": 0.0}, "coef: got 0.0, expected float > 0"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        OfflineConfig(**settings)


# ------------------------------------------------------------------------------------------------- what a step does


def _cross_entropy(model: PreTrainedModel, items: list[TrainItem], divisor: int) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for train_item in items:
        ids_L = torch.from_numpy(train_item.tokens_L).long()
        labels_L = torch.where(torch.from_numpy(train_item.train_mask_L), ids_L, -100)
        logits_LV = model(input_ids=ids_L[None]).logits[0]
        total = total + torch.nn.functional.cross_entropy(logits_LV[:-1], labels_L[1:], reduction="sum")
    return total / divisor


def test_seq_kd_has_the_gradient_of_cross_entropy() -> None:
    items = [make_item("a", [0, 0, 1, 1, 1]), make_item("b", [0, 1, 1, 0, 0, 1, 0, 0])]
    config = learner_config(**SGD_LIKE, divergence="seq_kd", importance="none", pack_tokens=6)
    got = step_gradients(Trainer(tiny_student(dtype=torch.float64), config, total_steps=1), items)
    plain = tiny_student("eager", torch.float64)
    assert_close(got, of_loss(plain, _cross_entropy(plain, items, 6)))


def test_a_mixed_step_is_the_sum_of_both_objectives_over_all_tokens(tmp_path: Path) -> None:
    """Own tokens by the sampled reverse KL, the teacher's by cross-entropy, one divisor for all of them."""
    own, theirs = [make_item("a", [0, 1, 1, 1])], [make_item("t", [0, 0, 1, 1]), make_item("u", [0, 1])]
    config = LearnerConfig(**SGD_LIKE, offline=offline(tmp_path, coef=0.5))
    trainer = Trainer(tiny_student(dtype=torch.float64), config, total_steps=1)
    got = step_gradients(trainer, own, theirs)

    alone = LearnerConfig(**SGD_LIKE)
    own_only = step_gradients(Trainer(tiny_student(dtype=torch.float64), alone, total_steps=1), own)
    plain = tiny_student("eager", torch.float64)
    _cross_entropy(plain, theirs, 6).backward()  # pyright: ignore[reportUnknownMemberType]
    for name, parameter in plain.named_parameters():
        assert parameter.grad is not None
        expected = own_only[name] * 3 / 6 + 0.5 * parameter.grad
        torch.testing.assert_close(got[name], expected, atol=1e-6, rtol=1e-5, msg=name)


def test_figures_and_rewards_of_the_student_are_its_own(tmp_path: Path) -> None:
    own = [make_item(f"a{i}", [0, 1, 1], reward=float(i)) for i in range(2)]
    theirs = [make_item("t", [0, 1, 1, 1, 1], reward=100.0)]
    plain = learner_config(**SGD_LIKE, advantage="grpo")
    mixed = learner_config(**SGD_LIKE, advantage="grpo", offline=offline(tmp_path))
    without = Trainer(tiny_student(), plain, total_steps=1).step(own).as_dict()
    with_them = Trainer(tiny_student(), mixed, total_steps=1).step(own, theirs).as_dict()
    changed = {"loss", "grad_norm", "step_s", "microbatches", "input_tokens"}
    for name, value in without.items():
        assert name in changed or with_them[name] == pytest.approx(value, rel=1e-6), name
    assert with_them.keys() - without.keys() == {
        f"offline_{name}" for name in ("tokens", "items", "logprob", "reverse_kl", "weight_mean")
    }
    assert (with_them["offline_tokens"], with_them["offline_items"], with_them["offline_weight_mean"]) == (4, 1, 1.0)
    q = float(np.mean(theirs[0].teacher_ML[0, 1:]))
    assert with_them["offline_reverse_kl"] == pytest.approx(with_them["offline_logprob"] - q, rel=1e-4)


def test_a_rollout_of_the_file_whose_gradient_is_not_finite_is_named(tmp_path: Path) -> None:
    config = LearnerConfig(**SGD_LIKE, offline=offline(tmp_path, divergence=LogRatio()))
    theirs = make_item("wild", [0, 1, 1])
    theirs.teacher_ML[:] = -3e38
    with pytest.raises(NonFiniteError, match="wild"):
        Trainer(tiny_student(), config, total_steps=1).step([make_item("a", [0, 1])], [theirs])
