# (f) the demo on real servers: each process is killed once, and a server in the middle of a version; memory.  bash .gpu/stage_f.sh [steps]      Back: f.log, metrics, summary
export PYTHONUNBUFFERED=1 T=${STAGE_TMP:-/tmp}; g=$(cd "$(dirname "$0")" && pwd); : "${OUT:=/tmp/out}"; mkdir -p "$OUT"; steps=${1:-50}; run=$T/run-f; log=$OUT/f.log; SECONDS=0
. "$g/unpack.sh" || exit 1; . "$g/serve.sh"; export PYTHONPATH="$PWD/src:$PWD:$PYTHONPATH"; kernels; rm -rf $run $run.*
memory $run; timeout -k 20 ${STAGE_S:-280} python3 "$g/kills.py" $run $(on_servers) --steps $steps ${RUN_ARGS:-} > "$log" 2>&1; rc=$?
cat $run.out >> "$log"; for f in metrics.jsonl summary.json; do cp $run/$f "$OUT/f-$f"; done; [ $rc = 0 ] || tail -n 30 $run.out | cut -c1-300
for f in server-actor-0 server-teacher-0; do echo "=== $f"; tail -n 1000 $run/logs/$f.log; done >> "$log"; python3 "$g/table.py" $run; seen; head -n 20 "$log" | cut -c1-200; echo "stage f: rc $rc, $SECONDS s"
