"""Estimates the memory that a run needs on each GPU, from config.json and the headers of the weights. No torch.

With P parameters, L layers, hidden size H, MLP size F, V rows of the vocabulary, in bytes:

learner         weights 4 P (float32); gradient and AdamW 12 P (none when frozen, or with adapters, whose are small);
                2 P more for a bfloat16 copy; staging 2 copies of P in the actors' dtype, unless they are
                in host memory (weights.staging); activations pack_tokens * L * (10 H + 4 F) * a with a = 2
                (bfloat16) or 4; of layers that compute them again (learner.recompute) pack_tokens * H * a, and
                those of one of them; logits 3 * logprob_chunk_tokens * V * 4; the output head of each teacher's
                model that sends hidden states, V * (its H) * a
                With learner.ranks = R each rank has 1 / R of weights, gradient, AdamW and staging
embedded actor  weights P * b, and as much for the next version, b of actor.torch.dtype; KV cache, allocated at once:
                max_concurrent * max_context * L * 2 * KV heads * head size * b
embedded        weights P * b, activations of one layer max_batch_tokens * (10 H + 4 F) * b, logits in chunks of
teacher         512 MiB in float32: 1.3 GiB with what is computed from them
server          weights P * b / tp, b of config.json; KV cache: what --mem-fraction-static leaves, 0.85 of the GPU
                by default (SGLang chooses about that)
each process    1 GiB: the CUDA context, libraries and fragments

10 H + 4 F per token and layer counts what a transformer block with a gated MLP keeps for its backward pass (inputs of
two norms and of the projections, q, k, v and the output of attention; gate, up, their product and the activation),
without attention scores, which fused kernels do not keep (as in Korthikanti et al. 2022, arXiv:2205.05198, for GELU).
Mixtures of experts, adapters, value heads, averages, and the overhead of several processes on a GPU are not counted.
The `sure` part (weights, gradient, moments, KV cache of embedded actors) is a lower bound, and a run without room for
it is refused. The rest may be off by half, and is only reported."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, cast

from engines.provider import ModelShape
from launch.checks.model_files import check_weights
from launch.checks.placement import Placement
from launch.config.hidden_states import state_bytes
from launch.config.pools import WorkerGroup, engine_of, teacher_pools, worker_groups
from launch.config.run import RunConfig
from launch.machine.gpus import LEARNER, RANK
from launch.machine.machine import Machine
from launch.servers.plan import launched_groups
from models.description import BYTES, vocabulary_size
from weights.config import sent_dtype, staged_in

GIB: Final = 2**30
PROCESS_GIB: Final = 1.0


class Need(NamedTuple):
    """Memory that one process needs on one GPU, in GiB."""

    who: str
    sure: Mapping[str, float]
    likely: Mapping[str, float]

    @property
    def total(self) -> float:
        return sum(self.sure.values()) + sum(self.likely.values())

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {gib:.1f}" for name, gib in {**self.sure, **self.likely}.items() if gib >= 0.05)
        return f"{self.who} {self.total:.1f} ({parts})"


class Memory(NamedTuple):
    """The estimate of a run."""

    lines: list[str]
    """A line to print per GPU in use."""
    mistakes: list[str]


def read_shape(folder: Path) -> ModelShape | None:
    """None if there are no safetensors files, or config.json lacks something."""
    parameters = check_weights("", folder).parameters
    content = cast(dict[str, Any], json.loads((folder / "config.json").read_text(encoding="utf-8")))
    text = {**content, **cast(dict[str, Any], content.get("text_config") or {})}
    try:
        heads = int(text["num_attention_heads"])
        head = int(text.get("head_dim") or text["hidden_size"] // heads)
        return (
            ModelShape(
                parameters=parameters,
                layers=int(text["num_hidden_layers"]),
                hidden=int(text["hidden_size"]),
                mlp=int(text["intermediate_size"]),
                vocabulary=vocabulary_size(folder),
                kv_width=int(text.get("num_key_value_heads") or heads) * head,
                dtype_bytes=BYTES.get(str(text.get("dtype") or text.get("torch_dtype")), 2),
            )
            if parameters
            else None
        )
    except (KeyError, TypeError, ValueError):
        return None


def learner_need(config: RunConfig, shape: ModelShape, backend: Literal["gloo", "nccl"], rank: int = 0) -> Need:
    learner = config.learner
    p = shape.parameters
    share = p / learner.ranks
    trained = 0 if learner.frozen or learner.lora.rank else p
    members = engine_of(config, "actor").members(config.actor, config.weights, config.models.student)
    sent = BYTES.get(sent_dtype(config.weights.dtype, members.dtype), 4)
    on_gpu = staged_in(config.weights.staging, "cuda", backend) == "device"
    width = 4 if learner.dtype == "float32" else 2
    per_layer = 10 * shape.hidden + 4 * shape.mlp
    again = int(shape.layers * learner.recompute)
    in_layers = (shape.layers - again) * per_layer + again * shape.hidden + (per_layer if again else 0)
    kept = learner.pack_tokens * in_layers * width
    sure = {"weights": 4 * share, "gradient and AdamW": 12 * trained / learner.ranks}
    likely = {
        "weights in bfloat16": 2 * p if width == 2 else 0,
        "staging": 2 * sent * share if on_gpu else 0,
        "activations": kept,
        "logits": 3 * 4 * learner.logprob_chunk_tokens * shape.vocabulary,
    }
    if heads := _head_bytes(config, shape, width):
        likely["teachers' heads"] = heads
    return _need(f"{RANK}{rank}" if rank else LEARNER, sure, likely)


def _head_bytes(config: RunConfig, shape: ModelShape, width: int) -> float:
    """Output heads of the models whose teachers send hidden states. Their vocabulary is the student's."""
    pools = [pool for pool in teacher_pools(config) if pool.config.teacher.payload == "hidden"]
    by_model = {pool.config.models.teacher: state_bytes(pool) or 0 for pool in pools}
    return sum(each / 2 * shape.vocabulary * width for each in by_model.values())


