"""The start of SGLang servers: interpreter, arguments, environment, and the GPU memory that they take."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec

from stillhouse.engines.arguments import Option, has, value_of
from stillhouse.engines.config import ServerConfig, WorkerSettings
from stillhouse.engines.http.servers import ServersOverHTTP
from stillhouse.engines.provider import (
    AdapterFacts,
    AutoFacts,
    EngineRole,
    GpuRoom,
    Interpreter,
    Launch,
    MemoryNeed,
    ModelShape,
    ServerCommand,
    ServerFacts,
)
from stillhouse.sglang_server import servers as sglang_servers
from stillhouse.sglang_server.servers import DEFAULT_PYTHON, KEY_ARGUMENT, SERVER_ARGS

ADAPTABLE: Final = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Layers whose adapters SGLang adds as peft does."""
ALL_ADAPTABLE: Final = ("qwen2", "qwen3", "llama", "mistral")
"""Kinds of models whose linear layers, but the output head, are all of these."""


TP: Final = Option(("--tp-size", "--tensor-parallel-size"), ("--tp", "--tensor-p"))
DP: Final = Option(("--dp-size", "--data-parallel-size"), ("--dp-s", "--data-parallel-s"))
PP: Final = Option(("--pp-size", "--pipeline-parallel-size"), ("--pp-s", "--pipeline-parallel-s"))
NODES: Final = Option(("--nnodes",), ("--nnodes",))
SYMMETRIC: Final = Option(("--enable-symm-mem",), ("--enable-symm",))
NVLS: Final = Option(("--enable-nccl-nvls",), ("--enable-nccl",))
CERTIFICATE: Final = Option(("--ssl-certfile",), ("--ssl-certfile",))
DEVICE: Final = Option(("--device",), ("--device",))
FRACTION: Final = Option(("--mem-fraction-static",), ("--mem-f",))
TOKENS: Final = Option(("--max-total-tokens",), ("--max-total",))
CHUNK: Final = Option(("--chunked-prefill-size",), ("--chunked",))
DTYPE: Final = Option(("--dtype",), ("--dt",))
CACHE_DTYPE: Final = Option(("--kv-cache-dtype",), ("--kv-cache-d",))
ATTENTION: Final = Option(
    ("--attention-backend", "--prefill-attention-backend", "--decode-attention-backend"),
    ("--at", "--prefill-at", "--decode-at"),
)
QUANTIZATION: Final = Option(("--quantization",), ("--quantization",))
LORA: Final = Option(("--enable-lora",), ("--enable-lora",))
LORA_RANK: Final = Option(("--max-lora-rank",), ("--max-lora-r",))
LOAD_FORMAT: Final = Option(("--load-format",), ("--load-f",))


COMMON_ARGS: Final = ("--log-level-http", "warning")
"""Arguments of every server: no log line per request."""
NEEDED: Final = ("sglang", "triton")
"""Modules that a server needs; triton is checked only for GPUs in the environment of `make sglang-cpu`."""
UPDATABLE: Final = "flash_rl"
"""SGLang's loader that can quantize new weights again (QuantizedRLModelLoader)."""
ONLINE: Final = {"fp8": 1.0, "mxfp8": 1 + 1 / 32, "w8a8_fp8": 1.0, "w8a8_int8": 1.0, "bitsandbytes": 0.5 + 4 / 64}
"""--quantization of weights that are not quantized yet: bytes per number of a linear layer, with its scales. Others
need a checkpoint that is."""
FLASHINFER: Final = "flashinfer"
FA3: Final = "sgl_kernel/flash_ops"
"""A file, which has the kernels of FlashAttention 3."""
MEMORY_SAVER: Final = "torch_memory_saver"
FLASHINFER_SWITCH: Final = "SGLANG_IS_FLASHINFER_AVAILABLE"
"""SGLang's own variable by which an installed flashinfer is not used."""
SHARED_FRACTION: Final = 0.95
"""--mem-fraction-static on a GPU that others use as well: what limits the cache there is --max-total-tokens."""
SHARED_CHUNK: Final = 2048
"""--chunked-prefill-size there: activations and a teacher's logits grow with it."""
LOGPROB_ROWS: Final = 2048
"""Rows whose log-probs SGLang computes at one time (SGLANG_LOGPROB_CHUNK_SIZE)."""
SAMPLED_ROWS: Final = 256
"""Requests that are counted to be sampled at one time."""
FROM_LOGITS: Final = 2.6
"""Logits in float32 and what is computed from them, relative to the logits."""
BY_GPU: Final = ((20, 2048, 8), (35, 4096, 48), (60, 4096, 32), (160, 8192, 256), (float("inf"), 16384, 512))
"""SGLang's defaults for GPUs of less than so many GiB: tokens of a prefill, and requests of its largest CUDA graph."""
SUFFIXES: Final = {"k": 10**3, "M": 10**6, "Ki": 2**10, "Mi": 2**20}


