"""A teacher on a vLLM server: log-probs of whole prompts. vLLM does not read its prefix cache for them, so a growing
rollout is computed again for each of its segments, and the reply has all its tokens.

vLLM could score only the new tokens, and given ones (`prompt_logprob_token_ids` of vllm/sampling_params.py, 0.32), but
only where Triton is, and has not been tried.
"""

from __future__ import annotations

import msgspec

from stillhouse.engines.api.replies import Sets, Unusable, of_prompt_logprobs, score_of
from stillhouse.engines.base import ScoreRequest, ScoreResult
from stillhouse.engines.config import ServerLinkConfig
from stillhouse.engines.http.scorer import ScorerOnServer
from stillhouse.engines.http.stream import StreamError
from stillhouse.engines.vllm.features import Features, detect_features
from stillhouse.engines.vllm.http import GENERATE, VLLMLink


class _Reply(msgspec.Struct, frozen=True):
    prompt_logprobs: Sets | None = None


class VLLMScorer(ScorerOnServer[Features]):
    def __init__(self, url: str, config: ServerLinkConfig, *, vocab_size: int, api_key: str = "") -> None:
        super().__init__(VLLMLink(url, config, api_key=api_key), config, vocab_size=vocab_size)

    async def _detect(self) -> Features:
        return await detect_features(self.server)

    async def _score_request(self, request: ScoreRequest, top_k: int) -> ScoreResult:
        sampling = {"temperature": 1.0, "max_tokens": 1, "prompt_logprobs": top_k, "detokenize": False}
        text = await self._post(GENERATE, {"token_ids": request.token_ids.tolist(), "sampling_params": sampling})
        return read_scores(text, request, top_k, self.vocab_size)


def read_scores(text: bytes, request: ScoreRequest, top_k: int, vocab_size: int) -> ScoreResult:
    """The scores in a reply of GENERATE. Raises StreamError for one without a score of every token, or without as many
    likeliest ones."""
    ids_T = request.token_ids
    try:
        answer = of_prompt_logprobs(msgspec.json.decode(text, type=_Reply).prompt_logprobs, None, ids_T)
        scored = score_of(answer, request.start, len(ids_T), "ids", top_k, vocab_size)
    except (Unusable, msgspec.DecodeError) as error:
        raise StreamError(f"no scores: {error}; the server said {text[:300]!r}") from None
    if scored.masked:
        raise StreamError(f"tokens of an answer have no score: {dict(scored.masked)}")
    return scored.result
