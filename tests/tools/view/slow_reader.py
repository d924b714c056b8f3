"""Reads a record, and a page, with nothing of the project: byte by byte, and token by token with plain loops."""

from __future__ import annotations

import base64
import html.parser
import json
import struct
import zlib
from dataclasses import dataclass, field
from typing import Any

import msgpack

MAGIC = b"stillhouse batches\n"


@dataclass
class Token:
    """What is known of one token of a rollout. None: nothing was recorded."""

    id: int
    version: str | None = None
    student: float | None = None
    teachers: list[float | None] = field(default_factory=list[float | None])
    trained: str | None = None
    """Version that the step started from."""


@dataclass
class Seen:
    """One rollout."""

    id: str
    tag: str
    reward: float | None
    n_prompt: int
    tokens: list[Token]


def records(data: bytes) -> list[tuple[int, Any, bytes]]:
    """(kind, header, blob) of each record."""
    assert data.startswith(MAGIC)
    at, found = len(MAGIC), list[tuple[int, Any, bytes]]()
    while at < len(data):
        kind, n_header, n_blob, _ = struct.unpack_from("<BIQI", data, at)
        at += 17
        found.append(
            (kind, msgpack.unpackb(data[at : at + n_header], strict_map_key=False), data[at + n_header :][:n_blob])
        )
        at += n_header + n_blob
    return found


def recorded(data: bytes) -> dict[str, Seen]:
    """Every rollout of a record without abandoned branches, by its id; "offline " stands before those mixed in."""
    seen: dict[str, Seen] = {}
    for kind, header, blob in records(data):
        if kind != 2:
            continue
        step = "{}.{}".format(*header["version"])
        for entry in header["items"]:
            raw = blob[entry["start"] : entry["start"] + entry["stored_bytes"]]
            _add(seen, step, header["masked"], entry, zlib.decompress(raw) if entry["compressed"] else raw)
    return seen


def _add(seen: dict[str, Seen], step: str, masked: list[str], entry: dict[str, Any], raw: bytes) -> None:
    item, n = entry["item"], entry["item"]["end"]
    m = len(item["teachers"])
    ids = struct.unpack_from(f"<{n}i", raw, 0)
    mu = struct.unpack_from(f"<{n}f", raw, 4 * n)
    mask = raw[8 * n : 9 * n]
    q = [struct.unpack_from(f"<{n}f", raw, 9 * n + 4 * n * row) for row in range(m)]
    key = ("offline " if entry["offline"] else "") + item["rollout_id"]
    versions: list[str | None] = [None] * n
    for (epoch, number), start, end in item["spans"]:
        for i in range(start, end):
            versions[i] = f"{epoch}.{number}"
    one = seen.setdefault(key, Seen(item["rollout_id"], item["tag"], None, 0, []))
    one.reward, one.tag = item["reward"], item["tag"]
    one.n_prompt = next((i for i in range(n) if versions[i] is not None), n)
    for i in range(n):
        if i == len(one.tokens):
            one.tokens.append(Token(ids[i], teachers=[None] * m))
        token = one.tokens[i]
        token.version = versions[i]
        if versions[i] is None or (token.trained is not None and not mask[i]):
            continue
        token.student = mu[i]
        token.teachers = [q[row][i] if mask[i] or q[row][i] != 0 else token.teachers[row] for row in range(m)]
        if mask[i] and (entry["offline"] or item["rollout_id"] not in masked):
            token.trained = step


class _Blocks(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.scripts: list[dict[str, str | None]] = []
        self.texts: dict[str, str] = {}
        self.links: list[str] = []
        self._open = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = dict(attrs)
        self.links += [f"{tag} {name}={value}" for name, value in attrs if name in ("src", "href", "srcset", "action")]
        if tag == "script":
            self.scripts.append(named)
            self._open = named.get("id") or "script"

    def handle_endtag(self, tag: str) -> None:
        self._open = ""

    def handle_data(self, data: str) -> None:
        if self._open:
            self.texts[self._open] = self.texts.get(self._open, "") + data


class PageRead:
    """A page, read as a browser without scripts would."""

    def __init__(self, text: str) -> None:
        blocks = _Blocks()
        blocks.feed(text)
        blocks.close()
        self.scripts, self.links, self._texts = blocks.scripts, blocks.links, blocks.texts
        self.data: Any = json.loads(blocks.texts["data"])
        self.columns = {name: self._numbers(*stored) for name, stored in self.data["columns"].items()}
        self._ids = self._numbers("<i4", self.data["pieces"]["ids"])
        self._prompts = {name: self._numbers(*stored) for name, stored in self.data["prompts"]["columns"].items()}

    @property
    def n_rollouts(self) -> int:
        return len(self.columns["step"])

    def piece(self, number: int) -> str:
        return self.data["pieces"]["texts"][number]

    def details(self, index: int) -> dict[str, Any]:
        raw, at = self._block(self.columns["block"][index]), self.columns["at"][index]
        return json.loads(raw[at + 12 : at + 12 + struct.unpack_from("<I", raw, at)[0]])

    def rollout(self, index: int) -> Seen:
        raw, at = self._block(self.columns["block"][index]), self.columns["at"][index]
        n_json, n, m = struct.unpack_from("<III", raw, at)
        about, at = json.loads(raw[at + 12 : at + 12 + n_json]), at + 12 + n_json
        numbers = struct.unpack_from(f"<{n}I", raw, at)
        mu = struct.unpack_from(f"<{n}H", raw, at + 4 * n)
        q = [struct.unpack_from(f"<{n}H", raw, at + 6 * n + 2 * n * row) for row in range(m)]
        prompt = self.columns["prompt"][index]
        praw, pat = self._block(self._prompts["block"][prompt]), self._prompts["at"][prompt]
        (n_prompt,) = struct.unpack_from("<I", praw, pat)
        before = struct.unpack_from(f"<{n_prompt}I", praw, pat + 4)
        tokens = [Token(self._ids[number], teachers=[None] * m) for number in before]
        tokens += [Token(self._ids[numbers[i]], None, _nats(mu[i]), [_nats(row[i]) for row in q]) for i in range(n)]
        for start, end, version in about["spans"]:
            for i in range(start, end):
                tokens[i].version = version
        for start, end, step, _ in about["trained"]:
            for i in range(start, end):
                tokens[i].trained = step
        reward = self.columns["reward"][index]
        tag = self.data["tag"][self.columns["tag"][index]]
        return Seen(about["id"], tag, None if reward != reward else reward, about["n_prompt"], tokens)

    def _block(self, number: int) -> bytes:
        return base64.b64decode(self._texts[f"block-{number}"], validate=True)

    def _numbers(self, dtype: str, stored: str) -> list[Any]:
        raw = base64.b64decode(stored, validate=True)
        return list(struct.unpack(f"<{len(raw) // 4}{ {'<u4': 'I', '<i4': 'i', '<f4': 'f'}[dtype] }", raw))


def _nats(code: int) -> float | None:
    return None if code == 65_535 else float("nan") if code == 65_534 else -code / 1024
