# (i) the learner: seconds of a step, share of the card's rate, where the time goes; torch's attention for packs and torch.compile beside it.
# bash .gpu/stage_i.sh [tiny|0.6b|1.7b] [tokens of a pack]      Back: i.log
export PYTHONUNBUFFERED=1 T=${STAGE_TMP:-/tmp} DEVICE="${DEVICE:-cuda}"; g=$(cd "$(dirname "$0")" && pwd); : "${OUT:=/tmp/out}"; mkdir -p "$OUT"; m=$T/m-${1:-1.7b}; SECONDS=0
. "$g/unpack.sh" || exit 1; export PYTHONPATH="$PWD/src:$PYTHONPATH"
[ -e $m/tokenizer.json ] || python3 "$g/make_model.py" $m ${1:-1.7b} builtin/data/student || exit 1
echo "at $SECONDS s"; PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True timeout -k 5 ${STAGE_S:-150} python3 -m bench.training.learner_profile --device "$DEVICE" --model $m --tokens ${2:-16384} ${PROFILE_ARGS:-} 2>&1 | tee "$OUT/i.log" | grep -v USDT | cut -c1-220; rc=${PIPESTATUS[0]}
echo "stage i: rc $rc, $SECONDS s"
