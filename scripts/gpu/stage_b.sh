# (b) one SGLang server on the GPU, and what Stillhouse asks of it.  bash .gpu/stage_b.sh [tiny|0.6b|1.7b] [backends]      Back: b.log
export PYTHONUNBUFFERED=1 T=${STAGE_TMP:-/tmp} P=${STAGE_PORT:-30000}; g=$(cd "$(dirname "$0")" && pwd); : "${OUT:=/tmp/out}"; mkdir -p "$OUT"; size=${1:-1.7b}; backends=${2:-gloo,nccl}; SECONDS=0
. "$g/unpack.sh" || exit 1; . "$g/serve.sh"; export PYTHONPATH="$PWD/src:$PYTHONPATH"; m=$T/m-$size
kernels & k=$!; [ -e $m/tokenizer.json ] || python3 "$g/make_model.py" $m $size builtin/data/student || exit 1
wait $k; serve student $m $P; await || { logs student > "$OUT/b.log"; exit 1; }; echo "at $SECONDS s"
nvidia-smi --query-compute-apps=pid,used_memory --format=csv,noheader
timeout -k 5 ${STAGE_S:-200} python3 "$g/sglang_probe.py" http://127.0.0.1:$P $m --device "$DEVICE" --backends "$backends" --deadline ${STAGE_S:-40} ${PROBE_ARGS:-} 2>&1 | tee "$OUT/b.log" | grep --line-buffered -oE '^\{.{0,900}'; rc=${PIPESTATUS[0]}
grep -q verdict "$OUT/b.log" || tail -n 12 "$OUT/b.log" | cut -c1-300; logs student >> "$OUT/b.log"; stop_servers
grep -hE "Error|attn|KV Cache|max_total|compil" $T/student.log | grep -v "disconnected\|server_args=" | tail -12 | cut -c1-400
python3 - "$OUT/b.log" <<'P2'
import json, sys
for r in (json.loads(line) for line in open(sys.argv[1], errors="replace") if line.startswith('{"check"')):
    print(f"{'ok' if r['ok'] else 'FAILED':7}{r['s']:>8.2f} s  {r['check'][:52]:53}", *(f"{k} {r[k]}" for k in ("mean_off_nats", "join_s", "taken_s", "gb_s", "after_off", "tokens_per_s") if k in r))
P2
echo "stage b: rc $rc, $SECONDS s"
