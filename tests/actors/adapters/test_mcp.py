"""Tools of a real MCP server, over stdio and over HTTP. The student is a script."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from stillhouse.actors.envs.base import TextTokenizer
from stillhouse.actors.envs.registry import check_options
from stillhouse.actors.failures import Failure
from stillhouse.actors.running_episode import EpisodeEnd
from tests.actors.adapters.conftest import Talk, needs
from tests.patience import SLOWNESS, Limit

pytestmark = needs("mcp")
ROOT = Path(__file__).parents[3]
SERVER = str(ROOT / "examples" / "agents" / "mcp_calculator.py")
STDIO: Mapping[str, Any] = {"command": ["{python}", SERVER]}
CALC = {
    "pattern": "<calc>(.*?)</calc>",
    "tool": "calculate",
    "argument": "expression",
    "stop": "</calc>",
    "result": "<result>{}</result>",
}
CALL = '{"name": "calculate", "arguments": {"expression": "12+34"}}'
SUM = {"prompt": "12+34="}


NAPS = """
import asyncio
import runpy

calculator = runpy.run_path({server!r})


@calculator["server"].tool()
async def nap() -> str:
    await asyncio.sleep(3600)


calculator["server"].run("streamable-http", host="127.0.0.1", port={port}, stateless_http=True, json_response=True)
"""
"""The calculator, with a tool that never answers."""


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    script = tmp_path_factory.mktemp("mcp") / "naps.py"
    script.write_text(NAPS.format(server=SERVER, port=port))
    with subprocess.Popen([sys.executable, script], stderr=subprocess.DEVNULL) as server:
        limit = Limit()
        while True:
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except OSError:
                assert not limit.passed and server.poll() is None
                time.sleep(0.05)
        yield f"http://127.0.0.1:{port}/mcp"
        server.kill()


def ended(end: EpisodeEnd | Failure) -> EpisodeEnd:
    assert isinstance(end, EpisodeEnd), end
    return end


@pytest.fixture(params=["stdio", "http"])
def server(request: pytest.FixtureRequest, url: str) -> Mapping[str, Any]:
    return STDIO if request.param == "stdio" else {"url": url}


def test_a_call_reaches_the_server_and_its_result_the_student(talk: Talk, server: Mapping[str, Any]) -> None:
    talked = talk("mcp", [CALL, "#46"], server, row=SUM, truth="46")
    assert "calculate" in talked.prompt and "expression" in talked.prompt and "12+34=" in talked.prompt
    assert "46" in talked.heard[0]
    end = ended(talked.end)
    assert (end.reward, end.info["mcp_calls"], end.info.get("mcp_errors")) == (1.0, 1.0, None)


def test_a_notation_of_the_student_s_own_goes_on_in_its_turn(talk: Talk, url: str, tokenizer: TextTokenizer) -> None:
    talked = talk("mcp", ["<calc>12+34</calc>", "#46"], {"url": url, "notation": CALC}, row=SUM, truth="46")
    assert "the row's own" in talked.prompt, "the prompt stays the row's"
    assert talked.heard[0].count("<result>46</result>") == 1
    assert ended(talked.end).reward == 1.0


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ('{"name": "calculate", "arguments": {"expression": "rm -rf"}}', "expected numbers with + between them"),
        ('{"name": "calculate", "arguments": {}}', "error:"),
        ('{"name": "format_disk", "arguments": {}}', "there is no tool 'format_disk'; there are: calculate, nap"),
        ('{"name": "calculate", "arguments": {', "a tool call could not be read"),
        ('{"name": "calculate", "arguments": {"expression": "\\ud800"}}', "no text that can be sent"),
        (f'{{"name": "calculate", "arguments": {{"expression": {"[" * 99}1{"]" * 99}}}}}', "nested too deeply"),
    ],
)
def test_what_cannot_be_called_is_told_to_the_student(talk: Talk, url: str, said: str, told: str) -> None:
    talked = talk("mcp", [said, "#46"], {"url": url}, row=SUM, truth="46")
    assert told in talked.heard[0]
    end = ended(talked.end)
    assert end.info["mcp_errors"] == 1.0 and end.reward == 1.0


def test_a_tool_that_does_not_answer_is_given_up(talk: Talk, url: str) -> None:
    """The student reads that, calls another tool of the same server, and is judged."""
    said = ['{"name": "nap", "arguments": {}}', CALL, "#46"]
    talked = talk("mcp", said, {"url": url, "call_timeout_s": SLOWNESS}, row=SUM, truth="46")
    assert "error: " in talked.heard[0] and "imed out" in talked.heard[0], talked.heard[0]
    assert "46" in talked.heard[1] and "error" not in talked.heard[1]
    end = ended(talked.end)
    assert (end.reward, end.info["mcp_calls"], end.info["mcp_errors"]) == (1.0, 2.0, 1.0)


def test_turns_that_run_out_are_judged(talk: Talk, url: str) -> None:
    talked = talk("mcp", [CALL], {"url": url}, row=SUM, truth="46")
    end = ended(talked.end)
    assert (end.finish_reason, end.reward) == ("length", 0.0)


def test_without_a_ground_truth_there_is_no_reward(talk: Talk, url: str) -> None:
    assert ended(talk("mcp", ["#46"], {"url": url}, row=SUM).end).reward is None


def test_a_server_that_is_not_there_fails_the_rollout_by_name(talk: Talk) -> None:
    end = talk("mcp", [CALL], {"url": "http://127.0.0.1:9/mcp"}, row=SUM).end
    assert isinstance(end, Failure) and end.reason == "env_error" and "ConnectError" in f"{end.error} {end.detail}"


def test_tools_that_the_server_does_not_have_fail_the_rollout(talk: Talk, url: str) -> None:
    end = talk("mcp", [CALL], {"url": url, "tools": ["search"]}, row=SUM).end
    assert isinstance(end, Failure) and "the server has no ['search']" in end.detail


def test_a_template_that_knows_tools_gets_them(
    talk: Talk, url: str, hf_tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = str(hf_tokenizer.chat_template)
    knows = "{% if tools %}<|im_start|>system\n{{ tools[0]['function']['name'] }} by <tool_call><|im_end|>\n{% endif %}"
    monkeypatch.setattr(hf_tokenizer, "chat_template", knows + template)
    talked = talk("mcp", [f"<tool_call>{CALL}</tool_call>", "#46"], {"url": url}, row=SUM, truth="46")
    assert talked.prompt.startswith("<|im_start|>system\ncalculate by <tool_call>")
    assert "tool\n46" in talked.heard[0], "a turn of its own"
    assert ended(talked.end).reward == 1.0


def test_a_string_stays_one_where_the_notation_has_no_quotes(
    talk: Talk, url: str, hf_tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server would refuse the number 46."""
    template = "{% if tools %}{{ tools[0]['function']['name'] }} by <function=...>\n{% endif %}"
    monkeypatch.setattr(hf_tokenizer, "chat_template", template + str(hf_tokenizer.chat_template))
    call = "<tool_call>\n<function=calculate>\n<parameter=expression>\n46\n</parameter>\n</function>\n</tool_call>"
    talked = talk("mcp", [call, "#46"], {"url": url}, row=SUM, truth="46")
    assert "46" in talked.heard[0] and "error" not in talked.heard[0]
    assert ended(talked.end).reward == 1.0


