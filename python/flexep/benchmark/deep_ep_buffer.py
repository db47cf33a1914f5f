"""DeepEP's first interface, `deep_ep.Buffer`: flat rows between the ranks of one host, where it can be imported."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from flexep.benchmark.case import BenchCase
from flexep.benchmark.library import Promising, Routed, Sent, SentRows
from flexep.errors import Unavailable
from flexep.testing.worker import RankContext

RANKS = (2, 4, 8)
MAX_HIDDEN = 8176


def interface(name: str) -> Any:
    """The class `name` of deep_ep. Raises Unavailable where there is none."""
    try:
        return getattr(importlib.import_module("deep_ep"), name)
    except AttributeError:
        raise Unavailable(f"this deep_ep has no {name}") from None
    except (ImportError, OSError) as error:  # not installed, or built for another torch
        raise Unavailable(f"deep_ep cannot be imported: {error}") from None


def refused(case: BenchCase) -> str | None:
    """What no interface of deep_ep does; None if nothing speaks against the case."""
    if case.dtype != "bf16":
        return f"it combines bf16, not {case.dtype}"
    if case.weights != "none":
        return "its combine multiplies no weights"
    if case.experts % case.ranks or case.world.placement is not None:
        return "it needs as many experts on every rank"
    return None


@dataclass(frozen=True)
class _Received:
    x: torch.Tensor
    counts: torch.Tensor
    handle: Any
    step: int

    @property
    def weights(self) -> None:
        return None  # the case has none


class DeepEPBuffer(Promising[_Received]):
    """Flat rows whatever layout was asked for, exact sizes."""

    library = "deep_ep"
    dispatcher = "Buffer"
    layout, mode, alignment = "flat", "exact", 1

    def __init__(self, ctx: RankContext, case: BenchCase, steps: list[Routed]) -> None:
        Buffer = interface(self.dispatcher)
        self.wire = case.dtype
        self.world = world = replace(
            case.world, capacity=None, alignment=1, layout=self.layout, domain_size=None
        )
        self.sms = Buffer.num_sms
        row_bytes = world.hidden * world.dtype.itemsize
        configs = [get(ctx.size) for get in (Buffer.get_dispatch_config, Buffer.get_combine_config)]
        nvl_bytes = max(config.get_nvl_buffer_size_hint(row_bytes, ctx.size) for config in configs)
        self._buffer = Buffer(dist.group.WORLD, nvl_bytes, 0, explicitly_destroy=True)
        self._steps, self._fresh = steps, case.fresh
        self._ones = torch.ones(world.max_tokens, world.top_k, device=ctx.device)
        self._known: dict[int, tuple[torch.Tensor, Any]] = {}  # counts and handle, where plans are kept
        self._moved = SentRows(world, ctx.rank, steps, once=True)

    @classmethod
    def why_not(cls, case: BenchCase) -> str | None:
        if case.ranks not in RANKS:
            return f"{case.ranks} ranks: on one host it takes {', '.join(map(str, RANKS))}"
        if case.hidden > MAX_HIDDEN:
            return f"hidden {case.hidden}: it takes at most {MAX_HIDDEN}"
        return refused(case)

    def dispatch(self, step: int) -> _Received:
        routed, known = self._steps[step], self._known.get(step)
        self._moved.count("dispatch.rows", step)
        if known:
            x, *_ = self._buffer.dispatch(routed.x, handle=known[1])
            return _Received(x, *known, step)
        to_ranks, to_nodes, to_experts, in_rank, _ = self._buffer.get_dispatch_layout(
            routed.topk_idx, self.world.num_experts
        )
        x, _, _, counts, handle, _ = self._buffer.dispatch(
            routed.x, num_tokens_per_rank=to_ranks, num_tokens_per_rdma_rank=to_nodes,
            is_token_in_rank=in_rank, num_tokens_per_expert=to_experts, topk_idx=routed.topk_idx,
            topk_weights=self._ones[: len(routed.x)],
        )  # fmt: skip
        got = _Received(x, torch.tensor(counts, dtype=torch.int32), handle, step)
        if not self._fresh:
            self._known[step] = (got.counts, handle)
        return got

    def combine(self, y: torch.Tensor, delivered: _Received) -> torch.Tensor:
        self._moved.count("combine.rows", delivered.step)
        combined: torch.Tensor = self._buffer.combine(y, delivered.handle)[0]
        return combined

    def sent(self) -> dict[str, Sent]:
        return self._moved.sent()

    def close(self) -> None:
        self._known.clear()
        self._buffer.destroy()
