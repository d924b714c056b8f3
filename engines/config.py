"""Settings that actors and teachers share: which engine, on which servers. No torch here, nor in what reads this."""

from __future__ import annotations

from typing import Annotated, Final, Literal, TypeVar

import msgspec
from msgspec import Meta

from stillhouse.engines.base import UpdateMode
from stillhouse.models.description import LoadDtype, Quantized
from stillhouse.protocol.settings import NonNegativeInt, PositiveFloat, PositiveInt, Settings

SettingsT = TypeVar("SettingsT", bound=Settings)


class EngineConfig(Settings, frozen=True, kw_only=True):
    """The embedded torch engine that writes rollouts (`engines.torch.engine`)."""

    max_concurrent: PositiveInt = 64
    """Requests decoded together. KV memory grows with it; so does throughput, up to a few hundred on a CPU."""
    max_context: Annotated[int, Meta(ge=2)] = 1024
    """Longest sequence in tokens, prompt and answer together. A request that reaches it ends with reason "length"."""
    update_mode: UpdateMode = "in_place"
    """Treatment of running requests at a weight swap: `in_place` keeps their KV cache, `retract` recomputes it."""
    dtype: LoadDtype = "auto"
    """Precision of weights and KV cache; auto: bfloat16 on cuda, float32 elsewhere. Log-probs are always computed in
    float32."""
    device: str = "auto"
    """Torch device. auto (GPUs where there are any) or cuda: each actor gets a free GPU, and they share where there are
    too few; cpu; cuda:1: all actors on that GPU."""
    prefill_tokens_per_step: PositiveInt = 4096
    """Prompt tokens (padding included) that may join one decode step; a longer prompt joins by itself."""
    fused: bool = True
    """Use the hand-written decoder where the architecture has one (Llama, Qwen2, Qwen3); off: transformers' modules."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_device(self.device)


class ServerConfig(Settings, frozen=True, kw_only=True):
    """The inference servers that the launcher starts, one per worker. Not used with `urls`."""

    python: str = ""
    """Interpreter that has SGLang (or vLLM). Empty: .venv-sglang (.venv-vllm) of this project if it exists, else the
    interpreter of the launcher."""
    args: tuple[str, ...] = ()
    """Further arguments of sglang.launch_server, or of vllm serve, e.g. --mem-fraction-static,0.8. They win over
    ours."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the servers; auto: cuda when there is a GPU. With `urls` the running servers say it."""
    gpus: tuple[NonNegativeInt, ...] = ()
    """GPUs of these servers, as numbered in CUDA_VISIBLE_DEVICES: `tp` for each server in turn; one GPU may appear
    several times. Empty: the GPUs that are left over, in order. Not used on a CPU."""
    tp: PositiveInt = 1
    """GPUs per server (--tp-size)."""
    host: str = "127.0.0.1"
    """Address that the servers listen on."""
    port: Annotated[int, Meta(ge=0, le=65535)] = 0
    """Port of the first server; each further one takes the next port. 0: the system chooses."""
    start_timeout_s: PositiveFloat = 600.0
    """Longest time until a started server answers, loading the model included."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if any(gpu < 0 for gpu in self.gpus):
            raise ValueError(f"gpus: got {list(self.gpus)}, expected numbers from 0 on, as in CUDA_VISIBLE_DEVICES")
        if not self.host:
            raise ValueError("host: got an empty name, expected an address of this machine")


class ServerLinkConfig(Settings, frozen=True, kw_only=True):
    """A worker's connection to its server (`engines.http.link`)."""

    api_key_env: str = ""
    """Name of the environment variable that holds the bearer key of running servers (`urls`); empty: they need none,
    which is refused for servers on other machines. Servers that the launcher starts get a new key for each run."""
    ca_file: str = ""
    """PEM file with the certificates of authorities, or of servers themselves, by which https servers are known. Empty:
    the system's authorities, and for a server that the launcher starts its own certificate."""
    max_concurrent: PositiveInt = 64
    """Requests at the server at one time; the rest wait in the worker."""
    connect_timeout_s: PositiveFloat = 60.0
    """Longest wait at the start until the server answers and its features are known."""
    control_timeout_s: PositiveFloat = 10.0
    """Timeout of one short call: health, abort, pause."""
    start_timeout_s: PositiveFloat = 30.0
    """Seconds for which a request is retried while the server is away or refuses it for load, before it fails."""
    stall_timeout_s: PositiveFloat = 60.0
    """Longest silence of a running request before it fails. A pause for new weights does not count."""
    health_every_s: PositiveFloat = 1.0
    """Seconds between two health checks (SGLang: GET /model_info)."""


