"""Settings of a teacher worker. No torch here."""

from __future__ import annotations

from typing import Annotated, Final, Literal, TypeAlias

import msgspec
from msgspec import Meta

from stillhouse.engines.api.config import ApiConfig
from stillhouse.engines.config import ScorerSettings, ServerConfig, ServerLinkConfig
from stillhouse.engines.registry import EngineOptions, check_engine
from stillhouse.models.description import LoadDtype, Quantized
from stillhouse.protocol.payloads.kind import PayloadKind
from stillhouse.protocol.payloads.registry import PayloadName, kind_of
from stillhouse.protocol.settings import NonNegativeFloat, NonNegativeInt, PositiveInt, Settings
from stillhouse.protocol.topk_layout import MAX_TOKENS_KEPT

FLUSH_TIMEOUT_S: Final = 5.0
"""Longest wait of a leaving teacher for the acknowledgement of its last scores."""
CREDIT_BATCHES: Final = 2
"""Work requested ahead, in batches: one is on its way while another is scored."""
TopK: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_TOKENS_KEPT)]
TopMass: TypeAlias = Annotated[float, Meta(gt=0, le=1)]
Tail: TypeAlias = Literal["auto", "pooled", "each"]
TokenizerOf: TypeAlias = Literal["student", "other"]
TopKOf: TypeAlias = Literal["teacher", "student"]
OtherEngines: TypeAlias = Annotated[dict[str, Settings], EngineOptions("teacher")]


class TeacherConfig(ScorerSettings, frozen=True, kw_only=True):
    """One teacher process: an engine that scores, and how much work it holds."""

    engines: OtherEngines = msgspec.field(default_factory=dict[str, Settings])
    """Options of engines from other packages, set as teacher.NAME.KEY."""
    sglang: ServerLinkConfig = msgspec.field(default_factory=ServerLinkConfig)
    """The teacher's connection to its SGLang server."""
    api: ApiConfig = msgspec.field(default_factory=ApiConfig)
    """A teacher that somebody else serves behind an OpenAI-style completions API. `--teacher.api URL` sets its url."""
    pool: str = "default"
    """Name of the one pool of a run without `pools`; tasks name the pools that must score them."""
    payload: PayloadName = "top_k"
    """What the teacher sends beside the log-probs of sampled tokens, for divergences between distributions. top_k: its
    likeliest tokens, as the next keys say. hidden: its last hidden state in bfloat16, 2 bytes times the hidden size per
    token; the learner applies the teacher's output head to it, so the divergence is over the whole vocabulary. Needs
    engine = torch, the teacher's model where the learner is, and buffer.max_top_k_bytes of that size."""
    top_k: TopK = 0
    """Most tokens per position whose log-probs the teacher sends, likeliest first. Divergences between distributions
    need them. 256 is a good cap: see top_mass. 0: only the sampled token's log-prob, or with payload = hidden the
    states."""
    top_k_of: TopKOf = "teacher"
    """The model whose likeliest tokens make the sets. teacher: itself. student: as it was when it sampled the token;
    actors report them, and all teachers score the same ones. The gradient of reverse_kl is then nearer to that of the
    whole vocabulary (docs/objectives.md has figures); the divergences that weight by the teacher's probabilities are
    served better by its own."""
    top_mass: TopMass = 0.999
    """A position's set is the smallest whose probabilities (of the model that top_k_of names) sum to this, up to top_k
    tokens."""
    tail: Tail = "auto"
    """Tokens outside the set. pooled: their total mass. each: there are none, the set is the whole vocabulary (at most
    4,096 tokens, up to 3 bytes each). auto: each where the vocabulary has at most 384 tokens, and top_k_of is
    teacher."""
    tokenizer: TokenizerOf = "student"
    """student: the teacher has the student's tokenizer, and scores its token ids. other: it has one of its own. It
    reads the text of an answer in its own tokens, and the prompt in its own chat template; scores belong to the
    shortest runs of tokens that end at the same byte in both (docs/teachers.md). For costs of sampled tokens, and with
    top_k for reverse_kl."""
    drain_s: NonNegativeFloat = 5.0
    """A teacher that is asked to leave (SIGTERM) takes no more work, and has this many seconds to score what it holds,
    even where launch.shutdown_grace_s is shorter. What is left then goes to other teachers at once."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.pool:
            raise ValueError("pool: got an empty name, expected one, e.g. default")
        kind_of(self)  # its own checks
        check_engine("teacher", self.engine, self.urls)
        if self.engine != "auto" and bool(self.api.url) != (self.engine == "api"):
            raise ValueError(f"engine: got {self.engine} with api.url = {self.api.url!r}, expected both or none")
        if self.api.url and self.urls:
            raise ValueError("urls: got servers beside an api, expected one of the two")

    @property
    def sends(self) -> PayloadKind:
        """What the teacher sends beside the log-probs of sampled tokens."""
        return kind_of(self)

    @property
    def leaving_s(self) -> float:
        """Longest time between SIGTERM and the moment from which the teacher only closes."""
        return self.drain_s + FLUSH_TIMEOUT_S


class PoolConfig(Settings, frozen=True, kw_only=True):
    """Teachers of a run with several models. Each key that is left out is as in `teacher`, which has the defaults."""

    model: str = ""
    """Model of these teachers; empty: models.teacher."""
    count: NonNegativeInt = 1
    """Number of teachers. With urls: one per url. 0: what is sent to the pool waits for teachers to join."""
    engine: str | None = None
    """Overrides teacher.engine."""
    urls: tuple[str, ...] = ()
    """Running SGLang servers of this pool."""
    engines: OtherEngines = msgspec.field(default_factory=dict[str, Settings])
    """Options of engines from other packages, set as pools.POOL.NAME.KEY; they override all of teacher.NAME."""
    sglang: ServerLinkConfig | None = None
    """Overrides all of teacher.sglang."""
    api: ApiConfig = msgspec.field(default_factory=ApiConfig)
    """An API as the teacher of this pool: `pools.NAME.api = URL`, and its further keys (teacher.api has them)."""
    server: ServerConfig | None = None
    """Overrides all of teacher.server: other GPUs, another tp."""
    device: str | None = None
    """Overrides teacher.device."""
    dtype: LoadDtype | None = None
    """Overrides teacher.dtype."""
    quantize: Quantized | None = None
    """Overrides teacher.quantize."""
    max_batch_tokens: PositiveInt | None = None
    """Overrides teacher.max_batch_tokens."""
    prefix_cache_mb: NonNegativeInt | None = None
    """Overrides teacher.prefix_cache_mb."""
    drain_s: NonNegativeFloat | None = None
    """Overrides teacher.drain_s."""
    payload: PayloadName | None = None
    """Overrides teacher.payload."""
    top_k: TopK | None = None
    """Overrides teacher.top_k."""
    top_mass: TopMass | None = None
    """Overrides teacher.top_mass."""
    tail: Tail | None = None
    """Overrides teacher.tail."""
    tokenizer: TokenizerOf | None = None
    """Overrides teacher.tokenizer."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.urls and self.count != len(self.urls):
            raise ValueError(
                f"count is {self.count} with {len(self.urls)} urls; expected the same number of both: each teacher has "
                "its own server"
            )

    def settings(self, common: TeacherConfig, name: str) -> TeacherConfig:
        """The whole settings of this pool's teachers. Raises ValueError where they do not fit one another."""
        given = {field: getattr(self, field) for field in self.__struct_fields__ if field not in ("model", "count")}
        given = {field: value for field, value in given.items() if value is not None}
        given |= {"pool": name, "engines": common.engines | self.engines}
        return msgspec.structs.replace(common, **given)
