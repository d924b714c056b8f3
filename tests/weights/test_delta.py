"""Differences between versions: the bytes of one, and the choice to send them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeAlias, get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from stillhouse.protocol.messages import WeightVersion
from stillhouse.weights import delta
from stillhouse.weights.buckets import place_checksum
from stillhouse.weights.config import DELTA_MIN_BYTES, DeltaUse
from stillhouse.weights.delta import Deltas, FullReason, apply, changes, delta_bytes, encode, most_changes, unit_bytes
from stillhouse.weights.manifest import TensorSpec, WeightManifest
from stillhouse.weights.staged_weights import StagedWeights

Places: TypeAlias = dict[int, bytes]
Damage: TypeAlias = Callable[[Tensor], Tensor]


# ------------------------------------------------------------------------------------------------ bytes of a bucket


def places_of(old: bytes, new: bytes, unit: int) -> Places:
    """Slow and obvious: the new value at each place that differs."""
    return {at: new[at : at + unit] for at in range(0, len(new), unit) if old[at : at + unit] != new[at : at + unit]}


def read_slowly(sent: bytes, k: int, unit: int, n: int) -> Places:
    """What a difference says, read byte by byte as the module's docstring describes it."""
    places: Places = {}
    values, rest = sent[: k * unit], sent[k * unit :]
    low, counts = rest[:k], rest[k:]
    assert len(counts) == -(-n // 255)
    taken = 0
    for block, count in enumerate(counts):
        for _ in range(count):
            places[unit * (255 * block + low[taken])] = values[taken * unit : (taken + 1) * unit]
            taken += 1
    assert taken == k
    return places


def tensor_of(data: bytes) -> Tensor:
    return torch.tensor(list(data), dtype=torch.uint8)


@st.composite
def two_versions(draw: st.DrawFn) -> tuple[bytes, bytes, int]:
    """Any bytes are weights of some dtype: NaNs, infinities and both zeros among them."""
    unit = draw(st.sampled_from([1, 2, 4, 8]))
    n_bytes = 64 * draw(st.integers(1, 20))
    old = draw(st.binary(min_size=n_bytes, max_size=n_bytes))
    new = bytearray(old)
    most = max(0, most_changes(n_bytes, unit))
    for at in draw(st.lists(st.integers(0, n_bytes - 1), max_size=most)):
        new[at] ^= draw(st.integers(0, 255))
    return old, bytes(new), unit


@given(two_versions())
def test_a_difference_has_exactly_the_places_that_differ_and_makes_the_new_bucket(
    versions: tuple[bytes, bytes, int],
) -> None:
    old, new, unit = versions
    old_b, new_b = tensor_of(old), tensor_of(new)
    at = changes(old_b, new_b, unit)
    if at is None:  # 64 single bytes have no room for a difference
        assert most_changes(len(new), unit) < 0
        return
    sent_b = encode(new_b, at, unit)
    assert sent_b.numel() == delta_bytes(at.numel(), len(new), unit) <= len(new) // 2
    assert read_slowly(bytes(sent_b.tolist()), at.numel(), unit, len(new) // unit) == places_of(old, new, unit)
    apply(sent_b, at.numel(), old_b, unit)
    assert bytes(old_b.tolist()) == new


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_zeros_and_nans_that_compare_equal_or_never_do_are_compared_by_their_bits(dtype: torch.dtype) -> None:
    whole: Any = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    old = torch.zeros(1024, dtype=dtype)
    old[:3] = torch.nan
    new = old.clone()
    new[5] = -0.0
    new.view(whole)[1] ^= 1  # a NaN with another payload
    at = changes(old.view(torch.uint8), new.view(torch.uint8), dtype.itemsize)
    assert at is not None and at.tolist() == [1, 5], "the other NaNs are the same as before"
    apply(encode(new.view(torch.uint8), at, dtype.itemsize), 2, old.view(torch.uint8), dtype.itemsize)
    assert torch.equal(old.view(whole), new.view(whole))


@pytest.mark.parametrize("unit", [2, 4])
def test_a_bucket_that_differs_in_too_many_places_is_sent_whole(unit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound is half of the bucket's bytes, also when it is compared in pieces."""
    monkeypatch.setattr(delta, "_PIECE_BYTES", 128)
    old_b = torch.zeros(6_400, dtype=torch.uint8)
    most = most_changes(6_400, unit)
    assert delta_bytes(most, 6_400, unit) <= 3_200 < delta_bytes(most + 1, 6_400, unit)
    new_b = old_b.clone()
    new_b[: unit * most] = 1
    at = changes(old_b, new_b, unit)
    assert at is not None and at.tolist() == list(range(most))
    new_b[-1] = 1
    assert changes(old_b, new_b, unit) is None


def cut(sent_b: Tensor) -> Tensor:
    return sent_b[:-1]


def as_it_is(sent_b: Tensor) -> Tensor:
    return sent_b


def one_more_in_the_last_block(sent_b: Tensor) -> Tensor:
    return torch.cat([sent_b[:-1], sent_b[-1:] + 1])


def last_place_past_the_end(sent_b: Tensor) -> Tensor:
    return torch.cat([sent_b[:14], sent_b.new_tensor([254]), sent_b[15:]])


@pytest.mark.parametrize(
    ("k", "damage", "said"),
    [
        (5, cut, "17 bytes for 5 changes of 640"),
        (4, as_it_is, "18 bytes for 4 changes"),
        (5, one_more_in_the_last_block, "the blocks have 6 changes, expected 5"),
        (5, last_place_past_the_end, "a change at unit 764"),
    ],
)
def test_bytes_that_are_no_difference_change_nothing(k: int, damage: Damage, said: str) -> None:
    old_b, at = torch.zeros(1_280, dtype=torch.uint8), torch.tensor([0, 254, 255, 510, 639])
    with pytest.raises(delta.DeltaDamaged, match=said):
        apply(damage(encode(old_b + 1, at, 2)), k, old_b, 2)
    assert not old_b.any()


def test_the_unit_is_the_width_that_most_bytes_have() -> None:
    def spec(name: str, dtype: str, n: int) -> TensorSpec:
        return TensorSpec(name, dtype, (n,))

    assert unit_bytes(WeightManifest((spec("a", "bfloat16", 100), spec("b", "float32", 49)))) == 2
    assert unit_bytes(WeightManifest((spec("a", "bfloat16", 100), spec("b", "float32", 51)))) == 4


def slow_checksum(data: bytes) -> int:
    total = 0
    for i in range(len(data) // 8):
        word = int.from_bytes(data[8 * i : 8 * i + 8], "little", signed=True)
        total += (2 * i + 1) * (word ^ (word >> 32))
    total %= 1 << 64
    return total - (1 << 64) if total >> 63 else total


@pytest.mark.parametrize("n_words", [8, 1024, (1 << 17) + 1024, (1 << 17) + 8])
def test_the_checksum_of_places_is_its_formula(n_words: int) -> None:
    bucket_b = torch.randint(0, 256, (8 * n_words,), dtype=torch.uint8)
    assert int(place_checksum(bucket_b)) == slow_checksum(bytes(bucket_b.tolist()))


@given(st.integers(0, 4095), st.integers(0, 4095), st.integers(0, 63))
def test_two_words_that_are_exchanged_change_the_checksum(first: int, second: int, bit: int) -> None:
    """Words that differ in one bit, as two weights of opposite signs do. A plain sum would be the same."""
    words = torch.zeros(4_096, dtype=torch.int64)
    words[first] = 1 << bit if bit < 63 else -(1 << 63)
    before = int(place_checksum(words.view(torch.uint8)))
    words[[first, second]] = words[[second, first]]
    assert (int(place_checksum(words.view(torch.uint8))) == before) == (first == second)


# -------------------------------------------------------------------------------------------------------- the choice


def version(step: int) -> WeightVersion:
    return WeightVersion(0, step)


def staged_of(n_bytes: int) -> StagedWeights:
    staged = StagedWeights()
    staged.fill(version(1), [("w", torch.zeros(n_bytes, dtype=torch.uint8))])
    return staged


class Chooser:
    """Versions of one size, whose ways take as long as the test says."""

    def __init__(self, use: DeltaUse, n_bytes: int = DELTA_MIN_BYTES) -> None:
        self.deltas = Deltas(use)
        self.staged = staged_of(n_bytes)
        self.took_s = {"delta": 1.0, "full": 2.0}

    def send(self, *, able: bool = True) -> Literal["delta"] | FullReason:
        base, full = self.deltas.base_of(self.staged, able=able)
        assert (base is None) == (full is not None)
        self.deltas.sent(self.staged, self.took_s["delta" if full is None else "full"], delta=full is None)
        return full or "delta"


def test_auto_takes_the_faster_way_and_measures_the_other_again() -> None:
    chooser = Chooser("auto")
    assert [chooser.send() for _ in range(3)] == ["first", "delta", "measured"], "the first one is no measure"
    assert [chooser.send() for _ in range(52)] == 50 * ["delta"] + ["measured", "delta"], "the slower has its turn"
    chooser.took_s["delta"] = 3.0
    assert [chooser.send() for _ in range(52)] == ["delta"] + 50 * ["measured"] + ["delta"]


def test_every_reason_to_send_all_weights_has_its_name() -> None:
    seen: set[str] = {Chooser("off").send(), Chooser("on").send(able=False), Chooser("auto", 1_000).send()}
    chooser = Chooser("on", 1_000)
    seen.add(chooser.send())
    assert chooser.send() == "delta"
    chooser.staged.fill(version(2), [("w", torch.ones(1_000, dtype=torch.uint8))])
    seen.add(chooser.send())
    chooser.deltas.forget()
    assert chooser.send() == "first"
    assert chooser.send() == "delta"
    assert seen | {"measured", "refused"} == set(get_args(FullReason)), "the last two are shown in other tests"


def test_a_version_that_failed_leaves_no_base() -> None:
    chooser = Chooser("on", 1_000)
    chooser.send()
    assert chooser.deltas.base_of(chooser.staged, able=True)[1] is None  # and then sending fails
    assert chooser.deltas.base_of(chooser.staged, able=True)[1] == "first"
