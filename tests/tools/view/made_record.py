"""Records with everything that a page can show, made up at random, and a tokenizer for them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from stillhouse.protocol.handshake import vocab_fingerprint
from stillhouse.protocol.messages import BatchItem, Branch, TopKPiece, TurnReward, VersionSpan, WeightVersion
from stillhouse.protocol.payloads.aligned import END, INSIDE, NOT_SCORED, SET, SPECIAL, encode_aligned
from stillhouse.protocol.topk_codec import encode_top_k
from stillhouse.recording.format import RecordedRollout, encode_batch, encode_header, encode_resumed
from tests.learner.records import header

HOSTILE = (
    "</script><script>window.hit=1</script>",
    "<img src=x onerror=window.hit=1>",
    "<!--<script>",
    "]]>&lt;b&gt;&amp;",
    "@@SCRIPT@@",
    "\u202eabc\u0000\x1b[31m",
    "\u2028'\"\\${1}`",
)
WORDS = (*HOSTILE, *(f" w{i}" for i in range(40)), "\n", "é", "漢字", "🙂")
VOCABULARY = {word: i for i, word in enumerate(WORDS)}


def tokenizer(folder: Path) -> Path:
    """A folder with a tokenizer whose tokens are WORDS."""
    folder.mkdir(exist_ok=True)
    Tokenizer(WordLevel(VOCABULARY, unk_token="\n")).save(str(folder / "tokenizer.json"))
    return folder


def top_k(random: np.random.Generator, n: int) -> tuple[bytes, np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """A payload for n tokens: (bytes, ids [n, 6], log-probs [n, 6]), likeliest first."""
    ids = np.stack([random.permutation(len(WORDS))[:6] for _ in range(n)]).astype(np.int32)
    weights = np.sort(random.dirichlet(np.ones(6), n), axis=1)[:, ::-1] * 0.9
    logprobs = np.log(np.maximum(weights, 1e-9)).astype(np.float32)
    return encode_top_k(ids, logprobs, vocab_size=len(WORDS), mass=1.0, max_k=6), ids, logprobs


def rollout(
    random: np.random.Generator,
    rollout_id: str,
    *,
    prompt: Sequence[int],
    turns: Sequence[tuple[int, int]] = ((5, 0),),
    version: int = 0,
    epoch: int = 0,
    teachers: tuple[str, ...] = ("default",),
    tag: str = "sum",
    task: int = 0,
    sample: int = 0,
    reward: float | None = 1.0,
    branches: tuple[Branch, ...] = (),
    turn_rewards: tuple[TurnReward, ...] = (),
    sets: dict[tuple[int, int], tuple[list[int], list[float]]] | None = None,
    aligned: bool = False,
) -> RecordedRollout:
    """Turns are (sampled tokens, tokens of the environment after them); the version rises by one from turn to turn.
    `sets`: not None for one with top-k sets, a payload for each turn and teacher; (teacher, token) -> (ids, log-probs)
    is entered. `aligned`: of teachers with another tokenizer: spans of two tokens, then a special one."""
    spans, at = list[VersionSpan](), len(prompt)
    for number, (n_sampled, n_given) in enumerate(turns):
        spans.append(VersionSpan(WeightVersion(epoch, version + number), at, at + n_sampled))
        at += n_sampled + n_given
    sampled = np.zeros(at, np.uint8)
    for span in spans:
        sampled[span.start : span.end] = 1
    ids = np.concatenate([np.array(prompt, np.int32), random.integers(0, len(WORDS), at - len(prompt), np.int32)])
    arrays = [
        ids,
        (-random.exponential(1.0, at) * sampled).astype(np.float32),
        sampled,
        (-random.exponential(2.0, (len(teachers), at)) * sampled).astype(np.float32),
    ]
    pieces = list[TopKPiece]()
    payloads = b""
    for span in spans if sets is not None else ():
        for teacher in range(len(teachers)):
            tokens = np.arange(span.start, span.end)
            codes = np.resize(np.array([INSIDE | SET, END, SPECIAL], np.uint8), len(tokens))
            have = tokens[(codes & SET) > 0] if aligned else tokens
            payload, set_ids, logprobs = top_k(random, len(have))
            if aligned:
                payload = encode_aligned(codes, payload)
                arrays[3][teacher, tokens[codes == SPECIAL]] = NOT_SCORED
            pieces.append(TopKPiece(teacher, span.start, span.end, len(payload)))
            payloads += payload
            for row, token in enumerate(have.tolist()):
                sets[teacher, token] = (set_ids[row].tolist(), logprobs[row].tolist())  # pyright: ignore[reportOptionalSubscript]
    if pieces:
        arrays.append(np.frombuffer(payloads, np.uint8))
    item = BatchItem(
        rollout_id, task, sample, 4, tag, teachers, at, tuple(spans), True, "stop", reward, len(turns), branches,
        tuple(pieces), turn_rewards,
    )  # fmt: skip
    return RecordedRollout(item, tuple(arrays))


def cut(one: RecordedRollout, end: int, trained: tuple[int, int], *, final: bool = False) -> RecordedRollout:
    """The item of an earlier or later batch of the same rollout: its first `end` tokens, some of them to be trained."""
    item = one.item
    mask = np.zeros(end, np.uint8)
    mask[trained[0] : trained[1]] = one.arrays[2][trained[0] : trained[1]]
    spans = tuple(VersionSpan(s.version, s.start, min(s.end, end)) for s in item.spans if s.start < end)
    changed = msgspec.structs.replace(
        item, end=end, spans=spans, final=final, top_k=(), reward=item.reward if final else None
    )
    ids, mu, _, q = one.arrays[:4]
    return RecordedRollout(changed, (ids[:end], mu[:end], mask, np.ascontiguousarray(q[:, :end])))


def batch(
    version: tuple[int, int],
    rollouts: Sequence[RecordedRollout],
    *,
    offline: Sequence[str] = (),
    masked: Sequence[str] = (),
) -> bytes:
    placed = [one._replace(offline=one.item.rollout_id in offline) for one in rollouts]
    return encode_batch(
        version[1] + 1, WeightVersion(*version), placed, staleness={}, tasks_done=(), masked=tuple(masked)
    )


def resumed(version: tuple[int, int], parent: tuple[int, int]) -> bytes:
    return encode_resumed(WeightVersion(*version), WeightVersion(*parent))


def write_run(folder: Path, *batches: bytes, **changes: Any) -> Path:
    """The folder of a run with this record and the tokenizer for it. Returns the folder."""
    run = folder / "run"
    run.mkdir()
    config = {"models": {"student": str(tokenizer(folder / "student"))}, "teacher": {"top_k_of": "teacher"}}
    begin = header(vocab_fingerprint=vocab_fingerprint(VOCABULARY), config=config, **changes)
    (run / "batches.record").write_bytes(encode_header(begin) + b"".join(batches))
    (run / "config.yaml").write_text("learner: {record: '{run}'}\n")
    return run


def everything(folder: Path, seed: int = 0) -> Path:
    """Two teachers, turns, branches, a rollout in two batches, one left out, one mixed
    in, one that is scored in part, and hostile texts."""
    random = np.random.default_rng(seed)
    prompt = [7, 8, 9]
    long = rollout(
        random, "train-1-0-0", prompt=prompt, turns=((6, 3), (4, 0)), teachers=("a", "b"), task=1, reward=0.5
    )
    end = long.item.end
    branched = rollout(
        random, "train-2-0-0", prompt=[0, 1, 5], turns=((4, 2), (3, 0), (3, 0)), task=2, tag=HOSTILE[0],
        branches=(Branch(9, 5), Branch(12, 0)), turn_rewards=(TurnReward(7, 0.25), TurnReward(12, 0.75)),
        sets={},
    )  # fmt: skip
    first = [
        rollout(random, HOSTILE[1], prompt=prompt, sample=0, sets={}),
        rollout(random, "train-0-1-0", prompt=prompt, sample=1, reward=None, teachers=()),
        cut(long, len(prompt) + 4, (3, 7)),
    ]
    second = [
        cut(long, end, (7, end), final=True),
        branched,
        rollout(random, "train-3-0-0", prompt=[2, 3, 4], version=1, task=3),
        rollout(random, "written", prompt=[2, 3, 4, 6], version=40, task=0, tag="text"),
    ]
    stale = cut(rollout(random, "train-5-0-0", prompt=prompt, version=2, task=5), 8, (5, 8), final=True)
    stale.arrays[3][:, 3:5] = 0  # masked as stale before a teacher scored them
    certain = rollout(random, "train-4-0-0", prompt=prompt, version=2, task=4, turns=((1, 0),))
    certain.arrays[3][:] = 0  # scored, with probability 1
    third = [certain, stale]
    return write_run(
        folder,
        batch((0, 0), first),
        batch((0, 1), second, offline=["written"], masked=["train-3-0-0"]),
        batch((0, 2), third),
        run=HOSTILE[0],
    )
