"""Memory of each GPU by estimate: figures worked out by hand for the shape of Qwen3-8B."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import builtin
from engines.provider import ModelShape
from launch.checks.gpu_memory import estimate, learner_need, read_shape, server_need, worker_need
from launch.checks.placement import Choice, Placement
from launch.config.pools import worker_groups
from launch.config.run import RunConfig
from launch.config.tree import build
from launch.machine.gpus import Places
from launch.machine.machine import Machine

QWEN3_8B = ModelShape(
    parameters=8_190_735_360, layers=36, hidden=4096, mlp=12288, vocabulary=151_936, kv_width=1024, dtype_bytes=2
)
"""8.19e9 * 4 bytes = 30.5 GiB, * 2 = 15.3."""


def config(**plain: Any) -> RunConfig:
    models = {"student": str(builtin.STUDENT_DIR), "teacher": str(builtin.TEACHER_DIR)}
    return build(RunConfig, {"models": models, **plain})


def served(**server: Any) -> RunConfig:
    return config(actor={"engine": "sglang", "server": {"device": "cuda", **server}})


def rounded(parts: Any) -> dict[str, float]:
    return {name: round(gib, 1) for name, gib in parts.items()}


def test_the_learner_holds_masters_moments_copies_and_what_the_backward_pass_needs() -> None:
    need = learner_need(config(), QWEN3_8B, "nccl")
    assert rounded(need.sure) == {"weights": 30.5, "gradient and AdamW": 91.5}
    # 4,096 tokens * 36 layers * (10 * 4,096 + 4 * 12,288) * 2 bytes; 3 * 1,024 rows * 151,936 * 4 bytes
    likely = {"weights in bfloat16": 15.3, "staging": 61.0, "activations": 24.8, "logits": 1.7, "process": 1.0}
    assert rounded(need.likely) == likely
    other = learner_need(config(learner={"dtype": "float32"}, weights={"dtype": "bfloat16"}), QWEN3_8B, "nccl")
    assert rounded(other.likely) == likely | {"weights in bfloat16": 0.0, "staging": 30.5, "activations": 49.5}


def test_each_rank_has_its_share_also_of_what_is_sent() -> None:
    of_four = config(learner={"ranks": 4})
    for rank in range(4):
        need = learner_need(of_four, QWEN3_8B, "nccl", rank)
        assert rounded(need.sure) == {"weights": 7.6, "gradient and AdamW": 22.9}
        assert rounded(need.likely)["staging"] == 15.3
        assert rounded(need.likely)["activations"] == 24.8


def test_layers_that_compute_their_activations_again_keep_their_input() -> None:
    # 4,096 tokens * 2 bytes * (36 * 4,096 and one layer's 10 * 4,096 + 4 * 12,288; or half of each kind)
    for share, gib in ((1.0, 1.8), (0.5, 13.6)):
        need = learner_need(config(learner={"recompute": share}), QWEN3_8B, "nccl")
        assert rounded(need.likely)["activations"] == gib


def test_copies_are_as_wide_as_the_actors_weights_and_under_gloo_in_host_memory() -> None:
    half = config(actor={"torch": {"dtype": "bfloat16"}})
    assert rounded(learner_need(half, QWEN3_8B, "nccl").likely)["staging"] == 30.5
    assert rounded(learner_need(half, QWEN3_8B, "gloo").likely)["staging"] == 0.0
    asked = config(weights={"staging": "device"})
    assert rounded(learner_need(asked, QWEN3_8B, "gloo").likely)["staging"] == 61.0


@pytest.mark.parametrize("learner", [{"frozen": True}, {"lora": {"rank": 8}}])
def test_what_is_not_trained_has_no_moments(learner: dict[str, Any]) -> None:
    assert rounded(learner_need(config(learner=learner), QWEN3_8B, "nccl").sure)["gradient and AdamW"] == 0.0


def test_an_embedded_actor_holds_its_cache_and_the_next_weights() -> None:
    actors, _ = worker_groups(config(actor={"torch": {"dtype": "bfloat16"}}))
    need = worker_need(actors, QWEN3_8B, "actor-0")
    # 64 slots * 1,024 tokens * 36 layers * 2 * 1,024 * 2 bytes = 9.0 GiB
    assert rounded(need.sure) == {"weights": 15.3, "KV cache": 9.0}
    assert rounded(need.likely) == {"next weights": 15.3, "process": 1.0}


def test_a_teacher_and_a_server() -> None:
    _, teachers = worker_groups(config())
    assert rounded(worker_need(teachers, QWEN3_8B, "teacher-0").sure) == {"weights": 15.3}
    need = server_need(worker_groups(served(tp=2))[0], QWEN3_8B, "server-actor-0", 80.0)
    assert (rounded(need.sure)["weights"], rounded(need.likely)["KV cache"]) == (7.6, 60.4)  # 0.85 * 80 - 7.6
    small = worker_groups(served(args=["--mem-fraction-static=0.3"]))[0]
    shared = server_need(small, QWEN3_8B, "server-actor-0", 80.0)
    assert rounded(shared.likely)["KV cache"] == 8.7


def test_the_shape_is_read_from_the_folder(tmp_path: Path) -> None:
    shape = read_shape(builtin.STUDENT_DIR)
    assert shape is not None and shape.parameters > 100_000
    assert shape[1:] == (3, 64, 192, 320, 64, 4)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "x"}))
    assert read_shape(tmp_path) is None


def large_folder(path: Path, parameters: int) -> str:
    """A model folder whose weights are a hole in a file: its header says how large they are."""
    told = json.loads((builtin.STUDENT_DIR / "config.json").read_text())
    path.mkdir()
    (path / "config.json").write_text(json.dumps(told | {"dtype": "bfloat16"}))
    header = json.dumps({"w": {"dtype": "BF16", "shape": [parameters], "data_offsets": [0, 2 * parameters]}}).encode()
    with (path / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + 2 * parameters)
    return str(path)


def test_a_gpu_that_cannot_hold_what_is_certain_is_refused_and_a_tight_one_is_told(tmp_path: Path) -> None:
    """6e9 parameters: 16 bytes of each are 89.4 GiB, more than 80; 5e9: 74.5 GiB, and staging goes beyond 80."""
    places = Placement(Places({"learner": 0, "actor-0": 1}, {}), Choice("nccl", ""), "")
    machine = Machine(("4", "6"), (80.0, 80.0))
    models = {"student": large_folder(tmp_path / "six", 6_000_000_000), "teacher": str(builtin.TEACHER_DIR)}
    found = estimate(config(models=models, actors=1, teachers=0), machine, places)
    (mistake,) = found.mistakes
    assert mistake.startswith("GPU 4: got learner with at least 89.4 GiB, expected at most its 80 GiB")
    models["student"] = large_folder(tmp_path / "five", 5_000_000_000)
    found = estimate(config(models=models, actors=1, teachers=0), machine, places)
    assert found.mistakes == []
    assert found.lines[0].startswith("GPU 4: about ") and found.lines[0].endswith("by this estimate")
    assert "by this estimate" not in found.lines[1]
    assert estimate(config(models=models), machine._replace(gib=()), places).lines == []
