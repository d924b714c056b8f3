"""An actor that has written many rollouts, under many versions of the weights, holds no more than before."""

from __future__ import annotations

import gc
from collections import Counter

import numpy as np
from torch import Tensor

from stillhouse.actors.config import ActorConfig
from stillhouse.actors.envs.base import TextTokenizer
from stillhouse.builtin import STUDENT_DIR
from stillhouse.engines.config import EngineConfig
from stillhouse.engines.torch.engine import TorchEngine
from stillhouse.models.loading import load_causal_lm
from stillhouse.protocol.messages import Sampling, WeightVersion
from tests.actors.in_hand import InHand, ticket

SLOTS, PER_VERSION = 8, 4
ROLLOUTS = 40
SPREAD = 4
"""Of one kind: callbacks and views that the next step, or the event loop's next turn, replaces."""


Weights = list[tuple[str, Tensor]]


def alive() -> Counter[str]:
    """Objects by type, of all that Python's garbage collector knows."""
    gc.collect()
    return Counter(f"{type(each).__module__}.{type(each).__qualname__}" for each in gc.get_objects())


def write(hand: InHand, engine: TorchEngine, weights: Weights, numbers: range, tokenizer: TextTokenizer) -> None:
    """Rollouts of many lengths, a few cancelled half way, until none is in hand; new weights after every few."""
    random = np.random.default_rng(numbers.start)
    for number in numbers:
        sampling = Sampling(seed=number, max_new_tokens=int(random.integers(2, 12)))
        prompt = tokenizer.encode(f"{random.integers(1, 10**5)}+{random.integers(1, 10**5)}=")
        hand.rollouts.add(ticket(number, sampling=sampling), np.asarray(prompt, dtype=np.int32))
        hand.until(lambda: len(hand.rollouts) < SLOTS)
        if number % PER_VERSION == 0:
            engine.stage_weights(WeightVersion(0, 1 + number // PER_VERSION), weights)
        if number % 20 == 0:
            hand.rollouts.cancel(f"train-{number}-0-0", "no longer wanted")
        hand.sent.clear()
    hand.until_gone()
    hand.sent.clear()


def test_an_actor_keeps_nothing_of_rollouts_and_weights_that_are_over(tokenizer: TextTokenizer) -> None:
    model = load_causal_lm(STUDENT_DIR, device="cpu", dtype="float32", attention="sdpa")
    engine = TorchEngine(model, EngineConfig(max_concurrent=SLOTS, max_context=64))
    weights = [(name, parameter.detach().clone()) for name, parameter in model.named_parameters()]
    hand = InHand(engine, tokenizer, ActorConfig(segment_tokens=8, max_concurrent_rollouts=SLOTS))
    try:
        write(hand, engine, weights, range(ROLLOUTS), tokenizer)
        alive()  # fills caches of its own
        before = alive()
        write(hand, engine, weights, range(ROLLOUTS, 3 * ROLLOUTS), tokenizer)
        more = {kind: n - before[kind] for kind, n in alive().items() if n > before[kind] + SPREAD}
    finally:
        hand.environments.close()
    assert engine.stats.weight_swaps_total > 0
    assert not more, f"left over from {2 * ROLLOUTS} rollouts"
