# (j) seconds to accuracy 0.75 on the built-in task: ours and TRL's on the same device, one after the other.  bash .gpu/stage_j.sh [steps]      Back: j.log. KEEP=1: only the side that is missing
export PYTHONUNBUFFERED=1 T=${STAGE_TMP:-/tmp} DEVICE="${DEVICE:-cuda}"; g=$(cd "$(dirname "$0")" && pwd); : "${OUT:=/tmp/out}"; mkdir -p "$OUT"; SECONDS=0
. "$g/unpack.sh" || exit 1; export PYTHONPATH="$PWD/src:$PYTHONPATH"; [ -n "${KEEP:-}" ] || rm -rf $T/race
printf '#!/bin/sh\nPYTHONPATH="%s:$PYTHONPATH" exec "%s" "$@"\n' "$TRL_PATH" "$STILLHOUSE_BASE_PYTHON" > $T/trl-python; chmod +x $T/trl-python
TRL_PYTHON=$T/trl-python timeout -k 20 ${STAGE_S:-280} python3 -m bench.race.against_trl --folder $T/race --settings ${SETTINGS:-best} --seeds 0 --device "$DEVICE" --steps ${1:-80} --answers 1 ${RACE_ARGS:-} 2>&1 | tee "$OUT/j.log" | cut -c1-400; rc=${PIPESTATUS[0]}
[ $rc = 0 ] || tail -n 8 $T/race/*/*.log | cut -c1-300 | tee -a "$OUT/j.log"; echo "stage j: rc $rc, $SECONDS s"
