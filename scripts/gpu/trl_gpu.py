"""TRL's on-policy distillation on one GPU: seconds per step and peak memory, beside those of our run in the folder RUN.

    PYTHONPATH=$TRL_PATH python scripts/gpu/trl_gpu.py STUDENT TEACHER PROMPTS.jsonl STEPS ROLLOUTS NEW_TOKENS RUN

The settings of bench/race/trl_side.py, in bfloat16 over float32 weights, without use_cpu.
"""

import json
import statistics
import sys
import time
from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import DistillationConfig, DistillationTrainer

student, teacher, prompts, steps, rollouts, new = *sys.argv[1:4], *map(int, sys.argv[4:7])
seconds = []
tokenizer = AutoTokenizer.from_pretrained(student, padding_side="left")
rows = [json.loads(line) for line in Path(prompts).read_text(encoding="utf-8").splitlines()[:2048]]


class Clock(TrainerCallback):
    last = 0.0

    def on_train_begin(self, *a, **k):
        self.last = time.monotonic()

    def on_step_end(self, args, state, control, **k):
        torch.cuda.synchronize() if torch.cuda.is_available() else None
        now = time.monotonic()
        seconds.append(now - self.last)
        print(
            json.dumps(
                {
                    "trl_step": state.global_step,
                    "s": round(now - self.last, 3),
                    "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2)
                    if torch.cuda.is_available()
                    else None,
                }
            ),
            flush=True,
        )
        self.last = time.monotonic()


gpu = torch.cuda.is_available()
args = DistillationConfig(
    output_dir="/tmp/trl",
    max_steps=steps,
    learning_rate=1e-5,
    per_device_train_batch_size=rollouts,
    temperature=1.0,
    max_completion_length=new,
    beta=1.0,
    bf16=gpu,
    use_cpu=not gpu,
    gradient_checkpointing=False,
    report_to=[],
    save_strategy="no",
    disable_tqdm=True,
    logging_steps=steps,
    weight_decay=0.0,
    max_grad_norm=1.0,
)
trainer = DistillationTrainer(
    student,
    teacher,
    args,
    Dataset.from_list([{"prompt": [{"role": "user", "content": r["prompt"]}]} for r in rows]),
    processing_class=tokenizer,
)
trainer.add_callback(Clock())
trainer.train()

metrics = Path(sys.argv[7]) / "metrics.jsonl"
lines = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()] if metrics.exists() else []
ours = [line["time/step_s"] for line in lines if line.get("kind") == "step"]
if len(ours) > 1 and len(seconds) > 1:
    a, b = (statistics.median(side[1:]) for side in (ours, seconds))
    print(f"| seconds per step, median | Stillhouse {a:.2f} | TRL {b:.2f} | TRL / Stillhouse {b / a:.2f} |")
