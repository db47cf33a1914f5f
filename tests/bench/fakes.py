"""Stand-ins for what needs GPUs, by the documented behaviour: each moves what the real one moves, over gloo or a file.

They are set up in rank processes; what they replace is gone with the process.
"""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem

from flexep.benchmark import copy_engine


def shared_inboxes(folder: str, shift: int = 0) -> None:
    """Memory of all ranks as files that everybody maps. `shift`: a bug, blocks land that many bytes too far."""
    made = 0

    def open_inboxes(ctx: Any, nbytes: int) -> list[torch.Tensor]:
        nonlocal made
        made += 1
        paths = [f"{folder}/{made}-{rank}" for rank in range(ctx.size)]
        boxes = [torch.from_file(path, shared=True, size=nbytes + shift, dtype=torch.uint8) for path in paths]
        dist.barrier()
        return [box[:nbytes] if rank == ctx.rank else box[shift:] for rank, box in enumerate(boxes)]

    copy_engine.open_inboxes = open_inboxes


def symmetric_memory() -> None:
    """The two exchanges of torch's NVSHMEM back end on the CPU."""
    symm_mem.empty = lambda *shape, dtype, device: torch.empty(*shape, dtype=dtype)
    symm_mem.rendezvous = lambda tensor, group: None
    symm_mem.get_backend = lambda device: "NVSHMEM"
    library = torch.library.Library("symm_mem", "IMPL")
    library.impl("all_to_all_vdev_2d", _vdev_2d, "CPU")
    library.impl("all_to_all_vdev_2d_offset", _vdev_2d_offset, "CPU")
    symmetric_memory.kept = library  # type: ignore[attr-defined]  # registrations end with the object


def _gathered(mine: Any) -> list[Any]:
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, mine)
    return everybody


def _place(
    out: torch.Tensor, splits_offsets: torch.Tensor, chunks: list[list[torch.Tensor]], least: int
) -> None:
    """Chunks [major][minor] one after the other, each major one of at least `least` rows."""
    at, flat = 0, []
    for major in chunks:
        start = at
        for chunk in major:
            out[at : at + len(chunk)] = chunk
            flat.append((len(chunk), at))
            at += len(chunk)
        at = max(at, start + least)
    splits_offsets.copy_(torch.tensor(flat).T)


def _vdev_2d(
    x: torch.Tensor,
    out: torch.Tensor,
    splits: torch.Tensor,
    arrivals: torch.Tensor,
    group: str,
    align: Any = None,
) -> None:
    ranks, rank = dist.get_world_size(), dist.get_rank()
    local = len(splits) // ranks
    sent = _gathered(x[: int(splits.sum())].split(splits.tolist()))
    mine = [[chunks[rank * local + e].clone() for chunks in sent] for e in range(local)]
    assert align is None
    _place(out, arrivals, mine, 1)  # an expert without rows gets one


def _vdev_2d_offset(
    x: torch.Tensor, out: torch.Tensor, arrivals: torch.Tensor, returns: torch.Tensor, group: str
) -> None:
    ranks, rank = dist.get_world_size(), dist.get_rank()
    mine = [x[at : at + n].clone() for n, at in zip(*arrivals.tolist(), strict=True)]
    sent = _gathered(mine)
    local = len(mine) // ranks
    _place(out, returns, [[chunks[e * ranks + rank] for e in range(local)] for chunks in sent], 0)


def deep_ep() -> None:
    """Both interfaces of deep_ep; the second one delivers rows in an order of its own."""
    module = ModuleType("deep_ep")
    module.Buffer, module.ElasticBuffer = Buffer, ElasticBuffer  # type: ignore[attr-defined]
    sys.modules["deep_ep"] = module


