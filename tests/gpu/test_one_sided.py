"""Ranks of one process on one GPU: NVL8 and NVL72 on one device, one cooperative launch an operation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import pytest
import torch

import flexep
from flexep.testing.case import Case
from flexep.testing.check import check_dispatchers
from flexep.transport.device_window import DeviceWindow

pytestmark = pytest.mark.gpu
SHAPE = {"num_experts": 9, "hidden": 64, "top_k": 3, "max_tokens": 40}
SMALL = Case(
    ranks=8,
    experts=11,
    hidden=64,
    top_k=3,
    tokens=33,
    seed=3,
    spread="ragged",
    alignment=8,
    transport="local",
)


@pytest.mark.parametrize(
    ("ranks", "domain_size"), [(8, None), (8, 4), (8, 2), (72, None), (72, 8), (6, 2), (2, 1)]
)
@pytest.mark.parametrize(
    "how",
    [
        {},
        {"weights": "inside", "cached": 2},
        {"capacity": "one_over", "layout": "flat"},
        {"capacity": "far_over", "window": "tenth", "dtype": "fp32", "combine_wire": "bf16"},
        {"layout": "flat", "y_layout": "flat", "weights": "inside", "dtype": "fp16", "empty": 0.3},
        {"payload": "nonfinite", "window": "least", "routing": "duplicates"},
    ],
)
def test_contract(ranks: int, domain_size: int | None, how: dict[str, object]) -> None:
    case = Case(**{**vars(SMALL), "ranks": ranks, "experts": ranks + 5, "domain_size": domain_size, **how})
    found = check_dispatchers(case, flexep.Group.local(ranks, "cuda"), ["deepep", "hybridep"])
    assert not found, "\n".join(map(str, found[:4]))


@pytest.mark.parametrize("experts", [5, 3200, 20000])
@pytest.mark.parametrize("layout", ["expert_major", "flat"])
def test_contract_of_a_rank_by_itself(experts: int, layout: str) -> None:
    """It counts and plans in one launch; in two where the steps want different lanes, or more than the chip has."""
    how = {
        "ranks": 1,
        "experts": experts,
        "tokens": 700,
        "alignment": 1,
        "capacity": "one_over",
        "layout": layout,
    }
    found = check_dispatchers(Case(**{**vars(SMALL), **how}), flexep.Group.local(1, "cuda"), ["deepep"])
    assert not found, "\n".join(map(str, found[:4]))


@pytest.mark.parametrize("domain_size", [None, 4])
def test_twenty_runs_give_the_same_bits(domain_size: int | None) -> None:
    case = Case(**{**vars(SMALL), "domain_size": domain_size, "repeats": 19, "hidden": 1024, "tokens": 200})
    found = check_dispatchers(case, flexep.Group.local(8, "cuda"), ["deepep", "hybridep"])
    assert not found, "\n".join(map(str, found[:4]))


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("layout", ["expert_major", "flat"])
@pytest.mark.parametrize(
    "hidden", [3576, 3584, 3592, 7168, 10760]
)  # around the piece of zeros that is stored, and twice
def test_rows_that_nothing_fills_are_cleared(hidden: int, layout: Literal["expert_major", "flat"]) -> None:
    T, K, R = 20, 2, 3
    group = flexep.Group.local(R, "cuda")
    ep = flexep.Dispatcher(
        group,
        backend="deepep",
        num_experts=7,
        hidden=hidden,
        top_k=K,
        max_tokens=T,
        capacity=3.0,
        layout=layout,
    )
    x = [torch.ones(T, hidden, dtype=torch.bfloat16, device="cuda")] * R
    idx = [torch.stack([torch.arange(T), torch.arange(T) + 1 + rank], 1).cuda() % 7 for rank in range(R)]
    received = ep.dispatch(x, idx)
    filled, empty = ([(r.x == value).all(1) for r in received] for value in (1, 0))
    assert all(bool((a | b).all()) for a, b in zip(filled, empty, strict=True))
    assert all(bool(b.any()) for b in empty)
    copies = R * T * K if layout == "expert_major" else sum(_ranks_of(i) for i in idx)
    assert sum(int(a.sum()) for a in filled) == copies


def _ranks_of(idx_TK: torch.Tensor) -> int:
    """Rows that leave: a token's experts 0, 1, 2 | 3, 4 | 5, 6 of three ranks."""
    ranks = torch.tensor([0, 0, 0, 1, 1, 2, 2], device="cuda")[idx_TK]
    return int((1 + (ranks[:, 0] != ranks[:, 1])).sum())


def window_of(ep: flexep.Dispatcher) -> DeviceWindow:
    window = ep._alive().backend.window
    assert isinstance(window, DeviceWindow)
    return window


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def test_a_wait_that_expires_names_itself_at_the_next_call_and_breaks_the_window() -> None:
    group = flexep.Group.local(3, "cuda")
    ep = flexep.Dispatcher(group, backend="deepep", timeout=0.2, **SHAPE)
    one = torch.ones(1, 1, dtype=torch.int32, device="cuda")
    recvs = [torch.zeros_like(one) for _ in range(3)]
    none = [ints(0, 0, 0)] * 3
    # Rank 2 waits for a record of rank 1, which sends none.
    expects = [none[0], none[0], ints(0, 1, 0)]
    window_of(ep).exchange_records([one] * 3, none, recvs, expects, "dispatch.meta")
    with pytest.raises(flexep.Timeout) as caught:
        ep.check()
    error = caught.value
    assert (error.op, error.waiting_rank, error.awaited_ranks) == ("dispatch.meta", 2, (1,))
    assert (error.epoch, error.word, error.want, error.got) == (1, "mailed", (1, 1), (0, 0))
    x = [torch.zeros(4, 64, dtype=torch.bfloat16, device="cuda")] * 3
    with pytest.raises(flexep.Timeout):
        ep.dispatch(x, [torch.zeros(4, 3, dtype=torch.int64, device="cuda")] * 3)
    ep.destroy()
    again = flexep.Dispatcher(group, backend="deepep", **SHAPE)
    again.dispatch(x, [torch.zeros(4, 3, dtype=torch.int64, device="cuda")] * 3)
    again.check()


