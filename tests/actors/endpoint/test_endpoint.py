"""The endpoint, by plain HTTP: what is said, what is recorded, what is refused."""

from __future__ import annotations

import json
import threading
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerBase

from stillhouse.actors.endpoint import KEY_IN_MODEL
from stillhouse.actors.envs.base import TextTokenizer
from stillhouse.protocol.messages import Segment
from tests.actors.endpoint.served import Reply, actor, call, chat, trained
from tests.actors.in_hand import STOP
from tests.patience import PATIENCE_S


def test_a_conversation_is_one_row_of_tokens(tokenizer: TextTokenizer) -> None:
    with actor(tokenizer, lambda prompt: [*tokenizer.encode(f"#{len(prompt)}").tolist(), STOP]) as one:
        episode = one.begin(0)
        first = chat(episode.endpoint, "12+30=").body
        said = first["choices"][0]["message"]
        assert said["role"] == "assistant" and said["content"].startswith("#")
        assert first["choices"][0]["finish_reason"] == "stop" and first["object"] == "chat.completion"
        assert first["usage"]["completion_tokens"] == len(tokenizer.encode(said["content"])) + 1
        chat(episode.endpoint, "12+30=", said["content"], "and now?")
        assert call(episode.endpoint, "v1/reward", {"reward": 0.5}).status == 200
        one.finish(episode)
        segments, ids, _, mask = one.hand.whole("train-0-0-0")
        assert all(segment.follows is None for segment in segments) and segments[-1].reward == 0.5
        (_, prompt), (_, second) = one.asked
        assert prompt == tokenizer.chat_prompt([{"role": "user", "content": "12+30="}]).tolist()
        assert ids.tolist()[: len(second)] == second, "what the engine read and wrote"
        assert ids[mask.astype(bool)].tolist().count(STOP) == 2
        counts = one.hand.rollouts.counts
        assert counts["env_endpoint_calls_total"] == 3 and counts["agent_forks_total"] == 0


def test_tokens_of_the_student_are_never_made_again_from_its_text(tokenizer: TextTokenizer) -> None:
    """The student says `a` `n`, whose text tokenises to one token."""
    odd = [*tokenizer.encode("a").tolist(), *tokenizer.encode("n").tolist()]
    with actor(tokenizer, lambda _: [*odd, STOP]) as one:
        episode = one.begin(0)
        said = chat(episode.endpoint, "hello").body["choices"][0]["message"]["content"]
        chat(episode.endpoint, "hello", said, "go on")
        one.finish(episode)
        first, second = (prompt for _, prompt in one.asked)
        assert second[: len(first) + 3] == [*first, *odd, STOP]
        assert (
            one.hand.rollouts.counts["agent_forks_total"] == one.hand.rollouts.counts["agent_drift_tokens_total"] == 0
        )


def test_a_rewritten_history_is_a_branch_and_a_summary_a_root(tokenizer: TextTokenizer) -> None:
    with actor(tokenizer) as one:
        episode = one.begin(0)
        said = chat(episode.endpoint, "hello").body["choices"][0]["message"]["content"]
        chat(episode.endpoint, "hello", said, "go on")
        chat(episode.endpoint, "hello", "I never said this", "go on")
        chat(episode.endpoint, {"role": "system", "content": "a summary"}, {"role": "user", "content": "go on"})
        one.finish(episode)
        counts = one.hand.rollouts.counts
        assert counts["agent_calls_total"] == 4 and counts["agent_dropped_responses_total"] == 0
        assert trained(one, 0).count(STOP) == 4


def test_an_equal_request_is_a_retry_and_counts_once(tokenizer: TextTokenizer) -> None:
    answers = iter([[10, STOP], [11, STOP], [12, STOP]])
    with actor(tokenizer, lambda _: next(answers)) as one:
        episode = one.begin(0)
        chat(episode.endpoint, "hello")
        said = chat(episode.endpoint, "hello").body["choices"][0]["message"]["content"]
        chat(episode.endpoint, "hello", said, "go on")
        one.finish(episode)
        assert trained(one, 0) == [11, STOP, 12, STOP]
        (dropped,) = one.hand.messages(Segment)[-1].dropped or (None,)
        assert one.hand.rollouts.counts["agent_dropped_responses_total"] == 1
        assert dropped is None or dropped.reason == "retried"


