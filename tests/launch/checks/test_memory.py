"""Memory of each GPU by estimate: figures worked out by hand for the shape of Qwen3-8B."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import pytest

from stillhouse import builtin
from stillhouse.engines.provider import ModelShape
from stillhouse.launch.checks import memory
from stillhouse.launch.checks.memory import (
    HOST,
    TIGHT,
    estimate,
    learner_host_need,
    learner_need,
    read_shape,
    worker_need,
)
from stillhouse.launch.checks.placement import Choice, Placement
from stillhouse.launch.config.pools import worker_groups
from stillhouse.launch.config.run import RunConfig
from stillhouse.launch.config.tree import build
from stillhouse.launch.machine.gpus import Places
from stillhouse.launch.machine.machine import Machine

QWEN3_8B = ModelShape(
    parameters=8_190_735_360,
    layers=36,
    hidden=4096,
    mlp=12288,
    vocabulary=151_936,
    q_width=4096,
    kv_width=1024,
    qk_norm=True,
    tied=False,
    dtype_bytes=2,
)
"""8.19e9 * 4 bytes = 30.5 GiB, * 2 = 15.3."""


def config(**plain: Any) -> RunConfig:
    models = {"student": str(builtin.STUDENT_DIR), "teacher": str(builtin.TEACHER_DIR)}
    return build(RunConfig, {"models": models, **plain})


def rounded(parts: Any) -> dict[str, float]:
    return {name: round(gib, 1) for name, gib in parts.items()}


def some(parts: Any) -> dict[str, float]:
    return {name: gib for name, gib in rounded(parts).items() if gib}


def test_the_learner_holds_masters_moments_copies_and_what_the_backward_pass_needs() -> None:
    need = learner_need(config(), QWEN3_8B, "nccl")
    assert rounded(need.sure) == {"weights": 30.5, "gradient": 30.5, "moments": 61.0}
    # copies: 2 * (8.19e9 - 151,936 * 4,096) bytes.
    # activations: 4,096 tokens * (36 * (8 * 12,288 + 26 * 4,096 + 14 * 5,120) + 16 * 4,096)
    # logits: 8 * 151,936 * (1,024 + 4,096)
    likely = {"bfloat16 copies": 14.1, "staging": 61.0, "activations": 38.2, "logits": 5.8, "process": 1.0}
    assert some(need.likely) == likely
    other = learner_need(config(learner={"dtype": "float32"}, weights={"dtype": "bfloat16"}), QWEN3_8B, "nccl")
    # 4 * (4 * 12,288 + 6 * 4,096 + 2 * 5,120) + 8 * 5,120 per layer and token
    assert some(other.likely) == {"staging": 30.5, "activations": 52.0, "logits": 5.8, "process": 1.0}


def test_each_rank_has_its_share_also_of_what_is_sent() -> None:
    of_four = config(learner={"ranks": 4})
    for rank in range(4):
        need = learner_need(of_four, QWEN3_8B, "nccl", rank)
        assert rounded(need.sure) == {"weights": 7.6, "gradient": 7.6, "moments": 15.3}
        assert rounded(need.likely)["staging"] == 15.3
        assert rounded(need.likely)["activations"] == 38.2
        # 3 * 2 bytes of a layer, 193e6; 2 * 4 bytes of embedding and head, 2 * 151,936 * 4,096
        assert rounded(need.likely)["gathered"] == 10.4


def test_layers_that_compute_their_activations_again_keep_their_input() -> None:
    # 4,096 tokens * (36 * 4 * 4,096 + 16 * 4,096), or half of each kind; what one layer computes again, 1.1 GiB, is
    # less than the logits, which are gone then.
    for share, gib in ((1.0, 2.5), (0.5, 20.4)):
        need = learner_need(config(learner={"recompute": share}), QWEN3_8B, "nccl")
        assert rounded(need.likely)["activations"] == gib


def test_frozen_weights_under_adapters_are_in_bfloat16_where_products_are() -> None:
    # 2 bytes of each, 4 of the embedding; on a CPU products are in float32
    need = learner_need(config(learner={"lora": {"rank": 8}}), QWEN3_8B, "nccl")
    assert some(need.sure) == {"weights": 16.4}
    assert "bfloat16 copies" not in some(need.likely)
    assert some(learner_need(config(learner={"lora": {"rank": 8}}), QWEN3_8B, "gloo", device="cpu").sure) == {
        "weights": 30.5
    }


def test_copies_are_as_wide_as_the_actors_weights_and_under_gloo_in_host_memory() -> None:
    half = config(actor={"torch": {"dtype": "bfloat16"}})
    assert rounded(learner_need(half, QWEN3_8B, "nccl").likely)["staging"] == 30.5
    assert rounded(learner_need(half, QWEN3_8B, "gloo").likely)["staging"] == 0.0
    asked = config(weights={"staging": "device"})
    assert rounded(learner_need(asked, QWEN3_8B, "gloo").likely)["staging"] == 61.0


def test_by_ipc_two_buckets_are_on_the_gpu_and_the_copies_where_there_is_room() -> None:
    ipc = {"transport": "ipc", "dtype": "bfloat16"}
    need = learner_need(config(weights=ipc), QWEN3_8B, "gloo")
    assert rounded(need.likely)["staging"] == 0.0
    assert need.likely["buckets"] == 2 * 2 * QWEN3_8B.vocabulary * QWEN3_8B.hidden / 2**30, "its embedding"
    large = config(weights=ipc | {"bucket_bytes": 2 << 30, "staging": "device"})
    need = learner_need(large, QWEN3_8B, "gloo")
    assert rounded(need.likely)["staging"] == 30.5 and need.likely["buckets"] == 4.0
    few = learner_need(config(weights=ipc), QWEN3_8B._replace(parameters=1000, vocabulary=1, hidden=1), "gloo")
    assert few.likely["buckets"] == 2000 / 2**30, "never more than all weights"
    cases: list[tuple[dict[str, Any], int, Literal["gloo", "nccl"], float]] = [
        ({}, 1, "gloo", 0.0),
        ({}, 1, "nccl", 0.0),  # sent in place
        ({}, 2, "nccl", 1.0),
        ({"staging": "host", "bucket_bytes": 3 << 30}, 1, "nccl", 6.0),
    ]
    for weights, ranks, backend, gib in cases:
        need = learner_need(config(weights=weights, learner={"ranks": ranks}), QWEN3_8B, backend)
        assert need.likely["buckets"] == gib
        assert learner_need(config(learner={"ranks": 2}), QWEN3_8B, backend, rank=1).likely["buckets"] == 0.0
    served = config(learner={"ranks": 2}, actor={"engine": "sglang", "server": {"args": ["--dtype", "bfloat16"]}})
    embedding = 2 * QWEN3_8B.vocabulary * QWEN3_8B.hidden / 2**30
    assert learner_need(served, QWEN3_8B, "nccl").likely["buckets"] == 2 * embedding, "whole tensors for servers"


def test_moments_and_copies_in_host_memory_are_counted_there_and_not_on_the_gpu() -> None:
    on_host = config(learner={"moments": "host", "ranks": 2}, weights={"staging": "host", "dtype": "bfloat16"})
    for rank in range(2):
        need = learner_need(on_host, QWEN3_8B, "nccl", rank)
        assert some(need.sure) == {"weights": 15.3, "gradient": 15.3} and "staging" not in some(need.likely)
        beside = learner_host_need(on_host, QWEN3_8B, "nccl", rank)
        # 8 * 8.19e9 / 2 and 2 * 2 * 8.19e9 / 2 bytes
        assert some(beside.sure) == {"moments": 30.5} and some(beside.likely) == {"staging": 15.3, "process": 0.1}
    assert learner_need(on_host, QWEN3_8B, "gloo", device="cpu").sure["moments"] == pytest.approx(30.5, abs=0.05)
    none = learner_host_need(config(), QWEN3_8B, "nccl")
    assert not some(none.sure) and some(none.likely) == {"process": 0.1}


@pytest.mark.parametrize(
    ("optimizer", "gib"),
    # 4 bytes of each, and 4 more of embedding and head; 1 byte and 4 / 256 for each of two moments
    [("adamw", 61.0), ("muon", 30.5 + 4.6), ("adamw8bit", 15.5)],
)
def test_moments_are_those_of_the_optimizer(optimizer: str, gib: float) -> None:
    need = learner_need(config(learner={"optimizer": {"name": optimizer}}), QWEN3_8B, "nccl")
    assert need.sure["moments"] == pytest.approx(gib, abs=0.06)


@pytest.mark.parametrize("learner", [{"frozen": True}, {"lora": {"rank": 8}}])
def test_what_is_not_trained_has_no_gradient_and_no_moments(learner: dict[str, Any]) -> None:
    assert some(learner_need(config(learner=learner), QWEN3_8B, "nccl").sure).keys() == {"weights"}


def test_an_embedded_actor_holds_its_cache_and_the_next_weights() -> None:
    actors, _ = worker_groups(config(actor={"torch": {"dtype": "bfloat16"}}))
    need = worker_need(actors, QWEN3_8B, "actor-0")
    # 64 slots * 1,024 tokens * 36 layers * 2 * 1,024 * 2 bytes = 9.0 GiB
    assert rounded(need.sure) == {"weights": 15.3, "KV cache": 9.0}
    assert rounded(need.likely) == {"next weights": 15.3, "process": 1.0}


def test_a_teacher() -> None:
    _, teachers = worker_groups(config())
    assert rounded(worker_need(teachers, QWEN3_8B, "teacher-0").sure) == {"weights": 15.3}
    assert rounded(worker_need(teachers, QWEN3_8B, "teacher-0").likely)["prefix cache"] == 4.0
    for mb in (0, 2048):
        _, given = worker_groups(config(teacher={"prefix_cache_mb": mb}))
        assert rounded(worker_need(given, QWEN3_8B, "teacher-0").likely)["prefix cache"] == mb / 1024
    assert "prefix cache" not in worker_need(teachers, QWEN3_8B, "teacher-0", HOST).likely


def test_the_shape_is_read_from_the_folder(tmp_path: Path) -> None:
    shape = read_shape(builtin.STUDENT_DIR)
    assert shape is not None and shape.parameters > 100_000
    assert shape[1:] == (3, 64, 192, 320, 128, 64, True, True, 4, 0.0)
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


def test_what_cannot_fit_is_refused_and_what_is_tight_is_told(tmp_path: Path) -> None:
    """6e9 parameters: 16 bytes of each are 89.4 GiB, more than 80. 4e9: 59.6 GiB, 29.8 of staging, and half of that of
    copies in bfloat16: too large by the whole estimate, which is refused if it is more than 15 % above 80."""
    places = Placement(Places({"learner": 0, "actor-0": 1}, {}), Choice("nccl", ""))
    machine = Machine(("4", "6"), (80.0, 80.0), host_gib=16.0)

    def of(name: str, parameters: int, at: Placement = places, **plain: Any) -> Any:
        if not (tmp_path / name).exists():
            large_folder(tmp_path / name, parameters)
        models = {"student": str(tmp_path / name), "teacher": str(builtin.TEACHER_DIR)}
        return estimate(config(models=models, actors=1, teachers=0, **plain), machine, at)

    (mistake,) = of("six", 6_000_000_000).mistakes
    assert mistake.startswith("GPU 4: got at least 89.4 GiB, expected at most its 80 GiB, in GiB: learner ")
    assert mistake.endswith(
        "Use learner.optimizer = adamw8bit, learner.moments = host, learner.ranks or learner.lora.rank, or "
        "weights.staging = host or weights.dtype = bfloat16, or a smaller model"
    )
    (mistake,) = of("four", 4_000_000_000).mistakes
    assert mistake.startswith("GPU 4: got about 97.9 GiB")
    found = of("four", 4_000_000_000, weights={"dtype": "bfloat16"})
    assert found.mistakes == []
    assert found.lines[0].startswith("GPU 4: about 83.") and found.lines[0].endswith("by this estimate")
    assert "by this estimate" not in found.lines[1]
    # 6e9: 8 bytes of each are 44.7 GiB of the GPU, or of the host.
    beside = of("six", 6_000_000_000, weights={"dtype": "bfloat16"}, learner={"moments": "host"})
    (mistake,) = beside.mistakes
    assert mistake.startswith("host: got at least 44.7 GiB, expected at most its 16 GiB, in GiB: learner ")
    assert mistake.endswith("Use learner.optimizer = adamw8bit or learner.lora.rank, or a smaller model")
    assert [line.split(":")[0] for line in beside.lines] == ["host", "GPU 4", "GPU 6"]
    # The same on the host, without GPUs: 1e9 parameters take 14.9 GiB of 16 in any case, and the actor's weights 3.7.
    on_host = Placement(Places({"learner": None, "actor-0": None}, {}), Choice("gloo", ""))
    (mistake,) = of("one", 1_000_000_000, on_host).mistakes
    assert mistake.startswith("host: got at least ") and "its 16 GiB" in mistake
    assert mistake.endswith(
        "Use learner.optimizer = adamw8bit or learner.lora.rank, or weights.dtype = bfloat16, or a smaller model"
    )
    assert estimate(config(), machine._replace(gib=(), host_gib=0.0), places).lines == []


def on_the_host(gib: float, config: RunConfig) -> Any:
    """The estimate of a run all of whose workers are on a host of this size, without GPUs."""
    workers = [who for group in worker_groups(config) for who in group.workers]
    places = Placement(Places(dict.fromkeys(("learner", *workers)), {}), Choice("gloo", ""))
    return estimate(config, Machine(host_gib=gib), places)


def test_forty_workers_fit_where_a_few_gib_are_because_they_share_what_was_imported() -> None:
    """The project's own command used 2.2 to 2.5 GiB where it was measured (docs/results/README.md)."""
    found = on_the_host(8.0, config(actors=32, teachers=8))
    assert found.mistakes == []
    (line,) = found.lines
    assert line.startswith("host: about ") and not line.endswith(TIGHT)
    assert 2.2 <= float(line.split()[2]) <= 8.0
    assert "actor-0 to actor-31, each " in line and "teacher-0 to teacher-7, each " in line


