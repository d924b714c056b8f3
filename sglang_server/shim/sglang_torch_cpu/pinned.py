"""Servers with `--enable-lora` or `--enable-return-routed-experts` allocate pinned memory (sglang.srt.lora,
sglang.srt.state_capturer), and torch refuses that without an accelerator. Here a request for pinned memory gets
ordinary memory, which is the same to a CPU."""

import functools

import torch


def ignore_pinning():
    """For this process and those forked from it."""
    for name in ("tensor", "empty", "zeros", "ones", "arange"):
        setattr(torch, name, _without_pinning(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda tensor, device=None: tensor
    try:
        from sglang.srt.mem_cache.pool_host import common
    except ImportError:  # 0.5.17
        return
    common.ALLOC_MEMORY_FUNCS["cpu"] = common.alloc_with_pin_memory  # not by cudaHostRegister


def _without_pinning(make):
    @functools.wraps(make)
    def unpinned(*args, pin_memory=False, **more):
        return make(*args, **more)

    return unpinned
