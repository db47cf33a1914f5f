"""What this build of FlexEP contains."""

from __future__ import annotations

from dataclasses import dataclass

from flexep._native._load import _C


@dataclass(frozen=True)
class BuildInfo:
    """`cuda_archs`: the architectures whose kernels are compiled in, such as ("90a",); empty in a CPU build.
    `nvshmem`: whether the NVSHMEM part is built.
    """

    cuda_archs: tuple[str, ...]
    nvshmem: bool


def build_info() -> BuildInfo:
    """The options that the compiled module was built with."""
    archs = tuple(arch for arch in _C.cuda_archs.split(";") if arch)
    return BuildInfo(cuda_archs=archs, nvshmem=False)
