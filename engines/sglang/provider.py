"""Provider of SGLang: one server per worker, started by the launcher or named by the user. No torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from stillhouse.engines.config import ServerConfig, ServerLinkConfig, WorkerSettings
from stillhouse.engines.http.provider import ServerProvider
from stillhouse.engines.provider import AdapterFacts, AutoFacts, EngineRole, WithStudent, WithTeacher
from stillhouse.engines.sglang.config import SGLangConfig
from stillhouse.engines.sglang.servers import SGLangServers
from stillhouse.protocol.context import RoleContext
from stillhouse.protocol.payloads.expert_ids import REPORTS_EXPERTS
from stillhouse.protocol.payloads.hidden import HIDDEN_STATES
from stillhouse.protocol.payloads.kind import EngineNeed
from stillhouse.protocol.payloads.student_sets import REPORTS_KEPT, REPORTS_LIKELIEST, SCORES_GIVEN
from stillhouse.weights.config import WeightsConfig
from stillhouse.weights.roster import GroupMembers
from stillhouse.weights.sink import WeightSink

if TYPE_CHECKING:
    from stillhouse.engines.sglang.engine import SGLangEngine
    from stillhouse.engines.sglang.scorer import SGLangScorer

SERVERS: Final = SGLangServers()
ADAPTERS: Final = "adapters"
"""Folder of the copies that each actor's server loads, in the folder of the run or of the join."""


class SGLangProvider(ServerProvider):
    name = "sglang"
    title = "SGLang servers"
    servers = SERVERS
    takes_turns = True
    meets = (REPORTS_LIKELIEST, REPORTS_KEPT, REPORTS_EXPERTS, SCORES_GIVEN)

    def preload(self, role: EngineRole) -> tuple[str, ...]:
        adapters = ("stillhouse.engines.sglang.adapters",) if role == "actor" else ()
        return (*super().preload(role), *adapters)

    def lacks(self, need: EngineNeed) -> str:
        if need == HIDDEN_STATES:
            return "servers return hidden states as decimal numbers in JSON, 10 times the bytes (docs/teachers.md)"
        return super().lacks(need)

    def _engine(
        self, ctx: RoleContext[WithStudent], vocab_size: int, key: str, wake: Callable[[], None]
    ) -> SGLangEngine:
        from stillhouse.engines.sglang.engine import SGLangEngine

        own = self._link(ctx.config.actor, SGLangConfig)
        return SGLangEngine(
            ctx.server_url,
            own,
            vocab_size=vocab_size,
            run_id=ctx.run_id,
            api_key=key,
            on_output=wake,
            away=ctx.in_turns,
        )

    def _sink(self, ctx: RoleContext[WithStudent], engine: SGLangEngine) -> WeightSink:
        from stillhouse.engines.sglang.adapters import ServerAdapters
        from stillhouse.engines.sglang.weights import ServerWeights

        path = ctx.config.models.student
        if ctx.config.weights.adapters == "on":
            return ServerAdapters(engine, student=path, folder=ctx.run_dir / ADAPTERS / ctx.name)
        return ServerWeights(engine, student=path, ours=not ctx.config.actor.urls)

    def _scorer(self, ctx: RoleContext[WithTeacher], vocab_size: int, key: str) -> SGLangScorer:
        from stillhouse.engines.sglang.scorer import SGLangScorer

        own = self._link(ctx.config.teacher, ServerLinkConfig)
        return SGLangScorer(ctx.server_url, own, vocab_size=vocab_size, api_key=key, away=ctx.in_turns)

    def members(self, actor: WorkerSettings, weights: WeightsConfig, student: str) -> GroupMembers:
        """The launcher has already set `weights.adapters`."""
        if weights.adapters == "on":
            return GroupMembers(kind="adapters", check_by="off" if weights.verify == "off" else "canary")
        return super().members(actor, weights, student)

    def with_adapters(self, actor: WorkerSettings, query: AdapterFacts) -> ServerConfig | str:
        mode = actor.section(self.name, SGLangConfig).update_mode
        if mode in ("in_place", "retract"):
            return f"update_mode is {mode}, and a server cannot change the adapter of a request: use abort or keep"
        return SERVERS.with_adapters(actor, query)

    def needs_adapters(self, actor: WorkerSettings) -> str:
        keeps = actor.section(self.name, SGLangConfig).update_mode == "keep"
        return "actor.sglang.update_mode: got keep" if keeps else ""

    def fits(self, query: AutoFacts) -> tuple[bool, str]:
        if query.urls:
            return True, "urls are given"
        if query.in_process:
            return False, query.in_process
        return SERVERS.fits(query)


PROVIDER: Final = SGLangProvider()
