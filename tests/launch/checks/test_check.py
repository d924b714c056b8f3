"""`--check`: the prompts as the learner will render them, and what would break a run later."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3_5Config, Qwen3_5ForConditionalGeneration

from stillhouse import builtin
from stillhouse.launch.checks.memory import read_shape
from stillhouse.launch.run import main
from stillhouse.learner.prompts.config import TaskConfig
from stillhouse.learner.prompts.tasks import TaskStream, load_prompts
from stillhouse.models.tokenizer import load_tokenizer

Said = Callable[..., tuple[int, str, str]]


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Said:
    """(exit code, stdout, stderr) of a command line with --check."""

    def run(*arguments: str | Path) -> tuple[int, str, str]:
        code = main(["--check", *map(str, arguments)])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A copy of the built-in teacher, to be spoilt."""
    return Path(shutil.copytree(builtin.TEACHER_DIR, tmp_path / "model"))


def write(file: Path, rows: list[dict[str, Any]]) -> Path:
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return file


def changed(folder: Path, **fields: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


ROWS: list[dict[str, Any]] = [{"prompt": "1+" * n + "1="} for n in (300, 2, 5, 1)]


@pytest.mark.parametrize(
    ("flags", "nothing"),
    [
        ([], True),
        (["--learner.tasks.privileged=Answer. "], False),
        (["--learner.objective.advantage=grpo", "--buffer.release=rollout"], False),
        (["--learner.ema.decay=0.9"], False),
    ],
)
def test_a_teacher_that_is_the_student_is_told(said: Said, flags: list[str], nothing: bool) -> None:
    code, out, err = said(f"--teacher={builtin.STUDENT_DIR}", *flags)
    assert (code, err) == (0, "")
    assert ("models.teacher: it is the student, and reads the same prompts" in out) is nothing


def test_the_first_prompt_is_shown_as_rendered_and_the_others_are_counted(said: Said, tmp_path: Path) -> None:
    """The first row is too long, and so the second is the first that a student will see."""
    file = write(tmp_path / "prompts.jsonl", ROWS)
    code, out, err = said(f"--prompts={file}", "--learner.tasks.max_prompt_tokens=40")
    tokenizer: Any = AutoTokenizer.from_pretrained(builtin.STUDENT_DIR)
    rendered = [
        tokenizer.apply_chat_template([{"role": "user", "content": row["prompt"]}], add_generation_prompt=True)[
            "input_ids"
        ]
        for row in ROWS
    ]
    long, first, *_ = rendered
    assert (code, err) == (0, "")
    assert f"learner.tasks.prompts: {file}: 4 rows read, 3 of them can be used" in out
    assert f"dropped: 1 prompt_too_long, the first: {file}, line 1: {len(long)} tokens, max_prompt_tokens is 40" in out
    lengths = sorted(len(ids) for ids in rendered[1:])
    assert f"tokens per prompt: min {lengths[0]}, median {lengths[1]}, max {lengths[2]}" in out
    assert "a step takes 8 prompts" in out and "about 3: each batch has them 2.7 times; do: more rows" in out
    assert f"the first prompt, as rendered: {tokenizer.decode(first)!r}" in out
    assert f"its {len(first)} token ids: {' '.join(map(str, first))}" in out


def test_what_is_shown_is_what_the_learner_offers(said: Said, tmp_path: Path) -> None:
    """With a system prompt, a template of a tag and a text for teachers alone."""
    rows = [{"prompt": "1+1=", "tag": "sum", "ground_truth": "2"}, {"prompt": "2+2=", "tag": "sum"}]
    file = write(tmp_path / "prompts.jsonl", rows)
    tasks = TaskConfig(
        prompts=str(file),
        eval_share=0.0,
        system_prompt="Add.",
        templates={"sum": "Sum: {prompt}"},
        privileged="It is {ground_truth}. ",
        shuffle=False,
        env="single_turn",
    )
    stream = TaskStream(tasks, load_tokenizer(builtin.STUDENT_DIR), load_prompts(tasks), seed=0)
    (offer,) = stream.next(1)
    code, out, _ = said(
        *(f"--prompts={file}", "--learner.tasks.system_prompt=Add.", "--learner.tasks.templates.sum=Sum: {prompt}"),
        "--learner.tasks.privileged=It is {ground_truth}. ",
    )
    assert code == 0
    assert f"its {len(offer.prompt_ids)} token ids: {' '.join(map(str, offer.prompt_ids.tolist()))}" in out
    assert f"token ids: {' '.join(map(str, offer.teacher_prompt_ids.tolist()))}" in out
    assert "dropped: 1 no_privileged, the first: " in out
    n = len(offer.teacher_prompt_ids)
    assert f"what teachers read: min {n}, median {n}, max {n}" in out


def test_rows_whose_tag_is_not_in_the_mix_are_counted(said: Said, tmp_path: Path) -> None:
    file = write(tmp_path / "prompts.jsonl", [{"prompt": "1+1=", "tag": tag} for tag in "aab"])
    code, out, _ = said(f"--prompts={file}", "--learner.tasks.mix.a=1")
    assert code == 0 and "2 of them can be used" in out
    assert f"dropped: 1 tag_not_in_mix, the first: {file}, line 3: learner.tasks.mix lacks the tag 'b'" in out


@pytest.mark.parametrize(
    ("rows", "flags", "told"),
    [
        (ROWS, ["--learner.tasks.max_prompt_tokens=3"], "none of the 4 rows that were read is usable: 4 prompt_too_"),
        (ROWS, ["--learner.tasks.privileged=It is {hint}. "], "none of the 4 rows that were read is usable: 4 no_pr"),
        ([{"messages": [{"role": "assistant", "content": "2"}]}], [], "end with an assistant turn"),
        ([{"prompt": ["1+1="]}], [], "Expected `object`, got `str`"),
        ([{"prompt": "a" * 2000}] * 3, [], "none of the 3 rows that were read is usable: 3 prompt_too_long"),
    ],
)
def test_prompts_of_which_none_can_be_used_are_refused(
    said: Said, tmp_path: Path, rows: list[dict[str, Any]], flags: list[str], told: str
) -> None:
    file = write(tmp_path / "prompts.jsonl", rows)
    code, out, err = said(f"--prompts={file}", *flags)
    assert code == 2 and "are fine" not in out
    assert "stillhouse: learner.tasks.prompts: " in err and told in err


def test_evaluation_prompts_are_read_as_well(said: Said, tmp_path: Path) -> None:
    file = write(tmp_path / "eval.jsonl", [{"prompt": "a" * 2000}])
    code, _, err = said(f"--eval-prompts={file}", f"--prompts={write(tmp_path / 'prompts.jsonl', ROWS[1:])}")
    assert code == 2 and "learner.tasks.eval_prompts: none of the 1 rows that were read is usable" in err


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"model_type": "no_such_type"}, "no_such_type"),
        ({"model_type": "bert", "architectures": ["BertForMaskedLM"]}, "expected a causal language model"),
        ({"model_type": "mamba", "architectures": ["MambaForCausalLM"]}, "cannot read the model configuration"),
    ],
)
def test_a_model_that_torch_cannot_run_here_is_refused(
    said: Said, model: Path, fields: dict[str, Any], told: str
) -> None:
    changed(model, **fields)
    code, _, err = said(f"--teacher={model}")
    assert code == 2 and "models.teacher: " in err and told in err


