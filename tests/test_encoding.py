"""Text is UTF-8, whatever the locale says. Ruff's PLW1514 sees only what it knows to be a path."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

from tests.patience import PATIENCE_S

ROOT = Path(__file__).parent.parent
OUTSIDE = {"build", "dist", "runs", "tests"}
TEXT = "größer ｜ 漢"


PERHAPS = re.compile(r"read_text|write_text|\bopen\(|\b(text|universal_newlines)=True")
"""Only sources that match are taken apart."""


def calls_without_encoding(source: str) -> list[int]:
    """Lines with a call that reads or writes text in the locale's encoding."""
    nodes = ast.walk(ast.parse(source)) if PERHAPS.search(source) else ()
    return [node.lineno for node in nodes if isinstance(node, ast.Call) and _is_without(node)]


def _is_without(call: ast.Call) -> bool:
    given = {keyword.arg: getattr(keyword.value, "value", None) for keyword in call.keywords}
    if "encoding" in given:
        return False
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    if name == "open":
        modes = [given.get("mode", ""), *(getattr(argument, "value", None) for argument in call.args)]
        bare = isinstance(call.func, ast.Name) and len(call.args) == 1 and "mode" not in given
        return bare or any(mode in ("r", "w", "a", "rt", "wt", "at") for mode in modes)
    return name in ("read_text", "write_text") or True in (given.get("text"), given.get("universal_newlines"))


def test_all_text_is_read_and_written_as_utf8() -> None:
    faulty = "a.read_text()\nopen(b)\nc.open('w')\nrun(d, text=True)\nopen(e, 'rb')\nf.read_text(encoding='utf-8')"
    assert calls_without_encoding(faulty) == [1, 2, 3, 4]
    folders = [entry for entry in ROOT.iterdir() if entry.is_dir() and entry.name not in OUTSIDE]
    files = [file for folder in folders if folder.name[0] != "." for file in folder.rglob("*.py")]
    assert len(files) > 400
    found = {str(file.relative_to(ROOT)): calls_without_encoding(file.read_text(encoding="utf-8")) for file in files}
    assert {file: lines for file, lines in found.items() if lines} == {}


def test_a_configuration_and_what_is_printed_under_a_locale_without_these_characters(tmp_path: Path) -> None:
    """And the script runs from any folder."""
    config = tmp_path / "c.toml"
    config.write_text(f'[learner.objective]\ndivergence = "{TEXT}"\n', encoding="utf-8")
    ascii_only = {**os.environ, "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    script = [sys.executable, str(ROOT / "launch" / "cluster.py"), "--check"]
    for words, said in (
        (["--config", str(config)], ascii(TEXT)[1:-1].encode()),
        (["--learner.tasks.system_prompt", TEXT.encode("latin-1", "replace")], b"no text in ascii"),
    ):
        done = subprocess.run(
            [*script, *words], env=ascii_only, cwd=tmp_path, capture_output=True, timeout=PATIENCE_S, check=False
        )
        assert done.returncode == 2 and said in done.stderr, done.stderr
