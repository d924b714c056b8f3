"""A student on an SGLang server: requests go out over HTTP, tokens come back as a stream.

    submit --> a task per request: gate --> slot (max_concurrent) --> POST /generate, chunk by chunk --> deltas --> poll
                                    ^
    pause, resume (weights) --------+

`submit`, `abort` and `poll` come from the owner's thread; the tasks run on the event loop of `ServerLink`. The weights
are not handed to this engine: they arrive on the server itself, between `pause` and `resume`, which whoever updates
the server calls from a thread of its own. While the gate is closed nothing new is sent; what happens to running
requests is `update_mode`. No token carries a version that the server did not vouch for (engines.sglang.stream).

While a server is paused its label says so (`Labels.updating`), until `resume`: should this process die in between, its
successor does not know how far the update got, and keeps the gate closed until whole weights have come.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import time
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Final

from engines.base import EngineStats, GenerationDelta, GenerationRequest
from engines.sglang.config import SGLangConfig
from engines.sglang.deltas import DeltaBox
from engines.sglang.features import Features, ServerMismatch, detect_features, why_unfit
from engines.sglang.http import ModelInfo, RequestRefused, ServerLink, ServerUnavailable, backoffs
from engines.sglang.requests import EngineTotals, check_request, generate_body, tokens_left
from engines.sglang.stream import START_LABEL, FinishReason, Labels, NewTokens, StreamError, TokenStream, decode_chunk
from protocol.messages import WeightVersion

log = logging.getLogger(__name__)

_WATCH_EVERY_S: Final = 0.25
_ABORT_GRACE_S: Final = 2.0
"""An aborted request that the server does not end is left after this: it was aborted before it got there."""
_ABORT_REPEAT_S: Final = 0.2
"""An abort that overtakes its request is ignored by the server: it is said again."""
_CUT_POLL_S: Final = 0.005


@dataclass(slots=True, eq=False)
class _Live:
    """One request, from submit to its last delta. Belongs to the event loop."""

    request: GenerationRequest
    ids: list[int] = field(default_factory=list[int])
    """Tokens of the answer that were handed on: a restart goes on from here."""
    cache_key: str = ""
    """In mode in_place: the weights it began under, which is where in the prefix cache its own past is."""
    task: asyncio.Task[None] | None = None
    rid: str = ""
    """Name at the server while a stream is open; empty else."""
    heard_s: float = 0.0
    aborting_since_s: float | None = None
    restarting: bool = False
    """Ended for new weights; goes on as a new request after them."""
    given_up: str = ""
    """Why it was cancelled from here."""


class SGLangEngine:
    """A GenerationEngine and SwapsRemotely (engines.base)."""

    def __init__(
        self,
        url: str,
        config: SGLangConfig,
        *,
        vocab_size: int,
        run_id: str = "",
        api_key: str = "",
        on_output: Callable[[], None] | None = None,
    ) -> None:
        """Connects. `run_id` is in the names of weights on the server (`labels`). `on_output` is called from another
        thread when there is something to poll, at most every hundredth of a second. Raises ServerUnavailable when the
        server does not answer within connect_timeout_s, ServerMismatch when it cannot do what `config` asks,
        StreamError for answers without sense."""
        self.config: Final = config
        self.vocab_size: Final = vocab_size
        self.labels: Final = Labels(run_id)
        self._deltas = DeltaBox(on_output)
        self._totals = EngineTotals()
        self._live: dict[str, _Live] = {}
        self._session_id = secrets.token_hex(4)
        self._n_sent = 0
        self._closed = False
        self._server_paused = False
        """By us, in mode `retract`: its requests wait there."""
        self.server: Final = ServerLink(url, config, api_key=api_key)
        try:
            self.features: Final[Features] = self.server.run(self._connect(), timeout_s=2 * config.connect_timeout_s)
        except BaseException:
            self.server.close()
            raise
        for line in (f"SGLang server at {url}", *self.features.table().splitlines()):
            log.info("%s", line)

    @property
    def works_in_poll(self) -> bool:
        return False

    @property
    def version(self) -> WeightVersion:
        return self._version

    @property
    def weights_known(self) -> bool:
        """Whether the server has weights of this run. If not, everything waits for the first `resume`."""
        return self._label is not None

    @property
    def max_context(self) -> int:
        """Tokens of prompt and answer together that the server takes."""
        return self.features.max_context

    @property
    def stats(self) -> EngineStats:
        """`decode_steps_total` counts stream chunks: a server's steps are not visible from here."""
        totals = self._totals
        now_s = time.monotonic()
        n_known = len(self._deltas)
        running = sum(1 for live in list(self._live.values()) if live.rid)
        return EngineStats(
            running=running,
            queued=max(0, n_known - running),
            free_slots=max(0, self.config.max_concurrent - n_known),
            sampled_tokens_total=totals.sampled_tokens,
            decode_steps_total=totals.chunks,
            busy_s_total=totals.busy_s + (now_s - totals.busy_since_s if totals.busy_since_s else 0.0),
            weight_swaps_total=totals.swaps,
            version=self._version,
            extra={
                "http_requests_total": float(self.server.requests_total),
                "http_received_bytes_total": float(self.server.received_bytes_total),
                "restarted_requests_total": float(totals.restarts),
                "breaker_opened_total": float(self.server.breaker.opened_total),
                "breaker_open": float(self.server.breaker.is_open),
                "prompt_tokens_cached_total": float(totals.cached_tokens),
            },
        )

    def submit(self, request: GenerationRequest) -> None:
        """See the interface. Also raises ValueError for sampling whose log-probs the server cannot give (top-p, top-k),
        RuntimeError after close(). The seed is not used: a server's random stream is its own."""
        self._refuse_closed()
        check_request(request, self.features, self.vocab_size)
        self._deltas.open(request.request_id)
        self.server.call_soon(self._begin, _Live(request))

    def abort(self, request_id: str) -> None:
        self._refuse_closed()
        self.server.call_soon(self._abort, request_id)

    def poll(self, timeout_s: float) -> list[GenerationDelta]:
        """What arrived since the last poll, one delta per request at most; waits up to `timeout_s` for the first.
        Raises ServerLost."""
        self._refuse_closed()
        self.server.raise_if_lost()
        return self._deltas.take(timeout_s)

    def pause(self, timeout_s: float, *, cut: bool = False) -> None:
        """Before new weights: send nothing more, and bring running requests to where the server can take them. `cut`:
        by ending them in any mode, so that the server may be asked before they go on. Call it before the update is
        posted. Raises ServerUnavailable; the gate stays closed then."""
        self.server.run(self._pause(cut=cut), timeout_s=timeout_s)

    def resume(self, version: WeightVersion, timeout_s: float, *, name: bool = False) -> None:
        """After the update was acknowledged: go on, under `version`. `name`: the server was not told yet what its new
        weights are called. Raises StreamError when the server does not say that it has these weights,
        ServerUnavailable; the gate stays closed then."""
        self.server.run(self._resume(version, name=name), timeout_s=timeout_s)

    def abort_leftovers(self, timeout_s: float) -> None:
        """End whatever the server still works at, for somebody who is not there any more. Only for a server that nobody
        else uses, and before the first request. Raises ServerUnavailable."""
        self.server.run(self.server.post("/abort_request", {"abort_all": True}), timeout_s=timeout_s)

    def close(self) -> None:
        """Drop every request without a last delta; the server aborts what it sees disconnected. Idempotent."""
        self._closed = True
        self.server.close()

    # -------------------------------------------------------------------------------------- on the event loop

    async def _connect(self) -> Features:
        await self._unpause()
        features = await detect_features(self.server)
        if unfit := why_unfit(features, self.config):
            raise ServerMismatch(f"{self.server.url}: {unfit}")
        self._gate = asyncio.Event()
        self._paused_s = self._version_set_s = time.monotonic()
        self._silent_since_s = 0.0
        """When a request was sent and nothing of any has come since; 0 else."""
        self._slots = asyncio.Semaphore(self.config.max_concurrent)
        version = self.labels.parse(features.weights_label)
        self._version = version or WeightVersion(0, 0)
        self._label = features.weights_label if version is not None else None
        if version is not None:
            self._gate.set()
        else:
            log.warning(
                "the server's weights %r are not of this run: nothing is sent before new ones have come",
                features.weights_label,
            )
        self.server.on_info = self._note_info
        self.server.start_monitor()
        self.server.spawn(self._watch())
        return features

    async def _unpause(self) -> None:
        """Somebody who died between pause and resume may have left the server paused; then it would not even answer
        what it is asked to find out its features."""
        await self.server.wait_until_up()
        if await self.server.has_endpoint("/continue_generation"):
            await self.server.post("/continue_generation", {})

    def _note_info(self, info: ModelInfo, asked_s: float) -> None:
        """Between pause and resume the label is the updater's business. Outside it a change to another version of this
        run is somebody else's, and counts for requests that are sent from here on; any other change tells that the
        server was started again, or taken by another run."""
        label = info.weight_version
        if not self._gate.is_set() or asked_s < self._version_set_s or label == self._label:
            return
        version = self.labels.parse(label)
        if version is None or label == START_LABEL:
            self.server.declare_lost(
                f"its weights were {self._label!r} and are {label!r} now: not the same server any more"
            )
            self._deltas.say()
        else:
            self._set_version(version, label)

    def _set_version(self, version: WeightVersion, label: str) -> None:
        self._totals.swaps += version != self._version
        self._version, self._label = version, label
        self._version_set_s = time.monotonic()

    def _begin(self, live: _Live) -> None:
        if not self._live:
            self._totals.busy_since_s = time.monotonic()
        self._live[live.request.request_id] = live
        live.task = self.server.start_task(self._serve(live))
        live.task.add_done_callback(lambda _: self._cancelled(live))

    def _cancelled(self, live: _Live) -> None:
        """A task that is cancelled before its first step never gets to say anything: hence not in `_serve`."""
        if self._closed or live.request.request_id not in self._live:
            return
        if live.given_up:
            self._end(live, "error", live.given_up)
        else:
            self._end(live, "aborted")

    async def _serve(self, live: _Live) -> None:
        """From the gate to the last delta, which `_cancelled` gives where this was cancelled."""
        try:
            async with self._slots:
                while True:
                    await self._gate.wait()
                    if await self._attempt(live):
                        return
                    self._totals.restarts += 1
        except (ServerUnavailable, RequestRefused, StreamError) as error:
            self._end(live, "error", f"{type(error).__name__}: {error}")
        except Exception as error:
            log.exception("request %s", live.request.request_id)
            self._end(live, "error", f"{type(error).__name__}: {error}")

    async def _attempt(self, live: _Live) -> bool:
        """Send it, once more if the server was away, until a stream has begun; then read it to its end. False: cut for
        new weights, to be continued."""
        deadline_s = time.monotonic() + self.config.start_timeout_s
        for backoff_s in backoffs():
            await self.server.breaker.wait_closed(max(0.0, deadline_s - time.monotonic()))
            await self._gate.wait()
            stream = TokenStream(incremental=self.features.incremental_stream, floor=self._version, labels=self.labels)
            try:
                return await self._read(live, stream)
            except ServerUnavailable:
                self._silent_since_s = 0.0
                if stream.n_seen or time.monotonic() + backoff_s >= deadline_s:
                    raise
            finally:
                live.rid = ""
            await asyncio.sleep(backoff_s)
        raise AssertionError("backoffs() ended")

    async def _read(self, live: _Live, stream: TokenStream) -> bool:
        self._n_sent += 1
        self._silent_since_s = self._silent_since_s or time.monotonic()
        live.rid = f"{self._session_id}-{self._n_sent}"
        live.heard_s = time.monotonic()
        live.restarting = False
        body = generate_body(live.request, live.ids, live.rid, self.features, self.config.stream_tokens)
        if self.config.update_mode == "in_place":
            # The prefix cache is not flushed: what old weights left there is for those that began under them.
            live.cache_key = live.cache_key or self.labels.of(self._version)
            body["extra_key"] = live.cache_key
        async with aclosing(self.server.stream("/generate", body)) as texts:
            async for text in texts:
                live.heard_s = time.monotonic()
                self._silent_since_s = 0.0
                chunk = decode_chunk(text)
                self._totals.chunks += 1
                self._give(live, stream.take(chunk))
                if stream.finish is not None:
                    self._totals.cached_tokens += chunk.meta_info.cached_tokens
        return self._finish(live, stream)

    def _finish(self, live: _Live, stream: TokenStream) -> bool:
        finish = stream.finish
        if finish is None:
            raise StreamError("the stream ended without a finish reason")
        if finish.type in ("stop", "length"):
            self._end(live, "stop" if finish.type == "stop" else "length")
        elif finish.type != "abort":
            raise StreamError(f"finish reason {finish.type!r}; expected stop, length or abort")
        elif live.aborting_since_s is not None:
            self._end(live, "aborted")
        elif live.restarting:
            return self._ended_anyway(live)
        else:
            refused = finish.status_code is not None and 400 <= finish.status_code < 500
            kind = RequestRefused if refused else ServerUnavailable
            raise kind(f"the server aborted the request: {finish.message or 'no reason given'}")
        return True

    def _ended_anyway(self, live: _Live) -> bool:
        """Cut for new weights: was its last token the last in any case?"""
        if live.ids and live.ids[-1] in live.request.stop_token_ids:
            self._end(live, "stop")
        elif not tokens_left(live.request, len(live.ids), self.features):
            self._end(live, "length")
        else:
            return False
        return True

    def _give(self, live: _Live, new: NewTokens) -> None:
        if not new.ids:
            return
        live.ids += new.ids
        self._totals.sampled_tokens += len(new.ids)
        self._deltas.give(live.request.request_id, new)

    def _end(self, live: _Live, reason: FinishReason, error: str | None = None) -> None:
        name = live.request.request_id
        del self._live[name]
        if not self._live:
            self._totals.busy_s += time.monotonic() - self._totals.busy_since_s
            self._totals.busy_since_s = 0.0
        self._deltas.end(name, reason, error)

    def _abort(self, request_id: str) -> None:
        live = self._live.get(request_id)
        if live is None or live.aborting_since_s is not None:
            return
        live.aborting_since_s = time.monotonic()
        if live.rid:
            self.server.spawn(self._tell_abort(live.rid))
        elif live.task is not None:
            live.task.cancel()

    async def _tell_abort(self, rid: str) -> None:
        try:
            await self.server.post("/abort_request", {"rid": rid})
        except (ServerUnavailable, RequestRefused) as error:
            log.warning("abort of %s: %s", rid, error)  # _watch ends it by disconnecting

    async def _watch(self) -> None:
        """End requests that are silent for too long, and aborted ones that go on. A server of which nothing at all is
        heard, though it answers health checks, is lost."""
        longest_s = self.config.stall_timeout_s + self.config.start_timeout_s
        while True:
            await asyncio.sleep(_WATCH_EVERY_S)
            now_s = time.monotonic()
            if self._gate.is_set() and self._silent_since_s and now_s - self._silent_since_s > longest_s:
                self.server.declare_lost(f"no token of any request for {longest_s:g} s, though it answers questions")
                self._deltas.say()
            for live in self._live.values():
                live.given_up = live.given_up or self._why_give_up(live, now_s)
                overdue = live.aborting_since_s is not None and now_s - live.aborting_since_s > _ABORT_GRACE_S
                if live.task is not None and (live.given_up or overdue):
                    live.task.cancel()

    def _why_give_up(self, live: _Live, now_s: float) -> str:
        limits = self.config
        if self._gate.is_set():
            silent = live.rid and now_s - live.heard_s > limits.stall_timeout_s
            return f"no token for {limits.stall_timeout_s:g} s (stall_timeout_s)" if silent else ""
        if now_s - self._paused_s > limits.pause_timeout_s:
            return f"paused for new weights for more than {limits.pause_timeout_s:g} s (pause_timeout_s)"
        return ""

    async def _pause(self, *, cut: bool) -> None:
        if self._gate.is_set():
            self._paused_s = time.monotonic()
        self._gate.clear()
        if cut or self.config.update_mode != "retract":
            running = [live for live in self._live.values() if live.rid]
            for live in running:
                live.restarting = live.aborting_since_s is None
            told_s = -math.inf
            while rids := [live.rid for live in running if live.rid]:
                if time.monotonic() - told_s > _ABORT_REPEAT_S:
                    await asyncio.gather(*(self._tell_abort(rid) for rid in rids))
                    told_s = time.monotonic()
                await asyncio.sleep(_CUT_POLL_S)
            await self._continue()
            if self.config.update_mode != "in_place":
                await self._flush()
        else:
            self._server_paused = True
            await self.server.post("/pause_generation", {"mode": "retract"})
        await self._set_label(self.labels.updating(self._version))

    async def _continue(self) -> None:
        if self._server_paused:
            await self.server.post("/continue_generation", {})
            self._server_paused = False

    async def _set_label(self, label: str) -> None:
        """Older servers cannot be told."""
        if self.features.labels_settable:
            await self.server.post("/update_weight_version", {"new_version": label, "abort_all_requests": False})

    async def _flush(self) -> None:
        """Forget cached prefixes, once the server agrees that nothing runs: that takes it one more step."""
        while True:
            try:
                await self.server.post("/flush_cache", {})
                return
            except RequestRefused:
                await asyncio.sleep(_CUT_POLL_S)

    async def _resume(self, version: WeightVersion, *, name: bool) -> None:
        if name:
            await self._set_label(self.labels.of(version))
        label = (await self.server.model_info()).weight_version
        if label == self.labels.updating(version) and version == self._version and self._label is not None:
            label = self._label  # paused for nothing: the caller vouches for the old weights
            await self._set_label(label)
        if self.labels.parse(label) != version:
            raise StreamError(
                f"the server has weights {label!r}; expected {self.labels.of(version)!r} after the update"
            )
        await self._continue()
        self._set_version(version, label)
        self._silent_since_s = 0.0
        for live in self._live.values():
            live.heard_s = time.monotonic()
        self._gate.set()

    def _refuse_closed(self) -> None:
        if self._closed:
            raise RuntimeError("the engine is closed")
