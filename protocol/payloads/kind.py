"""What a teacher may send beside the log-prob of each sampled token: the interface of its kinds. NumPy only.

    teacher.* --registry.kind_of--> PayloadKind --encoder--> bytes --(buffer)--> --registry.kind_of_bytes--> Rows

Each kind is one file of this folder and one line of `registry`. It says which keys choose it, what it needs of the
engines, how many bytes a token takes at most, and how its payloads are made and read. Teachers, buffer, learner and
launcher ask the kind, and never compare names.

Legend: N tokens that an engine scores, T tokens of a payload among them, K columns, H hidden size, R rows of one
teacher, S draws per row.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from stillhouse.protocol.messages import TopIdsWanted

Int32s: TypeAlias = npt.NDArray[np.int32]
Float32s: TypeAlias = npt.NDArray[np.float32]
Packed: TypeAlias = bytes | memoryview


class PayloadError(ValueError):
    """A teacher's payload is missing or unusable; the message names the teacher."""


# ------------------------------------------------------------------------------------------------- between engines


class EngineNeed(NamedTuple):
    """Something that not every engine can do."""

    role: Literal["actor", "teacher"]
    does: str
    """What an engine of this role does that can."""


class ScoreOptions(NamedTuple):
    """What an engine is asked for beside the log-probs of the given tokens."""

    top_k: int = 0
    """Number of the likeliest tokens, with their log-probs."""
    hidden: bool = False
    """The last hidden states. Only of an engine that meets `hidden.HIDDEN_STATES`."""


@dataclass(frozen=True, slots=True)
class ScoreResult:
    """N = end - start of the request (engines.base.ScoreRequest)."""

    logprobs: Float32s
    """[N]"""
    top_ids: Int32s | None = None
    """[N, K] the likeliest tokens at each position, likeliest first; or those of the request."""
    top_logprobs: Float32s | None = None
    """[N, K]"""
    hidden: npt.NDArray[np.uint16] | None = None
    """[N, H] last hidden state at each position, the input of the output head: bits of bfloat16."""
    codes: npt.NDArray[np.uint8] | None = None
    """[N] From a teacher with another tokenizer: `payloads.aligned`. No engine gives this."""

    @staticmethod
    def empty(top_k: int, hidden_size: int | None = None) -> ScoreResult:
        """The result of a request for no tokens, N = 0."""
        none = np.zeros(0, np.float32)
        hidden = None if hidden_size is None else np.zeros((0, hidden_size), np.uint16)
        if not top_k:
            return ScoreResult(none, hidden=hidden)
        return ScoreResult(none, np.zeros((0, top_k), np.int32), np.zeros((0, top_k), np.float32), hidden)


class Vocabulary(Protocol):
    """The part of an engine that every encoder reads."""

    @property
    def vocab_size(self) -> int:
        """Rows of its output head."""
        ...


class TopIds(NamedTuple):
    """A student's likeliest tokens at T positions."""

    ids_TK: Int32s
    """Each row likeliest first; 0 after its first `counts_T` columns."""
    counts_T: npt.NDArray[np.int64]
    """At least 1 each."""


class Encoder(ABC):
    """Makes a teacher's payloads from what its engine gives. One per teacher."""

    options: ScoreOptions
    """What the engine is asked for where there are tokens to train."""

    def given(self, top_ids: bytes, n_tokens: int) -> TopIds | None:
        """The tokens that are to be scored at each of these positions, from an actor's payload; None: the teacher's
        own. Raises MalformedMessage or EncodeError where it cannot be used."""
        return None

    @abstractmethod
    def encode(self, result: ScoreResult, place: slice, given: TopIds | None) -> bytes:
        """The payload for the T tokens of a result at `place`; for none, if the engine was not asked. Raises
        EncodeError for numbers that cannot be sent."""


# ---------------------------------------------------------------------------------------------------- in the learner


