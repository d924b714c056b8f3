"""Log-probs by the shortest way: transformers, one text at a time, without any code of the engines.

    logprob_t = z_t[y_t] / T - logsumexp(z_t / T),     z_t = the model's logits behind the tokens before t

Legend: T temperature, K temperatures, N tokens of a text without its first, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
import psutil
import torch
import transformers
from transformers import AutoModelForCausalLM

Float64s: TypeAlias = npt.NDArray[np.float64]
HOST_SHARE: Final = 0.6
"""Share of the free memory that a model may take."""
ROWS: Final = 256
"""Positions whose logits are computed with in float64 at one time."""


class TooLarge(Exception):
    """The model does not fit into the free memory of this machine."""


def logprobs(
    folder: str,
    parameters: int,
    texts: Sequence[npt.NDArray[np.int32]],
    temperatures: Sequence[float] = (1.0,),
    change: Callable[[Any], None] = lambda model: None,
) -> list[Float64s]:
    """For each text the log-probs [K, N] of all tokens after the first. `change` is applied to the model before."""
    with _loaded(folder, parameters) as model, torch.inference_mode():
        change(model)
        return [_of_text(model, ids, temperatures) for ids in texts]


def _of_text(model: Any, ids: npt.NDArray[np.int32], temperatures: Sequence[float]) -> Float64s:
    ids_1L = torch.from_numpy(ids.astype(np.int64))[None].to(model.device)
    if ids_1L.shape[1] < 2:
        return np.zeros((len(temperatures), 0))
    logits_NV = model(ids_1L, use_cache=False).logits[0, :-1]
    targets_N = ids_1L[0, 1:]
    parts: list[torch.Tensor] = []
    for start in range(0, len(targets_N), ROWS):
        z_RV, y_R1 = logits_NV[start : start + ROWS].double(), targets_N[start : start + ROWS, None]
        parts.append(
            torch.stack([(z_RV / t).gather(1, y_R1)[:, 0] - (z_RV / t).logsumexp(dim=1) for t in temperatures])
        )
    return torch.cat(parts, dim=1).cpu().numpy()


@contextmanager
def _loaded(folder: str, parameters: int) -> Generator[Any]:
    """On a GPU if it has room, otherwise on the CPU, in float32 if that fits. Raises TooLarge."""
    device, dtype = _place(parameters)
    bars = transformers.utils.logging.is_progress_bar_enabled()
    transformers.utils.logging.disable_progress_bar()
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation="eager", local_files_only=True
        )
    finally:
        if bars:
            transformers.utils.logging.enable_progress_bar()
    try:
        yield model.to(device).eval()
    finally:
        del model
        if device == "cuda":
            torch.cuda.empty_cache()


def _place(parameters: int) -> tuple[str, torch.dtype]:
    if torch.cuda.is_available() and 4 * parameters < HOST_SHARE * torch.cuda.mem_get_info()[0]:
        return "cuda", torch.float32
    free = psutil.virtual_memory().available
    for width, dtype in ((4, torch.float32), (2, torch.bfloat16)):
        if width * parameters < HOST_SHARE * free:
            return "cpu", dtype
    raise TooLarge(
        f"a model of {parameters / 1e9:.1f} billion parameters does not fit beside what runs here "
        f"({free / 2**30:.0f} GiB free)"
    )
