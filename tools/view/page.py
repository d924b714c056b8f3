"""Puts rollouts into one HTML file that needs nothing else: no server, no network, no library.

The list's columns and all texts are in one JSON block, which is read when the page opens. Tokens are in blocks of about
half a megabyte, of which the page decodes one when a rollout of it is shown. All numbers are little-endian, in base64.

    rollout   n_json, n_tokens, n_teachers uint32 | JSON, padded to 4 bytes (`Details`)
              numbers of the ids uint32 [L] | student log-probs uint16 [L] | teachers' log-probs uint16 [M, L]
    prompt    n_tokens uint32 | numbers of the ids uint32 [L]

A rollout has its tokens after the prompt, which is stored once for all rollouts that have it. A log-prob is stored as
its distance from 0 in steps of 1/1024 nat, and ends at -63.99.

Nothing in the file is markup that was not written here: texts are in JSON in which `<` is escaped, or in base64. The
page puts them into text nodes, and its Content-Security-Policy runs only the script whose hash it names.
"""

from __future__ import annotations

import base64
import hashlib
import html
import struct
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from stillhouse.protocol.messages import Branch, VersionSpan
from stillhouse.tools.view.heads import Heads
from stillhouse.tools.view.rollouts import Read
from stillhouse.tools.view.vocabulary import TokenTexts
from stillhouse.tools.view.worst_tokens import worst_tokens

HERE: Final = Path(__file__).parent
SCRIPTS: Final = ("data.js", "tokens.js", "page.js")
BLOCK_BYTES: Final = 1 << 19
LOGPROB_STEPS: Final = 1024
"""Steps per nat."""
ABSENT: Final = 65_535
"""Code of a log-prob that was not recorded: of a token that was not sampled, or that the teacher did not score."""
NOT_FINITE: Final = 65_534
LOWEST: Final = 65_533
COLUMNS: Final = {
    "step": "<u4", "task": "<u4", "sample": "<u4", "tag": "<u4", "reward": "<f4", "length": "<u4", "trained": "<u4",
    "staleness": "<i4", "gap": "<f4", "finish": "<u4", "prompt": "<u4", "flags": "<u4", "block": "<u4", "at": "<u4",
}  # fmt: skip
"""Column of the list -> dtype. A missing reward or gap is NaN, a staleness that is not known -1."""
OFFLINE, LEFT_OUT, UNFINISHED = 1, 2, 4
"""Bits of the column `flags`."""
PROMPT_COLUMNS: Final = {"block": "<u4", "at": "<u4"}


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What the page says of the run as a whole."""

    run: str
    record: str
    writer: str
    n_rollouts: int
    """In the record, of which the page may show fewer."""
    alternatives_of: str
    """The model whose likeliest tokens the top-k sets hold: teacher or student."""
    notes: tuple[str, ...]


class Details(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the page knows of one rollout beside its row and its tokens. Offsets count from the start of the rollout."""

    id: str
    batch: str
    """Version that the newest step with it started from."""
    n_prompt: int
    n_turns: int
    group_size: int
    teachers: tuple[str, ...]
    spans: tuple[tuple[int, int, str], ...]
    """(start, end, version) of the sampled tokens."""
    trained: tuple[tuple[int, int, str, int | None], ...]
    """(start, end, version that the step started from, staleness)."""
    branches: tuple[tuple[int, int], ...] = ()
    """(start, follows)."""
    turn_rewards: tuple[tuple[int, float], ...] = ()
    """(end, reward)."""
    worst: tuple[tuple[int, int, tuple[tuple[int, float], ...] | None], ...] = ()
    """(teacher, token, alternatives as (number of the id, log-prob))."""


