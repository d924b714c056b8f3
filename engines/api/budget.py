"""What a run has sent to an API, over all starts, and what it may send."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Final

import msgspec

from stillhouse.engines.api.config import MILLION, ApiConfig
from stillhouse.protocol.atomic_file import write_atomic

FOLDER: Final = "spent"
"""In a run folder."""
log = logging.getLogger(__name__)


class _Spent(msgspec.Struct, frozen=True):
    tokens: int


class Budget:
    """Reserved before a request is sent, so that it is never exceeded; kept in a file, so that a restart goes on."""

    def __init__(self, file: Path, config: ApiConfig) -> None:
        """Raises ValueError for a file that cannot be read: what is spent is then not known."""
        self._file, self._config = file, config
        self.tokens = 0
        self.refused = False
        """Something could not be sent any more."""
        if file.exists():
            try:
                self.tokens = msgspec.json.decode(file.read_bytes(), type=_Spent).tokens
            except (OSError, msgspec.DecodeError) as error:
                raise ValueError(f"{file} should say how many tokens the run has sent: {error}") from None
        self._saved = self.tokens

    def take(self, tokens: int) -> bool:
        """Reserve tokens for a request; False where they would exceed the budget."""
        if self.tokens + tokens > self._config.most_tokens:
            self.refused = True
            return False
        self.tokens += tokens
        return True

    def give_back(self, tokens: int) -> None:
        """What cost nothing."""
        self.tokens -= tokens

    def add(self, tokens: int) -> None:
        """What the API charged beyond the reservation."""
        self.tokens += tokens

    def save(self) -> None:
        if self.tokens != self._saved:
            self._file.parent.mkdir(exist_ok=True)
            write_atomic(self._file, msgspec.json.encode(_Spent(self.tokens)))
            self._saved = self.tokens

    @property
    def money(self) -> float:
        return self.tokens / MILLION * self._config.price

    def __str__(self) -> str:
        config = self._config
        tokens = f"{self.tokens:,} tokens sent" + (f" of {config.budget_tokens:,}" if config.budget_tokens else "")
        if not config.price:
            return tokens
        return f"{tokens}, {self.money:.4g} spent" + (f" of {config.budget:g}" if config.budget else "")
