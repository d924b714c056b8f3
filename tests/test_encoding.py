"""Text is UTF-8, whatever the locale says. Ruff's PLW1514 sees only what it knows to be a path."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

from tests.patience import PATIENCE_S

ROOT = Path(__file__).parent.parent
OUTSIDE = {"build", "dist", "runs", "tests"}
TEXT = "größer ｜ 漢"


def calls_without_encoding(source: str) -> list[int]:
    """Lines with a call that reads or writes text in the locale's encoding."""
    found: list[int] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and not any(keyword.arg == "encoding" for keyword in node.keywords):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            modes = [given.get("mode", ""), *(ast.unparse(argument) for argument in node.args)]
            opens = name == "open" and any(mode in ("'r'", "'w'", "'a'", "'rt'", "'wt'", "'at'") for mode in modes)
            bare = name == "open" and isinstance(node.func, ast.Name) and len(node.args) == 1 and "mode" not in given
            as_text = "True" in (given.get("text"), given.get("universal_newlines"))
            if name in ("read_text", "write_text") or opens or bare or as_text:
                found.append(node.lineno)
    return found


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
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"prompt": "1+1=", "ground_truth": "2"}\n' * 300, encoding="utf-8")
    config.write_text(f'[learner.tasks]\nprompts = "{prompts}"\nsystem_prompt = "{TEXT}"\n', encoding="utf-8")
    ascii_only = {**os.environ, "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    command = [sys.executable, str(ROOT / "launch" / "cluster.py"), "--config", str(config), "--check"]
    done = subprocess.run(command, env=ascii_only, cwd=tmp_path, capture_output=True, timeout=PATIENCE_S, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert ascii(TEXT)[1:-1].encode() in done.stdout
    typed = [*command[:2], "--learner.tasks.system_prompt", TEXT.encode("latin-1", "replace"), "--check"]
    done = subprocess.run(typed, env=ascii_only, capture_output=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 2 and b"no text in ascii" in done.stderr, done.stderr
