"""Arguments of the server, as the real one has them, and `--behave WORD`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence


class ServerArgs:
    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--model-path", required=True)
        parser.add_argument("--host", required=True)
        parser.add_argument("--port", type=int, required=True)
        parser.add_argument("--api-key", default="")
        parser.add_argument("--device")
        parser.add_argument("--log-level-http")
        parser.add_argument("--tp-size", type=int)
        parser.add_argument("--dist-init-addr")
        parser.add_argument("--behave", default="serve")


def prepare_server_args(args: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    return parser.parse_args(args)