class Buffer:
    """`deep_ep.Buffer` between the ranks of one host."""

    num_sms = 20

    def __init__(self, group: Any, nvl_bytes: int, rdma_bytes: int, explicitly_destroy: bool) -> None:
        assert nvl_bytes > 0

    @staticmethod
    def get_dispatch_config(ranks: int) -> Any:
        return SimpleNamespace(get_nvl_buffer_size_hint=lambda row_bytes, ranks: row_bytes * ranks)

    get_combine_config = get_dispatch_config

    def get_dispatch_layout(self, topk_idx: torch.Tensor, num_experts: int) -> tuple[Any, ...]:
        ranks = dist.get_world_size()
        needs = torch.stack([(topk_idx // (num_experts // ranks) == r).any(1) for r in range(ranks)], 1)
        to_experts = torch.bincount(topk_idx.flatten(), minlength=num_experts)
        return needs.sum(0), None, to_experts, needs, None

    def dispatch(self, x: torch.Tensor, handle: Any = None, **how: Any) -> tuple[Any, ...]:
        rank = dist.get_rank()
        needs = how["is_token_in_rank"] if handle is None else handle
        rows = _gathered([x[needs[:, r]] for r in range(dist.get_world_size())])
        came = torch.cat([by_rank[rank] for by_rank in rows])
        if handle is not None:
            return came, None, None, None, None, None
        assert len(how["topk_weights"]) == len(x)
        to_experts = sum(_gathered(how["num_tokens_per_expert"]))
        local = len(to_experts) // dist.get_world_size()
        counts = to_experts[rank * local : (rank + 1) * local].tolist()
        return came, how["topk_idx"], how["topk_weights"], counts, needs, None

    def combine(self, y: torch.Tensor, handle: Any) -> tuple[Any, ...]:
        rank, counts = dist.get_rank(), _gathered(handle.sum(0).tolist())
        sent = _gathered(y.split([each[rank] for each in counts]))
        z = torch.zeros(len(handle), y.shape[1])
        for r, chunks in enumerate(sent):
            z[handle[:, r]] += chunks[rank].float()
        return z.to(y.dtype), None, None

    def destroy(self) -> None:
        """Nothing is held."""


class ElasticBuffer:
    """`deep_ep.ElasticBuffer`; without a host wait its rows are followed by more that mean nothing."""

    def __init__(self, group: Any, **sizes: Any) -> None:
        self._most = sizes["num_max_tokens_per_rank"]

    def get_theoretical_num_sms(self, num_experts: int, top_k: int) -> int:
        return 24

    def dispatch(
        self, x: torch.Tensor, topk_idx: Any = None, handle: Any = None, **how: Any
    ) -> tuple[Any, ...]:
        if handle is None:
            handle = self._plan(topk_idx, how)
        xs, rank = _gathered(x), dist.get_rank()
        rows = torch.cat([xs[source // self._most][source % self._most][None] for source in handle.source])
        if not handle.expanded:
            return rows, None, None, handle, None
        out = torch.zeros(handle.rows, x.shape[1], dtype=x.dtype)
        for k in range(handle.slots.shape[1]):
            here = handle.slots[:, k] >= 0
            out[handle.slots[here, k]] = rows[here]
        junk = torch.full((handle.tail, x.shape[1]), float(rank), dtype=x.dtype)
        return torch.cat([out, junk]), None, None, handle, None

    def _plan(self, topk_idx: torch.Tensor, how: dict[str, Any]) -> Any:
        ranks, rank, align = dist.get_world_size(), dist.get_rank(), how["expert_alignment"]
        local, chosen = how["num_experts"] // ranks, _gathered(topk_idx)
        mine = [torch.where(idx // local == rank, idx % local, -1) for idx in chosen]
        source = torch.cat([(e >= 0).any(1).nonzero()[:, 0] + s * self._most for s, e in enumerate(mine)])
        experts = torch.cat([e[(e >= 0).any(1)] for e in mine])
        shuffled = torch.randperm(len(source), generator=torch.Generator().manual_seed(rank))
        source, experts = source[shuffled], experts[shuffled]
        counts = torch.bincount(experts[experts >= 0], minlength=local)
        padded = (counts + align - 1) // align * align
        slots, free = torch.full_like(experts, -1), (padded.cumsum(0) - padded).tolist()
        for n, k in (experts >= 0).nonzero().tolist():
            slots[n, k] = free[int(experts[n, k])]
            free[int(experts[n, k])] += 1
        return SimpleNamespace(
            source=source, slots=slots, expanded=how["do_expand"], rows=int(padded.sum()), home=topk_idx,
            tail=0 if how["do_cpu_sync"] else 5, num_unaligned_recv_tokens_per_expert=counts,
            psum_num_recv_tokens_per_scaleup_rank=torch.tensor([len(source)]),
            recv_src_metadata=torch.cat([source[:, None], source[:, None], slots], 1).int(),
        )  # fmt: skip

    def combine(self, y: torch.Tensor, handle: Any, num_sms: int) -> tuple[Any, ...]:
        rows = y
        if handle.expanded:
            rows = torch.zeros(len(handle.source), y.shape[1])
            for k in range(handle.slots.shape[1]):
                here = handle.slots[:, k] >= 0
                rows[here] += y[handle.slots[here, k]].float()
        z = torch.zeros(len(handle.home), y.shape[1])
        for sources, partial in _gathered((handle.source, rows[: len(handle.source)])):
            mine = sources // self._most == dist.get_rank()
            z[sources[mine] % self._most] += partial[mine].float()
        return z.to(y.dtype), None, None

    def destroy(self) -> None:
        """Nothing is held."""
