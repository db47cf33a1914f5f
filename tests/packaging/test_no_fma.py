"""Products and sums round separately (docs/numerics.md): no path of the row functors may hold a fused multiply-add,
those for processors that this machine does not have included."""

from __future__ import annotations

import re
import shutil
import subprocess

from flexep._native._load import _C

FUSED = re.compile(r"\b(vfn?m(add|sub)\w*|fn?m(add|sub)|fml[as])\b")


def fused(assembly: str) -> list[str]:
    return [line for line in assembly.splitlines() if FUSED.search(line)]


def test_the_compiled_module_holds_no_fused_multiply_add() -> None:
    objdump = shutil.which("objdump")
    assert objdump, "binutils come with the compiler that built flexep"
    assembly = subprocess.run(
        [objdump, "-d", "--no-show-raw-insn", _C.__file__], capture_output=True, text=True, check=True
    )
    assert len(assembly.stdout) > 100_000
    assert not fused(assembly.stdout)


def test_a_fused_instruction_would_be_seen() -> None:
    assert fused("  1a: vfmadd231ps %zmm1,%zmm2,%zmm3")
    assert fused("  1a: fmadd s0, s1, s2, s3")
    assert not fused("  1a: vmulps %zmm1,%zmm2,%zmm3")
