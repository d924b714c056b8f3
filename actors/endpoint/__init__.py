"""The OpenAI-compatible endpoint of an episode (docs/agents/openai.md)."""

from typing import Final

MODEL: Final = "student"
"""The name under which the endpoint lists the student. Requests may use any."""
