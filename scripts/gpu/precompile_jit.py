"""Compiles, without a GPU, the kernels that SGLang 0.5.17 would compile on first use on an H100/H200 (sm_90a), into
TVM_FFI_CACHE_DIR. Needs nvcc 13.0 (CUDA_HOME). SGLang loads what it finds there
(sglang/kernels/jit/utils/compile.py, "prebuilt").

    precompile_jit.py            all that are missing
    precompile_jit.py --job N    one of them
    precompile_jit.py --missing  prints the numbers of those that TVM_FFI_CACHE_DIR lacks (needs no torch, no SGLang)
"""

import os
import sys
import time
import types
from pathlib import Path

JOBS = [
    # Beginning of the library's name after sgl_kernel_jit_, what builds it, its arguments.
    # Six for Qwen3-1.7B (heads of 128, 8 KV heads) ...
    ("activation_bf16_t_", "activation_module", ("bfloat16",)),
    ("kvcache_2048_2048_", "_jit_kvcache_module", (2048, 2048)),  # KV heads x head size x 2 bytes
    ("qknorm_128_", "_jit_qknorm_module", (128, "bfloat16")),
    ("clamp_position_int64_t_", "_jit_clamp_position_module", ("int64",)),
    ("clamp_position_int32_t_", "_jit_clamp_position_module", ("int32",)),
    ("fused_rope_true_128_true_bf16_t_bf16_t_", "_jit_fused_rope_module", (True, 128, "bfloat16", "bfloat16")),
    # ... and, with the two for positions, for the built-in models (heads of 32, 2 KV heads, float16)
    ("activation_fp16_t_", "activation_module", ("float16",)),
    ("kvcache_128_128_", "_jit_kvcache_module", (128, 128)),
    ("fused_rope_true_32_true_fp16_t_fp16_t_", "_jit_fused_rope_module", (True, 32, "float16", "float16")),
]
cache = Path(os.environ["TVM_FFI_CACHE_DIR"])
missing = [n for n, (name, *_) in enumerate(JOBS) if not any(cache.glob(f"sgl_kernel_jit_{name}*/*.so"))]
if "--missing" in sys.argv:
    print(*missing)
    raise SystemExit
jobs = [int(sys.argv[sys.argv.index("--job") + 1])] if "--job" in sys.argv else missing
import torch  # noqa: E402 - the line above must work without it

torch.cuda.is_available = lambda: True  # so that the modules for CUDA can be imported
torch.cuda.device_count = lambda: 1
torch.cuda.current_device = lambda: 0
torch.cuda.get_device_capability = lambda d=None: (9, 0)
torch.cuda.get_device_properties = lambda d=None: types.SimpleNamespace(
    major=9, minor=0, name="H100", total_memory=80 << 30, multi_processor_count=132, gcnArchName=""
)
torch.cuda.get_device_name = lambda d=None: "NVIDIA H100 80GB HBM3"
torch.cuda.mem_get_info = lambda d=None: (80 << 30, 80 << 30)

failed = 0
for name, build, args in (JOBS[n] for n in jobs):
    began = time.monotonic()
    try:
        globals()[build](*(getattr(torch, a) if isinstance(a, str) else a for a in args))
        print(f"kernel {name}: {time.monotonic() - began:.0f} s", flush=True)
    except Exception as error:
        failed += 1
        print(f"kernel {name}: FAILED {str(error)[-1500:]}", flush=True)
raise SystemExit(bool(failed))