def worker_need(group: WorkerGroup, shape: ModelShape, who: str) -> Need:
    return _need(who, *group.engine.memory(group.role, group.settings, shape))


def server_need(group: WorkerGroup, shape: ModelShape, who: str, gib: float) -> Need:
    return _need(who, *group.servers.memory(group.settings.server, shape, gib * GIB))


def _need(who: str, sure: Mapping[str, float], likely: Mapping[str, float]) -> Need:
    return Need(
        who,
        {name: n / GIB for name, n in sure.items()},
        {name: n / GIB for name, n in likely.items()} | {"process": PROCESS_GIB},
    )


def estimate(config: RunConfig, machine: Machine, placement: Placement) -> Memory:
    """`config`: models are folders. The result is empty if no GPU is used, or its memory is unknown."""
    lines: list[str] = []
    mistakes: list[str] = []
    needs: dict[int, list[Need]] = {}
    for gpu, need in _needs(config, machine, placement) if machine.gib else ():
        needs.setdefault(gpu, []).append(need)
    for gpu, here in sorted(needs.items()):
        gib, total, sure = machine.gib[gpu], sum(need.total for need in here), sum(sum(n.sure.values()) for n in here)
        line = f"GPU {machine.gpus[gpu]}: about {total:.1f} of {gib:g} GiB: {'; '.join(map(str, here))}"
        lines.append(line + ("" if total <= gib else " - more than it has, by this estimate"))
        if sure > gib:
            mistakes.append(
                f"GPU {machine.gpus[gpu]}: got {', '.join(need.who for need in here)} with at least {sure:.1f} GiB, "
                f"expected at most its {gib:g} GiB, in GiB: {'; '.join(map(str, here))}. Use fewer roles per GPU, "
                "a larger tp, learner.lora.rank, or a smaller model"
            )
    return Memory(lines, mistakes)


def _needs(config: RunConfig, machine: Machine, placement: Placement) -> Iterator[tuple[int, Need]]:
    """Yield (GPU, need of one process there). Models of unknown shape are left out."""
    seats = {who: gpu for who, gpu in placement.places.seats.items() if gpu is not None}
    shape_of = functools.cache(read_shape)  # reads the headers of all weights
    if LEARNER in seats and (student := shape_of(Path(config.models.student))) is not None:
        for rank in range(config.learner.ranks):
            gpu = seats[f"{RANK}{rank}" if rank else LEARNER]
            yield gpu, learner_need(config, student, placement.weights.backend, rank)
    for group in worker_groups(config):
        here = [who for who in group.workers if who in seats]
        if here and (shape := shape_of(Path(group.model))) is not None:
            yield from ((seats[who], worker_need(group, shape, who)) for who in here)
    for group in launched_groups(config):
        servers = placement.places.servers.get(group.key, ())
        if servers and (shape := shape_of(Path(group.model))) is not None:
            for who, gpus in zip(group.workers, servers, strict=True):
                yield from ((gpu, server_need(group, shape, f"server-{who}", machine.gib[gpu])) for gpu in gpus)
