"""The kernels in C against slow and obvious float64, for each width of vector registers that this machine has. What
happens without a compiler is tested on every machine."""

from __future__ import annotations

import errno
import logging
import math
import os
import platform
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from stillhouse.engines.config import EngineConfig
from stillhouse.engines.torch import products
from stillhouse.engines.torch.decoders import CachedSlots
from stillhouse.engines.torch.engine import TorchEngine
from stillhouse.engines.torch.fused import FusedDecoder
from stillhouse.engines.torch.kernels import Kernels, KernelsUnavailableError, Rotary, compiled_kernels
from stillhouse.protocol.messages import WeightVersion
from tests.engines.torch.generation import assert_true, make_engine, make_model, make_requests, run

torch.set_num_threads(1)

Float64s = npt.NDArray[np.float64]
WIDTHS = ((), ("-mno-avx512f",), ("-mno-avx",)) if platform.machine() == "x86_64" else ((),)
KINDS = ("llama", "qwen2", "qwen3")


@pytest.fixture
def a_compiler() -> None:
    try:
        compiled_kernels()
    except KernelsUnavailableError as error:
        pytest.skip(str(error))


@pytest.fixture(params=WIDTHS, ids=lambda flags: " ".join(flags) or "native")
def kernels(request: pytest.FixtureRequest, a_compiler: None) -> Kernels:
    return compiled_kernels(*request.param)


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(1)


def float64(tensor: Tensor) -> Float64s:
    return tensor.double().numpy()


def assert_near(found: Tensor, expected: Float64s, relative: float = 3e-6) -> None:
    assert found.shape == expected.shape
    allowed = relative * max(1.0, float(np.abs(expected).max(initial=0.0)))
    np.testing.assert_allclose(float64(found), expected, rtol=0, atol=allowed)


# ------------------------------------------------------------------------------------------------ products


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("rows", [0, 1, 3, 4, 9, 17])
@pytest.mark.parametrize("outputs", [1, 48, 107])
def test_a_product_is_the_sum_of_its_terms(kernels: Kernels, rows: int, outputs: int) -> None:
    torch.manual_seed(rows)
    weight, bias = torch.randn(outputs, 37), torch.randn(outputs)
    x, residual = torch.randn(rows, 37), torch.randn(rows, outputs)
    plain = np.array([[math.fsum(line * row) for line in float64(weight)] for row in float64(x)]).reshape(rows, outputs)
    packed = kernels.packed(weight)
    assert_near(kernels.product(x, packed, outputs, None, None), plain)
    assert_near(kernels.product(x, packed, outputs, bias, None), plain + float64(bias))
    assert_near(kernels.product(x, packed, outputs, None, residual), plain + float64(residual))
    assert_near(kernels.product(x, packed, outputs, bias, residual), plain + float64(bias) + float64(residual))


def test_a_row_does_not_depend_on_the_others(kernels: Kernels) -> None:
    """Bit for bit, as far as rows take the same path: a rollout must not change with its neighbours."""
    weight, x = torch.randn(96, 64), torch.randn(8, 64)
    packed = kernels.packed(weight)
    together = kernels.product(x, packed, 96, None, None)
    for row in range(8):
        assert torch.equal(kernels.product(x[row : row + 1], packed, 96, None, None)[0], together[row])


# ----------------------------------------------------------------------------------------- norms and gates


@pytest.mark.parametrize("width", [1, 7, 64, 576])
def test_a_norm_divides_by_the_root_mean_square(kernels: Kernels, width: int) -> None:
    x, weight = 3 * torch.randn(5, width), torch.randn(width)
    lines = [row / math.sqrt(math.fsum(row * row) / width + 1e-5) * float64(weight) for row in float64(x)]
    assert_near(kernels.rms_norm(x, weight, 1e-5), np.array(lines))


@pytest.mark.parametrize("width", [1, 5, 16, 1536])
def test_a_gate_is_silu_times_up(kernels: Kernels, width: int) -> None:
    gate, up = 8 * torch.randn(4, width), torch.randn(4, width)
    expected = float64(gate) / (1 + np.exp(-float64(gate))) * float64(up)
    assert_near(kernels.silu_gate(torch.cat((gate, up), dim=1)), expected)


