"""The rules between the C++ rooms, checked on the text: `python tests/layers/check_includes.py csrc`.

- includes point downwards only: base <- plan <- proto <- mem <- ops <- kernels <- bind;
- no CUDA header in base (except cuda_check.h), plan and proto;
- std::atomic, fences and inline assembly only in mem;
- torch nowhere, pybind11 only in bind.

Prints one line per violation and exits 1 if there is any, or if it finds no source at all.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOMS = ("base", "plan", "proto", "mem", "ops", "kernels", "bind")
SUFFIXES = {".h", ".cuh", ".cpp", ".cu"}

# Where a primitive lives outside mem/ because it orders no memory: file (below csrc) -> what it may use.
EXCEPTIONS = {
    "base/isa.cpp": "std::atomic",  # a process-wide setting, read and written relaxed
}

INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', re.MULTILINE)
COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
CUDA_HEADER = re.compile(r"^(cuda|cooperative_groups|cub/|thrust/|nv/|nccl|nvshmem|curand|cublas)")
TORCH_HEADER = re.compile(r"^(torch/|ATen/|c10/)")
ATOMICS = re.compile(
    r"\bstd::atomic|\batomic(?:Add|Sub|Exch|CAS|Min|Max|Or|And)\w*\s*\(|__atomic_|__threadfence|_mm_[ml]?fence"
)
ASSEMBLY = re.compile(r"\b(?:asm|__asm__)\b")


def without_comments(text: str) -> str:
    """The text with comments blanked, line numbers kept."""
    return COMMENT.sub(lambda match: "\n" * match.group().count("\n"), text)


def violations(root: Path) -> Iterator[str]:
    """Yields "file:line: what is wrong" for every source under `root` (a csrc folder)."""
    sources = sorted(path for path in root.rglob("*") if path.suffix in SUFFIXES)
    if not sources:
        yield f"{root}: no C++ sources found"
    for path in sources:
        room = path.relative_to(root).parts[0]
        if room not in ROOMS:
            yield f"{path}:1: {room}/ is no room; the rooms are {', '.join(ROOMS)}"
            continue
        text = without_comments(path.read_text())
        for match in INCLUDE.finditer(text):
            for problem in include_problems(room, path.name, match.group(1)):
                yield f"{path}:{line_of(text, match.start(1))}: {problem}"
        if room != "mem":
            for pattern, what in ((ATOMICS, "atomics and fences"), (ASSEMBLY, "inline assembly")):
                for match in pattern.finditer(text):
                    if EXCEPTIONS.get(path.relative_to(root).as_posix()) == match.group():
                        continue
                    yield f"{path}:{line_of(text, match.start())}: {match.group()!r}: {what} belong in mem/"


def include_problems(room: str, file: str, header: str) -> Iterator[str]:
    target = header.split("/")[0]
    if "/" in header and target in ROOMS and ROOMS.index(target) > ROOMS.index(room):
        yield f"{room}/ includes {header}, which lies above it"
    if header.startswith("."):
        yield f"{header}: include by room, not by relative path"
    if CUDA_HEADER.match(header) and room in ("base", "plan", "proto") and file != "cuda_check.h":
        yield f"{header}: no CUDA header in {room}/"
    if TORCH_HEADER.match(header):
        yield f"{header}: csrc/ is free of torch"
    if header.startswith("pybind11/") and room != "bind":
        yield f"{header}: pybind11 belongs in bind/"


def line_of(text: str, offset: int) -> int:
    return text.count("\n", 0, offset) + 1


def main(root: str) -> int:
    found = list(violations(Path(root)))
    for line in found:
        print(line)
    print(f"includes: {len(found)} violations" if found else "includes: the rooms keep their order")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
