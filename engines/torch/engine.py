"""Embedded generation engine: continuous batching of any Hugging Face causal LM, over a slot KV cache or its own.

    submit --> queue --place--> slots --+--> one step --> tokens --> deltas
                                        |    (rows decode, new prompts ride along)
    stage_weights --> staged --swap-----+    between two steps

`poll`, in the owner's thread, swaps staged weights in, gives free slots to queued requests, closes gaps between rows,
runs one step, and ends finished requests, in this order. Only `stage_weights` (and reading `version` and `stats`) may
come from another thread. A delta never spans a swap, so each has exactly one version.

Legend: T tokens of a step, R rows that decode, V vocabulary.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import PreTrainedModel

from stillhouse.engines.base import EngineStats, GenerationDelta, GenerationRequest, check_prompt, likeliest
from stillhouse.engines.config import EngineConfig
from stillhouse.engines.torch.decoders import build_slots, vocabulary_rows
from stillhouse.engines.torch.mixed_slots import MixedSlots
from stillhouse.engines.torch.sampling import NextToken, RowSampling, check_sampling, draw_uniforms
from stillhouse.engines.torch.slot_experts import SlotExperts
from stillhouse.engines.torch.slots import FinishReason, Running, SlotTable
from stillhouse.engines.torch.step import Prefill
from stillhouse.engines.torch.weights import WeightStage
from stillhouse.models.description import resolve_dtype
from stillhouse.models.loading import resolve_device
from stillhouse.models.packed import context_window
from stillhouse.protocol.messages import ExpertShape, TopIdsWanted, WeightVersion
from stillhouse.tracing import events
from stillhouse.weights.parked import Parked

EMIT_EVERY_STEPS: Final = 8
"""Decode steps between two reports of a running request. Requests are also reported when they end and before a weight
swap."""


@dataclass(frozen=True, slots=True)
class _Joining:
    """Requests with the same prompt that got slots in this poll."""

    ids: npt.NDArray[np.int32]
    """The prompt without its last token."""
    members: list[Running]


class TorchEngine:
    """A GenerationEngine. Takes over `model`: its device, dtype, attention function and storage change."""

    def __init__(
        self,
        model: PreTrainedModel,
        config: EngineConfig,
        *,
        version: WeightVersion | None = None,
        teacher: PreTrainedModel | None = None,
    ) -> None:
        """`version`: that of the model's current weights, by default (0, 0). `teacher`: what requests with a
        `teacher_share` are mixed with; also taken over. Raises ValueError for a max_context beyond the model's,
        UnsupportedModelError (a ValueError) for an unsupported architecture."""
        limit = context_window(model.config)
        if config.max_context > limit:
            raise ValueError(f"max_context = {config.max_context} tokens; this model's context window is {limit}")
        self._config = config
        self._device = torch.device(resolve_device(config.device))
        dtype = getattr(torch, resolve_dtype(config.dtype, self._device.type))
        models = [model] if teacher is None else [model, teacher]
        for one in models:
            one.to(device=self._device, dtype=dtype).eval().requires_grad_(False)  # pyright: ignore
        self._stage = WeightStage(dict(model.named_parameters()), version or WeightVersion(0, 0))
        self._parked = Parked(lambda: (parameter for one in models for parameter in one.parameters()))
        self._n_ids = vocabulary_rows(model)
        slots = [build_slots(one, config.max_concurrent, config.max_context, fused=config.fused) for one in models]
        self._slots = slots[0] if teacher is None else MixedSlots(slots[0], slots[1])
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # the fused decoder joined weights; torch would keep the room of the single ones
        self._table = SlotTable(config.max_concurrent, config.max_context)
        self._model = model
        self._queue: deque[GenerationRequest] = deque()
        self._live: dict[str, Running | None] = {}
        """Every request in the queue (None) or in a slot."""
        self._holders: dict[bytes, list[Running]] = {}
        """By prompt: requests whose slot begins with the prompt's keys and values under the current weights."""
        self._outbox: list[GenerationDelta] = []
        self._closed = False
        self._writing_ns = 0
        """When it began to decode; 0: there is nothing to decode."""
        self._totals = _Totals()

    @property
    def version(self) -> WeightVersion:
        return self._stage.version

    @property
    def works_in_poll(self) -> bool:
        return True

    @property
    def stats(self) -> EngineStats:
        totals = self._totals
        return EngineStats(
            running=self._table.n_running,
            queued=len(self._queue),
            free_slots=self._table.free,
            sampled_tokens_total=totals.sampled_tokens,
            decode_steps_total=totals.steps,
            busy_s_total=totals.busy_s,
            weight_swaps_total=totals.swaps,
            version=self.version,
            weight_pauses_total=totals.pauses,
            weight_pause_s_total=totals.pause_s,
            extra={
                "prefill_tokens_total": float(totals.prefill_tokens),
                "shared_prefill_tokens_total": float(totals.shared_prefill_tokens),
                "retracted_tokens_total": float(totals.retracted_tokens),
                "stale_stagings_total": float(self._stage.stale_total),
                "kv_cache_bytes": float(self._slots.memory_bytes),
            },
        )

    def submit(self, request: GenerationRequest) -> None:
        """See the interface. Also raises ValueError for sampling settings that define no distribution, for
        max_new_tokens < 1, and RuntimeError after close()."""
        self._refuse_closed()
        self._check(request)
        self._live[request.request_id] = None
        self._queue.append(request)

    def abort(self, request_id: str) -> None:
        if request_id not in self._live:
            return
        running = self._live[request_id]
        if running is not None:
            self._end(running, "aborted")
            return
        del self._live[request_id]
        self._queue = deque(request for request in self._queue if request.request_id != request_id)
        nothing = GenerationDelta(request_id, np.zeros(0, np.int32), np.zeros(0, np.float32), (), "aborted")
        self._outbox.append(nothing)

    def poll(self, timeout_s: float) -> list[GenerationDelta]:
        self._refuse_closed()
        if not (self._live or self._outbox):
            self._stage.wait(timeout_s)
        started_s, began_ns = time.perf_counter(), events.now_ns()
        with torch.inference_mode():
            self._swap_if_staged()
            if self._live:
                self._writing_ns = self._writing_ns or began_ns
                self._run_step(self._admit())
        if self._writing_ns and not self._live:
            events.done("engine", "write", self._writing_ns)
            self._writing_ns = 0
        self._totals.busy_s += time.perf_counter() - started_s
        deltas, self._outbox = self._outbox, []
        return deltas

    def stage_weights(self, version: WeightVersion, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """See the interface. The tensors are copied. A version older than the staged or live one is ignored and counted
        (`stale_stagings_total`): weights never go back."""
        self._refuse_closed()
        self._stage.stage(version, tensors)

    def give_back(self) -> None:
        """See protocol.turns.SharesDevice. What is staged is swapped in first, so that there is one set of weights."""
        if self._table.n_running:
            raise RuntimeError(f"{self._table.n_running} requests are running; expected none")
        self._parked.come_back()
        with torch.inference_mode():
            self._swap_if_staged()
        self._holders.clear()
        self._slots.drop()
        self._parked.leave()

    def take_again(self, *, weights_only: bool = False) -> None:
        self._parked.come_back()

    def close(self) -> None:
        """Drop all requests without a last delta. Idempotent."""
        self._closed = True
        self._queue.clear()
        self._live.clear()
        self._holders.clear()
        self._outbox.clear()
        self._stage.wake()

    # ---------------------------------------------------------------------------------------------- weights

    def _swap_if_staged(self) -> None:
        if not self._stage.waiting:
            return
        began_ns, n_running = events.now_ns(), self._table.n_running
        self._emit_all()
        if not self._stage.swap():
            return
        self._slots.refresh()
        self._totals.swaps += 1
        self._holders.clear()
        if self._config.update_mode == "retract" and n_running:
            self._recompute_cache()
        events.done("engine", "swap", began_ns, version=str(self.version), running=n_running)
        if n_running:
            self._totals.pauses += 1
            self._totals.pause_s += (events.now_ns() - began_ns) / 1e9

    def _recompute_cache(self) -> None:
        """Recompute keys and values of all running requests under the current weights, in steps that only prefill."""
        everyone = [running for running in self._table.running if running is not None]
        fills = [Prefill(self._table.past(running), [running.row]) for running in everyone]
        pending = deque(sorted((fill for fill in fills if len(fill.ids)), key=lambda fill: -len(fill.ids)))
        while pending:
            n_fit = max(1, self._config.prefill_tokens_per_step // len(pending[0].ids))
            batch = [pending.popleft() for _ in range(min(n_fit, len(pending)))]
            self._forward(0, batch)
            self._totals.retracted_tokens += sum(len(fill.ids) for fill in batch)
        for running in everyone:
            self._holders.setdefault(running.prompt_key, []).append(running)

    # ----------------------------------------------------------------------------------------------- a step

    def _admit(self) -> list[_Joining]:
        """Give free slots to queued requests within the prefill budget, then put all rows in order."""
        joining: dict[bytes, _Joining] = {}
        placed: list[Running] = []
        copies: list[tuple[Running, Running]] = []
        longest = 0
        while self._queue and self._table.free:
            request = self._queue[0]
            key, n_past = request.prompt_ids.tobytes(), len(request.prompt_ids) - 1
            holders = self._holders.get(key) if self._slots.shares_prompts or key in joining else None
            if holders is None and n_past:
                longest = max(longest, n_past)
                if joining and (len(joining) + 1) * longest > self._config.prefill_tokens_per_step:
                    break
            running = self._place(self._queue.popleft())
            placed.append(running)
            if not n_past:
                continue
            if holders is None:
                joining[key] = _Joining(request.prompt_ids[:-1], [running])
                self._totals.prefill_tokens += n_past
            else:
                self._totals.shared_prefill_tokens += n_past
                if key in joining:
                    joining[key].members.append(running)
                else:
                    copies.append((holders[0], running))
            self._holders.setdefault(key, []).append(running)
        self._arrange(placed)
        for holder, running in copies:
            self._slots.copy_slots([holder.row], [running.row], len(running.request.prompt_ids) - 1)
        return list(joining.values())

    def _place(self, request: GenerationRequest) -> Running:
        n_new = min(request.max_new_tokens, self._config.max_context - len(request.prompt_ids))
        uniforms = draw_uniforms(request.sampling.seed, request.sample_offset, n_new)
        running = self._table.place(request, uniforms)
        self._live[request.request_id] = running
        return running

    def _arrange(self, placed: Sequence[Running]) -> None:
        """Move rows to their places, and their cache with them; rows placed just now have no cache yet."""
        sources, targets = self._table.arrange()
        empty = {running.row for running in placed}
        moves = [(source, target) for source, target in zip(sources, targets, strict=True) if target not in empty]
        if moves:
            sources, targets = zip(*moves, strict=True)
            self._slots.copy_slots(sources, targets, int(self._table.length[list(targets)].max()))

    def _run_step(self, joining: Sequence[_Joining]) -> None:
        n_rows = self._table.n_running
        fills = [Prefill(group.ids, [running.row for running in group.members]) for group in joining]
        logits_RV = self._forward(n_rows, fills)
        uniforms = self._table.uniforms[np.arange(n_rows), self._table.length[:n_rows]]
        teacher_RV = self._slots.teacher_logits_RV if isinstance(self._slots, MixedSlots) else None
        following = NextToken(logits_RV, self._row_sampling(n_rows), teacher_RV)
        ids, logprobs = following.sample(self._on_device(uniforms))
        ids_R, logprobs_R = ids.cpu().numpy(), logprobs.cpu().numpy()
        self._keep_sets(following, n_rows)
        ended = self._table.append(ids_R, logprobs_R)
        self._totals.steps += 1
        self._totals.sampled_tokens += n_rows
        if not np.isfinite(logprobs_R).all():
            ended = np.setdiff1d(ended, self._fail_rows(np.flatnonzero(~np.isfinite(logprobs_R))))
        for row in ended.tolist():
            self._end(self._table.at(row), self._table.finish_reason(row))
        if self._totals.steps % EMIT_EVERY_STEPS == 0:
            self._emit_all()

    def _keep_sets(self, following: NextToken, n_rows: int) -> None:
        asking: dict[TopIdsWanted, list[Running]] = {}
        every = [self._table.at(row) for row in range(n_rows)]
        if any(running.request.sampling.kept for running in every):
            for running, ids_K in zip(every, following.kept(), strict=True):
                if running.request.sampling.kept:
                    running.top_ids.append(ids_K)
        for running in every:
            if (wanted := running.request.sampling.top_ids) is not None:
                asking.setdefault(wanted, []).append(running)
        if not asking:
            return
        ids, probs = following.likeliest(max(wanted.k for wanted in asking))
        ids_RK, probs_RK = ids.int().cpu().numpy(), probs.cpu().numpy()
        for wanted, alike in asking.items():
            rows = [running.row for running in alike]
            for running, ids_K in zip(alike, likeliest(ids_RK[rows], probs_RK[rows], wanted), strict=True):
                running.top_ids.append(ids_K)

    def _forward(self, n_rows: int, fills: Sequence[Prefill]) -> Tensor:
        """Logits [R, V] of rows 0 .. n_rows - 1, each with its last token as input, while `fills` fill their slots."""
        return self._slots.run(self._table.next_input[:n_rows], self._table.length[:n_rows] - 1, fills)

    def _row_sampling(self, n_rows: int) -> RowSampling:
        table = self._table
        inverse_temperature, greedy = table.inverse_temperature[:n_rows], table.greedy[:n_rows]
        top_k, top_p, min_p = table.top_k[:n_rows], table.top_p[:n_rows], table.min_p[:n_rows]
        share = table.teacher_share[:n_rows]
        truncated = bool(top_k.any() or (top_p < 1).any() or min_p.any())
        every = self._n_ids
        return RowSampling(
            self._on_device(inverse_temperature) if (inverse_temperature != 1).any() else None,
            self._on_device(np.where(top_k > 0, top_k, every)) if truncated else None,
            self._on_device(np.where(top_p < 1, top_p, 2.0)) if truncated else None,
            self._on_device(greedy) if greedy.any() else None,
            self._on_device(min_p) if min_p.any() else None,
            self._on_device(share) if share.any() else None,
        )

    def _on_device(self, array: npt.NDArray[Any]) -> Tensor:
        """The array on the device. On a CPU it is a view, valid for this step, until the table changes."""
        return torch.from_numpy(array).to(self._device)

    # ---------------------------------------------------------------------------------------------- results

    def _emit_all(self) -> None:
        for running in self._table.running:
            if running is not None:
                self._report(running)

    def _report(self, running: Running, reason: FinishReason | None = None, error: str | None = None) -> None:
        start, delta = running.emitted, self._table.take_delta(running, self.version, reason, error)
        if delta is None:
            return
        request, n = running.request, len(delta.token_ids)
        if request.sampling.experts is not None and n:
            of_tokens = partial(self._experts_of(request.sampling.experts).of_tokens, running.row)
            n_prompt = len(request.prompt_ids)
            before = of_tokens(request.experts_from, n_prompt) if start == n_prompt else None
            delta = replace(delta, experts=of_tokens(start, start + n), prompt_experts=before)
        self._outbox.append(delta)

    def _experts_of(self, shape: ExpertShape) -> SlotExperts:
        """From the first request for them on. Raises ValueError for routers that are not the model's."""
        if self._slots.experts is None or self._slots.experts.shape != shape:
            self._slots.experts = SlotExperts(self._model, shape, self._config.max_concurrent, self._config.max_context)
            self._holders.clear()  # nothing was recorded of their prompts
        return self._slots.experts

    def _end(self, running: Running, reason: FinishReason, error: str | None = None) -> None:
        self._report(running, reason, error)
        self._table.release(running)
        del self._live[running.request.request_id]
        holders = self._holders.get(running.prompt_key, [])
        if running in holders:
            holders.remove(running)
            if not holders:
                del self._holders[running.prompt_key]

    def _fail_rows(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """End requests whose log-prob is not finite, without that token; returns the rows."""
        for row in rows.tolist():
            running = self._table.at(row)
            self._table.length[row] -= 1
            self._totals.sampled_tokens -= 1
            self._end(running, "error", f"the model gave a log-prob that is not finite under weights {self.version}")
            self._slots.clear_slot(row)
        return rows

    # --------------------------------------------------------------------------------------------- refusals

    def _check(self, request: GenerationRequest) -> None:
        ids, name = request.prompt_ids, request.request_id
        if name in self._live:
            raise ValueError(f"request id {name!r} is in use; expected a new one")
        check_prompt(request, self._n_ids)
        if len(ids) >= self._config.max_context:
            raise ValueError(
                f"request {name!r}: a prompt of {len(ids)} tokens leaves no room for a token in a context of "
                f"{self._config.max_context} (engine max_context)"
            )
        if request.sample_offset < 0:
            raise ValueError(f"request {name!r}: sample_offset {request.sample_offset}; expected at least 0")
        check_sampling(request.sampling)
        if request.sampling.teacher_share and not isinstance(self._slots, MixedSlots):
            raise ValueError(
                f"request {name!r}: teacher_share = {request.sampling.teacher_share}; this engine was started without "
                "a teacher"
            )
        if request.sampling.experts is not None:
            self._experts_of(request.sampling.experts)

    def _refuse_closed(self) -> None:
        if self._closed:
            raise RuntimeError("the engine is closed")


@dataclass(slots=True)
class _Totals:
    sampled_tokens: int = 0
    steps: int = 0
    busy_s: float = 0.0
    swaps: int = 0
    pauses: int = 0
    pause_s: float = 0.0
    prefill_tokens: int = 0
    shared_prefill_tokens: int = 0
    retracted_tokens: int = 0