def test_several_choices_are_all_trained(tokenizer: TextTokenizer) -> None:
    answers = iter([[10, STOP], [11, STOP], [12, STOP]])
    with actor(tokenizer, lambda _: next(answers)) as one:
        episode = one.begin(0)
        body = chat(episode.endpoint, "hello", n=3, max_tokens=4).body
        assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
        one.finish(episode)
        assert sorted(trained(one, 0)) == sorted([10, STOP, 11, STOP, 12, STOP])


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_gives_the_request_up(tokenizer: TextTokenizer, stream: bool) -> None:
    wait = threading.Event()
    with actor(tokenizer, lambda _: [10, STOP] if wait.is_set() else None) as one:
        episode = one.begin(0)
        root = episode.endpoint.base_url.removeprefix("http://")
        host, _, path = root.partition("/")
        with socket_to(host) as connection:
            body = json.dumps({"messages": [{"role": "user", "content": "hello"}], "stream": stream}).encode()
            connection.sendall(post(f"/{path}/chat/completions", episode.endpoint.api_key, body))
            one.until(lambda: len(one.engine.requests) == 1)
        one.until(lambda: len(one.engine.aborted) == 1)
        wait.set()
        assert chat(episode.endpoint, "hello").status == 200
        one.finish(episode)
        assert trained(one, 0) == [10, STOP]


def test_a_stream_has_the_same_words(tokenizer: TextTokenizer) -> None:
    ids = [*tokenizer.encode("#42").tolist(), STOP]
    with actor(tokenizer, lambda _: ids) as one:
        episode = one.begin(0)
        text = chat(episode.endpoint, "hello", stream=True, stream_options={"include_usage": True}).text
        events = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
        assert events[-1] == "[DONE]"
        chunks = [json.loads(event) for event in events[:-1]]
        assert all(chunk["object"] == "chat.completion.chunk" for chunk in chunks)
        deltas = [choice for chunk in chunks for choice in chunk["choices"]]
        assert "".join(delta["delta"].get("content") or "" for delta in deltas) == "#42"
        assert deltas[-1]["finish_reason"] == "stop" and chunks[-1]["usage"]["completion_tokens"] == len(ids)
        chat(episode.endpoint, "hello", "#42", "go on")
        one.finish(episode)
        assert one.hand.rollouts.counts["agent_roots_total"] == 1


def test_the_route_of_renderers_and_verifiers(tokenizer: TextTokenizer) -> None:
    """The fields that `renderers.client.generate` reads, and by key alone, as its session id is its own."""
    with actor(tokenizer) as one:
        episode = one.begin(0)
        body = {
            "model": "student",
            "token_ids": [5, 6, 7],
            "sampling_params": {"stop_token_ids": [STOP], "logprobs": 1, "skip_special_tokens": False, "max_tokens": 9},
            "cache_salt": "x",
            "priority": 0,
        }
        root = episode.endpoint.base_url.partition("/sessions/")[0]
        for url in (f"{root}/inference/v1/generate", "inference/v1/generate"):
            reply = call(episode.endpoint, url, body, headers={"X-Session-ID": "trace-17"})
            assert reply.status == 200 and reply.body["prompt_token_ids"] == [5, 6, 7]
            (choice,) = reply.body["choices"]
            assert (choice["token_ids"], choice["finish_reason"]) == ([10, STOP], "stop")
            content = choice["logprobs"]["content"]
            assert content == [
                {"token": "token_id:10", "logprob": -0.5},
                {"token": f"token_id:{STOP}", "logprob": -0.5},
            ]
        (card,) = call(episode.endpoint, f"{root}/v1/models").body["data"]
        assert card["id"] == "student" and card["max_model_len"] == 100_000


