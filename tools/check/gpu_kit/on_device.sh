#!/bin/bash
# Runs on the machine with the GPU; README.md has the order.
#   on_device.sh unpack PART...   unpacks parts that prepare.sh has made
#   on_device.sh [-b] STAGE...    runs stages; -b in the background, which outlives the call
#   on_device.sh wait             waits for the background's stages and shows what they printed
#   on_device.sh logs             packs all logs into $OUT
# Each stage has a limit in seconds, prints its figures at once, and can be run again; its log is in $KIT/logs and, where
# OUT is set, in $OUT.
KIT=${KIT:-${TMPDIR:-/tmp}/kit}
PY=${PY:-$(command -v python3)}
PROJECT=${PROJECT:-$KIT/project}
mkdir -p "$KIT/logs" "$KIT/runs"
export PYTHONPATH=$PROJECT:$KIT/site PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
export VLLM_USE_DEEP_GEMM=0 VLLM_NO_USAGE_STATS=1 VLLM_DO_NOT_TRACK=1 PYTHONWARNINGS=ignore NVTE_FRAMEWORK=pytorch
export TORCHINDUCTOR_CACHE_DIR=$KIT/cache/inductor TRITON_CACHE_DIR=$KIT/cache/triton
export VLLM_CACHE_ROOT=$KIT/cache/vllm CUDA_CACHE_PATH=$KIT/cache/cuda
SHAPES=examples/shapes

limited() { # limited STAGE SECONDS COMMAND...
  local stage=$1 seconds=$2 began=$SECONDS rc
  shift 2
  echo "=== stage $stage, at most $seconds s: $*" | cut -c1-300
  (cd "$PROJECT" && KIT_STAGE=$stage timeout -k 10 "$seconds" "$@") > "$KIT/logs/$stage.log" 2>&1
  rc=$?
  [ $rc -ne 0 ] && free_gpu "$stage"
  grep -v -i -E "warn|Redirects are|torch/utils/cpp_ext|^$" "$KIT/logs/$stage.log" | tail -"${LINES_SHOWN:-40}" | cut -c1-1500
  echo "=== stage $stage: exit code $rc after $((SECONDS - began)) s; GPU holds $(nvidia-smi --query-gpu=memory.used --format=csv,noheader 2> /dev/null | head -1)"
  [ -n "$OUT" ] && cp "$KIT/logs/$stage.log" "$OUT/stage_$stage.log"
  return $rc
}
free_gpu() { # end what a stage that failed has left on the GPU, its own processes alone
  sleep 2
  for pid in $(nvidia-smi --query-compute-apps=pid --format=csv,noheader 2> /dev/null); do
    tr '\0' '\n' < "/proc/$pid/environ" 2> /dev/null | grep -q "^KIT_STAGE=$1$" || continue
    echo "process $pid of stage $1 was left: killed"
    kill -9 "$pid"
  done
}
check() { # check STAGE SECONDS FOLDER ARGUMENT...: items of tools/check_gpu.py
  local stage=$1 seconds=$2 folder=$3
  shift 3
  limited "$stage" "$seconds" "$PY" tools/check_gpu.py --keep "$KIT/runs/$folder" --timeout $((seconds - 15)) "$@"
}
update() { # update STAGE SECONDS SHAPE ARGUMENT...: tools/bench/update.py with random weights
  local stage=$1 seconds=$2 shape=$3 model
  shift 3
  model=$(cd "$PROJECT" && "$PY" tools/bench/random_model.py "$SHAPES/$shape.json" 2> "$KIT/logs/$stage.model.log" | tail -1)
  limited "$stage" "$seconds" "$PY" tools/bench/update.py --model "$model" "$@"
}

