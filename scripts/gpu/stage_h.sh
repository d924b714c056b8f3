# (h) student and teacher on servers that the launcher starts, each role's memory beside the plan.  bash .gpu/stage_h.sh [tiny|0.6b|1.7b] [steps]      Back: h.log, metrics, summary
export PYTHONUNBUFFERED=1 T=${STAGE_TMP:-/tmp}; g=$(cd "$(dirname "$0")" && pwd); : "${OUT:=/tmp/out}"; mkdir -p "$OUT"; size=${1:-1.7b}; steps=${2:-4}; m=$T/m-$size; run=$T/run-h; log=$OUT/h.log; SECONDS=0
. "$g/unpack.sh" || exit 1; . "$g/serve.sh"; export PYTHONPATH="$PWD/src:$PYTHONPATH"; kernels; rm -rf $run
[ -e $m/tokenizer.json ] || python3 "$g/make_model.py" $m $size builtin/data/student || exit 1
memory $run; timeout -k 20 ${STAGE_S:-200} python3 launch/cluster.py --config "$g/gpu_demo.toml" $(on_servers) --steps $steps --student $m --teacher $m --learner.pack_tokens 2048 --learner.eval_every 0 --learner.checkpoint_every 0 ${RUN_ARGS:-} --run-dir $run > "$log" 2>&1; rc=$?
tail -n 25 "$log" | cut -c1-300; for f in metrics.jsonl summary.json; do cp $run/$f "$OUT/h-$f"; done; for f in server-actor-0 server-teacher-0; do echo "=== $f"; tail -n 1000 $run/logs/$f.log; done >> "$log"
grep -hE "KV Cache|max_total|avail mem" $run/logs/server-*.log | grep -v server_args= | tail -n 8 | cut -c1-200; python3 "$g/table.py" $run; seen; echo "stage h: rc $rc, $SECONDS s"
