# (e) a version by ipc, gloo and NCCL, side by side; then the demo by what auto chooses.  bash .gpu/stage_e.sh [megabytes] [steps]      Back: e.log, metrics, summary
export PYTHONUNBUFFERED=1 T=${STAGE_TMP:-/tmp}; g=$(cd "$(dirname "$0")" && pwd); : "${OUT:=/tmp/out}"; mkdir -p "$OUT"; megabytes=${1:-3400}; steps=${2:-50}; run=$T/run-e; log=$OUT/e.log; SECONDS=0
. "$g/unpack.sh" || exit 1; . "$g/serve.sh"; export PYTHONPATH="$PWD/src:$PYTHONPATH"; kernels; rm -rf $run
timeout -k 5 ${STAGE_S:-90} python3 "$g/transports.py" --device "$DEVICE" --megabytes $megabytes 2>&1 | tee "$log" | cut -c1-300; rc=${PIPESTATUS[0]}; echo "at $SECONDS s"
D="--config $g/gpu_demo.toml --device $DEVICE --steps $steps --actor.server.python $SGLANG_PYTHON --teacher.server.python $SGLANG_PYTHON ${RUN_ARGS:-}"
memory $run; timeout -k 20 ${STAGE_S:-150} python3 launch/cluster.py $D --run-dir $run >> "$log" 2>&1 || rc=demo-$?
timeout ${STAGE_S:-60} python3 launch/cluster.py audit $run >> "$log" 2>&1 || rc=audit-$?
tail -n 40 "$log" | cut -c1-300; for f in metrics.jsonl summary.json; do cp $run/$f "$OUT/e-$f"; done; python3 "$g/table.py" $run; seen; echo "stage e: rc $rc, $SECONDS s"
