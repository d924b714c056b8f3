"""A student with experts on real SGLang servers: transformers holds those of a layer in one tensor, a server is sent
them one by one, and both compute the same."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from stillhouse.models.loading import load_causal_lm
from stillhouse.sglang_server.servers import Servers, SGLangServer
from tests.sglang.conftest import READY_S, STUDENT
from tests.sglang.test_weight_push import (
    V1,
    V2,
    V3,
    WAIT_S,
    Named,
    Run,
    checksums_work,
    wait_until,
)

pytestmark = pytest.mark.skipif(
    os.environ.get("SGLANG_CPU_VERSION") == "0.5.17",
    reason="SGLang 0.5.17 computes nan with a mixture of experts on a CPU, with the weights that it has loaded itself",
)
SHAPE: dict[str, Any] = {
    **{"num_hidden_layers": 2, "moe_intermediate_size": 48, "num_experts": 8, "num_experts_per_tok": 2},
    **{"norm_topk_prob": True, "tie_word_embeddings": False},
}


@pytest.fixture(scope="package")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3-MoE with random weights, of the built-in student's vocabulary and attention."""
    path = tmp_path_factory.mktemp("mixture")
    dense = json.loads((STUDENT / "config.json").read_text())
    dense = {key: dense[key] for key in dense if key not in ("architectures", "model_type", "layer_types")}
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3_moe", **{**dense, **SHAPE})).save_pretrained(path)
    AutoTokenizer.from_pretrained(STUDENT).save_pretrained(path)  # pyright: ignore[reportUnknownMemberType]
    return path


@pytest.fixture(scope="package")
def mixture_weights(mixture: Path) -> Named:
    model = load_causal_lm(mixture, device="cpu", dtype="float32", attention="sdpa")
    named = [(name, parameter.detach()) for name, parameter in model.named_parameters()]
    assert sum(name.endswith("experts.gate_up_proj") and tensor.ndim == 3 for name, tensor in named) == 2
    return named


@pytest.fixture(scope="package")
def two(servers: Servers, mixture: Path) -> list[SGLangServer]:
    started = [servers.start(name, mixture) for name in ("mixture-0", "mixture-1")]
    servers.wait_ready(started, READY_S)
    return started


@pytest.fixture
def run(tmp_path: Path, mixture: Path, mixture_weights: Named) -> Iterator[Run]:
    run = Run(tmp_path, mixture_weights, mixture)
    yield run
    run.close()


def test_servers_answer_under_each_version_that_was_published_as_transformers_does(
    run: Run, two: list[SGLangServer]
) -> None:
    """Every expert has changed. The second server comes later."""
    publisher = run.start(two[:1])
    for version in (V1, V2):
        run.publish(version)
        assert publisher.wait_idle(WAIT_S)
        run.delivered(version)
    run.join(two[1:])
    run.delivered(V2)
    run.publish(V3)
    assert publisher.wait_idle(WAIT_S)
    run.delivered(V3)
    assert publisher.stats.dropped_total == {}
    if checksums_work(two[0]):
        assert all(actor.stats["weight_checks_total"] >= 1 for actor in run.actors.values())
    assert all(actor.stats["weight_canaries_total"] >= 1 for actor in run.actors.values())


@pytest.mark.parametrize("forgets", [r"layers\.1\.mlp\.experts\.7\.up_proj", r"layers\.0\.mlp\.experts\.0\.down_proj"])
def test_one_expert_that_a_server_passes_over_is_found_by_the_checksums_of_the_first_version(
    run: Run, two: list[SGLangServer], forgets: str
) -> None:
    if not checksums_work(two[0]):
        pytest.skip("this SGLang has checksums with CUDA only")
    publisher = run.start(two[:1], rejoin_delay_s=60.0)
    run.actors["actor-0"].weights.forgets = forgets
    run.publish(V1)
    wait_until(lambda: publisher.stats.dropped_total == {"wrong_weights": 1})
