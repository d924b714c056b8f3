"""What an engine brings to a run beside the engine itself: one `EngineProvider` per engine, found by name in
`engines.registry`. docs/engines.md shows how to write one.

The launcher, the actors, the teachers and the learner ask the provider, and never compare names. Neither this module
nor one with a provider imports torch: the launcher reads it, and so do workers that never load a model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, TypeAlias

from engines.base import GenerationEngine, ScoringEngine
from engines.config import ScorerSettings, ServerConfig, WorkerSettings
from protocol.context import RoleContext
from protocol.settings import Settings
from weights.config import WeightsConfig
from weights.roster import Members
from weights.sink import WeightSink

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from models.tokenizer_file import FileTokenizer

EngineRole: TypeAlias = Literal["actor", "teacher"]
"""Who uses an engine: actors write with it, teachers score with it."""


class StudentModel(Protocol):
    @property
    def student(self) -> str: ...


class TeacherModel(Protocol):
    @property
    def teacher(self) -> str: ...


class WithStudent(Protocol):
    """A run's configuration, as an actor's engine reads it."""

    @property
    def actor(self) -> WorkerSettings: ...
    @property
    def models(self) -> StudentModel: ...


class WithTeacher(Protocol):
    """A run's configuration, as a teacher's engine reads it."""

    @property
    def teacher(self) -> ScorerSettings: ...
    @property
    def models(self) -> TeacherModel: ...


@dataclass(frozen=True, slots=True)
class Student:
    """An engine that writes, and where its weights come in."""

    engine: GenerationEngine
    weights: WeightSink
    max_context: int
    """Tokens of prompt and answers."""


@dataclass(frozen=True, slots=True)
class StudentSource:
    """What is known of an actor's student before its engine is there, and how to start that."""

    tokenizer: PreTrainedTokenizerBase | FileTokenizer
    """For environments (actors.envs.base.TextTokenizer)."""
    fingerprint: str
    stop_token_ids: tuple[int, ...]
    start: Callable[[Callable[[], None]], Student]
    """Given a function that wakes the actor's main thread, callable from any other."""


@dataclass(frozen=True, slots=True)
class ScorerSource:
    """The fingerprint of a teacher's vocabulary, how many ids it has, and how to start its engine."""

    fingerprint: str
    vocab_tokens: int
    start: Callable[[], ScoringEngine]


class ModelShape(NamedTuple):
    """The size of a model, as config.json and the headers of its weights say."""

    parameters: int
    layers: int
    hidden: int
    mlp: int
    vocabulary: int
    kv_width: int
    """KV heads times head size."""
    dtype_bytes: int
    """Of its files."""


class MemoryNeed(NamedTuple):
    """Bytes on one GPU, by what they are for."""

    sure: Mapping[str, float]
    """Needed at least: a run without room for it is refused."""
    likely: Mapping[str, float]


class ContextLimit(NamedTuple):
    """Longest sequence that an engine is configured to write."""

    key: str
    """Of the configuration."""
    tokens: int


class Device(NamedTuple):
    """Where the configuration puts the model that a worker holds."""

    key: str
    """Below `actor`, `teacher` or `pools.NAME`, e.g. `torch.device`."""
    device: str


class Wish(NamedTuple):
    """What `engine = auto` knows when it asks a provider whether it fits."""

    server: ServerConfig
    urls: tuple[str, ...]
    in_process: str
    """Why only an engine in the worker's process will do; empty: any will."""
    gpus: bool
    """Whether this machine has any."""
    look: Callable[[Path], Interpreter]


class Interpreter(Protocol):
    """What was found out about a Python interpreter."""

    @property
    def missing(self) -> tuple[str, ...]: ...
    @property
    def unusable(self) -> str: ...


class Launch(NamedTuple):
    """How a server is started."""

    python: Path
    arguments: tuple[str, ...]
    """All but model, address and key; the user's own come last, so that they win."""
    forked: bool
    """From a process that has imported everything already (sglang_server's zygote); else it is a process of its own."""


