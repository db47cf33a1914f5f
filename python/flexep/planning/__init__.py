"""What a dispatch and a combine would cost on a machine given by a few figures: rows, bytes, time, memory.

A prediction has two inputs of the same type, `Load`: the closed form (uniform routing, expectations) and the
real plan on drawn routing. Everything after that is one set of formulae.
"""

from flexep.planning.load import Load, closed_form, counted
from flexep.planning.patterns import PATTERNS
from flexep.planning.predict import Prediction, predict
from flexep.planning.sample import Sample, draw
from flexep.planning.topology import RATES, Topology, parse_topology
from flexep.planning.workload import WIRES, Workload, make_workload

__all__ = [
    "PATTERNS",
    "RATES",
    "WIRES",
    "Load",
    "Prediction",
    "Sample",
    "Topology",
    "Workload",
    "closed_form",
    "counted",
    "draw",
    "make_workload",
    "parse_topology",
    "predict",
]
