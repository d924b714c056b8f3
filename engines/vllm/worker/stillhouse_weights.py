"""Weights from the learner, in vLLM's worker processes (--worker-extension-cls). vLLM calls these methods for POST
/collective_rpc. Rank 0 of the group is the learner's weights.transports.servers, which says what goes over the wire.

Each method returns {} or {"error": why}. After a broadcast that broke off the weights are partly new ones, until whole
weights have arrived.
"""

# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false, reportPrivateImportUsage=false
# It runs in vLLM's environment, as a base class of vLLM's worker.

from __future__ import annotations

import functools
import socket
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import vllm
from torch.distributed import BroadcastOptions, PrefixStore, ProcessGroupGloo, TCPStore
from vllm.config import set_current_vllm_config
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

POLL_S = 0.001
SCRATCH = "scratch"
"""In place of a tensor's name: it is received and thrown away."""


def _said(method: Callable[..., dict[str, Any] | None]) -> Callable[..., dict[str, Any]]:
    """Turns an exception, for which the server would answer with its own words, into the reply."""

    @functools.wraps(method)
    def call(self: Any, *args: Any, **named: Any) -> dict[str, Any]:
        try:
            return method(self, *args, **named) or {}
        except Exception as error:
            traceback.print_exc()
            return {"error": f"{type(error).__name__}: {error}"}

    return call


class WeightGroup:
    """Methods that vLLM adds to its worker class, all beginning with `stillhouse_`."""

    def stillhouse_about(self) -> dict[str, Any]:
        return {
            "device": self.device.type,
            "dtype": str(self.model_config.dtype).removeprefix("torch."),
            "quantized": bool(self.model_config.quantization) or "fp8" in str(self.cache_config.cache_dtype),
            "version": vllm.__version__,
        }

    @_said
    def stillhouse_join(
        self, host: str, port: int, rank_offset: int, world_size: int, name: str, backend: str, timeout_s: float
    ) -> None:
        """Meet the learner and the workers of the other servers. This worker is rank `rank_offset` + its own."""
        limit = timedelta(seconds=timeout_s)
        store: Any = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=limit)
        for prefix in (name, f"{name}/", "cuda/" if backend == "nccl" else "cpu/"):
            store = PrefixStore(prefix, store)
        rank = rank_offset + self.rank
        if backend == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = limit
            group = dist.ProcessGroupNCCL(store, rank, world_size, options)
        else:
            options = ProcessGroupGloo._Options()
            options._devices = [ProcessGroupGloo.create_device(hostname=_own_address(host, port), lazy_init=False)]
            options._timeout = limit
            group = ProcessGroupGloo(store, rank, world_size, options)
        self.stillhouse_group = (name, backend, group)

    @_said
    def stillhouse_receive(self, name: str, buckets: list[list[Any]], timeout_s: float) -> None:
        """Receive all weights, one broadcast for each bucket of whole tensors, and load them. `buckets`: for each a
        list of [name, dtype, shape]."""
        group_name, backend, _ = self.__dict__.get("stillhouse_group", ("none", "", None))
        if group_name != name:
            raise RuntimeError(f"this worker is in weight group {group_name}, expected {name}")
        deadline_s = time.monotonic() + timeout_s
        arriving = self._stillhouse_arriving(buckets, deadline_s)
        self._stillhouse_load(weights_iterator=((name, tensor) for name, tensor in arriving if name != SCRATCH))
        for _ in arriving:
            raise RuntimeError("vLLM did not take all tensors")
        if backend == "nccl":
            torch.cuda.synchronize()

    @_said
    def stillhouse_reload(self, folder: str) -> None:
        """Load a checkpoint's weights."""
        self._stillhouse_load(weights_path=folder)

    @_said
    def stillhouse_leave(self, name: str) -> None:
        former, backend, group = self.__dict__.get("stillhouse_group", ("", "", None))
        if former != name:
            raise RuntimeError(f"this worker is not in weight group {name}")
        del self.stillhouse_group
        if backend == "nccl":
            group.abort()

    def _stillhouse_load(self, **source: Any) -> None:
        """vLLM's reload in place. One that broke off is brought to an end, else vLLM (0.32) fails in the next one. On a
        CPU an output head that is tied to the embedding computes with a packed copy of it, which vLLM leaves as it
        was."""
        model = self.model_runner.get_model()
        try:
            self.reload_weights(**source)
        except Exception:
            with set_current_vllm_config(self.vllm_config):
                finalize_layerwise_reload(model, self.model_config)
            raise
        for module in model.modules():
            if hasattr(module, "cpu_linear") and module.weight.numel():
                module.quant_method.process_weights_after_loading(module)

    def _stillhouse_arriving(self, buckets: list[list[Any]], deadline_s: float) -> Iterator[tuple[str, torch.Tensor]]:
        _, backend, group = self.stillhouse_group
        for bucket in buckets:
            tensors = [(name, getattr(torch, dtype), shape) for name, dtype, shape in bucket]
            sizes = [dtype.itemsize * torch.Size(shape).numel() for _, dtype, shape in tensors]
            run = torch.empty(sum(sizes), dtype=torch.uint8, device=self.device if backend == "nccl" else "cpu")
            _receive(group, run, backend, deadline_s)
            for (name, dtype, shape), piece in zip(tensors, run.split(sizes), strict=True):
                aligned = piece if piece.storage_offset() % dtype.itemsize == 0 else piece.clone()
                yield name, aligned.view(dtype).view(shape)


def _receive(group: Any, run: torch.Tensor, backend: str, deadline_s: float) -> None:
    options = BroadcastOptions()
    options.rootRank = 0
    options.timeout = left = timedelta(seconds=max(deadline_s - time.monotonic(), POLL_S))
    work = group.broadcast([run], options)
    if backend != "nccl":
        work.wait(left)
        return
    while not work.is_completed():
        if time.monotonic() > deadline_s:
            group.abort()
            raise RuntimeError("nccl: a broadcast was not done at the deadline")
        time.sleep(POLL_S)
    work.wait()


def _own_address(host: str, port: int) -> str:
    """This machine's address for reaching `host`, to which gloo binds. Sends nothing."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return str(probe.getsockname()[0])
