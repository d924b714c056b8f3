"""Turns this process into an SGLang server:  python serve.py     reads {"args", "optional", "log", "parent_pid"} as a
line on stdin

Shared by zygote.py (after a fork) and by launchers that start one process per server, as on GPUs. Uses only the
standard library, SGLang and files of protocol/ that need no more, because it runs in SGLang's own interpreter.
Arguments come on stdin: any user of the machine can read a command line, and one argument is a bearer key.

A server leads its own process group and dies with its parent. Only its owner can read its log, and the key is removed
from it, because SGLang logs all of its arguments.
"""

# pyright: reportMissingImports=false
# SGLang is in an environment of its own, not in the one that is type-checked.

from __future__ import annotations

import argparse
import errno
import importlib
import json
import logging
import os
import random
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

KEY_ARGUMENT = "--api-key"
STORE_WORDS = (
    "world_size",
    "is_master",
    "timeout",
    "wait_for_workers",
    "multi_tenant",
    "master_listen_fd",
    "use_libuv",
)
"""Arguments of torch's TCPStore behind host and port, in order."""
LOCAL_VARIABLE = "STILLHOUSE_LOCAL_STORES"
"""Set for the processes that SGLang spawns, which then call `keep_stores_here`."""
HIDDEN_VARIABLE = "STILLHOUSE_HIDDEN_IN_LOGS"
"""Text to hide in logs, passed to the processes that SGLang spawns (they import this file again)."""


def own(name: str) -> Any:
    """The module stillhouse.protocol.NAME, which needs the standard library alone. The package's folder is on the path
    for that moment only: what is installed beside it must not be found instead of SGLang's own packages."""
    home = Path(__file__).resolve().parents[1]
    sources = str(home / "src" if (home / "src" / "stillhouse").is_dir() else home.parent)
    sys.path.insert(0, sources)
    try:
        return importlib.import_module(f"stillhouse.protocol.{name}")
    finally:
        sys.path.remove(sources)


def become_server(log: Path, parent_pid: int, args: list[str], optional: Sequence[str] = ()) -> None:
    """Serve until SIGTERM; never returns. `args` are those of sglang.launch_server. Flags in `optional` are added in
    front of them if this version of SGLang has them."""
    code = 1
    try:
        if os.getsid(0) != os.getpid():
            os.setsid()
        own("children").die_with_parent(parent_pid)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        write_to(log)
        if KEY_ARGUMENT in args:
            hide(args[args.index(KEY_ARGUMENT) + 1])
        random.seed()  # forked servers would otherwise choose the same ports
        if not {"--nnodes", "--dist-init-addr"} & {word.partition("=")[0] for word in args}:
            keep_stores_here()
        from sglang.launch_server import run_server
        from sglang.srt.server_args import prepare_server_args

        run_server(prepare_server_args([*known(optional), *args]))
        code = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def known(flags: Sequence[str]) -> list[str]:
    """The flags that this version of SGLang has."""
    from sglang.srt.server_args import ServerArgs

    if not flags:
        return []
    parser = argparse.ArgumentParser(add_help=False)
    ServerArgs.add_cli_args(parser)
    options = {option for action in parser._actions for option in action.option_strings}
    return [flag for flag in flags if flag.partition("=")[0] in options]


def write_to(log: Path) -> None:
    """Append stdout and stderr to the log; stdin is empty."""
    log_fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
    null_fd = os.open(os.devnull, os.O_RDONLY)
    for target, source in ((0, null_fd), (1, log_fd), (2, log_fd)):
        os.dup2(source, target)
    os.close(log_fd)
    os.close(null_fd)


def hide(secret: str) -> None:
    """Replace `secret` in all log records of this process and its children."""
    os.environ[HIDDEN_VARIABLE] = secret
    make_record = logging.getLogRecordFactory()

    def make_clean_record(*args: Any, **more: Any) -> logging.LogRecord:
        record = make_record(*args, **more)
        if secret in str(record.msg) or (record.args and secret in record.getMessage()):
            record.msg, record.args = record.getMessage().replace(secret, "(hidden)"), None
        return record

    logging.setLogRecordFactory(make_clean_record)


def keep_stores_here() -> None:
    """Let torch's TCPStores of this process and its children listen on loopback only, or where another rank looks for
    them: torch listens on all interfaces, and whoever reaches a store may fill it, without a key."""
    import torch.distributed as dist

    os.environ[LOCAL_VARIABLE] = "1"

    class LocalStore(dist.TCPStore):  # pyright: ignore[reportPrivateImportUsage]
        def __init__(self, host_name: str, port: int, *words: Any, **named: Any) -> None:
            given = {**dict(zip(STORE_WORDS, words, strict=False)), **named}
            if given.get("is_master") and given.get("master_listen_fd") is None:
                alone = given.get("world_size") == 1 or host_name in ("", "0.0.0.0", "::", "localhost")
                host_name = "127.0.0.1" if alone else host_name
                try:
                    family = socket.AF_INET6 if ":" in host_name else socket.AF_INET
                    listener = socket.create_server((host_name, port), family=family, backlog=1024)
                except OSError as error:
                    if error.errno != errno.EADDRINUSE or not given.get("multi_tenant"):
                        raise  # otherwise: a store that this process has already
                else:
                    port = listener.getsockname()[1]
                    given["master_listen_fd"] = listener.detach()  # the store owns it from now on
            super().__init__(host_name, port, **given)

    rendezvous = sys.modules["torch.distributed.rendezvous"]  # of this name there is a function, too
    rendezvous.TCPStore = dist.TCPStore = LocalStore  # type: ignore[misc]


def main() -> None:
    here = str(Path(__file__).resolve().parent)
    sys.path[:] = [entry for entry in sys.path if entry != here]  # our file names must not shadow other modules
    request = json.loads(sys.stdin.readline())
    become_server(Path(request["log"]), request["parent_pid"], request["args"], request["optional"])


if __name__ == "__mp_main__" and LOCAL_VARIABLE in os.environ:
    keep_stores_here()
if __name__ == "__mp_main__" and HIDDEN_VARIABLE in os.environ:
    hide(os.environ[HIDDEN_VARIABLE])
if __name__ == "__main__":
    main()
