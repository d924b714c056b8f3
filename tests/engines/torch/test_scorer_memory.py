"""What the launcher counts for an embedded teacher against what torch allocates while it scores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from stillhouse.engines.base import ScoreRequest
from stillhouse.engines.config import ScorerSettings, chunk_rows
from stillhouse.engines.torch.provider import PROVIDER
from stillhouse.engines.torch.scorer import TorchScorer
from stillhouse.launch.checks.memory import read_shape
from tests.allocated import allocated

SHAPES: dict[str, dict[str, Any]] = {
    "large vocabulary": {"vocab_size": 20_000, "hidden_size": 64, "intermediate_size": 96},
    "wide layers": {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 768},
}


@pytest.mark.parametrize("name", SHAPES)
def test_a_teacher_allocates_what_is_counted_for_it(tmp_path: Path, name: str) -> None:
    """Three chunks of logits: those of one are gone when the next ones come."""
    heads: dict[str, Any] = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    torch.manual_seed(0)
    config = Qwen3Config(**SHAPES[name], **heads, max_position_embeddings=1024)
    Qwen3ForCausalLM(config).save_pretrained(tmp_path)
    settings = ScorerSettings(device="cpu", max_batch_tokens=2048, prefix_cache_mb=0)
    scorer = TorchScorer.load(tmp_path, settings)
    assert chunk_rows(20_000, "cpu") * 2 < 2048
    ids = np.random.default_rng(0).integers(0, 512, 512).astype(np.int32)
    requests = [ScoreRequest(ids, 1)] * 4
    scorer.score(requests)
    measured = allocated(lambda: scorer.score(requests))[1]
    shape = read_shape(tmp_path)
    assert shape is not None
    counted = sum(PROVIDER.memory("teacher", settings, shape, "cpu").likely.values())
    assert 0.4 * counted < measured < counted
