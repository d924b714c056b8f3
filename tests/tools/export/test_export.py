"""`stillhouse export`: what the folder has, what its card says, and what a hub is sent."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from huggingface_hub import close_session
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from stillhouse.builtin import STUDENT_DIR
from stillhouse.launch.config.files import write_config
from stillhouse.launch.config.run import ModelsConfig, RunConfig
from stillhouse.learner.checkpoints.checkpoint import LearnerState, capture_rng
from stillhouse.learner.config import LearnerConfig
from stillhouse.learner.step.train_step import Trainer
from stillhouse.models.loading import load_causal_lm
from stillhouse.models.tokenizer import load_tokenizer
from stillhouse.protocol.messages import WeightVersion
from stillhouse.tools.export.card import model_card
from stillhouse.tools.export.command import main
from tests.learner.checkpoints.saving import save_checkpoint
from tests.tools.export.stand_in_hub import OWNER, TOKEN, Hub, stand_in_hub

HOSTILE = "apache`|<script>x</script>\n---\nlicense: mit"


def figures(step: int, accuracy: float) -> dict[str, Any]:
    return {"step": step, "accuracy_greedy": accuracy, "reverse_kl": 0.5, "n_greedy": 8, "n_sampled": 0}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of two checkpoints with weights of their own."""
    folder = tmp_path_factory.mktemp("secret_place") / "run"
    models = folder.parent / "models"
    shutil.copytree(STUDENT_DIR, models / "small-student")
    (models / "small-student" / "README.md").write_text("---\nlicense: apache-2.0\ntags: [x]\n---\n# Small\n")
    (models / "teacher").mkdir()
    (models / "teacher" / "README.md").write_text("---\nlicense: [1, 2]\n---\n")
    student = load_causal_lm(
        str(models / "small-student"), device="cpu", dtype="float32", attention="packed", train=True
    )
    trainer = Trainer(student, LearnerConfig(), total_steps=9)
    for step in (2, 4):
        with torch.no_grad():
            next(iter(student.parameters())).add_(0.01 * step)
        metrics: dict[str, float | None] = {"reverse_kl": step / 8}
        state = LearnerState(WeightVersion(0, step), trainer.state_dict(), {}, None, capture_rng(), metrics)
        save_checkpoint(folder / "checkpoints", student, load_tokenizer(STUDENT_DIR), state, keep=9)
    config = RunConfig(models=ModelsConfig(student=str(models / "small-student"), teacher=str(models / "teacher")))
    write_config(config, folder / "config.yaml")
    account = {"steps": 4, "eval": [figures(0, 0.25), figures(2, 0.5), figures(4, 0.75)]}
    staleness = {"max": 3, "mean": 1.25, "bound": 4}
    (folder / "summary.json").write_text(json.dumps(account | {"staleness": staleness}))
    return folder


def logits(model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(1, 40)[None]).logits


def front_matter(card: str) -> dict[str, Any]:
    return yaml.safe_load(card.split("---\n")[1])


def test_the_folder_is_the_student_and_a_card(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert main([str(run), "--to", str(out)]) == 0
    checkpoint = run / "checkpoints" / "step_000004"
    theirs, ours = (AutoModelForCausalLM.from_pretrained(folder) for folder in (checkpoint, out))
    assert torch.equal(logits(theirs), logits(ours))
    text = [{"role": "user", "content": "1+2="}]
    before = AutoTokenizer.from_pretrained(STUDENT_DIR).apply_chat_template(text, tokenize=False)
    assert AutoTokenizer.from_pretrained(out).apply_chat_template(text, tokenize=False) == before
    names = {path.name for path in out.iterdir()}
    assert {"generation_config.json", "chat_template.jinja", "README.md"} <= names
    assert not names & {"optimizer.safetensors", "trainer.json", "manifest.json"}
    assert [path.name for path in tmp_path.iterdir()] == ["out"], "nothing else is left"
    card = (out / "README.md").read_text()
    assert front_matter(card)["license"] == "apache-2.0" and "base_model" not in front_matter(card)
    assert "`small-student`, licence `apache-2.0`" in card and "`teacher`, its licence is not known" in card
    assert "| accuracy, greedy | 0.25 | 0.75 |" in card and "mean 1.25, max 3, bound 4" in card
    assert "secret_place" not in card and str(Path.home()) not in card


def test_an_older_checkpoint_has_its_own_figures(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(run), "--to", str(tmp_path / "out"), "--step", "2"]) == 0
    card = (tmp_path / "out" / "README.md").read_text()
    assert "| accuracy, greedy | 0.25 | 0.5 |" in card and "0.75" not in card
    assert "nats | 0.25 |" in card and "staleness, optimizer" not in card
    assert main([str(run), "--to", str(tmp_path / "other"), "--step", "3"]) == 2
    assert "has checkpoints of steps 2, 4" in capsys.readouterr().err
    assert main([str(run), "--to", str(tmp_path / "out")]) == 2 and "exists already" in capsys.readouterr().err


