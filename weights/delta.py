"""The difference between two versions of a bucket, and the choice between sending it and sending the whole bucket.

A bucket is taken as n units: integers as wide as most weights are (2 bytes for bf16). Units are compared as integers,
so -0.0 differs from 0.0, and NaNs with other bits differ too. Where k units differ, this is sent:

    | new values, k units | places, k bytes | counts, ceil(n / 255) bytes |

The bucket is cut into blocks of 255 units. A count says how many units of a block differ, and a place is 0 to 254
within its block; both fit into one byte. With 1 % of bf16 weights changed that is 1.7 % of the bucket's bytes.

A header of two numbers goes before each bucket: k, or WHOLE if all bytes of the bucket follow; and the round's number.
"""

from __future__ import annotations

from collections import Counter
from typing import Final, Literal, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from stillhouse.weights.config import DELTA_MIN_BYTES, DeltaUse
from stillhouse.weights.manifest import WeightManifest
from stillhouse.weights.staged_weights import Former, StagedVersion

FullReason: TypeAlias = Literal["off", "unable", "small", "first", "measured", "overwritten", "refused"]
"""Why a version was sent whole. off: by `weights.delta`; unable: SGLang servers, files, and other transports that know
no differences; small: fewer than DELTA_MIN_BYTES; first: of a group; measured: this is faster, or it is its turn to be
measured; overwritten: rank 0 needed the former version's memory for the next one; refused: a member could not apply the
difference, and got the version twice."""

WHOLE: Final = -1
BLOCK: Final = 255
"""Units per block."""
_PIECE_BYTES: Final = 4 << 20
"""Bytes compared at a time, so that what is computed in between stays in the cache."""
TRY_AGAIN: Final = 50
"""`auto` measures the slower way again after this many versions."""

_UNITS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class DeltaDamaged(Exception):
    """The bytes do not describe a difference of this bucket."""


def unit_bytes(manifest: WeightManifest) -> int:
    """Item size of the dtypes that hold most bytes."""
    held: Counter[int] = Counter()
    for spec in manifest.tensors:
        held[spec.item_bytes] += spec.n_bytes
    return max(held, key=lambda size: (held[size], size))


def n_units(n_bytes: int, unit: int) -> int:
    """Raises ValueError if the bytes cannot be divided into units."""
    if n_bytes % unit or unit not in _UNITS:
        raise ValueError(f"a bucket of {n_bytes} bytes in units of {unit}; expected a multiple of 1, 2, 4 or 8")
    return n_bytes // unit


