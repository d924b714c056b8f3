"""Shared by the actors' tests: the built-in tokenizer, and episodes to play from scripts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import cast

import numpy as np
import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from stillhouse.actors.envs.base import EnvTask, TextTokenizer
from stillhouse.actors.envs.episode import Episode
from stillhouse.actors.envs.registry import make_environment
from stillhouse.builtin import STUDENT_DIR


@pytest.fixture(scope="session")
def hf_tokenizer() -> PreTrainedTokenizerBase:
    return cast(PreTrainedTokenizerBase, AutoTokenizer.from_pretrained(STUDENT_DIR))


@pytest.fixture(scope="session")
def tokenizer(hf_tokenizer: PreTrainedTokenizerBase) -> TextTokenizer:
    return TextTokenizer(hf_tokenizer)


@pytest.fixture
def make_episode(tokenizer: TextTokenizer) -> Callable[..., Episode]:
    """Build an episode of the named environment; `<|im_end|>` is the model's own stop token."""

    def make(name: str, ground_truth: str | None = None, *, max_turns: int = 8, **options: object) -> Episode:
        task = EnvTask(np.array([1, 2], dtype=np.int32), ground_truth, "", "train-0-0-0", seed=5)
        stop = int(tokenizer.encode("<|im_end|>")[0])
        make = partial(make_environment, name, tokenizer, options)
        return Episode(make, task, tokenizer, model_stop_token_ids=(stop,), max_turns=max_turns)

    return make