def test_a_host_that_is_tight_is_warned_of_and_only_what_cannot_fit_is_refused(tmp_path: Path) -> None:
    """0.5e9 parameters: 7.5 GiB of the learner and 1.9 of each actor are sure. Teachers map one file if it is as wide
    as what they compute with; caches, packed weights and next versions are used or not."""
    student, as_wide = large_folder(tmp_path / "s", 500_000_000), large_folder(tmp_path / "t", 500_000_000)
    own = json.loads((tmp_path / "t" / "config.json").read_text())
    (tmp_path / "t" / "config.json").write_text(json.dumps(own | {"dtype": "float32"}))
    of = {"actors": 2, "teachers": 8}
    tight = on_the_host(12.0, config(models={"student": student, "teacher": as_wide}, **of))
    assert tight.mistakes == [] and tight.lines[0].endswith(TIGHT)
    (mistake,) = on_the_host(11.0, config(models={"student": student, "teacher": as_wide}, **of)).mistakes
    assert mistake.startswith("host: got at least 11.2 GiB, expected at most its 11 GiB")
    (mistake,) = on_the_host(12.0, config(models={"student": student, "teacher": student}, **of)).mistakes
    assert mistake.startswith("host: got at least 26.1 GiB"), "each teacher converts the file for itself"


