"""Top-k sets of the teacher and of the student: what they cost on the wire, and how far off the gradient of the reverse
KL is, against the exact one over the whole vocabulary.

    OMP_NUM_THREADS=1 python bench/training/top_k_sets.py                     # random distributions over 4,000 tokens
    OMP_NUM_THREADS=1 python bench/training/top_k_sets.py --model examples/smollm2/model

Gradients are by the student's logits [positions, vocabulary], by the loss's own code (`TopKTeacher.compare`), from
payloads that were encoded and decoded. The cosine is of all positions together. Bytes per token: `ids` go from actor to
buffer and on to each teacher, `scores` from each teacher to the buffer and on to the learner.

A second table has the variance of the gradient that one sampled token gives with k1, without and with a baseline
(divergence.baseline), summed over all tokens that could have been sampled: exact, nothing is drawn.

    flat      V = 4,000: teacher logits N(0, 1), student logits the same + N(0, --apart)
    a model   the student answers questions; the teacher is the same model, told in its prompt to answer in at most
              five words. Positions are the student's own tokens
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from stillhouse.engines.base import likeliest
from stillhouse.learner.batch import TopRows
from stillhouse.learner.objectives.distributions import Bucketed, TopKTeacher, mean_cost, reverse_kl
from stillhouse.learner.objectives.options import Distributions
from stillhouse.learner.objectives.sampled import k1
from stillhouse.protocol.messages import TopIdsWanted
from stillhouse.protocol.top_ids import decode_top_ids, encode_top_ids
from stillhouse.protocol.topk_codec import decode_top_k, encode_given, encode_top_k

OPTIONS = Distributions(name="reverse_kl")
INSTRUCTION = "Answer in at most five words."
SIZES = (16, 64, 256)


def between(student_CB: Tensor, teacher_CB: Tensor) -> Bucketed:
    return reverse_kl(student_CB, teacher_CB, OPTIONS)


def exact(z_NV: Tensor, q_NV: Tensor) -> Tensor:
    """d KL(p, q) / dz = p (log p - log q - KL)"""
    p_NV = z_NV.log_softmax(1)
    cost_NV = p_NV - q_NV
    return p_NV.exp() * (cost_NV - (p_NV.exp() * cost_NV).sum(1, keepdim=True))


def from_payload(payload: bytes, z_NV: Tensor) -> Tensor:
    rows = TopRows.of(decode_top_k(payload), np.arange(len(z_NV)))
    teacher = TopKTeacher.of(rows, z_NV.shape[1], torch.device("cpu"))
    return teacher.compare(z_NV.clone(), slice(None), between)[1]


def teachers_set(z_NV: Tensor, q_NV: Tensor, k: int, mass: float) -> tuple[int, int, Tensor]:
    """(bytes of ids, bytes of scores, gradient)"""
    q_NK, ids_NK = q_NV.topk(k, dim=1)
    payload = encode_top_k(ids_NK.numpy(), q_NK.numpy(), vocab_size=q_NV.shape[1], mass=mass, max_k=k)
    return 0, len(payload), from_payload(payload, z_NV)


def students_set(z_NV: Tensor, q_NV: Tensor, k: int, mass: float) -> tuple[int, int, Tensor]:
    p_NK, ids_NK = z_NV.softmax(1).topk(k, dim=1)
    ids = encode_top_ids(likeliest(ids_NK.int().numpy(), p_NK.numpy(), TopIdsWanted(k, mass)))
    given = decode_top_ids(ids)
    scores = q_NV.gather(1, torch.from_numpy(given.ids_TK).long()).numpy()
    payload = encode_given(given.ids_TK, scores, given.counts_T, vocab_size=q_NV.shape[1])
    return len(ids), len(payload), from_payload(payload, z_NV)


def variance(z_NV: Tensor, q_NV: Tensor, baseline_N: Tensor) -> float:
    """Sum over positions of E |(cost - baseline) grad s|^2 - |E cost grad s|^2, with |grad s|^2 = |onehot - p|^2."""
    s_NV = z_NV.double().log_softmax(1)
    p_NV = s_NV.exp()
    size_NV = 1.0 - 2.0 * p_NV + p_NV.square().sum(1, keepdim=True)
    squares_NV = (s_NV - q_NV.double() - baseline_N.double()[:, None]).square() * size_NV
    return float((p_NV * squares_NV).sum() - exact(z_NV.double(), q_NV.double()).square().sum())


def baselines(z_NV: Tensor, q_NV: Tensor, mass: float) -> dict[str, Tensor]:
    """Mean costs at each position, by the loss's own code."""
    s_NV, whole = z_NV.log_softmax(1), slice(None)
    found = {"k1": torch.zeros(len(z_NV)), "whole vocabulary": mean_cost(s_NV, q_NV, k1)}
    for k in SIZES:
        q_NK, ids_NK = q_NV.topk(k, dim=1)
        payload = encode_top_k(ids_NK.numpy(), q_NK.numpy(), vocab_size=q_NV.shape[1], mass=mass, max_k=k)
        rows = TopRows.of(decode_top_k(payload), np.arange(len(z_NV)))
        teacher = TopKTeacher.of(rows, z_NV.shape[1], torch.device("cpu"))
        found[f"sets of {k}"] = mean_cost(*teacher.buckets(z_NV.clone(), whole), k1)
    return found


