"""SGLang's own tool-call parsers, run by the interpreter that has SGLang (tests/sglang/test_tool_calls.py).

Reads a JSON object from stdin, {"tools": [...], "texts": [[PARSER, TEXT], ...]}, and writes, per text, the calls that
SGLang finds, [[[NAME, ARGUMENTS], ...], ...]; none where it raises. It imports nothing of ours.
"""

from __future__ import annotations

import importlib
import json
import logging
import sys
from typing import Any

# By name: the project's own interpreter, which checks types, has no SGLang.
Tool: Any = importlib.import_module("sglang.srt.entrypoints.openai.protocol").Tool
FunctionCallParser: Any = importlib.import_module("sglang.srt.function_call.function_call_parser").FunctionCallParser

logging.disable(logging.CRITICAL)
asked: dict[str, Any] = json.load(sys.stdin)
tools = [Tool(**tool) for tool in asked["tools"]]
found: list[list[list[Any]]] = []
for name, text in asked["texts"]:
    try:
        _, calls = FunctionCallParser(tools, name).parse_non_stream(text)
    except Exception:  # some of them raise at some texts
        found.append([])
    else:
        found.append([[call.name, json.loads(call.parameters)] for call in calls])
json.dump(found, sys.stdout)
