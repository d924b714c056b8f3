"""What each rank of a group runs for tests/learner/ranks/test_ranks.py: the same steps by the group and by a trainer of
its own, in float64. Prints one JSON line: by case, what differs.

    RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=... python -m tests.learner.ranks.same_as_one"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, cast

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from stillhouse.learner.batch import TrainItem
from stillhouse.learner.config import EmaConfig, LearnerConfig, LoraConfig
from stillhouse.learner.prompts.config import TaskConfig
from stillhouse.learner.ranks.group import Ranks
from stillhouse.learner.ranks.messages import dump_items, load_items
from stillhouse.learner.step.ema import StudentEma
from stillhouse.learner.step.finite_step import finite_step
from stillhouse.learner.step.lora import Adapters
from stillhouse.learner.step.optimizer import OptimizerState
from stillhouse.learner.step.train_step import Trainer
from stillhouse.models.packed import set_way
from stillhouse.protocol.messages import Branch
from stillhouse.protocol.payloads.aligned import EDGE, SPECIAL
from stillhouse.weights.staged_weights import tensor_of
from tests.learner.conftest import VOCAB, build_hybrid, make_item, tiny_student
from tests.learner.ranks.processes import group_of
from tests.learner.settings import learner_config
from tests.learner.step.payload_batches import VOCAB as TOP_K_VOCAB
from tests.learner.step.payload_batches import head_of, with_sets, with_states
from tests.learner.step.test_aligned import IN, ONE, SE, SI, E, with_spans
from tests.learner.step.test_mixture_of_experts import student
from tests.learner.step.test_peak_memory import expected_and_measured
from tests.learner.step.test_routing_replay import rows_for, with_rows
from tests.torchao_packages import THERE, add_torchao

TIMEOUT_S: Final = 60.0
PLAIN: Final[dict[str, Any]] = {"warmup_steps": 0, "schedule": "constant", "eps": 1e-4, "lr": 1e-2, "pack_tokens": 12}
GAE: Final = ("gae", {"value": {"lr": 2e-2, "through_backbone": True}})
CASES: Final[dict[str, dict[str, Any]]] = {
    "k1": {},
    "baselines": {"divergence": ("k1", {"baseline": "expected_cost"}), "importance": ("sequence", {})},
    "one pass": {"pack_tokens": 4096},
    "sequences": {"importance": ("gspo", {}), "advantage": ("grpo", {"std": False}), "coef": 0.3},
    "several updates": {"importance": "decoupled", "updates_per_batch": 3, "advantage": ("grpo", {}), "coef": 0.3},
    "rejected rollouts": {
        "importance": "decoupled",
        "rejection": ("geometric", {"low": 0.5, "high": 1.2}),
        "updates_per_batch": 3,
    },
    "value head": {"importance": "ppo", "advantage": GAE, "coef": 0.3, "updates_per_batch": 2},
    "turns and rollouts": {"aggregation": "sequence_mean", "domain_scale": "rms"},
    "reverse KL": {"divergence": "reverse_kl"},
    "drawn": {"divergence": ("multi_sample", {"samples": 3})},
    "context weights": {"divergence": ("jsd", {"context_cap": 2.0}), "importance": ("sequence", {})},
    "hidden states": {"divergence": "reverse_kl"},
    "spans": {"updates_per_batch": 2, "importance": "decoupled"},
    "sets of spans": {"divergence": ("multi_sample", {"samples": 3})},
    "divergences of pools": {
        "divergence": ("k1", {"baseline": "expected_cost"}),
        "teacher_divergences": {"math": ("jsd", {"context_cap": 2.0}), "style": "k3"},
        "importance": ("sequence", {}),
        "tasks": TaskConfig(routes={"default": (), "math": (), "style": ()}),
    },
    "computed again": {"recompute": 1.0, "updates_per_batch": 2},
    "adapters": {"lora": LoraConfig(rank=2, alpha=4.0)},
    "bfloat16 products": {"dtype": "bfloat16", "lr": 1e-4},
    "adapters, bfloat16 products": {"dtype": "bfloat16", "lr": 1e-4, "lora": LoraConfig(rank=2, alpha=4.0)},
    "moments on the host": {"moments": "host", "updates_per_batch": 2, "max_grad_norm": 1e-2},
    "adapters, moments on the host": {"moments": "host", "lora": LoraConfig(rank=2, alpha=4.0)},
    "muon": {"optimizer": "muon", "lr": 1e-3, "updates_per_batch": 2},
    "muon on adapters": {"optimizer": "muon", "lora": LoraConfig(rank=2, alpha=4.0)},
    "recurrent layers": {"pack_tokens": 4096, "updates_per_batch": 2},
    "experts": {"routing_replay": True, "recompute": 1.0},
    "adapters and value head": {"lora": LoraConfig(rank=2, alpha=4.0), "advantage": GAE, "importance": "ppo"},
}


def items_of(
    *,
    seed: int,
    top_k: bool,
    hidden: bool = False,
    divided: bool = False,
    pools: bool = False,
    spans: bool = False,
) -> list[TrainItem]:
    """`hidden`: teachers send hidden states in place of top-k sets. `spans`: they have another tokenizer. `divided`:
    also a sequence of one token, and one with branches. `pools`: some are scored by other pools, and one by two."""
    vocab, two, other = TOP_K_VOCAB, ("default", "math") if pools else ("default",), "style" if pools else "default"
    made = [
        make_item("a", [0, 0, 1, 1, 1], task_id=1, reward=1.0, seed=seed, vocab=vocab),
        make_item("b", [0, 1, 1, 0, 0, 1, 0, 0], task_id=1, reward=0.0, teachers=two, seed=seed + 1, vocab=vocab),
        make_item("c", [0, 0, 0], task_id=1, reward=0.25, seed=seed + 2, vocab=vocab),
        make_item("d", [0] * 10 + [1] * 20, task_id=2, reward=-0.5, seed=seed + 3, vocab=vocab),
        make_item("e", [0, 1, 1], task_id=2, reward=2.0, teachers=(), seed=seed + 4, vocab=vocab),
        make_item("f", [0, 1, 1, 1, 1], task_id=2, reward=None, teachers=(other,), seed=seed + 5, vocab=vocab),
    ]
    more = [
        make_item("i", [0] * 8 + [1], task_id=3, reward=-1.0, seed=seed + 8, vocab=vocab),  # trained on one rank only
        make_item("g", [0, 1], task_id=3, reward=0.5, seed=seed + 6, vocab=vocab),
        branched(make_item("h", [0, 0, 1, 1, 1, 0, 1, 1], task_id=3, reward=1.5, seed=seed + 7, vocab=vocab)),
    ]
    made += more if divided else []
    if spans:
        return [spanned(one, 6 * top_k) if one.item.teachers and one.n_trained else one for one in made]
    if hidden:
        return [with_states(one, cut=3) for one in made]
    return [with_sets(one, k=6, cut=3) for one in made] if top_k else made


def spanned(one: TrainItem, k: int) -> TrainItem:
    """Spans of three, one, one and two tokens, two without a score, and so on; the last token ends one."""
    n = int(np.ptp(np.flatnonzero(one.train_mask_L))) + 1
    codes = np.resize([SI, IN, E, SE, ONE, IN, E, int(EDGE), int(SPECIAL)], n).tolist()
    codes[-1] = {SI: SE, IN: E}.get(codes[-1], codes[-1])
    return with_spans(one, codes, k)


def branched(one: TrainItem) -> TrainItem:
    """Its token 5 follows token 2: two sequences for the model."""
    return replace(one, item=msgspec.structs.replace(one.item, branches=(Branch(5, 3),)))


def trainer_of(
    config: LearnerConfig,
    ranks: Ranks,
    dtype: torch.dtype = torch.float64,
    *,
    recurrent: bool = False,
    mixture: bool = False,
    vocab: int = VOCAB,
) -> Trainer:
    """Only rank 0 has values; the others get theirs from it."""
    with torch.device("meta" if ranks.rank else "cpu"):
        one = build_hybrid(dtype=dtype) if recurrent else tiny_student(dtype=dtype, vocab=vocab)
        model = student() if mixture else one
    if recurrent and not ranks.rank:
        set_way(model, "padded")
    torch.manual_seed(0)
    adapters = Adapters(model, config.lora, base="tiny") if config.lora.rank else None
    return Trainer(
        model, config, total_steps=10, adapters=adapters, vocab_tokens=TOP_K_VOCAB, ranks=ranks, head_of=head_of
    )


def whole_state(trainer: Trainer) -> OptimizerState:
    """Put together from the rows of all ranks, in the order of the ranks."""
    own = trainer.state_dict()
    if not own.rows:
        return own
    of_ranks: list[OptimizerState] = [own] * trainer.ranks.world_size
    dist.all_gather_object(of_ranks, own)
    n_shares = trainer.ranks.world_size // trainer.ranks.mesh.replicas
    for i, one in enumerate(of_ranks):
        same = [torch.equal(tensor, of_ranks[i % n_shares].tensors[name]) for name, tensor in one.tensors.items()]
        assert all(same) and one.rows == of_ranks[i % n_shares].rows, "replicas have different values"
    tensors = {
        name: torch.cat([one.tensors[name] for one in of_ranks[:n_shares]]) if name in own.rows else tensor
        for name, tensor in own.tensors.items()
    }
    return OptimizerState(tensors, own.never_stepped, own.steps_done)


def tensors_of(trainer: Trainer) -> dict[str, Tensor]:
    """Everything that steps change."""
    found = {f"weight {name}": tensor_of(weight).clone() for name, weight in trainer.weights()}
    found |= {f"moment {name}": tensor for name, tensor in whole_state(trainer).tensors.items()}
    return found | {f"critic {name}": tensor for name, tensor in trainer.critic.state_dict().items()}


def difference(ones: dict[str, Tensor], others: dict[str, Tensor]) -> float:
    """The largest, in units of the largest number of its tensor; 1 for other names."""
    if ones.keys() != others.keys():
        return 1.0
    pairs = [(ones[name].double(), others[name].double()) for name in ones]
    return max(float((one - other).abs().max() / one.abs().max().clamp(min=1e-9)) for one, other in pairs)


def of_steps(ranks: Ranks, name: str, settings: dict[str, Any]) -> dict[str, float]:
    """Largest differences over three steps, with teacher's text in the second, and after them. Alone, the moments are
    beside the weights."""
    config = learner_config(**(PLAIN | settings))
    mixture = name == "experts"
    dtype = torch.float32 if config.dtype == "bfloat16" or mixture else torch.float64
    by_one = msgspec.structs.replace(config, moments="device")
    hidden, recurrent, spans = name == "hidden states", name == "recurrent layers", "spans" in name
    alone = trainer_of(by_one, Ranks(), dtype, recurrent=recurrent, mixture=mixture)
    together = trainer_of(config, ranks, dtype, recurrent=recurrent, mixture=mixture)
    figures = gradients = 0.0
    for step in range(3):
        divided = ranks.context_group is not None
        top_k = any(map(config.objective.needs_top_k_for, config.tasks.routes))
        pools = bool(config.objective.teacher_divergences)
        more = {"hidden": hidden, "divided": divided, "pools": pools, "spans": spans}
        items = items_of(seed=10 * step, top_k=top_k, **more)
        if mixture:
            items = [with_rows(one, rows_for(len(one.tokens_L), step), branches=one.item.branches) for one in items]
        if step == 2:  # one rollout has tokens to train: all ranks but one have nothing to do
            items = [
                items[6 if divided else 0],
                *(replace(one, train_mask_L=np.zeros_like(one.train_mask_L)) for one in items[1:3]),
            ]
        offline = [make_item("t", [0, 0, 1, 1], seed=5, vocab=TOP_K_VOCAB)] if step == 1 else []
        one, other = ({str(i): g for i, g in enumerate(t.gradient(items, offline))} for t in (alone, together))
        gradients = max(gradients, difference(one, other))
        mine, theirs = (
            made.as_dict() | made.of_pools() for made in (t.step(items, offline) for t in (alone, together))
        )
        assert mine.keys() == theirs.keys()
        for figure in mine.keys() - {"step_s", "microbatches", "tokens_per_s", "train/step_s"}:
            if isinstance(mine[figure], float) and "_s" not in figure:
                a, b = float(mine[figure] or 0.0), float(theirs[figure] or 0.0)
                figures = max(figures, abs(a - b) / max(1.0, abs(a)))
    return {"gradients": gradients, "figures": figures, "after": difference(tensors_of(alone), tensors_of(together))}


def of_bad_rollouts(ranks: Ranks) -> dict[str, float]:
    """One whose gradient overflows float32, on whatever rank it is, and one whose payload cannot be read: left out by
    all, and the rest is trained."""
    config = learner_config(**PLAIN, divergence="reverse_kl")
    alone, together = (trainer_of(config, one, torch.float32) for one in (Ranks(), ranks))
    items = items_of(seed=3, top_k=True)
    items[5] = replace(items[5], payloads=np.full_like(items[5].payloads, 255))
    return left_out(alone, together, items, {"f"})


def of_gradient_that_is_not_finite(ranks: Ranks) -> dict[str, float]:
    """Every number of the forward pass is finite, but the gradient of two rollouts overflows float32: they are found
    item by item, by all ranks at once."""
    alone, together = (trainer_of(learner_config(**PLAIN), one, torch.float32) for one in (Ranks(), ranks))
    items = items_of(seed=3, top_k=False)
    items[1].teacher_ML[:] = items[5].teacher_ML[:] = -1e38
    return left_out(alone, together, items, {"b", "f"})


def left_out(alone: Trainer, together: Trainer, items: list[TrainItem], expected: set[str]) -> dict[str, float]:
    before = tensors_of(alone)
    masked = [finite_step(trainer, items).masked for trainer in (alone, together)]
    after = tensors_of(alone)
    return {
        "left out": float(any(set(one) != expected for one in masked)),
        "nothing was trained": float(all(torch.equal(before[name], after[name]) for name in before)),
        "after": difference(after, tensors_of(together)),
    }


def of_half_precision(ranks: Ranks) -> dict[str, float]:
    """By how much the gradient in bfloat16 is further from that in float32 than with one rank; 0: not further."""
    exact, alone = (
        trainer_of(learner_config(**PLAIN, dtype=d), Ranks(), torch.float32) for d in ("float32", "bfloat16")
    )
    together = trainer_of(learner_config(**PLAIN, dtype="bfloat16"), ranks, torch.float32)
    items = items_of(seed=0, top_k=False)
    true, one, other = (torch.cat([g.flatten() for g in t.gradient(items)]) for t in (exact, alone, together))
    return {"error": float((other - true).norm() / (one - true).norm()) - 1.0}


def of_average(ranks: Ranks) -> dict[str, float]:
    config = learner_config(**PLAIN)
    averages: list[dict[str, Tensor]] = []
    for trainer in (trainer_of(config, Ranks()), trainer_of(config, ranks)):
        with TemporaryDirectory() as folder:
            ema = StudentEma(EmaConfig(decay=0.5), trainer.weights(), folder=Path(folder), send=lambda _: None)
            for step in range(2):
                trainer.step(items_of(seed=step, top_k=False))
                ema.update(trainer.weights())
        averages.append(ema.state_dict())
    return {"average": difference(*averages)}


def of_a_resumed_optimizer(ranks: Ranks) -> dict[str, float]:
    """State saved by the group, whose moments are in host memory, and loaded by one rank, and the reverse; then a step
    of each."""
    alone = trainer_of(learner_config(**PLAIN), Ranks())
    together = trainer_of(learner_config(**PLAIN, moments="host"), ranks)
    for trainer in (alone, together):
        trainer.step(items_of(seed=0, top_k=False))
    alone_state, together_state = alone.state_dict(), whole_state(together)
    alone.load_state_dict(together_state)
    together.load_state_dict(alone_state)
    for trainer in (alone, together):
        trainer.step(items_of(seed=1, top_k=False))
    return {"after": difference(tensors_of(alone), tensors_of(together))}


def of_8_bits(ranks: Ranks) -> dict[str, float]:
    """As `of_a_resumed_optimizer`, with moments in 8 bits. Only the embedding is large enough for them."""
    add_torchao()
    config = learner_config(**PLAIN, optimizer="adamw8bit")
    alone, together = (trainer_of(config, one, vocab=1024) for one in (Ranks(), ranks))
    for trainer in (alone, together):
        trainer.step(items_of(seed=0, top_k=False))
    straight = difference(tensors_of(alone), tensors_of(together))
    alone_state, together_state = alone.state_dict(), whole_state(together)
    alone.load_state_dict(together_state)
    together.load_state_dict(alone_state)
    for trainer in (alone, together):
        trainer.step(items_of(seed=1, top_k=False))
    in_8_bits = [name for name in alone_state.tensors if name.startswith("exp_avg.codes/")]
    after = difference(tensors_of(alone), tensors_of(together))
    return {"straight": straight, "after": after, "none in 8 bits": float(len(in_8_bits) != 1)}


def of_items_as_bytes(_: Ranks) -> dict[str, float]:
    items = items_of(seed=0, top_k=True)
    read = load_items(dump_items(items[:4], items[4:]))
    wrong = 0
    for one, other in zip(items, [*read.items, *read.offline], strict=True):
        arrays = ("tokens_L", "behaviour_L", "train_mask_L", "teacher_ML", "payloads")
        wrong += one.item != other.item or any(
            getattr(one, name).dtype != getattr(other, name).dtype
            or not np.array_equal(getattr(one, name), getattr(other, name))
            for name in arrays
        )
    return {"items": float(wrong)}


@contextmanager
def gathered_bytes() -> Generator[list[int]]:
    """The bytes of each gather that FSDP asks of torch.distributed."""
    sizes: list[int] = []
    name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"  # before torch 2.13
    gather = getattr(dist, name)

    def noted(output: Tensor, *args: Any, **kwargs: Any) -> Any:
        sizes.append(output.nbytes)
        return gather(output, *args, **kwargs)

    setattr(dist, name, noted)
    try:
        yield sizes
    finally:
        setattr(dist, name, gather)


def of_gathered_bytes(ranks: Ranks) -> dict[str, float]:
    """With bfloat16 products layers are gathered in bfloat16, the rest in float32. One forward and one backward pass
    gather each parameter twice, unless every rank has all of them."""
    passes = 2 if ranks.mesh.shares > 1 else 0
    expected: dict[str, float] = {}
    for dtype, width in (("float32", 4), ("bfloat16", 2)):
        trainer = trainer_of(learner_config(**PLAIN, dtype=dtype), ranks, torch.float32)
        of_layers = sum(p.numel() for p in cast(Any, trainer.model).model.layers.parameters())
        rest = sum(p.numel() for p in trainer.model.parameters()) - of_layers
        with gathered_bytes() as sizes:
            trainer.gradient(items_of(seed=0, top_k=False)[:1])
        expected[dtype] = abs(sum(sizes) - passes * (width * of_layers + 4 * rest)) / (4 * of_layers)
    return expected


def of_peak_memory(ranks: Ranks) -> dict[str, float]:
    """How far the launcher's estimate is off, relative to what torch allocates on this rank."""
    found = (expected_and_measured("qwen3", {"dtype": dtype}, ranks) for dtype in ("float32", "bfloat16"))
    return {str(expected): abs(expected / measured - 1.0) for expected, measured in found}


FURTHER: Final[dict[str, Callable[[Ranks], dict[str, float]]]] = {
    "bad rollouts": of_bad_rollouts,
    "gradient not finite": of_gradient_that_is_not_finite,
    "half precision": of_half_precision,
    "average": of_average,
    "resumed": of_a_resumed_optimizer,
    "bytes": of_items_as_bytes,
    "gathered": of_gathered_bytes,
    "peak memory": of_peak_memory,
    **({"8 bits": of_8_bits} if THERE else {}),
}


def main(names: Sequence[str]) -> None:
    ranks = group_of(TIMEOUT_S)
    results: dict[str, dict[str, float]] = {}
    # Nothing is announced here: all ranks run this same program.
    ranks.announce = lambda *_: None  # type: ignore[method-assign,assignment]
    for name, settings in CASES.items():
        if not names or name in names:
            results[name] = of_steps(ranks, name, settings)
    for name, check in FURTHER.items():
        if not names or name in names:
            results[name] = check(ranks)
    ranks.close()
    print(json.dumps(results), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
