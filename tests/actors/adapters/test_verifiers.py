"""Environments of verifiers behind its own env server, which runs in a Python environment of its own."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import msgpack
import pytest
import zmq

from stillhouse.actors.config import EnvConfig
from stillhouse.actors.envs.base import TextTokenizer
from stillhouse.actors.envs.registry import check_options
from stillhouse.engines.base import Int32s
from stillhouse.protocol.messages import Sampling
from tests.actors.adapters.openenv_server import free_port
from tests.actors.adapters.verifiers_server import MADE_BY, PYTHON, ROOT, Served, packed, serving
from tests.actors.endpoint.served import Actor, actor, trained
from tests.actors.in_hand import STOP, ticket
from tests.patience import PATIENCE_S

served = pytest.mark.skipif(not PYTHON.exists(), reason=MADE_BY)
STUDENT = str(ROOT / "builtin" / "data" / "student")
ODD = '''
import json, os
import verifiers.v1 as vf
from verifiers_sums import Chat, ChatConfig, Sums, SumsEnv, SumsEnvConfig, SumsTask

class OddTask(SumsTask):
    """Writes down what verifiers itself would train; breaks where the answer says so."""
    async def finalize(self, trace, runtime):
        if self.data.answer == "breaks":
            raise RuntimeError("no such answer")
        told = [[branch.token_ids, branch.sampled_mask, branch.logprobs] for branch in trace.branches]
        with open(os.path.join(os.path.dirname(__file__), self.data.name), "w") as file:
            json.dump(told, file)

class Odd(vf.Taskset[OddTask, vf.TasksetConfig]):
    def load(self):
        return []

__all__ = ["Chat", "ChatConfig", "Odd", "OddTask", "SumsEnv", "SumsEnvConfig"]
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where ODD is, and where it writes."""
    folder = tmp_path_factory.mktemp("odd")
    (folder / "odd_sums.py").write_text(ODD)
    return folder


@pytest.fixture(scope="module")
def odd(folder: Path) -> Iterator[Served]:
    with serving("odd_sums", "--env", '{"tries": 3}', modules=folder) as server:
        yield server


def env_of(address: str, **options: Any) -> EnvConfig:
    options = {"server": address, "tokenizer": STUDENT} | options
    return EnvConfig(name="verifiers", options=options, max_turns=8, step_timeout_s=PATIENCE_S)


def row(answer: str, name: str = "told") -> bytes:
    return json.dumps({"prompt": "12+30=", "task": {"prompt": "12+30=", "answer": answer, "name": name}}).encode()


def saying(*answers: list[int]) -> Callable[[Int32s], list[int] | None]:
    """These responses, in turn."""
    left = list(answers)
    return lambda _: left.pop(0)


def run(one: Actor, number: int, data: bytes) -> None:
    one.add(ticket(number, env="sums", row=data))
    one.until_gone()


Branch = tuple[list[int], list[bool], list[float]]
"""Token ids, which of them the student wrote, and log-probs of those."""


def branches_of(one: Actor, number: int) -> list[Branch]:
    """Each way from the first token of a rollout's row to one that nothing follows."""
    segments, ids, logprobs, mask = one.hand.whole(f"train-{number}-0-0")
    before = list(range(-1, len(ids) - 1))
    for segment in segments:
        if segment.follows is not None:
            before[segment.start] = segment.follows - 1
    made: list[Branch] = []
    for leaf in sorted(set(range(len(ids))) - set(before)):
        way = [leaf]
        while before[way[0]] >= 0:
            way.insert(0, before[way[0]])
        said = [bool(mask[i]) for i in way]
        made.append(([int(ids[i]) for i in way], said, [float(logprobs[i]) for i in way if mask[i]]))
    return made


def branches_told(path: Path) -> list[Branch]:
    """What ODD wrote down."""
    told: list[Branch] = json.loads(path.read_text(encoding="utf-8"))
    return [(ids, mask, [p for p, m in zip(probs, mask, strict=True) if m]) for ids, mask, probs in told]