def test_a_search_for_a_call_ends(talk: Talk, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stillhouse.actors.envs.tool_loop.SEARCH_S", 0.1)
    notation = {**CALC, "pattern": r"((?:a|a|aa)+)(?:a|aa)*$"}
    end = talk("mcp", ["a" * 40 + "b"], {"url": url, "notation": notation}, row=SUM).end
    assert isinstance(end, Failure) and "notation.pattern took longer than 0.1 s" in end.detail


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({}, "either `url` .* or `command`"),
        ({"url": "http://x", "command": ["python"]}, "either `url` .* or `command`"),
        ({"command": ["no-such-program-here"]}, "there is no program"),
        ({"url": "http://x", "call_timeout_s": 0}, "call_timeout_s: got 0"),
        ({"url": "http://x", "notation": {"pattern": "x"}}, r"notation: got the keys \['pattern'\], expected"),
        ({"url": "http://x", "notation": {**CALC, "pattern": "("}}, "is not a regular expression"),
        ({"url": "http://x", "notation": {**CALC, "result": "?"}}, r"expected \{\} in it"),
        ({"url": "http://x", "notation": {**CALC, "pattern": "x"}}, "has 0 groups, expected 1"),
    ],
)
def test_mistakes_are_refused_before_anything_starts(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        check_options("mcp", options)
