"""The weight endpoints of an SGLang server, over real HTTP, with a dict of tensors for a model.

As SGLang's: one scheduler thread does one request after the other and answers nothing else meanwhile, but /model_info;
over NCCL a bucket is answered when its broadcast is queued, and the GPU executes what is queued in its order. Here that
is done by the next request that synchronises: /weights_checker, /update_weights_from_disk and /destroy.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from aiohttp import web
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed import BroadcastOptions

from stillhouse.engines.http.stream import Labels
from stillhouse.engines.sglang.config import SGLangConfig
from stillhouse.engines.sglang.http import SGLangLink
from stillhouse.protocol.messages import WeightVersion
from stillhouse.weights.group_operations import AnyStore, connect_store, prefixed

Body = dict[str, Any]


def new_group(store: AnyStore, rank: int, world_size: int) -> Any:
    """Make a group as a server does: with the default timeout of torch, and with the watchdog that the launcher sets up
    by TORCH_NCCL_ASYNC_ERROR_HANDLING=2."""
    nccl: Any = dist.ProcessGroupNCCL
    options = nccl.Options()
    options.handling = 2
    return nccl(store, rank, world_size, options)


class Refused(Exception):
    """HTTP 400 with this message."""


class FakeServer:
    """Listens at once. Close it."""

    def __init__(self, weights: dict[str, Tensor], *, store_timeout_s: float = 5.0) -> None:
        self.weights = {name: tensor.clone() for name, tensor in weights.items()}
        self.label = "default"
        self.away: set[str] = set()
        """Memory that is released, by tag."""
        self.running = 0
        self.adapters: dict[str, tuple[str, Body, dict[str, Tensor]]] = {}
        """Name -> folder, configuration and tensors of what is loaded."""
        self.calls: list[tuple[str, Body]] = []
        self.before: dict[str, Callable[[Body], None]] = {}
        """Called in the scheduler's thread before a request of this path is done: may block, or raise Refused."""
        self.lost = False
        self._store_timeout_s = store_timeout_s
        self._groups: dict[str, Any] = {}
        self._queued: list[tuple[Any, Tensor, Body]] = []
        self.closing = threading.Event()
        self._scheduler = ThreadPoolExecutor(1, thread_name_prefix="fake-scheduler")
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fake-server", daemon=True)
        self._thread.start()
        self.url = asyncio.run_coroutine_threadsafe(self._open(), self._loop).result()

    def close(self) -> None:
        """Stop as if killed: pending requests get no answer. Idempotent."""
        if self.closing.is_set():
            return
        self.closing.set()
        asyncio.run_coroutine_threadsafe(self._shut(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        for group in self._groups.values():
            group.die()
        self._scheduler.shutdown(wait=False, cancel_futures=True)

    async def _open(self) -> str:
        app = web.Application()
        app.router.add_get("/model_info", self._model_info)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/{path}", self._post)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        port = self._runner.addresses[0][1]
        return f"http://127.0.0.1:{port}"

    async def _shut(self) -> None:
        await self._runner.cleanup()
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _model_info(self, request: web.Request) -> web.Response:
        return web.json_response({"weight_version": self.label, "model_path": ""})

    async def _models(self, request: web.Request) -> web.Response:
        listed = [{"id": name, "root": folder, "max_model_len": 64} for name, (folder, _, _) in self.adapters.items()]
        return web.json_response({"data": listed})

    async def _post(self, request: web.Request) -> web.Response:
        path, body = request.match_info["path"], await request.json()
        self.calls.append((f"/{path}", body))
        try:
            said = await self._loop.run_in_executor(self._scheduler, self._do, path, body)
        except Refused as error:
            return web.json_response({"success": False, "message": str(error)}, status=400)
        return web.json_response({"success": True, "message": "Success", **(said or {})})

    def _do(self, path: str, body: Body) -> Body | None:
        if f"/{path}" in self.before:
            self.before[f"/{path}"](body)
        return getattr(self, f"_{path}")(body)

    # ----------------------------------------------------------------------------------- scheduler's thread

    def _flush_cache(self, body: Body) -> None:
        if self.running:
            raise Refused("Flush cache failed.")

    def _release_memory_occupation(self, body: Body) -> None:
        """As SchedulerWeightUpdaterManager: not idle is an assertion, and what is away cannot be paused again."""
        if self.running or self.away & {*body["tags"]}:
            self._die()
        self.away |= {*body["tags"]}

    def _resume_memory_occupation(self, body: Body) -> None:
        if not self.away >= {*body["tags"]}:
            self._die()  # a KeyError
        self.away -= {*body["tags"]}

    def _die(self) -> None:
        """Of an error in the scheduler: no request is answered any more."""
        self.lost = True
        self.closing.wait()

    def _begin_weight_update(self, body: Body) -> None: ...

    def _end_weight_update(self, body: Body) -> None: ...

    def _init_weights_update_group(self, body: Body) -> None:
        name = body["group_name"]
        try:
            store = connect_store(body["master_address"], body["master_port"], self._store_timeout_s)
            store = prefixed(store, name, f"{name}/", "cuda/")
            self._groups[name] = new_group(store, body["rank_offset"], body["world_size"])
        except Exception as error:
            raise Refused(f"Failed to initialize custom process group: {error}.") from error

    def _update_weights_from_distributed(self, body: Body) -> None:
        sizes = [_n_bytes(dtype, shape) for dtype, shape in zip(body["dtypes"], body["shapes"], strict=True)]
        flat = torch.empty(sum(sizes), dtype=torch.uint8)
        options = BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        try:
            work = self._groups[body["group_name"]].broadcast([flat], options)
        except Exception as error:
            raise Refused(f"Failed to receive weights: {error}") from error
        self._queued.append((work, flat, body))
        self.label = body.get("weight_version", self.label)

    def _weights_checker(self, body: Body) -> Body:
        self._synchronise()
        skipped = body.get("skip_tensor_list") or ()
        said = {
            name: hashlib.sha256(tensor.contiguous().view(-1).view(torch.uint8).numpy().data).hexdigest()[:16]
            for name, tensor in self.weights.items()
            if not any(part in name for part in skipped)
        }
        return {"ranks": [{"checksums": said}]}

    def _update_weights_from_disk(self, body: Body) -> None:
        self._synchronise()
        (file,) = Path(body["model_path"]).glob("*.safetensors")
        self.weights = load_file(file)
        self.label = body.get("weight_version", self.label)

    def _load_lora_adapter(self, body: Body) -> None:
        folder = Path(body["lora_path"])
        (file,) = folder.glob("*.safetensors")
        config = json.loads((folder / "adapter_config.json").read_text())
        self.adapters[body["lora_name"]] = (str(folder), config, load_file(file))

    def _unload_lora_adapter(self, body: Body) -> None:
        del self.adapters[body["lora_name"]]

    def _destroy_weights_update_group(self, body: Body) -> None:
        group = self._groups.pop(body["group_name"], None)
        if group is None:
            raise Refused("The group to be destroyed does not exist.")
        self._synchronise()
        group.abort()

    def _synchronise(self) -> None:
        """Execute what is queued; blocks for as long as a broadcast does."""
        for work, flat, body in self._queued:
            while not work.kernel_has_ended() and not self.closing.is_set():
                time.sleep(0.001)
            at = 0
            for name, dtype, shape in zip(body["names"], body["dtypes"], body["shapes"], strict=True):
                n_bytes = _n_bytes(dtype, shape)
                self.weights[name] = flat[at : at + n_bytes].view(getattr(torch, dtype)).view(shape).clone()
                at += n_bytes
        self._queued.clear()


def _n_bytes(dtype: str, shape: list[int]) -> int:
    return torch.Size(shape).numel() * getattr(torch, dtype).itemsize


class FakeServerEngine:
    """The part of an engine that ServerWeights and ServerAdapters use."""

    def __init__(self, url: str, config: SGLangConfig, run_id: str = "run") -> None:
        self.config = config
        self.server = SGLangLink(url, config)
        self.labels = Labels(run_id)
        self.version = WeightVersion(0, 0)
        self.weights_known = True
        self.features = self
        self.update_sessions = True
        self.labels_settable = True

    def pause(self, timeout_s: float, *, cut: bool = False) -> None: ...

    def take_again(self) -> None: ...

    def resume(self, version: WeightVersion, timeout_s: float, *, name: bool = False) -> None:
        self.version = version

    def switch_adapter(self, version: WeightVersion, name: str, timeout_s: float) -> None:
        self.version, self._adapter = version, name

    def unused_adapters(self, loaded: Iterable[str], timeout_s: float) -> list[str]:
        return [name for name in loaded if name != self._adapter]

    def close(self) -> None:
        self.server.close()
