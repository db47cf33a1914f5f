"""What a process holds: descriptors, mappings, resident memory."""

from __future__ import annotations

import gc
import os
import resource
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Held:
    """Open descriptors, mappings and resident bytes of this process."""

    descriptors: int
    mappings: int
    resident: int


def held() -> Held:
    gc.collect()
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    return Held(len(os.listdir("/proc/self/fd")), len(_maps()), resident)


def is_mapped(address: int) -> bool:
    """Whether anything is mapped there in this process."""
    return any(begin <= address < end for begin, end, _ in _maps())


def window_mappings() -> int:
    """Windows that this process has mapped, its own and those of peers."""
    return sum("memfd:flexep-window" in text for _, _, text in _maps())


def open_files() -> set[str]:
    """Everything that this process has open or mapped and that has a name in the file system."""
    found = {text.split(maxsplit=5)[5] for _, _, text in _maps() if "/" in text}
    for fd in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the one that listed them
            found.add(os.readlink(f"/proc/self/fd/{fd}"))
    return {path for path in found if os.path.exists(path)}


def _maps() -> list[tuple[int, int, str]]:
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = line.split(" ", 1)[0].split("-")
        found.append((int(begin, 16), int(end, 16), line))
    return found
