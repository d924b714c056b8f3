"""Options of sglang.launch_server, found among a user's own arguments (`server.args`).

argparse takes `--name value`, `--name=value` and any beginning that fits one name only (`--tp 2`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple


class Option(NamedTuple):
    """One of SGLang's."""

    names: tuple[str, ...]
    shortest: tuple[str, ...]
    """Of each name, the shortest beginning that SGLang takes for it."""


TP: Final = Option(("--tp-size", "--tensor-parallel-size"), ("--tp", "--tensor-p"))
DP: Final = Option(("--dp-size", "--data-parallel-size"), ("--dp-s", "--data-parallel-s"))
PP: Final = Option(("--pp-size", "--pipeline-parallel-size"), ("--pp-s", "--pipeline-parallel-s"))
NODES: Final = Option(("--nnodes",), ("--nnodes",))
SYMMETRIC: Final = Option(("--enable-symm-mem",), ("--enable-symm",))
NVLS: Final = Option(("--enable-nccl-nvls",), ("--enable-nccl",))
DEVICE: Final = Option(("--device",), ("--device",))
FRACTION: Final = Option(("--mem-fraction-static",), ("--mem-f",))
QUANTIZATION: Final = Option(("--quantization",), ("--quantization",))
LOAD_FORMAT: Final = Option(("--load-format",), ("--load-f",))


def value_of(args: Sequence[str], option: Option) -> str | None:
    """The last one, which wins; None: it is not among the arguments, or nothing is behind it."""
    found: str | None = None
    for index, word in enumerate(args):
        name, equals, value = word.partition("=")
        pairs = zip(option.names, option.shortest, strict=True)
        if any(full.startswith(name) and name.startswith(short) for full, short in pairs):
            found = value if equals else next(iter(args[index + 1 : index + 2]), None)
    return found


def has(args: Sequence[str], option: Option) -> bool:
    """A switch, without a value."""
    return any(option.names[0].startswith(word) and word.startswith(option.shortest[0]) for word in args)
