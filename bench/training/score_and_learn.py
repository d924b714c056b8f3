"""Scoring and learning, packed against padded, side by side: on the built-in architecture (random weights), or a model.

    OMP_NUM_THREADS=1 python -m bench.training.score_and_learn
    OMP_NUM_THREADS=1 python -m bench.training.score_and_learn --model examples/smollm2/model --sequences 16 --cpu-time

packed: this project's `TorchScorer.score` and `Trainer.step`. padded: what one writes first with transformers (sdpa):
sequences padded on the right to the longest, an attention mask, logits for every position, log_softmax, gather; for
learning the same loss, gradient clipping and AdamW, in microbatches of rows of at most as many tokens as ours, padding
counted, in the order of the batch. Both sides get the same sequences and give the same numbers, which
is checked before anything is timed. Runs alternate, the first of each is thrown away. Tokens are real ones, prompt and
completion together; padding is not counted. `--completions` takes the lengths of real rollouts; with `--shortest N
--longest N` all have the same length, so that neither side pads.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from stillhouse.engines.base import ScoreRequest
from stillhouse.engines.torch.scorer import TorchScorer
from stillhouse.learner.batch import TrainItem, train_items
from stillhouse.learner.config import LearnerConfig
from stillhouse.learner.objectives.options import Capped
from stillhouse.learner.step.train_step import Trainer
from stillhouse.models import packed
from stillhouse.models.loading import load_causal_lm
from stillhouse.protocol.messages import BatchItem

VOCAB = 297
"""Size of the vocabulary of random weights."""
SIZES = {"student 64/192": (64, 192), "teacher 160/480": (160, 480)}
PROMPT_TOKENS = 10


@dataclass(frozen=True)
class Padded:
    """The same sequences as a rectangle. B sequences, L tokens of the longest."""

    ids_BL: Tensor
    attention_BL: Tensor
    completion_BL: Tensor
    behaviour_BL: Tensor
    teacher_BL: Tensor


def main() -> None:
    args = _arguments()
    torch.set_num_threads(1)
    random = np.random.default_rng(args.seed)
    drawn = (int(random.integers(args.shortest, args.longest + 1)) for _ in range(args.sequences))
    lengths = [args.prompt_tokens + n for n in args.completions or drawn]
    sequences = [random.integers(0, VOCAB, n).astype(np.int32) for n in lengths]
    models = {name: partial(_random_model, size) for name, size in SIZES.items()}
    if args.model:
        models = {args.model: partial(_loaded_model, args.model)}
    tokens = sum(lengths)
    clock_s = time.process_time if args.cpu_time else time.perf_counter
    print(
        f"{len(lengths)} sequences of {min(lengths)} to {max(lengths)} tokens, {tokens} in all "
        f"({tokens / (max(lengths) * len(lengths)):.0%} of the rectangle), "
        f"{args.repeats} alternating runs, one thread, {'CPU' if args.cpu_time else 'wall'} time\n"
    )
    print("| what | model | padded tok/s | packed tok/s | ratio (min..max of pairs) |")
    print("|---|---|---|---|---|")
    for model_name, model in models.items():
        for what in args.what:
            make = _scoring if what == "scoring" else _learning
            padded, ours = make(model, sequences, args.prompt_tokens, args.pack_tokens)
            _check_equal(padded(), ours())
            rates = _alternate((padded, ours), tokens, args.repeats, clock_s)
            ratios = [b / a for a, b in zip(*rates, strict=True)]
            slow, fast = (statistics.median(side) for side in rates)
            print(
                f"| {what} | {model_name} | {slow:,.0f} | {fast:,.0f} | "
                f"{statistics.median(ratios):.2f} ({min(ratios):.2f}..{max(ratios):.2f}) |"
            )


def _scoring(
    model: Callable[[str], PreTrainedModel], sequences: Sequence[Any], prompt_tokens: int, pack_tokens: int
) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """(padded, packed): each returns the log-probs of all completion tokens, [n]."""
    scorer = TorchScorer(model(packed.IMPLEMENTATION))
    plain = model("sdpa")
    requests = [ScoreRequest(ids, prompt_tokens) for ids in sequences]
    rectangles = _rectangles(sequences, prompt_tokens, pack_tokens)

    def padded() -> Any:
        with torch.inference_mode():
            return np.concatenate([_padded_logprobs(plain, one).numpy() for one in rectangles])

    def ours() -> Any:
        return np.concatenate([result.logprobs for result in scorer.score(requests)])

    return padded, ours


def _learning(
    model: Callable[[str], PreTrainedModel], sequences: Sequence[Any], prompt_tokens: int, pack_tokens: int
) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """(padded, packed): each makes one optimizer step and returns its gradient norm, [1]."""
    config = LearnerConfig(schedule="constant", warmup_steps=0, lr=1e-9, pack_tokens=pack_tokens)
    trainer = Trainer(model(packed.IMPLEMENTATION), config, total_steps=10**6)
    items = [train_item(index, ids, prompt_tokens=prompt_tokens) for index, ids in enumerate(sequences)]
    plain = model("sdpa")
    optimizer = torch.optim.AdamW(plain.parameters(), lr=config.lr, weight_decay=0.0, fused=True)
    rectangles = _rectangles(sequences, prompt_tokens, pack_tokens)
    n_trained = sum(int(one.completion_BL.sum()) for one in rectangles)

    def padded() -> Any:
        for rectangle in rectangles:
            student_N = _padded_logprobs(plain, rectangle)
            current_N = student_N.detach()
            behaviour_N = rectangle.behaviour_BL[rectangle.completion_BL]
            teacher_N = rectangle.teacher_BL[rectangle.completion_BL]
            weights_N = torch.exp(current_N - behaviour_N).clamp(max=Capped().cap)
            loss = (weights_N * (current_N - teacher_N) * student_N).sum() / n_trained
            loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), config.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        return np.array([float(norm)])

    def ours() -> Any:
        return np.array([trainer.step(items).grad_norm])

    return padded, ours


def _padded_logprobs(model: PreTrainedModel, rectangle: Padded) -> Tensor:
    logits_BLV = model(input_ids=rectangle.ids_BL, attention_mask=rectangle.attention_BL, use_cache=False).logits
    logprobs_BLV = torch.log_softmax(logits_BLV[:, :-1].float(), dim=-1)
    chosen_BL = logprobs_BLV.gather(2, rectangle.ids_BL[:, 1:, None]).squeeze(2)
    return chosen_BL[rectangle.completion_BL[:, 1:]]


def _loaded_model(folder: str, implementation: str) -> PreTrainedModel:
    attention = "packed" if implementation == packed.IMPLEMENTATION else "sdpa"
    return load_causal_lm(folder, device="cpu", dtype="float32", attention=attention, train=True)


def _random_model(size: tuple[int, int], implementation: str) -> PreTrainedModel:
    shape: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": size[0],
        "intermediate_size": size[1],
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "tie_word_embeddings": True,
        "max_position_embeddings": 512,
    }
    torch.manual_seed(0)
    model: PreTrainedModel = Qwen3ForCausalLM(Qwen3Config(**shape))
    model.set_attn_implementation(implementation)
    return model.eval()


def train_item(index: int, ids_L: Any, *, prompt_tokens: int, vocab: int = VOCAB) -> TrainItem:
    """A rollout whose completion is trained; behaviour and teacher log-probs are near those of random weights."""
    random = np.random.default_rng(index)
    end = len(ids_L)
    item = BatchItem(str(index), index, 0, 1, "", ("default",), end, (), True, "stop", None, 1)
    mask_L = (np.arange(end) >= prompt_tokens).astype(np.uint8)
    behaviour_L = np.full(end, -np.log(vocab), np.float32)
    teacher_1L = (-np.log(vocab) - 0.3 + random.normal(0, 0.5, (1, end))).astype(np.float32)
    return train_items([item], (ids_L, behaviour_L, mask_L, teacher_1L))[0]


def _rectangles(sequences: Sequence[Any], prompt_tokens: int, pack_tokens: int) -> list[Padded]:
    """Rows in the order of the batch, of at most `pack_tokens` tokens with their padding."""
    rows: list[list[int]] = [[]]
    for index in range(len(sequences)):
        together = [*rows[-1], index]
        if rows[-1] and len(together) * max(len(sequences[i]) for i in together) > pack_tokens:
            rows.append([index])
        else:
            rows[-1] = together
    return [_rectangle(sequences, members, prompt_tokens) for members in rows]


def _rectangle(sequences: Sequence[Any], members: Sequence[int], prompt_tokens: int) -> Padded:
    longest = max(len(sequences[i]) for i in members)
    items = [train_item(index, sequences[index], prompt_tokens=prompt_tokens) for index in members]

    def pad(rows: Sequence[Any]) -> Tensor:
        return torch.stack([torch.from_numpy(np.pad(row, (0, longest - len(row)))) for row in rows])

    return Padded(
        ids_BL=pad([item.tokens_L for item in items]).long(),
        attention_BL=pad([np.ones(len(item.tokens_L), np.int64) for item in items]),
        completion_BL=pad([item.train_mask_L for item in items]),
        behaviour_BL=pad([item.behaviour_L for item in items]),
        teacher_BL=pad([item.teacher_ML[0] for item in items]),
    )


def _check_equal(padded: Any, ours: Any) -> None:
    """Both sides must compute the same before their speed is compared."""
    np.testing.assert_allclose(np.sort(padded), np.sort(ours), rtol=1e-3, atol=1e-4)


def _alternate(
    sides: Sequence[Callable[[], Any]], tokens: int, repeats: int, clock_s: Callable[[], float]
) -> list[list[float]]:
    """Tokens per second of each run of each side."""
    rates: list[list[float]] = [[] for _ in sides]
    for _ in range(repeats + 1):
        for side, run in zip(rates, sides, strict=True):
            started_s = clock_s()
            run()
            side.append(tokens / (clock_s() - started_s))
    return [side[1:] for side in rates]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", help="folder of a causal LM; default: random weights of two sizes")
    parser.add_argument("--what", nargs="+", choices=["scoring", "learning"], default=["scoring", "learning"])
    parser.add_argument("--pack-tokens", type=int, default=LearnerConfig().pack_tokens, help="of a microbatch")
    parser.add_argument("--sequences", type=int, default=64, help="sequences per batch")
    parser.add_argument("--prompt-tokens", type=int, default=PROMPT_TOKENS, help="of each sequence")
    parser.add_argument("--completions", type=int, nargs="+", help="tokens of each completion, instead of random ones")
    parser.add_argument("--shortest", type=int, default=16, help="completion tokens at least")
    parser.add_argument("--longest", type=int, default=58, help="completion tokens at most")
    parser.add_argument("--repeats", type=int, default=15, help="timed runs of each side")
    parser.add_argument("--cpu-time", action="store_true", help="measure CPU seconds: for a machine that is busy")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
