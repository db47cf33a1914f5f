"""The oracle: dispatch and combine in plain torch, one process playing every rank.

It imports nothing of the package and shares no idea with it beyond the promises it checks: the plan order,
the kept set, the layouts and the rounding recipe of docs/numerics.md, each written the simplest way that is
still fast enough for thousands of cases.
"""

from flexep.ref.backward import combine_backward, dispatch_backward
from flexep.ref.combine import combine, combine_partials, combine_slots
from flexep.ref.dispatch import Received, dispatch, dispatch_rank
from flexep.ref.plan import Plan, RankPlan, kept_rows, make_plan
from flexep.ref.world import World

__all__ = [
    "Plan",
    "RankPlan",
    "Received",
    "World",
    "combine",
    "combine_backward",
    "combine_partials",
    "combine_slots",
    "dispatch",
    "dispatch_backward",
    "dispatch_rank",
    "kept_rows",
    "make_plan",
]
