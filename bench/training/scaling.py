"""Prints what the launcher's estimate (launch.checks.memory) says of students of 1.7e9 to 235e9 parameters on GPUs of
80 GiB: the table of docs/scaling.md. Nothing is loaded or run.

    python -m bench.training.scaling [--pack-tokens 4096] [--gib 80]
"""

from __future__ import annotations

import argparse
import sys
from typing import Any, Final

from stillhouse import builtin
from stillhouse.engines.provider import ModelShape
from stillhouse.launch.checks.memory import Need, learner_need, shape_of
from stillhouse.launch.config.run import RunConfig
from stillhouse.launch.config.tree import build
from stillhouse.launch.machine.devices import fill_dtype

RANKS: Final = (1, 8, 64)
COMMON: Final[dict[str, Any]] = {"model_type": "qwen3", "num_key_value_heads": 8, "head_dim": 128, "dtype": "bfloat16"}
MODELS: Final[dict[str, tuple[int, dict[str, Any]]]] = {
    "Qwen3-1.7B": (
        1_720_574_976,
        {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16}
        | {"tie_word_embeddings": True},
    ),
    "Qwen3-8B": (
        8_190_735_360,
        {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32},
    ),
    "Qwen3-32B": (
        32_762_123_264,
        {"hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 64, "num_attention_heads": 64},
    ),
    "Qwen3-235B-A22B": (
        235_093_634_560,
        {"hidden_size": 4096, "moe_intermediate_size": 1536, "num_experts_per_tok": 8, "num_hidden_layers": 94}
        | {"num_attention_heads": 64, "num_key_value_heads": 4, "model_type": "qwen3_moe"},
    ),
}
"""Parameters, and what config.json has of the shape. From the published configurations."""
VOCABULARY: Final = 151_936
ROWS: Final[dict[str, dict[str, Any]]] = {
    "defaults": {},
    "sent in bfloat16, from the host": {"weights": {"dtype": "bfloat16", "staging": "host"}},
    "and `learner.recompute = 1`": {
        "weights": {"dtype": "bfloat16", "staging": "host"},
        "learner": {"recompute": 1.0},
    },
    "and `learner.moments = host`": {
        "weights": {"dtype": "bfloat16", "staging": "host"},
        "learner": {"recompute": 1.0, "moments": "host"},
    },
    "and adapters of rank 16": {
        "weights": {"dtype": "bfloat16", "staging": "host"},
        "learner": {"recompute": 1.0, "lora": {"rank": 16}},
    },
}


def need_of(shape: ModelShape, settings: dict[str, Any], ranks: int, pack_tokens: int) -> Need:
    models = {"student": str(builtin.STUDENT_DIR), "teacher": str(builtin.TEACHER_DIR)}
    learner = {**settings.get("learner", {}), "ranks": ranks, "pack_tokens": pack_tokens}
    config = build(RunConfig, {"models": models, **settings, "learner": learner})
    return learner_need(fill_dtype(config, "cuda"), shape, "nccl")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0].replace("\n", " "))
    parser.add_argument("--pack-tokens", type=int, default=4096)
    parser.add_argument("--gib", type=float, default=80.0, help="memory of a GPU")
    args = parser.parse_args()
    print(f"| student | settings | {' | '.join(f'{n} GPUs' if n > 1 else '1 GPU' for n in RANKS)} |")
    print(f"|---|---|{'---|' * len(RANKS)}")
    for name, (parameters, told) in MODELS.items():
        shape = shape_of(COMMON | told, parameters, VOCABULARY)
        for settings_name, settings in ROWS.items():
            needs = [need_of(shape, settings, n, args.pack_tokens).total for n in RANKS]
            cells = [f"{gib:,.0f}" if gib > args.gib else f"**{gib:,.0f}**" for gib in needs]
            print(f"| {name} | {settings_name} | {' | '.join(cells)} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
