"""Replies of vLLM's /inference/v1/generate (0.32, vllm/entrypoints/scale_out/token_in_token_out/protocol.py), and what
engines.http.stream makes of the pieces of a stream. No I/O.

The last piece says which weights sampled each token; the others do not. Requests end before a server's weights are
named anew (engines.vllm.engine), so a token has the version that its request was sent under, and leaves at once; the
last piece confirms it, or the request fails.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from stillhouse.engines.http.stream import FinishSaid, MetaInfo, SpanSaid, StreamChunk, StreamError


class OfPrompt(msgspec.Struct, frozen=True):
    logprob: float


class TopEntry(msgspec.Struct, frozen=True):
    token_id: int
    logprob: float


class Entry(TopEntry, frozen=True):
    """One sampled token, and with `logprobs` = k the first k of: itself, then the likeliest ones."""

    top_logprobs: list[TopEntry] = []


class Logprobs(msgspec.Struct, frozen=True):
    content: list[Entry] | None = None


class Choice(msgspec.Struct, frozen=True):
    token_ids: list[int] | None = None
    logprobs: Logprobs | None = None
    finish_reason: str | None = None
    weight_versions: list[SpanSaid] | None = None

    @property
    def entries(self) -> list[Entry]:
        return (self.logprobs and self.logprobs.content) or []


class Reply(msgspec.Struct, frozen=True):
    """A whole reply, or a piece of a stream."""

    choices: list[Choice]
    prompt_logprobs: list[dict[int, OfPrompt] | None] | None = None


_DECODER: Final = msgspec.json.Decoder(Reply)
_FINISHES: Final = {"stop": "stop", "length": "length", "abort": "abort"}


def decode_reply(text: bytes) -> Reply:
    """Raises StreamError for anything else, including an error message of the server."""
    try:
        return _DECODER.decode(text)
    except msgspec.DecodeError as error:
        raise StreamError(f"{error}; the server said {text[:300]!r}") from error


def read_piece(text: bytes, label: str, wanted: int) -> StreamChunk:
    """One piece of the stream of a request that was sent under the weights `label` and asks for the `wanted` likeliest
    tokens (0: none). Raises StreamError."""
    reply = decode_reply(text)
    if len(reply.choices) != 1:
        raise StreamError(f"a piece of a stream with {len(reply.choices)} choices; expected 1")
    choice = reply.choices[0]
    top: list[list[tuple[float | None, int, Any]] | None] = []
    if wanted:
        top = [likeliest_of(entry, wanted) for entry in choice.entries]
    finish = choice.finish_reason
    meta = MetaInfo(
        weight_version=label,
        finish_reason=None if finish is None else FinishSaid(_FINISHES.get(finish, finish)),
        output_token_logprobs=[(entry.logprob, entry.token_id, None) for entry in choice.entries],
        output_top_logprobs=top,
        weight_versions=choice.weight_versions,
    )
    return StreamChunk(choice.token_ids or [], meta)


def likeliest_of(entry: Entry, wanted: int) -> list[tuple[float | None, int, Any]]:
    """The likeliest `wanted` tokens, out of `wanted` + 1 that begin with the sampled one."""
    ranked = sorted(entry.top_logprobs, key=lambda each: -each.logprob)[:wanted]
    return [(each.logprob, each.token_id, None) for each in ranked]