def test_operations_that_overlap_in_execution_are_refused() -> None:
    """Two streams, one window: the first operation waits for a record that never comes while the second begins."""
    ep = flexep.Dispatcher(flexep.Group.local(2, "cuda"), backend="deepep", timeout=20.0, **SHAPE)
    window, one = window_of(ep), torch.ones(1, 1, dtype=torch.int32, device="cuda")
    recvs, none = [torch.zeros_like(one) for _ in range(2)], [ints(0, 0)] * 2
    other = torch.cuda.Stream()
    torch.cuda.synchronize()
    window.exchange_records([one] * 2, none, recvs, [ints(0, 1), ints(0, 0)], "dispatch.meta")
    with torch.cuda.stream(other):
        window.exchange_records([one] * 2, none, recvs, none, "dispatch.meta")
    with pytest.raises(flexep.WindowBusy, match=r"dispatch\.meta: another operation"):
        ep.check()


def test_more_ranks_than_a_launch_carries_are_refused() -> None:
    with pytest.raises(flexep.ArgumentError, match="ranks on one GPU"):
        flexep.Dispatcher(flexep.Group.local(129, "cuda"), backend="deepep", **SHAPE)


def test_counters_are_those_of_the_cpu() -> None:
    seen = []
    for device in ("cpu", "cuda"):
        ep = flexep.Dispatcher(flexep.Group.local(4, device), backend="hybridep", domain_size=2, **SHAPE)
        torch.manual_seed(0)
        x = [torch.randn(30, 64).bfloat16().to(device) for _ in range(4)]
        idx = [torch.randint(-1, 9, (30, 3)).to(device) for _ in range(4)]
        r = ep.dispatch(x, idx)
        ep.combine([one.x for one in r], [one.handle for one in r])
        seen.append({op: (t.calls, t.remote_rows, t.rail_rows, t.rail_bytes) for op, t in ep.traffic.items()})
    assert seen[0] == seen[1]
    assert seen[0]["dispatch.rows"][2] > 0


def host_waits(fn: Callable[[], object]) -> list[str]:
    """Calls of the CUDA runtime inside `fn` by which the host waits for the device, from a profiler's trace."""
    with torch.profiler.profile(
        activities=list(torch.profiler.supported_activities()), acc_events=True
    ) as profile:
        torch.cuda._sleep(1000)  # something for the trace to hold, whatever fn does
        with torch.profiler.record_function("inside"):
            fn()
    events = list(profile.events())
    inside = next(e.time_range for e in events if e.name == "inside")
    runtime = [e for e in events if e.name.startswith("cuda")]
    assert any(e.name.startswith("cudaLaunch") for e in runtime), (
        "the trace holds no launch: it proves nothing"
    )
    return [
        e.name
        for e in runtime
        if ("Synchronize" in e.name or e.name == "cudaMemcpy")
        and inside.start <= e.time_range.start <= inside.end
    ]


@pytest.mark.parametrize("backend", ["deepep", "hybridep"])
def test_a_trace_shows_no_host_wait_in_static_mode_nor_in_any_backward(backend: str) -> None:
    group = flexep.Group.local(4, "cuda")
    domain_size = 2 if backend == "hybridep" else None
    static = flexep.Dispatcher(
        group, backend=backend, domain_size=domain_size, capacity=2.0, overflow="drop", **SHAPE
    )
    exact = flexep.Dispatcher(group, backend=backend, domain_size=2, **SHAPE)
    generator = torch.Generator(device="cuda").manual_seed(0)
    idx = [torch.randint(-1, 9, (30, 3), device="cuda", generator=generator) for _ in range(4)]
    x, weights = (
        [torch.randn(30, width, device="cuda", generator=generator, dtype=dtype) for _ in range(4)]
        for width, dtype in ((64, torch.bfloat16), (3, torch.float32))
    )

    def forward(ep: flexep.Dispatcher) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        leaves = [t.detach().requires_grad_() for t in (*x, *weights)]
        r = ep.dispatch(leaves[:4], idx, leaves[4:])
        return leaves, ep.combine([one.x for one in r], [one.handle for one in r], [one.weights for one in r])

    for ep in (static, exact):
        forward(ep)
    assert host_waits(lambda: forward(static)) == []
    assert "cudaStreamSynchronize" in host_waits(lambda: forward(exact)), "exact sizes are read by the host"
    for ep in (static, exact):
        leaves, z = forward(ep)
        ones = [torch.ones_like(one) for one in z]
        assert host_waits(lambda: torch.autograd.grad(z, leaves, ones)) == []  # noqa: B023