@dataclass(frozen=True)
class PayloadRows(ABC):
    """What a learner reads from the payloads of one teacher: a row for each token to train."""

    uniform_RS: npt.NDArray[np.float64] = field(kw_only=True, default_factory=lambda: np.zeros((0, 0)))
    """Random numbers per row, for a divergence that draws tokens (learner.objectives.distributions); else empty."""

    @property
    @abstractmethod
    def n_rows(self) -> int: ...

    @abstractmethod
    def at(self, rows: npt.NDArray[np.int64]) -> PayloadRows:
        """Some rows."""

    @classmethod
    @abstractmethod
    def joined(cls, parts: Sequence[Any]) -> PayloadRows:
        """Concatenated rows of one teacher. Raises PayloadError for parts that do not belong together."""

    def drawn(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """`uniform_RS` at some rows."""
        return self.uniform_RS[rows] if len(self.uniform_RS) else self.uniform_RS


class PayloadPart(NamedTuple):
    """One payload of a teacher, and the rows of it that are trained."""

    body: memoryview
    n_tokens: int
    """T that it should have."""
    rows: npt.NDArray[np.int64]


# ------------------------------------------------------------------------------------------------------------- a kind


class PayloadOptions(Protocol):
    """The keys of `teacher` (or of a pool) that say what is sent. teachers.config has their meaning."""

    @property
    def payload(self) -> str: ...
    @property
    def top_k(self) -> int: ...
    @property
    def top_k_of(self) -> str: ...
    @property
    def top_mass(self) -> float: ...
    @property
    def tail(self) -> str: ...
    @property
    def tokenizer(self) -> str: ...


class ModelSizes(NamedTuple):
    """Sizes by which payloads are bounded; None: not known."""

    vocabulary: int | None
    """Rows of the student's embedding."""
    hidden: int | None
    """Size of a hidden state of the teacher's model."""


@dataclass(frozen=True)
class PayloadKind(ABC):
    """One kind of payload, with the options of one pool. The defaults are those of a kind that sends nothing."""

    options: PayloadOptions

    payload: ClassVar[str]
    """The value of teacher.payload with which it can be chosen."""
    what: ClassVar[str]
    """Its contents, for messages: the hidden states."""
    magic: ClassVar[bytes] = b""
    """The first two bytes of its payloads."""
    header_bytes: ClassVar[int] = 0
    distributions: ClassVar[bool] = True
    """Whether the learner can compare whole distributions."""
    needs: ClassVar[tuple[EngineNeed, ...]] = ()
    needs_head: ClassVar[bool] = False
    """Whether the learner must have the output head of the teacher's model."""
    exact: ClassVar[bool] = True
    """Whether every token takes `most_bytes`, and not only some."""

    @classmethod
    @abstractmethod
    def chosen_by(cls, options: PayloadOptions) -> bool:
        """Whether these options choose this kind."""

    @staticmethod
    def mistake(options: PayloadOptions) -> str:
        """Which of its options do not fit others, beginning with the key; empty: none."""
        return ""

    @abstractmethod
    def setting(self, key: str) -> tuple[str, object]:
        """The key that chooses it, and its value. `key`: of the pool, teacher or pools.NAME."""

    def instead(self, key: str) -> str:
        """What to set where an engine does not meet its needs."""
        return f"{key}.top_k = 256"

    def mistakes(self, key: str, sizes: ModelSizes) -> Iterable[str]:
        """One message for each of its options that the models do not allow."""
        return ()

    def doubts(self, divergence: str) -> str:
        """Why it serves a divergence badly, after the key; empty: it does not."""
        return ""

    @property
    def top_ids(self) -> TopIdsWanted | None:
        """The sets that actors report for it."""
        return None

    def most_bytes(self, sizes: ModelSizes) -> int | None:
        """The most that one token takes, without the header; None: not known."""
        return 0

    def encoder(self, engine: Any, vocab_tokens: int) -> Encoder | None:
        """For the scores of one engine (a ScoringEngine); None: nothing is sent. `vocab_tokens`: ids of the tokenizer.
        Raises ValueError for an engine that does not meet the needs."""
        return None

    @classmethod
    def n_tokens(cls, payload: Packed) -> int:
        """T. Checks that the lengths fit the header; contents are for the learner to check. Raises MalformedMessage."""
        raise NotImplementedError

    @classmethod
    def read(cls, teacher: str, pieces: Sequence[PayloadPart], vocab_tokens: int) -> PayloadRows:
        """The trained rows of one teacher's payloads, in order; `pieces` is not empty. Raises PayloadError or
        MalformedMessage."""
        raise NotImplementedError
