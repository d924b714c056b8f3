"""The part that servers over HTTP share for the launcher: which interpreter can run them, and what of the user's own
arguments contradicts the configuration. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

from stillhouse.engines.arguments import Option, value_of
from stillhouse.engines.config import ServerConfig
from stillhouse.engines.provider import EngineRole, Interpreter, ModelShape, ServerEngine


class ServersOverHTTP(ServerEngine):
    """A subclass for each kind of server names its options."""

    kind: ClassVar[str]
    """Name in messages."""
    make: ClassVar[str]
    """Command that makes an environment of our own for it."""
    tp_option: ClassVar[Option]
    rank_options: ClassVar[tuple[Option, ...]]
    """Further ones that multiply a server's GPUs or ranks."""
    dtype_option: ClassVar[Option]
    cache_dtype_option: ClassVar[Option]

    def needed(self, server: ServerConfig, python: Path) -> tuple[str, ...]:
        """The `modules` without which `python` cannot run servers."""
        return self.modules

    def lacks(self, key: str, server: ServerConfig, python: Path, look: Interpreter) -> str | None:
        make = f"; `{self.make}` makes one" if server.device == "cpu" else "; name one that has it"
        if look.unusable:
            return f"{key}.server.python: {look.unusable}{make}"
        if not (missing := " and no ".join(name for name in self.needed(server, python) if name in look.missing)):
            return None
        expected = f"expected an interpreter that can run {self.kind}"
        return f"{key}.server.python: {python} has no {missing}, {expected}{make}"

    def contradictions(self, key: str, role: EngineRole, server: ServerConfig) -> Iterator[str]:
        """The user's arguments come last on the server's command line and win there, but GPUs and ranks are assigned by
        the configuration, so both must agree. `server.device` is cpu or cuda."""
        where, name = f"{key}.server.args", self.tp_option.names[0]
        if (tp := value_of(server.args, self.tp_option)) is not None and tp != str(server.tp):
            yield (
                f"{where}: got {name} {tp}, but {key}.server.tp is {server.tp}, by which GPUs are handed out "
                f"and ranks of the weight group counted; expected --{key}.server.tp {tp}, and no {name} here"
            )
        for option in self.rank_options:
            if (n := value_of(server.args, option)) not in (None, "1"):
                yield (
                    f"{where}: got {option.names[0]} {n}, expected 1: a server has {key}.server.tp GPUs, and a rank on "
                    "each"
                )

    def cache_token_bytes(self, server: ServerConfig, shape: ModelShape) -> float:
        quantized = (value_of(server.args, self.cache_dtype_option) or "").startswith("fp8")
        return shape.layers * 2 * shape.kv_width * (1 if quantized else self.width(server)) / server.tp

    def width(self, server: ServerConfig) -> int:
        """Bytes per number. Without --dtype servers turn float32 into float16 on GPUs, and on CPUs nothing is
        planned."""
        return 4 if value_of(server.args, self.dtype_option) in ("float32", "float") else 2
