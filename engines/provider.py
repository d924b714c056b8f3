"""Everything that a run needs to know about an engine: one `EngineProvider` each, found by name in `engines.registry`.
docs/engines.md shows how to write one.

The launcher, the actors, the teachers and the learner ask the provider, and never compare names. Neither this module
nor a provider's module imports torch at its top, because the launcher and workers without a model import it.
"""

# Why it is so: docs/decisions/engines.md

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, Protocol, TypeAlias

import msgspec

from stillhouse.engines.base import GenerationEngine, ScoringEngine
from stillhouse.engines.config import ScorerSettings, ServerConfig, WorkerSettings
from stillhouse.protocol.atomic_file import write_atomic
from stillhouse.protocol.context import RoleContext
from stillhouse.protocol.payloads.kind import EngineNeed
from stillhouse.protocol.settings import Settings
from stillhouse.weights.config import WeightsConfig
from stillhouse.weights.roster import GroupMembers
from stillhouse.weights.sink import WeightSink

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from stillhouse.models.tokenizer_file import FileTokenizer

API_KEY_VARIABLE: Final = "STILLHOUSE_SERVER_KEY"
"""Environment variable in which workers find the key of servers that the launcher has started."""
SERVERS: Final = "servers"
"""Folder in a run folder for what workers find out about their servers."""
EngineRole: TypeAlias = Literal["actor", "teacher"]
"""The user of an engine: actors sample with it, teachers score with it."""


class StudentModel(Protocol):
    @property
    def student(self) -> str: ...


class TeacherModel(Protocol):
    @property
    def student(self) -> str: ...
    @property
    def teacher(self) -> str: ...


class WithStudent(Protocol):
    """A run's configuration, as an actor's engine reads it."""

    @property
    def actor(self) -> WorkerSettings: ...
    @property
    def models(self) -> StudentModel: ...
    @property
    def weights(self) -> WeightsConfig: ...
    @property
    def mixed_teacher(self) -> str:
        """Model that is mixed into what the student samples from; empty: none."""
        ...


class WithTeacher(Protocol):
    """A run's configuration, as a teacher's engine reads it."""

    @property
    def teacher(self) -> ScorerSettings: ...
    @property
    def models(self) -> TeacherModel: ...


@dataclass(frozen=True, slots=True)
class Student:
    """A started generation engine and the sink through which it gets weights."""

    engine: GenerationEngine
    weights: WeightSink
    max_context: int
    """Longest sequence in tokens, prompt and answers together."""


@dataclass(frozen=True, slots=True)
class StudentSource:
    """An actor's student before its engine is started."""

    tokenizer: PreTrainedTokenizerBase | FileTokenizer
    """For environments (actors.envs.base.TextTokenizer)."""
    fingerprint: str
    stop_token_ids: tuple[int, ...]
    start: Callable[[Callable[[], None]], Student]
    """Starts the engine. The argument wakes the actor's main thread from any other thread."""


@dataclass(frozen=True, slots=True)
class ScorerSource:
    """A teacher before its engine is started: the fingerprint of its vocabulary, its number of ids, and the start."""

    fingerprint: str
    vocab_tokens: int
    start: Callable[[], ScoringEngine]


class ModelShape(NamedTuple):
    """The size of a model, from config.json and the headers of its weight files."""

    parameters: int
    layers: int
    hidden: int
    mlp: int
    """Width of the MLP that one token goes through. In a mixture of experts: of all experts that it is sent to."""
    vocabulary: int
    q_width: int
    """Query heads times head size."""
    kv_width: int
    """KV heads times head size."""
    qk_norm: bool
    """Queries and keys have norms of their own (Qwen3)."""
    tied: bool
    """The head's weight is the embedding's."""
    dtype_bytes: int
    """Bytes per parameter in the weight files."""
    quantized_bytes: float = 0.0
    """Size of all weights in a checkpoint that is quantized already; 0: it is not."""

    @property
    def rest(self) -> int:
        """Parameters outside the layers, without the last norm: embedding and head."""
        return self.vocabulary * self.hidden * (1 if self.tied else 2)


