"""What each rank of a group runs for tests/learner/ranks/test_from_shares.py: rank 0 publishes, with a real publisher,
to actors that are processes; the others follow it as they do in a run. Rank 0 prints a JSON line per case: what it
found.

    run_ranks(2, "tests.learner.ranks.from_shares", CASE, ...)                            (processes.py)"""

from __future__ import annotations

import gc
import json
import os
import signal
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import msgspec
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from stillhouse.learner.config import LoraConfig
from stillhouse.learner.follow import follow
from stillhouse.learner.ranks.group import ProcessGroup, Ranks
from stillhouse.learner.ranks.staging import OwnShare, ShareLink, Stage, StagedByRanks
from stillhouse.learner.step.lora import Adapters
from stillhouse.learner.step.train_step import Trainer
from stillhouse.models import packed
from stillhouse.protocol.messages import WeightVersion
from stillhouse.weights.buckets import EqualBuckets, PackedLayout
from stillhouse.weights.config import WeightsConfig
from stillhouse.weights.manifest import TensorPiece
from stillhouse.weights.publisher import Publisher, PublisherFailed
from stillhouse.weights.roster import EMBEDDED, GroupMembers
from stillhouse.weights.staged_weights import NoStreams, Staging, Weight, tensor_of
from tests.learner.ranks.processes import group_of
from tests.learner.ranks.same_as_one import PLAIN, items_of
from tests.learner.settings import learner_config
from tests.patience import PATIENCE_S, RUN_PATIENCE_S
from tests.sim.weights.weight_actors import ActorFleet, Fault, digest_of

CONFIG: Final = WeightsConfig(
    bucket_bytes=4_096,
    join_timeout_s=PATIENCE_S,
    broadcast_timeout_s=PATIENCE_S,
    answer_grace_s=1.0,
    join_window_s=0.05,
    rejoin_delay_s=600.0,
)
RANK_TIMEOUT_S: Final = PATIENCE_S


