"""vLLM's replies, and the start of its servers, without a server."""

from __future__ import annotations

import json
from typing import Any

import pytest

from stillhouse.engines.config import ServerConfig, WorkerSettings
from stillhouse.engines.http.stream import Labels, StreamError, TokenStream
from stillhouse.engines.registry import find_engine
from stillhouse.engines.vllm.replies import read_piece
from stillhouse.engines.vllm.servers import VLLMServers
from stillhouse.protocol.messages import TopIdsWanted, VersionSpan, WeightVersion

V1 = WeightVersion(0, 1)


def piece(ids: list[int], logprobs: list[float], **more: Any) -> bytes:
    content = [
        {"token_id": token, "logprob": logprob, "rank": 1, "top_logprobs": more.pop("top", [])}
        for token, logprob in zip(ids, logprobs, strict=True)
    ]
    return json.dumps({"choices": [{"index": 0, "token_ids": ids, "logprobs": {"content": content}, **more}]}).encode()


def stream(top_ids: TopIdsWanted | None = None) -> TokenStream:
    return TokenStream(incremental=True, floor=V1, labels=Labels("run"), top_ids=top_ids)


def test_tokens_leave_at_once_and_the_last_piece_confirms_their_version() -> None:
    reader = stream()
    first = reader.take(read_piece(piece([5, 6], [-1.0, -2.0]), "run/0.1", 0))
    assert (first.ids, first.logprobs, first.spans) == ([5, 6], [-1.0, -2.0], [VersionSpan(V1, 0, 2)])
    spans = [{"version": "run/0.1", "start": 0, "end": 3}]
    last = reader.take(read_piece(piece([7], [-0.5], finish_reason="stop", weight_versions=spans), "run/0.1", 0))
    assert (last.ids, last.spans) == ([7], [VersionSpan(V1, 0, 1)])
    assert reader.finish is not None and reader.finish.type == "stop"


def test_a_version_that_the_last_piece_contradicts_is_an_error() -> None:
    reader = stream()
    reader.take(read_piece(piece([5], [-1.0]), "run/0.1", 0))
    spans = [{"version": "run/0.2", "start": 0, "end": 1}]
    with pytest.raises(StreamError, match="were given as sampled under weights"):
        reader.take(read_piece(piece([], [], finish_reason="abort", weight_versions=spans), "run/0.1", 0))


def test_the_likeliest_tokens_leave_out_a_sampled_one_that_is_not_among_them() -> None:
    top = [{"token_id": 9, "logprob": -3.0}, {"token_id": 1, "logprob": -0.5}, {"token_id": 2, "logprob": -1.5}]
    taken = stream(TopIdsWanted(k=2, mass=1.0)).take(read_piece(piece([9], [-3.0], top=top), "run/0.1", 2))
    assert [ids.tolist() for ids in taken.top_ids] == [[1, 2]]


def test_an_error_in_a_stream_is_said() -> None:
    with pytest.raises(StreamError, match="out of memory"):
        read_piece(b'{"error": {"message": "out of memory"}}', "run/0.1", 0)


@pytest.mark.parametrize(
    ("args", "wrong"),
    [
        (("-tp", "2"), "server.tp is 1"),
        (("--data-parallel-size=2",), "expected 1"),
        (("--logprobs-mode", "raw_logprobs"), "expected processed_logprobs"),
        (("--quantization", "fp8"), "quantized students"),
    ],
)
def test_arguments_that_would_break_a_student_are_refused(args: tuple[str, ...], wrong: str) -> None:
    server = ServerConfig(device="cpu", args=args)
    (mistake,) = VLLMServers().contradictions("actor", "actor", server)
    assert wrong in mistake
    assert not [*VLLMServers().contradictions("actor", "actor", ServerConfig(device="cpu"))]


def test_running_servers_are_refused_and_the_key_is_on_no_command_line() -> None:
    servers = VLLMServers()
    _, mistakes = servers.ask("actor", "actor", WorkerSettings(engine="vllm", urls=("http://127.0.0.1:1",)), "")
    assert "only where the launcher starts them" in mistakes[0]
    launch = servers.launch(ServerConfig(device="cpu"))
    command = servers.command(launch, "model", "127.0.0.1", 1, "secret", launch.python)
    assert "secret" not in " ".join(map(str, command.words)) and b"secret" in command.stdin


def test_vllm_is_found_by_its_name_and_gets_no_weights_by_ipc() -> None:
    servers = find_engine("vllm").servers
    assert servers is not None and not servers.takes_ipc
