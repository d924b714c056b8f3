# (c) the whole system on one GPU: SGLang student and teacher, weights by NCCL (else gloo).  bash .gpu/stage_c.sh [nccl|gloo] [steps]      Back: c-*.log, metrics, summary
export PYTHONUNBUFFERED=1 T=${STAGE_TMP:-/tmp} P=${STAGE_PORT:-30000}; g=$(cd "$(dirname "$0")" && pwd); : "${OUT:=/tmp/out}"; mkdir -p "$OUT"; backend=${1:-nccl}; steps=${2:-20}; run=$T/run-c-$backend; log=$OUT/c-$backend.log; SECONDS=0
. "$g/unpack.sh" || exit 1; . "$g/serve.sh"; export PYTHONPATH="$PWD/src:$PYTHONPATH"; kernels; rm -rf $run $run.record
serve student builtin/data/student $P; serve teacher builtin/data/teacher $((P + 1)); await || { logs student teacher > "$log"; exit 1; }; echo "at $SECONDS s"
# urls: the launcher does not know these servers' GPU, so --weights.backend nccl is accepted (launch/checks/placement.py, _impossible)
memory $run; timeout -k 20 ${STAGE_S:-130} python3 launch/cluster.py --config examples/demo.toml --device "$DEVICE" --steps $steps --actors 1 --actor.engine sglang --teacher.engine sglang --actor.urls http://127.0.0.1:$P \
  --teacher.urls http://127.0.0.1:$((P + 1)) --teacher.payload top_k --teacher.top_k 256 --weights.backend $backend --weights.verify_every 1 --learner.eval_every 0 --run-dir $run --record $run.record > "$log" 2>&1; rc=$?
[ $rc != 0 ] || timeout ${STAGE_S:-60} python3 launch/cluster.py audit $run >> "$log" 2>&1 || rc=audit-$?
stop_servers; tail -n 40 "$log" | cut -c1-300; logs student teacher >> "$log"; for f in metrics.jsonl summary.json; do cp $run/$f "$OUT/c-$backend-$f"; done
python3 "$g/table.py" $run; seen; echo "stage c: rc $rc, $SECONDS s"
