"""Provider of vLLM: one server per worker, started by the launcher. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final

from stillhouse.engines.config import ServerLinkConfig, StudentLinkConfig
from stillhouse.engines.http.provider import ServerProvider
from stillhouse.engines.provider import EngineRole, WithStudent, WithTeacher
from stillhouse.engines.vllm.servers import VLLMServers
from stillhouse.protocol.context import RoleContext
from stillhouse.protocol.payloads.student_sets import REPORTS_LIKELIEST
from stillhouse.protocol.settings import Settings
from stillhouse.weights.sink import WeightSink

if TYPE_CHECKING:
    from stillhouse.engines.vllm.engine import VLLMEngine
    from stillhouse.engines.vllm.scorer import VLLMScorer


class VLLMProvider(ServerProvider):
    name = "vllm"
    title = "vLLM servers"
    servers = VLLMServers()
    meets = (REPORTS_LIKELIEST,)
    options: Mapping[EngineRole, type[Settings]] = {"actor": StudentLinkConfig, "teacher": ServerLinkConfig}

    def _engine(self, ctx: RoleContext[WithStudent], vocab_size: int, key: str, wake: Callable[[], None]) -> VLLMEngine:
        from stillhouse.engines.vllm.engine import VLLMEngine

        own = self._link(ctx.config.actor, StudentLinkConfig)
        return VLLMEngine(ctx.server_url, own, vocab_size=vocab_size, run_id=ctx.run_id, api_key=key, on_output=wake)

    def _sink(self, ctx: RoleContext[WithStudent], engine: VLLMEngine) -> WeightSink:
        from stillhouse.engines.vllm.weights import VLLMWeights

        return VLLMWeights(engine, student=ctx.config.models.student)

    def _scorer(self, ctx: RoleContext[WithTeacher], vocab_size: int, key: str) -> VLLMScorer:
        from stillhouse.engines.vllm.scorer import VLLMScorer

        own = self._link(ctx.config.teacher, ServerLinkConfig)
        return VLLMScorer(ctx.server_url, own, vocab_size=vocab_size, api_key=key)


PROVIDER: Final = VLLMProvider()