@served
@pytest.mark.slow
def test_what_verifiers_would_train_is_what_is_trained(tokenizer: TextTokenizer, odd: Served, folder: Path) -> None:
    """The second answer is a text that its own tokenizer splits otherwise, so that the third request is a branch."""
    first = [*tokenizer.encode("#41").tolist(), STOP]
    second = [*tokenizer.encode("a").tolist(), *tokenizer.encode("n").tolist(), STOP]
    third = [*tokenizer.encode("6 #42").tolist(), STOP]
    with actor(tokenizer, saying(first, second, third), sums=env_of(odd.address)) as one:
        run(one, 0, row("42"))
        assert one.hand.failures == {}
        assert one.hand.whole("train-0-0-0")[0][-1].reward == 1.0
        theirs = branches_told(folder / "told")
        assert [ids for ids, _, _ in theirs] == [
            [*one.asked[1][1], *second],
            [*one.asked[2][1], *third],
        ], "what the engine read and wrote"
        assert sorted(branches_of(one, 0)) == sorted(theirs)
        assert sorted(trained(one, 0)) == sorted([*first, *second, *third]), "each once"
        counts = one.hand.rollouts.counts
        assert counts["env_verifiers_tries_total"] == 3.0 and counts["agent_forks_total"] == 1.0


@served
@pytest.mark.slow
def test_many_episodes_of_one_server(tokenizer: TextTokenizer, odd: Served, folder: Path) -> None:
    """Each is told of its own tokens only, and the server keeps one client for all."""
    answer = [*tokenizer.encode("#42").tolist(), STOP]
    with actor(tokenizer, lambda _: answer, sums=env_of(odd.address)) as one:
        for number in range(24):
            one.add(ticket(number, env="sums", row=row("42" if number % 2 else "41", f"told{number}")))
        one.until_gone()
        assert one.hand.failures == {}
        for number in range(24):
            rewards = [segment.reward for segment in one.hand.whole(f"train-{number}-0-0")[0]]
            assert rewards[-1] == number % 2
            assert trained(one, number) == answer * (1 if number % 2 else 3)
            assert branches_of(one, number) == branches_told(folder / f"told{number}")


@served
@pytest.mark.slow
def test_an_environment_of_the_package_alone(tokenizer: TextTokenizer) -> None:
    """Its single agent and its `null` harness, which runs a program with dependencies of its own."""
    env = {"id": "single_agent", "agent": {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}}
    answer = [*tokenizer.encode("#42").tolist(), STOP]
    with (
        serving("verifiers_sums", "--env", json.dumps(env)) as server,
        actor(tokenizer, lambda _: answer, sums=env_of(server.address)) as one,
    ):
        run(one, 0, row("42"))
        if "failed to prepare uv script" in (failure := one.hand.failures.get("train-0-0-0", "")):
            pytest.skip(f"uv found no packages for it: {failure[-200:]}")
        assert one.hand.failures == {} and trained(one, 0) == answer
        assert one.hand.whole("train-0-0-0")[0][-1].reward == 1.0


@served
@pytest.mark.slow
def test_an_environment_that_breaks_fails_its_rollout_with_its_words(tokenizer: TextTokenizer, odd: Served) -> None:
    answer = [*tokenizer.encode("#42").tolist(), STOP]
    with actor(tokenizer, lambda _: answer, sums=env_of(odd.address)) as one:
        run(one, 0, row("breaks"))
        assert "VerifiersError): TaskError" in one.hand.failures["train-0-0-0"]
        assert "no such answer" in one.hand.failures["train-0-0-0"]
        run(one, 1, b'{"prompt": "1+1=", "task": {"prompt": "1+1="}}')
        assert "answer" in one.hand.failures["train-1-0-0"] and "Field required" in one.hand.failures["train-1-0-0"]


