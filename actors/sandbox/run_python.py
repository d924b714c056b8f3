"""Runs Python the way a notebook cell does: the value of a last expression is printed too.

It runs inside a sandbox, by the interpreter there: Python 3.9 is enough."""

from __future__ import annotations

import ast
import linecache
import sys
import traceback
from pathlib import Path
from typing import Any

NAME = "call.py"


def run(path: str, namespace: dict[str, Any]) -> int:
    """Run the program at `path` in this namespace. Returns the exit code."""
    source = Path(path).read_text("utf-8")
    linecache.cache[NAME] = (len(source), None, source.splitlines(keepends=True), NAME)
    sys.argv, sys.path[0] = [NAME], ""
    try:
        tree = ast.parse(source, NAME)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        traceback.print_exc(limit=0)
        return 1
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    try:
        exec(compile(tree, NAME, "exec"), namespace)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), NAME, "eval"), namespace)
            if value is not None:
                print(repr(value))
    except Exception as error:
        traceback.print_exception(type(error), error, error.__traceback__ and error.__traceback__.tb_next)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(run(sys.argv[1], globals()))
