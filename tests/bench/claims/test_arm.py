"""Arms of `make claims` with tiny untrained models: what they train and count, and that a killed one is made again."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice, repeat
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.claims import arm as arms
from bench.claims.arm import Arm, Phase, Run, mixed, read_arm, read_texts, write_texts
from bench.claims.facts import documents, facts
from bench.claims.grid import grid
from bench.claims.jobs import fill
from bench.claims.pair import save
from bench.claims.student import TOKENIZER, Rollout, Student, Writer, document, flops_of, item_of
from stillhouse.builtin.sft import Recipe, new_model
from stillhouse.builtin.tally import Tally

TINY = Recipe(hidden=16, mlp=16, layers=2, head_dim=4, steps=1, learning_rate=1e-3, seed=1, init_std=0.08)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(arms, "EVAL_PROMPTS", 2)
    monkeypatch.setattr("bench.claims.student.MAX_NEW_TOKENS", 12)
    torch.manual_seed(0)
    for name in ("teacher", "start"):
        save(new_model(TINY, TOKENIZER), tmp_path / "models" / name)
    write_texts(tmp_path, 6)
    return tmp_path


def test_an_arm_of_two_phases_counts_what_each_spent(folder: Path) -> None:
    phases = Phase("seq_kd", 1, 1e-3, batch=4, own=0.0), Phase("reverse_kl", 1, 1e-3, batch=2)
    arm = Arm("3", "both", 0, phases)
    Run(arm, folder).make()
    lines = read_arm(folder, arm.name)
    assert lines is not None and lines[-1]["done"] and [line["step"] for line in lines[:-1]] == [0, 2]
    texts = read_texts(folder / "texts.npz")[:4]
    one, spent = flops_of(folder / "models" / "start"), lines[-2]["flops"]
    assert lines[-2]["tokens"]["teacher"] == sum(text.written for text in texts)
    assert spent["learner"] > sum(one.training(len(text.ids_L), frozen=False) for text in texts)
    own = spent["teacher"] - sum(one.of(0, len(text.ids_L)) for text in texts)
    assert own == spent["actor"] > 0  # the teacher has the student's size here, and reads what the student wrote


def test_an_arm_of_long_tallies_has_models_texts_and_prompts_of_its_own(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("long-teacher", "long-start"):
        save(new_model(replace(TINY, mlp=32), TOKENIZER), folder / "models" / name)
    asked, write = list[Tally](), Writer.write

    def seen(writer: Writer, tasks: Any, *args: Any, **options: Any) -> list[Rollout]:
        asked.extend(tasks)
        return write(writer, tasks, *args, **options)

    monkeypatch.setattr(Writer, "write", seen)
    write_texts(folder, 4, "long-texts")
    texts, teacher = read_texts(folder / "long-texts.npz"), flops_of(folder / "models" / "long-teacher")
    assert [text.task for text in texts] == asked
    assert max(text.written for text in texts) > 12 + 5 * (28 - 18)  # MAX_NEW_TOKENS, and more for the digits above 18
    for row in ("SFT, 1x", "OPD, reverse KL, 1x"):
        arm = next(one for one in grid() if (one.claim, one.row) == ("2c", row))
        assert arm.needs == {"pair-long-start", "long-texts" if row == "SFT, 1x" else "pair-long-teacher"}
        Run(replace(arm, phases=(replace(arm.phases[0], steps=1, batch=4),)), folder).make()
        lines = read_arm(folder, arm.name)
        assert lines is not None
        if row == "SFT, 1x":
            assert lines[-2]["flops"]["teacher"] == sum(teacher.of(0, len(text.ids_L)) for text in texts)
    assert all(28 <= len(task.digits) <= 42 for task in asked)


def test_documents_are_trained_as_a_whole_cost_no_teacher_and_their_facts_are_asked(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bench.claims.facts.COUNT", 4)
    monkeypatch.setattr("bench.claims.facts.PER_DOCUMENT", 2)
    phase = Phase("seq_kd", 120, 2e-2, batch=2, own=0.0, documents=1.0)
    arm = Arm("5", "documents", 0, (phase,), teacher=(), asks_facts=True)
    assert arm.needs == {"pair-start"}
    Run(arm, folder).make("abc")
    lines = read_arm(folder, arm.name)
    assert lines is not None and lines[-1]["commit"] == "abc"
    assert lines[0]["facts"] == 0.0 and lines[-2]["facts"] > 0.5 and lines[-2]["facts_greedy"] > 0.5
    assert lines[-2]["flops"]["teacher"] == 0.0 < lines[-2]["flops"]["learner"]


def test_a_document_trains_its_end_and_all_but_its_first_token() -> None:
    told = next(documents(facts(0), 0))
    item = item_of(document(told, facts(0)[0]), 0, group_size=1, graded=None)
    assert told.count(" has ") == told.count(".") == 8
    assert item.train_mask_L.tolist() == [False] + [True] * (len(item.tokens_L) - 1)
    assert TOKENIZER.decode(item.tokens_L) == told + "<|im_end|>"


def test_a_share_of_documents_comes_evenly_and_pays_for_the_others(folder: Path) -> None:
    text, other = (document("a has b.", fact) for fact in facts(0)[:2])
    ours = [one is text for one in islice(mixed(repeat(text), repeat(other), 15 / 16), 64)]
    assert ours == ([False] * 15 + [True]) * 4
    arm = Arm("5", "both", 0, (Phase("seq_kd", 1, 1e-3, batch=16, own=0.0, documents=15 / 16),), teacher=())
    assert arm.needs == {"pair-start", "texts"}
    Run(arm, folder).make()
    lines = read_arm(folder, arm.name)
    assert lines is not None and lines[-2]["tokens"]["teacher"] == read_texts(folder / "texts.npz")[0].written


def test_a_killed_arm_leaves_no_result_and_its_second_making_is_the_same(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arm = Arm("2", "OPD", 1, (Phase("forward_kl", 2, 1e-3, batch=2),))
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        trained: list[int] = []

        def killed(student: Student, *args: Any) -> None:
            trained.append(1)
            if len(trained) == 2:
                raise KeyboardInterrupt
            real(student, *args)

        real = Student.train
        patch.setattr(Student, "train", killed)
        Run(arm, folder).make()
    assert read_arm(folder, arm.name) is None
    made: list[list[dict[str, Any]]] = []
    for _ in range(2):
        Run(arm, folder).make()
        lines = read_arm(folder, arm.name)
        assert lines is not None
        made.append([{k: v for k, v in line.items() if "cpu_s" not in k} for line in lines])
    assert made[0] == made[1]


def test_a_stale_arm_writes_with_weights_of_as_many_steps_before(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first token's log-prob tells weights apart. With a staleness of 2, steps 1 to 3 have the first weights."""
    first: dict[int, list[float]] = {0: [], 2: []}
    write = Student.write

    def seen(student: Student, *args: Any, **options: Any) -> list[Rollout]:
        monkeypatch.setattr(student, "_seed", range(100).__getitem__)
        rollouts = write(student, *args, **options)
        first[staleness].append(float(rollouts[0].logprobs_L[rollouts[0].prompt_tokens]))
        return rollouts

    monkeypatch.setattr(Student, "write", seen)
    for staleness in first:
        phase = Phase("reverse_kl", 4, 1e-2, batch=2, prompts=2, staleness=staleness, eval_every=1)
        Run(Arm("1", f"late {staleness}", 0, (phase,)), folder).make()
    fresh, stale = first[0], first[2]
    assert len(set(fresh)) == 4
    assert stale[0] == stale[1] == stale[2] == fresh[0] and stale[3] == pytest.approx(fresh[1], rel=0.2)
    assert stale[3] != stale[0]


def test_the_first_start_makes_its_folder(tmp_path: Path) -> None:
    assert fill(tmp_path / "runs" / "claims", 1, set()) == []
    assert (tmp_path / "runs" / "claims" / "machines.jsonl").is_file()


def test_every_arm_of_the_grid_has_a_name_of_its_own_and_needs_what_is_made_before() -> None:
    made = {*arms.OF_PAIR.values(), *arms.TEXTS_OF}
    for arm in grid():
        assert arm.name not in made and arm.needs <= made
        made.add(arm.name)
