"""What the routers of a mixture of experts choose: recorded in one forward pass, and given to another (routing replay).

A router scores its experts and keeps the best with torch.topk. That choice alone is recorded, or replaced by one that
is given. The gate weights stay the model's own function of its own scores, read at the chosen experts: normalisation,
bias and scale are those of the architecture, and the gradient flows through the scores.

Nothing is changed for passes without either. Legend: R rows of a pass, T tokens of a packed row, L layers with a
router, K chosen experts, E experts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from stillhouse.models.description import CHOSEN_EXPERTS, EXPERTS
from stillhouse.models.layers import layers
from stillhouse.protocol.messages import ExpertShape


class RoutingError(ValueError):
    """The routers of a model cannot be recorded or given their choice; the message says why."""


def expert_shape(model: PreTrainedModel) -> ExpertShape:
    """The routers of a model, from its configuration and its parameters, which may be on no device. Raises
    RoutingError."""
    text: Any = model.config.get_text_config()
    experts, chosen = (
        next((n for name in names if isinstance(n := getattr(text, name, None), int)), 0)
        for names in (EXPERTS, CHOSEN_EXPERTS)
    )
    if getattr(text, "topk_method", None) == "group_limited_greedy":
        raise RoutingError(
            f"model_type {model.config.model_type!r} has topk_method = group_limited_greedy: gate weights of experts "
            "in groups that it left out would be 0; expected learner.routing_replay = false"
        )
    shapes = ([p.shape for p in layer.parameters() if p.ndim == 3] for layer in layers(model))
    routed = tuple(i for i, of_layer in enumerate(shapes) if any(shape[0] == experts for shape in of_layer))
    if not (routed and 0 < chosen <= experts):
        raise RoutingError(
            f"model_type {model.config.model_type!r} has {experts} experts, of which a token uses {chosen}, in "
            f"{len(routed)} layers; expected a mixture of experts, or learner.routing_replay = false"
        )
    return ExpertShape(routed, experts, chosen)


class _Pass(Protocol):
    shape: ExpertShape

    def chosen(self, layer: int, own_RK: Tensor) -> Tensor:
        """The experts that the layer uses, [R, K], instead of its own."""
        ...


_current: ContextVar[_Pass | None] = ContextVar("routing", default=None)


def prepare(model: PreTrainedModel, shape: ExpertShape) -> None:
    """Have the layers of `shape` ask the pass that is under way. Before `learner.step.recompute`. Idempotent."""
    found = layers(model)
    for index in shape.layers:
        if not isinstance(own := found[index].forward, functools.partial) or own.func is not _in_layer:
            found[index].forward = functools.partial(_in_layer, index, own)


@contextmanager
def under(one: _Pass | None) -> Generator[None]:
    """Forward passes here are part of `one`."""
    token = _current.set(one)
    try:
        yield
    finally:
        _current.reset(token)


def again() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """For torch.utils.checkpoint: what it computes again, perhaps in another thread, is part of the same pass."""
    return nullcontext(), under(_current.get())


class Recording:
    """The choices of one forward pass."""

    def __init__(self, shape: ExpertShape) -> None:
        self.shape = shape
        self._ids: dict[int, Tensor] = {}

    def chosen(self, layer: int, own_RK: Tensor) -> Tensor:
        self._ids[layer] = own_RK
        return own_RK

    @property
    def ids(self) -> Tensor:
        """[R, L, K] int64."""
        return torch.stack([self._ids[layer] for layer in self.shape.layers], dim=1)


class Replay:
    """The choices that a forward pass over T tokens is given."""

    def __init__(self, shape: ExpertShape, ids_TLK: Tensor, given_T: Tensor) -> None:
        """`ids_TLK`: int64; where `given_T` is False, routers choose freely."""
        self.shape = shape
        self._ids_TLK, self._given_T = ids_TLK, given_T
        self._differ: dict[tuple[int, int], Tensor] = {}
        self._n_parts = 0

    @contextmanager
    def over(self, tokens_R: Tensor | slice, real_R: Tensor | None = None) -> Generator[None]:
        """Forward passes here have these of the tokens as their rows; `real_R`: indices of rows that are no padding."""
        part = _Part(self, self._n_parts, self._ids_TLK[tokens_R], self._given_T[tokens_R], real_R)
        self._n_parts += 1
        with under(part):
            yield
        if part.missed:
            raise RoutingError(f"layers {sorted(part.missed)} made no choice of experts; expected one each")

    def permuted(self, order_T: Tensor) -> Replay:
        """The same for other places of the tokens. Its counts are this one's."""
        made = Replay(self.shape, self._ids_TLK[order_T], self._given_T[order_T])
        made._differ = self._differ
        return made

    @property
    def differing(self) -> Tensor:
        """Number of given choices, of a token and a layer, from which the router's own differed as a set, float64."""
        return torch.stack(list(self._differ.values())).sum() if self._differ else self._given_T.new_zeros(()).double()

    def note(self, part: int, layer: int, differs_R: Tensor) -> None:
        self._differ[part, layer] = differs_R.sum(dtype=torch.float64)  # the same again when it is computed again


class _Part:
    def __init__(self, replay: Replay, part: int, ids_RLK: Tensor, given_R: Tensor, real_R: Tensor | None) -> None:
        self.shape, self.missed = replay.shape, set(replay.shape.layers)
        self._replay, self._part, self._real_R = replay, part, real_R
        self._ids_RLK, self._given_R = ids_RLK, given_R

    def chosen(self, layer: int, own_RK: Tensor) -> Tensor:
        self.missed.discard(layer)
        ids_RK = self._ids_RLK[:, self.shape.layers.index(layer)]
        if ids_RK.shape != own_RK.shape:
            raise RoutingError(f"layer {layer} chose experts {tuple(own_RK.shape)}; expected {tuple(ids_RK.shape)}")
        differs_R = (own_RK.sort(dim=1).values != ids_RK.sort(dim=1).values).any(dim=1) & self._given_R
        self._replay.note(self._part, layer, differs_R if self._real_R is None else differs_R[self._real_R])
        return torch.where(self._given_R[:, None], ids_RK, own_RK)


class _Choice(TorchFunctionMode):
    """In a layer: its torch.topk of K of E asks the pass."""

    def __init__(self, layer: int, of: _Pass) -> None:
        super().__init__()
        self._layer, self._of = layer, of
        self.n_choices = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk):
            return found
        scores = cast(Tensor, args[0] if args else (kwargs or {})["input"])
        shape = self._of.shape
        if scores.shape[-1] != shape.experts or found[1].shape != (*scores.shape[:-1], shape.chosen):
            return found
        self.n_choices += 1
        own_RK = found[1].reshape(-1, shape.chosen)
        with torch._C.DisableTorchFunction():  # pyright: ignore[reportPrivateUsage]
            ids_RK = self._of.chosen(self._layer, own_RK)
            if ids_RK is own_RK:
                return found
            ids = ids_RK.view(found[1].shape)
            return torch.return_types.topk((scores.gather(-1, ids), ids))


def _in_layer(index: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if (of := _current.get()) is None:
        return forward(*args, **kwargs)
    with _Choice(index, of) as choice:
        output = forward(*args, **kwargs)
    if choice.n_choices != 1:
        raise RoutingError(
            f"layer {index} chose {of.shape.chosen} of {of.shape.experts} experts {choice.n_choices} times with "
            "torch.topk; expected once: this architecture's routing is not replayed, set learner.routing_replay = false"
        )
    return output
