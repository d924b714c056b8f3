"""Agents that know nothing of us: functions and programs, and the real OpenAI SDK."""

from __future__ import annotations

import json
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from stillhouse.actors.config import EnvConfig
from stillhouse.actors.envs.base import TextTokenizer
from stillhouse.actors.envs.registry import check_options
from tests.actors.endpoint.served import actor, trained
from tests.actors.in_hand import STOP, ticket
from tests.patience import Limit

HERE = __name__
ROW = json.dumps({"prompt": "1+2=", "ground_truth": "3"}).encode()
MADE_BY = "make agents installs what this needs"


def post_once(row: dict[str, Any], base_url: str, api_key: str, model: str) -> float:
    from urllib.request import Request, urlopen

    body = json.dumps({"model": model, "messages": [{"role": "user", "content": row["prompt"]}]}).encode()
    with urlopen(Request(f"{base_url}/chat/completions", body, {"Authorization": f"Bearer {api_key}"})) as reply:
        return float(json.load(reply)["choices"][0]["message"]["content"] == "#3")


async def says_no_number(row: dict[str, Any], base_url: str, api_key: str, model: str) -> str:
    post_once(row, base_url, api_key, model)
    return "much"


def test_a_functions_reward_is_that_of_the_rollout(tokenizer: TextTokenizer) -> None:
    ids = [*tokenizer.encode("#3").tolist(), STOP]
    env = EnvConfig(name="openai_agent", options={"agent": f"{HERE}:post_once"})
    wrong = EnvConfig(name="openai_agent", options={"agent": f"{HERE}:says_no_number"})
    with actor(tokenizer, lambda _: ids, agent=env, wrong=wrong) as one:
        one.add(ticket(0, env="agent", row=ROW))
        one.add(ticket(1, env="wrong", row=ROW))
        one.until_gone()
        segments, _, _, _ = one.hand.whole("train-0-0-0")
        assert segments[-1].reward == 1.0 and trained(one, 0) == ids
        assert "'much', expected a number, or None" in one.hand.failures["train-1-0-0"]


PROGRAM = """
import json, os, sys, urllib.request
row = json.load(sys.stdin)
body = json.dumps({"messages": [{"role": "user", "content": row["prompt"]}]}).encode()
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
reply = urllib.request.urlopen(urllib.request.Request(url, body, headers))
print("x" * 1_000_000)
text = json.load(reply)["choices"][0]["message"]["content"]
"""


def program(tmp_path: Path, end: str, **options: Any) -> EnvConfig:
    path = tmp_path / f"{abs(hash(end))}.py"
    path.write_text(PROGRAM + textwrap.dedent(end))
    return EnvConfig(name="command", options={"argv": ["{python}", str(path)]}, **options)


def test_a_program_reads_its_row_and_says_its_reward(tokenizer: TextTokenizer, tmp_path: Path) -> None:
    ids = [*tokenizer.encode("#3").tolist(), STOP]
    says = program(tmp_path, 'print(json.dumps({"reward": float(text == "#" + row["ground_truth"])}))')
    silent = program(tmp_path, "print(text)")
    fails = program(tmp_path, 'sys.exit("no such tool")')
    with actor(tokenizer, lambda _: ids, says=says, silent=silent, fails=fails) as one:
        for number, env in enumerate(("says", "silent", "fails")):
            one.add(ticket(number, env=env, row=ROW, ground_truth="3"))
        one.until_gone()
        assert one.hand.whole("train-0-0-0")[0][-1].reward == 1.0
        assert one.hand.whole("train-1-0-0")[0][-1].reward is None, "no reward is not 0"
        failure = one.hand.failures["train-2-0-0"]
        assert "CommandFailed" in failure and "exit code 1: no such tool" in failure


