"""Verifies a vLLM server's weights. No torch."""

from __future__ import annotations

import secrets
from hashlib import sha256
from typing import Any, Final

import msgspec

from stillhouse.engines.base import Int32s
from stillhouse.engines.http.link import RequestRefused
from stillhouse.engines.http.stream import StreamError
from stillhouse.engines.http.verify import Ask, NotComparedError, ServerVerifier
from stillhouse.engines.vllm.http import GENERATE
from stillhouse.engines.vllm.replies import decode_reply
from stillhouse.weights.checks import Checksums

_OF_NOTHING: Final = sha256().hexdigest()


class _Said(msgspec.Struct, frozen=True):
    checksums: dict[str, str]


class VLLMVerifier(ServerVerifier):
    def _score(self, ids: Int32s, ask: Ask) -> list[float]:
        body: dict[str, Any] = {
            "token_ids": ids.tolist(),
            "sampling_params": {"max_tokens": 1, "temperature": 0, "prompt_logprobs": 0, "detokenize": False},
            "cache_salt": f"canary {secrets.token_hex(16)}",  # so that no cache of other weights is used
        }
        rows = decode_reply(ask(GENERATE, body)).prompt_logprobs or []
        if len(rows) != len(ids):
            raise StreamError(f"{len(rows)} rows of prompt log-probs for {len(ids)} tokens")
        found = [(row or {}).get(token) for token, row in zip(ids.tolist()[1:], rows[1:], strict=True)]
        if None in found:
            raise StreamError("prompt log-probs of other tokens than the prompt's")
        return [entry.logprob for entry in found if entry is not None]

    def _checksums(self, ask: Ask) -> Checksums:
        """vLLM's kernels on a CPU keep weights in a layout of their own, and its checksums are then those of empty
        tensors."""
        try:
            said = msgspec.json.decode(ask("/weight_checker", {"action": "checksum"}), type=_Said).checksums
        except (RequestRefused, msgspec.DecodeError) as error:
            raise NotComparedError(str(error)) from error
        if not said or _OF_NOTHING in said.values():
            raise NotComparedError("the server's checksums leave out tensors that its kernels hold")
        return [said]
