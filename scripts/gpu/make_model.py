"""A Qwen3 of random weights in bfloat16, or a Qwen3.5 (most layers recurrent) in float32, with the tokenizer of DONOR
(builtin/data/student).

python scripts/gpu/make_model.py OUT {tiny,0.6b,1.7b,hybrid,hybrid-tiny} [DONOR]
"""

import json
import shutil
import sys
from pathlib import Path

import torch
import transformers

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
    "hybrid": {
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "vocab_size": 320,
    },
    "hybrid-tiny": {
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "vocab_size": 320,
    },
}[size]
hybrid = size.startswith("hybrid")
dtype = "float32" if hybrid else "bfloat16"
torch.manual_seed(int(sys.argv[4]) if len(sys.argv) > 4 else 0)
device = "cuda" if torch.cuda.is_available() else "cpu"
with torch.device(device):
    kind, model_class = ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM") if hybrid else ("Qwen3Config", "Qwen3ForCausalLM")
    model = getattr(transformers, model_class)(
        getattr(transformers, kind)(
            **{"head_dim": 128, **shape},
            tie_word_embeddings=True,
            eos_token_id=313,
            pad_token_id=315,
            bos_token_id=None,
            max_position_embeddings=8192,
            rms_norm_eps=1e-6,
            **({} if hybrid else {"rope_theta": 1e6}),
            dtype=dtype,
        )
    ).to(getattr(torch, dtype))
model.save_pretrained(out)
for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
    shutil.copy(donor / name, out / name)
config = json.loads((out / "config.json").read_text(encoding="utf-8"))
config["dtype"] = dtype
(out / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
print(out, sum(p.numel() for p in model.parameters()) / 1e9, "billion")
