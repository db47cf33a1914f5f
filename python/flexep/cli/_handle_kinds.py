"""Which kinds of handle the driver gives out for device memory, found by asking it for one of each.

Peer memory between processes needs one of them: a POSIX file descriptor (one host), a fabric handle (an
NVLink domain of several hosts) or a legacy IPC handle (one host, cudaMalloc memory). A device attribute only
says what the hardware could do; a fabric handle also needs a running service, so each kind is exported once.
"""

from __future__ import annotations

import os
from typing import Any

from flexep.cli._probe import Finding, usable
from flexep.errors import Unavailable
from flexep.transport.gpu_memory import Gpu


def handle_kinds() -> dict[str, Finding]:
    """{"posix_fd" | "fabric" | "legacy_ipc": usable and why_not}, for GPU 0."""
    try:
        gpu = Gpu(0)
    except Unavailable as error:
        why_not = {"usable": False, "why_not": str(error)}
        return {kind: dict(why_not) for kind in ("posix_fd", "fabric", "legacy_ipc")}
    kinds = gpu.driver.CUmemAllocationHandleType
    return {
        "posix_fd": usable(lambda: os.close(_export(gpu, kinds.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR))),
        "fabric": usable(lambda: _export(gpu, kinds.CU_MEM_HANDLE_TYPE_FABRIC)),
        "legacy_ipc": usable(lambda: _export_legacy(gpu)),
    }


def _export(gpu: Gpu, kind: Any) -> Any:
    """A handle of that kind, of memory that is already gone."""
    with gpu.current():
        memory = gpu.call("cuMemCreate", gpu.granularity(), gpu.properties(kind), 0)
        try:
            return gpu.call("cuMemExportToShareableHandle", memory, kind, 0)
        finally:
            gpu.call("cuMemRelease", memory)


def _export_legacy(gpu: Gpu) -> None:
    with gpu.current():
        address = gpu.call("cuMemAlloc", gpu.granularity())
        try:
            gpu.call("cuIpcGetMemHandle", address)
        finally:
            gpu.call("cuMemFree", address)
