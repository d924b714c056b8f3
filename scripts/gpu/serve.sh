# Sourced by the stages, after unpack.sh:  serve NAME MODEL PORT [ARGS...]  starts a server (log: /tmp/NAME.log);  await  waits for all, and gives up at once when
# one has died;  kernels  compiles what the bundle lacks;  stop_servers  kills what serve started, also when the script ends;  memory RUN, seen  print each role's memory beside the plan;  on_servers  is what makes auto take servers. Dry run: DEVICE=cpu SERVE_ARGS=... SGLANG_PYTHON=...
export NCCL_SOCKET_IFNAME=lo GLOO_SOCKET_IFNAME=lo NCCL_NET=Socket NCCL_IB_DISABLE=1 NCCL_MNNVL_ENABLE=0 NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1
export NCCL_CUMEM_ENABLE=0 NCCL_NVLS_ENABLE=0 NCCL_RAS_ENABLE=0 TORCH_NCCL_ASYNC_ERROR_HANDLING=2 TORCH_NCCL_DUMP_ON_TIMEOUT=0
export no_proxy=127.0.0.1,localhost NO_PROXY=127.0.0.1,localhost TVM_FFI_CACHE_DIR="$GPU_SITE/jit" DEVICE="${DEVICE:-cuda}"
PATH="$PATH:$(dirname "$STILLHOUSE_BASE_PYTHON"):/usr/local/cuda/bin"  # ninja and nvcc, should they not be on it
# mem-fraction: SGLang takes fraction x (free at its start) for weights and cache, and fails if others take the rest meanwhile; the cache is bounded by tokens.
: "${SERVE_ARGS:=--device cuda --attention-backend triton --sampling-backend pytorch --grammar-backend none --mem-fraction-static 0.45 --max-total-tokens 65536 --max-running-requests 64 --cuda-graph-max-bs-decode 64 --disable-prefill-cuda-graph --skip-server-warmup --random-seed 0 --incremental-streaming-output --log-level-http warning}"
SERVERS=()
stop_servers() { local s; for s in "${SERVERS[@]}"; do kill -KILL -- "-${s##*:}" 2>/dev/null; wait "${s##*:}" 2>/dev/null; done; SERVERS=(); }
memory() { rm -f $T/memory.txt; python3 "$g/memory.py" "$1" > $T/memory.txt 2>&1 & MEMORY=$!; }
on_servers() { echo "--device $DEVICE"; [ "$DEVICE" = cpu ] && echo "--actor.engine sglang --teacher.engine sglang" || echo "--actor.server.python $SGLANG_PYTHON --teacher.server.python $SGLANG_PYTHON"; }
seen() { kill $MEMORY 2>/dev/null; wait $MEMORY; cat $T/memory.txt; }
trap stop_servers EXIT; trap 'exit 143' TERM INT HUP
serve() { local name=$1 model=$2 port=$3; shift 3
  ! (exec 3<>/dev/tcp/127.0.0.1/$port) 2>/dev/null || { echo "port $port is taken: a server of an earlier try?"; exit 1; }
  set -m  # a process group of its own, so that all of a server's processes can be killed; not a session of its own
  env -u PYTHONPATH "$SGLANG_PYTHON" -m sglang.launch_server --model-path "$model" --host 127.0.0.1 --port "$port" $SERVE_ARGS "$@" > "$T/$name.log" 2>&1 < /dev/null &
  SERVERS+=("$name:$port:$!"); set +m; echo "$name pid $! port $port"; }
await() { python3 - "${AWAIT_S:-150}" "$T" "${SERVERS[@]}" <<'P2'
import sys, time, urllib.request
limit, folder, began = float(sys.argv[1]), sys.argv[2], time.monotonic()
for name, port, pid in (s.split(":") for s in sys.argv[3:]):
    why = "does not answer"
    while True:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/model_info", timeout=5).read(); why = ""
        except OSError: pass
        try: dead = open(f"/proc/{pid}/stat").read().rsplit(")", 1)[1].split()[0] in "ZX"
        except OSError: dead = True
        if dead: why = "has ended"  # also when another program answers on its port
        if not why or dead or time.monotonic() - began > limit: break
        time.sleep(0.5)
    if why:
        print(f"server {name} {why} after {time.monotonic() - began:.0f} s; {folder}/{name}.log ends with:"); print(*open(f"{folder}/{name}.log", errors="replace").read().splitlines()[-30:], sep="\n"); sys.exit(1)
    print(f"server {name} ready after {time.monotonic() - began:.0f} s", flush=True)
P2
}
kernels() { [ "$DEVICE" != cpu ] || return 0; local n pids=(); rm -f $T/jit[0-9]*.log; for n in $(python3 "$g/precompile_jit.py" --missing); do
    (timeout -k 5 "${JIT_S:-120}" "$SGLANG_PYTHON" "$g/precompile_jit.py" --job "$n" || echo "kernel number $n: rc $?") > "$T/jit$n.log" 2>&1 & pids+=($!); done
  [ ${#pids[@]} = 0 ] || { wait "${pids[@]}"; cat $T/jit[0-9]*.log | grep -E '^kernel|Error' | cut -c1-600; }
  echo "kernels: $(ls "$TVM_FFI_CACHE_DIR"/*/*.so 2>/dev/null | wc -l) there, missing (SGLang compiles them when it needs them): $(python3 "$g/precompile_jit.py" --missing)"; }
logs() { local s; for s in "$@"; do echo "=== $T/$s.log"; grep -v "^$" "$T/$s.log" | tail -n 3000; done; }
