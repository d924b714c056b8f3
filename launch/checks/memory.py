"""Estimates the memory that a run needs on each GPU and on the host, from config.json and the headers of the weights.
No torch.

With P parameters, L layers, hidden size H, MLP size F, Q and K the widths of all query and of all key heads, V rows of
the vocabulary, E parameters of embedding and head, T = pack_tokens, C = logprob_chunk_tokens, R the shares into which a
parameter is divided (learner.ranks / learner.replicas), in bytes:

learner         weights 4 P / R (float32), gradient 4 P / R, moments 8 P / R or what learner.optimizer has, on the GPU
                or the host (learner.moments). Frozen: only weights. With adapters and bfloat16 products
                2 (P - E) / R + 3 E / R, or 4 E / R if the head is tied, and what the adapters need, which is small. In
                4 bits (learner.lora.quantize) 0.516 (P - E), and one matrix of H F as it is multiplied
                bfloat16 copies of weights that autocast keeps: 2 P, without those of a tied embedding (one rank only)
                gathered: 2 layers and their gradient, embedding and head and their gradient (several ranks only)
                staging: 2 copies of P / R in the actors' dtype, on the GPU or the host (weights.staging)
                buckets, by ipc, or by NCCL from copies in host memory or of several ranks: on the first rank 2 of
                weights.bucket_bytes, or for servers and by ipc of the embedding if that is larger
                activations: T * L * a, with a per layer and token
                    float32    4 (4 F + 6 H + 2 Q + 2 K), with norms of queries and keys 8 (Q + K) more
                    bfloat16   8 F + 26 H + 4 Q + 4 K, with such norms 10 (Q + K) more
                    under frozen weights 8 H less, and in float32 4 (Q + K) less with such norms
                and 16 T H outside the layers. With ranks that divide sequences (learner.context_parallel) T is what one
                of them has; a layer keeps 2 K per token of `pack_tokens`, the keys and values of all, in place of 2 K
                per own token, and Q more per own token, times 4 or 2 bytes. Layers that compute theirs again
                (learner.recompute) keep 4 T H each, and one of them has its own again, but then the logits are gone.
                Where a batch surely is one pack, the gradient is not there yet when activations are most: less by it
                logits: 2 * 4 C V (C: no more tokens than a rank has); and the head's gradient, 2 * 4 V H, unless it is
                frozen
                teachers' heads: that of each model whose teachers send hidden states, V * (its H) * (2 or 4)
embedded actor  weights P * b, and as much for the next version, b of actor.torch.dtype; KV cache, on a GPU allocated
                at once, on the host as requests grow: max_concurrent * max_context * L * 2 * K * b; on the host P * b
                for packed weights (actor.torch.fused)
embedded        weights P * b, on the host shared where the file is as wide; with teacher.quantize = nf4
teacher         0.516 (P - E) + E * b, and one matrix of H F b as it is multiplied; activations of one layer
                max_batch_tokens * (10 H + 4 F) * b; logits 2.6 * 4 V * (rows of 512 MiB in float32, on the host of
                64 MiB, or max_batch_tokens); on a GPU the prefix cache, 4 GiB or teacher.prefix_cache_mb
server          launch.checks.server_memory and the engine's own formula (`SGLangServers.memory`): weights P * b / tp,
                b of --dtype, else 2, in layers of --quantization; a quantized checkpoint's files; KV cache; a prefill's
                activations; logits; CUDA graphs
in turns        (launch.share) the largest of these on a GPU, and what stays of the others: their processes, copies that
                are sent, teachers' heads. Weights, and moments unless it is there anyway, are on the host between turns
each process    1 GiB on a GPU: the CUDA context, libraries and fragments; FORKED_GIB on the host, and IMPORTED_GIB once
                for what all processes share, being forked from one that has imported torch

The learner's terms count the tensors that autograd keeps. tests/learner/step/test_peak_memory.py holds them against
what torch allocates in a step, within 15 %, for each kind of line above. Attention scores are not kept by fused
kernels. Value heads, averages, payloads of teachers, and routing in mixtures of experts are not counted.

The `sure` part (weights, gradient, moments, on a GPU the KV cache of embedded actors) is a lower bound, and a run
without room for it is refused; on a GPU also one whose whole estimate is more than 15 % too large. A host's memory is
taken as it is used, and the estimate is what may be used at most: a run that it exceeds is warned of."""

