"""The routes of an SGLang server that `engines.http.link` needs."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from stillhouse.engines.http.link import RequestRefused, ServerLink

_FLUSH_RETRY_S: Final = 0.005


class SGLangLink(ServerLink):
    info_path = "/model_info"

    async def post_abort(self, rids: Sequence[str]) -> None:
        if not rids:
            await self.post("/abort_request", {"abort_all": True})
        for rid in rids:
            await self.post("/abort_request", {"rid": rid})

    async def flush_cache(self) -> None:
        """The server refuses until nothing runs, which takes it one more step."""
        while True:
            try:
                await self.post("/flush_cache", {})
                return
            except RequestRefused:
                await asyncio.sleep(_FLUSH_RETRY_S)
