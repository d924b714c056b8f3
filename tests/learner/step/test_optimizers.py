"""The optimizers of learner.optimizer do what torch's and torchao's classes do by themselves on the same gradients, and
go on from a checkpoint to the bit."""

from __future__ import annotations

import importlib
import itertools
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer
from transformers import PreTrainedModel
from transformers.trainer_pt_utils import get_parameter_names

from stillhouse.launch.config.tree import ConfigError, build
from stillhouse.learner.batch import TrainItem
from stillhouse.learner.checkpoints.checkpoint import LearnerState, capture_rng, load_checkpoint
from stillhouse.learner.config import OPTIMIZER, OPTIMIZERS, LearnerConfig, LoraConfig, Muon
from stillhouse.learner.step import optimizer as states
from stillhouse.learner.step.finite_step import finite_step
from stillhouse.learner.step.lora import Adapters
from stillhouse.learner.step.optimizer import learning_rate, set_learning_rate
from stillhouse.learner.step.optimizers import make_optimizer
from stillhouse.learner.step.train_step import Trainer
from stillhouse.models.loading import load_causal_lm
from stillhouse.protocol.messages import WeightVersion
from tests.learner.checkpoints.saving import save_checkpoint
from tests.learner.conftest import make_item, tiny_student, word_tokenizer
from tests.learner.settings import learner_config
from tests.learner.step.gradients import step_gradients
from tests.models import families
from tests.torchao_packages import add_torchao, needs_torchao

PAGE = Path(__file__).parents[3] / "docs" / "small-cards.md"
VOCAB = 2048
"""The embedding, 2,048 * 16, is the only matrix here that is large enough for 8 bits."""
SETTINGS: dict[str, Any] = {"lr": 1e-2, "warmup_steps": 2, "weight_decay": 0.1, "betas": (0.8, 0.9)}
HIDDEN = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
KINDS = ["adamw", "muon", pytest.param("adamw8bit", marks=needs_torchao)]


@pytest.fixture(autouse=True)
def found_torchao() -> None:
    add_torchao()


def items_of(seed: int) -> list[TrainItem]:
    masks = [0, 0, 1, 1, 1], [0, 1, 1, 0, 0, 1, 0, 0], [0] + [1] * 9
    return [make_item(f"r{i}", mask, seed=10 * seed + i, vocab=VOCAB) for i, mask in enumerate(masks)]


def weights_of(trainer: Trainer) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


def plain_optimizers(kind: Any, named: dict[str, Tensor]) -> list[Optimizer]:
    """As its authors would use it."""
    lr, decay = SETTINGS["lr"], SETTINGS["weight_decay"]
    adam: dict[str, Any] = {"lr": lr, "betas": SETTINGS["betas"]}
    hidden = {n: p for n, p in named.items() if any(part in n for part in HIDDEN)} if kind != "adamw8bit" else {}
    large = {n: p for n, p in named.items() if "embed" in n} if kind == "adamw8bit" else {}
    adapted = any("lora" in name for name in named)
    made: list[Optimizer] = []
    if kind == "adamw8bit":
        from torchao.optim import AdamW8bit  # pyright: ignore[reportMissingImports]

        made += [AdamW8bit(list(large.values()), **adam, weight_decay=decay)] if large else []
    name, options = kind if isinstance(kind, tuple) else (kind, {})
    if name == "muon":
        chosen: dict[str, Any] = {"adjust_lr_fn": "match_rms_adamw", "momentum": options.get("momentum", 0.95)}
        matrices = [p for n, p in hidden.items() if adapted or not n.endswith("norm.weight")]
        matrices = [p for p in matrices if p.ndim == 2]
        made.append(torch.optim.Muon(matrices, lr=lr, weight_decay=decay, **chosen))
    taken = {id(p) for one in made for group in one.param_groups for p in group["params"]}
    for decays in (True, False):
        rest = [p for p in named.values() if id(p) not in taken and (p.ndim > 1) == decays]
        made += [torch.optim.AdamW(rest, **adam, weight_decay=decay if decays else 0.0, fused=True)] if rest else []
    return made