def test_a_teacher_with_too_short_a_context_is_refused(said: Said, model: Path, tmp_path: Path) -> None:
    changed(model, max_position_embeddings=100)
    words = (f"--teacher={model}", f"--prompts={write(tmp_path / 'prompts.jsonl', ROWS[1:])}")
    code, _, err = said(*words)
    assert code == 2
    assert "models.teacher: its context of 100 tokens is less than the 992 that a rollout may have" in err
    code, _, err = said(*words, "--learner.tasks.max_prompt_tokens=40", "--learner.tasks.max_new_tokens=60")
    assert (code, err) == (0, "")


def test_a_teacher_without_room_behind_what_it_shall_read_is_refused(said: Said, model: Path, tmp_path: Path) -> None:
    """The student's prompt would fit, the text in front of it does not."""
    changed(model, max_position_embeddings=100)
    file = write(tmp_path / "prompts.jsonl", [{"prompt": "1=", "hint": hint} for hint in ("x", "y" * 200)])
    code, _, err = said(
        *(f"--teacher={model}", f"--prompts={file}", "--learner.tasks.privileged={hint}"),
        *("--learner.tasks.max_prompt_tokens=40", "--learner.tasks.max_new_tokens=60"),
    )
    assert code == 2 and "has no room for an answer behind 1 of 2 prompts of learner.tasks.prompts" in err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (
            ("--actors=6", "--actor.engine=torch", "--teacher.engine=torch"),
            ("learner on GPU 0; actors: embedded on GPU 2, 3, 4, 5, 6, 7; teachers: embedded on GPU 1; weights by n",),
        ),
        (
            ("--actors=2", "--actor.engine=sglang", "--teacher.engine=sglang", "--actor.server.tp=2"),
            (
                "actors: SGLang servers on GPU 1+2, 3+4; teachers: SGLang servers on GPU 5",
                "not on this machine: actor.s",
            ),
        ),
    ],
)
def test_a_layout_that_is_pretended_is_told_without_a_gpu(
    said: Said, tmp_path: Path, arguments: tuple[str, ...], told: tuple[str, ...]
) -> None:
    """The servers' interpreter is one without SGLang: it need not be on the machine that pretends."""
    file = write(tmp_path / "prompts.jsonl", ROWS[1:])
    python = tuple(f"--{role}.server.python={sys.executable}" for role in ("actor", "teacher"))
    code, out, err = said(
        "--device=cuda", "--gpus=8", f"--prompts={file}", "--learner.eval_every=0", *python, *arguments
    )
    assert (code, err) == (0, "")
    assert all(line in out for line in told)
    assert "GPU 0: about 1." in out and "of 80 GiB: learner" in out