def flat(n: int, apart: float, vocab: int = 4000) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(0)
    teacher = torch.randn((n, vocab), generator=source)
    return teacher + torch.randn((n, vocab), generator=source) * apart, teacher.log_softmax(1)


@torch.inference_mode()
def of_model(folder: Path, questions: Path, n_questions: int, n_tokens: int) -> tuple[Tensor, Tensor]:
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    torch.manual_seed(0)
    student, teacher = list[Tensor](), list[Tensor]()
    for line in questions.read_text(encoding="utf-8").splitlines()[:n_questions]:
        prompt = json.loads(line)["prompt"]
        plain, told = (
            tokenizer.apply_chat_template(
                [{"role": "user", "content": text}], add_generation_prompt=True, return_tensors="pt", return_dict=False
            )
            for text in (prompt, f"{prompt} {INSTRUCTION}")
        )
        answer = model.generate(plain, max_new_tokens=n_tokens, do_sample=True, top_k=0, top_p=1.0)[0, plain.shape[1] :]
        for read, rows in ((plain, student), (told, teacher)):
            ids = torch.cat([read[0], answer])[None]
            rows.append(model(input_ids=ids).logits[0, read.shape[1] - 1 : -1].float())
    return torch.cat(student), torch.cat(teacher).log_softmax(1)


def main() -> None:
    args = _arguments()
    torch.set_num_threads(1)
    if args.model:
        z_NV, q_NV = of_model(args.model, args.questions, args.n, args.tokens)
        print(f"{args.model}: {len(z_NV)} tokens of {args.n} answers, V = {z_NV.shape[1]}, mass {args.mass}")
    else:
        z_NV, q_NV = flat(args.n, args.apart)
        print(f"flat: {len(z_NV)} positions, V = {z_NV.shape[1]}, mass {args.mass}, {args.apart} apart")
    whole_NV, p_NV = exact(z_NV, q_NV), z_NV.log_softmax(1)
    print(f"reverse KL per token: {float((p_NV.exp() * (p_NV - q_NV)).sum(1).mean()):.3f}\n")
    print("| k | set | cosine | norm, of the exact one | ids, bytes per token | scores, bytes per token |")
    print("|---|---|---|---|---|---|")
    for k in SIZES:
        for name, side in (("teacher's", teachers_set), ("student's", students_set)):
            ids, scores, gradient_NV = side(z_NV, q_NV, k, args.mass)
            cosine = float(torch.cosine_similarity(gradient_NV.flatten(), whole_NV.flatten(), dim=0))
            share = float(gradient_NV.norm() / whole_NV.norm())
            print(f"| {k} | {name} | {cosine:.4f} | {share:.3f} | {ids / len(z_NV):.0f} | {scores / len(z_NV):.0f} |")
    print("\n| baseline of k1 | variance of one token's gradient, of that without | positions where it falls |")
    print("|---|---|---|")
    made = baselines(z_NV, q_NV, args.mass)
    for name, mean_N in made.items():
        new, old = (
            [variance(z_NV[n : n + 1], q_NV[n : n + 1], b_N[n : n + 1]) for n in range(len(z_NV))]
            for b_N in (mean_N, made["k1"])
        )
        fell, share = sum(a < b for a, b in zip(new, old, strict=True)) / len(old), sum(new) / sum(old)
        print(f"| {'none' if name == 'k1' else name} | {share:.3f} | {'' if name == 'k1' else f'{fell:.0%}'} |")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", type=Path, help="folder of a chat model; without one, random distributions")
    parser.add_argument("--questions", type=Path, default=Path("examples/smollm2/held_out.jsonl"))
    parser.add_argument("--n", type=int, default=16, help="questions, or positions")
    parser.add_argument("--tokens", type=int, default=32, help="most tokens of an answer")
    parser.add_argument("--apart", type=float, default=0.3, help="spread of the student's logits around the teacher's")
    parser.add_argument("--mass", type=float, default=0.999, help="teacher.top_mass")
    return parser.parse_args()


if __name__ == "__main__":
    main()
