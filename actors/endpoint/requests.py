"""The requests that the endpoint takes, checked, and their refusals in OpenAI's format.

Fields that are not listed are ignored, as other servers do. Those that would change how the student samples are the
run's to decide: they are ignored as well, and counted (`OVERRULED`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal, TypeAlias, TypeVar

import msgspec
from msgspec import Meta

from stillhouse.models.messages import parsed_arguments

Code: TypeAlias = Literal[
    "invalid_json",
    "invalid_request",
    "unsupported",
    "context_length_exceeded",
    "invalid_api_key",
    "wrong_session",
    "not_found",
    "session_closed",
    "request_too_large",
    "timeout",
    "too_many_connections",
    "internal_error",
]
_STATUS: Final[dict[Code, int]] = {
    "invalid_json": 400,
    "invalid_request": 400,
    "unsupported": 400,
    "context_length_exceeded": 400,
    "invalid_api_key": 401,
    "wrong_session": 403,
    "not_found": 404,
    "session_closed": 410,
    "request_too_large": 413,
    "timeout": 408,
    "too_many_connections": 503,
    "internal_error": 500,
}
OVERRULED: Final = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "response_format",
)
"""Parameters that the run's own sampling overrules: training relies on the distribution that was sampled."""
MAX_CHOICES: Final = 64
SMALL_BYTES: Final = 64 << 10
"""A request of any context may have so many."""
BYTES_PER_TOKEN: Final = 64
"""Most bytes of a request per token of its context. Text has about 4, and 12 where JSON escapes every character."""


class Refusal(Exception):
    """A request that is refused."""

    def __init__(self, code: Code, message: str) -> None:
        super().__init__(message)
        self.code: Code = code
        self.status = _STATUS[code]

    @property
    def body(self) -> dict[str, Any]:
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {"error": {"message": str(self), "type": kind, "param": None, "code": self.code}}


def session_closed() -> Refusal:
    """What a request hears whose episode has ended."""
    return Refusal("session_closed", "the episode of this session has ended")


Count: TypeAlias = Annotated[int, Meta(ge=1)]
Choices: TypeAlias = Annotated[int, Meta(ge=1, le=MAX_CHOICES)]
Stop: TypeAlias = str | list[str] | None


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = None


class ChatRequest(msgspec.Struct, frozen=True):
    """POST /v1/chat/completions"""

    messages: Annotated[list[dict[str, Any]], Meta(min_length=1)]
    n: Choices | None = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    stop: Stop = None
    stop_token_ids: list[int] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logprobs: bool | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    chat_template_kwargs: dict[str, Any] | None = None
    """As vLLM and SGLang have it: over those of the prompt's row."""
    return_token_ids: bool | None = None


class CompletionRequest(msgspec.Struct, frozen=True):
    """POST /v1/completions"""

    prompt: str | list[int | str | list[int]]
    """Text, token ids, or a list of one of these."""
    n: Choices | None = None
    max_tokens: Count | None = None
    stop: Stop = None
    stop_token_ids: list[int] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logprobs: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    return_token_ids: bool | None = None


class GenerateSampling(msgspec.Struct, frozen=True):
    n: Choices | None = None
    max_tokens: Count | None = None
    stop: Stop = None
    stop_token_ids: list[int] | None = None


class GenerateRequest(msgspec.Struct, frozen=True):
    """POST /inference/v1/generate, vLLM's route for token ids, which the client of `renderers` and verifiers uses."""

    token_ids: Annotated[list[int], Meta(min_length=1)]
    sampling_params: GenerateSampling = msgspec.field(default_factory=GenerateSampling)
    stream: bool | None = None
    features: Any = None


class RewardRequest(msgspec.Struct, frozen=True):
    """POST /v1/reward"""

    reward: float


RequestT = TypeVar("RequestT")


_Overruled: Any = msgspec.defstruct(
    "_Overruled", [(name, msgspec.Raw, msgspec.Raw()) for name in OVERRULED], frozen=True
)
_Places: Any = msgspec.defstruct(
    "_Places", [("sampling_params", _Overruled, _Overruled())], bases=(_Overruled,), frozen=True
)


