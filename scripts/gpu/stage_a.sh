# (a) NCCL, two ranks on one GPU; meanwhile the bundle is unpacked and missing kernels are compiled.  bash .gpu/stage_a.sh      Back: a.log
export PYTHONUNBUFFERED=1 T=${STAGE_TMP:-/tmp} P=${STAGE_PORT:-30000}; g=$(cd "$(dirname "$0")" && pwd); : "${OUT:=/tmp/out}"; mkdir -p "$OUT"; SECONDS=0; rm -f $T/nccl.log
nvidia-smi --query-gpu=name,driver_version,memory.used,compute_mode --format=csv,noheader; df -h /tmp /dev/shm | tail -2; (ip -br a || cat /proc/net/dev) 2>/dev/null
for p in python3 nvcc ninja gcc g++ xz curl pgrep; do echo "$p: $(command -v $p || echo ABSENT)"; done
( . "$g/unpack.sh" && . "$g/serve.sh" && kernels; echo "prepared after $SECONDS s" ) > $T/unpack.log 2>&1 & prepare=$!
timeout -k 5 ${STAGE_S:-170} python3 "$g/nccl_one_gpu.py" --backend "${BACKEND:-nccl}" --mib "${MIB:-512}" --limit ${STAGE_S:-50} --only "${RECIPES:-bare,hostid,hostid-safe}" --log $T/nccl.log > "$OUT/a.log" 2>&1; rc=$?
cut -c1-2500 "$OUT/a.log"; cat $T/nccl.log >> "$OUT/a.log"; wait $prepare; cat $T/unpack.log | tee -a "$OUT/a.log"; echo "stage a: rc $rc, $SECONDS s"
