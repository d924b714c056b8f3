"""Provider of vLLM: one server per worker, started by the launcher. No torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Final, TypeVar

import msgspec

from stillhouse.engines.config import ServerLinkConfig, StudentLinkConfig, WorkerSettings
from stillhouse.engines.provider import (
    API_KEY_VARIABLE,
    EngineProvider,
    EngineRole,
    ScorerSource,
    Student,
    StudentSource,
    WithStudent,
    WithTeacher,
    record_server,
)
from stillhouse.engines.vllm.servers import VLLMServers
from stillhouse.protocol.context import RoleContext
from stillhouse.protocol.handshake import vocab_tokens
from stillhouse.protocol.payloads.student_sets import REPORTS_LIKELIEST
from stillhouse.protocol.settings import Settings
from stillhouse.weights.config import WeightsConfig, checkpoint_dtype, server_dtype
from stillhouse.weights.roster import CheckBy, GroupMembers

SERVERS: Final = VLLMServers()
LinkT = TypeVar("LinkT", bound=ServerLinkConfig)


class VLLMProvider(EngineProvider):
    name = "vllm"
    title = "vLLM servers"
    servers = SERVERS
    meets = (REPORTS_LIKELIEST,)
    options: Mapping[EngineRole, type[Settings]] = {"actor": StudentLinkConfig, "teacher": ServerLinkConfig}

    def preload(self, role: EngineRole) -> tuple[str, ...]:
        ours = "weights" if role == "actor" else "scorer"
        return (f"stillhouse.engines.vllm.{ours}", "stillhouse.models.tokenizer_file")

    def student(self, ctx: RoleContext[WithStudent]) -> StudentSource:
        """The model on the vLLM server at `ctx.server_url`. `start` raises ServerLost when it is not there, and
        EngineMismatch when it is not as configured."""
        from stillhouse.engines.base import EngineMismatch
        from stillhouse.engines.http.link import ServerLost, ServerUnavailable
        from stillhouse.engines.vllm.engine import VLLMEngine
        from stillhouse.engines.vllm.features import check_layout
        from stillhouse.engines.vllm.weights import VLLMWeights
        from stillhouse.models.description import vocabulary_size
        from stillhouse.models.tokenizer_file import FileTokenizer

        config, path = ctx.config.actor, ctx.config.models.student
        own = _trusting(config, config.section(self.name, StudentLinkConfig))
        tokenizer: FileTokenizer = FileTokenizer(path)

        def start(wake: Callable[[], None]) -> Student:
            try:
                engine = VLLMEngine(
                    ctx.server_url,
                    own,
                    vocab_size=vocabulary_size(path),
                    run_id=ctx.run_id,
                    api_key=os.environ.get(API_KEY_VARIABLE, ""),
                    on_output=wake,
                )
                engine.abort_leftovers(own.control_timeout_s)
            except ServerUnavailable as error:
                raise ServerLost(str(error)) from error
            try:
                check_layout(engine.features, config.server)
            except EngineMismatch:
                engine.close()
                raise
            record_server(ctx.run_dir, ctx.name, ctx.server_url, engine.features.facts)
            return Student(engine, VLLMWeights(engine, student=path), engine.max_context)

        return StudentSource(tokenizer, tokenizer.fingerprint, tokenizer.stop_token_ids, start)

    def scorer(self, ctx: RoleContext[WithTeacher]) -> ScorerSource:
        """Like `student`."""
        from stillhouse.engines.base import EngineMismatch
        from stillhouse.engines.http.link import ServerLost, ServerUnavailable
        from stillhouse.engines.vllm.features import check_layout
        from stillhouse.engines.vllm.scorer import VLLMScorer
        from stillhouse.models.description import vocabulary_size
        from stillhouse.models.tokenizer_file import FileTokenizer

        config, path = ctx.config.teacher, ctx.config.models.teacher
        own = _trusting(config, config.section(self.name, ServerLinkConfig))
        key = os.environ.get(API_KEY_VARIABLE, "")

        def start() -> VLLMScorer:
            try:
                scorer = VLLMScorer(ctx.server_url, own, vocab_size=vocabulary_size(path), api_key=key)
            except ServerUnavailable as error:
                raise ServerLost(str(error)) from error
            try:
                check_layout(scorer.features, config.server)
            except EngineMismatch:
                scorer.close()
                raise
            record_server(ctx.run_dir, ctx.name, ctx.server_url, scorer.features.facts)
            return scorer

        tokenizer = FileTokenizer(path)
        return ScorerSource(tokenizer.fingerprint, vocab_tokens(tokenizer.get_vocab()), start)

    def members(self, actor: WorkerSettings, weights: WeightsConfig, student: str) -> GroupMembers:
        """The launcher has already set `server.device`."""
        server = actor.server
        check_by: CheckBy = "canary" if weights.loads_files else "reload"
        if weights.verify == "off":
            check_by = "off"
        dtype = server_dtype(server.args, server.device, checkpoint_dtype(student))
        return GroupMembers(kind="servers", ranks_each=server.tp, check_by=check_by, dtype=dtype)


def _trusting(settings: WorkerSettings, own: LinkT) -> LinkT:
    """The server is known by its own certificate."""
    if own.ca_file:
        return own
    return msgspec.structs.replace(own, ca_file=SERVERS.launch(settings.server).certificate)


PROVIDER: Final = VLLMProvider()
