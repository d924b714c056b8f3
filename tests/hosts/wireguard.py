"""WireGuard between two hosts, as docs/hosts.md says; by `wireguard-go` where the kernel has none."""

from __future__ import annotations

import shutil
import subprocess
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from tests.hosts.network import Network, NotPermitted
from tests.patience import PATIENCE_S, eventually

PORT: Final = 51820


class Tunnel:
    """Up while the stack is. Raises NotPermitted where neither kernel nor Debian's package has WireGuard."""

    def __init__(self, network: Network, names: tuple[str, str], folder: Path, stack: ExitStack) -> None:
        self._network, self._folder, self._stack = network, folder, stack
        self._names = names
        for host in names:
            self._start(host)
        keys = {host: self._key(host) for host in names}
        for host, other in (names, reversed(names)):
            wg, private = self.device(host), str(self._folder / f"{host}.private")
            there = ["allowed-ips", f"{self.address(other)}/32", "endpoint", f"{network.address(other)}:{PORT}"]
            self._on(
                host,
                ["wg", "set", wg, "listen-port", str(PORT), "private-key", private, "peer", keys[other], *there],
            )
            self._on(host, ["ip", "address", "add", f"{self.address(host)}/24", "dev", wg])
            self._on(host, ["ip", "link", "set", wg, "up"])

    def address(self, host: str) -> str:
        """In the tunnel."""
        return f"10.88.0.{self._names.index(host) + 1}"

    def device(self, host: str) -> str:
        """Its control socket lies in a folder that all hosts share here, so each has a name of its own."""
        return f"wg-{host}"

    def _start(self, host: str) -> None:
        try:
            self._on(host, ["ip", "link", "add", self.device(host), "type", "wireguard"])
        except subprocess.CalledProcessError:
            if shutil.which("wireguard-go") is None or shutil.which("wg") is None:
                raise NotPermitted("no WireGuard: apt-get install wireguard-tools wireguard-go") from None
            command = self._network.command(host, ["wireguard-go", "--foreground", self.device(host)])
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            self._stack.callback(process.wait, PATIENCE_S)
            self._stack.callback(process.terminate)
            control = Path(f"/var/run/wireguard/{self.device(host)}.sock")
            eventually(control.exists, f"no control socket {control}")

    def _key(self, host: str) -> str:
        """Makes its private key; returns the public one."""
        private = self._on(host, ["wg", "genkey"])
        file = self._folder / f"{host}.private"
        file.touch(0o600)
        file.write_text(private)
        return self._on(host, ["wg", "pubkey"], private).strip()

    def _on(self, host: str, command: list[str], stdin: str = "") -> str:
        whole = self._network.command(host, command)
        return subprocess.run(whole, input=stdin, check=True, capture_output=True, text=True, timeout=PATIENCE_S).stdout