@pytest.mark.slow
def test_a_program_that_hangs_ends_with_all_that_it_started(tokenizer: TextTokenizer, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    hangs = program(
        tmp_path,
        f"""
        import signal, subprocess, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
        open({str(pids)!r}, "w").write(f"{{os.getpid()}} {{child.pid}}")
        time.sleep(1000)
        """,
        step_timeout_s=3.0,
    )
    with actor(tokenizer, hangs=hangs) as one:
        one.add(ticket(0, env="hangs", row=ROW))
        one.until_gone()
        assert one.hand.failures["train-0-0-0"].startswith("env_timeout")
        limit = Limit()
        while any(running(pid) for pid in pids.read_text().split()):
            assert not limit.passed, "it is still there"
            time.sleep(0.05)


def running(pid: str) -> bool:
    """True for a process that is there and no zombie: orphans have another parent than this test."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize(
    ("name", "options", "complaint"),
    [
        ("command", {"argv": "python agent.py"}, "expected a list of words"),
        ("command", {"argv": ["no-such-program-here"]}, "there is no program 'no-such-program-here'"),
        ("openai_agent", {"agent": "no_such_module:agent"}, "agent: cannot load 'no_such_module:agent'"),
        ("openai_agent", {"agent": f"{HERE}:HERE"}, "is a str, expected a function"),
    ],
)
def test_mistakes_are_refused_before_anything_starts(name: str, options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        check_options(name, options)


def test_a_timeout_and_retry_of_the_openai_sdk_make_one_sample(tokenizer: TextTokenizer) -> None:
    openai = pytest.importorskip("openai", reason=MADE_BY)
    calls: list[int] = []

    def answer(prompt: Any) -> list[int] | None:
        calls.append(len(prompt))
        return [10, STOP] if len(one.engine.aborted) else None  # not before the SDK has given the first call up

    with actor(tokenizer, answer) as one:
        episode = one.begin(0)
        with openai.OpenAI(
            base_url=episode.endpoint.base_url, api_key=episode.endpoint.api_key, timeout=0.3, max_retries=5
        ) as client:
            messages = [{"role": "user", "content": "1+2="}]
            reply = client.chat.completions.create(model="student", messages=messages)
            messages += [reply.choices[0].message, {"role": "user", "content": "and now?"}]
            client.chat.completions.create(model="student", messages=messages)
        one.finish(episode)
        assert trained(one, 0) == [10, STOP, 10, STOP]
        assert one.hand.rollouts.counts["agent_roots_total"] == 1


def test_what_the_openai_sdk_makes_of_streams_tools_and_errors(tokenizer: TextTokenizer) -> None:
    openai = pytest.importorskip("openai", reason=MADE_BY)
    written = '{"name": "add", "arguments": {"a": 1}}'
    with actor(tokenizer, lambda _: [*tokenizer.encode(written).tolist(), STOP]) as one:
        episode = one.begin(0)
        with openai.OpenAI(base_url=episode.endpoint.base_url, api_key=episode.endpoint.api_key) as client:
            assert [model.id for model in client.models.list()] == ["student"]
            ask: dict[str, Any] = {"model": "student", "messages": [{"role": "user", "content": "hello"}]}
            text = ""
            for chunk in client.chat.completions.create(**ask, stream=True):
                text += (chunk.choices[0].delta.content or "") if chunk.choices else ""
            assert text == written
            assert client.completions.create(model="student", prompt="hello").choices[0].text == written
            with pytest.raises(openai.BadRequestError, match="not one added token") as error:
                client.chat.completions.create(**ask, stop="\n")
            assert error.value.code == "unsupported"
            with pytest.raises(openai.PermissionDeniedError):
                client.with_options(base_url=one.begin(7).endpoint.base_url).models.list()
            with pytest.raises(openai.AuthenticationError):
                client.with_options(api_key="sk-guessed").models.list()


def test_the_example_s_agent_learns_from_our_endpoint_alone(tokenizer: TextTokenizer) -> None:
    """Its file names nothing of ours."""
    pytest.importorskip("openai", reason=MADE_BY)
    path = Path(__file__).parents[3] / "examples" / "agents" / "openai_sums.py"
    imported = [line for line in path.read_text().splitlines() if line.startswith(("import ", "from "))]
    assert {line.split()[1] for line in imported} == {"__future__", "re", "typing", "openai"}
    env = EnvConfig(name="openai_agent", options={"agent": "examples.agents.openai_sums:agent"})
    answers = iter(["no idea", "#3"])
    with actor(tokenizer, lambda _: [*tokenizer.encode(next(answers)).tolist(), STOP], agent=env) as one:
        one.add(ticket(0, env="agent", row=ROW))
        one.until_gone()
        assert one.hand.failures == {}
        segments, _, _, _ = one.hand.whole("train-0-0-0")
        assert segments[-1].reward == 1.0 and segments[-1].n_turns == 2
        assert all(segment.follows is None for segment in segments), "one conversation, one row"


def test_threads_and_sockets_end_with_the_actor(tokenizer: TextTokenizer) -> None:
    before = {thread.name for thread in threading.enumerate()}
    with actor(tokenizer) as one:
        episode = one.begin(0)
        assert "endpoint" in {thread.name for thread in threading.enumerate()}
        one.finish(episode)
    limit = Limit()
    while {thread.name for thread in threading.enumerate()} - before:
        assert not limit.passed, [thread.name for thread in threading.enumerate()]
        time.sleep(0.01)
