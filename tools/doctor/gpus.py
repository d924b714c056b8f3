"""Check of the GPUs: what others use of them, the links between them, and NCCL."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from itertools import combinations
from typing import Final

from stillhouse.launch.checks.finding import Finding, Impossible
from stillhouse.tools.doctor.case import ModelCase

TIMEOUT_S: Final = 20.0
USED_MIB: Final = 1024
"""Above this somebody else is on the GPU: a driver alone takes a few hundred."""
SLOW_LINKS: Final = {
    "SYS": "across CPU sockets",
    "NODE": "across PCIe host bridges",
    "PHB": "through the CPU's PCIe host bridge",
}
FAST: Final = "NVLink (NV), or one PCIe switch (PIX, PXB)"


def gpus(case: ModelCase) -> Iterator[Finding]:
    """Each GPU, the links between those that the placement uses, and NCCL."""
    from stillhouse.launch.machine.machine import find_machine

    machine = find_machine()
    if not machine.gpus:
        raise Impossible(f"this machine shows no GPU{f' ({machine.unlisted})' if machine.unlisted else ''}")
    printed = _smi("--query-gpu=index,uuid,name,memory.used,memory.total", "--format=csv,noheader,nounits")
    rows = [[field.strip() for field in line.split(",")] for line in printed.splitlines()]
    shown = {name: row for row in rows for name in machine.gpus if name in row[:2]}
    for name in machine.gpus:
        if name in shown:
            yield _used(name, *shown[name][2:])
    places = case.checked.servers.placement.places
    used = {gpu for gpu in places.seats.values() if gpu is not None}
    used |= {gpu for groups in places.servers.values() for group in groups for gpu in group}
    indices = sorted(int(shown[machine.gpus[gpu]][0]) for gpu in used if machine.gpus[gpu] in shown)
    if len(indices) > 1:
        yield _linked(indices, links(_smi("topo", "-m")))
    yield _nccl()


def _used(name: str, model: str, used_mib: str, total_mib: str) -> Finding:
    used = float(used_mib) if used_mib.isdecimal() else 0.0
    return Finding(
        check="gpus",
        subject=f"GPU {name}",
        status="warning" if used > USED_MIB else "ok",
        measured=f"{model}: {used:,.0f} of {total_mib} MiB are in use before the run starts",
        normal=f"at most {USED_MIB:,} MiB; the memory estimate counts on all of it",
        advice="end what runs there (nvidia-smi lists it), or leave the GPU out with CUDA_VISIBLE_DEVICES",
        figures={"used_mib": used},
    )


def links(table: str) -> dict[tuple[int, int], str]:
    """(lower GPU, higher GPU) -> its kind of link, from `nvidia-smi topo -m`."""
    rows = [line.split() for line in re.sub(r"\x1b\[[0-9;]*m", "", table).splitlines()]
    rows = [words for words in rows if words and re.fullmatch(r"GPU\d+", words[0]) and "X" in words]
    found: dict[tuple[int, int], str] = {}
    for first, words in enumerate(rows):  # the columns of the GPUs come first, those of network cards behind them
        found |= {(first, second): words[1 + second] for second in range(first + 1, len(rows))}
    return found


def _linked(indices: list[int], found: dict[tuple[int, int], str]) -> Finding:
    pairs = {pair: found.get(pair, "unknown") for pair in combinations(indices, 2)}
    slow = {f"{a}-{b}": kind for (a, b), kind in pairs.items() if kind in SLOW_LINKS}
    kinds = ", ".join(f"{list(pairs.values()).count(kind)} {kind}" for kind in dict.fromkeys(pairs.values()))
    named = f"; slowest {', '.join(f'{p} {SLOW_LINKS[k]}' for p, k in list(slow.items())[:3])}" if slow else ""
    return Finding(
        check="gpus",
        subject="links",
        status="warning" if slow else "ok",
        measured=f"{len(pairs)} pairs of GPUs: {kinds}{named}",
        normal=FAST,
        advice="keep the ranks of one learner or server on GPUs with fast links (CUDA_VISIBLE_DEVICES orders them)",
    )


def _nccl() -> Finding:
    import torch
    from torch.cuda import nccl

    if not torch.cuda.is_available():
        return Finding(
            check="gpus",
            subject="NCCL",
            status="failed",
            measured=f"torch {torch.__version__} finds no CUDA device, although there are GPUs",
            normal="it finds them",
            advice="install a torch with CUDA that fits the driver (nvidia-smi shows its version)",
        )
    version = ".".join(map(str, nccl.version()))
    return Finding(check="gpus", subject="NCCL", status="ok", measured=f"{version}, with torch {torch.__version__}")


def _smi(*arguments: str) -> str:
    command = shutil.which("nvidia-smi")
    if command is None:
        raise Impossible("nvidia-smi is not in PATH, so nothing is known of the GPUs but their number")
    try:
        return subprocess.run(
            [command, *arguments],
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=TIMEOUT_S,
            check=True,
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise Impossible(f"nvidia-smi {' '.join(arguments)} fails: {error}") from error
