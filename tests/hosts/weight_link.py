"""The two ends of a weight transport and a wiretap, each a process on a host of its own (tests.hosts.test_wiretap).

python -m tests.hosts.weight_link learner SETTINGS    prints each plan; publishes PATTERN, ends when it is delivered
python -m tests.hosts.weight_link actor               reads plans, prints the sha256 of what it staged
python -m tests.hosts.weight_link wiretap FILE        writes every frame of eth0 into FILE
"""

from __future__ import annotations

import hashlib
import socket
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import msgspec
import torch
from torch import Tensor

from stillhouse.engines.torch.weights import EmbeddedWeights
from stillhouse.protocol.messages import Membership, WeightPlan, WeightVersion
from stillhouse.weights.config import WeightsConfig
from stillhouse.weights.publisher import Publisher
from stillhouse.weights.receiver import WeightReceiver
from tests.patience import PATIENCE_S

ACTOR: Final = "actor-0"
MARK: Final = b"these are secret weights of Still"
N_BYTES: Final = 33 * 4 * 4096
PATTERN: Final = MARK * (N_BYTES // len(MARK))
ETH_P_ALL: Final = 3


class Engine:
    """Only tells what it was given."""

    version = WeightVersion(0, 0)

    def stage_weights(self, version: WeightVersion, tensors: Iterable[tuple[str, Tensor]]) -> None:
        ((_, tensor),) = tensors
        say(hashlib.sha256(tensor.view(torch.uint8).numpy().tobytes()).hexdigest())


def say(line: str) -> None:
    print(line, flush=True)


def learner(settings: str) -> None:
    config = msgspec.json.decode(settings, type=WeightsConfig)
    with (
        tempfile.TemporaryDirectory() as folder,
        Publisher(
            config,
            snapshot_dir=Path(folder),
            post_plan=lambda plan: say(msgspec.json.encode(plan).decode()),
            published=lambda version, _: None,
        ) as publisher,
    ):
        publisher.membership(Membership((ACTOR,), ("i1",)))
        weights = torch.frombuffer(bytearray(PATTERN), dtype=torch.float32)
        publisher.publish(WeightVersion(0, 1), [("w", weights)])
        sys.exit(0 if publisher.wait_idle(PATIENCE_S) and publisher.stats.published is not None else 1)


def actor() -> None:
    receiver = WeightReceiver(EmbeddedWeights(Engine()), name=ACTOR)  # type: ignore[arg-type]  # pyright: ignore
    receiver.start()
    for line in sys.stdin:
        receiver.handle_plan(msgspec.json.decode(line, type=WeightPlan))
    receiver.close()


def wiretap(file: str) -> None:
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL)) as port, Path(file).open("wb") as to:
        port.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 20)
        port.bind(("eth0", 0))
        say("ready")
        while True:
            to.write(port.recv(1 << 17))
            to.flush()


if __name__ == "__main__":
    {"learner": learner, "actor": actor, "wiretap": wiretap}[sys.argv[1]](*sys.argv[2:])