from __future__ import annotations

import functools
import json
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, cast

import msgspec

from stillhouse.engines.provider import ModelShape
from stillhouse.launch.checks.model_files import check_weights
from stillhouse.launch.checks.placement import Placement
from stillhouse.launch.checks.server_memory import GIB, PROCESS_GIB, STAYS, size_servers
from stillhouse.launch.config.payloads import sizes_of
from stillhouse.launch.config.pools import WorkerGroup, engine_of, teacher_pools, worker_groups
from stillhouse.launch.config.run import RunConfig
from stillhouse.launch.machine.gpus import LEARNER, RANK
from stillhouse.launch.machine.machine import Machine
from stillhouse.models.description import BYTES, CHOSEN_EXPERTS, NF4_BYTES, resolve_dtype, vocabulary_size
from stillhouse.models.safetensors_header import weight_files
from stillhouse.weights.config import Place, bucket_size, sent_dtype, staged_in

replace = msgspec.structs.replace

IMPORTED_GIB: Final = 0.3
FORKED_GIB: Final = 0.05
HOST: Final = -1
"""Where processes are that have no GPU."""
GATHERS: Final = 5
"""Keys and values of all tokens that a layer has at once in its backward pass: gathered, and their gradients."""
ROOMY: Final = 0.1
"""Share of a GPU that all roles share, which copies of the weights may take."""
MARGIN: Final = 0.15
"""How far the whole estimate may be off on a GPU."""
TIGHT: Final = "more than it has, by this estimate"
"""What a line ends with that is a warning."""
QK_NORM: Final = ("qwen3", "gemma3", "olmo2", "olmo3")
"""Beginnings of the model types whose queries and keys have norms."""
ADVICE: Final[Mapping[tuple[str, str], str]] = {
    ("learner", "weights"): "learner.ranks",
    ("learner", "gradient"): "learner.ranks or learner.lora.rank",
    ("learner", "moments"): "learner.optimizer = adamw8bit, learner.moments = host, learner.ranks or learner.lora.rank",
    ("learner", "staging"): "weights.staging = host or weights.dtype = bfloat16",
    (
        "learner",
        "activations",
    ): "learner.recompute = 1, a smaller learner.pack_tokens or a larger learner.context_parallel",
    ("learner", "logits"): "a smaller learner.logprob_chunk_tokens",
    ("actor", "weights"): "fewer roles there, or servers with a larger tp",
    ("actor", "next weights"): "fewer roles there, or servers with a larger tp",
    ("actor", "packed weights"): "actor.torch.fused = false",
    ("actor", "KV cache"): "a smaller actor.torch.max_concurrent or actor.torch.max_context",
    ("teacher", "weights"): "fewer roles there, or servers with a larger tp",
    ("teacher", "activations"): "a smaller teacher.max_batch_tokens",
    ("teacher", "prefix cache"): "a smaller teacher.prefix_cache_mb",
    ("server", "weights"): "fewer roles there, or servers with a larger tp",
    ("server", "KV cache"): "a smaller --mem-fraction-static or --max-total-tokens in its args",
    ("server", "logits"): "a smaller --chunked-prefill-size in its args",
}
"""(role, part) -> what makes it smaller."""
ADVICE_ON_HOST: Final[Mapping[tuple[str, str], str]] = {
    ("learner", "weights"): "",
    ("learner", "gradient"): "learner.lora.rank",
    ("learner", "moments"): "learner.optimizer = adamw8bit or learner.lora.rank",
    ("learner", "staging"): "weights.dtype = bfloat16",
}
"""Where this differs: ranks on one host share its memory."""


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
    arguments: dict[str, tuple[str, ...]]
    """Worker -> what its server must be told, where it shares a GPU."""

    @property
    def too_large(self) -> tuple[int, int]:
        """How many refusals and warnings there are."""
        return len(self.mistakes), sum(line.endswith(TIGHT) for line in self.lines)


