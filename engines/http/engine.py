"""A student on an inference server: requests go out over HTTP, tokens come back as a stream.

    submit --> a task per request: gate --> slot (max_concurrent) --> POST, chunk by chunk --> deltas --> poll
                                    ^
    pause, resume (weights) --------+

`submit`, `abort` and `poll` come from the owner's thread; the tasks run on the event loop of `SGLangLink`. Weights
arrive on the server itself, between `pause` and `resume`, which the weight sink calls from its own thread. While the
gate is closed nothing new is sent, and running requests end, to continue as new ones after it; a subclass may do
otherwise. Nor is anything sent while the server's memory is away in the turn of another process (`_home`). Every token
carries a version that the server has confirmed (engines.http.stream).

While a server is paused its label says so (`Labels.updating`), until `resume`. If this process dies in between, its
successor does not know how far the update got, and keeps the gate closed until whole weights have arrived.
"""

# Why it is so: docs/decisions/sglang-engine.md

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from typing import Any, Final, Generic, Protocol, TypeVar

from stillhouse.engines.backoff import backoffs
from stillhouse.engines.base import EngineStats, GenerationDelta, GenerationRequest
from stillhouse.engines.config import StudentLinkConfig
from stillhouse.engines.http.deltas import DeltaBox
from stillhouse.engines.http.link import ModelInfo, RequestRefused, ServerLink, ServerUnavailable
from stillhouse.engines.http.live import (
    EngineTotals,
    Limits,
    LiveRequest,
    check_request,
    ended_anyway,
    why_give_up,
)
from stillhouse.engines.http.stream import (
    START_LABEL,
    ExpertsAsked,
    FinishReason,
    Labels,
    NewTokens,
    StreamChunk,
    StreamError,
    TokenStream,
)
from stillhouse.protocol.messages import WeightVersion
from stillhouse.tracing import events
from stillhouse.weights.checks import Precision

log = logging.getLogger(__name__)

_WATCH_EVERY_S: Final = 0.25
_ABORT_GRACE_S: Final = 2.0
"""Time after which an aborted request is dropped if the server does not end it: the abort may have overtaken it."""
_ABORT_REPEAT_S: Final = 0.2
"""Interval at which an abort is repeated: the server ignores one that overtakes its request."""
_CUT_POLL_S: Final = 0.005


class ServerFeatures(Limits, Protocol):
    """What an engine needs to know of its server."""

    @property
    def weights_label(self) -> str:
        """The current label of its weights."""
        ...

    @property
    def incremental_stream(self) -> bool:
        """A chunk has only the new tokens, not all tokens so far."""
        ...

    @property
    def precision(self) -> Precision:
        """Precision of its computation."""
        ...

    @property
    def labels_settable(self) -> bool:
        """The label can be set without an update."""
        ...

    def table(self) -> str:
        """For the log, a line per feature."""
        ...


FeaturesT = TypeVar("FeaturesT", bound=ServerFeatures)
ConfigT = TypeVar("ConfigT", bound=StudentLinkConfig)