class StudentLinkConfig(ServerLinkConfig, frozen=True, kw_only=True):
    """An actor's connection to its server (`engines.http.engine`)."""

    pause_timeout_s: PositiveFloat = 120.0
    """Longest pause for new weights before waiting requests fail."""


class WorkerSettings(Settings, frozen=True, kw_only=True):
    """The keys by which actors and teachers choose and reach their engine."""

    engine: str = "auto"
    """`torch` runs the model in the worker's process; `sglang` and `vllm` give each worker a server; `auto` takes
    sglang where there are GPUs and server.python has SGLang (or with urls), else torch. Other engines: the name in an
    installed package's entry points, or `module:attribute` (docs/engines.md)."""
    server: ServerConfig = msgspec.field(default_factory=ServerConfig)
    """Settings of the servers that the launcher starts for these workers."""
    urls: tuple[str, ...] = ()
    """Running SGLang servers to use instead of starting some, one per worker, e.g. http://10.0.0.7:30000."""
    engines: dict[str, Settings] = msgspec.field(default_factory=dict[str, Settings])
    """Options of engines from other packages, by engine name."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for url in self.urls:
            if not url.startswith(("http://", "https://")):
                raise ValueError(f"urls: got {url!r}, expected http://host:port of an SGLang server")
        if len(set(self.urls)) != len(self.urls):
            raise ValueError(f"urls: got {', '.join(self.urls)}: one comes twice; each worker needs its own server")

    def section(self, engine: str, kind: type[SettingsT]) -> SettingsT:
        """The options of one engine: a field of this name, or an entry of `engines`; defaults where nothing was set."""
        for section in (getattr(self, engine, None), self.engines.get(engine)):
            if isinstance(section, kind):
                return section
        return kind()


GPU_PREFIX_CACHE_BYTES: Final = 4 * 2**30
"""Default of teacher.prefix_cache_mb on a GPU. Fixed, so that it can be planned for: a learner or an actor on the same
GPU may still have to load. 28,000 tokens of an 8B model with 8 heads of keys and values."""
_CHUNK_LOGITS: Final = {"cpu": 16 * 2**20, "cuda": 128 * 2**20}
"""Most logits that a teacher holds at one time, by device: 64 MiB in float32 on a CPU, close to its caches; 512 MiB on
a GPU, so that a product with a vocabulary of 152,000 has 883 rows instead of 110."""


def chunk_rows(vocab_size: int, device_type: str) -> int:
    """Rows of logits that a teacher computes at one time."""
    return min(4096, max(16, _CHUNK_LOGITS.get(device_type, _CHUNK_LOGITS["cpu"]) // vocab_size))


class ScorerSettings(WorkerSettings, frozen=True, kw_only=True):
    """The part of `teacher` that engines read."""

    device: str = "auto"
    """Torch device of embedded teachers. auto (GPUs where there are any) or cuda: each gets a free GPU, and they share
    where there are too few; cpu; cuda:1: all teachers on that GPU."""
    dtype: LoadDtype = "auto"
    """Precision of an embedded teacher's weights; auto: bfloat16 on cuda, float32 elsewhere."""
    quantize: Quantized = "none"
    """Bits of an embedded teacher's linear layers. nf4: 4, by bitsandbytes (docs/small-cards.md); embedding and head
    stay as `dtype`. Servers: --quantization in server.args, or a checkpoint that is quantized already."""
    max_batch_tokens: PositiveInt = 4096
    """Tokens computed in one packed forward pass; a longer single item is scored by itself."""
    prefix_cache_mb: NonNegativeInt | None = None
    """Memory of an embedded teacher for the keys and values of growing rollouts, in MiB, so that a segment does not
    compute its prefix again. 0: none. Left out: 4096 on a GPU, but no more than a quarter of
    what is free there once the model is loaded; a sixteenth of the main memory on a CPU."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_device(self.device)


def _check_device(device: str) -> None:
    if not device:
        raise ValueError("device: got an empty name, expected auto, cpu, cuda or cuda:<n>")
