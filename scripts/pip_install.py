"""Runs pip and says every few seconds how far it is:  python scripts/pip_install.py install -r FILE

pip itself prints hundreds of lines, or with --quiet nothing for minutes. On a terminal one line is rewritten; in a log
a line comes every half minute. If pip fails, all that it said is printed. If nothing had to be
installed, nothing is. It needs no package, as it installs the first ones.
"""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

TERMINAL_S, LOG_S = (3.0, 1.0), (10.0, 30.0)
"""Time before the first line, which short work does not need, and between two lines."""
CLEAR = "\r\033[K"


class Progress:
    """What pip has done, by its own lines and by the packages that appear in the environment."""

    def __init__(self, site_packages: Path) -> None:
        self.lines: list[str] = []
        self.found = 0
        self.does = "looking for packages"
        self.to_install = 0
        self._site_packages = site_packages
        self._before = self._there()

    def read(self, line: str) -> None:
        """One line of pip."""
        self.lines.append(line)
        words = line.split()
        match words[:1]:
            case ["Collecting"]:
                self.found += 1
                self.does = f"found {words[1]}"
            case ["Downloading"]:
                size = re.search(r"\(([^()]+)\)$", line)
                name = words[1].rpartition("/")[2].partition("-")[0]
                self.does = f"downloading {name}" + (f", {size[1]}" if size else "")
            case ["Building"]:
                self.does = line.strip().removesuffix("...").rstrip().lower().removesuffix(": started")
            case ["Installing"] if "collected packages:" in line:
                self.to_install = line.count(",") + 1
            case _:
                pass

    @property
    def text(self) -> str:
        if self.to_install:
            done = min(len(self._there() - self._before), self.to_install)
            return f"{done} of {_packages(self.to_install)} installed"
        return f"{_packages(self.found)} found, {self.does}" if self.found else self.does

    def _there(self) -> set[str]:
        return {path.name for path in self._site_packages.glob("*.dist-info")}


def run(
    command: Sequence[str], out: IO[str], site_packages: Path, *, after_s: tuple[float, float], rewrites: bool
) -> int:
    """Run pip; returns its exit code. `after_s`: time before the first line, and between two. `rewrites`: each line
    takes the place of the one before."""
    began_s = time.monotonic()
    progress = Progress(site_packages)
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="utf-8", errors="replace"
    )
    assert process.stdout is not None
    reader = threading.Thread(target=_read, args=(process.stdout, progress))
    reader.start()  # it also closes the stream
    shown = False
    wait_s, every_s = after_s
    while True:
        reader.join(wait_s)
        if not reader.is_alive():
            break
        wait_s = every_s
        line = f"  {time.monotonic() - began_s:.0f} s: {progress.text}"
        out.write(f"{CLEAR}{line}" if rewrites else f"{line}\n")
        out.flush()
        shown = True
    code = process.wait()
    if shown and rewrites:
        out.write(CLEAR)
    if code != 0:
        out.writelines(progress.lines)
    else:
        out.writelines(dict.fromkeys(line for line in progress.lines if line.startswith(("WARNING", "DEPRECATION"))))
        if progress.to_install:
            out.write(f"  {_packages(progress.to_install)} installed in {time.monotonic() - began_s:.0f} s\n")
    out.flush()
    return code


def _read(stream: IO[str], progress: Progress) -> None:
    with stream:
        for line in stream:
            progress.read(line)


def _packages(n: int) -> str:
    return f"{n} package" if n == 1 else f"{n} packages"


def main(arguments: Sequence[str]) -> int:
    command = [sys.executable, "-m", "pip", *arguments, "--progress-bar=off", "--disable-pip-version-check"]
    target = arguments[arguments.index("--target") + 1] if "--target" in arguments else sysconfig.get_path("purelib")
    rewrites = sys.stdout.isatty()
    try:
        return run(command, sys.stdout, Path(target), after_s=TERMINAL_S if rewrites else LOG_S, rewrites=rewrites)
    except KeyboardInterrupt:  # pip has got it, too
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