class MemoryNeed(NamedTuple):
    """Estimated bytes on one GPU, by purpose."""

    sure: Mapping[str, float]
    """The minimum: a run without room for it is refused."""
    likely: Mapping[str, float]


class GpuRoom(NamedTuple):
    """The memory that one server finds on one of its GPUs, in bytes."""

    total: float
    free: float
    """What those that start before it leave."""
    cache: float | None = None
    """What is planned for its cache on a GPU that it shares; None: it has the GPU alone."""


class ContextLimit(NamedTuple):
    """The longest sequence that an engine is configured for."""

    key: str
    """The configuration key that sets it."""
    tokens: int


class Device(NamedTuple):
    """The configured device of the model that a worker holds."""

    key: str
    """Below `actor`, `teacher` or `pools.NAME`, e.g. `torch.device`."""
    device: str


class AdapterFacts(NamedTuple):
    """The facts by which a provider decides whether the actors' servers can be sent adapters alone."""

    rank: int
    targets: tuple[str, ...]
    """learner.lora.targets; empty: all linear layers but the output head."""
    model_type: str
    """The student's, from config.json."""
    asked: bool
    """weights.adapters is on; otherwise auto."""
    facts: tuple[ServerFacts, ...]
    """What is known of servers that already run."""


class AutoFacts(NamedTuple):
    """The facts by which a provider decides whether `engine = auto` should take it."""

    server: ServerConfig
    urls: tuple[str, ...]
    api: str
    """Address of an API that scores (teachers); empty: none is given."""
    in_process: str
    """The reason why only an engine in the worker's process will do; empty: any will."""
    gpus: bool
    """True when this machine has GPUs."""
    look: Callable[[Path], Interpreter]


class Interpreter(Protocol):
    """The result of probing a Python interpreter."""

    @property
    def missing(self) -> tuple[str, ...]: ...
    @property
    def unusable(self) -> str: ...


class ServerFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One running server, as measured."""

    adapter_rank: int = 0
    """Largest rank of the adapters that it loads; 0: it loads none."""

    device: Literal["cpu", "cuda"]
    tp: int
    """Processes that each hold a part of the model; a weight group has as many ranks for it."""
    label: str = ""
    """The server's name for its present weights."""
    text: str
    """Everything else that is known of it, for people: a line per feature."""


class ServerRecord(msgspec.Struct, frozen=True):
    """`servers/WORKER.json` in the run folder, written by the worker of the server."""

    url: str
    facts: ServerFacts


def record_server(run_dir: Path, worker: str, url: str, facts: ServerFacts) -> None:
    """Leave the facts in the run folder for the launcher, which shows them."""
    path = run_dir / SERVERS / f"{worker}.json"
    path.parent.mkdir(exist_ok=True)
    write_atomic(path, msgspec.json.encode(ServerRecord(url, facts)))


class Launch(NamedTuple):
    """The command that starts a server."""

    python: Path
    arguments: tuple[str, ...]
    """All arguments except model, address and key; the user's come last, so that they win."""
    forked: bool
    """Forked from a process that has already imported everything (sglang_server's zygote); else started as a new
    process."""
    certificate: str = ""
    """PEM file of the certificate with which the server speaks TLS; empty: it does not."""


class ServerCommand(NamedTuple):
    """A command that becomes a server. It is run in a process group of its own."""

    words: tuple[str | Path, ...]
    stdin: bytes
    """For the bearer key, among others: every user of the machine can read a command line."""


