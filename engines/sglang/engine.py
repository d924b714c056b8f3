"""A student on an SGLang server. `update_mode` decides about running requests at a weight swap."""

# Why it is so: docs/decisions/sglang-engine.md

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from stillhouse.engines.base import EngineMismatch, GenerationRequest
from stillhouse.engines.http.engine import StudentOnServer
from stillhouse.engines.http.link import ServerLost, ServerUnavailable
from stillhouse.engines.http.live import LiveRequest
from stillhouse.engines.http.stream import ExpertsAsked, Labels, StreamChunk, UnderAdapter, decode_chunk
from stillhouse.engines.sglang.config import SGLangConfig
from stillhouse.engines.sglang.features import Features, detect_features, why_unfit
from stillhouse.engines.sglang.http import SGLangLink
from stillhouse.engines.sglang.memory import ServerMemory
from stillhouse.engines.sglang.requests import check_sampling, experts_asked, generate_body
from stillhouse.protocol.messages import WeightVersion

log = logging.getLogger(__name__)


class SGLangEngine(StudentOnServer[SGLangConfig, Features]):
    def __init__(
        self,
        url: str,
        config: SGLangConfig,
        *,
        vocab_size: int,
        run_id: str = "",
        api_key: str = "",
        on_output: Callable[[], None] | None = None,
        away: bool = False,
    ) -> None:
        """`away`: the launcher has released the server's memory, and this process has the turn to take it again."""
        self._told_of_experts = False
        self._server_paused = False
        """Paused by this engine, in mode `retract`: its requests wait there."""
        self._adapter = ""
        """Name of the adapter of new requests; empty: the server's own weights."""
        self._idle_adapters: set[str] = set()
        link = SGLangLink(url, config, api_key=api_key)
        self._memory = ServerMemory.at_home(link, away=away)
        super().__init__(link, config, vocab_size=vocab_size, run_id=run_id, on_output=on_output)

    def switch_adapter(self, version: WeightVersion, name: str, timeout_s: float) -> None:
        """Send new requests with the adapter `name`, which the server has loaded. Running requests end and continue
        under it; in mode `keep` they keep theirs. Nothing is paused. Raises ServerUnavailable when they did not
        end."""
        self.server.run(self._switch_adapter(version, name), timeout_s=timeout_s)

    def unused_adapters(self, loaded: Iterable[str], timeout_s: float) -> list[str]:
        """Those of `loaded` that can be unloaded: no request has been at the server with them since the last call
        either, so that the server has noticed the end of the last one. Raises ServerUnavailable."""
        return self.server.run(self._unused_adapters(set(loaded)), timeout_s=timeout_s)

    def give_back(self) -> None:
        """See protocol.turns.SharesDevice. What is still under way is cut, and continues in the next turn. Raises
        ServerLost."""
        try:
            self.server.run(self._stay_away(), timeout_s=self._memory.limit_s)
        except ServerUnavailable as error:
            raise ServerLost(f"{self.server.url}: its requests did not end: {error}") from error
        self._memory.release()

    def take_again(self, *, weights_only: bool = False) -> None:
        """Raises ServerLost."""
        self._memory.resume(weights_only=weights_only)
        if not weights_only:
            self.server.call_soon(self._home.set)

    # -------------------------------------------------------------------------------------- on the event loop

    async def _detect(self) -> Features:
        # A former worker may have died between pause and resume. A paused server would not answer the probes.
        if await self.server.has_endpoint("/continue_generation"):
            await self.server.post("/continue_generation", {})
        features = await detect_features(self.server)
        if unfit := why_unfit(features, self.config):
            raise EngineMismatch(f"{self.server.url}: {unfit}")
        if features.routed_experts and self.config.update_mode == "retract":
            # What was computed again under new weights would be said of tokens that the old ones sampled.
            features = msgspec.structs.replace(features, routed_experts=False)
        return features

    def _check_sampling(self, request: GenerationRequest) -> None:
        check_sampling(f"request {request.request_id!r}", request.sampling, self.features)
        if request.sampling.experts is not None and not (self.features.routed_experts or self._told_of_experts):
            self._told_of_experts = True
            log.warning(
                "learner.routing_replay: this server does not say which experts it chose, so the student's routers "
                "choose freely; expected a server with --enable-return-routed-experts, and another update_mode than "
                "retract"
            )

    def _experts(self, live: LiveRequest) -> ExpertsAsked | None:
        return experts_asked(live.request, len(live.ids), self.features)

    def _request(self, live: LiveRequest) -> tuple[str, dict[str, Any]]:
        body = generate_body(live.request, live.ids, live.rid, self.features, self.config.stream_tokens)
        live.adapter = self._adapter
        if live.adapter:
            body["lora_path"] = live.adapter
        if self.config.update_mode == "in_place":
            # The prefix cache is not flushed: only requests that began under the old weights may use their entries.
            live.cache_key = live.cache_key or self.labels.of(self._version)
            body["extra_key"] = live.cache_key
        return "/generate", body

    def _decode(self, live: LiveRequest, text: bytes) -> StreamChunk:
        return decode_chunk(text)

    def _labels_now(self) -> Labels:
        return UnderAdapter(self._version, self._label or "") if self._adapter else self.labels

    async def _stop(self, *, cut: bool) -> None:
        if cut or self.config.update_mode != "retract":
            await self._cut([live for live in self._live.values() if live.rid])
            await self._go_on()
            if self.config.update_mode != "in_place":
                await self.server.flush_cache()
        else:
            self._server_paused = True
            await self.server.post("/pause_generation", {"mode": "retract"})

    async def _go_on(self) -> None:
        if self._server_paused:
            await self.server.post("/continue_generation", {})
            self._server_paused = False

    async def _set_label(self, label: str) -> None:
        if self.features.labels_settable:
            await self.server.post("/update_weight_version", {"new_version": label, "abort_all_requests": False})

    async def _switch_adapter(self, version: WeightVersion, name: str) -> None:
        self._adapter = name
        self._set_version(version, self._label or "")
        if self.config.update_mode != "keep":
            await self._cut([live for live in self._live.values() if live.rid and live.adapter != name])

    async def _unused_adapters(self, loaded: set[str]) -> list[str]:
        used = {self._adapter, *(live.adapter for live in self._live.values())}
        idle_before, self._idle_adapters = self._idle_adapters, loaded - used
        return sorted(idle_before & self._idle_adapters)
