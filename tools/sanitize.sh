#!/usr/bin/env bash
# tools/sanitize.sh asan|tsan [pytest arguments]: builds the preset of that name and runs the tests of the C++ rooms
# on it, through Python. The instrumented module lies in a copy of the package, so the normal build stays as it is.
set -euo pipefail
cd "$(dirname "$0")/.."
preset=$1
shift
case $preset in
  asan) library=libasan.so ;;
  tsan) library=libtsan.so ;;
  *) echo "tools/sanitize.sh: asan or tsan, not $preset" >&2; exit 2 ;;
esac
export PATH="$PWD/.venv/bin:$PATH"
cmake --preset "$preset"
cmake --build --preset "$preset"
package=build-$preset/python/flexep
find "$package" -name '*.py' -delete
(cd python/flexep && find . -name '*.py' -exec cp --parents {} "$OLDPWD/$package" \;)
# Python itself is not instrumented: its leaks are not ours, and the sanitizer's library must come first.
export PYTHONPATH="$PWD/build-$preset/python" ASAN_OPTIONS=detect_leaks=0
export TSAN_OPTIONS="suppressions=$PWD/tools/tsan.supp halt_on_error=1 log_path=$PWD/build-$preset/report"
# A report is in build-tsan/report.<process>, since pytest holds standard error back.
LD_PRELOAD=$("${CXX:-c++}" -print-file-name="$library") python -m pytest ${@:-tests/plan tests/native tests/ops}