@served
@pytest.mark.slow
def test_an_episode_without_tokens_left_is_cut_and_not_failed(tokenizer: TextTokenizer, odd: Served) -> None:
    wrong = [*tokenizer.encode("#1").tolist(), STOP]
    with actor(tokenizer, lambda _: wrong, sums=env_of(odd.address)) as one:
        one.add(ticket(0, env="sums", row=row("42"), sampling=Sampling(seed=0, max_new_tokens=3)))
        one.until_gone()
        assert one.hand.failures == {}
        segments, *_ = one.hand.whole("train-0-0-0")
        assert segments[-1].finish_reason == "length"


@served
@pytest.mark.slow
def test_a_server_that_dies_fails_the_rollouts_that_it_played(tokenizer: TextTokenizer) -> None:
    with serving("verifiers_sums") as server, actor(tokenizer, lambda _: None, sums=env_of(server.address)) as one:
        one.add(ticket(0, env="sums", row=row("42")))
        one.until(lambda: len(one.engine.requests) == 1)
        server.process.kill()
        one.until_gone()
        assert "the connection to the env server" in one.hand.failures["train-0-0-0"]
        assert "was lost" in one.hand.failures["train-0-0-0"]


def ask_student(request: dict[str, Any]) -> None:
    """What the train client sends in one turn."""
    client = request["client"]
    url = f"{client['base_url'].removesuffix('/v1')}/inference/v1/generate"
    body = {"model": request["model"], "token_ids": [5, 6], "sampling_params": {"logprobs": 1}}
    urlopen(Request(url, json.dumps(body).encode(), client["headers"]), timeout=PATIENCE_S).close()


class Scripted:
    """A server of the protocol that asks the student once and answers a run with these frames, if there are any."""

    def __init__(self, *frames: tuple[bytes, Any]) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        self.socket.linger = 0
        port = self.socket.bind_to_random_port("tcp://127.0.0.1")
        self.address = f"tcp://127.0.0.1:{port}"
        self.heard: list[tuple[bytes, Any]] = []
        self.frames = frames
        self.cancelled = threading.Event()
        self.thread = threading.Thread(target=self._serve)
        self.thread.start()

    def _serve(self) -> None:
        while not self.cancelled.is_set():
            if not self.socket.poll(20):
                continue
            who, name, method, data = self.socket.recv_multipart()
            self.heard.append((method, body := msgpack.unpackb(data)))
            if self.frames:
                ask_student(body)
            if method == b"cancel":
                self.cancelled.set()
            for kind, value in self.frames if method == b"run" else ():
                self.socket.send_multipart([who, name, kind, packed(value)])

    def __enter__(self) -> Scripted:
        return self

    def __exit__(self, *_: object) -> None:
        self.cancelled.set()
        self.thread.join(PATIENCE_S)
        self.socket.close()
        self.context.term()


def delta(trace: str, **values: Any) -> tuple[bytes, Any]:
    return b"delta", {"trace": trace, "open": {"id": trace}, "set": {"ok": True} | values}


def reply(*traces: str, ok: bool = True, **head: Any) -> tuple[bytes, Any]:
    summaries = [{"id": trace, "nodes": 0, "calls": 0} for trace in traces]
    return b"reply", {"success": True, "error": None, "head": {"ok": ok, "errors": []} | head, "traces": summaries}


def played(tokenizer: TextTokenizer, *frames: tuple[bytes, Any]) -> Actor:
    with Scripted(*frames) as server, actor(tokenizer, sums=env_of(server.address, max_tokens=7)) as one:
        run(one, 0, row("42"))
        ((method, request),) = server.heard
        assert method == b"run" and request["sampling"] == {"max_tokens": 7}
        assert request["client"]["renderer_model_name"] == STUDENT and request["task_data"]["answer"] == "42"
        return one


def failure(tokenizer: TextTokenizer, *frames: tuple[bytes, Any]) -> str:
    return played(tokenizer, *frames).hand.failures["train-0-0-0"]


SCORED = {"a": {"score": 0.5, "weight": 2.0}, "b": {"score": 1.0}, "c": None}


