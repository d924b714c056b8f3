"""What a server cannot do is refused by name, before anything is asked of it."""

from __future__ import annotations

from typing import Final

import msgspec
import numpy as np
import pytest

from stillhouse.engines.base import GenerationRequest
from stillhouse.engines.sglang.config import SGLangConfig, SwapMode
from stillhouse.engines.sglang.features import Features, ServerInfo, unasked, why_unfit
from stillhouse.engines.sglang.requests import generate_body
from stillhouse.protocol.messages import Sampling
from tests.server_features import CAPABLE

TRIED: Final = {"0.5.17": False, "0.5.23": True}
"""SGLang -> whether it says which weights sampled which token: measured on real servers (tests/sglang)."""


def of_version(version: str) -> Features:
    return msgspec.structs.replace(CAPABLE, version=version, version_spans=TRIED[version])


@pytest.mark.parametrize(
    ("dtype", "device", "precision"),
    [
        ("float32", "cpu", "float32"),
        ("float32", "cuda", "float16"),  # TF32
        ("float16", "cuda", "float16"),
        ("half", None, "float16"),
        ("bfloat16", "cuda", "bfloat16"),
        ("auto", "cuda", "bfloat16"),  # or float16, of a checkpoint in float32
    ],
)
def test_the_precision_is_that_of_the_dtype(dtype: str, device: str | None, precision: str) -> None:
    assert ServerInfo(dtype=dtype, device=device).precision == precision
    assert ServerInfo(dtype=dtype, device=device, quantization="fp8").precision == "quantized"


def test_requests_stay_at_a_swap_where_the_server_says_what_sampled_each_token() -> None:
    retract = SGLangConfig(update_mode="retract")
    assert why_unfit(of_version("0.5.23"), retract) is None
    unfit = why_unfit(of_version("0.5.17"), retract) or ""
    assert unfit.startswith("SGLang 0.5.17 does not say which weights") and "use abort" in unfit
    assert "paused" in (why_unfit(msgspec.structs.replace(CAPABLE, pausing=False), retract) or "")


@pytest.mark.parametrize("version", TRIED)
@pytest.mark.parametrize("mode", ["abort", "in_place"])
def test_requests_are_cut_by_every_version(version: str, mode: SwapMode) -> None:
    assert why_unfit(of_version(version), SGLangConfig(update_mode=mode)) is None


def test_a_server_s_own_defaults_change_nothing() -> None:
    """SGLang lays what a request says over them (`tokenizer_manager`)."""
    preferred = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.1, "min_new_tokens": 5}
    preferred |= {"repetition_penalty": 1.05, "frequency_penalty": 1.0, "presence_penalty": 1.5, "ignore_eos": True}
    assert unasked(preferred) == [] == unasked(None) == unasked('{"n": 2, "regex": null}')
    assert unasked(preferred | {"logit_bias": {"4": 9.0}, "regex": "[a-z]", "stop": []}) == ["logit_bias", "regex"]
    request = GenerationRequest("a", np.asarray([1], np.int32), Sampling(), max_new_tokens=3, stop_token_ids=(2,))
    sampled = preferred | generate_body(request, [], "rid", CAPABLE, 1)["sampling_params"]
    assert {name for name in preferred if sampled[name] == preferred[name]} == set()
    assert (sampled["top_p"], sampled["top_k"], sampled["repetition_penalty"]) == (1.0, -1, 1.0)
