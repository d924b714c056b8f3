"""TRL's side of bench/race/against_trl.py. Runs in .venv-trl (make trl) and imports nothing of Stillhouse.

    .venv-trl/bin/python -m bench.race.trl_side SETTINGS.json

Trains with TRL, saves the student every few steps, and writes times.jsonl into the output folder: a line when it is
ready to train, and one per step. Seconds and CPU seconds are those of training; saving is taken out of both.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback

Settings = Mapping[str, Any]
trl: Any = importlib.import_module("trl")  # not in the environment that type-checks this file


class Clock(TrainerCallback):
    """Notes when each step was done, and saves the student without letting it count."""

    def __init__(self, settings: Settings, tokenizer: Any) -> None:
        self._settings = settings
        self._tokenizer = tokenizer
        self._out = Path(settings["out"])
        self._times = (self._out / "times.jsonl").open("w", encoding="utf-8")
        self._wall_s = self._cpu_s = 0.0
        """Where both clocks stood when training began, moved by what saving took."""

    def start(self) -> None:
        self._note(event="ready", startup_s=time.time() - self._settings["launched_unix_s"])
        self._wall_s, self._cpu_s = now()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        wall_s, cpu_s = now()
        step: int = state.global_step
        self._note(event="step", step=step, train_s=wall_s - self._wall_s, cpu_s=cpu_s - self._cpu_s)
        every: int = self._settings["save_every"]
        if (every and step % every == 0) or step == self._settings["steps"]:
            folder = self._out / "checkpoints" / f"step_{step:06d}"
            kwargs["model"].save_pretrained(folder)
            self._tokenizer.save_pretrained(folder)
        after_wall_s, after_cpu_s = now()
        self._wall_s += after_wall_s - wall_s
        self._cpu_s += after_cpu_s - cpu_s

    def _note(self, **line: Any) -> None:
        self._times.write(json.dumps(line) + "\n")
        self._times.flush()


def now() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def common(settings: Settings) -> dict[str, Any]:
    """Arguments that every trainer of TRL takes. They say what our learner does: AdamW without weight decay, a linear
    warm-up, then a cosine that ends at a fraction of the peak, gradients clipped at norm 1, float32, on a GPU with
    products in bfloat16."""
    return {
        "output_dir": settings["out"],
        "max_steps": settings["steps"],
        "learning_rate": settings["lr"],
        "warmup_steps": settings["warmup_steps"],
        "lr_scheduler_type": "cosine_with_min_lr",
        "lr_scheduler_kwargs": {"min_lr_rate": settings["min_lr_ratio"]},
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "seed": settings["seed"],
        "max_completion_length": settings["max_new_tokens"],
        "use_cpu": settings["device"] == "cpu",
        "bf16": settings["device"] != "cpu",
        "report_to": [],
        "save_strategy": "no",
        "logging_steps": settings["steps"],
        "disable_tqdm": True,
        **settings["trl"],
    }


def distillation(settings: Settings, rows: Sequence[Mapping[str, Any]], tokenizer: Any) -> Any:
    """On-policy distillation from another model."""
    args = trl.DistillationConfig(per_device_train_batch_size=settings["rollouts"], temperature=1.0, **common(settings))
    prompts = Dataset.from_list([{"prompt": [{"role": "user", "content": row["prompt"]}]} for row in rows])
    return trl.DistillationTrainer(settings["student"], settings["teacher"], args, prompts, processing_class=tokenizer)


def main() -> None:
    settings: Settings = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    torch.set_num_threads(settings["threads"])
    tokenizer = AutoTokenizer.from_pretrained(settings["student"], padding_side="left")
    rows = [json.loads(line) for line in Path(settings["prompts"]).read_text(encoding="utf-8").splitlines()]
    trainer = distillation(settings, rows, tokenizer)
    clock = Clock(settings, tokenizer)
    trainer.add_callback(clock)
    clock.start()
    trainer.train()


if __name__ == "__main__":
    main()
