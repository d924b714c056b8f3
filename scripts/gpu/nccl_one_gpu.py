"""Two NCCL ranks on one GPU, by recipe. torch only.

    python scripts/gpu/nccl_one_gpu.py [--backend nccl|gloo] [--mib 512] [--only RECIPE,...] [--log FILE]

Recipes are tried in order, each in two fresh processes with a limit. Prints one JSON line per recipe, a verdict and a
table; all that the ranks said goes to FILE. `bare` must fail ("Duplicate GPU detected"): NCCL compares host hash and
bus id. The others give each rank an NCCL_HOSTID.
"""

import argparse
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from datetime import timedelta
from pathlib import Path

SAFE = {
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_NET": "Socket",
    "NCCL_IB_DISABLE": "1",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_MNNVL_ENABLE": "0",
    "NCCL_CUMEM_ENABLE": "0",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_RAS_ENABLE": "0",
}
RECIPES = {  # name -> (variables, "own" NCCL_HOSTID per rank?)
    "bare": ({"NCCL_SOCKET_IFNAME": "lo"}, False),
    "hostid": (
        {"NCCL_SOCKET_IFNAME": "lo", "NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"},
        True,
    ),  # what servers+learner have, + HOSTID
    "hostid-safe": (SAFE, True),
    "hostid-4-sockets": ({**SAFE, "NCCL_SOCKET_NTHREADS": "4", "NCCL_NSOCKS_PERTHREAD": "4"}, True),
    "hostid-small": ({**SAFE, "NCCL_MAX_CTAS": "1", "NCCL_PROTO": "Simple"}, True),
    "multi-rank": (
        {"NCCL_SOCKET_IFNAME": "lo", "NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NVLS_ENABLE": "0", "NCCL_MAX_CTAS": "2"},
        False,
    ),  # NCCL >= 2.30
}


class Rank:
    """One of the two, with its store and its device."""

    def __init__(self, rank: int, port: int, backend: str) -> None:
        import torch
        import torch.distributed as dist

        self.rank, self.cuda, self._dist = rank, backend == "nccl", dist
        self.device = torch.device("cuda:0" if self.cuda else "cpu")
        limit = timedelta(seconds=40)
        self.store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False, timeout=limit)
        self.sync = torch.cuda.synchronize if self.cuda else (lambda: None)

    def say(self, **facts: object) -> None:
        print(json.dumps({"rank": self.rank, **facts}), flush=True)

    def group(self, prefix):
        part = self._dist.PrefixStore(prefix, self.store)
        if not self.cuda:
            o = self._dist.ProcessGroupGloo._Options()
            o._timeout = timedelta(seconds=20)
            o._devices = [self._dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
            return self._dist.ProcessGroupGloo(part, self.rank, 2, o)
        o = self._dist.ProcessGroupNCCL.Options()
        o._timeout = timedelta(seconds=60)
        os.environ.update(
            TORCH_NCCL_ASYNC_ERROR_HANDLING="0",
            TORCH_NCCL_ENABLE_MONITORING="0",
            TORCH_NCCL_DUMP_ON_TIMEOUT="0",
            TORCH_FR_BUFFER_SIZE="0",
        )
        return self._dist.ProcessGroupNCCL(part, self.rank, 2, o)

    def send(self, g, t):
        o = self._dist.BroadcastOptions()
        o.rootRank, o.rootTensor = 0, 0
        return g.broadcast([t], o)

    def meet(self, key: str) -> None:
        self.store.add(key, 1)
        while self.store.add(key, 0) < 2:
            time.sleep(0.001)


def rank_main(number: int, port: int, backend: str, mib: int) -> None:
    import torch

    rank = Rank(number, port, backend)
    if rank.cuda:
        torch.ones(1, device=rank.device)
        rank.say(
            torch=torch.__version__,
            nccl=".".join(map(str, torch.cuda.nccl.version())),
            gpu=torch.cuda.get_device_name(0),
        )
    g, t0 = rank.group("a"), time.monotonic()
    rank.send(g, torch.full((4,), float(number == 0), device=rank.device)).wait()
    rank.sync()
    rank.say(
        connect_s=round(time.monotonic() - t0, 3),
        used_mib=(torch.cuda.mem_get_info()[1] - torch.cuda.mem_get_info()[0]) >> 20 if rank.cuda else 0,
    )
    for n in [1 << 10, 1 << 20, 32 << 20, mib << 20]:
        measure(rank, g, n)
    for case in ("absent", "killed"):
        abort(rank, case)
    os._exit(0)


def measure(rank: Rank, g, n: int) -> None:
    """Broadcast n bytes three times."""
    import torch

    gen = torch.Generator(rank.device).manual_seed(n)
    right = torch.randint(0, 256, (n,), dtype=torch.uint8, device=rank.device, generator=gen)
    t, times = right.clone() if rank.rank == 0 else torch.zeros_like(right), []
    for turn in range(3):
        if rank.rank:
            t.zero_()
        rank.sync()
        rank.meet(f"go{n}.{turn}")
        t1 = time.monotonic()
        rank.send(g, t).wait()
        rank.sync()
        times.append(time.monotonic() - t1)
    rank.say(
        bytes=n,
        equal=bool(torch.equal(t, right)),
        best_s=round(min(times), 5),
        worst_s=round(max(times), 5),
        gb_s=round(n / min(times) / 1e9, 3),
    )


def abort(rank: Rank, case: str) -> None:
    """Rank 0 must get its GPU back by abort(), as the learner does, when the other one is absent or was killed."""
    import torch

    big = 1 << 30 if rank.cuda else 64 << 20
    g = rank.group(case)
    rank.send(g, torch.zeros(4, device=rank.device)).wait()
    rank.sync()
    rank.meet(f"{case}.ready")
    if rank.rank == 1:
        if case == "killed":
            rank.send(g, torch.zeros(big, dtype=torch.uint8, device=rank.device))
            time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGKILL)
        while rank.store.add("absent.done", 0) < 1:
            time.sleep(0.01)
        return
    try:
        work, raised = rank.send(g, torch.ones(big, dtype=torch.uint8, device=rank.device)), ""
    except RuntimeError as error:
        work, raised = None, str(error)[:120]
    time.sleep(2.0)
    stuck, t2 = work is not None and not work.is_completed(), time.monotonic()
    aborting = threading.Thread(target=g.abort, daemon=True)
    aborting.start()
    aborting.join(20)
    ok = None
    if rank.cuda and not aborting.is_alive():
        m = torch.randn(1024, 1024, device=rank.device)
        ok = bool(torch.isfinite(m @ m).all())
    rank.say(
        case=case,
        was_stuck=stuck,
        raised=raised,
        aborted=not aborting.is_alive(),
        abort_s=round(time.monotonic() - t2, 3),
        gpu_works_after=ok,
    )
    rank.store.add("absent.done", 1)


