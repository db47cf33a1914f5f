#!/usr/bin/env bash
# Runs the small contract cases of tests/gpu/one_case.py, by teams and by crews (FLEXEP_PEER=1), under every tool of
# compute-sanitizer; fails if one finds anything: tools/sanitize_gpu.sh [python]
set -euo pipefail
cd "$(dirname "$0")/.."
for peer in 0 1; do
  for tool in memcheck racecheck synccheck initcheck; do
    echo "== $tool, FLEXEP_PEER=$peer"
    FLEXEP_PEER=$peer compute-sanitizer --tool "$tool" --error-exitcode 9 --print-limit 3 \
      "${1:-.venv/bin/python}" -m tests.gpu.one_case
  done
done
