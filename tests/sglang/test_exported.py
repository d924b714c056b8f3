"""An exported student, and a checkpoint, answer greedily on a real SGLang server as in transformers."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3ForCausalLM

from stillhouse.builtin import STUDENT_DIR
from stillhouse.learner.checkpoints.checkpoint import LearnerState, capture_rng
from stillhouse.learner.config import LearnerConfig
from stillhouse.learner.step.train_step import Trainer
from stillhouse.models.loading import load_causal_lm
from stillhouse.models.tokenizer import load_tokenizer
from stillhouse.protocol.messages import WeightVersion
from stillhouse.sglang_server.servers import Servers
from stillhouse.tools.export.command import main
from tests.learner.checkpoints.saving import save_checkpoint
from tests.learner.conftest import make_item
from tests.patience import PATIENCE_S
from tests.sglang.conftest import READY_S

N_TOKENS = 24


def test_an_exported_student_and_a_checkpoint_answer_on_a_server_as_in_transformers(
    servers: Servers, tmp_path: Path
) -> None:
    student = load_causal_lm(STUDENT_DIR, device="cpu", dtype="float32", attention="packed", train=True)
    tokenizer, trainer = load_tokenizer(STUDENT_DIR), Trainer(student, LearnerConfig(), total_steps=9)
    with torch.no_grad():
        for parameter in student.parameters():
            parameter.mul_(1.05)
    trainer.step([make_item("a", [0, 0, 1, 1, 1])])  # the optimizer has a state
    average = {name: -parameter.detach() for name, parameter in student.named_parameters()}
    state = LearnerState(WeightVersion(0, 2), trainer.state_dict(), {}, None, capture_rng(), {}, ema=average)
    checkpoint = save_checkpoint(tmp_path / "checkpoints", student, tokenizer, state, keep=1)
    assert main([str(checkpoint), "--to", str(tmp_path / "exported")]) == 0
    ids = tokenizer("user\n780+128=\nassistant\n")["input_ids"]
    model: Any = Qwen3ForCausalLM.from_pretrained(tmp_path / "exported")
    expected = model.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=N_TOKENS)[0, len(ids) :].tolist()

    sampling = {"temperature": 0, "max_new_tokens": N_TOKENS}
    body = json.dumps({"input_ids": ids, "sampling_params": sampling}).encode()
    started = [servers.start(folder.name, folder) for folder in (tmp_path / "exported", checkpoint)]
    servers.wait_ready(started, READY_S)
    for server in started:
        asked = urllib.request.Request(f"{server.url}/generate", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(asked, timeout=PATIENCE_S) as answer:
            assert json.loads(answer.read())["output_ids"] == expected
