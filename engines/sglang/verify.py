"""Verifies an SGLang server's weights. No torch."""

from __future__ import annotations

import secrets
from typing import Any

from stillhouse.engines.base import Int32s, ScoreRequest
from stillhouse.engines.http.link import RequestRefused
from stillhouse.engines.http.verify import Ask, NotComparedError, ServerVerifier
from stillhouse.engines.sglang.scorer import decode_scores
from stillhouse.weights.checks import Checksums, parse_checksums


class SGLangVerifier(ServerVerifier):
    def _score(self, ids: Int32s, ask: Ask) -> list[float]:
        body: dict[str, Any] = {
            "input_ids": ids.tolist(),
            "sampling_params": {"max_new_tokens": 0, "temperature": 0},
            "return_logprob": True,
            "logprob_start_len": 0,
            # A new key of the prefix cache, so that no entry of other weights is used.
            "extra_key": f"canary {secrets.token_hex(4)}",
        }
        reply = ask("/generate", body)
        return decode_scores(reply, ScoreRequest(ids, 1), vocab_size=self._engine.vocab_size).logprobs.tolist()

    def _checksums(self, ask: Ask) -> Checksums:
        try:
            said = parse_checksums(ask("/weights_checker", {"action": "checksum"}))
        except RequestRefused as error:
            raise NotComparedError(str(error)) from error
        if not said:
            raise NotComparedError("/weights_checker gave an unknown reply")
        return said