@pytest.mark.parametrize("adapted", [False, True], ids=["all weights", "adapters"])
@pytest.mark.parametrize("kind", [*KINDS, pytest.param(("muon", {"momentum": 0.5}), id="muon, momentum 0.5")])
def test_steps_are_those_of_the_classes_themselves_on_the_same_gradients(kind: Any, adapted: bool) -> None:
    """Clipped, over two microbatches and in two updates per batch; one batch is left out as not finite."""
    more: dict[str, Any] = {"optimizer": kind, "pack_tokens": 12, "max_grad_norm": 0.05, "updates_per_batch": 2}
    config = learner_config(**SETTINGS, **more, importance="decoupled", lora=LoraConfig(rank=2 if adapted else 0))
    trainer = trainer_of(config)
    trained = {name: p for name, p in trainer.model.named_parameters() if p.requires_grad}
    plain = {name: p.detach().clone().requires_grad_() for name, p in trained.items()}
    others = plain_optimizers(kind, plain)
    gradients: list[dict[str, Tensor]] = []

    def keep(*_: object) -> None:
        gradients.append({n: p.grad.clone() for n, p in trained.items() if p.grad is not None})

    trainer._optimizer.register_step_pre_hook(  # pyright: ignore[reportPrivateUsage]
        keep
    )
    for seed in range(3):
        items = items_of(seed)
        if seed == 1:
            for one in items:
                one.teacher_ML[:] = float("inf")
        before = len(gradients)
        assert (finite_step(trainer, items).figures is None) == (seed == 1)
        assert len(gradients) - before == (0 if seed == 1 else 2)
        for of_update in gradients[before:]:
            for name, p in plain.items():
                p.grad = of_update.get(name)
            for other in others:
                set_learning_rate(other, learning_rate(config, seed, 9))
                with torch.compiler.set_stance("force_eager"):
                    other.step()
        wrong = [name for name, p in trained.items() if not torch.equal(p, plain[name])]
        assert not wrong
    assert all(any(bool(g[name].any()) for g in gradients) for name in trained)


def trainer_of(config: LearnerConfig, model: PreTrainedModel | None = None, adapters: Path | None = None) -> Trainer:
    model = tiny_student(vocab=VOCAB) if model is None else model
    torch.manual_seed(1)
    added = Adapters(model, config.lora, base="tiny") if config.lora.rank else None
    if added is not None and adapters is not None:
        added.load(adapters)
    return Trainer(model, config, total_steps=9, adapters=added)


@pytest.mark.parametrize("adapted", [False, True], ids=["all weights", "adapters"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_goes_on_from_a_checkpoint_to_the_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, adapted: bool
) -> None:
    monkeypatch.setattr(states, "_AT_ONCE_BYTES", 4096)  # state is made in several goes
    config = learner_config(**SETTINGS, optimizer=kind, lora=LoraConfig(rank=2 if adapted else 0))
    straight = trainer_of(config)
    for seed in range(2):
        straight.step(items_of(seed))
    state = LearnerState(WeightVersion(0, 2), straight.state_dict(), {}, None, capture_rng(), {})
    saved = save_checkpoint(tmp_path, straight.model, word_tokenizer(), state, keep=1, adapters=straight.adapters)
    source = None if adapted else load_causal_lm(saved, device="cpu", dtype="float32", attention="packed", train=True)
    resumed = trainer_of(config, source, saved)
    resumed.load_state_dict(load_checkpoint(saved).optimizer)
    for seed in range(2, 5):
        for trainer in (straight, resumed):
            trainer.step(items_of(seed))
    ones, others = weights_of(straight), weights_of(resumed)
    assert ones.keys() == others.keys() and all(torch.equal(ones[name], others[name]) for name in ones)
    mine, theirs = straight.state_dict().tensors, resumed.state_dict().tensors
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)
    assert sum(one.nbytes for one in straight.moments()) == sum(one.nbytes for one in mine.values())
    if kind == "adamw8bit" and not adapted:
        codes, scales = mine["exp_avg.codes/model.embed_tokens.weight"], mine["exp_avg.scale/model.embed_tokens.weight"]
        assert codes.dtype == torch.uint8 and codes.numel() == VOCAB * 16 == 256 * scales.numel()


def test_state_of_another_optimizer_is_refused_and_nothing_changes() -> None:
    of_adamw, of_muon = (trainer_of(learner_config(optimizer=kind)) for kind in ("adamw", "muon"))
    of_muon.step(items_of(0))
    before = weights_of(of_adamw)
    with pytest.raises(ValueError, match=r"missing \['exp_avg/.*unknown \['momentum_buffer/.*or learner\.optimizer"):
        of_adamw.load_state_dict(of_muon.state_dict())
    assert not of_adamw.state_dict().tensors and of_adamw.steps_done == 0
    assert all(torch.equal(before[name], p) for name, p in of_adamw.model.named_parameters())


