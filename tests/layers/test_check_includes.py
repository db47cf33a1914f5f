"""The include checker passes on the tree and finds each kind of planted violation."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.layers.check_includes import EXCEPTIONS, main, violations

CSRC = Path(__file__).parents[2] / "csrc"


def test_tree_is_clean() -> None:
    assert list(violations(CSRC)) == []


@pytest.mark.parametrize(
    ("file", "line", "complaint"),
    [
        ("plan/a.h", '#include "ops/rows.h"', "lies above it"),
        ("base/a.h", '#include "plan/slots.h"', "lies above it"),
        ("mem/a.cpp", '#include "kernels/launch.h"', "lies above it"),
        ("plan/a.h", '#include "../plan/slots.h"', "relative path"),
        ("base/a.h", "#include <cuda_runtime.h>", "no CUDA header in base/"),
        ("proto/a.h", "#include <cuda/atomic>", "no CUDA header in proto/"),
        ("ops/a.cpp", "#include <torch/extension.h>", "free of torch"),
        ("bind/a.cpp", "#include <ATen/ATen.h>", "free of torch"),
        ("ops/a.h", "#include <pybind11/pybind11.h>", "belongs in bind/"),
        ("ops/a.cpp", "std::atomic<int> n;", "belong in mem/"),
        ("kernels/a.cu", "atomicAdd(p, 1);", "belong in mem/"),
        ("kernels/a.cu", "__threadfence_system();", "belong in mem/"),
        ("proto/a.h", 'asm volatile("");', "belong in mem/"),
        ("base/isa.cpp", 'asm volatile("");', "belong in mem/"),
        ("extra/a.h", "", "is no room"),
    ],
)
def test_planted_violation_is_found(
    tmp_path: Path, file: str, line: str, complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    planted = tmp_path / file
    planted.parent.mkdir()
    planted.write_text(f"// a comment may say std::atomic or asm\n{line}\n")
    [found] = violations(tmp_path)
    assert str(planted) in found
    assert complaint in found
    assert main(str(tmp_path)) == 1
    assert complaint in capsys.readouterr().out


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("base/cuda_check.h", "#include <cuda_runtime.h>"),
        ("ops/a.cu", "#include <cuda_bf16.h>"),
        ("mem/a.h", 'std::atomic<int> n; asm volatile("");'),
        ("bind/a.cpp", '#include "base/error.h"\n#include <pybind11/pybind11.h>'),
        ("plan/a.h", "/* std::atomic\n asm */ int after_the_comment;"),
    ],
)
def test_allowed_line_passes(tmp_path: Path, file: str, line: str) -> None:
    (tmp_path / file).parent.mkdir()
    (tmp_path / file).write_text(line)
    assert list(violations(tmp_path)) == []


@pytest.mark.parametrize("file", EXCEPTIONS)
def test_exception_is_needed(file: str) -> None:
    assert EXCEPTIONS[file] in (CSRC / file).read_text()


def test_an_empty_tree_is_a_violation(tmp_path: Path) -> None:
    assert main(str(tmp_path)) == 1
