# (k) a model with recurrent layers, embedded engines: log-probs beside transformers' on the same device, gradients beside the CPU's, and a run.
# bash .gpu/stage_k.sh [hybrid|hybrid-tiny|FOLDER of a model] [steps]      Back: k.log, metrics, summary
export PYTHONUNBUFFERED=1 T=${STAGE_TMP:-/tmp} DEVICE="${DEVICE:-cuda}"; g=$(cd "$(dirname "$0")" && pwd); : "${OUT:=/tmp/out}"; mkdir -p "$OUT"; m=${1:-hybrid}; steps=${2:-10}; run=$T/run-k; log=$OUT/k.log; SECONDS=0
. "$g/unpack.sh" || exit 1; export PYTHONPATH="$PWD/src:$PYTHONPATH"; rm -rf $run $run.record
[ -d "$m" ] || { m=$T/m-$m; [ -e $m/tokenizer.json ] || python3 "$g/make_model.py" $m ${1:-hybrid} builtin/data/student || exit 1; }
R="--config examples/demo.toml --device $DEVICE --student $m"; A="--actors 1 --learner.eval_every 0 --learner.checkpoint_every 0 --steps $steps --run-dir $run --record $run.record"
timeout -k 5 ${STAGE_S:-90} python3 launch/cluster.py doctor --only off-by-one,temperature,weights-taken $R --teacher $m > "$log" 2>&1; rc=$?; grep -E "^(ok|warning|failed|skipped|[0-9]+ failed)" "$log" | cut -c1-260; echo "at $SECONDS s"
timeout -k 5 ${STAGE_S:-60} python3 -m bench.training.device_step --device "$DEVICE" --model $m --tokens ${STEP_TOKENS:-512} 2>&1 | tee -a "$log" | grep -E '^\||^float32|^bfloat16|order|Error' | cut -c1-200; [ ${PIPESTATUS[0]} = 0 ] || rc=step; echo "at $SECONDS s"
timeout -k 20 ${STAGE_S:-120} python3 launch/cluster.py $R $A ${RUN_ARGS:-} >> "$log" 2>&1 || rc=run-$?
timeout ${STAGE_S:-60} python3 launch/cluster.py audit $run >> "$log" 2>&1 || rc=audit-$?
tail -n 30 "$log" | cut -c1-240; for f in metrics.jsonl summary.json; do cp $run/$f "$OUT/k-$f"; done; python3 "$g/table.py" $run; echo "stage k: rc $rc, $SECONDS s"