@needs_torchao
def test_ranks_that_would_cut_a_block_of_8_bits_are_refused() -> None:
    make_optimizer(tiny_student(vocab=1024), learner_config(optimizer="adamw8bit", ranks=4))  # 256 * 16 each
    for vocab, rows in ((2064, 1032), (512, 256 // 2)):  # 64.5 blocks; 2,048 numbers
        ranks = vocab // rows
        with pytest.raises(ValueError, match=rf"embed_tokens.*would have {rows} rows on rank 0 of {ranks}.*\.ranks"):
            make_optimizer(tiny_student(vocab=vocab), learner_config(optimizer="adamw8bit", ranks=ranks))


def test_8_bits_without_torchao_are_refused_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.optim", None)
    with pytest.raises(ValueError, match=r"needs torchao, which this environment lacks.*\[torchao\]"):
        make_optimizer(tiny_student(), learner_config(optimizer="adamw8bit"))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"optimizer": "muon", "moments": "host"}, "only those of adamw can be in host memory"),
        ({"optimizer": "moun"}, "did you mean 'muon'"),
        ({"optimizer": {"name": "adamw", "momentum": 0.5}}, "momentum is an option of muon"),
        ({"optimizer": {"name": "muon", "momentum": 1.5}}, "expected float >= 0 and <= 1"),
    ],
)
def test_a_wrong_optimizer_is_refused_with_what_was_expected(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build(LearnerConfig, given)
    assert message in str(caught.value)


def test_the_pages_package_trains_a_step_and_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = PAGE.read_text(encoding="utf-8")
    code = page.split("```python\n")[1].split("```")[0]
    entries = page.split("```TOML\n# pyproject.toml\n")[1].split("```")[0]
    (tmp_path / "my_package.py").write_text(code)
    info = tmp_path / "my_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my_package\nVersion: 1.0\n")
    lines = entries.replace('"', "").replace("project.entry-points.", "")
    (info / "entry_points.txt").write_text(lines)
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    monkeypatch.delitem(sys.modules, "my_package", raising=False)
    steady = {"lr": 1e-2, "warmup_steps": 0, "schedule": "constant", "max_grad_norm": 0.0}
    config = build(LearnerConfig, {"optimizer": {"name": "sgd", "momentum": 0.5}, **steady})
    assert config.optimizer.matrix_bytes == 4.0
    trainer = trainer_of(config)
    before = weights_of(trainer)
    gradients = step_gradients(trainer, items_of(0))
    for name, p in trainer.model.named_parameters():
        torch.testing.assert_close(p.detach(), before[name] - config.lr * gradients[name])
    assert {name.split("/")[0] for name in trainer.state_dict().tensors} == {"momentum_buffer"}


def test_every_built_in_name_is_a_function_and_on_the_page() -> None:
    page = PAGE.read_text(encoding="utf-8")
    for name in OPTIMIZERS.built_in:
        assert callable(OPTIMIZER.load(OPTIMIZER.make(name)).function) and f"`{name}`" in page
    assert f"`{OPTIMIZERS.entry_points}`" in page


def test_warm_up_then_cosine_down_to_the_floor() -> None:
    config = LearnerConfig(lr=2.0, warmup_steps=4, min_lr_ratio=0.1)
    rates = [learning_rate(config, step, 24) for step in range(30)]
    assert rates[:4] == [0.5, 1.0, 1.5, 2.0]
    assert all(a > b for a, b in itertools.pairwise(rates[3:24]))
    assert rates[13] == pytest.approx(2.0 * (0.1 + 0.9 * 0.5))
    assert rates[23:] == [pytest.approx(0.2)] * 7


def test_constant_schedule_and_no_warm_up() -> None:
    config = LearnerConfig(lr=3.0, warmup_steps=0, schedule="constant")
    assert {learning_rate(config, step, 5) for step in range(9)} == {3.0}
    assert learning_rate(LearnerConfig(lr=3.0, warmup_steps=10), 9, 5) == 3.0


@pytest.mark.parametrize("make", [tiny_student, partial(families.build, "gpt_oss (sinks, experts)")])
def test_norms_and_biases_do_not_decay(make: Callable[[], PreTrainedModel]) -> None:
    """Nor do those of experts, which have two dimensions; transformers' trainer says so too."""
    model = make()
    names = {id(p): name for name, p in model.named_parameters()}
    decayed, kept = make_optimizer(model, LearnerConfig(weight_decay=0.1)).param_groups
    of_muon = make_optimizer(model, LearnerConfig(optimizer=Muon(name="muon"))).param_groups[-1]
    theirs = set(get_parameter_names(model, [], ["bias", "norm"])) & {
        n for n, p in model.named_parameters() if p.ndim > 1
    }
    assert decayed["weight_decay"] == 0.1 and kept["weight_decay"] == 0.0
    assert {names[id(p)] for p in decayed["params"]} == theirs > {names[id(p)] for p in of_muon["params"]}
    assert len(decayed["params"]) + len(kept["params"]) == len(names)


def test_state_before_the_first_step_is_empty_and_loads() -> None:
    trainer = Trainer(tiny_student(), LearnerConfig(), total_steps=6)
    state = trainer.state_dict()
    assert not state.tensors and len(state.never_stepped) == len(list(trainer.model.parameters()))
    trainer.load_state_dict(state)
    assert trainer.steps_done == 0


@pytest.mark.parametrize("spoil", ["missing", "unknown", "shape"])
def test_state_of_another_model_is_refused_and_nothing_changes(spoil: str) -> None:
    trainer = Trainer(tiny_student(), LearnerConfig(), total_steps=6)
    trainer.step([make_item("a", [0, 1, 1])])
    state = trainer.state_dict()
    tensors: dict[str, Any] = dict(state.tensors)
    name = "exp_avg/model.norm.weight"
    if spoil == "unknown":
        tensors["exp_avg/other"] = tensors[name]
    elif spoil == "shape":
        tensors[name] = tensors[name][:-1]
    else:
        del tensors[name]
    with pytest.raises(ValueError, match="belongs to another architecture"):
        trainer.load_state_dict(replace(state, tensors=tensors, steps_done=9))
    assert trainer.steps_done == 1
