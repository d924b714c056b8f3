"""Settings of an actor's connection to its vLLM server. No torch here."""

from __future__ import annotations

from stillhouse.engines.config import ServerLinkConfig
from stillhouse.protocol.settings import PositiveFloat


class VLLMConfig(ServerLinkConfig, frozen=True, kw_only=True):
    """An actor's connection to its vLLM server (`engines.vllm.engine`)."""

    pause_timeout_s: PositiveFloat = 120.0
    """Longest pause for new weights before waiting requests fail."""
