"""Tensors of a plan that are made when somebody reads them: to whoever reads, as if they had been there all along."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import FrozenInstanceError, fields, replace

import pytest
import torch

import flexep
from flexep._native.one_sided_plan import MOST_SIZES
from flexep.testing.compare import digest
from flexep.types import Handle, OneSided, Route

SHAPE = {"num_experts": 9, "hidden": 64, "top_k": 3, "max_tokens": 40}
BACKENDS = [("allgather", None), ("alltoall", None), ("deepep", None), ("hybridep", 2)]


def received_by(
    backend: str, domain_size: int | None = None, **how: object
) -> tuple[flexep.Dispatcher, list[flexep.DispatchResult]]:
    ep = flexep.Dispatcher(
        flexep.Group.local(4), backend=backend, domain_size=domain_size, capacity=3.0, **SHAPE, **how
    )
    generator = torch.Generator().manual_seed(0)
    x = [torch.randn(t, 64, generator=generator).bfloat16() for t in (33, 0, 40, 7)]
    idx = [torch.randint(-1, 9, (len(one), 3), generator=generator) for one in x]
    return ep, ep.dispatch(x, idx, [torch.rand(len(one), 3, generator=generator) for one in x])


@pytest.mark.parametrize(("backend", "domain_size"), BACKENDS)
def test_every_reader_gets_the_same_tensor(backend: str, domain_size: int | None) -> None:
    _, received = received_by(backend, domain_size)
    for r in received:
        values = [
            r,
            r.handle,
            r.handle.route,
            *([r.handle.route.one_sided] if r.handle.route.one_sided else []),
        ]
        for value in values:
            for field in fields(value):
                assert getattr(value, field.name) is getattr(value, field.name), field.name
        assert r.counts is r.handle.counts
        assert r.dropped is r.handle.dropped
        assert r.handle.recv_rows.shape == (r.handle.num_recv, 3)


@pytest.mark.parametrize("layout", ["expert_major", "flat"])
def test_a_dispatch_makes_no_view_that_nobody_has_read(layout: str) -> None:
    _, received = received_by("deepep", layout=layout)
    for r in received:
        for value, fresh in ((r, {"x", "weights"}), (r.handle, set()), (r.handle.route, set())):
            made = {f.name for f in fields(value) if value.has(f.name)}
            assert {name for name in made if isinstance(vars(value)[name], torch.Tensor)} == fresh
        assert (r.expert_idx is not None) == (r.row_map is not None) == (layout == "flat")


@pytest.mark.parametrize("layout", ["expert_major", "flat"])
def test_a_row_map_is_that_of_every_back_end(layout: str) -> None:
    maps = []
    for backend, domain_size in BACKENDS:
        _, received = received_by(backend, domain_size, layout=layout)
        maps.append([r.handle.row_map for r in received])
        assert all((r.row_map is None) == (layout == "expert_major") for r in received)
    assert all(torch.equal(a, b) for some in maps[1:] for a, b in zip(maps[0], some, strict=True))


def test_of_many_threads_all_get_the_same_tensor() -> None:
    _, received = received_by("deepep")
    with ThreadPoolExecutor(8) as pool:
        for r in received:
            assert len({id(one) for one in pool.map(lambda _, r=r: r.handle.route.part_rows, range(64))}) == 1


@pytest.mark.parametrize("layout", ["expert_major", "flat"])
def test_copies_are_whole_and_stand_alone(layout: str) -> None:
    _, received = received_by("deepep", layout=layout)
    want = digest(received)
    _, again = received_by("deepep", layout=layout)  # of which nothing has been read
    for made in (copy.deepcopy(again), pickle.loads(pickle.dumps(again)), [copy.copy(r) for r in again]):
        assert digest(made) == want
        assert all(type(r) is flexep.DispatchResult for r in made)
    _, again = received_by("deepep", layout=layout)
    assert digest([replace(r, handle=replace(r.handle)) for r in again]) == want


def test_they_are_frozen_dataclasses() -> None:
    _, (r, *_) = received_by("deepep")
    with pytest.raises(FrozenInstanceError):
        r.counts = r.dropped
    with pytest.raises(AttributeError, match="Handle has no attribute 'count'"):
        _ = r.handle.count
    assert repr(r.handle).startswith("Handle(version=1, dispatcher_id='Dispatcher ")
    assert f"counts={r.counts!r}" in repr(r.handle)
    with pytest.raises(AttributeError, match="OneSided has no attribute 'part_rows'"):
        _ = OneSided.late(lambda name: torch.zeros(1)).part_rows


def test_what_is_replaced_is_what_moves_rows() -> None:
    """Kernels read a plan by address; a route with another list has other addresses."""
    ep, received = received_by("deepep")
    nothing = [torch.full_like(r.handle.route.part_rows, -1) for r in received]

    def emptied(route: Route, part_rows: torch.Tensor) -> Route:
        return replace(route, part_rows=part_rows)

    ys = [torch.ones_like(r.x) for r in received]
    handles = [r.handle for r in received]
    assert any(bool(z.any()) for z in ep.combine(ys, handles))
    empty = [replace(h, route=emptied(h.route, rows)) for h, rows in zip(handles, nothing, strict=True)]
    assert not any(bool(z.any()) for z in ep.combine(ys, empty))


def test_nothing_but_the_plan_is_kept() -> None:
    """Neither what a plan worked in nor x outlives the call."""
    _, received = received_by("deepep")
    made = weakref.ref(received[0].handle.route)
    memory = received[0].handle.route.part_rows.untyped_storage().nbytes()
    lists = {f.name: getattr(received[0].handle.route, f.name) for f in fields(Route)}
    held = sum(t.nbytes for t in lists.values() if isinstance(t, torch.Tensor))
    assert held <= memory <= 2 * held
    del received, lists
    gc.collect()
    assert made() is None


def test_what_is_remembered_of_shapes_is_bounded() -> None:
    ep, _ = received_by("deepep")
    planner = ep._alive().backend.planner
    assert planner.static_layout.cache_info().maxsize == MOST_SIZES
    assert planner._counting.cache_info().maxsize == MOST_SIZES


def test_what_fails_inside_a_property_is_told_by_its_own_name() -> None:
    def make(name: str) -> torch.Tensor:
        raise AttributeError(f"no memory for {name}")

    handle = Handle.late(make, version=1, dispatcher_id="", rank=0, route=Route.late(make, num_tokens=0))
    with pytest.raises(AttributeError, match="no memory for row_map"):
        _ = handle.row_map
    with pytest.raises(AttributeError, match="Handle has no attribute 'rowmap'"):
        _ = handle.rowmap
