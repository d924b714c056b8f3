"""Reads the journal of a buffer that is dead, from its files alone: which segments and scores does it hold?

Shares no code with the buffer. Format: docs/decisions/journal.md and the docstrings of `buffer/journal`.
"""

from __future__ import annotations

import struct
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import lmdb
import msgspec

unpack = msgspec.msgpack.decode


class Tokens(NamedTuple):
    """Raw bytes of a run of tokens."""

    ids: bytes
    logprobs: bytes
    loss_mask: bytes


class Found:
    """What the journal holds."""

    def __init__(self) -> None:
        self.rollouts: dict[str, dict[int, Tokens]] = {}
        """Tokens by rollout and the offset at which they start."""
        self.in_image: set[str] = set()
        """Rollouts that are in the image."""
        self.blobs: set[int] = set()
        """Numbers of all blobs in the database."""
        self.referred: set[int] = set()
        """Those that the image lists, or a turn after it."""
        self.image_bytes = 0

    def covers(self, rollout_id: str, start: int, tokens: Tokens) -> bool:
        """Return True if these tokens are there, byte for byte, in whatever pieces."""
        joined: dict[int, tuple[int, float | int, int]] = {}
        for at, run in self.rollouts.get(rollout_id, {}).items():
            for i in range(len(run.loss_mask)):
                joined[at + i] = token(run, i)
        return all(joined.get(start + i) == token(tokens, i) for i in range(len(tokens.loss_mask)))


def token(run: Tokens, i: int) -> tuple[int, float, int]:
    (token_id,), (logprob,) = struct.unpack_from("<i", run.ids, 4 * i), struct.unpack_from("<f", run.logprobs, 4 * i)
    return token_id, logprob, run.loss_mask[i]


def read(folder: Path) -> Found:
    """Everything in the journal. Raises AssertionError where it is damaged or incomplete."""
    found = Found()
    with lmdb.open(str(folder), readonly=True, lock=False) as database, database.begin() as transaction:
        records = {bytes(key): bytes(value) for key, value in transaction.cursor()}
    blobs: dict[int, list[bytes]] = {}
    for key in sorted(key for key in records if key[:1] == b"v"):
        number, part = struct.unpack(">QI", key[1:])
        assert len(blobs.setdefault(number, [])) == part, f"a part of blob {number} is missing"
        blobs[number].append(content(records[key])[1])
    contents = {number: unpack(b"".join(parts)) for number, parts in blobs.items()}
    found.blobs = set(contents)
    first_part = 0
    if b"image" in records:
        number, first_part, _ = struct.unpack(">QQQ", content(records[b"image"])[1])
        if number:
            read_image(found, (folder / f"image-{number}").read_bytes(), contents)
    parts: list[bytes] = []
    for key in sorted(key for key in records if key[:1] == b"l"):
        if int.from_bytes(key[1:], "big") >= first_part:
            last, body = content(records[key])
            parts.append(body)
            if last:
                read_turn(found, b"".join(parts), contents)
                parts = []
    assert not parts, "a turn has no end"
    return found


def content(part: bytes) -> tuple[bool, bytes]:
    crc, last = struct.unpack_from(">IB", part)
    assert zlib.crc32(part[5:]) == crc, "a damaged part"
    return bool(last), part[5:]


def read_image(found: Found, file: bytes, blobs: dict[int, list[bytes]]) -> None:
    n_bytes, n_blobs, crc, crc_of_list = struct.unpack(">QQII", file[-24:])
    body, numbers = file[:n_bytes], file[n_bytes:-24]
    assert (zlib.crc32(body), zlib.crc32(numbers)) == (crc, crc_of_list)
    found.image_bytes = len(file)
    found.referred = set(struct.unpack(f"<{n_blobs}Q", numbers))
    classes, objects = unpack(unpack(body)[1])
    names = [name for name, _ in classes]
    for index, *values in objects:
        if names[index] != "RolloutState":
            continue
        fields = dict(zip(classes[index][1], values, strict=True))
        rollout_id = fields["ticket"][2]["rollout_id"]
        store = objects[fields["tokens"][1]]
        assert names[store[0]] == "TokenStore"
        found.in_image.add(rollout_id)
        for at, run in runs_of(store[1:], blobs, found.referred):
            found.rollouts.setdefault(rollout_id, {})[at] = run


def runs_of(contents: list[Any], blobs: dict[int, list[bytes]], listed: set[int]) -> list[tuple[int, Tokens]]:
    """The runs of tokens of one rollout in the image."""
    _, _, _, (_, *pieces), *columns = contents[:7]
    own = [column[3] for column in columns]
    runs: list[tuple[int, Tokens]] = []
    at = 0
    for start, end, blob in zip(pieces[::3], pieces[1::3], pieces[2::3], strict=True):
        if blob:
            assert blob[1] in listed, f"the image refers to blob {blob[1]} and does not list it"
            runs.append((start, Tokens(*blobs[blob[1]][:3])))
            continue
        n = end - start
        runs.append((start, Tokens(own[0][4 * at : 4 * (at + n)], own[1][4 * at : 4 * (at + n)], own[2][at : at + n])))
        at += n
    return runs


def read_turn(found: Found, body: bytes, blobs: dict[int, list[bytes]]) -> None:
    for kind, *entry in unpack(body)[1]:
        if kind != "said":
            continue
        _, _, frames, *more = entry
        header, inline = unpack(frames[0]), list(frames[1:])
        arrays: list[bytes] = []
        each, *numbers = more[0] if more and more[0] else (len(inline), 0)
        for number in numbers:
            arrays += blobs[number] if number else [inline.pop(0) for _ in range(each)]
            found.referred |= {number} - {0}
        if header["type"] == "Segment":
            found.rollouts.setdefault(header["rollout_id"], {})[header["start"]] = Tokens(*arrays[:3])