def student(*, tied: bool = True, hidden: int = 16, vocab: int = 41, layers: int = 2) -> PreTrainedModel:
    """The same each time. 41 rows are a multiple of no number of ranks; 6 rows of a key's projection are 2, 2, 2 and 0
    on 4 ranks."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=3 * hidden // 2 + 1,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=6,
        tie_word_embeddings=tied,
        max_position_embeddings=64,
        initializer_range=0.3,
    )
    model: PreTrainedModel = LlamaForCausalLM(config)
    model.set_attn_implementation(packed.IMPLEMENTATION)
    return model.eval()


@dataclass(frozen=True)
class Case:
    """What rank 0 does with a trainer that all ranks have, and what is wrong with the others."""

    run: Callable[[ProcessGroup, Trainer, Case], dict[str, Any]]
    student: dict[str, Any] = field(default_factory=dict[str, Any])
    lora: bool = False
    weights: dict[str, Any] = field(default_factory=dict[str, Any])
    delay_s: float = 0.0
    """The others take this long before they copy."""

    def trainer(self, ranks: Ranks) -> Trainer:
        model = student(**self.student)
        lora = LoraConfig(rank=2, alpha=4.0) if self.lora else LoraConfig()
        config = learner_config(**PLAIN, lora=lora)
        adapters = Adapters(model, lora, base="tiny") if self.lora else None
        for name, parameter in model.named_parameters():
            if "lora_B" in name:  # zeros at first: there would be nothing to merge
                torch.nn.init.normal_(parameter)
        return Trainer(model, config, total_steps=20, adapters=adapters, vocab_tokens=41, ranks=ranks)

    def whole(self, trainer: Trainer) -> list[tuple[str, Tensor]]:
        """The other way: every tensor is gathered in full, as it was sent before, and cast."""
        dtype = torch.bfloat16 if self.weights.get("dtype") == "bfloat16" else None
        named = [(name, tensor_of(weight).clone()) for name, weight in trainer.weights()]
        return [(name, tensor if dtype is None else tensor.to(dtype)) for name, tensor in named]


class Learner:
    """A publisher on rank 0, and its actors."""

    def __init__(self, ranks: ProcessGroup, folder: str, changes: dict[str, Any]) -> None:
        self.fleet = ActorFleet()
        self.announced: list[WeightVersion] = []
        self.publisher = Publisher(
            msgspec.structs.replace(CONFIG, **changes),
            snapshot_dir=Path(folder) / "weights",
            post_plan=self.fleet.post_plan,
            published=lambda version, _: self.announced.append(version),
            staging=ranks.staging,
        )

    def join(self, *names: str) -> None:
        self.fleet.start(names)
        self.publisher.membership(self.fleet.membership())
        assert self.publisher.wait_idle(RUN_PATIENCE_S)

    def publish(self, step: int, trainer: Trainer) -> None:
        self.publisher.publish(WeightVersion(0, step), trainer.named_weights())

    def wrong(self, step: int, expected: Sequence[tuple[str, Tensor]], *names: str) -> list[str]:
        """Actors that did not get exactly these tensors."""
        assert self.publisher.wait_idle(RUN_PATIENCE_S)
        staged = self.fleet.wait_for(WeightVersion(0, step), PATIENCE_S, names or None)
        return [name for name, one in staged.items() if one.digest != digest_of(expected)]


@contextmanager
def learning(ranks: ProcessGroup, changes: dict[str, Any]) -> Generator[Learner]:
    with TemporaryDirectory() as folder:
        learner = Learner(ranks, folder, changes)
        try:
            yield learner
        finally:
            learner.publisher.close()
            learner.fleet.close()


def of_versions(ranks: ProcessGroup, trainer: Trainer, case: Case) -> dict[str, Any]:
    """The weights as loaded; after a step, while actors join; a version in whose middle an actor dies, and one after
    it (not with files or by wire, where actors have no operations to die in)."""
    found: dict[str, Any] = {}
    with learning(ranks, case.weights) as learner:

        def publish(step: int, *names: str) -> None:
            trainer.step(items_of(seed=step, top_k=False))
            learner.publish(step, trainer)
            expected = case.whole(trainer)
            if step == 2:
                learner.join("actor-1", "actor-2")
            found[f"wrong in version {step}"] = learner.wrong(step, expected, *names)

        learner.join("actor-0")
        learner.publish(1, trainer)
        # Adapters are merged by sharded products, which may be rounded otherwise than one process rounds.
        expected = case.whole(trainer if case.lora else case.trainer(Ranks()))
        found["wrong in version 1"] = learner.wrong(1, expected)
        publish(2)
        if "transport" not in case.weights:
            learner.fleet.order("actor-1", Fault(signal.SIGKILL, at_operation=2))
            publish(3, "actor-0", "actor-2")
            publish(4, "actor-0", "actor-2")
            assert learner.publisher.stats.failed_groups_total > 0, "nobody died in the middle"
        assert learner.announced == sorted(set(learner.announced)), learner.announced
    return found


def of_layouts(ranks: ProcessGroup, trainer: Trainer, case: Case) -> dict[str, Any]:
    """Runs as embedded actors, servers and files have them, read in pieces of several sizes."""
    staged = staged_by(ranks.staging)
    staged.fill(WeightVersion(0, 1), trainer.named_weights())
    named = case.whole(trainer)
    found = of_pieces(ranks, trainer, named)
    for layout in (EqualBuckets(staged.manifest, 64), PackedLayout(staged.manifest, 700)):
        expected_B = torch.zeros(layout.total_bytes, dtype=torch.uint8)
        for (_, copy), (_, tensor) in zip(layout.views(expected_B), named, strict=True):
            copy.copy_(tensor)
        for size in (64, 1000, layout.total_bytes):
            got_B = torch.zeros_like(expected_B)
            for start in range(0, layout.total_bytes, size):
                staged.read(layout, start, min(start + size, layout.total_bytes), got_B[start:])
            found[f"wrong in {type(layout).__name__} by {size}"] = int((got_B != expected_B).sum())
    return found


def of_pieces(ranks: ProcessGroup, trainer: Trainer, named: Sequence[tuple[str, Tensor]]) -> dict[str, Any]:
    """A tensor that servers know as two, in the middle of whose rows the cut lies."""
    cut, whole = named[2]
    pieces = {
        cut: (TensorPiece("first", (2, *whole.shape[1:])), TensorPiece("second", (len(whole) - 2, *whole.shape[1:])))
    }
    staged = staged_by(ranks.staging, GroupMembers(kind="servers", pieces=pieces))
    staged.fill(WeightVersion(0, 1), trainer.named_weights())
    layout = PackedLayout(staged.manifest, 700)
    got_B = torch.zeros(layout.total_bytes, dtype=torch.uint8)
    for bucket in layout.buckets:
        staged.read(layout, bucket.start, bucket.end, got_B[bucket.start :])
    got = dict(layout.views(got_B))
    expected = {**dict(named), "first": whole[:2], "second": whole[2:]}
    del expected[cut]
    wrong = [name for name in expected if not torch.equal(got[name], expected[name])]
    return {"wrong in pieces": wrong, "other names": sorted(got.keys() ^ expected.keys())}


def of_late_copies(ranks: ProcessGroup, trainer: Trainer, case: Case) -> dict[str, Any]:
    """Rank 0 asks for a bucket before the others have their copies, in two slots that take turns."""
    staging = ranks.staging
    slots = [staged_by(staging) for _ in range(2)]
    found: dict[str, Any] = {}
    for step in range(4):
        trainer.step(items_of(seed=step, top_k=False))
        staged = slots[step % 2]
        staged.fill(WeightVersion(0, step), trainer.named_weights())
        layout = EqualBuckets(staged.manifest, 4_096)
        run_B = torch.zeros(layout.total_bytes, dtype=torch.uint8)
        staged.read(layout, 0, layout.total_bytes, run_B)
        found[f"wrong in version {step}"] = digest_of(layout.views(run_B)) != digest_of(case.whole(trainer))
    return found


def of_dead_rank(ranks: ProcessGroup, trainer: Trainer, case: Case) -> dict[str, Any]:
    """The last rank ends when it is asked for its share: the publisher fails, and says which rank it was."""
    with learning(ranks, case.weights) as learner:
        learner.join("actor-0")
        learner.publish(1, trainer)
        try:
            learner.publisher.wait_idle(RUN_PATIENCE_S)
        except PublisherFailed as failed:
            return {"said": str(failed), "cause": type(failed.__cause__).__name__}
    return {"said": "nothing"}


def of_memory(ranks: ProcessGroup, trainer: Trainer, case: Case) -> dict[str, Any]:
    """Bytes of tensors on rank 0 because of two versions under way, each seen by what Python knows: `living`, the most
    while a version is read; `largest`, the largest tensor that an operation made while they were copied."""
    before = living_bytes()
    staging = ranks.staging
    slots = [staged_by(staging) for _ in range(2)]
    with LargestTensor() as made:
        for staged in slots:
            staged.fill(WeightVersion(0, 1), trainer.named_weights())
    staged = slots[-1]
    layout = EqualBuckets(staged.manifest, 1 << 18)
    out_b = torch.zeros(layout.largest_bytes, dtype=torch.uint8)
    living = 0
    for index in range(layout.n_buckets):
        staged.read(layout, *layout.bounds(index), out_b)
        if index % 16 == 0:  # it takes a second to count
            living = max(living, living_bytes() - before)
    return {"whole": layout.total_bytes, "bucket": 1 << 18, "living": living, "largest": made.n_bytes}


def living_bytes() -> int:
    """Memory of all tensors, each storage once."""
    gc.collect()
    found: dict[int, int] = {}
    for one in gc.get_objects():
        if type(one) in (Tensor, torch.nn.Parameter):
            found[one.untyped_storage().data_ptr()] = one.untyped_storage().nbytes()
    return sum(found.values())


class LargestTensor(TorchDispatchMode):
    """The largest that an operation of this thread makes."""

    def __init__(self) -> None:
        super().__init__()
        self.n_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for one in made if isinstance(made, (list, tuple)) else [made]:
            if type(one) is Tensor:
                self.n_bytes = max(self.n_bytes, one.untyped_storage().nbytes())
        return made


def staged_by(staging: Staging, members: GroupMembers = EMBEDDED) -> StagedByRanks:
    staged = staging(members, dtype="keep", bucket_bytes=4_096, place="device", streams=NoStreams())
    assert isinstance(staged, StagedByRanks)
    return staged


CASES: Final[dict[str, Case]] = {
    "plain": Case(of_versions),
    "untied, in bfloat16": Case(of_versions, student={"tied": False}, weights={"dtype": "bfloat16"}),
    "adapters": Case(of_versions, lora=True),
    "wire": Case(of_versions, weights={"transport": "wire"}),
    "layouts": Case(of_layouts, student={"tied": False}),
    "late copies": Case(of_late_copies, delay_s=0.3),
    "memory": Case(of_memory, student={"hidden": 256, "vocab": 4_099, "layers": 4}),
    "dead rank": Case(of_dead_rank),
}


def follow_slowly(case: Case, ranks: ProcessGroup, announced: Iterator[Any]) -> None:
    fill = OwnShare.fill

    def late(share: OwnShare, stage: Stage, named: Iterable[tuple[str, Weight]]) -> None:
        time.sleep(case.delay_s)
        fill(share, stage, named)

    OwnShare.fill = late  # type: ignore[method-assign]
    follow(case.trainer(ranks), ranks, takewhile(lambda one: one.call != "begin", announced))
    OwnShare.fill = fill  # type: ignore[method-assign]


def die_when_asked() -> None:
    def die(link: ShareLink, share: OwnShare) -> bool:
        link._group.recv([torch.empty(4, dtype=torch.int64)], 0, 0).wait()  # pyright: ignore[reportPrivateUsage]
        os._exit(9)

    ShareLink._answered = die  # type: ignore[method-assign]  # pyright: ignore[reportPrivateUsage]


def main(names: Sequence[str]) -> None:
    torch.set_num_threads(1)
    dies = list(names) == ["dead rank"]
    ranks = group_of(RANK_TIMEOUT_S)
    announced = ranks.announcements()
    if dies and ranks.rank == ranks.world_size - 1:
        die_when_asked()
    for name in names:
        case = CASES[name]
        if ranks.rank:
            follow_slowly(case, ranks, announced)
            ranks.shares.join()
        else:
            found = case.run(ranks, case.trainer(ranks), case)
            print(json.dumps({name: found}), flush=True)
            if not dies:
                ranks.announce("begin")  # the next case
                ranks.shares.stop()
    if dies:
        os._exit(0)
    ranks.close()
