"""DeepEP's second interface, `deep_ep.ElasticBuffer`: both layouts, with and without a host wait for sizes.

Rows of one expert, and flat rows, come in no promised order; the handle says whose each one is.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from flexep.benchmark.case import BenchCase
from flexep.benchmark.deep_ep_buffer import interface, refused
from flexep.benchmark.library import Promising, Routed, Sent, SentRows
from flexep.testing.worker import RankContext


@dataclass(frozen=True)
class _Received:
    x: torch.Tensor
    handle: Any
    step: int

    @property
    def counts(self) -> torch.Tensor:
        counts: torch.Tensor = self.handle.num_unaligned_recv_tokens_per_expert.int()
        return counts

    @property
    def weights(self) -> None:
        return None  # the case has none


def flat_order(source_N: torch.Tensor) -> torch.Tensor:
    """Rows by (source rank, token); `source_N`: rank * max_tokens + token of each."""
    return source_N.argsort(stable=True)


def expert_order(
    source_N: torch.Tensor, slots_NK: torch.Tensor, counts_L: torch.Tensor, alignment: int
) -> torch.Tensor:
    """Expert-major rows by (expert, source rank, token), padding last in each expert. `slots_NK`: where the rows of
    each received token lie, -1 elsewhere."""
    padded_L = (counts_L + alignment - 1) // alignment * alignment
    rows, last = int(padded_L.sum()), int(source_N.max()) + 1 if len(source_N) else 1
    key = torch.full((rows,), last)
    taken = slots_NK >= 0
    key[slots_NK[taken]] = source_N[:, None].expand_as(slots_NK)[taken]
    region = torch.arange(len(counts_L)).repeat_interleave(padded_L)
    return (region * (last + 1) + key).argsort(stable=True)


class DeepEPElastic(Promising[_Received]):
    """In mode capacity nobody waits for sizes and x is as large as it can get; what it promises is the same."""

    library = "deep_ep"
    dispatcher = "ElasticBuffer"

    def __init__(self, ctx: RankContext, case: BenchCase, steps: list[Routed]) -> None:
        self.wire, self.layout, self.mode = case.dtype, case.layout, case.mode
        self.alignment = case.alignment
        self.world = world = replace(case.world, capacity=None, domain_size=None)
        self._buffer = interface(self.dispatcher)(
            dist.group.WORLD, num_max_tokens_per_rank=world.max_tokens, hidden=world.hidden,
            num_topk=world.top_k, explicitly_destroy=True,
        )  # fmt: skip
        self.sms = self._buffer.get_theoretical_num_sms(world.num_experts, world.top_k)
        expanded = self.layout == "expert_major"
        self._how = {
            "num_experts": world.num_experts, "num_max_tokens_per_rank": world.max_tokens,
            "expert_alignment": world.alignment, "num_sms": self.sms, "do_cpu_sync": self.mode == "exact",
            "do_expand": expanded, "do_zero_padding": expanded,
        }  # fmt: skip
        self._steps, self._fresh = steps, case.fresh
        self._handles: dict[int, Any] = {}
        self._moved = SentRows(world, ctx.rank, steps, once=True)

    @classmethod
    def why_not(cls, case: BenchCase) -> str | None:
        if case.hidden % 256:
            return f"hidden {case.hidden}: it combines multiples of 256"
        return refused(case)

    def dispatch(self, step: int) -> _Received:
        routed, handle = self._steps[step], self._handles.get(step)
        self._moved.count("dispatch.rows", step)
        if handle is not None:
            how = {name: self._how[name] for name in ("num_sms", "do_expand", "do_zero_padding")}
            x = self._buffer.dispatch(routed.x, handle=handle, do_cpu_sync=False, **how)[0]
            return _Received(x, handle, step)
        x, _, _, handle, _ = self._buffer.dispatch(routed.x, topk_idx=routed.topk_idx, **self._how)
        if not self._fresh:
            self._handles[step] = handle
        return _Received(x, handle, step)

    def combine(self, y: torch.Tensor, delivered: _Received) -> torch.Tensor:
        self._moved.count("combine.rows", delivered.step)
        combined: torch.Tensor = self._buffer.combine(y, handle=delivered.handle, num_sms=self.sms)[0]
        return combined

    def order(self, delivered: _Received) -> torch.Tensor:
        handle = delivered.handle
        received = int(handle.psum_num_recv_tokens_per_scaleup_rank[-1])
        meta = handle.recv_src_metadata[:received].long().cpu()
        if self.layout == "flat":
            return flat_order(meta[:, 0])
        return expert_order(meta[:, 0], meta[:, 2:], delivered.counts.long().cpu(), self.alignment)

    def sent(self) -> dict[str, Sent]:
        return self._moved.sent()

    def close(self) -> None:
        self._handles.clear()
        self._buffer.destroy()
