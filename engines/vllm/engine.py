"""A student on a vLLM server. Before new weights all its requests end, and they continue as new ones after it. Between
two updates of its label no request lives through, so tokens leave at once with the version that their request was sent
under (engines.vllm.replies)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from stillhouse.engines.base import GenerationRequest
from stillhouse.engines.config import StudentLinkConfig
from stillhouse.engines.http.engine import StudentOnServer
from stillhouse.engines.http.live import LiveRequest, tokens_left
from stillhouse.engines.http.stream import StreamChunk, StreamError
from stillhouse.engines.vllm.features import Features, detect_features
from stillhouse.engines.vllm.http import GENERATE, VLLMLink
from stillhouse.engines.vllm.replies import read_piece

LOWEST_TEMPERATURE, HIGHEST_TEMPERATURE = 0.01, 2.0
"""vLLM samples at the first in place of lower ones (`_MAX_TEMP` in vllm/sampling_params.py), and refuses higher than
the second."""


class VLLMEngine(StudentOnServer[StudentLinkConfig, Features]):
    def __init__(
        self,
        url: str,
        config: StudentLinkConfig,
        *,
        vocab_size: int,
        run_id: str = "",
        api_key: str = "",
        on_output: Callable[[], None] | None = None,
    ) -> None:
        link = VLLMLink(url, config, api_key=api_key)
        super().__init__(link, config, vocab_size=vocab_size, run_id=run_id, on_output=on_output)

    async def _detect(self) -> Features:
        return await detect_features(self.server)

    def _check_sampling(self, request: GenerationRequest) -> None:
        what, sampling = f"request {request.request_id!r}", request.sampling
        temperature = sampling.temperature
        if temperature != 0 and not LOWEST_TEMPERATURE <= temperature <= HIGHEST_TEMPERATURE:
            raise ValueError(
                f"{what}: temperature = {temperature}; expected 0 (greedy) or a number from {LOWEST_TEMPERATURE} to "
                f"{HIGHEST_TEMPERATURE:g}, at which vLLM samples"
            )
        if sampling.truncated:
            raise ValueError(
                f"{what}: top_p = {sampling.top_p}, top_k = {sampling.top_k}, min_p = {sampling.min_p}; on vLLM "
                "students are sampled from whole distributions: expected top_p = 1, top_k = 0 and min_p = 0, or the "
                "engine torch or sglang"
            )

    def _request(self, live: LiveRequest) -> tuple[str, dict[str, Any]]:
        request = live.request
        top_ids = request.sampling.top_ids
        sampling = {
            "temperature": request.sampling.temperature,
            "max_tokens": tokens_left(request, len(live.ids), self.features),
            "logprobs": 0 if top_ids is None else top_ids.k + 1,
            "stop_token_ids": request.stop_token_ids,
            "ignore_eos": True,  # what ends an answer is said by stop_token_ids
            "detokenize": False,
        }
        body = {
            "request_id": live.rid,
            "token_ids": [*request.prompt_ids.tolist(), *live.ids],
            "sampling_params": sampling,
            "stream": True,
        }
        return GENERATE, body

    def _decode(self, live: LiveRequest, text: bytes) -> StreamChunk:
        top_ids = live.request.sampling.top_ids
        return read_piece(text, self._label or "", 0 if top_ids is None else top_ids.k)

    async def _set_label(self, label: str) -> None:
        await self.server.post("/update_weight_version", {"new_version": label})
        if (said := (await self.server.model_info()).weight_version) != label:
            raise StreamError(f"{self.server.url}: its weights were named {label!r}, and it reports {said!r}")
