"""Stubs of completions APIs, as strict as their sources: vLLM's `prompt_logprobs`, and `echo` as SGLang, Fireworks and
Together have it. They score with a real model, and can be told to answer wrongly. tests/vllm/test_api_scorer.py
compares vLLM's with a real server, answers and refusals."""

from __future__ import annotations

import functools
import json
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np

from stillhouse.builtin import TEACHER_DIR
from stillhouse.engines.api.replies import NO_TEXT
from stillhouse.engines.base import ScoreRequest, ScoreResult
from stillhouse.engines.config import ScorerSettings
from stillhouse.engines.torch.scorer import TorchScorer
from stillhouse.models.tokenizer_file import FileTokenizer
from stillhouse.protocol.payloads.kind import ScoreOptions

KEY: Final = "sk-a-secret-key"
Kind = Literal["vllm", "sglang", "fireworks", "together"]
Reply = dict[str, Any]
MOST_LIKELIEST: Final = 20
"""vLLM's --max-logprobs."""
WINDOW: Final = 1024
"""Most tokens of a text and its answer, where an API says it (vLLM's --max-model-len)."""


_one_at_a_time = threading.Lock()


@functools.cache
def _embedded(folder: Path) -> TorchScorer:
    """It keeps nothing of what it has scored."""
    return TorchScorer.load(folder, ScorerSettings(device="cpu", prefix_cache_mb=0))


def embedded_score(folder: Path, request: ScoreRequest, options: ScoreOptions) -> ScoreResult:
    """By a teacher in this process."""
    with _one_at_a_time:
        return _embedded(folder).score([request], options)[0]


@dataclass
class Api:
    """What it is told to do, and what it has seen."""

    kind: Kind
    folder: Path = TEACHER_DIR
    key: str = ""
    wrong: Callable[[Reply], Reply] | None = None
    """Changes each answer."""
    refusals: list[tuple[int, dict[str, str]]] = field(default_factory=list[tuple[int, dict[str, str]]])
    """Statuses and headers of the next requests."""
    slow_s: list[float] = field(default_factory=list[float])
    """Pauses before the next answers."""
    adds_bos: int | None = None
    """An id that it puts before a text."""
    asked: list[Reply] = field(default_factory=list[Reply])
    at_once: int = 0
    most_at_once: int = 0
    url: str = ""

    def __post_init__(self) -> None:
        self.lock = threading.Lock()
        self.tokenizer = FileTokenizer(self.folder)

    def logprobs(self, ids: list[int], top_k: int) -> tuple[list[float], list[dict[int, float]]]:
        """Of all tokens but the first."""
        result = embedded_score(self.folder, ScoreRequest(np.array(ids, np.int32), 1), ScoreOptions(top_k=top_k))
        values = [float(value) for value in result.logprobs]
        if result.top_ids is None or result.top_logprobs is None:
            return values, [{} for _ in values]
        pairs = zip(result.top_ids.tolist(), result.top_logprobs.tolist(), strict=True)
        return values, [dict(zip(top, of, strict=True)) for top, of in pairs]

    def complete(self, body: Reply) -> tuple[int, Reply]:
        prompt, text = body["prompt"], ""
        if isinstance(prompt, str):
            text = prompt
            told = self.kind == "vllm" and body.get("add_special_tokens") is False
            own = [] if self.adds_bos is None or told else [self.adds_bos]
            ids = [*own, *self.tokenizer.encode(prompt, add_special_tokens=False)]
        elif self.kind == "together":
            return 400, {"error": {"message": "prompt: expected a string"}}
        else:
            ids = list(prompt)
        if body.get("max_tokens") != 1:
            return 400, {"error": {"message": "max_tokens must be at least 1"}}
        named = [self._text(i, ids[:at]) for at, i in enumerate(ids)]
        usage = {"prompt_tokens": len(ids), "completion_tokens": 1, "total_tokens": len(ids) + 1}
        choice: Reply = {"index": 0, "text": "!", "finish_reason": "length", "logprobs": None}
        reply: Reply = {"id": "cmpl-1", "object": "text_completion", "choices": [choice], "usage": usage}
        if self.kind == "vllm":
            if body.get("return_token_ids"):
                choice |= {"prompt_token_ids": ids, "token_ids": [1]}
            top_k = body.get("prompt_logprobs")
            if top_k is None and body.get("echo"):
                top_k = body.get("logprobs")
            if (refusal := self._refusal(ids, top_k, body.get("logprobs"))) is not None:
                return refusal
            if top_k is not None:
                values, tops = self.logprobs(ids, top_k)
                before = [ids[:at] for at in range(1, len(ids))]
                choice["prompt_logprobs"] = [None, *map(self._entry, ids[1:], before, values, tops)]
            if not body.get("echo"):
                return 200, reply
        if not (body.get("echo") and body.get("logprobs")):
            return 200, reply
        values, _ = self.logprobs(ids, 0)
        lists: Reply = {"tokens": named, "token_logprobs": [None, *values], "text_offset": [-1] * len(ids)}
        answer = {"tokens": ["!"], "token_logprobs": [-0.5], "text_offset": [-1]}
        if self.kind == "together":
            lists["token_ids"] = ids
            reply["prompt"] = [{"text": text, "logprobs": lists}]
            choice["logprobs"] = {**answer, "token_ids": [1]}
            return 200, reply
        choice["logprobs"] = {name: [*lists[name], *answer[name]] for name in answer}
        if self.kind == "fireworks":
            if body.get("return_token_ids"):
                return 400, {"error": {"message": "Extra inputs are not permitted: return_token_ids"}}
            choice["logprobs"]["token_ids"] = [*ids, 1]
        if self.kind == "sglang" and body.get("return_token_ids"):
            choice["prompt_token_ids"] = ids
        return 200, reply

    def _text(self, token: int, before: list[int]) -> str:
        """A token's text. vLLM has the text of a character of several tokens with the last one
        (`_correct_decoded_token` in vllm/v1/engine/logprobs.py)."""
        text = self.tokenizer.decode([token], skip_special_tokens=False)
        if self.kind != "vllm" or not text.endswith(NO_TEXT):
            return text
        for n in range(1, min(4, len(before)) + 1):
            context = before[-n:]
            whole = self.tokenizer.decode([*context, token], skip_special_tokens=False)
            if whole.endswith(NO_TEXT):
                continue
            while context and self.tokenizer.decode(context[-1:], skip_special_tokens=False).endswith(NO_TEXT):
                context.pop()
            return whole[len(self.tokenizer.decode(context, skip_special_tokens=False)) :]
        return ""

    def _refusal(self, ids: list[int], top_k: int | None, sampled: int | None) -> tuple[int, Reply] | None:
        """What vLLM refuses."""
        if outside := [i for i in ids if i >= len(self.tokenizer.get_vocab())]:
            return refused(f"Token id {outside[0]} is out of vocabulary")
        if len(ids) > WINDOW:
            return refused(
                f"This model's maximum context length is {WINDOW} tokens. However, your prompt contains {len(ids)} "
                "input tokens, which exceeds this limit even without any output tokens. Please reduce the length of "
                f"the input prompt. (parameter=input_tokens, value={len(ids)})",
                "input_tokens",
            )
        if len(ids) == WINDOW:
            return refused(
                "max_tokens must be at least 1, got 0. (parameter=max_tokens, value=0)",
                "max_tokens",
            )
        for kind, name, n in (("sample", "logprobs", sampled), ("prompt", "prompt_logprobs", top_k)):
            if n is not None and n > MOST_LIKELIEST:
                return refused(
                    f"Requested {kind} logprobs of {n}, which is greater than max allowed: {MOST_LIKELIEST} "
                    f"(parameter={name}, value={n})",
                    name,
                )
        return None

    def _entry(self, token: int, before: list[int], value: float, top: dict[int, float]) -> Reply:
        """One map of vLLM: the token itself, and the likeliest ones."""
        ranked = {i: (logprob, rank) for rank, (i, logprob) in enumerate(top.items(), 1)}
        entries = {token: (value, len(ranked) + 5)} | ranked
        return {
            str(i): {"logprob": p, "rank": r, "decoded_token": self._text(i, before)} for i, (p, r) in entries.items()
        }