extract() { # extract ARCHIVE FOLDER
  tar xJf "$1" -C "$2" 2> /dev/null || "$PY" -c "import sys, tarfile; tarfile.open(sys.argv[1]).extractall(sys.argv[2])" "$1" "$2"
}
unpack() {
  local began=$SECONDS part archive
  mkdir -p "$KIT/site" "$KIT/project"
  for part in "$@"; do
    for archive in "$part"/site_*.tar.xz; do [ -f "$archive" ] && extract "$archive" "$KIT/site" & done
    [ -f "$part/project.tar.xz" ] && extract "$part/project.tar.xz" "$KIT/project" &
    cp -f "$part"/model.? "$part/model_size" "$part/on_device.sh" "$KIT/" 2> /dev/null
  done
  wait
  if [ ! -d "$KIT/smollm2" ] && [ "$(cat "$KIT"/model.? 2> /dev/null | wc -c)" = "$(tr -dc 0-9 < "$KIT/model_size")" ]; then
    cat "$KIT"/model.? > "$KIT/model.zip"
    "$PY" -m zipfile -e "$KIT/model.zip" "$KIT/site" && rm -f "$KIT"/model.? "$KIT/model.zip"
    (cd "$PROJECT" && timeout 150 "$PY" tools/prepare_smollm2.py --out "$KIT/smollm2" 2>&1 | tail -1)
  fi
  # Byte code on all cores; otherwise each process compiles what it imports.
  (cd "$KIT" && setsid nohup "$PY" -m compileall -q -j 0 site project/ctrl_megatron > /dev/null 2>&1 &)
  echo "unpacked $* in $((SECONDS - began)) s: $(du -sm "$KIT/site" | cut -f1) MiB of packages"
}

stage() {
  case $1 in
    1) limited 1 90 bash -c "nvidia-smi -L; $PY tools/check/gpu_kit/probes.py; $PY tools/check_env.py" ;;
    2) LINES_SHOWN=12 check 2 150 logits --only logits ;;
    3) check 3 180 cuda_ipc --only "run: cuda_ipc" ;;
    4a) check 4a 120 shared_memory --only "run: shared memory" ;;
    4b) check 4b 120 shards --only "run: shards" ;;
    5) check 5 240 smollm2 --model "$KIT/smollm2" --only training agrees rates ;;
    6) check 6 400 large --only training memory growth agrees rates ;;
    7) update 7 150 qwen3-0.6b --prompt 8192 --response 8192 --rows 1 --budget 16384 --rounds 3 ;;
    7a) update 7a 200 qwen3-0.6b --prompt 32768 --response 32768 --rows 1 --budget 65536 --rounds 3 --recompute full ;;
    7b) update 7b 200 qwen3-4b --lora-rank 16 --prompt 8192 --response 8192 --rows 1 --budget 16384 --rounds 3 --recompute full ;;
    7c) update 7c 150 qwen3-0.6b --prompt 512 --response 512 --rows 32 --group 8 --budget 16384 --rounds 2 --profile ;;
    8) check 8 400 3b --shape "$SHAPES/smollm3-3b.json" --only training memory rates ;;
    9) update 9 250 smollm3-3b --prompt 512 --response 512 --rows 32 --group 8 --budget 8192 --rounds 3 --recompute full ;;
    9b) update 9b 400 qwen2.5-7b --prompt 512 --response 512 --rows 32 --group 8 --budget 8192 --rounds 3 --recompute full --optimizer-cpu-offload ;;
    10) check 10 180 fp8 --only "run: fp8" ;;
    11) check 11 150 adapters --only "run: adapters" ;;
    12) check 12 150 experts --only "run: experts" ;;
    13) check 13 150 fsdp --only "run: fsdp" ;;
    13b) check 13b 150 on_host --only "run: optimizer" ;;
    14) check 14 200 resume --only optimizer: ;;
    15) check 15 300 stop --only stop ;;
    16) LINES_SHOWN=60 limited 16 560 "$PY" tools/demo.py ;;
    logs) tar cJf "$OUT/logs.tar.xz" -C "$KIT" logs $(cd "$KIT" && ls -d runs/*/*.log runs/*/runs/*/*.log runs/*/runs/*/metrics.jsonl 2> /dev/null) && ls -la "$OUT" ;;
    wait)
      for _ in $(seq 1 "${WAIT_S:-200}"); do
        kill -0 "$(cat "$KIT/logs/background.pid" 2> /dev/null)" 2> /dev/null || break
        sleep 1
      done
      cat "$KIT/logs/background.txt" 2> /dev/null
      : > "$KIT/logs/background.txt" ;;
    *) echo "no stage $1" && return 2 ;;
  esac
}

case $1 in
  unpack) shift && unpack "$@" ;;
  -b)
    shift
    setsid nohup bash "$0" "$@" >> "$KIT/logs/background.txt" 2>&1 < /dev/null &
    echo $! > "$KIT/logs/background.pid"
    echo "in the background: $*" ;;
  *)
    status=0
    for one in "$@"; do stage "$one" || status=$?; done
    exit $status ;;
esac
