# Everything starts here: `make demo` and `make test` set up what they need first; a second run skips what is done.
#   PYTHON=python3.12        the interpreter that .venv is made from; its torch is used if it is 2.10 or newer
#   TORCH=torch==2.13.0      what to install otherwise
#   PIP_ARGS="..."           options for that install, for example --index-url of a CPU-only build
#   CMAKE_ARGS="..."         configure options, for example -DFLEXEP_CUDA=OFF (then run `make clean` first)
PYTHON ?= python3
TORCH ?= torch==2.13.0
PIP_ARGS ?=
PYTEST_ARGS ?=
export CMAKE_ARGS

BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
CSRC = $(shell find csrc tests -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh')

.PHONY: help setup build demo test test-gpu bench-gpu lint format stubs wheel sanitize clean
help:
	@echo "make demo | test | test-gpu | bench-gpu | setup | lint | format | stubs | wheel | sanitize SANITIZER=asan|tsan | clean"

# --- set-up: three stamps (environment, torch, the package and its tools), then an incremental build -------------
.venv/stamp-venv:
	$(PYTHON) tools/environment.py make .venv
	touch $@

.venv/stamp-torch: .venv/stamp-venv
	$(BIN)/python tools/environment.py has-torch || $(PIP) $(PIP_ARGS) "$(TORCH)"
	touch $@

# Without build isolation, so that the build uses this environment's cmake, ninja and pybind11 from now on.
.venv/stamp-package: .venv/stamp-torch pyproject.toml setup.py constraints.txt
	$(PIP) -c constraints.txt "setuptools>=77" pybind11 cmake ninja
	PATH="$(CURDIR)/$(BIN):$$PATH" $(PIP) -c constraints.txt --no-build-isolation -e ".[dev]"
	touch $@

setup: build
build: .venv/stamp-package
	@PATH="$(CURDIR)/$(BIN):$$PATH" cmake --build build

# --- what it is for ---------------------------------------------------------------------------------------------
demo: build
	$(BIN)/flexep demo --out out/demo

test: build
	$(BIN)/python -m pytest $(PYTEST_ARGS)

# What needs GPUs; pytest's closing lines say what was skipped, and why.
test-gpu: build
	$(BIN)/python -m pytest -m "gpu or multigpu" $(PYTEST_ARGS)

bench-gpu: build
	$(BIN)/python -m bench.onegpu --out out/one-gpu.json

lint: build
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run -Werror $(CSRC)
	$(BIN)/lint-imports
	$(BIN)/python tests/layers/check_includes.py csrc

format: build
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/clang-format -i $(CSRC)

# The stub of the compiled module is a golden file (tests/packaging/test_stub.py): write it anew after a binding changed.
stubs: build
	$(BIN)/python tools/make_stub.py python/flexep/_C.pyi

wheel: .venv/stamp-venv
	rm -rf build/lib* build/bdist*
	$(BIN)/python -m pip wheel --disable-pip-version-check --no-deps --wheel-dir dist .

# The tests of the C++ rooms on an instrumented build of its own.
SANITIZER ?= asan
sanitize: build
	tools/sanitize.sh $(SANITIZER) $(PYTEST_ARGS)

clean:
	rm -rf .venv build build-* dist out python/flexep/_C*.so python/*.egg-info
