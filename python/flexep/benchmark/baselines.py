"""The libraries that dispatchers are compared with, by the name of `--baselines`."""

from __future__ import annotations

from typing import Any

from flexep.benchmark.case import ALL, BenchCase
from flexep.benchmark.copy_engine import CopyEngine
from flexep.benchmark.deep_ep_buffer import DeepEPBuffer
from flexep.benchmark.deep_ep_elastic import DeepEPElastic
from flexep.benchmark.library import Column
from flexep.benchmark.symm_mem_baseline import SymmMem
from flexep.benchmark.torch_baseline import TorchBaseline

# Classes that are made from (context, case, steps).
LIBRARIES: dict[str, tuple[Any, ...]] = {
    "torch": (TorchBaseline,),
    "symm_mem": (SymmMem,),
    "deep_ep": (DeepEPBuffer, DeepEPElastic),
    "copy_engine": (CopyEngine,),
}


def column_of(kind: Any) -> Column:
    """What a baseline is called in results."""
    return kind.library, kind.dispatcher


BY_COLUMN = {column_of(kind): kind for kinds in LIBRARIES.values() for kind in kinds}
REFERENCE = column_of(CopyEngine)  # measured in every run on CUDA, asked for or not


def baseline_columns(case: BenchCase) -> list[Column]:
    """Columns of the baselines that a case asks for."""
    names = tuple(LIBRARIES) if case.baselines == ALL else case.baselines
    return [column_of(kind) for name in names for kind in LIBRARIES[name]]
