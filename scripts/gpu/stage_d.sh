# (d) 1.7 billion parameters, SGLang student and embedded teacher, memory beside the estimate; then TRL on the same GPU.
# bash .gpu/stage_d.sh [nccl|gloo] [steps] [size] [TRL's steps, 0: none]      Back: d-*.log, metrics, summary
export PYTHONUNBUFFERED=1 T=${STAGE_TMP:-/tmp} P=${STAGE_PORT:-30000}; g=$(cd "$(dirname "$0")" && pwd); : "${OUT:=/tmp/out}"; mkdir -p "$OUT"; backend=${1:-nccl}; steps=${2:-6}; m=$T/m-${3:-1.7b}; trl=${4:-4}; run=$T/run-d-$backend; log=$OUT/d-$backend.log; SECONDS=0; rm -f $T/trl.txt
. "$g/unpack.sh" || exit 1; . "$g/serve.sh"; export PYTHONPATH="$PWD/src:$PYTHONPATH"; kernels; rm -rf $run
[ -e $m/tokenizer.json ] || python3 "$g/make_model.py" $m ${3:-1.7b} builtin/data/student || exit 1
serve student $m $P $([ "$DEVICE" = cpu ] || echo --mem-fraction-static 0.25)
R="--config examples/demo.toml --device $DEVICE --actors 1 --student $m --teacher $m --actor.engine sglang --actor.urls http://127.0.0.1:$P --teacher.engine torch --teacher.payload top_k --teacher.top_k 64 --learner.pack_tokens 2048 --weights.dtype bfloat16 --weights.backend $backend --learner.updates_per_batch 1 --learner.eval_every 0 --learner.checkpoint_every 0 --steps $steps ${RUN_ARGS:-}"
await || { logs student > "$log"; exit 1; }; echo "at $SECONDS s"
timeout ${STAGE_S:-60} python3 launch/cluster.py $R --check > $run.check 2>&1; echo "check: rc $?" >> $run.check
memory $run; timeout -k 20 ${STAGE_S:-180} python3 launch/cluster.py $R --run-dir $run > "$log" 2>&1; rc=$?
stop_servers
tail -n 25 "$log" | cut -c1-300; grep -iE "GPU|refus|GiB|rc " $run.check | tail -n 12 | cut -c1-300
for f in metrics.jsonl summary.json; do cp $run/$f "$OUT/d-$backend-$f"; done; python3 "$g/table.py" $run; seen; echo "at $SECONDS s"
[ "$trl" = 0 ] || PYTHONPATH=$TRL_PATH timeout -k 5 ${STAGE_S:-130} python3 "$g/trl_gpu.py" $m $m builtin/data/train.jsonl "$trl" ${TRL_SIZE:-64 96} $run > $T/trl.txt 2>&1 || tail -n 6 $T/trl.txt | cut -c1-400
grep -E 'trl_step|seconds per step' $T/trl.txt; (cat $run.check $T/memory.txt $T/trl.txt; logs student) >> "$log" 2>/dev/null; echo "stage d: rc $rc, $SECONDS s"
