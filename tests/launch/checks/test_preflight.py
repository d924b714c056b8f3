"""Models, prompts and vocabularies are looked at before anything is started."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from stillhouse import builtin
from stillhouse.launch.checks import preflight
from stillhouse.launch.checks.model_files import read_vocabulary
from stillhouse.launch.checks.preflight import check
from stillhouse.launch.checks.threads import plan_threads
from stillhouse.launch.config.run import RunConfig
from stillhouse.launch.config.tree import build
from stillhouse.launch.errors import ConfigError
from stillhouse.launch.machine import torch_build
from stillhouse.launch.machine.machine import Machine
from stillhouse.launch.machine.torch_build import TorchBuild
from stillhouse.models import safetensors_header
from stillhouse.models.safetensors_header import read_header


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A copy of the built-in teacher, to be spoilt."""
    return Path(shutil.copytree(builtin.TEACHER_DIR, tmp_path / "my-model"))


def told(**plain: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        check(build(RunConfig, plain))
    return "\n".join(caught.value.mistakes)


def test_the_built_in_run_is_fine_and_is_resolved_to_paths() -> None:
    checked = check(RunConfig())
    assert checked.model_types == ("qwen3",)
    assert Path(checked.config.models.student) == builtin.STUDENT_DIR
    assert Path(checked.config.learner.tasks.prompts) == builtin.TRAIN_JSONL
    assert Path(checked.config.learner.tasks.eval_prompts) == builtin.EVAL_JSONL
    assert check(checked.config).config == checked.config  # a resolved configuration stays as it is


def test_each_file_of_weights_is_read_once_for_all_checks_of_a_start(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[Path] = []

    def reading(file: Path) -> safetensors_header.Header:
        read.append(file)
        return read_header(file)

    monkeypatch.setattr(safetensors_header, "read_header", reading)
    config = check(build(RunConfig, {"models": {"teacher": str(model)}})).config
    plan_threads(config, dict.fromkeys(["learner", "actor-0", "teacher-0"]), cores=8)
    assert read.count(model / "model.safetensors") == 1 and len(read) == len(set(read))
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    assert "copy or download it again" in told(models={"teacher": str(model)}), "a file that changed is read again"


REWARDS_ONLY: dict[str, Any] = {
    "teachers": 0,
    "models": {"teacher": "nowhere"},
    "learner": {"objective": {"coef": 0.0, "advantage": "grpo"}},
    "buffer": {"release": "rollout"},
}


def test_without_weight_and_teacher_no_task_is_for_one_and_its_model_need_not_be_there() -> None:
    checked = check(build(RunConfig, REWARDS_ONLY))
    assert checked.config.learner.tasks.routes == {} and checked.warnings == []
    assert check(checked.config).config == checked.config
    divergence = {
        "objective": {**REWARDS_ONLY["learner"]["objective"], "divergence": "reverse_kl"}
    }  # needs no top-k sets either
    assert check(build(RunConfig, {**REWARDS_ONLY, "learner": divergence})).config.learner.tasks.routes == {}


def test_a_null_teacher_needs_no_teacher() -> None:
    plain: dict[str, Any] = {"teachers": 0, "models": {"teacher": "nowhere"}}
    checked = check(build(RunConfig, {**plain, "learner": {"objective": {"divergence": "null"}}}))
    assert checked.config.learner.tasks.routes == {} and checked.warnings == []
    assert check(build(RunConfig, {"learner": {"objective": {"divergence": "null"}}})).config.learner.tasks.routes


@pytest.mark.parametrize(
    "objective", [{"coef": 1.0}, {"coef": 0.0, "teacher_coefs": {"default": 0.5}}], ids=["coef", "own coef"]
)
def test_where_grades_have_weight_tasks_wait_for_a_teacher_who_joins(objective: dict[str, Any]) -> None:
    plain = {**REWARDS_ONLY, "learner": {"objective": {**REWARDS_ONLY["learner"]["objective"], **objective}}}
    assert "models.teacher: no folder 'nowhere'" in told(**plain)
    checked = check(build(RunConfig, {**plain, "models": {}}))
    assert checked.config.learner.tasks.routes == {"default": ()}
    assert [warning.split(";")[0] for warning in checked.warnings] == ["teachers: 0"]


def test_a_teacher_without_weight_grades_for_the_metrics() -> None:
    assert check(build(RunConfig, {**REWARDS_ONLY, "teachers": 1, "models": {}})).config.learner.tasks.routes


def test_a_folder_of_the_user_is_taken(model: Path) -> None:
    assert Path(check(build(RunConfig, {"models": {"teacher": str(model)}})).config.models.teacher) == model


def test_a_wrong_path_names_the_nearest_one(model: Path) -> None:
    message = told(models={"teacher": str(model.with_name("my-modle"))})
    assert f"models.teacher: no folder {str(model.with_name('my-modle'))!r}; did you mean {str(model)!r}?" in message


def test_a_hub_name_that_cannot_be_had_is_told() -> None:
    assert "models.student: no folder 'someone/no-such-model', it is not in the model hub's cache" in told(
        models={"student": "someone/no-such-model"}
    )


@pytest.mark.parametrize("file", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_folder_that_lacks_something_says_what(model: Path, file: str) -> None:
    (model / file).unlink()
    message = told(models={"student": str(model)})
    assert "is not a Hugging Face model folder, it lacks" in message
    assert Path(file).suffix in message


def test_a_config_without_a_model_type_is_told(model: Path) -> None:
    (model / "config.json").write_text("{}")
    assert "model_type is None" in told(models={"student": str(model)})


def test_a_teacher_with_another_token_map_is_refused_with_an_example(model: Path) -> None:
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    vocab: dict[str, int] = tokenizer["model"]["vocab"]
    first, second = sorted(vocab, key=lambda token: vocab[token])[40:42]
    vocab[first], vocab[second] = vocab[second], vocab[first]  # same size, other ids
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    message = told(models={"teacher": str(model)})
    assert "models.teacher: its tokenizer differs from the student's" in message
    assert (
        f"2 with another id, first {first!r} is 40 for the student and 41 for the teacher, {second!r} is 41 for"
        in message
    )


def test_a_token_that_only_the_teacher_knows_is_named_with_its_id(model: Path) -> None:
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    tokenizer["added_tokens"].append({**tokenizer["added_tokens"][0], "id": 700, "content": "<think>"})
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert "1 in the teacher's only, first '<think>' (700); a teacher scores" in told(models={"teacher": str(model)})


def test_an_embedding_padded_past_the_vocabulary_is_no_difference_but_one_that_lacks_rows_is(model: Path) -> None:
    shape = json.loads((model / "config.json").read_text())
    rows = shape["vocab_size"]
    (model / "config.json").write_text(json.dumps({**shape, "vocab_size": rows + 24}))
    check(build(RunConfig, {"models": {"teacher": str(model)}}))
    (model / "config.json").write_text(json.dumps({**shape, "vocab_size": rows - 1}))
    assert f"got {rows - 1} embedding rows" in told(models={"teacher": str(model)})


def test_the_vocabulary_read_without_transformers_is_the_tokenizers_own() -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(builtin.STUDENT_DIR)
    assert read_vocabulary(builtin.STUDENT_DIR / "tokenizer.json") == tokenizer.get_vocab()


def test_an_option_that_neither_the_configuration_nor_a_row_gives_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "from stillhouse.actors.envs.single_turn import SingleTurn\n\nclass Own(SingleTurn):\n"
    init = "    def __init__(self, tokenizer, *, size): ...\n"
    (tmp_path / "needs_size.py").write_text(f"{code}{init}\nclass OfRow(Own):\n    row_options = ('size',)\n{init}")
    monkeypatch.syspath_prepend(str(tmp_path))
    own = {"name": "needs_size:Own"}
    message = told(actor={"environments": {"own": own}}, learner={"tasks": {"env": "own"}})
    assert "actor.environments.own" in message and "missing a required argument: 'size'" in message
    message = told(actor={"environments": {"own": {"name": "needs_size:OfRow"}}}, learner={"tasks": {"env": "own"}})
    assert "jsonl:1: env_options" in message and "missing a required argument: 'size'" in message
    check(build(RunConfig, {"actor": {"environments": {"own": own | {"options": {"size": 1}}}}}))


def test_an_unknown_environment_is_told() -> None:
    message = told(learner={"tasks": {"env": "calculater"}})
    assert "learner.tasks.env: unknown environment 'calculater'; did you mean 'calculator'?" in message


def test_everything_wrong_is_told_at_once() -> None:
    message = told(models={"student": "./a", "teacher": "./b"}, learner={"tasks": {"prompts": "c.jsonl", "env": "d"}})
    for key in ("models.student", "models.teacher", "learner.tasks.prompts", "learner.tasks.env"):
        assert f"{key}: " in message


def test_what_is_put_on_a_gpu_by_name_is_found_though_the_rest_is_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "find_machine", lambda: Machine(("0", "1")))
    monkeypatch.setattr(torch_build, "own_build", lambda: TorchBuild("2.13.0", "12.8"))
    checked = check(build(RunConfig, {"device": "cpu", "learner": {"device": "cuda:1"}}))
    placement = checked.servers.placement
    assert placement.device("learner", 0) == "cuda:1" and placement.device("actor", 0) == "cpu"