def run_recipe(name: str, backend: str, mib: int, limit_s: float) -> str:
    """What both ranks printed. They are killed at the limit."""
    variables, own = RECIPES[name]
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    words = ["--port", str(port), "--backend", backend, "--mib", str(mib)]
    fixed = {"NCCL_DEBUG_SUBSYS": "INIT,NET,ENV"}
    defaults = {"NCCL_DEBUG": "INFO", "CUDA_VISIBLE_DEVICES": "0"}
    with contextlib.ExitStack() as stack:
        # Files: a pipe that nobody reads would stop rank 1.
        outs = [stack.enter_context(tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")) for _ in (0, 1)]
        ranks = [
            subprocess.Popen(
                [sys.executable, __file__, "--rank", str(rank), *words],
                env={**defaults, **os.environ, **variables, **fixed}
                | ({"NCCL_HOSTID": f"stillhouse-{os.getpid()}-{rank}"} if own else {}),
                stdout=outs[rank],
                stderr=subprocess.STDOUT,
            )
            for rank in (0, 1)
        ]
        with contextlib.suppress(subprocess.TimeoutExpired):
            ranks[0].wait(limit_s)
        for rank in ranks:
            rank.kill()
            rank.wait()
        for out in outs:
            out.seek(0)
        return "\n".join(out.read() for out in outs)


def row(name: str, ok: bool, mine: list[dict], took_s: float) -> str:
    """A line of the table, from what rank 0 said."""

    def of(case: str, key: str) -> str:
        return str(next((f[key] for f in mine if f.get("case") == case and key in f), "-"))

    connect = next((f["connect_s"] for f in mine if "connect_s" in f), "-")
    sizes = [f for f in mine if "bytes" in f]
    best = max(sizes, key=lambda f: f["bytes"])["gb_s"] if sizes else "-"
    least = round(1e3 * sizes[0]["best_s"], 2) if sizes else "-"
    after = of("killed", "gpu_works_after")
    return (
        f"{name:18}{ok!s:6}{connect:>10}{best:>8}{least:>9}{of('absent', 'abort_s'):>9}{of('killed', 'abort_s'):>9}"
        f"{after:>10}{took_s:>8.1f}"
    )


SAID = (" WARN ", "Error", "[send] via", "Using network", "MULTI_RANK", "NCCL_HOSTID")
"""What of the ranks' other output is worth a look."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="nccl")
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--only", default="")
    parser.add_argument("--limit", type=float, default=60.0)
    parser.add_argument("--log", default="")
    parser.add_argument("--rank", type=int)
    parser.add_argument("--port", type=int)
    asked = parser.parse_args()
    if asked.rank is not None:
        rank_main(asked.rank, asked.port, asked.backend, asked.mib)
        return
    heads = ("connect_s", 10), ("GB/s", 8), ("1KiB_ms", 9), ("absent_s", 9), ("killed_s", 9), ("GPU after", 10)
    worked, table = [], [f"{'recipe':18}{'ok':6}" + "".join(f"{head:>{n}}" for head, n in (*heads, ("took_s", 8)))]
    for name in RECIPES:
        if asked.only and name not in asked.only.split(","):
            continue
        began_s = time.monotonic()
        text = run_recipe(name, asked.backend, asked.mib, asked.limit)
        took_s = time.monotonic() - began_s
        if asked.log:
            with Path(asked.log).open("a", encoding="utf-8") as log:
                log.write(f"===== {name}\n{text}\n")
        facts = [json.loads(line) for line in text.splitlines() if line.startswith('{"rank"')]
        sizes = [fact for fact in facts if "bytes" in fact]
        ok = len(sizes) == 8 and all(fact["equal"] for fact in sizes)
        worked += [name] if ok else []
        rest = [line.strip()[-240:] for line in text.splitlines() if not line.startswith('{"rank"')]
        seen = dict.fromkeys(line for line in rest if any(word in line for word in SAID))
        mine = [fact for fact in facts if fact["rank"] == 0]
        said = {"recipe": name, "ok": ok, "took_s": round(took_s, 1), "rank0": mine, "said": list(seen)[:12]}
        print(json.dumps(said), flush=True)
        table.append(row(name, ok, mine, took_s))
    print(json.dumps({"verdict": worked}), *table, sep="\n", flush=True)


if __name__ == "__main__":
    main()
