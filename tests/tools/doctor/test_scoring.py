"""Engines with a planted fault are found, by name of the fault. Each fault is in the engine, where a real one would be;
the checks see it through the run's own providers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from stillhouse import builtin
from stillhouse.models.description import vocabulary_size
from stillhouse.models.loading import save_hf
from stillhouse.models.tokenizer import load_tokenizer
from tests.learner.conftest import build_hybrid
from tests.tools.doctor.conftest import ENGINES, Examine, of

SCORING = ("off by one", "temperature", "known text", "replica noise", "weights taken")


@pytest.mark.parametrize("name", SCORING)
def test_sound_engines_pass(examine: Examine, name: str) -> None:
    found = examine(name, "--teachers=2")
    assert [finding.status for finding in found] == ["ok"] * len(found) and found
    assert all(finding.measured and finding.normal and finding.figures for finding in found)


@pytest.mark.parametrize("changes", [{}, {"num_experts": 4}], ids=["dense", "mixture"])
def test_a_recurrent_student_passes(examine: Examine, tmp_path: Path, changes: dict[str, Any]) -> None:
    """A Qwen3.5: decoded over transformers' own cache, then with new weights."""
    model = build_hybrid(vocab=vocabulary_size(builtin.STUDENT_DIR), max_position_embeddings=1024, **changes)
    save_hf(model, load_tokenizer(builtin.STUDENT_DIR), tmp_path / "hybrid")
    for name in ("off by one", "temperature", "weights taken"):
        found = examine(name, f"--student={tmp_path / 'hybrid'}")
        assert [finding.status for finding in found] == ["ok"] * len(found) and found, found


@pytest.mark.parametrize(
    ("check", "role", "engine", "said", "figures"),
    [
        ("off by one", "teacher", "LATE", "they are those of the token before", {}),
        ("off by one", "teacher", "ALL_OF_NOTHING", "for no token", {}),
        ("off by one", "teacher", "NOT_A_NUMBER", "", {}),
        ("off by one", "actor", "LOGPROBS_LATE", "", {}),
        ("temperature", "teacher", "DIVIDED", "as if divided by 0.70", {"factor": 1 / 0.7}),
        ("temperature", "teacher", "AT_TEMPERATURE", "", {"best_temperature": 0.7}),
        ("temperature", "actor", "AT_TEMPERATURE_ONE", "the engine reports them at temperature 1", {}),
        ("weights taken", "actor", "DEAF", "it goes on with the former weights", {}),
    ],
)
def test_a_planted_fault_is_named(
    examine: Examine, check: str, role: str, engine: str, said: str, figures: dict[str, float]
) -> None:
    reported = examine(check, f"--{role}.engine={ENGINES}:{engine}")
    found = of(reported, "actor" if role == "actor" else "pool default")
    assert found.status == "failed" and said in found.measured
    assert {name: found.figures[name] for name in figures} == pytest.approx(figures, rel=1e-4)


def test_an_engine_that_takes_temperature_1_only(examine: Examine) -> None:
    engine = f"--actor.engine={ENGINES}:ONLY_TEMPERATURE_ONE"
    found = of(examine("temperature", engine), "actor")
    assert found.status == "ok" and "refuses temperature 1.5" in found.measured
    assert of(examine("temperature", engine, "--learner.tasks.temperature=0.8"), "actor").status == "failed"
    assert of(examine("off by one", engine), "actor").status == "ok"


def test_a_noisy_replica(examine: Examine) -> None:
    arguments = ("--teachers=2", f"--teacher.engine={ENGINES}:NOISY_REPLICA")
    found = of(examine("replica noise", *arguments), "pool default")
    assert found.status == "failed" and "between 2 teachers" in found.measured
    assert found.figures["noise_nats"] > found.figures["signal_nats"] > 0.1


def test_a_teacher_that_is_the_student(examine: Examine, student: Path) -> None:
    found = of(examine("replica noise", f"--student={student}", f"--teacher={student}"), "pool default")
    assert found.status == "warning" and "same model" in found.advice and found.figures["signal_nats"] < 1e-5


def test_a_teacher_on_random_weights(examine: Examine, teacher: Path) -> None:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(teacher)).save_pretrained(teacher)
    found = of(examine("known text", f"--teacher={teacher}"), "pool default")
    assert found.status == "failed" and found.figures["mean_logprob"] < 0.8 * found.figures["uniform_logprob"]
    assert of(examine("off by one", f"--teacher={teacher}"), "pool default").status == "ok", "it scores as it should"


@pytest.mark.parametrize("name", SCORING)
def test_without_a_valid_configuration_they_are_skipped(examine: Examine, name: str) -> None:
    (found,) = examine(name, "--teacher=no/such/folder")
    assert found.status == "skipped" and "the configuration is refused" in found.measured


def test_without_teachers_only_the_actor_is_examined(examine: Examine) -> None:
    objective = ("--learner.objective.coef=0", "--learner.objective.advantage=grpo", "--buffer.release=rollout")
    found = examine("off by one", "--teachers=0", *objective)
    assert [finding.subject for finding in found if finding.status == "ok"] == ["actor"]
    assert found[-1].status == "skipped" and "no teacher scores anything" in found[-1].measured
