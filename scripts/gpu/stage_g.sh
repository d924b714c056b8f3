# (g) an actor's tokens per second beside SGLang's own bench_serving, on one server.  bash .gpu/stage_g.sh [tiny|0.6b|1.7b] [running requests]      Back: g.log
export PYTHONUNBUFFERED=1 T=${STAGE_TMP:-/tmp} P=${STAGE_PORT:-30000}; g=$(cd "$(dirname "$0")" && pwd); : "${OUT:=/tmp/out}"; mkdir -p "$OUT"; size=${1:-1.7b}; running=${2:-64,256}; SECONDS=0
. "$g/unpack.sh" || exit 1; . "$g/serve.sh"; export PYTHONPATH="$PWD/src:$PWD:$PYTHONPATH"; m=$T/m-$size
kernels & k=$!; [ -e $m/tokenizer.json ] || python3 "$g/make_model.py" $m $size builtin/data/student || exit 1
wait $k; serve student $m $P $([ "$DEVICE" = cpu ] || echo --max-running-requests 256 --cuda-graph-max-bs-decode 256 --max-total-tokens 131072); await || { logs student > "$OUT/g.log"; exit 1; }; echo "at $SECONDS s"
timeout -k 5 ${STAGE_S:-150} python3 "$g/serving.py" http://127.0.0.1:$P $m --running "$running" ${SERVING_ARGS:-} 2>&1 | tee "$OUT/g.log" | cut -c1-600; rc=${PIPESTATUS[0]}
stop_servers; logs student >> "$OUT/g.log"; grep -h "Decode batch" $T/student.log | tail -n 3 | cut -c1-300; echo "stage g: rc $rc, $SECONDS s"