def test_a_client_of_many_episodes_names_the_key_as_its_model(tokenizer: TextTokenizer) -> None:
    with actor(tokenizer, lambda prompt: [int(prompt[0]), STOP]) as one:
        episodes = [one.begin(0), one.begin(1)]
        (url,) = {episode.endpoint.shared_url for episode in episodes}
        root = url.removesuffix("/v1")

        def ask(model: str, token: int) -> Reply:
            body = {"model": model, "token_ids": [token]}
            return call(episodes[0].endpoint, f"{root}/inference/v1/generate", body, key=KEY_IN_MODEL)

        for number, episode in enumerate(episodes):
            assert ask(episode.endpoint.api_key, number + 5).body["choices"][0]["token_ids"] == [number + 5, STOP]
        assert ask("student", 7).code == ask("sk-guessed", 7).code == "invalid_api_key"
        for body in ({"token_ids": [7]}, b"{"):
            reply = call(episodes[0].endpoint, f"{root}/inference/v1/generate", body, key=KEY_IN_MODEL)
            assert (reply.status, reply.code) == (401, "invalid_api_key")
        other = call(episodes[0].endpoint, "v1/completions", {"model": episodes[1].endpoint.api_key}, key=KEY_IN_MODEL)
        assert other.code == "wrong_session"
        one.finish(*episodes)
        assert (trained(one, 0), trained(one, 1)) == ([5, STOP], [6, STOP])
        assert ask(episodes[0].endpoint.api_key, 7).code == "session_closed"


def test_completions_go_on_by_their_text(tokenizer: TextTokenizer) -> None:
    odd = [*tokenizer.encode("a").tolist(), *tokenizer.encode("n").tolist()]
    with actor(tokenizer, lambda _: odd) as one:
        episode = one.begin(0)
        first = call(episode.endpoint, "v1/completions", {"prompt": "12+30=", "logprobs": 1}).body["choices"][0]
        assert first["text"] == "an" and first["logprobs"]["token_logprobs"] == [-0.5, -0.5]
        call(episode.endpoint, "v1/completions", {"prompt": "12+30=an so"})
        call(episode.endpoint, "v1/completions", {"prompt": [4, 5]})
        one.finish(episode)
        before, after, ids = (prompt for _, prompt in one.asked)
        assert after == [*before, *odd, *tokenizer.encode(" so").tolist()] and ids == [4, 5]


def hermes(template: str | None) -> str:
    return "hermes"


def test_tool_calls_are_read_and_their_results_go_on(tokenizer: TextTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    written = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
    monkeypatch.setattr("stillhouse.actors.endpoint.session.tool_dialect", hermes)
    with actor(tokenizer, lambda _: [*tokenizer.encode(written).tolist(), STOP]) as one:
        episode = one.begin(0)
        tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
        choice = chat(episode.endpoint, "1+2=", tools=tools).body["choices"][0]
        assert choice["finish_reason"] == "tool_calls"
        (asked,) = choice["message"]["tool_calls"]
        assert asked["function"]["name"] == "add" and json.loads(asked["function"]["arguments"]) == {"a": 1, "b": 2}
        # Frameworks write the same call with other spaces, and ids of their own.
        again = {**asked, "id": "mine", "function": {"name": "add", "arguments": '{"b":2,"a":1}'}}
        messages: list[dict[str, Any]] = [
            {"role": "user", "content": [{"type": "text", "text": "1+2="}]},
            {"role": "assistant", "content": None, "tool_calls": [again]},
            {"role": "tool", "tool_call_id": "mine", "content": "3"},
        ]
        assert chat(episode.endpoint, *messages, tools=tools).status == 200
        one.finish(episode)
        (_, prompt), (_, second) = one.asked
        assert second[: len(prompt) + len(written)][: len(prompt)] == prompt
        assert one.hand.rollouts.counts["agent_roots_total"] == 1 and one.hand.rollouts.counts["agent_forks_total"] == 0


@pytest.mark.parametrize("other", ["minus", None])
def test_under_other_tools_a_conversation_begins_anew(
    tokenizer: TextTokenizer, hf_tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch, other: str | None
) -> None:
    """The student would else read the former tools. Its answer is rendered again, from its text."""
    listed = "{% if tools %}tools: {{ tools | tojson }}{% endif %}"
    monkeypatch.setattr(hf_tokenizer, "chat_template", listed + str(hf_tokenizer.chat_template))
    monkeypatch.setattr("stillhouse.actors.endpoint.session.tool_dialect", hermes)
    add, minus = (
        [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}]
        for name in ("add", "minus")
    )
    tools = {"tools": minus} if other else {}
    with actor(tokenizer, lambda _: [*tokenizer.encode("5").tolist(), STOP]) as one:
        episode = one.begin(0)
        said = chat(episode.endpoint, "1+2=", tools=add).body["choices"][0]["message"]["content"]
        assert chat(episode.endpoint, "1+2=", said, "and now?", **tools).status == 200
        one.finish(episode)
        second = tokenizer.decode(np.array(one.asked[1][1]))
        assert "add" in tokenizer.decode(np.array(one.asked[0][1]))
        assert "add" not in second and ("minus" in second) == bool(other)