def test_rows_of_logits_are_what_the_batch_can_hold() -> None:
    """2.6 * 4 bytes * rows * 151,936: 883 rows on a GPU, 110 on the host, or the tokens of a batch."""
    for tokens, place, gib in ((4096, 0, 1.30), (64, 0, 0.094), (4096, HOST, 0.162), (64, HOST, 0.094)):
        _, teachers = worker_groups(config(teacher={"max_batch_tokens": tokens}))
        assert worker_need(teachers, QWEN3_8B, "teacher-0", place).likely["logits"] == pytest.approx(gib, rel=0.01)


def test_what_4_bits_leave_of_an_8b_model() -> None:
    """By hand: 6.95e9 numbers of layers at 0.516 bytes, and embedding and head, 1.24e9, at two in the teacher, and at
    four and two in the learner."""
    lora = {"rank": 32, "quantize": "nf4"}
    learner = learner_need(config(learner={"lora": lora}), QWEN3_8B, "gloo").sure["weights"]
    assert learner == pytest.approx((6.946e9 * 0.516 + 1.2447e9 * 3) / 2**30, abs=0.02)
    run = config(teachers=1, teacher={"quantize": "nf4"})
    teacher = worker_need(worker_groups(run)[1], QWEN3_8B, "teacher-0").sure["weights"]
    assert teacher == pytest.approx((6.946e9 * 0.516 + 1.2447e9 * 2) / 2**30, abs=0.02)
    quantised = QWEN3_8B._replace(quantized_bytes=6e9)
    assert worker_need(worker_groups(config(teachers=1))[1], quantised, "teacher-0").sure["weights"] == 6e9 / 2**30