SERVE: Final = Path(sglang_servers.__file__).with_name("serve.py")
OPTIONAL_ARGS: Final = ("--incremental-streaming-output",)
"""For servers whose version has them."""


class SGLangServers(ServersOverHTTP):
    kind = "SGLang"
    make = "make sglang-cpu"
    tp_option = TP
    rank_options = (DP, PP, NODES)
    dtype_option = DTYPE
    cache_dtype_option = CACHE_DTYPE
    turns_modules = (MEMORY_SAVER,)
    modules = (*NEEDED, FLASHINFER, FA3, MEMORY_SAVER)
    experts_args = ("--enable-return-routed-experts",)
    own_python = DEFAULT_PYTHON

    def needed(self, server: ServerConfig, python: Path) -> tuple[str, ...]:
        return NEEDED if server.device == "cuda" and python == DEFAULT_PYTHON else NEEDED[:1]

    def fits(self, query: AutoFacts) -> tuple[bool, str]:
        """The answer for `engine = auto` when the launcher would have to start servers."""
        if query.server.device == "cpu":
            return False, "device is cpu"
        if not query.gpus:
            return False, "no GPU"
        on_gpu = msgspec.structs.replace(query.server, device="cuda")
        python = self.choose_python(on_gpu)
        if lacking := self.lacks("", on_gpu, python, query.look(python)):
            found = lacking.partition(": ")[2].partition(",")[0].partition(";")[0]
            return False, f"GPUs, but {found}"
        return True, f"GPUs, and SGLang in {python}"

    def launch(self, server: ServerConfig, added: tuple[str, ...] = ()) -> Launch:
        """On a CPU, in our environment for it, servers are forked from sglang_server's zygote; a user's interpreter has
        a normal build of SGLang. On GPUs SGLang's defaults are kept."""
        python = self.choose_python(server)
        forked = server.device == "cpu" and python == DEFAULT_PYTHON
        base = SERVER_ARGS if forked else ("--device", server.device)
        arguments = (*base, *COMMON_ARGS, "--tp-size", str(server.tp), *added, *server.args)
        return Launch(python, arguments, forked, value_of(server.args, CERTIFICATE) or "")

    def command(self, launch: Launch, model: str, host: str, port: int, api_key: str, log: Path) -> ServerCommand:
        """sglang_server/serve.py in SGLang's interpreter."""
        address = ("--host", host, "--port", str(port), KEY_ARGUMENT, api_key)
        args = ("--model-path", model, *launch.arguments, *address)
        request = {"args": args, "optional": OPTIONAL_ARGS, "log": str(log), "parent_pid": os.getpid()}
        return ServerCommand((launch.python, SERVE), json.dumps(request).encode() + b"\n")

    def answers(self, host: str, port: int, api_key: str, timeout_s: float, certificate: str = "") -> bool:
        return sglang_servers.answers(host, port, api_key, timeout_s=timeout_s, certificate=certificate)

    def turns_args(self, server: ServerConfig) -> tuple[str, ...]:
        """A warmup would generate while the memory is away. On a CPU there is nothing to save."""
        saver = ("--enable-memory-saver", "--enable-weights-cpu-backup") if server.device == "cuda" else ()
        return (*saver, "--skip-server-warmup")

    def give_back(self, url: str, api_key: str, certificate: str = "") -> None:
        from stillhouse.engines.sglang.memory import release_started  # it needs an HTTP client

        release_started(url, api_key, certificate)

    def ask(
        self, key: str, role: EngineRole, settings: WorkerSettings, student: str
    ) -> tuple[list[ServerFacts], list[str]]:
        from stillhouse.engines.sglang.attached import ask  # only where there are such servers: it needs an HTTP client

        return ask(key, role, settings, student)

    def contradictions(self, key: str, role: EngineRole, server: ServerConfig) -> Iterator[str]:
        yield from super().contradictions(key, role, server)
        where = f"{key}.server.args"
        if (device := value_of(server.args, DEVICE)) is not None and device.partition(":")[0] != server.device:
            yield (
                f"{where}: got --device {device}, but {key}.server.device is {server.device}; expected "
                f"--{key}.server.device {device.partition(':')[0]}, and no --device here"
            )
        quantized, loader = value_of(server.args, QUANTIZATION), value_of(server.args, LOAD_FORMAT)
        if role == "actor" and quantized and loader != UPDATABLE:
            yield (
                f"{where}: got --quantization {quantized}, and the learner's weights arrive as they are: they would be "
                f"put unquantized where quantized ones lie. Expected --load-format {UPDATABLE} with it (the loader "
                "that quantizes again, for fp8 and dense Qwen models), or no quantization"
            )

    def with_adapters(self, actor: WorkerSettings, query: AdapterFacts) -> ServerConfig | str:
        """engines.provider.EngineProvider.with_adapters. The arguments that a server needs are added to its own."""
        server = actor.server
        ranks = [one.adapter_rank for one in query.facts]
        if not actor.urls and has(server.args, LORA):
            text = value_of(server.args, LORA_RANK) or ""
            ranks = [int(text) if text.isdigit() else 0]
        if ranks:
            if min(ranks) >= query.rank:
                return server
            return f"a server loads adapters of rank {min(ranks)} at most, and learner.lora.rank is {query.rank}"
        if actor.urls:
            return "the running servers were not asked whether they load adapters"
        if server.device != "cpu" and not query.asked:
            return "never tried on GPUs; weights.adapters = on does it"
        others = [target for target in query.targets if target not in ADAPTABLE]
        if others or (not query.targets and query.model_type not in ALL_ADAPTABLE):
            of = f"layers {', '.join(others)}" if others else f"all layers of {query.model_type}"
            return f"servers may not know adapters of {of}; expected learner.lora.targets of {', '.join(ADAPTABLE)}"
        targets = query.targets or ADAPTABLE
        backend = ("--lora-backend", "torch_native") if server.device == "cpu" else ()
        added = (*LORA.names, *LORA_RANK.names, str(query.rank), "--lora-target-modules", *targets, *backend)
        return msgspec.structs.replace(server, args=(*added, *server.args))

    def suited(self, server: ServerConfig, look: Interpreter) -> tuple[str, ...]:
        """The attention backend, where SGLang might choose one that is missing: by the GPU alone it takes fa3 or
        trtllm_mha, which is flashinfer's (0.5.23, `get_default_attn_backend`). Where both are there it may."""
        if server.device != "cuda" or value_of(server.args, ATTENTION):
            return ()
        switched_off = os.environ.get(FLASHINFER_SWITCH, "true").lower() not in ("true", "1")
        flashinfer = FLASHINFER not in look.missing and not switched_off
        if flashinfer and FA3 not in look.missing:
            return ()
        return ATTENTION.names[0], FLASHINFER if flashinfer else "triton"

    def own_cache(self, server: ServerConfig, shape: ModelShape, free_bytes: float) -> float | None:
        fraction, tokens = _number(server.args, FRACTION), _number(server.args, TOKENS)
        if fraction is None and tokens is None:
            return None
        left = free_bytes * (fraction or SHARED_FRACTION) - self._weights(server, shape)
        return max(0.0, left if tokens is None else min(left, tokens * self.cache_token_bytes(server, shape)))

    def cache_arguments(self, server: ServerConfig, shape: ModelShape, cache_bytes: float) -> tuple[str, ...]:
        tokens = int(cache_bytes / self.cache_token_bytes(server, shape))
        arguments = {FRACTION: SHARED_FRACTION, TOKENS: tokens, CHUNK: SHARED_CHUNK}
        return tuple(word for option, value in arguments.items() for word in (option.names[0], str(value)))

    def memory(self, role: EngineRole, server: ServerConfig, shape: ModelShape, room: GpuRoom) -> MemoryNeed:
        """SGLang's cache takes, of the memory that is free when it has loaded its weights, all but a share of what was
        free before (0.5.17 to 0.5.23, `_profile_available_bytes` and `_apply_token_constraints` in
        srt/mem_cache/kv_cache_configurator.py):

            min(free after loading - (1 - --mem-fraction-static) * free at its start, --max-total-tokens * token bytes)

        It refuses to start where that is not above 0. If nobody else takes memory meanwhile, the first is
        --mem-fraction-static * free at its start - weights. Two servers with fractions of 0.9 each can share a GPU."""
        weights, chunk, cache = self._weights(server, shape), _number(server.args, CHUNK), room.cache
        if cache is None:
            own = _number(server.args, FRACTION) or default_fraction(room.total, server.tp)
            tokens = _number(server.args, TOKENS)
            limit = float("inf") if tokens is None else tokens * self.cache_token_bytes(server, shape)
            cache = max(0.0, min(room.free * own - weights, limit))
        chunk = chunk or (SHARED_CHUNK if room.cache is not None else _by_gpu(room.total)[0])
        rows = min(chunk, LOGPROB_ROWS) if role == "teacher" else SAMPLED_ROWS
        likely = {
            "KV cache": cache,
            "activations": chunk * (10 * shape.hidden + 4 * shape.mlp) * self.width(server) / server.tp,
            "logits": FROM_LOGITS * 4 * rows * shape.vocabulary,
            "CUDA graphs": (512 + 2 * _by_gpu(room.total)[1]) * 2**20,
        }
        return MemoryNeed({"weights": weights}, likely)

    def _weights(self, server: ServerConfig, shape: ModelShape) -> float:
        if shape.quantized_bytes:
            return shape.quantized_bytes / server.tp
        width = self.width(server)
        linear = ONLINE.get(value_of(server.args, QUANTIZATION) or "", width)
        return (linear * (shape.parameters - shape.rest) + width * shape.rest) / server.tp

    def nccl_environment(self, server: ServerConfig) -> dict[str, str]:
        """Variables by which NCCL shares memory. SGLang sets both to 0, or to 1 by --enable-symm-mem and
        --enable-nccl-nvls (0.5.23, `_set_envs_and_config` of srt/entrypoints/engine.py), while the learner would use
        NCCL's defaults."""
        symmetric, nvls = has(server.args, SYMMETRIC), has(server.args, NVLS)
        return {"NCCL_CUMEM_ENABLE": str(int(symmetric)), "NCCL_NVLS_ENABLE": str(int(symmetric or nvls))}


def default_fraction(total_bytes: float, tp: int) -> float:
    """--mem-fraction-static where nobody sets it: what a prefill, CUDA graphs (50 of a prefill) and constants leave, in
    MiB; on more than 60 GiB they get 10 GiB (0.5.23, `handle_gpu_memory_settings` in srt/arg_groups/memory_hook.py)."""
    chunk, graph = _by_gpu(total_bytes)
    reserved = 512 + 1.5 * chunk + 2 * graph + 8 * 50 + 128 * tp
    total = total_bytes / 2**20
    return 1.0 - max(reserved, 10 * 1024 if total > 60 * 1024 else 0.0) / total


def _by_gpu(total_bytes: float) -> tuple[int, int]:
    return next((chunk, graph) for gib, chunk, graph in BY_GPU if total_bytes < gib * 2**30)


def _number(args: Sequence[str], option: Option) -> float | None:
    """None also for a value that is no number, which SGLang refuses."""
    text = value_of(args, option) or ""
    digits = text.rstrip("kKMi")
    try:
        return float(digits) * SUFFIXES.get(text.removeprefix(digits), 1)
    except ValueError:
        return None
