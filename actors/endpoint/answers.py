"""Responses of the student in the forms of OpenAI's API, and of vLLM's route for token ids."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeAlias

from stillhouse.actors.agent import Generation
from stillhouse.actors.endpoint import MODEL
from stillhouse.actors.endpoint.session import Answer

Body: TypeAlias = dict[str, Any]
ShowLogprobs: TypeAlias = Callable[[Generation], Body]


def chat_body(answer: Answer, *, show: ShowLogprobs | None, token_ids: bool) -> Body:
    """`show`: log-probs, if they are wanted. `token_ids`: give those of the prompt and of each choice."""
    choices = [
        {"index": i, "message": message, "finish_reason": reason, "logprobs": show(one) if show else None}
        for i, (one, message, reason) in enumerate(
            zip(answer.choices, answer.messages, answer.finish_reasons, strict=True)
        )
    ]
    return _with_usage(_envelope(answer, "chat.completion", choices), answer, token_ids=token_ids)


def chat_chunks(answer: Answer, *, show: ShowLogprobs | None) -> list[Body]:
    """Two per choice: what it says, and why it ends."""
    made: list[Body] = []
    for i, (one, message, reason) in enumerate(
        zip(answer.choices, answer.messages, answer.finish_reasons, strict=True)
    ):
        delta = dict(message)
        if calls := delta.get("tool_calls"):
            delta["tool_calls"] = [{"index": at, **call} for at, call in enumerate(calls)]
        made.append({"index": i, "delta": delta, "finish_reason": None, "logprobs": show(one) if show else None})
        made.append({"index": i, "delta": {}, "finish_reason": reason, "logprobs": None})
    return [_envelope(answer, "chat.completion.chunk", [one]) for one in made]


def chat_logprobs(generation: Generation, shown: Callable[[int], str]) -> Body:
    """`shown`: a token's text."""
    content: list[Body] = []
    for token, value in zip(generation.token_ids, generation.logprobs, strict=True):
        text = shown(token)
        content.append({"token": text, "logprob": float(value), "bytes": list(text.encode()), "top_logprobs": []})
    return {"content": content, "refusal": None}


def completion_body(answer: Answer, *, shown: Callable[[int], str] | None, token_ids: bool) -> Body:
    """`shown`: a token's text, if log-probs are wanted."""
    choices = _completion_choices(answer)
    if shown is not None:
        for choice, one in zip(choices, answer.choices, strict=True):
            logprobs = [float(value) for value in one.logprobs]
            tokens = [shown(token) for token in one.token_ids]
            choice["logprobs"] = {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": None}
    return _with_usage(_envelope(answer, "text_completion", choices), answer, token_ids=token_ids)


def completion_chunks(answer: Answer) -> list[Body]:
    return [_envelope(answer, "text_completion", [one]) for one in _completion_choices(answer)]


def generate_body(answer: Answer) -> Body:
    """As vLLM's /inference/v1/generate answers."""
    choices: list[Body] = []
    for i, one in enumerate(answer.choices):
        ids = one.token_ids.tolist()
        content = [
            {"token": f"token_id:{token}", "logprob": float(value)}
            for token, value in zip(ids, one.logprobs, strict=True)
        ]
        choices.append(
            {"index": i, "token_ids": ids, "finish_reason": one.finish_reason, "logprobs": {"content": content}}
        )
    return {
        "request_id": f"gen-{answer.id}",
        "prompt_token_ids": answer.prompt_ids.tolist(),
        "choices": choices,
        "usage": answer.usage,
    }


def _completion_choices(answer: Answer) -> list[Body]:
    return [
        {"index": i, "text": one.text, "finish_reason": reason, "logprobs": None}
        for i, (one, reason) in enumerate(zip(answer.choices, answer.finish_reasons, strict=True))
    ]


def _envelope(
    answer: Answer, kind: Literal["chat.completion", "chat.completion.chunk", "text_completion"], choices: list[Body]
) -> Body:
    prefix = "cmpl" if kind == "text_completion" else "chatcmpl"
    return {
        "id": f"{prefix}-{answer.id}",
        "object": kind,
        "created": answer.created_s,
        "model": MODEL,
        "choices": choices,
    }


def _with_usage(body: Body, answer: Answer, *, token_ids: bool) -> Body:
    body["usage"] = answer.usage
    if token_ids:
        body["prompt_token_ids"] = answer.prompt_ids.tolist()
        for choice, one in zip(body["choices"], answer.choices, strict=True):
            choice["token_ids"] = one.token_ids.tolist()
    return body
