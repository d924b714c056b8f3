"""A page that gets more rollouts while it is open in a browser.

The browser says how much of the page it has (`Cursor`); `since` gives it the rest: changed rows, and what was added at
the ends of everything else. Rows are never removed: those of an abandoned branch get a flag, and the page hides
them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final

import msgspec
import numpy as np
from msgspec import Meta

from stillhouse.tools.view.heads import Heads
from stillhouse.tools.view.page import (
    ABANDONED,
    COLUMNS,
    PROMPT_COLUMNS,
    SCRIPTS,
    Facts,
    Page,
    base64_of,
    encoded_columns,
)
from stillhouse.tools.view.rollouts import Read
from stillhouse.tools.view.vocabulary import TokenTexts

LIVE_SCRIPTS: Final = (*SCRIPTS, "live.js")
ROW_BYTES: Final = 100
"""What a row of the list takes, about."""
Count = Annotated[int, Meta(ge=0)]


class Cursor(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How much of a page a browser has."""

    page: Count
    """Number of the page: a server that reads the record anew makes another one."""
    changes: Count
    prompts: Count
    pieces: Count
    tags: Count
    finishes: Count
    blocks: Count
    last_block_bytes: Count
    """Bytes that it has of the last of these blocks."""


class StaleCursor(Exception):
    """The browser has another page."""


class GrowingPage(Page):
    """`n_bytes` grows with what is added, about as the file would."""

    def __init__(self, pieces: TokenTexts, number: int, heads: Heads | None = None) -> None:
        """`number`: of this page, as in Cursor."""
        super().__init__(pieces, heads)
        self._number_of_page = number
        self._changes: list[int] = []
        """Rows in the order in which they were added or changed."""

    @property
    def n_bytes(self) -> int:
        """Size of the page, about."""
        stored = sum(map(len, self._blocks)) * 4 // 3
        return stored + ROW_BYTES * self.n_rollouts + sum(map(len, self._prompt_texts)) + 8 * len(self._changes)

    def add(self, one: Read) -> None:
        self._changes.append(self.n_rollouts)
        super().add(one)

    def update(self, row: int, one: Read) -> None:
        """A rollout of the page was in one more batch, or in one less."""
        for name, value in self._row(one).items():
            self._rows[name][row] = value
        self._changes.append(row)

    def abandon(self, row: int) -> None:
        """No batch with this rollout is on the branch that was kept."""
        self._rows["flags"][row] = int(self._rows["flags"][row]) | ABANDONED
        self._changes.append(row)

    @property
    def cursor(self) -> Cursor:
        """All of the page."""
        return Cursor(
            page=self._number_of_page,
            changes=len(self._changes),
            prompts=len(self._prompt_texts),
            pieces=len(self._pieces.ids),
            tags=len(self._names["tag"]),
            finishes=len(self._names["finish"]),
            blocks=len(self._blocks),
            last_block_bytes=len(self._blocks[-1]) if self._blocks else 0,
        )

    def live_html(self, facts: Facts, status: Mapping[str, object]) -> str:
        """The whole file, with the script that asks for more."""
        more = {"live": {"cursor": self.cursor, "status": status}}
        return self._html(facts, LIVE_SCRIPTS, more, "; connect-src 'self'")

    def since(self, have: Cursor) -> dict[str, Any]:
        """All that a browser lacks which has this much of the page. Raises StaleCursor."""
        now = self.cursor
        fields = msgspec.structs.asdict(now)
        if have.page != now.page or any(n > fields[name] for name, n in _counts(have).items()):
            raise StaleCursor(f"the browser has {have}, the page is {now}")
        rows = list(dict.fromkeys(self._changes[have.changes :]))
        prompts = {name: values[have.prompts :] for name, values in self._prompt_rows.items()}
        return {
            "cursor": now,
            "index": base64_of(np.array(rows, "<u4").tobytes()),
            "n_rollouts": self.n_rollouts,
            "columns": encoded_columns(
                {name: [column[i] for i in rows] for name, column in self._rows.items()}, COLUMNS
            ),
            "prompts": {
                "texts": self._prompt_texts[have.prompts :],
                "columns": encoded_columns(prompts, PROMPT_COLUMNS),
            },
            "pieces": {
                "texts": self._pieces.texts_from(have.pieces),
                "ids": base64_of(np.array(self._pieces.ids[have.pieces :], "<i4").tobytes()),
            },
            "tag": list(self._names["tag"])[have.tags :],
            "finish": list(self._names["finish"])[have.finishes :],
            "blocks": self._blocks_since(have),
        }

    def _blocks_since(self, have: Cursor) -> list[tuple[int, str]]:
        """(number of the block, what it has more)."""
        found: list[tuple[int, str]] = []
        first = max(0, have.blocks - 1)
        for i, block in enumerate(self._blocks[first:], first):
            known = have.last_block_bytes if i == have.blocks - 1 else 0
            if len(block) > known:
                found.append((i, base64_of(block[known:])))
        return found


def _counts(cursor: Cursor) -> dict[str, int]:
    """The counts that only grow."""
    return {name: n for name, n in msgspec.structs.asdict(cursor).items() if name not in ("page", "last_block_bytes")}