class ServerEngine:
    """The launcher's view of an engine's servers, which it starts or finds at `urls`."""

    takes_ipc: bool = True
    """Its actors' servers can be given weights by memory that the learner shares (weights.transport = ipc)."""
    modules: tuple[str, ...] = ()
    """Modules that the servers' interpreter must have; they are looked up, not imported."""
    experts_args: tuple[str, ...] = ()
    """Arguments of servers that are to report the experts of their routers."""
    turns_modules: tuple[str, ...] = ()
    """Those of `modules` without which they cannot give a GPU back (launch.share = turns)."""
    own_python: Path | None = None
    """The interpreter of the environment that `make` installs for this engine on a CPU; None: there is none."""

    def choose_python(self, server: ServerConfig) -> Path:
        """The interpreter in which servers run: `server.python`, or `own_python`, or the one that runs this."""
        if server.python:
            return Path(server.python).expanduser().absolute()
        own = self.own_python
        return own if own is not None and (own.exists() or server.device == "cpu") else Path(sys.executable)

    def lacks(self, key: str, server: ServerConfig, python: Path, look: Interpreter) -> str | None:
        """The message for the user when `python` cannot run servers, else None. `server.device` is cpu or cuda."""
        raise NotImplementedError

    def launch(self, server: ServerConfig, added: tuple[str, ...] = ()) -> Launch:
        """`added`: arguments that the launcher chose, over which the user's own win."""
        raise NotImplementedError

    def suited(self, server: ServerConfig, look: Interpreter) -> tuple[str, ...]:
        """Arguments for what the servers' interpreter has installed. `server.device` is cpu or cuda."""
        return ()

    def command(self, launch: Launch, model: str, host: str, port: int, api_key: str, log: Path) -> ServerCommand:
        """The command for a server that is not `forked`. The server must die with the process that runs it (this one),
        and ask for the key `api_key`. Its output goes to `log`."""
        raise NotImplementedError

    def answers(self, host: str, port: int, api_key: str, timeout_s: float, certificate: str = "") -> bool:
        """Whether the server there is ready. Called several times a second while it loads its model. `certificate`:
        Launch.certificate."""
        raise NotImplementedError

    def turns_args(self, server: ServerConfig) -> tuple[str, ...]:
        """Arguments of servers that take turns on their device. `server.device` is cpu or cuda."""
        return ()

    def give_back(self, url: str, api_key: str, certificate: str = "") -> None:
        """Free the memory of a server that takes turns and has just started, until its worker takes it again
        (protocol.turns.SharesDevice). Raises engines.base.EngineLost."""
        raise NotImplementedError

    def ask(
        self, key: str, role: EngineRole, settings: WorkerSettings, student: str
    ) -> tuple[list[ServerFacts], list[str]]:
        """Ask the running servers `settings.urls` what they are. Returns the facts of all, or none where one could not
        be asked, and mistakes, for instance another tokenizer than that of the folder `student`. `key`: the section
        of the configuration with these settings."""
        raise NotImplementedError

    def contradictions(self, key: str, role: EngineRole, server: ServerConfig) -> Iterator[str]:
        """One message for each of the user's arguments that contradicts the configuration or cannot work."""
        yield from ()

    def cache_token_bytes(self, server: ServerConfig, shape: ModelShape) -> float:
        """What one token takes of a server's cache on each of its GPUs."""
        return 0.0

    def own_cache(self, server: ServerConfig, shape: ModelShape, free_bytes: float) -> float | None:
        """What the user's own arguments give the cache on a GPU that is shared, of which this much is free at the
        server's start; None: they do not say it, and it gets what is left."""
        return 0.0

    def cache_arguments(self, server: ServerConfig, shape: ModelShape, cache_bytes: float) -> tuple[str, ...]:
        """Arguments for a server that shares a GPU and has this much there for its cache."""
        return ()

    def memory(self, role: EngineRole, server: ServerConfig, shape: ModelShape, room: GpuRoom) -> MemoryNeed:
        """Memory of one server on each of its GPUs."""
        raise NotImplementedError

    def nccl_environment(self, server: ServerConfig) -> dict[str, str]:
        """NCCL variables that all members of the weight group must share, because servers set them."""
        return {}


