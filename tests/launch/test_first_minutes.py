"""What a new user runs into before anything runs is a sentence, not a traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from launcher_process import PATIENCE_S, ROOT

import stillhouse.launch.run
from stillhouse.launch.run import main
from stillhouse.launch.runfolder import read_record


@pytest.mark.parametrize("more", ["--steps=1", "--check"])
@pytest.mark.parametrize("place", ["/proc/none/run", "file/run", "file"])
def test_a_run_folder_that_cannot_be_written_is_named(
    tmp_path: Path, place: str, more: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    folder = tmp_path / place
    assert main([f"--run-dir={folder}", more]) == 2
    out, message = capsys.readouterr()
    assert f"stillhouse: the run folder {folder} cannot be written: " in message and "--run-dir DIR" in message
    assert not out


def test_ctrl_c_before_the_workers_leaves_a_run_that_was_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(stillhouse.launch.run, "write_config", interrupted)
    assert main([f"--run-dir={tmp_path / 'run'}", "--steps=1"]) == 130
    assert capsys.readouterr().err == "stillhouse: stopped before anything was started\n"
    record = read_record(tmp_path / "run")
    assert record is not None and (record.state, record.exit_code) == ("stopped", 130)


INTERRUPTED_IMPORT = """
import os, signal, sys, time
sys.path.insert(0, sys.argv[1])
class Slow:
    def find_spec(self, name, path=None, target=None):
        if name == "stillhouse.launch.run":
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(60)
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Slow())
from stillhouse.launch.cluster import main
sys.exit(main())
"""


def test_ctrl_c_in_the_first_second_while_modules_are_imported() -> None:
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED_IMPORT, str(ROOT)], capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert (done.returncode, done.stderr) == (130, "stillhouse: stopped before anything was started\n")


RUN_HELP = "import sys; from stillhouse.launch.cluster import main; sys.argv[1:] = ['--help']; sys.exit(main())"


def run_help(*path: Path) -> subprocess.CompletedProcess[str]:
    """The console script `stillhouse --help`, with these folders first on Python's path."""
    return subprocess.run(
        [sys.executable, "-P", "-c", RUN_HELP],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )


def test_packages_of_others_with_the_names_of_our_folders_are_no_matter(tmp_path: Path) -> None:
    """A whole installation beside them is in tests/integration/test_installed.py."""
    for name in ("models", "buffer", "launch", "protocol"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise ImportError('not ours')\n", encoding="utf-8")
    done = run_help(tmp_path, ROOT / "src")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("former", [{}, {"no_proxy": "own.net"}, {"NO_PROXY": "own.net"}])
def test_what_is_on_this_machine_is_asked_without_a_proxy(former: dict[str, str]) -> None:
    """By every library, in the launcher and in what it starts, where the environment names a proxy."""
    code = """if True:
        import sys, urllib.request
        try:
            import httpx2 as httpx  # what huggingface_hub asks with since 2.0
        except ModuleNotFoundError:
            import httpx
        sys.argv = ["cluster.py", "--version"]
        import stillhouse.launch.cluster
        stillhouse.launch.cluster.main()
        print([bool(urllib.request.proxy_bypass(host)) for host in ("127.0.0.1:80", "localhost", "own.net", "a.com")])
        client = httpx.Client()
        print(client._transport_for_url(httpx.URL("http://127.0.0.1:1/v1")) is client._transport)"""
    environment = {name: value for name, value in os.environ.items() if name.lower() != "no_proxy"}
    environment |= {"http_proxy": "http://127.0.0.1:9"} | former
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, timeout=PATIENCE_S, check=True
    )
    own = bool(former)
    assert done.stdout.decode().splitlines()[1:] == [str([True, True, own, False]), "True"]
