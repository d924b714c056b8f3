"""What rank 0 sends the other ranks: how to begin, and the items of each batch, of which each rank trains its share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from stillhouse.learner.batch import TrainItem
from stillhouse.protocol.messages import BatchItem


class RanksBegin(msgspec.Struct, frozen=True):
    """What rank 0 has found out before it loads its own share."""

    checkpoint: str | None
    """Folder of the checkpoint to go on from."""
    vocab_tokens: int


class _Item(msgspec.Struct, frozen=True, array_like=True):
    item: BatchItem
    tokens_L: bytes
    behaviour_L: bytes
    train_mask_L: bytes
    teacher_ML: bytes
    payloads: bytes


class _Items(msgspec.Struct, frozen=True, array_like=True):
    items: list[_Item]
    offline: list[_Item]


class StepItems(NamedTuple):
    """The arguments of `Trainer.step`."""

    items: list[TrainItem]
    offline: list[TrainItem]


def dump_items(items: Sequence[TrainItem], offline: Sequence[TrainItem]) -> bytes:
    return msgspec.msgpack.encode(_Items([_dumped(one) for one in items], [_dumped(one) for one in offline]))


def load_items(data: bytes) -> StepItems:
    """Raises msgspec.ValidationError for anything but the bytes of `dump_items`."""
    read = msgspec.msgpack.decode(data, type=_Items)
    return StepItems([_loaded(one) for one in read.items], [_loaded(one) for one in read.offline])


def _dumped(one: TrainItem) -> _Item:
    arrays = (one.tokens_L, one.behaviour_L, one.train_mask_L, one.teacher_ML, one.payloads)
    return _Item(one.item, *(array.tobytes() for array in arrays))


def _loaded(one: _Item) -> TrainItem:
    def read(data: bytes, dtype: Any) -> npt.NDArray[Any]:
        return np.frombuffer(bytearray(data), dtype)

    return TrainItem(
        one.item,
        read(one.tokens_L, np.int32),
        read(one.behaviour_L, np.float32),
        read(one.train_mask_L, np.bool_),
        read(one.teacher_ML, np.float32).reshape(len(one.item.teachers), one.item.end),
        read(one.payloads, np.uint8),
    )