def test_a_gate_at_the_ends_of_the_range(kernels: Kernels) -> None:
    gate = torch.tensor([[-3e38, -200.0, -90.0, -80.0, -0.0, 0.0, 1e-30, 80.0, 90.0, 200.0, 3e38]])
    found = kernels.silu_gate(torch.cat((gate, torch.ones_like(gate)), dim=1))
    with np.errstate(over="ignore"):
        expected = float64(gate) / (1 + np.exp(-float64(gate)))
    np.testing.assert_allclose(float64(found)[0, 2:], expected[0, 2:], rtol=1e-6, atol=1e-30)
    assert (found[0, :2].abs() < 3).all()


# ------------------------------------------------------------------------------------------------ attention


def rotated(x: Float64s, cos: Float64s, sin: Float64s) -> Float64s:
    """transformers' rotate_half, with a sine that is not negated."""
    half = len(x) // 2
    return x * cos + np.concatenate((-x[half:], x[:half])) * sin


def normed(x: Float64s, weight: Float64s, eps: float) -> Float64s:
    return x / math.sqrt(float((x * x).mean()) + eps) * weight


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("with_norms", [False, True])
@pytest.mark.parametrize("size", [6, 64])
@pytest.mark.parametrize("heads", [(6, 2), (3, 3)])
def test_attention_over_the_cells_so_far(kernels: Kernels, with_norms: bool, size: int, heads: tuple[int, int]) -> None:
    """Rows of very different lengths, around the block of 128 cells and beyond."""
    torch.manual_seed(size)
    n_heads, n_groups = heads
    positions = [0, 1, 5, 126, 127, 128, 300]
    rows, cells, eps, scaling = len(positions), 320, 1e-5, 0.3
    store, qkv = torch.randn(2, rows + 1, n_groups, cells, size), 2 * torch.randn(rows, (n_heads + 2 * n_groups) * size)
    angles = torch.randn(cells, size // 2).repeat(1, 2)
    cos, sin = angles.cos(), angles.sin()
    negated = torch.cat((-sin[:, : size // 2], sin[:, size // 2 :]), dim=1)
    norms = torch.randn(n_heads + n_groups, size) if with_norms else None
    turn, before = Rotary(cos, negated, norms, eps), store.clone()
    found = kernels.attend(qkv, n_heads, torch.tensor(positions), turn, scaling, store)

    expected = np.zeros((rows, n_heads, size))
    written = before.clone()
    for row, position in enumerate(positions):
        lines = float64(qkv[row]).reshape(-1, size)
        if norms is not None:
            lines = np.array(
                [normed(x, w, eps) for x, w in zip(lines, float64(norms), strict=False)] + [*lines[-n_groups:]]
            )
        for group in range(n_groups):
            key = rotated(lines[n_heads + group], float64(cos[position]), float64(sin[position]))
            written[0, row, group, position] = torch.from_numpy(key)
            written[1, row, group, position] = torch.from_numpy(lines[n_heads + n_groups + group])
        for head in range(n_heads):
            group = head * n_groups // n_heads
            query = rotated(lines[head], float64(cos[position]), float64(sin[position]))
            keys, values = (float64(half[row, group, : position + 1]) for half in written)
            scores = [scaling * math.fsum(query * key) for key in keys]
            weights = np.exp(np.array(scores) - max(scores))
            expected[row, head] = (weights[:, None] * values).sum(axis=0) / weights.sum()
    assert_near(found, expected.reshape(rows, -1), 1e-5)
    assert_near(store, float64(written), 3e-6)


def test_a_row_that_is_nan_stays_alone(kernels: Kernels) -> None:
    """By NaN the engine finds the rows that failed."""
    qkv = torch.randn(3, 3 * 16)
    qkv[1, 3] = math.nan
    turn = Rotary(torch.ones(8, 16), torch.zeros(8, 16), None, 1e-5)
    out = kernels.attend(qkv, 1, torch.tensor([3, 4, 5]), turn, 1.0, torch.randn(2, 3, 1, 8, 16))
    assert out.isnan().any(dim=1).tolist() == [False, True, False]
    x = torch.randn(3, 32)
    x[1, 3] = math.nan
    for result in (
        kernels.product(x, kernels.packed(torch.randn(8, 32)), 8, None, None),
        kernels.rms_norm(x, torch.ones(32), 1e-5),
        kernels.silu_gate(x),
    ):
        assert result.isnan().any(dim=1).tolist() == [False, True, False]


# --------------------------------------------------------------------------------------------- in the engine


@pytest.mark.usefixtures("a_compiler")
@pytest.mark.parametrize("kind", KINDS)
def test_an_engine_with_kernels_writes_the_same(kind: str) -> None:
    """The same tokens as without, and the log-probs of the plain forward."""
    requests = make_requests(8, new_tokens=90)
    with_kernels, without = (run(make_engine(kind, kernels=choice), requests) for choice in ("on", "off"))
    assert_true(make_model(kind), requests, with_kernels)
    for request in requests:
        a, b = with_kernels[request.request_id], without[request.request_id]
        assert a.ids == b.ids
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-4)


@pytest.mark.usefixtures("a_compiler")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("update_mode", ["in_place", "retract"])
def test_kernels_follow_a_swap(kind: str, update_mode: str) -> None:
    engine = make_engine(kind, kernels="on", update_mode=update_mode)
    requests = make_requests(6, new_tokens=12)
    assert_true(make_model(kind, 0), requests, run(engine, requests))
    new = make_model(kind, 1)
    engine.stage_weights(WeightVersion(0, 1), [(name, p.detach()) for name, p in new.named_parameters()])
    assert_true(new, requests, run(engine, requests))


def kernels_of(engine: TorchEngine) -> Kernels | None:
    slots = engine._slots  # pyright: ignore[reportPrivateUsage]
    assert isinstance(slots, CachedSlots) and isinstance(slots.decoder, FusedDecoder)
    return slots.decoder.kernels


@pytest.mark.usefixtures("a_compiler")
def test_auto_is_for_large_models(monkeypatch: pytest.MonkeyPatch) -> None:
    assert kernels_of(make_engine()) is None
    monkeypatch.setattr(products, "PACKED_FROM_ELEMENTS", 1)
    assert kernels_of(make_engine()) is compiled_kernels()
    assert kernels_of(make_engine(kernels="off")) is None
    assert kernels_of(make_engine(dtype="bfloat16")) is None


@pytest.fixture(params=["/nowhere/cc -m64", ""])
def without_compiler(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """None at the place that CC names, or none on the PATH."""
    monkeypatch.setenv("CC", request.param)
    monkeypatch.setenv("PATH", "/nowhere/bin")
    compiled_kernels.cache_clear()
    yield "/nowhere/cc" if request.param else "no C compiler.* install gcc, or name one in CC"
    compiled_kernels.cache_clear()


def test_without_a_compiler_auto_warns_and_on_refuses(
    without_compiler: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ValueError, match=f"kernels = on: .*{without_compiler}"):
        make_engine(kernels="on")
    monkeypatch.setattr(products, "PACKED_FROM_ELEMENTS", 1)
    with caplog.at_level(logging.WARNING):
        engine = make_engine()
    assert kernels_of(engine) is None
    assert re.search(f"actor.torch.kernels.*{without_compiler}", caplog.text)
    requests = make_requests(2)
    assert_true(make_model("qwen3"), requests, run(engine, requests))


@pytest.mark.parametrize("cc", ['cc "', "false", "sh -c 'printf \"\\377\" >&2; exit 1'"])
def test_a_compiler_of_any_name_and_words_is_an_error_that_auto_survives(
    monkeypatch: pytest.MonkeyPatch, cc: str
) -> None:
    monkeypatch.setenv("CC", cc)
    with pytest.raises(KernelsUnavailableError, match="no command" if cc == 'cc "' else f"{cc.split()[0]} .*failed: "):
        compiled_kernels.__wrapped__()


def test_a_machine_without_a_folder_for_temporary_files_has_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/nowhere/at/all")
    with pytest.raises(KernelsUnavailableError, match=r"/nowhere/at/all.*TMPDIR"):
        compiled_kernels.__wrapped__()


@pytest.mark.usefixtures("a_compiler")
def test_a_file_that_stays_as_long_as_it_is_loaded_does_no_harm(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """NFS keeps it under another name in its folder."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def not_empty(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY))

    with monkeypatch.context() as patched:
        patched.setattr(os, "rmdir", not_empty)
        loaded = compiled_kernels.__wrapped__()
    assert loaded.packed(torch.ones(1, 1)).numel() > 1
    assert [folder.name[:19] for folder in tmp_path.iterdir()] == ["stillhouse-kernels-"]


def test_where_kernels_cannot_be_used_on_is_refused() -> None:
    refused: list[dict[str, Any]] = [{"fused": False}, {"dtype": "bfloat16"}]
    for settings in refused:
        with pytest.raises(ValueError, match="kernels = on with fused"):
            EngineConfig(kernels="on", **settings)
    with pytest.raises(ValueError, match="GPT2LMHeadModel has no hand-written decoder"):
        make_engine("gpt2", kernels="on")
