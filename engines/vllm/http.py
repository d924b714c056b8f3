"""The routes of a vLLM server that `engines.http.link` needs. They are vLLM's for development and training, which a
server has with VLLM_SERVER_DEV_MODE=1."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

import msgspec

from stillhouse.engines.http.link import ServerLink

GENERATE: Final = "/inference/v1/generate"
RID_PREFIX: Final = "generate-tokens-"
"""GENERATE puts it before the request id that a caller gives."""
_FLUSH_RETRY_S: Final = 0.02


class _Flushed(msgspec.Struct, frozen=True):
    success: bool


class VLLMLink(ServerLink):
    info_path = "/weight_info"

    async def post_abort(self, rids: Sequence[str]) -> None:
        await self.post("/abort_requests", {"request_ids": [f"{RID_PREFIX}{rid}" for rid in rids]})

    async def answers(self) -> None:
        await self.get("/health")

    async def flush_cache(self) -> None:
        """The server refuses while a request holds a part of the cache."""
        while not msgspec.json.decode(await self.post("/reset_prefix_cache", None), type=_Flushed).success:
            await asyncio.sleep(_FLUSH_RETRY_S)