def refused(message: str, param: str | None = None, status: int = 400) -> tuple[int, Reply]:
    """As vLLM says it."""
    kind = {400: "BadRequestError", 404: "NotFoundError"}[status]
    return status, {"error": {"message": message, "type": kind, "param": param, "code": status}}


@contextmanager
def serving(api: Api) -> Generator[Api]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: Any) -> None:
            pass

        def do_GET(self) -> None:
            self._answer(200, {"data": [{"id": "a-model", "max_model_len": WINDOW}]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if api.key and self.headers.get("Authorization") != f"Bearer {api.key}":
                self._answer(401, {"error": {"message": f"wrong key: {self.headers.get('Authorization')}"}})
                return
            with api.lock:
                api.asked.append(body)
                api.at_once += 1
                api.most_at_once = max(api.most_at_once, api.at_once)
                refusal = api.refusals.pop(0) if api.refusals else None
                pause_s = api.slow_s.pop(0) if api.slow_s else 0.0
            time.sleep(pause_s)
            if refusal is not None:
                self._answer(refusal[0], {"error": {"message": f"no, {api.key}"}}, refusal[1])
            elif self.path != "/v1/completions" or body["model"] != "a-model":
                message = f"The model `{body['model']}` does not exist. Valid aliases: a-model."
                self._answer(*refused(message, "model", 404))
            else:
                status, reply = api.complete(body)
                self._answer(status, api.wrong(reply) if api.wrong is not None and status == 200 else reply)
            with api.lock:
                api.at_once -= 1

        def _answer(self, status: int, reply: Reply, headers: dict[str, str] | None = None) -> None:
            text = json.dumps(reply).encode()
            self.send_response(status)
            for name, value in {"Content-Length": str(len(text)), **(headers or {})}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(text)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    api.url = f"http://127.0.0.1:{server.server_port}/v1"
    try:
        yield api
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
