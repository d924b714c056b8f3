"""What Stillhouse asks of a server, asked of one server, with its own code. In the repository's root, PYTHONPATH=src:

    python sglang_probe.py URL MODEL [--device cuda] [--backends gloo,nccl] [--noise 0.02] [--key KEY]

Prints a JSON line per check, last a verdict. Needs aiohttp, msgspec (engines.sglang) and transformers. The server's
weights are MODEL's at the end.
"""

import argparse
import json
import sys
import threading
import time
import traceback
import urllib.request

import torch
from transformers import AutoModelForCausalLM

from stillhouse.engines.sglang.config import SGLangConfig
from stillhouse.engines.sglang.features import probe_server
from stillhouse.engines.sglang.requests import bucket_update, disk_update
from stillhouse.weights.buckets import PackedLayout, WholeTensors, manifest_of
from stillhouse.weights.group_operations import host_store
from stillhouse.weights.manifest import smallest_tensor_bucket
from stillhouse.weights.transports.servers import ServerGroup

p = argparse.ArgumentParser()
p.add_argument("url")
p.add_argument("model")
p.add_argument("--device", default="cuda")
p.add_argument("--key", default="")
p.add_argument("--backends", default="gloo,nccl")
p.add_argument("--noise", type=float, default=0.02)
p.add_argument("--bucket-mib", type=int, default=512)
p.add_argument("--deadline", type=float, default=60.0)
p.add_argument("--requests", type=int, default=64)
p.add_argument(
    "--tolerance", type=float, default=0.25, help="nats, mean: stillhouse.weights.checks allows 0.25 in 16 bits"
)
a = p.parse_args()
failed, features = [], None


def post(path, body, timeout=120.0):
    r = urllib.request.Request(
        a.url + path,
        json.dumps(body).encode(),
        {"Content-Type": "application/json", **({"Authorization": f"Bearer {a.key}"} if a.key else {})},
    )
    with urllib.request.urlopen(r, timeout=timeout) as reply:
        text = reply.read().decode()
    return json.loads(text) if text[:1] in "[{" else text


def check(name):
    def run(act):
        began = time.monotonic()
        try:
            facts = act() or {}
        except Exception as error:
            detail = error.read().decode()[:400] if hasattr(error, "read") else ""
            facts = {
                "ok": False,
                "error": f"{type(error).__name__}: {str(error)[:300]} {detail}",
                "at": traceback.format_exc().splitlines()[-3:-1],
            }
        facts = {"check": name, "ok": True, **facts, "s": round(time.monotonic() - began, 3)}
        if not facts["ok"]:
            failed.append(name)
        print(json.dumps(facts), flush=True)

    return run


model = (
    AutoModelForCausalLM.from_pretrained(a.model, dtype=torch.float32 if a.device == "cpu" else torch.bfloat16)
    .to(a.device)
    .eval()
)
original = {name: t.detach().clone() for name, t in model.named_parameters()}
prompt = [(7 * i) % 200 + 20 for i in range(48)]


@torch.inference_mode()
def reference(ids):  # log-probs of each id, given those before it
    logits = model(torch.tensor([ids], device=a.device)).logits[0, :-1].float()
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(ids[1:], device=a.device)[:, None])[:, 0].cpu()


def sampled(n=64, t=1.0, timeout=60.0, **more):
    return post(
        "/generate",
        {
            "input_ids": prompt,
            "sampling_params": {"temperature": t, "max_new_tokens": n, "ignore_eos": True},
            "return_logprob": True,
            **more,
        },
        timeout,
    )


def agree(reply):
    rows = reply["meta_info"]["output_token_logprobs"]
    ids = [r[1] for r in rows]
    off = (torch.tensor([r[0] for r in rows]) - reference(prompt + ids)[len(prompt) - 1 :]).abs()
    return {
        "ok": bool(off.mean() <= a.tolerance),
        "tokens": len(ids),
        "mean_off_nats": round(float(off.mean()), 5),
        "worst_off_nats": round(float(off.max()), 5),
    }


@check("features, by Stillhouse's own probe")
def _():
    global features
    f = features = probe_server(a.url, SGLangConfig(update_mode="abort"), api_key=a.key)
    return {"version": f.version, "device": f.device, "precision": f.precision, "table": f.table()}


@check("sampled tokens and log-probs against transformers")
def _():
    return agree(sampled())


@check("greedy")
def _():
    return agree(sampled(t=0.0))


@check("log-probs of a prompt, and its likeliest ids (what a teacher sends)")
def _():
    m = sampled(1, logprob_start_len=0, top_logprobs_num=16)["meta_info"]
    got = torch.tensor([r[0] for r in m["input_token_logprobs"][1:]])
    off = (got - reference(prompt)).abs()
    return {
        "ok": bool(off.mean() <= a.tolerance),
        "mean_off_nats": round(float(off.mean()), 5),
        "top": len(m["input_top_logprobs"][1]),
    }


@check("pause, continue")
def _():
    got = []

    def one():
        try:
            got.append(sampled(512))
        except Exception as error:
            got.append({"meta_info": {"finish_reason": f"{type(error).__name__}: {error}"[:200]}})

    t = threading.Thread(target=one)
    t.start()
    time.sleep(0.2)
    post("/pause_generation", {"mode": "abort"})
    post("/continue_generation", {})
    t.join(60)
    return {
        "ended": bool(got),
        "finish": got[0]["meta_info"]["finish_reason"] if got else None,
        "after": agree(sampled()),
    }


