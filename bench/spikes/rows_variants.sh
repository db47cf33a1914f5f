#!/bin/bash
# Builds and runs rows_variants.cu with other constants of csrc/ops: bench/spikes/rows_variants.sh build|run FOLDER
set -euo pipefail
do=$1
to=$(mkdir -p "$2" && cd "$2" && pwd)
root=$(cd "$(dirname "$0")/../.." && pwd)
nvcc="nvcc -std=c++20 -gencode=arch=compute_90a,code=sm_90a -O3 --fmad=false"

# name | sed script over csrc/ops/rows_{vector,gather,reduce,launch}.*
variants='as_is|
store_plain|s/constexpr int kVectorBytes = 16;/&\ntemplate <class T> __device__ __forceinline__ void plain(T* to, T value) { *to = value; }/;s/__stcs/plain/
store_cg|s/__stcs/__stcg/
load_cs|s/return __ldg(reinterpret_cast/return __ldcs(reinterpret_cast/
expand_2_ctas|s/kExpandCtas = 4/kExpandCtas = 2/
expand_at_once_2|s/kVectorsAtOnce = 4/kVectorsAtOnce = 2/;s/kExpandCtas = 4/kExpandCtas = 6/
tile_896|s/kTileVectors = 2048/kTileVectors = 896/
tile_4096|s/kTileVectors = 2048/kTileVectors = 4096/
reduce_4_at_once|s/kGroups ? 4 : 8/4/;s/kReduceCtas = 4/kReduceCtas = 5/
reduce_3_ctas|s/kReduceCtas = 4/kReduceCtas = 3/
reduce_2_ctas|s/kReduceCtas = 4/kReduceCtas = 2/
dot_4|s/kDotVectors = 2/kDotVectors = 4/'

build() {
  local name=$1 script=$2 at=$to/src.$1
  rm -rf "$at" && mkdir -p "$at" && cp -r "$root/csrc" "$at/csrc"
  sed -i "$script" "$at"/csrc/ops/rows_{vector,gather,reduce,launch}.cuh
  (cd "$at" && $nvcc -Icsrc "$root/bench/spikes/rows_variants.cu" csrc/ops/rows_gather.cu csrc/ops/rows_reduce.cu -o "$to/$name")
  rm -rf "$at"
}
export -f build
export to root nvcc

if [ "$do" = build ]; then
  while IFS='|' read -r name script; do
    printf '%s\0%s\0' "$name" "$script"
  done <<<"$variants" | xargs -0 -n 2 -P "${JOBS:-2}" bash -c 'build "$0" "$1"'
else
  while IFS='|' read -r name _; do
    "$to/$name" "$name" $([ "$name" = as_is ] && echo all)
  done <<<"$variants"
fi
