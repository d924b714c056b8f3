"""The OpenAI-compatible endpoint of an episode (docs/agents/openai.md)."""

from typing import Final

MODEL: Final = "student"
"""The name under which the endpoint lists the student. Requests may use any."""
KEY_IN_MODEL: Final = "model"
"""As a request's key: its `model` is the key. For callers that keep one client, and so one key, for many episodes."""
