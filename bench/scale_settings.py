"""What a simulated run of bench/scale.py consists of: how many workers, how fast each is, how long responses are.

Tokens are sampled ones unless a name says otherwise. All times and rates here are simulated ones; `time_scale` says how
many real seconds a simulated one takes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from random import Random
from typing import Final

from stillhouse.buffer.config import BufferConfig, Release

UTILISATION: Final = 0.4
"""Share of a GPU's peak that matrix products of training and scoring reach here."""
PEAK_FLOPS: Final = 989e12
"""bfloat16 without sparsity, of one H100 (NVIDIA's data sheet)."""
BROADCAST_BYTES_PER_S: Final = 20e9


@dataclass(frozen=True)
class Scenario:
    """One row of the table."""

    actors: int = 32
    teachers: int = 8
    shards: int = 1
    """Processes of the buffer. Actors and teachers are dealt to them in turn."""
    max_staleness: int = 1
    slots: int = 16
    """Requests that an actor decodes at once. Each gets an equal share of its rate, also while others are empty: a
    decode step takes about as long with few requests as with many."""
    actor_tokens_per_s: float = 640.0
    """One actor, all slots full."""
    teacher_tokens_per_s: float = 0.0
    """Tokens that one teacher reads per second. 0: the teachers together read twice as fast as the actors write."""
    learner_tokens_per_s: float = 0.0
    """Tokens that the learner trains per second. 0: as fast as the actors write together."""
    context_cost: float = 0.0
    """Cost of a token that the learner reads as context of others, as a share of the cost of one that it trains."""
    publish_s: float = 0.1
    """From the end of a step until the actors sample with its weights."""
    mean_tokens: float = 1000.0
    """Mean length of a response, before the longest are cut."""
    sigma: float = 1.2
    """Standard deviation of the logarithm of the lengths. 0: all are equal."""
    cap: float = 8.0
    """Longest response, in means."""
    prompt_tokens: int = 100
    segment_tokens: int = 256
    batch_rollouts: int = 512
    group_size: int = 4
    release: Release = "deadline"
    top_k_bytes: int = 0
    """Bytes per token of the teachers' sets; 0: none."""
    steps: int = 20
    warm_up: int = 5
    """Steps before the measurement begins."""
    time_scale: float = 1.0
    seed: int = 0
    """Other lengths for another number."""

    @property
    def generation_per_s(self) -> float:
        return self.actors * self.actor_tokens_per_s

    @property
    def learner_per_s(self) -> float:
        return self.learner_tokens_per_s or self.generation_per_s

    @property
    def teacher_per_s(self) -> float:
        """One teacher, prompts included."""
        if self.teacher_tokens_per_s:
            return self.teacher_tokens_per_s
        return 2 * self.generation_per_s / self.teachers * (1 + self.prompt_tokens / self.mean_length)

    @property
    def token_s(self) -> float:
        """Time between two tokens of one response."""
        return self.slots / self.actor_tokens_per_s

    @property
    def longest(self) -> int:
        return max(1, round(self.cap * self.mean_tokens))

    @property
    def mean_length(self) -> float:
        """Mean length after the longest are cut: E[min(X, c)] of a lognormal X."""
        if not self.sigma:
            return float(self.longest if self.cap < 1 else round(self.mean_tokens))
        mu = math.log(self.mean_tokens) - self.sigma**2 / 2
        z = (math.log(self.cap * self.mean_tokens) - mu) / self.sigma
        below = self.mean_tokens * normal_cdf(z - self.sigma)
        return below + self.cap * self.mean_tokens * (1 - normal_cdf(z))

    def length(self, seed: int) -> int:
        """Length of the response to the ticket with this seed. The same in every run, whatever the schedule."""
        if not self.sigma:
            return min(self.longest, round(self.mean_tokens))
        mu = math.log(self.mean_tokens) - self.sigma**2 / 2
        return max(1, min(self.longest, round(Random(seed + 1_000_003 * self.seed).lognormvariate(mu, self.sigma))))

    @property
    def bounds(self) -> dict[str, float]:
        """Sampled tokens per second of each stage alone, when it always has work."""
        scored = self.mean_length / (self.mean_length + self.prompt_tokens)
        read = self.mean_length / (self.mean_length + self.context_cost * self.prompt_tokens)
        return {
            "actors": self.generation_per_s,
            "teachers": self.teachers * self.teacher_per_s * scored,
            "learner": self.learner_per_s * read,
        }

    @property
    def bound_per_s(self) -> float:
        return min(self.bounds.values())

    @property
    def step_tokens(self) -> float:
        return self.batch_rollouts * self.mean_length

    def buffer_config(self) -> BufferConfig:
        """The buffer's own clock is real time, so its limits grow with the scale."""
        scale = max(1.0, self.time_scale)
        return BufferConfig(
            max_staleness=self.max_staleness,
            batch_rollouts=self.batch_rollouts,
            shards=self.shards,
            release=self.release,
            idle_release_s=2.0 * self.time_scale,
            lease_s=60.0 * scale,
            hedge_floor_s=2.0 * scale,
            ticket_timeout_s=600.0 * scale,
            task_queue=max(64, 2 * self.batch_rollouts // self.group_size // self.shards),
            max_top_k_bytes=max(1024, self.top_k_bytes),
        )


def normal_cdf(z: float) -> float:
    return 0.5 * math.erfc(-z / math.sqrt(2))


def of_model(parameters: float, *, learner_gpus: int, slots: int, slot_tokens_per_s: float) -> Scenario:
    """Rates of a model of this size. An actor or a teacher is one GPU. Training costs 8 FLOPs per parameter and token
    (forward, backward, and the forward pass again), scoring 2."""
    flops = PEAK_FLOPS * UTILISATION
    return Scenario(
        slots=slots,
        actor_tokens_per_s=slots * slot_tokens_per_s,
        teacher_tokens_per_s=flops / (2 * parameters),
        learner_tokens_per_s=learner_gpus * flops / (8 * parameters),
        context_cost=1.0,
        publish_s=2 * parameters / BROADCAST_BYTES_PER_S,
    )


PRESETS: Final[dict[str, Scenario]] = {
    "equal": Scenario(),
    "1.7B on 8 GPUs": of_model(1.7e9, learner_gpus=8, slots=64, slot_tokens_per_s=90.0),
    "7B on 8 GPUs": of_model(7e9, learner_gpus=8, slots=64, slot_tokens_per_s=45.0),
    "32B on 64 GPUs": of_model(32e9, learner_gpus=64, slots=64, slot_tokens_per_s=20.0),
}
"""`equal`: generation and learner are equally fast, and context costs nothing. The others by `of_model`; the speed of a
slot is an assumption."""


def preset(name: str, **changes: object) -> Scenario:
    """A preset with some values changed."""
    return replace(PRESETS[name], **changes)  # type: ignore[arg-type]