@check("checksums (/weights_checker)")
def _():
    if a.device == "cpu":
        return {"skipped": "SGLang 0.5.17 has none on a CPU"}
    r = post("/weights_checker", {"action": "checksum"})
    return {"keys": str(r)[:200]}


def take_weights(backend, layout, port, group_name, replies):
    """What the server is asked for while the weights are sent."""
    joins = {
        "master_address": "127.0.0.1",
        "master_port": port,
        "rank_offset": 1,
        "world_size": 2,
        "group_name": group_name,
        "backend": backend,
    }
    replies.append(post("/init_weights_update_group", joins, 60.0))
    post("/pause_generation", {"mode": "abort"})
    sessions = features and features.update_sessions
    if sessions:
        replies.append(post("/begin_weight_update", {}))
    for i, bucket in enumerate(layout.buckets):
        update = bucket_update(bucket, group_name, flush=i == len(layout.buckets) - 1)
        replies.append(post("/update_weights_from_distributed", update, 120.0))
    everything = {"action": "checksum", "skip_tensor_list": [""]}
    if backend == "nccl":
        replies.append(post("/weights_checker", everything, 60.0))
        update = bucket_update(smallest_tensor_bucket(layout.buckets), group_name, flush=False)
        replies.append(post("/update_weights_from_distributed", update, 60.0))
    if sessions:
        replies.append(post("/end_weight_update", {}))
    if backend == "nccl":
        replies.append(post("/weights_checker", everything, 60.0))
    post("/continue_generation", {})


def beside(errors, act, *words):
    """`act` in a thread, whose error goes into `errors`."""

    def run():
        try:
            act(*words)
        except Exception as error:
            errors.append(f"{error} {error.read().decode()[:300] if hasattr(error, 'read') else ''}")

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def push(backend, named):
    layout = PackedLayout(manifest_of(named), a.bucket_mib << 20)
    store = host_store("127.0.0.1")
    port = store.port
    group_name = f"probe-{backend}-1"
    group = ServerGroup(
        store,
        group_name=group_name,
        world_size=2,
        backend=backend,
        device=a.device if backend == "nccl" else "cpu",
        address="127.0.0.1",
        interrupted=lambda: None,
    )
    del store
    replies, errors = [], []
    t0 = time.monotonic()
    asking = beside(errors, take_weights, backend, layout, port, group_name, replies)
    try:
        group.join(40.0)
        t1 = time.monotonic()
        group.send(1, layout, WholeTensors(named), a.deadline)
        t2 = time.monotonic()
        asking.join(60)
        t3 = time.monotonic()
    except Exception as error:
        raise RuntimeError(f"{error}; the server said {errors or replies}") from error
    finally:
        beside(errors, post, "/destroy_weights_update_group", {"group_name": group_name}, 30.0).join(31)
        group.close()
    n = layout.total_bytes
    return {
        "ok": not errors and all(r.get("success", True) for r in replies if isinstance(r, dict)),
        "errors": errors,
        "gb": round(n / 1e9, 3),
        "buckets": len(layout.buckets),
        "join_s": round(t1 - t0, 3),
        "sent_s": round(t2 - t1, 3),
        "taken_s": round(t3 - t1, 3),
        "gb_s": round(n / (t3 - t1) / 1e9, 3),
    }


def perturbed(seed):
    g = torch.Generator(a.device).manual_seed(seed)
    with torch.no_grad():
        for name, t in model.named_parameters():
            t.copy_(
                original[name]
                + a.noise
                * torch.randn(t.shape, generator=g, device=t.device, dtype=torch.float32).to(t.dtype)
                * original[name].float().std().clamp(min=1e-3).to(t.dtype)
            )
    return [(name, t.detach()) for name, t in model.named_parameters()]


for number, backend in enumerate(filter(None, a.backends.split(","))):
    for turn in range(2):

        @check(f"weights by {backend}, turn {turn}")
        def _(backend=backend, seed=10 * number + turn + 1):
            named = perturbed(seed)
            before = agree(sampled())
            facts = push(backend, named)
            after = agree(sampled())
            return {
                **facts,
                "ok": facts["ok"] and after["ok"],
                "before_the_update_off": before["mean_off_nats"],
                "after_off": after["mean_off_nats"],
            }


@check("weights from a folder")
def _():
    r = post("/update_weights_from_disk", disk_update(a.model, flush=True))
    with torch.no_grad():
        for name, t in model.named_parameters():
            t.copy_(original[name])
    return {"ok": r.get("success", False), "after": agree(sampled())}


@check("requests side by side")  # last: it may take long
def _():
    done, errors = [], []
    began = time.monotonic()

    def one():
        try:
            done.append(len(sampled(256, timeout=45.0)["meta_info"]["output_token_logprobs"]))
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}"[:120])

    threads = [threading.Thread(target=one) for _ in range(a.requests)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    return {
        "tokens_per_s": round(sum(done) / (time.monotonic() - began)),
        "requests": len(done),
        "ok": len(done) == a.requests,
        "errors": errors[:2],
    }


print(json.dumps({"verdict": "all passed" if not failed else "FAILED", "failed": failed}), flush=True)
sys.exit(bool(failed))
