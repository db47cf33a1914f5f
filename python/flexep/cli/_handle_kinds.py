"""Which kinds of handle the driver gives out for device memory, found by asking it for one of each.

Peer memory between processes needs one of the first two: a POSIX file descriptor (one host) or a fabric handle (an
NVLink domain of several hosts, where a service permits it). Legacy IPC handles (one host, cudaMalloc memory) are what
other libraries may need.
"""

from __future__ import annotations

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
    return {
        "posix_fd": usable(lambda: gpu.try_handle(gpu.descriptor)),
        "fabric": usable(lambda: gpu.try_handle(gpu.fabric)),
        "legacy_ipc": usable(lambda: _export_legacy(gpu)),
    }


def _export_legacy(gpu: Gpu) -> None:
    with gpu.current():
        address = gpu.call("cuMemAlloc", gpu.granularity())
        try:
            gpu.call("cuIpcGetMemHandle", address)
        finally:
            gpu.call("cuMemFree", address)
