"""A Qwen3 of random weights in bfloat16, with the tokenizer of DONOR (builtin/data/student).

python scripts/gpu/make_model.py OUT {tiny,0.6b,1.7b} [DONOR]
"""

import json
import shutil
import sys
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

out, size, donor = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3] if len(sys.argv) > 3 else "builtin/data/student")
shape = {
    "tiny": {
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "vocab_size": 320,
    },
    "0.6b": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "vocab_size": 151936,
    },
    "1.7b": {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "vocab_size": 151936,
    },
}[size]
torch.manual_seed(int(sys.argv[4]) if len(sys.argv) > 4 else 0)
device = "cuda" if torch.cuda.is_available() else "cpu"
with torch.device(device):
    model = Qwen3ForCausalLM(
        Qwen3Config(
            **shape,
            head_dim=128,
            tie_word_embeddings=True,
            eos_token_id=313,
            pad_token_id=315,
            bos_token_id=None,
            max_position_embeddings=8192,
            rms_norm_eps=1e-6,
            rope_theta=1e6,
            dtype="bfloat16",
        )
    ).to(torch.bfloat16)
model.save_pretrained(out)
for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
    shutil.copy(donor / name, out / name)
config = json.loads((out / "config.json").read_text(encoding="utf-8"))
config["dtype"] = "bfloat16"
(out / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
print(out, sum(p.numel() for p in model.parameters()) / 1e9, "billion")