class EngineProvider:
    """One engine. A subclass overrides what differs from the defaults; docs/engines.md describes every part."""

    name: str = ""
    """The name in `actor.engine` and `teacher.engine`."""
    title: str = ""
    """The name in the launcher's output: `actors: TITLE on the CPU`."""
    roles: tuple[EngineRole, ...] = ("actor", "teacher")
    """The roles that can use it."""
    servers: ServerEngine | None = None
    """For an engine with one server per worker; None: it works in the worker's process."""
    loads_model: bool = False
    """True when the worker itself holds the model, loaded by torch and transformers: the launcher then gives it a
    device and forks it from a process that has imported both."""

    takes_turns: bool = False
    """Its engines can give their device back (protocol.turns.SharesDevice), and its servers too
    (ServerEngine.give_back); False also for one that has none."""

    meets: tuple[EngineNeed, ...] = ()
    """What teacher payloads may need (protocol.payloads.student_sets, protocol.payloads.hidden) that it can do."""

    options: Mapping[EngineRole, type[Settings]] = {}
    """The section of keys that the engine reads, by role: `actor.NAME.KEY`, `teacher.NAME.KEY`. A worker gets it by
    `ctx.config.actor.section(NAME, KIND)`. Only for engines with an entry point, whose NAME is known beforehand."""

    def preload(self, role: EngineRole) -> tuple[str, ...]:
        """Modules that workers import lazily; the fork server imports them once for all workers. They must not import
        torch, unless `loads_model`."""
        return ()

    def student(self, ctx: RoleContext[WithStudent]) -> StudentSource:
        """Make an actor's student, in the actor's process. Its start may raise engines.base.EngineLost and
        EngineMismatch."""
        raise NotImplementedError(f"engine {self.name} cannot write rollouts")

    def scorer(self, ctx: RoleContext[WithTeacher]) -> ScorerSource:
        """Make a teacher's scorer, in the teacher's process. Raises as `student` does."""
        raise NotImplementedError(f"engine {self.name} cannot score")

    def members(self, actor: WorkerSettings, weights: WeightsConfig, student: str) -> GroupMembers:
        """The kind of weight-group member that an actor with this engine is. `student`: the model's path."""
        return GroupMembers()

    def with_adapters(self, actor: WorkerSettings, query: AdapterFacts) -> ServerConfig | str:
        """`actor.server`, so that its servers load adapters, or the reason why they must be sent merged weights.
        `server.device` is cpu or cuda."""
        return f"{self.title} take whole weights"

    def needs_adapters(self, actor: WorkerSettings) -> str:
        """The setting that means something only where servers load adapters; empty: there is none."""
        return ""

    def fits(self, query: AutoFacts) -> tuple[bool, str]:
        """(`engine = auto` takes it, reason). Only built-in engines are asked."""
        return False, f"{self.name} is only used when it is named"

    def device(self, role: EngineRole, settings: WorkerSettings) -> Device | None:
        """The configured device of the model; None when the worker needs no device."""
        return None

    def context_limit(self, actor: WorkerSettings) -> ContextLimit | None:
        """The configured limit; None: the model's window or the server's limit applies."""
        return None

    def reads_snapshots(self) -> bool:
        """True when its scorer can load new weights (engines.base.TakesSnapshots), which the student's average
        needs."""
        return False

    def lacks(self, need: EngineNeed) -> str:
        """Why it does not meet a need of a teacher payload (protocol.payloads); empty: it does."""
        return "" if need in self.meets else f"{self.title or self.name} cannot"

    def memory(
        self, role: EngineRole, settings: WorkerSettings, shape: ModelShape, device: Literal["cpu", "cuda"]
    ) -> MemoryNeed:
        """Memory of one worker on the `device` that it got, where it holds the model."""
        return MemoryNeed({}, {})