def read_shape(folder: Path) -> ModelShape | None:
    """Without safetensors files the parameters are counted from config.json. None if that lacks something."""
    parameters = check_weights("", folder).parameters
    try:
        content = cast(dict[str, Any], json.loads((folder / "config.json").read_text(encoding="utf-8")))
        shape = shape_of(content, parameters or _counted(folder), vocabulary_size(folder))
        files = weight_files(folder) if content.get("quantization_config") else ()
        return shape._replace(quantized_bytes=float(sum(file.stat().st_size for file in files)))
    except (OSError, KeyError, TypeError, ValueError):
        return None


def _counted(folder: Path) -> int:
    """Parameters of the model that config.json describes, by transformers, which takes seconds to load."""
    import torch

    from stillhouse.models.loading import load_config, outline

    with torch.device("meta"):
        return sum(parameter.numel() for parameter in outline(load_config(str(folder))).parameters())


def shape_of(content: Mapping[str, Any], parameters: int, vocabulary: int) -> ModelShape:
    """`content`: of config.json. Raises KeyError, TypeError or ValueError if it lacks something."""
    text = {**content, **cast(dict[str, Any], content.get("text_config") or {})}
    heads = int(text["num_attention_heads"])
    head = int(text.get("head_dim") or text["hidden_size"] // heads)
    experts = next((int(text[name]) for name in CHOSEN_EXPERTS if text.get(name)), 0)
    of_expert = text.get("moe_intermediate_size") or text["intermediate_size"] if experts else 0
    mlp = experts * int(of_expert) if experts else int(text["intermediate_size"])
    return ModelShape(
        parameters=parameters,
        layers=int(text["num_hidden_layers"]),
        hidden=int(text["hidden_size"]),
        mlp=mlp,
        vocabulary=vocabulary,
        q_width=heads * head,
        kv_width=int(text.get("num_key_value_heads") or heads) * head,
        qk_norm=str(text.get("model_type")).startswith(QK_NORM),
        tied=bool(text.get("tie_word_embeddings", False)),
        dtype_bytes=BYTES.get(str(text.get("dtype") or text.get("torch_dtype")), 2),
    )


def learner_need(
    config: RunConfig, shape: ModelShape, backend: Literal["gloo", "nccl"], rank: int = 0, device: str = "cuda"
) -> Need:
    """What one rank needs on its device, `cuda` or `cpu`."""
    learner, shares = config.learner, config.learner.ranks // config.learner.replicas
    p, e, h, v = shape.parameters, shape.rest, shape.hidden, shape.vocabulary
    half = resolve_dtype(learner.dtype, device) == "bfloat16"
    adapters = learner.lora.rank > 0
    trained = not learner.frozen and not adapters
    moments, staging = _movable(config, shape)
    of_layer = (p - e) / shape.layers
    in_half, nf4 = adapters and half, learner.lora.quantize != "none"
    each, of_rest = (2, 4 if shape.tied else 3) if in_half else (4, 4)
    sure = {
        "weights": ((NF4_BYTES if nf4 else each) * (p - e) + of_rest * e) / shares,
        "gradient": 4 * p / shares if trained else 0.0,
        "moments": moments if device == "cpu" or learner.moments == "device" else 0.0,
    }
    process_gib = PROCESS_GIB if device == "cuda" else FORKED_GIB
    on_host = device != "cpu" and staged_in(config.weights, device, backend) == "host"
    staging = 0.0 if on_host else staging
    gathers = backend == "nccl" and (on_host or learner.ranks > 1)
    buckets = _bucket_bytes(config, shape) if rank == 0 and (gathers or config.weights.way == "ipc") else 0.0
    if learner.frozen:
        return _need(LEARNER, sure, {"staging": staging, "buckets": buckets}, process_gib)
    width = 2 if half else 4
    copies = 2 * (p - (e if shape.tied and not half else e / 2)) if half and not in_half else 0.0
    gathered = 2 * of_layer * width + of_layer * width * trained + 4 * e * (1 + trained) if learner.ranks > 1 else 0.0
    kept, once = _activations(config, shape, half=half)
    if _one_pack(config):  # the gradient then grows while activations go
        kept = max(0.0, kept - sure["gradient"])
    chunk = min(learner.logprob_chunk_tokens, learner.pack_tokens // learner.context_parallel)
    logits = 2 * 4 * chunk * v + (2 * 4 * v * h if trained else 0)
    likely = {
        "bfloat16 copies": copies if learner.ranks == 1 else 0.0,
        "gathered": gathered,
        "staging": staging,
        "buckets": buckets,
        "activations": kept + max(0.0, once - logits) + (width * h * shape.mlp if nf4 else 0.0),
        "logits": logits,
        "teachers' heads": _head_bytes(config, shape, width),
    }
    return _need(f"{RANK}{rank}" if rank else LEARNER, sure, likely, process_gib)


def learner_host_need(config: RunConfig, shape: ModelShape, backend: Literal["gloo", "nccl"], rank: int = 0) -> Need:
    """What one rank that is on a GPU keeps in host memory."""
    moments, staging = _movable(config, shape)
    return _need(
        f"{RANK}{rank}" if rank else LEARNER,
        {"moments": moments if config.learner.moments == "host" else 0.0},
        {"staging": staging if staged_in(config.weights, "cuda", backend) == "host" else 0.0},
        FORKED_GIB,
    )


def _movable(config: RunConfig, shape: ModelShape) -> tuple[float, float]:
    """Bytes of a rank's moments and of its copies that are sent, wherever they are."""
    learner = config.learner
    part, kind = learner.replicas / learner.ranks, learner.optimizer
    moments = kind.matrix_bytes * (shape.parameters - shape.rest) + kind.table_bytes * shape.rest
    copies = 2 * _sent_bytes(config) * shape.parameters * part
    return 0.0 if learner.frozen or learner.lora.rank else moments * part, copies


def _sent_bytes(config: RunConfig) -> int:
    """Bytes that a parameter takes where it is sent."""
    members = engine_of(config, "actor").members(config.actor, config.weights, config.models.student)
    return BYTES.get(sent_dtype(config.weights.dtype, members.dtype), 4)


def _bucket_bytes(config: RunConfig, shape: ModelShape) -> float:
    """Memory through which versions go that are not sent in place. Those of a process group for embedded engines cut
    through tensors; else the largest tensor is in one, which is the embedding."""
    width, bucket = _sent_bytes(config), bucket_size(config.weights.bucket_bytes, "cuda")
    if config.weights.way == "ipc" or engine_of(config, "actor").servers is not None:
        bucket = max(bucket, width * shape.vocabulary * shape.hidden)
    return min(2 * bucket, width * shape.parameters)


def staged(config: RunConfig, machine: Machine, placement: Placement) -> RunConfig:
    """With weights.staging decided, where it is auto: on the GPU, from which a version is sent without a stop, if that
    leaves the other roles there their room, else in host memory. gloo and encrypted connections send from the host."""
    gpu, shape = placement.places.seats[LEARNER], read_shape(Path(config.models.student))
    shared = config.weights.way == "ipc" or placement.weights.shared
    if config.weights.staging != "auto" or gpu is None or not (shared or placement.weights.backend == "nccl"):
        return config
    room = machine.gib[gpu] * ROOMY * GIB if machine.gib else 0.0
    small = not shared or (shape is not None and _movable(config, shape)[1] <= room)
    places: tuple[Place, ...] = ("device", "host") if small else ("host",)
    found = [replace(config, weights=replace(config.weights, staging=place)) for place in places]
    return min(found, key=lambda one: estimate(one, machine, placement).too_large)


def _activations(config: RunConfig, shape: ModelShape, *, half: bool) -> tuple[float, float]:
    """What is kept until the backward pass, and what a layer that computes again needs there."""
    learner, width = config.learner, 2 if half else 4
    tokens = learner.pack_tokens / learner.context_parallel
    f, h, q, k = shape.mlp, shape.hidden, shape.q_width, shape.kv_width
    layer = 8 * f + 26 * h + 4 * (q + k) if half else 4 * (4 * f + 6 * h + 2 * (q + k))
    if shape.qk_norm:
        layer += (10 if half else 8) * (q + k)
    if learner.lora.rank:
        layer -= 8 * h + (4 * (q + k) if shape.qk_norm and not half else 0)
    of_all = 0.0
    if learner.context_parallel > 1:
        layer += width * (q - 2 * k)
        of_all = 2 * width * k * learner.pack_tokens
    again = int(shape.layers * learner.recompute)
    kept = tokens * ((shape.layers - again) * layer + again * 4 * h + 16 * h) + (shape.layers - again) * of_all
    return kept, tokens * layer + GATHERS * of_all if again else 0.0


def _one_pack(config: RunConfig) -> bool:
    """Whether a batch surely is one pack, so that no gradient is there yet when activations are most."""
    learner = config.learner
    longest = learner.tasks.max_prompt_tokens + learner.tasks.max_new_tokens
    alone = learner.ranks == 1 and learner.offline.student_fraction == 1.0
    return alone and config.buffer.batch_rollouts * longest <= learner.pack_tokens


def _head_bytes(config: RunConfig, shape: ModelShape, width: int) -> float:
    """Output heads of the models whose teachers' payloads need them. Their vocabulary is the student's."""
    pools = [pool for pool in teacher_pools(config) if pool.config.teacher.sends.needs_head]
    by_model = {pool.config.models.teacher: sizes_of(pool, None).hidden or 0 for pool in pools}
    return float(sum(hidden * shape.vocabulary * width for hidden in by_model.values()))


def worker_need(
    group: WorkerGroup, shape: ModelShape, who: str, place: int = 0, mixed: ModelShape | None = None
) -> Need:
    """`place`: a GPU, or HOST. `mixed`: the teacher that an actor mixes with, whose weights never change."""
    device = "cpu" if place == HOST else "cuda"
    sure, likely = group.engine.memory(group.role, group.settings, shape, device)
    if mixed is not None:
        of_teacher = group.engine.memory(group.role, group.settings, mixed, device)
        sure = {**sure, **{f"teacher's {part}": n for part, n in of_teacher.sure.items()}}
        more = {f"teacher's {part}": n for part, n in of_teacher.likely.items() if part != "next weights"}
        likely = {**likely, **more}
    return _need(who, sure, likely, FORKED_GIB if place == HOST else PROCESS_GIB)


def _need(who: str, sure: Mapping[str, float], likely: Mapping[str, float], process_gib: float = PROCESS_GIB) -> Need:
    return Need(
        who,
        {name: n / GIB for name, n in sure.items()},
        {name: n / GIB for name, n in likely.items()} | {"process": process_gib},
    )


def estimate(config: RunConfig, machine: Machine, placement: Placement) -> Memory:
    """`config`: models are folders. GPUs and hosts whose memory is unknown are left out, and servers on CPUs."""
    lines: list[str] = []
    mistakes: list[str] = []
    needs: dict[int, list[Need]] = {}
    shape_at = functools.cache(read_shape)
    for place, need in _needs(config, placement, shape_at):
        needs.setdefault(place, []).append(need)
    taken = _stays if config.launch.share == "turns" else operator.attrgetter("total")
    embedded = {place: sum(map(taken, here)) * GIB for place, here in needs.items() if place != HOST}
    sized = size_servers(config, placement.places, machine.gib, embedded, shape_at)
    for gpu, worker, need in sized.needs:
        of_server = _need(f"server-{worker}", *need)
        needs.setdefault(gpu, []).append(of_server)
        for place, on_host in _parked(config, of_server):
            needs.setdefault(place, []).append(on_host)
    if HOST in needs:
        needs[HOST].append(Need("shared", {}, {"imports": IMPORTED_GIB}))
    for place, here in sorted(needs.items()):
        gib = machine.host_gib if place == HOST else machine.gib[place] if machine.gib else 0.0
        if not gib:
            continue
        name = "host" if place == HOST else f"GPU {machine.gpus[place]}"
        total, sure, how = sum(need.total for need in here), sum(sum(n.sure.values()) for n in here), ""
        listed = here
        if config.launch.share == "turns" and place != HOST:
            largest, stays = _largest_turn(here)
            total, sure, listed = largest.total + stays, sum(largest.sure.values()), [largest]
            how = f", in turns, of which {stays:.1f} is what stays of the others"
        line = f"{name}: about {total:.1f} of {gib:.4g} GiB{how}: {_table(here)}"
        lines.append(line if total <= gib else f"{line}. {_advice(listed, place)} - {TIGHT}")
        if sure > gib or (place != HOST and total > gib * (1.0 + MARGIN)):
            least = f"at least {sure:.1f}" if sure > gib else f"about {total:.1f}"
            mistakes.append(
                f"{name}: got {least} GiB, expected at most its {gib:.4g} GiB, in GiB{how}: {_table(listed)}. "
                f"{_advice(listed, place)}"
            )
    return Memory(lines, mistakes or sized.mistakes, sized.arguments)


def _largest_turn(needs: Sequence[Need]) -> tuple[Need, float]:
    """The role whose turn takes most of a device that they share in turns, and GiB of the others that stay there."""
    largest = max(needs, key=lambda need: need.total - _stays(need))
    return largest, sum(map(_stays, needs)) - _stays(largest)


def _stays(need: Need) -> float:
    """GiB of a role that stay on a device when the turn is another's."""
    return sum(gib for part, gib in need.likely.items() if part in STAYS)


def _table(needs: Sequence[Need]) -> str:
    """The needs, with those of a role that are alike in one entry."""
    alike: dict[tuple[str, str], list[Need]] = {}
    for need in needs:
        alike.setdefault((_role(need), str(need._replace(who=""))), []).append(need)
    return "; ".join(
        str(n[0]) if len(n) == 1 else str(n[0]._replace(who=f"{n[0].who} to {n[-1].who}, each")) for n in alike.values()
    )


def _role(need: Need) -> str:
    return re.split("[- ]", need.who)[0]


def _advice(needs: Sequence[Need], place: int) -> str:
    known = {**ADVICE, **ADVICE_ON_HOST} if place == HOST else ADVICE
    helped: dict[str, float] = {}
    for need in needs:
        for part, gib in {**need.sure, **need.likely}.items():
            if gib and (advice := known.get((_role(need), part))):
                helped[advice] = helped.get(advice, 0.0) + gib
    largest = sorted(helped, key=lambda advice: -helped[advice])[:2]
    return f"Use {', or '.join([*largest, 'a smaller model'])}"


def _needs(
    config: RunConfig, placement: Placement, shape_at: Callable[[Path], ModelShape | None]
) -> Iterator[tuple[int, Need]]:
    """Yield (GPU or HOST, need of one process there), without servers. Models of unknown shape are left out."""
    seats = {who: HOST if gpu is None else gpu for who, gpu in placement.places.seats.items()}
    if LEARNER in seats and (student := shape_at(Path(config.models.student))) is not None:
        for rank in range(config.learner.ranks_each):
            place = seats[f"{RANK}{rank}" if rank else LEARNER]
            device = "cpu" if place == HOST else "cuda"
            yield place, learner_need(config, student, placement.weights.backend, rank, device)
            if place != HOST:
                on_host = learner_host_need(config, student, placement.weights.backend, rank)
                if on_host.total > FORKED_GIB:
                    yield HOST, on_host
                yield from _parked(config, learner_need(config, student, placement.weights.backend, rank, device))
    for group in worker_groups(config):
        here = [who for who in group.workers if who in seats]
        if here and (shape := shape_at(Path(group.model))) is not None:
            mixed = shape_at(Path(config.mixed_teacher)) if group.role == "actor" and config.mixed_teacher else None
            for need in (worker_need(group, shape, who, seats[who], mixed) for who in here):
                yield seats[need.who], need
                if seats[need.who] != HOST:
                    yield from _parked(config, need)


def _parked(config: RunConfig, need: Need) -> Iterator[tuple[int, Need]]:
    """What a role on a GPU has in host memory while the turn is another's."""
    if config.launch.share == "turns":
        leaves = {part: need.sure[part] for part in ("weights", "moments") if need.sure.get(part)}
        yield HOST, Need(need.who, {}, {f"{part} between turns": gib for part, gib in leaves.items()})
