"""Settings of a teacher worker. No torch here."""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from engines.registry import check_engine
from engines.sglang.config import ServerConfig, SGLangConfig, check_urls
from protocol.topk_codec import MAX_TOKENS_KEPT, REST_BITS, SMALL_VOCABULARY

FLUSH_TIMEOUT_S: Final = 5.0
"""How long a leaving teacher waits for its last grades to be acknowledged."""


class TeacherConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One teacher process: an engine that grades, and how much work it holds."""

    engine: str = "auto"
    """Scoring engine. `torch` is the embedded one; `sglang`: each teacher has an SGLang server; `auto`: sglang where
    there are GPUs and teacher.server.python has SGLang (or with urls), else torch. Others: one that an installed
    package names in its entry points, or `module:attribute` (docs/engines.md)."""
    sglang: SGLangConfig = msgspec.field(default_factory=SGLangConfig)
    """How a teacher talks to its SGLang server."""
    server: ServerConfig = msgspec.field(default_factory=ServerConfig)
    """How the launcher starts those servers."""
    urls: tuple[str, ...] = ()
    """Running SGLang servers to use instead of starting some, one per teacher."""
    pool: str = "default"
    """Name of the one pool of a run without `pools`; tasks name the pools that must grade them."""
    device: str = "auto"
    """Torch device of embedded teachers: auto (GPUs where there are any) or cuda: each gets one that is free, and they
    share where there are too few; cpu; cuda:1: all of them on that one."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Of the weights; auto = bfloat16 on cuda, float32 elsewhere."""
    max_batch_tokens: int = 4096
    """Context tokens graded in one packed forward pass."""
    credit_batches: float = 2.0
    """Work asked for ahead, in batches: 2 keeps one batch on its way while another is graded."""
    top_k: int = 0
    """Likeliest tokens per position, at most, of which the teacher sends its log-probs: the divergences between
    distributions need them (learner.objective.divergence = reverse_kl, forward_kl, mixed, jsd, multi_sample). 256 is a
    good cap: see top_mass. 0: of the sampled tokens only."""
    top_mass: float = 0.999
    """A position's set is the smallest whose probabilities sum to this, up to top_k tokens."""
    tail: Literal["auto", "pooled", "each"] = "auto"
    """The tokens behind the set. pooled: their mass together. each: every one, in 5 bits, so 5 / 8 of the vocabulary in
    bytes per position (at most 4,096 tokens). auto: each where the vocabulary has at most 384 tokens."""
    gather_s: float = 0.005
    """How long a lone request waits for company before it is graded, seconds."""
    drain_s: float = 5.0
    """A teacher that is asked to leave (SIGTERM) takes no more work, and has this long to grade what it holds, even
    where launch.shutdown_grace_s is shorter. What is left then goes to other teachers at once."""

    def __post_init__(self) -> None:
        if self.max_batch_tokens < 1:
            raise ValueError(f"teacher.max_batch_tokens is {self.max_batch_tokens}; expected at least 1")
        if self.credit_batches < 1:
            raise ValueError(f"teacher.credit_batches is {self.credit_batches}; expected at least 1")
        if self.gather_s < 0:
            raise ValueError(f"teacher.gather_s is {self.gather_s}; expected 0 or more seconds")
        if not self.drain_s >= 0:
            raise ValueError(f"teacher.drain_s is {self.drain_s}; expected 0 or more seconds")
        if not 0 <= self.top_k <= MAX_TOKENS_KEPT:
            raise ValueError(f"teacher.top_k is {self.top_k}; expected 0 (off) to {MAX_TOKENS_KEPT}")
        if not 0 < self.top_mass <= 1:
            raise ValueError(f"teacher.top_mass is {self.top_mass}; expected a share in (0, 1]")
        if not self.pool:
            raise ValueError("teacher.pool is empty; expected a name, e.g. default")
        check_urls(self.urls)
        check_engine("teacher", self.engine, self.urls)

    def rest_bits(self, vocab_tokens: int) -> int:
        """Bits for each token behind the set; 0 where they are pooled."""
        each = self.tail == "each" or (self.tail == "auto" and vocab_tokens <= SMALL_VOCABULARY)
        return REST_BITS if each else 0

    @property
    def credit_tokens(self) -> int:
        return int(self.max_batch_tokens * self.credit_batches)

    @property
    def leaving_s(self) -> float:
        """Longest between SIGTERM and the moment from which it does nothing but close."""
        return self.drain_s + FLUSH_TIMEOUT_S


class PoolConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Teachers that hold one model, of a run with several. What is left out is as in `teacher`."""

    model: str = ""
    """Their model; empty = models.teacher."""
    count: int = 1
    """How many of them. With urls: as many as there are urls."""
    engine: str | None = None
    """As teacher.engine."""
    urls: tuple[str, ...] = ()
    """Running SGLang servers of this pool."""
    sglang: SGLangConfig | None = None
    """Instead of all of teacher.sglang."""
    server: ServerConfig | None = None
    """Instead of all of teacher.server: other GPUs, another tp."""
    device: str | None = None
    """As teacher.device."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] | None = None
    """As teacher.dtype."""
    max_batch_tokens: int | None = None
    """As teacher.max_batch_tokens."""
    credit_batches: float | None = None
    """As teacher.credit_batches."""
    drain_s: float | None = None
    """As teacher.drain_s."""
    top_k: int | None = None
    """As teacher.top_k."""
    top_mass: float | None = None
    """As teacher.top_mass."""
    tail: Literal["auto", "pooled", "each"] | None = None
    """As teacher.tail."""

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError(f"count is {self.count}; expected at least 1 teacher")
        if self.urls and self.count != len(self.urls):
            raise ValueError(
                f"count is {self.count} with {len(self.urls)} urls; expected the same number of both: each teacher has "
                "a server of its own"
            )

    def settings(self, common: TeacherConfig, name: str) -> TeacherConfig:
        """Of the teachers of this pool. Raises ValueError where they do not fit one another."""
        own = {field: getattr(self, field) for field in self.__struct_fields__ if field not in ("model", "count")}
        told = {field: value for field, value in own.items() if value is not None}
        return msgspec.structs.replace(common, pool=name, **told)
