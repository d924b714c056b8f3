"""Provider of the embedded engine: the model in the worker's own process. No torch until it is started."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Literal, cast

from stillhouse.engines.config import GPU_PREFIX_CACHE_BYTES, EngineConfig, ScorerSettings, WorkerSettings, chunk_rows
from stillhouse.engines.provider import (
    ContextLimit,
    Device,
    EngineProvider,
    EngineRole,
    MemoryNeed,
    ModelShape,
    ScorerSource,
    Student,
    StudentSource,
    WithStudent,
    WithTeacher,
)
from stillhouse.models.description import BYTES, NF4_BYTES, resolve_dtype
from stillhouse.protocol.context import RoleContext
from stillhouse.protocol.handshake import vocab_tokens
from stillhouse.protocol.payloads.expert_ids import REPORTS_EXPERTS
from stillhouse.protocol.payloads.hidden import HIDDEN_STATES
from stillhouse.protocol.payloads.student_sets import MIXES_TEACHER, REPORTS_KEPT, REPORTS_LIKELIEST, SCORES_GIVEN
from stillhouse.weights.config import WeightsConfig
from stillhouse.weights.roster import GroupMembers

FROM_LOGITS: Final = 2.6
"""Logits and what is computed from them, relative to the logits."""


class TorchProvider(EngineProvider):
    name = "torch"
    title = "embedded"
    loads_model = True
    takes_turns = True
    meets = (REPORTS_LIKELIEST, REPORTS_KEPT, REPORTS_EXPERTS, MIXES_TEACHER, SCORES_GIVEN, HIDDEN_STATES)

    def preload(self, role: EngineRole) -> tuple[str, ...]:
        engine = (
            ("stillhouse.engines.torch.engine", "stillhouse.engines.torch.weights")
            if role == "actor"
            else ("stillhouse.engines.torch.scorer",)
        )
        return ("stillhouse.models.loading", "stillhouse.models.tokenizer", *engine)

    def student(self, ctx: RoleContext[WithStudent]) -> StudentSource:
        from stillhouse.engines.torch.engine import TorchEngine
        from stillhouse.engines.torch.weights import EmbeddedWeights
        from stillhouse.models.loading import load_causal_lm, resolve_device
        from stillhouse.models.tokenizer import load_tokenizer, stop_token_ids, token_map_fingerprint

        config, path = ctx.config.actor.section(self.name, EngineConfig), ctx.config.models.student
        tokenizer = load_tokenizer(path)

        def start(wake: Callable[[], None]) -> Student:
            device = resolve_device(config.device)
            dtype = resolve_dtype(config.dtype, device)
            mixed = ctx.config.mixed_teacher
            student, *teacher = (
                load_causal_lm(one, device="cpu", dtype=dtype, attention="sdpa") for one in (path, mixed) if one
            )
            engine = TorchEngine(student, config, teacher=teacher[0] if teacher else None)
            weights = EmbeddedWeights(engine, device=device)
            return Student(engine, weights, config.max_context)

        return StudentSource(tokenizer, token_map_fingerprint(tokenizer), stop_token_ids(path, tokenizer), start)

    def scorer(self, ctx: RoleContext[WithTeacher]) -> ScorerSource:
        from stillhouse.engines.torch.scorer import TorchScorer
        from stillhouse.models.tokenizer import load_tokenizer, token_map_fingerprint

        path = ctx.config.models.teacher
        tokenizer = load_tokenizer(path)
        return ScorerSource(
            token_map_fingerprint(tokenizer),
            vocab_tokens(tokenizer.get_vocab()),
            lambda: TorchScorer.load(path, ctx.config.teacher),
        )

    def members(self, actor: WorkerSettings, weights: WeightsConfig, student: str) -> GroupMembers:
        """The launcher has already decided `torch.dtype`, by the actors' devices."""
        own = actor.section(self.name, EngineConfig)
        return GroupMembers(dtype=resolve_dtype(own.dtype, own.device))

    def device(self, role: EngineRole, settings: WorkerSettings) -> Device:
        if role == "actor":
            return Device("torch.device", settings.section(self.name, EngineConfig).device)
        return Device("device", cast(ScorerSettings, settings).device)

    def context_limit(self, actor: WorkerSettings) -> ContextLimit:
        return ContextLimit("actor.torch.max_context", actor.section(self.name, EngineConfig).max_context)

    def reads_snapshots(self) -> bool:
        return True

    def memory(
        self, role: EngineRole, settings: WorkerSettings, shape: ModelShape, device: Literal["cpu", "cuda"]
    ) -> MemoryNeed:
        """Formulas: launch.checks.memory."""
        if role == "actor":
            engine = settings.section(self.name, EngineConfig)
            width = BYTES[resolve_dtype(engine.dtype, device)]
            cache = engine.max_concurrent * engine.max_context * shape.layers * 2 * shape.kv_width * width
            own = width * shape.parameters
            if device == "cuda":
                return MemoryNeed({"weights": own, "KV cache": cache}, {"next weights": own})
            packed = {"packed weights": own} if engine.fused else {}
            return MemoryNeed({"weights": own}, {"KV cache": cache, "next weights": own, **packed})
        teacher = cast(ScorerSettings, settings)
        width = BYTES[resolve_dtype(teacher.dtype, device)]
        block = teacher.max_batch_tokens * (10 * shape.hidden + 4 * shape.mlp) * width
        rows = min(chunk_rows(shape.vocabulary, device), teacher.max_batch_tokens)
        own = shape.quantized_bytes or width * shape.parameters
        likely = {"activations": block, "logits": FROM_LOGITS * 4 * rows * shape.vocabulary}
        if teacher.quantize != "none":  # and one layer's largest matrix as it is multiplied
            own = NF4_BYTES * (shape.parameters - shape.rest) + width * shape.rest
            likely["activations"] += width * shape.hidden * shape.mlp
        if teacher.prefix_cache_mb is not None:
            likely["prefix cache"] = teacher.prefix_cache_mb * 2**20
        elif device == "cuda":
            likely["prefix cache"] = GPU_PREFIX_CACHE_BYTES
        mapped = own == shape.dtype_bytes * shape.parameters  # as in the file, which all teachers map
        if device == "cpu" and mapped:
            return MemoryNeed({}, {"weights": own, **likely})
        return MemoryNeed({"weights": own}, likely)


PROVIDER: Final = TorchProvider()
