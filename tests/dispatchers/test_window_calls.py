"""What one-sided back ends ask of their windows, and in which order: rows before the plan, slots told by it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import flexep
from flexep._native.one_sided_plan import OneSidedPlanner
from flexep.dispatchers import one_sided
from flexep.dispatchers._calls import Calls
from flexep.testing.compare import digest
from flexep.transport.collectives import Traffic
from flexep.transport.host_window import HostWindow
from tests.dispatchers.one_sided_rows import SHAPE, inputs, round_trip


@pytest.fixture
def window_calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What dispatchers ask of their windows from here on, in order."""
    made: list[str] = []
    for name in ("send_ahead", "call_off", "count_and_publish", "plan", "deliver", "collect"):
        was = getattr(HostWindow, name)

        def noted(window: HostWindow, *args: object, name: str = name, was: Callable = was) -> object:
            if name in ("send_ahead", "deliver"):
                made.append(f"{name} {args[-1]}")
            else:
                made.append("tell and plan" if name == "plan" and args[-1] else name)
            return was(window, *args)

        monkeypatch.setattr(HostWindow, name, noted)
    return made


def sending_ahead(**more: object) -> flexep.Dispatcher:
    return flexep.Dispatcher(flexep.Group.local(2), backend="deepep", send_ahead=True, **{**SHAPE, **more})


def no_memory(*_: object) -> None:
    raise MemoryError


def test_rows_go_before_the_header_and_once(window_calls: list[str]) -> None:
    """A fresh dispatch sends x before anything is told; what has a plan sends it with the delivery."""
    ep = sending_ahead()
    x, topk_idx, weights = inputs(2)
    x = [one.requires_grad_() for one in x]
    received = ep.dispatch(x, topk_idx, weights)
    rows = "dispatch.rows"
    assert window_calls == [f"send_ahead {rows}", "count_and_publish", "plan", f"deliver {rows}"]
    window_calls.clear()
    ep.dispatch([one.detach() for one in x], handle=[r.handle for r in received])
    assert window_calls == [f"send_ahead {rows}", f"deliver {rows}"]
    z = ep.combine([r.x for r in received], [r.handle for r in received])
    window_calls.clear()
    torch.autograd.backward(z, [torch.ones_like(one) for one in z])
    rows = "combine_backward.rows"
    assert window_calls == [f"send_ahead {rows}", f"deliver {rows}", "collect"]


def test_rows_of_a_dispatch_that_fails_are_called_off(
    window_calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """x may be freed then, once the window's stream has waited for the copies."""
    ep = sending_ahead()
    x, topk_idx, weights = inputs(2)
    with pytest.raises(flexep.ArgumentError):
        ep.dispatch(x, [one[:, :1] for one in topk_idx], weights)
    assert window_calls == ["call_off"]  # refused before anything went
    window_calls.clear()

    monkeypatch.setattr(one_sided, "_planned", no_memory)
    with pytest.raises(MemoryError):
        ep.dispatch(x, topk_idx, weights)
    assert window_calls == ["send_ahead dispatch.rows", "count_and_publish", "plan", "call_off"]


def test_room_is_left_for_those_who_post(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(one_sided, "num_slices", lambda config, group, ahead: asked.append(ahead) or 1)
    sending_ahead()
    flexep.Dispatcher(flexep.Group.local(2), backend="deepep", **SHAPE)
    assert asked == [True, False]


@pytest.mark.parametrize("value", [1, 0, "yes", torch.tensor([1, 2])])
def test_send_ahead_is_a_choice_of_three(value: object) -> None:
    with pytest.raises(flexep.ArgumentError, match=r"send_ahead = .*None, True or False"):
        flexep.Dispatcher(flexep.Group.local(2), backend="deepep", **SHAPE, send_ahead=value)


def test_zero_copy_input_is_sent_ahead_too() -> None:
    x, topk_idx, weights = inputs(2)
    want = round_trip(
        flexep.Dispatcher(flexep.Group.local(2), backend="deepep", **SHAPE), x, topk_idx, weights
    )
    ep = sending_ahead(zero_copy=True)
    own = [room[: rows.shape[0]] for room, rows in zip(ep.window_input(), x, strict=True)]
    for room, rows in zip(own, x, strict=True):
        room.copy_(rows)
    got = round_trip(ep, own, topk_idx, weights)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize(("backend", "domain_size"), [("deepep", None), ("hybridep", 2)])
@pytest.mark.parametrize("layout", ["expert_major", "flat"])
@pytest.mark.parametrize("capacity", [4.0, 60])
def test_what_nobody_looks_at_is_told_by_the_plan(
    capacity: float,
    layout: str,
    backend: str,
    domain_size: int | None,
    monkeypatch: pytest.MonkeyPatch,
    window_calls: list[str],
) -> None:
    """So that a GPU, whose host does not wait for it, counts, tells and plans in one launch."""

    def moved() -> tuple[str, dict[str, Traffic]]:
        ep = flexep.Dispatcher(
            flexep.Group.local(4), backend=backend, domain_size=domain_size, capacity=capacity, alignment=1,
            overflow="drop", layout=layout, **SHAPE,
        )  # fmt: skip
        rows = round_trip(ep, *inputs(4)) if layout == "expert_major" else ep.dispatch(*inputs(4))
        return digest(rows), ep.traffic

    expected = moved()
    assert window_calls[0] == "count_and_publish"
    window_calls.clear()
    monkeypatch.setattr(Calls, "_may_wait", lambda calls: False)
    assert moved() == expected
    # Over relays each step is a call of its own.
    assert window_calls[0] == ("tell and plan" if domain_size is None else "count_and_publish")


def test_rows_sent_ahead_of_a_plan_that_fails_are_followed_by_what_was_to_be_told(
    monkeypatch: pytest.MonkeyPatch, window_calls: list[str]
) -> None:
    """Else the next ones could not be told from them."""
    ep = sending_ahead(capacity=4.0)
    monkeypatch.setattr(Calls, "_may_wait", lambda calls: False)

    with monkeypatch.context() as patch:
        patch.setattr(OneSidedPlanner, "prepare", no_memory)
        with pytest.raises(MemoryError):
            ep.dispatch(*inputs(2))
    assert window_calls == ["send_ahead dispatch.rows", "count_and_publish", "call_off"]
    window_calls.clear()
    ep.dispatch(*inputs(2))
    assert window_calls[:2] == ["send_ahead dispatch.rows", "tell and plan"]