class StudentOnServer(Generic[ConfigT, FeaturesT]):
    """A GenerationEngine (engines.base). `pause` and `resume` are for the weight sink that updates its server, from one
    thread. A subclass for each kind of server says how its requests look."""

    def __init__(
        self,
        link: ServerLink,
        config: ConfigT,
        *,
        vocab_size: int,
        run_id: str = "",
        on_output: Callable[[], None] | None = None,
    ) -> None:
        """Connects. `run_id` is in the names of weights on the server (`labels`). `on_output` is called from another
        thread when there is something to poll, at most every hundredth of a second. Raises ServerUnavailable when the
        server does not answer within connect_timeout_s, EngineMismatch when it cannot do what `config` asks,
        StreamError for unusable answers. The link is then closed."""
        self.config: Final = config
        self.vocab_size: Final = vocab_size
        self.labels: Final = Labels(run_id)
        self._deltas = DeltaBox(on_output)
        self._totals = EngineTotals()
        self._live: dict[str, LiveRequest] = {}
        self._session_id = secrets.token_hex(4)
        self._n_sent = 0
        self._closed = False
        self._pause_began: tuple[int, int] | None = None
        """When it was paused for new weights (`tracing.events.now_ns`), and how many requests were under way."""
        self._writing_ns = 0
        """When it began to write; 0: nothing is written."""
        self.server: Final = link
        try:
            self.features: Final[FeaturesT] = self.server.run(self._connect(), timeout_s=2 * config.connect_timeout_s)
        except BaseException:
            self.server.close()
            raise
        for line in (f"server at {link.url}", *self.features.table().splitlines()):
            log.info("%s", line)

    # ---------------------------------------------------------------------------- what a kind of server decides

    async def _detect(self) -> FeaturesT:
        """Measure the server's features. Raises as __init__ does."""
        raise NotImplementedError

    def _check_sampling(self, request: GenerationRequest) -> None:
        """Raises ValueError for sampling for which its log-probs are not those of the distribution sampled from."""
        raise NotImplementedError

    def _request(self, live: LiveRequest) -> tuple[str, dict[str, Any]]:
        """Route and body that continue after the tokens `live.ids`."""
        raise NotImplementedError

    def _decode(self, live: LiveRequest, text: bytes) -> StreamChunk:
        """One piece of its stream. Raises StreamError."""
        raise NotImplementedError

    def _experts(self, live: LiveRequest) -> ExpertsAsked | None:
        """What is asked about the choices of its routers; None: nothing, or the server cannot say."""
        return None

    def _labels_now(self) -> Labels:
        """The labels that a new request's tokens may have."""
        return self.labels

    async def _stop(self, *, cut: bool) -> None:
        """Let no request run; those that ended for this continue after `_go_on`. `cut`: none may wait at the server."""
        await self._cut([live for live in self._live.values() if live.rid])
        await self.server.flush_cache()

    async def _go_on(self) -> None:
        """The opposite of `_stop`, where that left requests at the server."""

    async def _set_label(self, label: str) -> None:
        """Name the server's weights, if it lets us."""
        raise NotImplementedError

    # ---------------------------------------------------------------------------------------------- any thread

    @property
    def works_in_poll(self) -> bool:
        return False

    @property
    def version(self) -> WeightVersion:
        return self._version

    @property
    def weights_known(self) -> bool:
        """True when the server has weights of this run. If not, all requests wait for the first `resume`."""
        return self._label is not None

    @property
    def max_context(self) -> int:
        """Longest sequence that the server accepts, prompt and answer together."""
        return self.features.max_context

    @property
    def stats(self) -> EngineStats:
        """`decode_steps_total` counts stream chunks: a server's steps are not visible from here."""
        running = sum(1 for live in list(self._live.values()) if live.rid)
        slots = self.config.max_concurrent
        return self._totals.stats(
            self.server, n_open=len(self._deltas), running=running, slots=slots, version=self._version
        )

    def submit(self, request: GenerationRequest) -> None:
        """See the interface. Also raises ValueError for sampling whose log-probs the server cannot give (top-p, top-k),
        RuntimeError after close(). The seed is ignored: the server has its own random stream."""
        self._refuse_closed()
        check_request(request, self.features, self.vocab_size)
        self._check_sampling(request)
        self._deltas.open(request.request_id)
        self.server.call_soon(self._begin, LiveRequest(request))

    def abort(self, request_id: str) -> None:
        self._refuse_closed()
        self.server.call_soon(self._abort, request_id)

    def poll(self, timeout_s: float) -> list[GenerationDelta]:
        """New output, at most one delta per request; waits up to `timeout_s` for the first. Raises ServerLost."""
        self._refuse_closed()
        self.server.raise_if_lost()
        return self._deltas.take(timeout_s)

    def pause(self, timeout_s: float, *, cut: bool = False) -> None:
        """Prepare for new weights, before the update is posted: send nothing more, and stop running requests where the
        server can take the weights. `cut` ends them in any mode, so that a canary can be scored before they continue.
        Raises ServerUnavailable; the gate then stays closed."""
        self._pause_began = self._pause_began or (events.now_ns(), len(self._live))
        self.server.run(self._pause(cut=cut), timeout_s=timeout_s)

    def resume(self, version: WeightVersion, timeout_s: float, *, name: bool = False) -> None:
        """Continue under `version`, after the update was acknowledged. `name`: also label the server's weights, which
        the update did not. Raises StreamError when the server does not report these weights, and ServerUnavailable; the
        gate then stays closed."""
        self.server.run(self._resume(version, name=name), timeout_s=timeout_s)
        if self._pause_began is not None:
            (began_ns, n_running), self._pause_began = self._pause_began, None
            events.done("engine", "swap", began_ns, version=str(version), running=n_running)
            if n_running:
                self._totals.pauses += 1
                self._totals.pause_s += (events.now_ns() - began_ns) / 1e9

    def abort_leftovers(self) -> None:
        """Abort requests that a former worker left on the server. Only for a server without other users, before the
        first request. Raises ServerUnavailable."""
        self.server.run(self.server.post_abort([]), timeout_s=self.config.control_timeout_s)

    def close(self) -> None:
        """Drop every request without a last delta; the server aborts what it sees disconnected. Idempotent."""
        self._closed = True
        self.server.close()

    # -------------------------------------------------------------------------------------- on the event loop

    async def _connect(self) -> FeaturesT:
        await self.server.wait_until_up()
        features = await self._detect()
        self._gate, self._home = asyncio.Event(), asyncio.Event()
        self._home.set()
        self._paused_s = self._version_set_s = time.monotonic()
        self._silent_since_s = 0.0
        """Time of the first request since the last token of any request; 0 when none is awaited."""
        self._slots = asyncio.Semaphore(self.config.max_concurrent)
        version = self.labels.parse(features.weights_label)
        self._version = version or WeightVersion(0, 0)
        self._label = features.weights_label if version is not None else None
        if version is not None:
            self._gate.set()
        else:
            log.warning(
                "the server's weights %r are not of this run: nothing is sent until new ones have arrived",
                features.weights_label,
            )
        self.server.on_info = self._note_info
        self.server.start_monitor()
        self.server.spawn(self._watch())
        return features

    def _note_info(self, info: ModelInfo, asked_s: float) -> None:
        """Follow the server's label. Between pause and resume the updater sets it. Otherwise a change to another
        version of this run was made elsewhere and applies to requests sent from now on; any other change means that the
        server was restarted, or taken by another run."""
        label = info.weight_version
        if not self._gate.is_set() or asked_s < self._version_set_s or label == self._label:
            return
        version = self.labels.parse(label)
        if version is None or label == START_LABEL or self._labels_now() is not self.labels:
            self.server.declare_lost(
                f"its weights were {self._label!r} and are {label!r} now: this is not the same server"
            )
            self._deltas.notify()
        else:
            self._set_version(version, label)

    def _set_version(self, version: WeightVersion, label: str) -> None:
        self._totals.swaps += version != self._version
        self._version, self._label = version, label
        self._version_set_s = time.monotonic()

    def _begin(self, live: LiveRequest) -> None:
        if not self._live:
            self._totals.busy_since_s, self._writing_ns = time.monotonic(), events.now_ns()
        self._live[live.request.request_id] = live
        live.task = self.server.start_task(self._serve(live))
        live.task.add_done_callback(lambda _: self._cancelled(live))

    def _cancelled(self, live: LiveRequest) -> None:
        """End a cancelled request. Not in `_serve`, because a task that is cancelled before its first step never
        runs."""
        if self._closed or live.request.request_id not in self._live:
            return
        if live.given_up:
            self._end(live, "error", live.given_up)
        else:
            self._end(live, "aborted")

    async def _serve(self, live: LiveRequest) -> None:
        """Serve a request from the gate to its last delta; `_cancelled` gives that of a cancelled one."""
        try:
            async with self._slots:
                while True:
                    await self._may_send()
                    if await self._attempt(live):
                        return
                    self._totals.restarts += 1
        except (ServerUnavailable, RequestRefused, StreamError) as error:
            self._end(live, "error", f"{type(error).__name__}: {error}")
        except Exception as error:
            log.exception("request %s", live.request.request_id)
            self._end(live, "error", f"{type(error).__name__}: {error}")

    async def _may_send(self) -> None:
        while not (self._gate.is_set() and self._home.is_set()):
            await self._gate.wait()
            await self._home.wait()

    async def _stay_away(self) -> None:
        self._home.clear()
        await self._cut([live for live in self._live.values() if live.rid])
        self._silent_since_s = 0.0

    async def _attempt(self, live: LiveRequest) -> bool:
        """Send the request, repeatedly while the server is away, until a stream has begun; then read it to its end.
        False: cut for new weights, to be continued."""
        deadline_s = time.monotonic() + self.config.start_timeout_s
        for backoff_s in backoffs():
            await self.server.breaker.wait_closed(max(0.0, deadline_s - time.monotonic()))
            await self._may_send()
            stream = TokenStream(
                incremental=self.features.incremental_stream,
                floor=self._version,
                labels=self._labels_now(),
                top_ids=live.request.sampling.top_ids,
                kept=live.request.sampling.kept,
                experts=self._experts(live),
            )
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

    async def _read(self, live: LiveRequest, stream: TokenStream) -> bool:
        self._n_sent += 1
        self._silent_since_s = self._silent_since_s or time.monotonic()
        live.rid = f"{self._session_id}-{self._n_sent}"
        live.heard_s = time.monotonic()
        live.restarting = False
        path, body = self._request(live)
        async with aclosing(self.server.stream(path, body)) as texts:
            async for text in texts:
                live.heard_s = time.monotonic()
                self._silent_since_s = 0.0
                chunk = self._decode(live, text)
                self._totals.chunks += 1
                self._give(live, stream.take(chunk))
                if stream.finish is not None:
                    self._totals.cached_tokens += chunk.meta_info.cached_tokens
        return self._finish(live, stream)

    def _finish(self, live: LiveRequest, stream: TokenStream) -> bool:
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
            if (reason := ended_anyway(live, self.features)) is None:
                return False
            self._end(live, reason)
        else:
            refused = finish.status_code is not None and 400 <= finish.status_code < 500
            kind = RequestRefused if refused else ServerUnavailable
            raise kind(f"the server aborted the request: {finish.message or 'no reason given'}")
        return True

    def _give(self, live: LiveRequest, new: NewTokens) -> None:
        if not new.ids:
            return
        live.ids += new.ids
        self._totals.sampled_tokens += len(new.ids)
        self._deltas.give(live.request.request_id, new)

    def _end(self, live: LiveRequest, reason: FinishReason, error: str | None = None) -> None:
        name = live.request.request_id
        del self._live[name]
        if not self._live:
            self._totals.idle()
            events.done("engine", "write", self._writing_ns)
        self._deltas.end(name, reason, error)

    def _abort(self, request_id: str) -> None:
        live = self._live.get(request_id)
        if live is None or live.aborting_since_s is not None:
            return
        live.aborting_since_s = time.monotonic()
        if live.rid:
            self.server.spawn(self.server.abort(live.rid))
        elif live.task is not None:
            live.task.cancel()

    async def _watch(self) -> None:
        """Cancel requests that are silent for too long, and aborted ones that continue. Declare a server lost that
        answers health checks but sends no token of any request."""
        longest_s = self.config.stall_timeout_s + self.config.start_timeout_s
        while True:
            await asyncio.sleep(_WATCH_EVERY_S)
            now_s = time.monotonic()
            if self._gate.is_set() and self._silent_since_s and now_s - self._silent_since_s > longest_s:
                self.server.declare_lost(
                    f"no token of any request for {longest_s:g} s, though it answers health checks"
                )
                self._deltas.notify()
            paused_s = None if self._gate.is_set() else self._paused_s
            for live in self._live.values():
                live.given_up = live.given_up or why_give_up(live, self.config, now_s, paused_s)
                overdue = live.aborting_since_s is not None and now_s - live.aborting_since_s > _ABORT_GRACE_S
                if live.task is not None and (live.given_up or overdue):
                    live.task.cancel()

    async def _pause(self, *, cut: bool) -> None:
        if self._gate.is_set():
            self._paused_s = time.monotonic()
        self._gate.clear()
        await self._stop(cut=cut)
        await self._set_label(self.labels.updating(self._version))
        self.server.updating = True

    async def _cut(self, running: Sequence[LiveRequest]) -> None:
        sent_as = {live.rid: live for live in running}
        for live in running:
            live.restarting = live.aborting_since_s is None
        sent_s = -math.inf
        while rids := [rid for rid, live in sent_as.items() if live.rid == rid]:
            if time.monotonic() - sent_s > _ABORT_REPEAT_S:
                await asyncio.gather(*(self.server.abort(rid) for rid in rids))
                sent_s = time.monotonic()
            await asyncio.sleep(_CUT_POLL_S)

    async def _resume(self, version: WeightVersion, *, name: bool) -> None:
        if name:
            await self._set_label(self.labels.of(version))
        label = (await self.server.model_info()).weight_version
        if label == self.labels.updating(version) and version == self._version and self._label is not None:
            label = self._label  # no update came: the caller confirms that the old weights are intact
            await self._set_label(label)
        if self.labels.parse(label) != version:
            raise StreamError(
                f"the server has weights {label!r}; expected {self.labels.of(version)!r} after the update"
            )
        await self._go_on()
        self._set_version(version, label)
        self._silent_since_s = 0.0
        for live in self._live.values():
            live.heard_s = time.monotonic()
        self.server.updating = False
        self._gate.set()

    def _refuse_closed(self) -> None:
        if self._closed:
            raise RuntimeError("the engine is closed")