def test_a_response_that_was_cut_ends_by_its_length_whatever_it_calls(
    tokenizer: TextTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have gone on with another call: who runs what there is must know."""
    ids = tokenizer.encode('<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>\n<tool_call>').tolist()
    monkeypatch.setattr("stillhouse.actors.endpoint.session.tool_dialect", hermes)
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    with actor(tokenizer, lambda _: None) as one:
        episode = one.begin(0)
        replies: list[Reply] = []
        asking = threading.Thread(target=lambda: replies.append(chat(episode.endpoint, "1+2=", tools=tools)))
        asking.start()
        one.until(lambda: bool(one.engine.requests))
        one.engine.say(next(iter(one.engine.requests)), *ids, end="length")
        asking.join(PATIENCE_S)
        (choice,) = replies[0].body["choices"]
        assert [called["function"]["name"] for called in choice["message"]["tool_calls"]] == ["add"]
        assert choice["finish_reason"] == "length"
        one.finish(episode)


def qwen_xml(template: str | None) -> str:
    return "qwen_xml"


def test_the_schemas_of_tools_say_what_their_arguments_are(
    tokenizer: TextTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = "<tool_call><function=pay><parameter=to>007</parameter><parameter=n>7</parameter></function></tool_call>"
    monkeypatch.setattr("stillhouse.actors.endpoint.session.tool_dialect", qwen_xml)
    properties = {"to": {"type": "string"}, "n": {"type": "integer"}}
    tools = [{"type": "function", "function": {"name": "pay", "parameters": {"properties": properties}}}]
    with actor(tokenizer, lambda _: [*tokenizer.encode(written).tolist(), STOP]) as one:
        episode = one.begin(0)
        (asked,) = chat(episode.endpoint, "1+2=", tools=tools).body["choices"][0]["message"]["tool_calls"]
        assert json.loads(asked["function"]["arguments"]) == {"to": "007", "n": 7}
        one.finish(episode)


def test_a_call_in_the_reasoning_is_a_thought(
    tokenizer: TextTokenizer, hf_tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = "{% if add_generation_prompt %}<think>\n{% endif %}"
    monkeypatch.setattr(hf_tokenizer, "chat_template", str(hf_tokenizer.chat_template) + opened)
    monkeypatch.setattr("stillhouse.actors.endpoint.session.tool_dialect", hermes)
    written = '<tool_call>{"name": "add"}</tool_call>? No.</think>5'
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    with actor(tokenizer, lambda _: [*tokenizer.encode(written).tolist(), STOP]) as one:
        episode = one.begin(0)
        (choice,) = chat(episode.endpoint, "1+2=", tools=tools).body["choices"]
        assert (choice["message"]["content"], choice["finish_reason"]) == (written, "stop")
        one.finish(episode)


def test_a_request_s_own_arguments_go_into_the_chat_template(
    tokenizer: TextTokenizer, hf_tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = "{% if add_generation_prompt and enable_thinking is defined and not enable_thinking %}=={% endif %}"
    monkeypatch.setattr(hf_tokenizer, "chat_template", str(hf_tokenizer.chat_template) + short)
    with actor(tokenizer) as one:
        episode = one.begin(0)
        plain = chat(episode.endpoint, "7", return_token_ids=True).body["prompt_token_ids"]
        given = {"enable_thinking": False}
        short_ids = chat(episode.endpoint, "7", return_token_ids=True, chat_template_kwargs=given).body
        assert tokenizer.shown(np.array(short_ids["prompt_token_ids"])) == tokenizer.shown(np.array(plain)) + "=="
        one.finish(episode)


def test_what_the_run_decides_is_overruled_and_counted(tokenizer: TextTokenizer) -> None:
    with actor(tokenizer) as one:
        episode = one.begin(0)
        assert chat(episode.endpoint, "hello", temperature=0.1, top_p=0.5, user="x").status == 200
        one.finish(episode)
        counts = one.hand.rollouts.counts
        assert counts["env_endpoint_overruled_temperature_total"] == counts["env_endpoint_overruled_top_p_total"] == 1


@pytest.mark.parametrize("how", ["end", "cancel"])
def test_an_episode_that_is_over_ends_what_is_under_way(tokenizer: TextTokenizer, how: str) -> None:
    with actor(tokenizer, lambda _: None) as one:
        episode = one.begin(0)
        replies: list[Any] = []
        waiting = threading.Thread(target=lambda: replies.append(chat(episode.endpoint, "hello")))
        waiting.start()
        one.until(lambda: len(one.engine.requests) == 1)
        if how == "cancel":
            one.cancel(0)  # its thread blocks, and does not notice
        else:
            episode.end()
        waiting.join(60)
        assert [(reply.status, reply.code) for reply in replies] == [(410, "session_closed")]
        assert chat(episode.endpoint, "hello").code == "session_closed"


def test_used_up_tokens_are_an_error_that_no_sdk_repeats(tokenizer: TextTokenizer) -> None:
    with actor(tokenizer) as one:
        episode = one.begin(0, max_new_tokens=3)
        assert chat(episode.endpoint, "hello").status == 200
        assert chat(episode.endpoint, "again").status == 200
        reply = chat(episode.endpoint, "and again")
        assert (reply.status, reply.code) == (400, "context_length_exceeded")
        assert "max_new_tokens" in reply.body["error"]["message"]
        one.finish(episode)
        assert trained(one, 0) == [10, STOP, 10]


BAD: list[tuple[str, Any, int, str]] = [
    ("v1/chat/completions", b"{not json", 400, "invalid_json"),
    ("v1/chat/completions", b"[" * 100_000, 400, "invalid_request"),
    ("v1/chat/completions", [1], 400, "invalid_request"),
    ("v1/chat/completions", {}, 400, "invalid_request"),
    ("v1/chat/completions", {"messages": []}, 400, "invalid_request"),
    ("v1/chat/completions", {"messages": [{"role": "king", "content": "x"}]}, 400, "invalid_request"),
    ("v1/chat/completions", {"messages": [{"role": "user", "content": 5}]}, 400, "invalid_request"),
    ("v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "unsupported"),
    ("v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "n": 0}, 400, "invalid_request"),
    ("v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "n": 10**9}, 400, "invalid_request"),
    ("v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "stop": "\n"}, 400, "unsupported"),
    ("v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "max_tokens": -1}, 400, "invalid_request"),
    ("v1/completions", {"prompt": ""}, 400, "invalid_request"),
    ("v1/completions", {"prompt": ["a", "b"]}, 400, "unsupported"),
    ("v1/completions", {"prompt": [999_999]}, 400, "invalid_request"),
    ("v1/completions", {"prompt": "x", "echo": True}, 400, "unsupported"),
    ("inference/v1/generate", {"token_ids": []}, 400, "invalid_request"),
    ("inference/v1/generate", {"token_ids": [-1]}, 400, "invalid_request"),
    ("v1/reward", {"reward": "much"}, 400, "invalid_request"),
    ("v1/embeddings", {}, 404, "not_found"),
]


def test_bad_requests_get_typed_errors_and_change_nothing(tokenizer: TextTokenizer) -> None:
    with actor(tokenizer) as one:
        episode, other = one.begin(0), one.begin(1)
        for path, body, status, code in BAD:
            reply = call(episode.endpoint, path, body if isinstance(body, bytes) else json.dumps(body).encode())
            assert (reply.status, reply.code) == (status, code), (path, body, reply)
            assert reply.body["error"]["message"] and reply.body["error"]["type"] == "invalid_request_error"
        assert call(episode.endpoint, "v1/models", key="").code == "invalid_api_key"
        assert call(episode.endpoint, "v1/models", key="sk-guessed").code == "invalid_api_key"
        assert call(episode.endpoint, "v1/models", key=other.endpoint.api_key).code == "wrong_session"
        root = episode.endpoint.base_url.partition("/sessions/")[0]
        assert call(episode.endpoint, f"{root}/sessions/nobody/v1/models").code == "wrong_session"
        theirs = other.endpoint.base_url.split("/")[-2]
        assert call(episode.endpoint, f"{root}/v1/models", headers={"X-Session-ID": theirs}).code == "wrong_session"
        assert one.engine.requests == {} and one.asked == []
        assert chat(episode.endpoint, "hello").status == chat(other.endpoint, "hello").status == 200
        one.finish(episode, other)
        assert trained(one, 0) == trained(one, 1) == [10, STOP]
        refused = sum(v for k, v in one.hand.rollouts.counts.items() if k.startswith("env_endpoint_refused_"))
        assert refused == len(BAD) - 1, "all but the unknown route are counted with their episode"


def test_a_huge_body_is_refused(tokenizer: TextTokenizer) -> None:
    with actor(tokenizer) as one:
        episode = one.begin(0)
        host, _, path = episode.endpoint.base_url.removeprefix("http://").partition("/")
        with socket_to(host) as connection:
            head = post(f"/{path}/chat/completions", episode.endpoint.api_key, b"", length=1 << 40)
            connection.sendall(head + b"x" * 1000)
            assert b"413" in connection.recv(200).split(b"\r\n")[0]
        assert chat(episode.endpoint, "hello").status == 200


@pytest.mark.slow
def test_a_thousand_connections_of_many_episodes(tokenizer: TextTokenizer) -> None:
    """Nothing is lost, and nothing goes from one episode to another: what each client was told is what its episode
    trains."""

    def answer(prompt: Any) -> list[int]:
        return [int(prompt[-1]) % 200, int(prompt[-2]) % 200, STOP]

    with actor(tokenizer, answer) as one:
        episodes = [one.begin(i, env="polite") for i in range(20)]
        told: list[list[list[int]]] = [[] for _ in episodes]
        guard = threading.Lock()

        def client(at: int) -> None:
            which = at % len(episodes)
            body = {"token_ids": [which + 1, at % 300, at // 300], "sampling_params": {"max_tokens": 3}}
            reply = call(episodes[which].endpoint, "inference/v1/generate", body)
            with guard:
                told[which].append(reply.body["choices"][0]["token_ids"])

        idle = [socket_to(episodes[0].endpoint.base_url.split("/")[2]) for _ in range(500)]
        for each in idle[:250]:
            each.sendall(b"POST /sessions/x/v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Le")
        threads = [threading.Thread(target=client, args=(at,)) for at in range(1000)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(300)
        for each in idle:
            each.close()
        one.finish(*episodes)
        assert [len(each) for each in told] == [50] * 20
        for number, each in enumerate(told):
            assert sorted(trained(one, number)) == sorted(token for ids in each for token in ids)


def socket_to(host: str) -> Any:
    import socket

    name, _, port = host.partition(":")
    return socket.create_connection((name, int(port)), timeout=60)


def post(path: str, key: str, body: bytes, *, length: int | None = None) -> bytes:
    n = len(body) if length is None else length
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\nContent-Length: {n}\r\n\r\n"
    return head.encode() + body