class ServerEngine:
    """What the launcher needs to know to run an engine's servers, or to use those that the user names by `urls`."""

    modules: tuple[str, ...] = ()
    """Looked for, without an import, in the interpreter that is to run the servers."""

    def choose_python(self, server: ServerConfig) -> Path:
        """The interpreter that servers run in."""
        raise NotImplementedError

    def lacks(self, key: str, server: ServerConfig, python: Path, look: Interpreter) -> str | None:
        """What to tell the user when `python` cannot run servers, else None. `server.device` is cpu or cuda."""
        raise NotImplementedError

    def launch(self, server: ServerConfig) -> Launch:
        raise NotImplementedError

    def contradictions(self, key: str, role: EngineRole, server: ServerConfig) -> Iterator[str]:
        """Arguments of the user's own that contradict the rest of the configuration, or cannot work."""
        yield from ()

    def memory_fraction(self, arguments: Sequence[str]) -> float | None:
        """Share of a GPU's memory that the arguments let a server take; None: they do not say."""
        return None

    def memory(self, server: ServerConfig, shape: ModelShape, gpu_bytes: float) -> MemoryNeed:
        """Of one server, on each of its GPUs."""
        raise NotImplementedError

    def nccl_environment(self, server: ServerConfig) -> dict[str, str]:
        """What NCCL must find in the environment on all sides of the weight group, because servers set it so."""
        return {}


class EngineProvider:
    """One engine. A new one overrides what differs; docs/engines.md goes through all of it."""

    name: str = ""
    """In `actor.engine` and `teacher.engine`."""
    title: str = ""
    """In what the launcher says: `actors: TITLE on the CPU`."""
    roles: tuple[EngineRole, ...] = ("actor", "teacher")
    """Who can use it."""
    servers: ServerEngine | None = None
    """Where the engine is a server per worker; None: it works in the worker's own process."""
    loads_model: bool = False
    """The worker holds the model itself, loaded by torch and transformers: it is given a device, and is forked from a
    process that has imported them."""

    options: Mapping[EngineRole, type[Settings]] = {}
    """The section of keys that the engine reads, by role: `actor.NAME.KEY`, `teacher.NAME.KEY`. A worker gets it by
    `ctx.config.actor.section(NAME, KIND)`. Only for engines with an entry point, whose NAME is known beforehand."""

    def preload(self, role: EngineRole) -> tuple[str, ...]:
        """Modules that workers import inside functions; the fork server imports them once for all. Without torch,
        unless `loads_model`."""
        return ()

    def student(self, ctx: RoleContext[WithStudent]) -> StudentSource:
        """In an actor's process. What it starts may raise engines.base.EngineLost and EngineMismatch."""
        raise NotImplementedError(f"engine {self.name} writes no rollouts")

    def scorer(self, ctx: RoleContext[WithTeacher]) -> ScorerSource:
        """In a teacher's process; errors as `student`."""
        raise NotImplementedError(f"engine {self.name} scores nothing")

    def members(self, actor: WorkerSettings, weights: WeightsConfig, student: str) -> Members:
        """What kind of member of the weight group an actor with this engine is. `student`: the model's path."""
        return Members()

    def fits(self, wish: Wish) -> tuple[bool, str]:
        """(whether `engine = auto` takes it, why). Asked of built-in engines only."""
        return False, f"{self.name} is for those who name it"

    def device(self, role: EngineRole, settings: WorkerSettings) -> Device | None:
        """Where the configuration puts the model; None: this engine uses no device of the worker's."""
        return None

    def context_limit(self, actor: WorkerSettings) -> ContextLimit | None:
        """None: the model's own window, or whatever its server takes."""
        return None

    def reads_snapshots(self) -> bool:
        """Whether its scorer can take new weights (engines.base.TakesSnapshots), as the student's average does."""
        return False

    def memory(self, role: EngineRole, settings: WorkerSettings, shape: ModelShape) -> MemoryNeed:
        """Of one worker on its GPU, where it holds the model."""
        return MemoryNeed({}, {})
