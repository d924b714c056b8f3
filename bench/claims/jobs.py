"""Makes the arms that are missing, several at a time, in processes that each make one after the other."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import time
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Future, ProcessPoolExecutor, wait
from multiprocessing import get_context
from pathlib import Path
from typing import Final

import torch
from transformers.utils import logging

from bench.claims.arm import OF_PAIR, TEXTS_OF, Run, result_file, write_texts
from bench.claims.grid import TEXTS, grid
from bench.claims.pair import build

ROOT: Final = Path(__file__).resolve().parents[2]


def make(name: str, folder: Path, commit: str = "") -> None:
    """One arm, in this process."""
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    if name in OF_PAIR.values():
        build(name.removeprefix("pair-"), folder)
    elif name in TEXTS_OF:
        write_texts(folder, TEXTS, name)
    else:
        Run(next(arm for arm in grid() if arm.name == name), folder).make(commit)


def fill(folder: Path, jobs: int, claims: set[str] | None) -> list[str]:
    """Make all missing arms, `jobs` at a time, in the order of the grid. Returns those that failed."""
    every = {name: set[str]() for name in OF_PAIR.values()} | {texts: {of} for texts, of in TEXTS_OF.items()}
    every |= {arm.name: arm.needs for arm in grid()}
    wanted = {arm.name for arm in grid() if claims is None or arm.claim in claims}
    while more := {need for name in wanted for need in every[name]} - wanted:
        wanted |= more
    needs = {name: every[name] for name in every if name in wanted}
    done = {name for name in needs if result_file(folder, name).is_file()}
    left, failed, began_s = [name for name in needs if name not in done], list[str](), time.monotonic()
    commit = note(folder)
    print(f"{len(needs)} arms, {len(left)} to be made, in {folder}", flush=True)
    running: dict[Future[None], str] = {}
    os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        while left or running:
            for name in [name for name in left if needs[name] <= done][: jobs - len(running)]:
                left.remove(name)
                running[pool.submit(make, name, folder, commit)] = name
            if not running:
                print(f"{len(left)} arms are not made, because one that they need failed", flush=True)
                return failed + left
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                name, error = running.pop(future), future.exception()
                (done.add if error is None else failed.append)(name)
                state = "done" if error is None else f"failed: {error!r}"
                print(f"{len(done)}/{len(needs)} {name}: {state}; {time.monotonic() - began_s:.0f} s", flush=True)
                if isinstance(error, BrokenExecutor):
                    return failed + left
    return failed


def note(folder: Path) -> str:
    """Add to the folder's notes which code runs, and where. Returns the commit."""
    asked = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, encoding="utf-8", check=False
    )
    about = Path("/proc/cpuinfo")
    model = re.search(r"model name\s*: (.*)", about.read_text(encoding="utf-8") if about.is_file() else "")
    folder.mkdir(parents=True, exist_ok=True)
    row = {
        "commit": asked.stdout.strip(),
        "at": time.strftime("%Y-%m-%d %H:%M"),
        "cpu": model[1] if model else platform.machine(),
        "load": os.getloadavg()[0],
    }
    with (folder / "machines.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
    return str(row["commit"])