@pytest.mark.parametrize(("gib", "shape", "fits"), [(80.0, QWEN3_8B, True), (24.0, QWEN3_8B, False)])
def test_in_turns_a_gpu_must_hold_the_largest_role(
    monkeypatch: pytest.MonkeyPatch, gib: float, shape: ModelShape, fits: bool
) -> None:
    """The sum that is compared with is made here, from each role's own need."""

    def fixed(_: Path) -> ModelShape:
        return shape

    monkeypatch.setattr(memory, "read_shape", fixed)
    plain: dict[str, Any] = {"actors": 1, "teachers": 1, "learner": {"lora": {"rank": 32}, "recompute": 1.0}}
    places = Placement(Places({"learner": 0, "actor-0": 0, "teacher-0": 0}, {}), Choice("gloo", ""))
    machine = Machine(("0",), (gib,), host_gib=512.0)

    def of(share: str) -> Any:
        return estimate(config(**plain, launch={"share": share}), machine, places)

    run = config(**plain)
    actors, teachers = worker_groups(run)
    needs = [learner_need(run, shape, "gloo"), *(worker_need(g, shape, g.workers[0]) for g in (actors, teachers))]
    largest = max(need.total for need in needs)
    host, gpu = of("turns").lines
    assert f"about {largest + 2.0:.1f} of" in gpu and "in turns, of which 2.0 is what stays" in gpu
    assert host.count("weights between turns") == 3
    assert (not of("turns").mistakes) == fits
    together = sum(need.total for need in needs)
    assert f"about {together:.1f} of" in (of("together").lines[-1]) and together > largest + 2.0
    if not fits:
        (mistake,) = of("turns").mistakes
        assert "its 24 GiB, in GiB, in turns" in mistake