def test_a_damaged_checkpoint_is_passed_over(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    with (copy / "checkpoints" / "step_000004" / "model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x7f")
    assert main([str(copy), "--to", str(tmp_path / "out")]) == 0
    assert "step_000004 is damaged" in capsys.readouterr().err
    assert "optimizer steps | 2 of" in (tmp_path / "out" / "README.md").read_text()


def test_text_of_others_stays_text(run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    (copy / "models").mkdir()
    hostile = copy / "models" / HOSTILE.replace("/", "")
    hostile.mkdir()
    (hostile / "README.md").write_text(f"---\nlicense: {json.dumps(HOSTILE)}\n---\n")
    config = RunConfig(models=ModelsConfig(student=str(hostile), teacher=str(hostile)))
    write_config(config, copy / "config.yaml")
    card = model_card(copy / "checkpoints" / "step_000004", copy, HOSTILE)
    assert "license" not in front_matter(card) and card.count("\n---\n") == 1
    cell = next(line for line in card.splitlines() if line.startswith("| student before"))
    assert cell.count("`") == 2 and cell.replace("\\|", "").count("|") == 3
    assert "\\<script\\>" in next(line for line in card.splitlines() if line.startswith("# "))


WITH_A_WARNING = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")
"""Of huggingface_hub 2.4 about its own call of httpx2, at each upload."""


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    with stand_in_hub() as made:
        monkeypatch.setenv("HF_ENDPOINT", made.url)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield made
        close_session()


@WITH_A_WARNING
def test_a_hub_gets_the_folder_and_nothing_else(
    run: Path, hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(run), "--to", "hub:distilled"]) == 0, capsys.readouterr().err
    assert f"{hub.url}/{OWNER}/distilled/commit/1" in capsys.readouterr().out
    assert main([str(run), "--to", str(tmp_path / "distilled")]) == 0
    expected = {path.name: path.read_bytes() for path in (tmp_path / "distilled").iterdir()}
    assert hub.commits == [expected] and hub.private == {f"{OWNER}/distilled": True} and not hub.refused
    assert not any(TOKEN.encode() in content for content in expected.values())
    assert main([str(run), "--to", f"hub:{OWNER}/distilled"]) == 0, "the repository is there already"


@pytest.mark.parametrize(
    ("token", "name", "expected"),
    [
        ("", "distilled", "set HF_TOKEN to a token"),
        ("hf_wrong_secret", "distilled", "refused HF_TOKEN for distilled (401"),
        (TOKEN, "a/b/c", "expected hub:OWNER/NAME"),
    ],
)
def test_a_hub_is_not_sent_anything_without_its_token(
    token: str, name: str, expected: str, run: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setenv("HF_TOKEN", token)
    assert main([str(run), "--to", f"hub:{name}"]) == 2
    said = capsys.readouterr().err
    assert expected in said and "\x1b" not in said and "wrong_secret" not in said
    assert not hub.commits and not hub.objects


@WITH_A_WARNING
def test_an_upload_that_fails_leaves_no_commit(run: Path, hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    hub.takes_uploads = False
    assert main([str(run), "--to", "hub:distilled"]) == 2
    said = capsys.readouterr().err
    assert "(403: over quota)" in said and "/lfs/" not in said and not hub.commits


def test_a_hub_that_cannot_be_reached(
    run: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert main([str(run), "--to", "hub:distilled"]) == 2
    assert "http://127.0.0.1:9 cannot be reached, or broke off: ConnectError" in capsys.readouterr().err
