"""The embedded teacher: scores tokens with a Hugging Face model, packed, with logits only for the requested tokens.

    requests --first-fit to max_batch_tokens--> packs --packed_hidden--> [T, H] --rows asked for--> head, in chunks

The log-prob of token t needs the hidden state of token t - 1, so the last token of a request is never an input.

Legend: T input tokens of a pack, A tokens to score in it, H hidden size, K top tokens, n tokens of one request.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np
import torch
from transformers import PreTrainedModel

from engines.base import ScoreRequest, ScoreResult, check_scoring
from engines.config import ScorerSettings
from models.loading import load_causal_lm, resolve_device, resolve_dtype
from models.logprobs import TokenScores, lm_head, token_scores
from models.packed import context_window, packed_hidden
from models.packed_layout import first_fit_decreasing
from models.transfer import upload
from protocol.messages import WeightsRef
from weights.sink import SnapshotRefused
from weights.snapshot import read_snapshot

_CHUNK_LOGITS: Final = {"cpu": 16 * 2**20, "cuda": 128 * 2**20}
"""Most logits held at one time, by device: 64 MiB in float32 on a CPU, close to its caches; 512 MiB on a GPU, so that a
product with a vocabulary of 152,000 has 883 rows instead of 110."""


class TorchScorer:
    """A ScoringEngine (engines.base) on a model loaded with attention="packed". Not thread-safe."""

    def __init__(self, model: PreTrainedModel, *, max_batch_tokens: int = 4096) -> None:
        self._model: PreTrainedModel | None = model
        self._head = lm_head(model)
        self._vocab_size = self._head.weight_VH.shape[0]
        self._max_context = context_window(model.config)
        self._max_batch_tokens = max_batch_tokens
        self._chunk_tokens = chunk_rows(self._vocab_size, self._head.weight_VH.device.type)

    @classmethod
    def load(cls, path: str | Path, config: ScorerSettings) -> TorchScorer:
        """Load a teacher. Raises models.loading.ModelError or models.packed.PackingError with the reason."""
        device = resolve_device(config.device)
        model = load_causal_lm(path, device=device, dtype=resolve_dtype(config.dtype, device), attention="packed")
        return cls(model, max_batch_tokens=config.max_batch_tokens)

    @property
    def vocab_size(self) -> int:
        """Rows of the LM head; a checkpoint may pad them past the tokenizer's last id."""
        return self._vocab_size

    @property
    def max_context(self) -> int:
        return self._max_context

    @torch.inference_mode()
    def score(self, requests: Sequence[ScoreRequest], *, top_k: int = 0) -> list[ScoreResult]:
        """Score a batch at temperature 1. Results are in the order of the requests, regardless of packing.

        A request with start == len(token_ids) gets empty arrays. Raises ValueError for ids outside the vocabulary,
        start outside [1, len], more than max_context tokens, top_k outside [0, vocab_size].
        """
        # The last token is never an input, so a request may be one token longer than the context window.
        check_scoring(requests, top_k, vocab_size=self._vocab_size, max_tokens=self._max_context + 1)
        results = [ScoreResult.empty(top_k)] * len(requests)
        busy = [i for i, request in enumerate(requests) if request.start < len(request.token_ids)]
        inputs = [len(requests[i].token_ids) - 1 for i in busy]
        for pack in first_fit_decreasing(inputs, self._max_batch_tokens):
            members = [busy[p] for p in pack]
            for i, result in zip(members, self._score_pack([requests[i] for i in members], top_k), strict=True):
                results[i] = result
        return results

    def load_snapshot(self, ref: WeightsRef) -> None:
        """See engines.base.TakesSnapshots. The file is memory-mapped, so that no second full copy is made."""
        model = self._model
        if model is None:
            raise RuntimeError("the scorer is closed; load a new one")
        parameters = dict(model.named_parameters())
        named = dict(read_snapshot(ref))
        differing = sorted(
            name
            for name in named.keys() | parameters.keys()
            if name not in named or name not in parameters or named[name].shape != parameters[name].shape
        )
        if differing:
            raise SnapshotRefused(
                f"{ref.path}: {len(differing)} of its {len(named)} tensors do not fit this teacher's "
                f"{len(parameters)}, e.g. {differing[:4]}; expected a snapshot of the same architecture"
            )
        with torch.no_grad():
            for name, tensor in named.items():
                parameters[name].copy_(tensor)

    def close(self) -> None:
        """Drop the model. Scoring afterwards raises RuntimeError. Idempotent."""
        self._model = None

    def _score_pack(self, requests: Sequence[ScoreRequest], top_k: int) -> list[ScoreResult]:
        """Score one pack in one forward pass. Each request has at least one token to score."""
        model = self._model
        if model is None:
            raise RuntimeError("the scorer is closed; load a new one")
        lengths = [len(request.token_ids) - 1 for request in requests]
        firsts = np.cumsum([0, *lengths[:-1]])
        rows_A = np.concatenate(
            [np.arange(r.start - 1, n) + first for r, n, first in zip(requests, lengths, firsts, strict=True)]
        )
        targets_A = np.concatenate([request.token_ids[request.start :] for request in requests])
        ids_T = np.concatenate([request.token_ids[:-1] for request in requests])
        device = self._head.weight_VH.device
        hidden_TH = packed_hidden(model, upload(ids_T.astype(np.int64), device), lengths)
        scores = token_scores(
            self._head,
            hidden_TH.index_select(0, upload(rows_A, device)),
            upload(targets_A.astype(np.int64), device),
            chunk_tokens=self._chunk_tokens,
            top_k=top_k,
        )
        counts = [n - request.start + 1 for request, n in zip(requests, lengths, strict=True)]
        return _split(scores, counts)


def chunk_rows(vocab_size: int, device_type: str) -> int:
    """Rows of logits computed at one time."""
    return min(4096, max(16, _CHUNK_LOGITS.get(device_type, _CHUNK_LOGITS["cpu"]) // vocab_size))


def _split(scores: TokenScores, counts: Sequence[int]) -> list[ScoreResult]:
    """One result per request from the scores of a pack."""
    logprobs_A = scores.logprobs_T.float().cpu().numpy()
    top_ids_AK = None if scores.top_ids_TK is None else scores.top_ids_TK.int().cpu().numpy()
    top_logprobs_AK = None if scores.top_logprobs_TK is None else scores.top_logprobs_TK.float().cpu().numpy()
    results: list[ScoreResult] = []
    start = 0
    for count in counts:
        part = slice(start, start + count)
        results.append(
            ScoreResult(
                logprobs=logprobs_A[part].copy(),  # not a view that would keep the whole pack alive
                top_ids=None if top_ids_AK is None else top_ids_AK[part].copy(),
                top_logprobs=None if top_logprobs_AK is None else top_logprobs_AK[part].copy(),
            )
        )
        start += count
    return results