def delta_bytes(k: int, n_bytes: int, unit: int) -> int:
    """Size of a difference of k units."""
    return k * (unit + 1) + -(-n_units(n_bytes, unit) // BLOCK)


def most_changes(n_bytes: int, unit: int) -> int:
    """The largest k that is sent as a difference: then it has at most half of the bucket's bytes. Negative: none."""
    return (n_bytes // 2 - delta_bytes(0, n_bytes, unit)) // (unit + 1)


def changes(old_b: Tensor, new_b: Tensor, unit: int) -> Tensor | None:
    """Indices of the units that differ, rising, [k] int64; None if there are more than `most_changes`."""
    most = most_changes(new_b.numel(), unit)
    found: list[Tensor] = []
    k = 0
    for start in range(0, new_b.numel(), _PIECE_BYTES):
        old, new = (bucket_b[start : start + _PIECE_BYTES].view(_UNITS[unit]) for bucket_b in (old_b, new_b))
        if new_b.device.type == "cpu":  # NumPy finds them in a third of torch's time
            at = torch.from_numpy(np.flatnonzero(old.numpy() != new.numpy()))
        else:
            at = (old != new).nonzero().view(-1)
        k += at.numel()
        if k > most:
            return None
        found.append(at + start // unit)
    return torch.cat(found) if found else None


def encode(new_b: Tensor, at: Tensor, unit: int) -> Tensor:
    """The difference, uint8 [delta_bytes]. `at`: from `changes`."""
    k, n = at.numel(), n_units(new_b.numel(), unit)
    block = torch.div(at, BLOCK, rounding_mode="floor")
    out_b = torch.empty(delta_bytes(k, new_b.numel(), unit), dtype=torch.uint8, device=new_b.device)
    out_b[: k * unit].copy_(new_b.view(_UNITS[unit]).index_select(0, at).view(torch.uint8))
    out_b[k * unit : k * (unit + 1)].copy_(at - block * BLOCK)
    out_b[k * (unit + 1) :].copy_(torch.bincount(block, minlength=-(-n // BLOCK)))
    return out_b


def apply(delta_b: Tensor, k: int, bucket_b: Tensor, unit: int) -> None:
    """Change the old bucket into the new one. Raises DeltaDamaged, and then the bucket is as it was."""
    n = n_units(bucket_b.numel(), unit)
    if not 0 <= k <= n or delta_b.numel() != delta_bytes(k, bucket_b.numel(), unit):
        raise DeltaDamaged(f"{delta_b.numel()} bytes for {k} changes of {n} units of {unit} bytes")
    counts = delta_b[k * (unit + 1) :].long()
    announced = int(counts.sum())
    if announced != k:
        raise DeltaDamaged(f"the blocks have {announced} changes, expected {k}")
    blocks = torch.repeat_interleave(torch.arange(counts.numel(), device=counts.device) * BLOCK, counts, output_size=k)
    at = blocks + delta_b[k * unit : k * (unit + 1)]
    if k and int(at.max()) >= n:
        raise DeltaDamaged(f"a change at unit {int(at.max())} of {n}")
    bucket_b.view(_UNITS[unit])[at] = delta_b[: k * unit].view(_UNITS[unit])


class DeltaSent(NamedTuple):
    """What a version cost as a difference."""

    n_bytes: int
    whole_buckets: int
    """Buckets that went whole all the same."""
    changed: float
    """Share of the units that were sent, 0 to 1."""


class Deltas:
    """Rank 0's choice for each version. `auto` takes the way that took less time when it was last used, and measures
    the other one again now and then, because links and the share of changed weights do not stay as they are."""

    def __init__(self, use: DeltaUse) -> None:
        self._use = use
        self._former: Former | None = None
        self._took_s: dict[bool, float] = {}
        self._since: Counter[bool] = Counter()
        """Versions sent the other way since."""
        self._first = True

    def forget(self) -> None:
        """There is no version that all members have received."""
        self._former = None

    def base_of(self, weights: StagedVersion, *, able: bool) -> tuple[Former | None, FullReason | None]:
        """The version to start from, or why this one must go whole. The base is used up: if sending fails, nobody
        knows what the members have. `able`: members can apply differences."""
        former, self._former = self._former, None
        self._first = former is None
        if (full := self._why_full(former, weights.n_bytes, able)) is not None:
            return None, full
        return former, None

    def sent(self, weights: StagedVersion, took_s: float, *, delta: bool) -> None:
        """All members have this version now."""
        self._former = weights.keep()
        if not self._first:  # it also connected the members, and they took new memory
            self.took(took_s, delta=delta)

    def took(self, seconds: float, *, delta: bool) -> None:
        """Record the time until every member had a version."""
        self._took_s[delta] = seconds
        self._since[delta] = 0
        self._since[not delta] += 1

    def _why_full(self, former: Former | None, n_bytes: int, able: bool) -> FullReason | None:
        if self._use == "off":
            return "off"
        if not able:
            return "unable"
        if self._use == "auto" and n_bytes < DELTA_MIN_BYTES:
            return "small"
        if former is None:
            return "first"
        if self._use == "auto" and not self._delta_is_next():
            return "measured"
        return None if former.intact else "overwritten"

    def _delta_is_next(self) -> bool:
        if len(self._took_s) < 2:
            return True not in self._took_s
        faster = self._took_s[True] < self._took_s[False]
        return faster if self._since[not faster] < TRY_AGAIN else not faster
