"""The user's own arguments of sglang.launch_server (`server.args`), where they contradict the configuration, or cannot
work with weights that change or with a GPU that is shared.

They come last on the server's command line, so they win over ours there, while GPUs are handed out and ranks are
counted by the configuration.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from launch.config.run import RunConfig
from launch.machine.gpus import LEARNER, Places
from launch.servers.options import DEVICE, DP, FRACTION, LOAD_FORMAT, NODES, PP, QUANTIZATION, TP, value_of
from launch.servers.plan import launched_groups, server_config

UPDATABLE: Final = "flash_rl"
"""SGLang's loader that keeps what it takes to quantize weights again when others arrive (QuantizedRLModelLoader)."""


def contradictions(config: RunConfig) -> Iterator[str]:
    """Of the arguments with the configuration. `server.device` is cpu or cuda."""
    for key, role, _, own in launched_groups(config):
        server = server_config(own, role)
        where = f"{key}.server.args"
        if (tp := value_of(server.args, TP)) is not None and tp != str(server.tp):
            yield (
                f"{where}: got {TP.names[0]} {tp}, but {key}.server.tp is {server.tp}, by which GPUs are handed out "
                f"and ranks of the weight group counted; expected --{key}.server.tp {tp}, and no {TP.names[0]} here"
            )
        for option in (DP, PP, NODES):
            if (n := value_of(server.args, option)) not in (None, "1"):
                yield (
                    f"{where}: got {option.names[0]} {n}, expected 1: a server has {key}.server.tp GPUs, and a rank on "
                    "each"
                )
        if (device := value_of(server.args, DEVICE)) is not None and device.partition(":")[0] != server.device:
            yield (
                f"{where}: got --device {device}, but {key}.server.device is {server.device}; expected "
                f"--{key}.server.device {device.partition(':')[0]}, and no --device here"
            )
        quantized, loader = value_of(server.args, QUANTIZATION), value_of(server.args, LOAD_FORMAT)
        if role == "actor" and quantized and loader != UPDATABLE:
            yield (
                f"{where}: got --quantization {quantized}, and the learner's weights arrive as they are: they would be "
                f"put unquantized where quantized ones lie. Expected --load-format {UPDATABLE} with it (the loader "
                "that quantizes again, for fp8 and dense Qwen models), or no quantization"
            )


def overfull_gpus(config: RunConfig, places: Places) -> Iterator[str]:
    """GPUs that a server shares with others without leaving them room: unless it is told, it takes nearly all of it."""
    others: dict[int, list[str]] = {}
    for who, gpu in places.seats.items():
        if gpu is not None:
            others.setdefault(gpu, []).append("the learner" if who == LEARNER else who)
    servers: dict[int, list[tuple[str, str, float | None]]] = {}
    for key, role, first, own in launched_groups(config):
        fraction = _fraction(value_of(server_config(own, role).args, FRACTION))
        for index, group in enumerate(places.servers.get(key, ())):
            for gpu in group:
                servers.setdefault(gpu, []).append((key, f"server-{role}-{first + index}", fraction))
    for gpu, here in sorted(servers.items()):
        beside = others.get(gpu, [])
        names = [*beside, *(name for _, name, _ in here)]
        if len(names) < 2:
            continue
        for key, name, fraction in here:
            if fraction is None:
                yield (
                    f"{key}.server.args: {name} shares GPU {gpu} with "
                    f"{', '.join(other for other in names if other != name)}, and without --mem-fraction-static takes "
                    f"nearly all of its memory; expected e.g. --{key}.server.args=--mem-fraction-static,0.3"
                )
        total = sum(fraction or 0.0 for _, _, fraction in here)
        if total > 1.0 or (beside and total >= 1.0):
            yield (
                f"{here[0][0]}.server.args: the servers on GPU {gpu} take {total:g} of its memory together "
                f"(--mem-fraction-static), expected less than 1 with {', '.join(names)} on it"
            )


def _fraction(text: str | None) -> float | None:
    try:
        return float(text) if text is not None else None
    except ValueError:
        return None  # which SGLang refuses
