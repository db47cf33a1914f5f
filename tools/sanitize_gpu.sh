#!/usr/bin/env bash
# Runs the small contract cases of tests/gpu/one_case.py under tools of compute-sanitizer (why not initcheck:
# docs/one-gpu.md); fails if one finds anything: tools/sanitize_gpu.sh [python]
set -euo pipefail
cd "$(dirname "$0")/.."
for tool in memcheck racecheck synccheck; do
  echo "== $tool"
  compute-sanitizer --tool "$tool" --error-exitcode 9 --print-limit 3 "${1:-.venv/bin/python}" -m tests.gpu.one_case
done
