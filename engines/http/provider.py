"""The part that providers of servers over HTTP share: how a worker connects to its server. No torch."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from stillhouse.engines.base import EngineMismatch
from stillhouse.engines.config import ServerConfig, ServerLinkConfig, WorkerSettings
from stillhouse.engines.provider import (
    API_KEY_VARIABLE,
    EngineProvider,
    EngineRole,
    ScorerSource,
    ServerFacts,
    Student,
    StudentSource,
    WithStudent,
    WithTeacher,
    record_server,
)
from stillhouse.protocol.context import RoleContext
from stillhouse.protocol.handshake import vocab_tokens
from stillhouse.weights.config import WeightsConfig, checkpoint_dtype, server_dtype
from stillhouse.weights.roster import CheckBy, GroupMembers
from stillhouse.weights.sink import WeightSink

if TYPE_CHECKING:
    from stillhouse.engines.http.engine import StudentOnServer
    from stillhouse.engines.http.scorer import ScorerOnServer


ConnectedT = TypeVar("ConnectedT", bound="StudentOnServer[Any, Any] | ScorerOnServer[Any]")
LinkT = TypeVar("LinkT", bound=ServerLinkConfig)


class ServerProvider(EngineProvider):
    """A subclass makes the engines."""

    # ---------------------------------------------------------------------------- what a kind of server decides

    def _engine(
        self, ctx: RoleContext[WithStudent], vocab_size: int, key: str, wake: Callable[[], None]
    ) -> StudentOnServer[Any, Any]:
        """The student at `ctx.server_url`. Raises ServerUnavailable and EngineMismatch."""
        raise NotImplementedError

    def _sink(self, ctx: RoleContext[WithStudent], engine: Any) -> WeightSink:
        """`engine`: of `_engine`."""
        raise NotImplementedError

    def _scorer(self, ctx: RoleContext[WithTeacher], vocab_size: int, key: str) -> ScorerOnServer[Any]:
        """The teacher at `ctx.server_url`. Raises as `_engine` does."""
        raise NotImplementedError

    # ------------------------------------------------------------------------------------------------------------

    def preload(self, role: EngineRole) -> tuple[str, ...]:
        package = f"stillhouse.engines.{self.name}"
        return (f"{package}.{'weights' if role == 'actor' else 'scorer'}", "stillhouse.models.tokenizer_file")

    def student(self, ctx: RoleContext[WithStudent]) -> StudentSource:
        """The model on the server at `ctx.server_url`. `start` raises ServerLost when it is not there, and
        EngineMismatch when it is not as configured."""
        from stillhouse.models.description import vocabulary_size
        from stillhouse.models.tokenizer_file import FileTokenizer

        config, path = ctx.config.actor, ctx.config.models.student
        tokenizer: FileTokenizer = FileTokenizer(path)

        def start(wake: Callable[[], None]) -> Student:
            def connect() -> StudentOnServer[Any, Any]:
                engine = self._engine(ctx, vocabulary_size(path), _key(config), wake)
                if not config.urls:
                    engine.abort_leftovers()
                return engine

            engine = _connected(ctx, connect, config.server)
            return Student(engine, self._sink(ctx, engine), engine.max_context)

        return StudentSource(tokenizer, tokenizer.fingerprint, tokenizer.stop_token_ids, start)

    def scorer(self, ctx: RoleContext[WithTeacher]) -> ScorerSource:
        """Like `student`, except that servers that run already need not have the same layout."""
        from stillhouse.models.description import vocabulary_size
        from stillhouse.models.tokenizer_file import FileTokenizer

        config, path = ctx.config.teacher, ctx.config.models.teacher
        layout = None if config.urls else config.server

        def start() -> ScorerOnServer[Any]:
            return _connected(ctx, lambda: self._scorer(ctx, vocabulary_size(path), _key(config)), layout)

        tokenizer = FileTokenizer(path)
        return ScorerSource(tokenizer.fingerprint, vocab_tokens(tokenizer.get_vocab()), start)

    def members(self, actor: WorkerSettings, weights: WeightsConfig, student: str) -> GroupMembers:
        """The launcher has already set `server.device`. The dtype of servers that run already is not known."""
        server = actor.server
        check_by: CheckBy = "canary" if weights.way == "wire" else "reload"
        if weights.verify == "off":
            check_by = "off"
        dtype = "keep" if actor.urls else server_dtype(server.args, server.device, checkpoint_dtype(student))
        return GroupMembers(kind="servers", ranks_each=server.tp, check_by=check_by, dtype=dtype)

    def _link(self, settings: WorkerSettings, kind: type[LinkT]) -> LinkT:
        """The settings of the connection. A server that the launcher started is known by its own certificate."""
        own = settings.section(self.name, kind)
        if settings.urls or own.ca_file or self.servers is None:
            return own
        return msgspec.structs.replace(own, ca_file=self.servers.launch(settings.server).certificate)


def check_layout(facts: ServerFacts, server: ServerConfig) -> None:
    """Compare a server's device and tp size with the configuration, by which GPUs and ranks were assigned. Raises
    EngineMismatch."""
    if facts.tp != server.tp:
        raise EngineMismatch(
            f"the server says tp_size = {facts.tp}, but server.tp is {server.tp}: ranks of the weight group "
            f"would overlap, or be missing; expected server.tp = {facts.tp}, or a server with {server.tp}"
        )
    if server.device != "auto" and facts.device != server.device:
        raise EngineMismatch(
            f"the server's model is on {facts.device}, but server.device is {server.device}; its log may say "
            "why; or set server.device"
        )


def _key(settings: WorkerSettings) -> str:
    """That of servers that run already is in another variable (ServerLinkConfig.api_key_env)."""
    return "" if settings.urls else os.environ.get(API_KEY_VARIABLE, "")


def _connected(ctx: RoleContext[Any], connect: Callable[[], ConnectedT], layout: ServerConfig | None) -> ConnectedT:
    """Raises ServerLost, and EngineMismatch where the server's layout is not `layout`."""
    from stillhouse.engines.http.link import ServerLost, ServerUnavailable

    try:
        found = connect()
    except ServerUnavailable as error:
        raise ServerLost(str(error)) from error
    facts: ServerFacts = found.features.facts
    try:
        if layout is not None:
            check_layout(facts, layout)
    except EngineMismatch:
        found.close()
        raise
    record_server(ctx.run_dir, ctx.name, ctx.server_url, facts)
    return found