def test_rewards_are_weighted_and_the_mean_over_traces_that_train(tokenizer: TextTokenizer) -> None:
    other = {"agent": {"trainable": False}, "rewards": {"a": {"score": 9.0}}, "metrics": {"tries": 9}}
    frames = (
        delta("x", rewards=SCORED, metrics={"tries": 2, "said": None}),
        delta("gone", rewards={"a": {"score": 100.0}}),
        delta("y", rewards={"a": {"score": 0.0}}),
        delta("z", rewards={}),
        delta("judge", **other),
        (b"delta", {"trace": "gone", "discard": True}),
        reply("x", "y", "z", "judge"),
    )
    one = played(tokenizer, *frames)
    assert one.hand.failures == {} and trained(one, 0) == [10, STOP]
    segments, *_ = one.hand.whole("train-0-0-0")
    assert segments[-1].reward == 1.0, "of 2 and 0; z was not scored"
    counts = one.hand.rollouts.counts
    assert counts["env_verifiers_tries_total"] == 2.0 and "env_verifiers_said_total" not in counts


@pytest.mark.parametrize(
    ("frames", "words"),
    [
        (
            [(b"reply", {"success": False, "error": "ValidationError: answer"})],
            "(VerifiersError): ValidationError: answer",
        ),
        ([delta("x", ok=False), reply("x", ok=False, errors=[{"type": "EnvError", "message": "m"}])], "EnvError: m"),
        ([delta("x", ok=False, is_timeout=True), reply("x")], "it timed out"),
        ([reply("x", "y")], "the server told nothing of 2 of 2 traces"),
        ([reply(ok=False)], "it failed without an error"),
    ],
)
def test_what_the_server_says_went_wrong_is_the_rollouts_failure(
    tokenizer: TextTokenizer, frames: list[tuple[bytes, Any]], words: str
) -> None:
    assert words in failure(tokenizer, *frames)


def test_the_server_gets_one_client_for_all_episodes_of_a_process(tokenizer: TextTokenizer) -> None:
    """It keeps each that it was ever given."""
    with Scripted(delta("x"), reply("x")) as server, actor(tokenizer, sums=env_of(server.address)) as one:
        run(one, 0, row("42"))
        run(one, 1, row("42"))
        first, second = (request for _, request in server.heard)
        assert first["client"] == second["client"] and first["model"] != second["model"]
        assert one.hand.failures == {}


def test_a_rollout_that_is_called_off_is_called_off_on_the_server(tokenizer: TextTokenizer) -> None:
    with Scripted() as server, actor(tokenizer, sums=env_of(server.address)) as one:
        one.add(ticket(0, env="sums", row=row("42")))
        one.until(lambda: len(server.heard) == 1)
        one.cancel(0)
        assert server.cancelled.wait(PATIENCE_S)
        one.until_gone()
        assert server.heard[-1][0] == b"cancel"


def test_a_server_that_is_not_there_fails_the_rollout(tokenizer: TextTokenizer) -> None:
    with actor(tokenizer, sums=env_of(f"tcp://127.0.0.1:{free_port()}")) as one:
        run(one, 0, row("42"))
        assert "was refused; start it as docs/agents/verifiers.md says" in one.hand.failures["train-0-0-0"]
        run(one, 1, b'{"prompt": "1+1="}')
        assert "the row's column 'task' is NoneType, expected an object" in one.hand.failures["train-1-0-0"]


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"server": "http://a", "tokenizer": "t"}, "server: got 'http://a', expected its ZeroMQ address"),
        ({"server": "tcp://a", "tokenizer": "t"}, "server: got 'tcp://a', expected its ZeroMQ address"),
        ({"server": "tcp://a:1", "tokenizer": "t", "max_tokens": 0}, "max_tokens: got 0, expected at least 1"),
        ({"server": "tcp://a:1"}, "missing a required .*argument: 'tokenizer'"),
        ({"server": "tcp://a:1", "tokenizer": "t", "render": {}}, "no option 'render'; did you mean 'renderer'"),
    ],
)
def test_wrong_options_are_refused_before_anything_starts(options: dict[str, object], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        check_options("verifiers", options)
