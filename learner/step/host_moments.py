"""AdamW with its moments in host memory (`learner.moments = host`): 8 bytes per parameter less on the device.

    for each piece of each parameter, on the device's stream:    moments host -> device | AdamW there | moments -> host

The update is the same kernel on the same numbers as with moments on the device. Weights, gradients and their norm stay
where they are, so nothing else in a step changes. The device holds the moments of one piece at a time, when activations
are gone. All is queued; the host waits only when it reads the moments itself (`wait`).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from stillhouse.models.transfer import share_of
from stillhouse.weights.staged_weights import Mark, WeightStreams

PIECE: Final = 2**24
"""Numbers of a parameter that are updated at one time: 128 MiB of moments on the device."""
_ALIGNED: Final = 64


class HostMomentsAdamW(torch.optim.AdamW):
    """AdamW whose moments are in host memory. With several ranks each has those of its shares, as plain tensors,
    because DTensors must be on the device of their mesh."""

    def __init__(self, groups: list[dict[str, Any]], *, streams: WeightStreams, **settings: Any) -> None:
        """`streams`: those of the parameters' device. Arguments else as of torch's AdamW."""
        super().__init__(groups, fused=True, **settings)
        self._streams = streams
        self._written: Mark | None = None

    @cached_property
    def _moments(self) -> dict[Tensor, tuple[Tensor, Tensor]]:
        """Both moments of each parameter, in one run of host memory that is taken at the first update, as torch's AdamW
        does."""
        shares = [(p, share_of(p.detach())) for group in self.param_groups for p in group["params"]]
        moments = dict[Tensor, tuple[Tensor, Tensor]]()
        room = [-(-share.nbytes // _ALIGNED) * _ALIGNED for _, share in shares]
        run_B, at = self._streams.host_bytes(2 * sum(room)), 0
        for (parameter, share), n_bytes in zip(shares, room, strict=True):
            parts = (run_B[start : start + share.nbytes] for start in (at, at + n_bytes))
            first, second = (part.view(share.dtype).view(share.shape) for part in parts)
            moments[parameter] = (first, second)
            at += 2 * n_bytes
        return moments

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)
        self._written = self._streams.mark()

    def wait(self) -> None:
        """Before the host reads or replaces moments: sleep until what was queued has written them."""
        if self._written is not None:
            self._written.synchronize()

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        share, gradient = share_of(parameter.detach()), share_of(parameter.grad)  # pyright: ignore[reportArgumentType]
        if not self.state[parameter]:
            first, second = (moment.zero_() for moment in self._moments[parameter])
            step = torch.zeros((), device=share.device)
            self.state[parameter] = {"step": step, "exp_avg": first, "exp_avg_sq": second}
        state = self.state[parameter]
        step, beta1, beta2 = state["step"], *group["betas"]
        for own, slope, first, second in _pieces(share, gradient, state["exp_avg"], state["exp_avg_sq"]):
            there = [torch.empty_like(own).copy_(moment, non_blocking=True) for moment in (first, second)]
            adamw(
                [own],
                [slope],
                [there[0]],
                [there[1]],
                [],
                [step.clone()],  # it counts, and each piece is to see the same count
                fused=True,
                amsgrad=False,
                beta1=beta1,
                beta2=beta2,
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )
            first.copy_(there[0], non_blocking=True)
            second.copy_(there[1], non_blocking=True)
        step += 1


def _pieces(share: Tensor, *others: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The share and tensors of its shape, flat and cut; one piece if its memory is not in one row."""
    if not share.is_contiguous():
        yield (share, *others)
        return
    flat = [share.view(-1), *(other.reshape(-1) for other in others)]
    yield from zip(*(tensor.split(PIECE) for tensor in flat), strict=True)