def test_a_layout_that_cannot_be_is_refused_and_pretending_is_for_check_only(said: Said) -> None:
    served = ("--actor.engine=sglang", f"--actor.server.python={sys.executable}", "--teacher.engine=torch")
    code, out, err = said("--gpus=8", "--actors=8", *served)
    assert (code, out) == (
        2,
        "",
    ) and "SGLang servers that fit there, actors' and teachers' together: 7 with tp 1" in err
    assert main(["--gpus=8"]) == 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
@pytest.mark.parametrize("key", ["device", "learner.device", "actor.torch.device", "teacher.device"])
def test_cuda_without_a_gpu_is_refused(said: Said, key: str) -> None:
    code, _, err = said(f"--{key}=cuda")
    assert code == 2 and "got cuda" in err and "use auto or cpu" in err


@pytest.mark.parametrize(
    ("truth", "flags", "told"),
    [
        (
            "City {}",
            (),
            (
                "of 0 of 130 rows",
                "130 of 130 rows have values that their reward cannot read",
            ),
        ),
        ("1,{:03}.", (), ("ground_truth of 130 of 130 rows",)),
        ("{}", ("--learner.tasks.eval_share=0.5",), ("held out for evaluation: 12 of 130 rows",)),
        (
            "{}",
            (),
            (
                "held out for evaluation: 3 of 130 rows",
                "warning: learner.tasks.prompts: 12 evaluation prompts were asked for",
            ),
        ),
        (
            "City {}",
            ("--actor.environments.single_turn.options={answer_pattern: 'is (.*)'}",),
            ("130 of 130 rows have a",),
        ),
    ],
)
def test_the_reward_and_the_rows_held_out_are_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], truth: str, flags: tuple[str, ...], told: tuple[str, ...]
) -> None:
    rows = [{"prompt": f"Capital {i}?", "ground_truth": truth.format(i)} for i in range(130)]
    (tmp_path / "own.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    asked = ("--learner.tasks.eval_greedy=8", "--learner.tasks.eval_sampled=12")
    assert main([f"--prompts={tmp_path / 'own.jsonl'}", *asked, "--check", *flags]) == 0
    printed = capsys.readouterr().out
    assert all(text in printed for text in told), printed
    assert ("warning" in printed) == any("warning" in text for text in told) or "3 of 130" in printed


def test_the_plan_of_a_hybrid_model_counts_what_transformers_makes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Qwen3.5-9B: recurrent layers, gates and an image tower beside it. The sizes are transformers' own."""
    shutil.copytree(builtin.STUDENT_DIR, tmp_path / "student", ignore=shutil.ignore_patterns("*.safetensors"))
    config = Qwen3_5Config(architectures=["Qwen3_5ForConditionalGeneration"], dtype="bfloat16")
    config.save_pretrained(tmp_path / "student")
    shape = read_shape(tmp_path / "student")
    with torch.device("meta"):
        expected = sum(p.numel() for p in Qwen3_5ForConditionalGeneration(config).parameters())
    assert shape is not None and shape.parameters == expected == 9_407_453_936
    flags = ["--student", str(tmp_path / "student"), "--check", "--device", "cuda", "--gpus", "8"]
    flags += ["--teacher", str(tmp_path / "student")]
    assert main(flags) == 2
    assert "learner.ranks" in capsys.readouterr().err, "what to do"
    assert main([*flags, "--learner.ranks", "4", "--learner.recompute", "1"]) == 0
    assert "nothing was started" in capsys.readouterr().out


def test_a_plan_from_config_json_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With pretended GPUs, where no run is started; otherwise the weights must be there."""
    sizes: dict[str, int] = {}
    for name, there in (("student", builtin.STUDENT_DIR), ("teacher", builtin.TEACHER_DIR)):
        shutil.copytree(there, tmp_path / name)
        sizes[name] = AutoModelForCausalLM.from_pretrained(there).num_parameters()
        for file in (tmp_path / name).glob("*.safetensors"):
            file.unlink()
        shape = read_shape(tmp_path / name)
        assert shape is not None and shape.parameters == pytest.approx(sizes[name], rel=2e-3)
    flags = ["--student", str(tmp_path / "student"), "--teacher", str(tmp_path / "teacher"), "--check"]
    assert main([*flags, "--gpus", "8"]) == 0
    printed = capsys.readouterr().out
    assert "GiB" in printed and printed.count("it has no weights") == 2
    assert main(flags) == 2
    assert "lacks *.safetensors" in capsys.readouterr().err
