"""DeepEP-style: one-sided and flat. A token crosses once to each rank that holds one of its experts, straight there."""

from __future__ import annotations

from flexep.dispatchers.one_sided import OneSidedBackend


class DeepEP(OneSidedBackend):
    """Right where every rank reaches every other: NVLink nodes, and on the CPU one host."""

    name = "deepep"