def decode(body: bytes, kind: type[RequestT]) -> tuple[RequestT, list[str]]:
    """A request, and the names of the sampling parameters in it that the run overrules. Fields that are not listed cost
    no memory. Raises Refusal."""
    try:
        request = msgspec.json.decode(body, type=kind)
        places = msgspec.json.decode(body, type=_Places if kind is GenerateRequest else _Overruled)
    except msgspec.ValidationError as error:
        raise Refusal("invalid_request", str(error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Refusal("invalid_json", f"the body is not JSON: {error}") from error
    found = [places, *([places.sampling_params] if kind is GenerateRequest else [])]
    named = {name for place in found for name in OVERRULED if bytes(getattr(place, name)) not in (b"", b"null")}
    return request, sorted(named)


def expect_fitting(body: bytes, max_context_tokens: int) -> None:
    """Raise Refusal for a body that is many times what a context of so many tokens can hold: reading it would hold up
    all episodes. Brackets in texts count as well, which makes no difference to text that fits."""
    most = SMALL_BYTES + BYTES_PER_TOKEN * max_context_tokens
    if len(body) > most:
        raise Refusal(
            "request_too_large",
            f"got {len(body)} bytes, expected at most {most}: {BYTES_PER_TOKEN} for each token of the context",
        )
    if len(body) > SMALL_BYTES and (n := body.count(b"{") + body.count(b"[")) > max_context_tokens:
        raise Refusal("request_too_large", f"got {n} objects and lists, expected one per token: {max_context_tokens}")


class _Named(msgspec.Struct, frozen=True):
    model: str


def model_of(body: bytes) -> str:
    """The model that a request names. Raises Refusal."""
    try:
        return msgspec.json.decode(body, type=_Named).model
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Refusal("invalid_api_key", f"the key is to be found in the request's model: {error}") from error


Message: TypeAlias = dict[str, Any]


def canonical(message: Mapping[str, Any]) -> Message:
    """A message in one form: text as one string, arguments of tool calls parsed, no empty fields. Two messages that say
    the same are equal, whatever SDK wrote them. Raises Refusal."""
    role = message.get("role")
    if role not in ("system", "developer", "user", "assistant", "tool"):
        raise Refusal("invalid_request", f"messages: got the role {role!r}, expected system, user, assistant or tool")
    plain: Message = {"role": "system" if role == "developer" else role, "content": _text(message.get("content"))}
    if calls := message.get("tool_calls"):
        if not isinstance(calls, list) or role != "assistant":
            raise Refusal("invalid_request", "messages: tool_calls is a list of calls in an assistant's message")
        plain["tool_calls"] = [_call(call) for call in calls]  # pyright: ignore[reportUnknownVariableType]
    for name in ("tool_call_id", "name", "reasoning_content"):
        if message.get(name):
            plain[name] = str(message[name])
    return plain


def _text(content: object) -> str:
    match content:
        case None:
            return ""
        case str():
            return content
        case list():
            return "".join(_part(part) for part in content)  # pyright: ignore[reportUnknownVariableType]
        case _:
            raise Refusal("invalid_request", f"messages: got content of type {type(content).__name__}, expected text")


def _part(part: object) -> str:
    match part:
        case str():
            return part
        case {"type": "text" | "input_text" | "output_text", "text": str(text)}:
            return text
        case {"type": kind}:
            raise Refusal(
                "unsupported", f"messages: got a part of type {kind!r}, expected text: the student only reads text"
            )
        case _:
            raise Refusal("invalid_request", "messages: got a part of content without a type")


def _call(call: object) -> Message:
    match call:
        case {"function": {"name": str(name), **function}, **others}:
            arguments = parsed_arguments(function.get("arguments") or {})
            plain: Message = {"type": "function", "function": {"name": name, "arguments": arguments}}
            return plain | ({"id": str(others["id"])} if others.get("id") else {})
        case _:
            raise Refusal("invalid_request", "messages: got a tool call without a function's name")


def stops(given: Stop) -> Sequence[str]:
    return [given] if isinstance(given, str) else given or []
