"""How often a step waits for the device: on torch's "meta" device, whose memory cannot be read at all. Every `.item()`,
`bool()`, `.tolist()`, `.cpu()`, `nonzero()` or mask as an index raises there; only `models.transfer.read` is let
through, and counted."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from stillhouse.learner.batch import TrainItem
from stillhouse.learner.objectives.options import TokenAdvantage
from stillhouse.learner.step import forward, train_step
from stillhouse.learner.step.train_step import Trainer
from stillhouse.models import transfer
from stillhouse.protocol.topk_codec import encode_top_k
from tests.learner.conftest import make_item, remade, tiny_student
from tests.learner.settings import learner_config

VOCAB = 23

OBJECTIVES: dict[str, dict[str, Any]] = {
    "k1": {},
    "a baseline, ratios of whole rollouts": {
        "divergence": ("k1", {"baseline": "expected_cost"}),
        "importance": "sequence",
    },
    "several updates": {"updates_per_batch": 2, "importance": "decoupled"},
    "ratios of whole rollouts": {"importance": "gspo", "advantage": "grpo"},
    "distributions": {"divergence": "reverse_kl"},
    "distributions, context weighted": {"divergence": ("jsd", {"context_cap": 2.0})},
    "drawn tokens": {"divergence": "multi_sample"},
    "values": {"advantage": ("gae", {"value": {"clip": 0.2, "through_backbone": True}}), "importance": "ppo"},
}


def _items() -> list[TrainItem]:
    """Their input is 4, 6, 8 tokens long."""
    items: list[TrainItem] = []
    for i in range(3):
        made = make_item(f"r{i}", [0, 0, *([1] * (3 + 2 * i))], reward=float(i % 2), task_id=i // 2)
        start, end = 2, made.item.end
        random = np.random.default_rng(i)
        logits_TV = random.normal(0.0, 2.0, (end - start, VOCAB))
        logprobs_TV = logits_TV - np.logaddexp.reduce(logits_TV, axis=1, keepdims=True)
        ids_TK = np.argsort(-logprobs_TV, axis=1)[:, :5]
        payload = encode_top_k(
            ids_TK, np.take_along_axis(logprobs_TV, ids_TK, 1), vocab_size=VOCAB, mass=1.0, max_k=5, logprob_bits=16
        )
        items.append(remade(made, [(0, start, end, payload)]))
    return items


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """What was read. The step is told 1 each time: a finite number, and true."""
    seen: list[Tensor] = []

    def read(tensor: Tensor) -> Tensor:
        seen.append(tensor)
        return torch.ones(tensor.shape, dtype=tensor.dtype)

    for module in (train_step, forward):
        monkeypatch.setattr(module, "read", read)
    # Its fused kernel does not know this device.
    made = torch.optim.AdamW

    def unfused(*args: Any, **kwargs: Any) -> torch.optim.AdamW:
        return made(*args, **{**kwargs, "fused": False})

    monkeypatch.setattr(torch.optim, "AdamW", unfused)
    return seen


@pytest.mark.parametrize(
    ("fields", "pack_tokens", "chunk_tokens"),
    [({}, 4096, 1024), *((fields, 1, 2) for fields in OBJECTIVES.values())],
    ids=["one microbatch", *OBJECTIVES],
)
def test_a_step_reads_from_the_device_once_per_update_however_it_is_divided(
    reads: list[Tensor], fields: dict[str, Any], pack_tokens: int, chunk_tokens: int
) -> None:
    given: dict[str, Any] = {"pack_tokens": pack_tokens, "logprob_chunk_tokens": chunk_tokens, **fields}
    config = learner_config(**given)
    model = tiny_student().to("meta")  # pyright: ignore[reportArgumentType]
    trainer = Trainer(model, config, total_steps=9, seed=1)
    metrics = trainer.step(_items())
    assert metrics.microbatches == (3 if pack_tokens == 1 else 1)
    assert len(reads) == config.updates_per_batch + isinstance(config.objective.advantage, TokenAdvantage)
    assert all(tensor.device.type == "meta" for tensor in reads)


def test_a_read_is_the_same_numbers_and_an_upload_shares_memory_on_a_cpu() -> None:
    array = np.arange(3.0)
    up = transfer.upload(array, torch.device("cpu"))
    array[0] = 7.0
    assert transfer.read(up).tolist() == [7.0, 1.0, 2.0]
    frozen = np.arange(3.0)
    frozen.flags.writeable = False
    assert transfer.upload(frozen, torch.device("cpu")).tolist() == [0.0, 1.0, 2.0]
    assert transfer.upload(up, torch.device("cpu")) is up
