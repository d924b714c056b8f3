"""The learner's launcher with ranks that tell on which addresses they and the launcher listen. For tests.

python -m tests.launch.workers.rank_that_looks FOLDER
"""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from typing import Any

from stillhouse.launch.workers import ranks
from stillhouse.protocol.context import RoleContext

LISTENING = "0A"


def look(ctx: RoleContext[Any], launcher_pid: int) -> int:
    """In place of ranks.run_rank: a group over the store that the launcher named, then the listening sockets."""
    import torch.distributed as dist

    ranks.choose_interfaces(ctx.config)
    dist.init_process_group("gloo")
    dist.barrier()
    rank = dist.get_rank()
    lines = [f"rank {address}" for address in listening(os.getpid())]
    if rank == 0:
        lines += [f"launcher {address}" for address in listening(launcher_pid)]
    (ctx.run_dir / f"{rank}.txt").write_text("\n".join(lines) + "\n")
    dist.barrier()
    dist.destroy_process_group()
    return 0


def listening(pid: int) -> list[str]:
    """Addresses, without ports, of the TCP sockets of a process on which it accepts connections, as Linux tells."""
    links = [os.path.realpath(entry) for entry in Path(f"/proc/{pid}/fd").iterdir()]
    own = {link.rpartition("socket:[")[2].rstrip("]") for link in links if "socket:[" in link}
    found: list[str] = []
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/{pid}/net/{table}").read_text(encoding="utf-8").splitlines()[1:]:
            words = line.split()
            if words[3] == LISTENING and words[9] in own:
                digits = words[1].partition(":")[0]  # words of 4 bytes, each in the machine's order
                raw = b"".join(
                    int(digits[at : at + 8], 16).to_bytes(4, sys.byteorder) for at in range(0, len(digits), 8)
                )
                found.append(socket.inet_ntop(family, raw))
    return found


if __name__ == "__main__":
    from tests.launch.workers.rank_that_looks import look as look_by_name
    from tests.launch.workers.test_hosts import context

    ranks.run_rank = look_by_name  # ranks are spawned: they find it by its module's name
    sys.exit(ranks.main(context(Path(sys.argv[1]), n_hosts=1)))