class Page:
    """Collects rollouts; `html` gives the file."""

    def __init__(self, pieces: TokenTexts, heads: Heads | None = None) -> None:
        self._pieces = pieces
        self._heads = heads
        self._blocks: list[bytearray] = []
        self._rows: dict[str, list[float]] = {name: [] for name in COLUMNS}
        self._prompts: dict[bytes, int] = {}
        self._prompt_texts: list[str] = []
        self._prompt_rows: dict[str, list[float]] = {name: [] for name in PROMPT_COLUMNS}
        self._names: dict[str, dict[str, int]] = {"tag": {}, "finish": {}}

    @property
    def n_rollouts(self) -> int:
        return len(self._rows["step"])

    def add(self, one: Read) -> None:
        """Add one rollout to the end of the list."""
        item, tail = one.item, slice(one.n_prompt, None)
        gap_ML = one.gaps
        finite = gap_ML[np.isfinite(gap_ML)]
        block, at = self._place(self._encoded(one, tail))
        row: dict[str, float | None] = {
            "step": one.version.step + 1,
            "task": item.task_id,
            "sample": item.sample_index,
            "tag": self._number("tag", item.tag),
            "reward": item.reward,
            "length": int(one.sampled_L.sum()),
            "trained": sum(part.end - part.start for part in one.trained),
            "staleness": -1 if one.staleness is None else one.staleness,
            "gap": float(finite.mean()) if len(finite) and one.behaviour_known else None,
            "finish": self._number("finish", item.finish_reason or ""),
            "prompt": self._prompt(one.ids_L[: one.n_prompt]),
            "flags": OFFLINE * one.offline + LEFT_OUT * one.left_out + UNFINISHED * (not item.final),
            "block": block,
            "at": at,
        }
        for name, value in row.items():
            self._rows[name].append(float("nan") if value is None else value)

    def html(self, facts: Facts) -> str:
        """The whole file."""
        script = "".join((HERE / name).read_text(encoding="utf-8") for name in SCRIPTS)
        style = (HERE / "page.css").read_text(encoding="utf-8")
        whole = {
            "facts": facts,
            "columns": _encoded_columns(self._rows, COLUMNS),
            "prompts": {"texts": self._prompt_texts, "columns": _encoded_columns(self._prompt_rows, PROMPT_COLUMNS)},
            "pieces": {"texts": self._pieces.texts, "ids": _base64_of(np.array(self._pieces.ids, "<i4").tobytes())},
            **{name: list(names) for name, names in self._names.items()},
        }
        parts = {
            "TITLE": html.escape(facts.run),
            "POLICY": f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; base-uri 'none'; "
            "form-action 'none'",
            "STYLE": style,
            "DATA": _data_block("data", "application/json", _escaped(whole))
            + "".join(
                _data_block(f"block-{i}", "application/octet-stream", _base64_of(block))
                for i, block in enumerate(self._blocks)
            ),
            "SCRIPT": script,
        }
        frame = (HERE / "page.html").read_text(encoding="utf-8").split("@@")
        return "".join(parts[part] if i % 2 else part for i, part in enumerate(frame))

    def _encoded(self, one: Read, tail: slice) -> bytes:
        details = Details(
            id=one.item.rollout_id,
            batch=str(one.version),
            n_prompt=one.n_prompt,
            n_turns=one.item.n_turns,
            group_size=one.item.group_size,
            teachers=one.item.teachers,
            spans=_spans(one.item.spans),
            trained=tuple((t.start, t.end, str(t.version), t.staleness) for t in one.trained),
            branches=_branches(one.item.branches),
            turn_rewards=tuple((t.end, t.reward) for t in one.item.turn_rewards),
            worst=self._worst(one),
        )
        plain = msgspec.json.encode(details)
        plain += b" " * (-len(plain) % 4)
        numbers_L = self._pieces.numbers(one.ids_L[tail])
        known_L = one.sampled_L[tail] & one.behaviour_known
        return b"".join(
            (
                struct.pack("<III", len(plain), len(numbers_L), len(one.teacher_ML)),
                plain,
                numbers_L.astype("<u4").tobytes(),
                encoded_logprobs(one.behaviour_L[tail], known_L).tobytes(),
                encoded_logprobs(one.teacher_ML[:, tail], one.scored_ML[:, tail]).tobytes(),
            )
        )

    def _worst(self, one: Read) -> tuple[tuple[int, int, tuple[tuple[int, float], ...] | None], ...]:
        found: list[tuple[int, int, tuple[tuple[int, float], ...] | None]] = []
        for worst in worst_tokens(one, self._heads):
            others = worst.alternatives
            numbers = self._pieces.numbers(np.array([other.token_id for other in others or ()], np.int32)).tolist()
            named = None if others is None else tuple(zip(numbers, (other.logprob for other in others), strict=True))
            found.append((worst.teacher, worst.at, named))
        return tuple(found)

    def _prompt(self, ids_L: npt.NDArray[np.int32]) -> int:
        """The number of a prompt, which is stored when it is new."""
        key = ids_L.tobytes()
        if key not in self._prompts:
            self._prompts[key] = len(self._prompts)
            self._prompt_texts.append(self._pieces.text(ids_L.tolist()))
            numbers_L = self._pieces.numbers(ids_L)
            block, at = self._place(struct.pack("<I", len(numbers_L)) + numbers_L.astype("<u4").tobytes())
            self._prompt_rows["block"].append(block)
            self._prompt_rows["at"].append(at)
        return self._prompts[key]

    def _number(self, column: str, name: str) -> int:
        return self._names[column].setdefault(name, len(self._names[column]))

    def _place(self, stored: bytes) -> tuple[int, int]:
        """Store these bytes. Returns their block, and their offset in it, which is a multiple of 4."""
        if not self._blocks or len(self._blocks[-1]) >= BLOCK_BYTES:
            self._blocks.append(bytearray())
        block = self._blocks[-1]
        at = len(block)
        block += stored + bytes(-len(stored) % 4)
        return len(self._blocks) - 1, at


def encoded_logprobs(logprobs: npt.NDArray[np.float32], known: npt.NDArray[np.bool_]) -> npt.NDArray[Any]:
    """Codes uint16 of log-probs, of the same shape. A log-prob above 0 by rounding becomes 0."""
    with np.errstate(invalid="ignore"):
        steps = np.rint(np.clip(-logprobs.astype(np.float64) * LOGPROB_STEPS, 0, LOWEST))
    steps = np.where(np.isnan(logprobs) | np.isinf(logprobs), NOT_FINITE, steps)
    return np.where(known, steps, ABSENT).astype("<u2")


def _data_block(name: str, kind: str, text: str) -> str:
    """A block of data, which a browser neither runs nor shows. `text` must not hold `<`."""
    return f'<script type="{kind}" id="{name}">{text}</script>\n'


def _escaped(value: object) -> str:
    """JSON without `<`, so that no text in it can end its block."""
    return msgspec.json.encode(value).decode().replace("<", "\\u003c")


def _encoded_columns(rows: Mapping[str, Sequence[float]], dtypes: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Columns as the page's script reads them: (dtype, base64)."""
    return {name: (dtypes[name], _base64_of(np.array(rows[name], dtypes[name]).tobytes())) for name in dtypes}


def _base64_of(raw: bytes | bytearray) -> str:
    return base64.b64encode(raw).decode("ascii")


def _hash(text: str) -> str:
    return f"'sha256-{_base64_of(hashlib.sha256(text.encode()).digest())}'"


def _spans(spans: Iterable[VersionSpan]) -> tuple[tuple[int, int, str], ...]:
    return tuple((span.start, span.end, str(span.version)) for span in spans)


def _branches(branches: Sequence[Branch]) -> tuple[tuple[int, int], ...]:
    return tuple((branch.start, branch.follows) for branch in branches)
