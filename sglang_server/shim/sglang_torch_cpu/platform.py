from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import SRTPlatform


class TorchCpuPlatform(CpuDeviceMixin, SRTPlatform):
    """No Triton, no graph capture, no pinned memory, gloo; every fused op runs forward_native."""

    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"

    def is_pin_memory_available(self, device=None) -> bool:
        return False

    def get_compile_backend(self, mode=None) -> str:
        return "eager"

    def get_default_attention_backend(self) -> str:
        return "torch_native"


if not hasattr(SRTPlatform, "get_kv_pool_cls"):  # 0.5.17: hooks without an in-tree default

    def _mha(self):
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

        return MHATokenToKVPool

    def _alloc(self):
        from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator

        def make(size, page_size=1, **kw):
            assert page_size == 1
            return TokenToKVPoolAllocator(size, **kw)

        return make

    TorchCpuPlatform.get_mha_kv_pool_cls = _mha
    TorchCpuPlatform.get_paged_allocator_cls = _alloc
