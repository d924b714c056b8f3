"""Provider of SGLang: one server per worker, started by the launcher or named by the user. No torch."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Final, TypeVar

import msgspec

from stillhouse.engines.config import ServerConfig, ServerLinkConfig, WorkerSettings
from stillhouse.engines.provider import (
    API_KEY_VARIABLE,
    AdapterFacts,
    AutoFacts,
    EngineProvider,
    EngineRole,
    ScorerSource,
    Student,
    StudentSource,
    WithStudent,
    WithTeacher,
    record_server,
)
from stillhouse.engines.sglang.config import SGLangConfig
from stillhouse.engines.sglang.servers import SGLangServers
from stillhouse.protocol.context import RoleContext
from stillhouse.protocol.handshake import vocab_tokens
from stillhouse.protocol.payloads.expert_ids import REPORTS_EXPERTS
from stillhouse.protocol.payloads.hidden import HIDDEN_STATES
from stillhouse.protocol.payloads.kind import EngineNeed
from stillhouse.protocol.payloads.student_sets import REPORTS_KEPT, REPORTS_LIKELIEST, SCORES_GIVEN
from stillhouse.weights.config import WeightsConfig, checkpoint_dtype, server_dtype
from stillhouse.weights.roster import CheckBy, GroupMembers

SERVERS: Final = SGLangServers()
ADAPTERS: Final = "adapters"
"""Folder of the copies that each actor's server loads, in the folder of the run or of the join."""
LinkT = TypeVar("LinkT", bound=ServerLinkConfig)


class SGLangProvider(EngineProvider):
    name = "sglang"
    title = "SGLang servers"
    servers = SERVERS
    takes_turns = True
    meets = (REPORTS_LIKELIEST, REPORTS_KEPT, REPORTS_EXPERTS, SCORES_GIVEN)

    def preload(self, role: EngineRole) -> tuple[str, ...]:
        engine = (
            ("stillhouse.engines.sglang.engine", "stillhouse.engines.sglang.adapters")
            if role == "actor"
            else ("stillhouse.engines.sglang.scorer",)
        )
        return (*engine, "stillhouse.models.tokenizer_file")

    def lacks(self, need: EngineNeed) -> str:
        if need == HIDDEN_STATES:
            return "servers return hidden states as decimal numbers in JSON, 10 times the bytes (docs/teachers.md)"
        return super().lacks(need)

    def student(self, ctx: RoleContext[WithStudent]) -> StudentSource:
        """The model on the SGLang server at `ctx.server_url`. `start` raises ServerLost when it is not there, and
        ServerMismatch when it is not as configured."""
        from stillhouse.engines.http.link import ServerLost, ServerUnavailable
        from stillhouse.engines.sglang.adapters import ServerAdapters
        from stillhouse.engines.sglang.engine import SGLangEngine
        from stillhouse.engines.sglang.features import ServerMismatch, check_layout
        from stillhouse.engines.sglang.weights import ServerWeights
        from stillhouse.models.description import vocabulary_size
        from stillhouse.models.tokenizer_file import FileTokenizer

        config, path = ctx.config.actor, ctx.config.models.student
        own = _trusting(config, config.section(self.name, SGLangConfig))
        tokenizer: FileTokenizer = FileTokenizer(path)
        started_by_us = not config.urls

        def start(wake: Callable[[], None]) -> Student:
            try:
                engine = SGLangEngine(
                    ctx.server_url,
                    own,
                    vocab_size=vocabulary_size(path),
                    run_id=ctx.run_id,
                    api_key=os.environ.get(API_KEY_VARIABLE, "") if started_by_us else "",
                    on_output=wake,
                    away=ctx.in_turns,
                )
                if started_by_us:
                    engine.abort_leftovers(own.control_timeout_s)
            except ServerUnavailable as error:
                raise ServerLost(str(error)) from error
            try:
                check_layout(engine.features, config.server)
            except ServerMismatch:
                engine.close()
                raise
            record_server(ctx.run_dir, ctx.name, ctx.server_url, engine.features.facts)
            if ctx.config.weights.adapters == "on":
                sink = ServerAdapters(engine, student=path, folder=ctx.run_dir / ADAPTERS / ctx.name)
            else:
                sink = ServerWeights(engine, student=path, ours=started_by_us)
            return Student(engine, sink, engine.max_context)

        return StudentSource(tokenizer, tokenizer.fingerprint, tokenizer.stop_token_ids, start)

    def scorer(self, ctx: RoleContext[WithTeacher]) -> ScorerSource:
        """Like `student`, except that attached servers need not have the same layout."""
        from stillhouse.engines.http.link import ServerLost, ServerUnavailable
        from stillhouse.engines.sglang.features import ServerMismatch, check_layout
        from stillhouse.engines.sglang.scorer import SGLangScorer
        from stillhouse.models.description import vocabulary_size
        from stillhouse.models.tokenizer_file import FileTokenizer

        config, path = ctx.config.teacher, ctx.config.models.teacher
        own = _trusting(config, config.section(self.name, ServerLinkConfig))
        key = "" if config.urls else os.environ.get(API_KEY_VARIABLE, "")

        def start() -> SGLangScorer:
            try:
                scorer = SGLangScorer(
                    ctx.server_url, own, vocab_size=vocabulary_size(path), api_key=key, away=ctx.in_turns
                )
            except ServerUnavailable as error:
                raise ServerLost(str(error)) from error
            if not config.urls:
                try:
                    check_layout(scorer.features, config.server)
                except ServerMismatch:
                    scorer.close()
                    raise
            record_server(ctx.run_dir, ctx.name, ctx.server_url, scorer.features.facts)
            return scorer

        tokenizer = FileTokenizer(path)
        return ScorerSource(tokenizer.fingerprint, vocab_tokens(tokenizer.get_vocab()), start)

    def members(self, actor: WorkerSettings, weights: WeightsConfig, student: str) -> GroupMembers:
        """The launcher has already set `server.device` and `weights.adapters`. The dtype of attached servers is not
        known."""
        server = actor.server
        if weights.adapters == "on":
            return GroupMembers(kind="adapters", check_by="off" if weights.verify == "off" else "canary")
        check_by: CheckBy = "canary" if weights.loads_files else "reload"
        if weights.verify == "off":
            check_by = "off"
        dtype = "keep" if actor.urls else server_dtype(server.args, server.device, checkpoint_dtype(student))
        return GroupMembers(kind="servers", ranks_each=server.tp, check_by=check_by, dtype=dtype)

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


def _trusting(settings: WorkerSettings, own: LinkT) -> LinkT:
    """A server that the launcher started is known by its own certificate."""
    if settings.urls or own.ca_file:
        return own
    return msgspec.structs.replace(own, ca_file=SERVERS.launch(settings.server).certificate)


PROVIDER: Final = SGLangProvider()
