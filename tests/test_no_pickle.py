"""Nothing that crosses a wire or is read back from a file is a pickle: reading one runs whatever code it holds."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = (
    "protocol",
    "models",
    "weights",
    "engines",
    "recording",
    "replay",
    "actors",
    "teachers",
    "buffer",
    "learner",
    "launch",
    "builtin",
    "sglang_server",
    "tracing",
    "examples",
    "scripts",
)
FORBIDDEN_MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "jsonpickle"}
FORBIDDEN_CALLS = {"send_pyobj", "recv_pyobj", "read_pickle", "to_pickle", "send_serialized", "recv_serialized"}
OBJECT_COLLECTIVES = ("_object", "_object_list")
"""torch.distributed's broadcast_object_list, all_gather_object and so on: they pickle."""


NAMES = (*FORBIDDEN_MODULES, *FORBIDDEN_CALLS, *OBJECT_COLLECTIVES, "multiprocessing", "allow_pickle")
PERHAPS = re.compile(rf"{'|'.join(NAMES)}|torch\.(save|load)")
"""Only sources that match are taken apart."""


def pickles(source: str) -> list[str]:
    """What in this source reads or writes pickles, with its line."""
    found: list[str] = []
    if not PERHAPS.search(source):
        return found
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                found += [f"{node.lineno}: import {n.name}" for n in names if n.name.split(".")[0] in FORBIDDEN_MODULES]
            case ast.ImportFrom(module=str(module)) if module.split(".")[0] in FORBIDDEN_MODULES or (
                module == "multiprocessing.connection"  # its `send` pickles
            ):
                found.append(f"{node.lineno}: from {module} import")
            case ast.Call(func=ast.Attribute(attr=name) | ast.Name(id=name)) if _is_pickling_call(name, node):
                found.append(f"{node.lineno}: {name}")
            case ast.Constant(value=str(text)) if text in FORBIDDEN_MODULES:
                found.append(f"{node.lineno}: '{text}'")
            case _:
                pass
    return found


def _is_pickling_call(name: str, call: ast.Call) -> bool:
    keywords = {keyword.arg: keyword.value for keyword in call.keywords}
    if name in FORBIDDEN_CALLS or (name.endswith(OBJECT_COLLECTIVES) and name != "py_object"):  # ctypes pickles nothing
        return True
    if name == "save" and isinstance(call.func, ast.Attribute) and _is_name(call.func.value, "torch"):
        return True
    if name == "load" and isinstance(call.func, ast.Attribute) and _is_name(call.func.value, "torch"):
        return not _is_true(keywords.get("weights_only"))
    return "allow_pickle" in keywords and not _is_false(keywords["allow_pickle"])


def _is_name(node: ast.expr, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _is_true(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Constant) and node.value is True


def _is_false(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is False


def sources() -> list[Path]:
    return [file for folder in FOLDERS for file in sorted((ROOT / folder).rglob("*.py"))]


def test_no_source_of_ours_pickles() -> None:
    files = sources()
    assert len(files) > 100, "looked in the wrong place"
    found = [f"{file.relative_to(ROOT)}:{what}" for file in files for what in pickles(file.read_text())]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "import numpy, pickle as p",
        "from pickle import loads",
        "import joblib",
        "__import__('pickle')",
        "importlib.import_module('dill')",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "torch.load(path, weights_only=flag)",
        "torch.save(state, path)",
        "np.load(path, allow_pickle=True)",
        "socket.send_pyobj(x)",
        "dist.broadcast_object_list(objects)",
        "dist.all_gather_object(out, x)",
    ],
)
def test_this_test_can_fail(line: str) -> None:
    assert pickles(f"x = 1\n{line}\n")


@pytest.mark.parametrize(
    "line",
    ["torch.load(path, weights_only=True)", "np.load(path, allow_pickle=False)", "json.load(file)", "'a pickle'"],
)
def test_and_does_not_cry_wolf(line: str) -> None:
    assert not pickles(line)
