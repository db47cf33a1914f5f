"""Plain values that cross the public API."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import Field, dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch

from flexep.indexing import take

HANDLE_VERSION = 1
_Kind = TypeVar("_Kind", bound="Late")


def _none() -> None:
    """Default of a field that may be late: a plain default would be found on the class."""


class Late:
    """Base of frozen dataclasses whose fields without a plain default may be made when they are first read.

    Most views of a plan's memory are read by kernels alone, by address: making all of them takes longer than a launch.
    """

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]  # a subclass is a dataclass

    @classmethod
    def late(cls: type[_Kind], make: Callable[[str], Any], **now: Any) -> _Kind:
        """An instance with the fields `now`; make(field) gives another when it is read, the same one from then on."""
        made = object.__new__(cls)
        now["_make"] = make
        object.__setattr__(made, "__dict__", now)
        return made

    if not TYPE_CHECKING:  # to a type checker all fields are there

        def __getattr__(self, name: str) -> Any:
            if isinstance(of_class := getattr(type(self), name, None), property):
                return of_class.__get__(self)  # has raised an AttributeError, and raises it again
            make = self.__dict__.get("_make")
            if make is None or name not in self.__dataclass_fields__:
                raise AttributeError(f"{type(self).__name__} has no attribute {name!r}", name=name, obj=self)
            return self.__dict__.setdefault(name, make(name))  # of two threads the first

    def has(self, name: str) -> bool:
        """Whether a field is there, so that reading it makes nothing."""
        return name in self.__dict__

    def __getstate__(self) -> dict[str, Any]:
        """Every field, made: what is copied or pickled is a plain instance."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.init}


@dataclass(frozen=True)
class Hops:
    """The two hops of what travels beside rows: over the rail to the relays, then from each relay to its domain. int32.

    Attributes:
        relay_record [Q, K]: record, of those sent inside the domain, that carries each slot of a relayed one; -1 none.
        member_item [Y]: relayed record behind each record sent inside the domain, -1 unused.
        order [N]: place, among the arrived records, of each one in (source rank, token) order; -1 tail.
        rail_out, rail_in, member_out, member_in [R]: records to and from each rank.
    """

    relay_record: torch.Tensor
    member_item: torch.Tensor
    order: torch.Tensor
    rail_out: torch.Tensor
    rail_in: torch.Tensor
    member_out: torch.Tensor
    member_in: torch.Tensor


@dataclass(frozen=True)
class OneSided(Late):
    """What one-sided movement needs beside a Route. int32 tensors.

    Attributes:
        tokens_of [R]: T of every rank.
        send_R, recv_R [R]: token rows to and from each rank.
        recv_token [P]: token, at its source, of each partial row; -1 tail.
        recv_base [R + 1]: first partial row from each source rank; recv_base[R] rows in all.
        relay_token [Q], relay_base [D + 1], relay_members [Q, K]: what this rank hands on between the rail and its
            domain, by source domain: tokens, and the indices in the domain that hold a slot, ascending, then -1. None
            with one domain.
        hops: how per-slot numbers travel over the rail and inside the domain; None with one domain.
    """

    tokens_of: torch.Tensor
    send_R: torch.Tensor
    recv_R: torch.Tensor
    recv_token: torch.Tensor
    recv_base: torch.Tensor
    relay_token: torch.Tensor | None = None
    relay_base: torch.Tensor | None = None
    relay_members: torch.Tensor | None = None
    hops: Hops | None = None


@dataclass(frozen=True)
class Route(Late):
    """One rank's side of a plan: every index that dispatch, combine and both backwards need. int32 tensors.

    Three row spaces meet here. *Expert-major* rows: grouped by local expert, padded. *Partial* rows: one for
    each token received, as combine sends them home. *Flat* rows: the received tokens without gaps. In exact
    mode partial and flat rows are the same; a static receive buffer has gaps.

    Attributes:
        num_tokens: T of this rank. num_rows: length of the expert-major rows. num_flat: length of the flat
            rows.
        part_rows [P, K]: expert-major row of each slot of a partial row, -1 where the slot lives elsewhere.
        row_src [rows]: partial row * K + slot that fills each expert-major row, -1 padding.
        row_buffer [rows] or None: row of the delivered buffer that fills each expert-major row, -1 padding (back
            ends that deliver a buffer).
        flat_buffer [N] or None: row of the delivered buffer behind each flat row, -1 tail (None: the buffer
            itself).
        flat_part [N] or None: partial row of each flat row, -1 tail (None: the same).
        part_flat [P] or None: flat row of each partial row, -1 gap (None: the same).
        home_row, home_rank [T, K]: rows of the home-coming buffer that belong to each token, and their ranks (where
            relays add: the first rank of each domain), ascending, then -1.
        home_slot [T, K]: row of the home-coming buffer that carries each slot, -1 empty or dropped.
        send_token [S] or None: token at each send position, -1 unused (back ends that send rows).
        one_sided: what one-sided back ends need, or None.
        send_splits, recv_splits: rows to and from each rank (back ends that exchange rows).
        gather_rows: rows each rank contributes to the gather of tokens and of partial rows (gathering back
            ends).
        flat_expert [N, K], row_map [rows]: local expert of each slot of a flat row, -1 empty, and flat row of each
            expert-major row, -1 padding (flat layout of back ends that learn them from the records).
        lists: the compiled module's own of the above, once a one-sided back end has needed it; not copied.
    """

    num_tokens: int
    num_rows: int
    num_flat: int
    part_rows: torch.Tensor
    row_src: torch.Tensor
    home_row: torch.Tensor
    home_rank: torch.Tensor
    home_slot: torch.Tensor
    send_token: torch.Tensor | None
    one_sided: OneSided | None
    row_buffer: torch.Tensor | None = None
    flat_buffer: torch.Tensor | None = None
    flat_part: torch.Tensor | None = None
    part_flat: torch.Tensor | None = None
    send_splits: tuple[int, ...] = ()
    recv_splits: tuple[int, ...] = ()
    gather_rows: tuple[int, int] = (0, 0)
    flat_expert: torch.Tensor | None = field(default_factory=_none)
    row_map: torch.Tensor | None = field(default_factory=_none)
    lists: Any = field(default=None, init=False, repr=False, compare=False)


@dataclass(frozen=True)
class Handle(Late):
    """What dispatch returns and combine needs. Immutable; valid for the dispatcher that made it until it is
    destroyed.

    Attributes:
        counts, padded_counts, dropped: int32 [L], kept rows per local expert, the same with padding, and
            refused rows.
        recv_rows: int32 [N, K], expert-major row of every slot of each flat row, -1 where there is none.
        route: the plan itself; its fields may change between versions.
    """

    version: int
    dispatcher_id: str
    rank: int
    counts: torch.Tensor
    padded_counts: torch.Tensor
    dropped: torch.Tensor
    recv_rows: torch.Tensor
    route: Route = field(repr=False)

    @property
    def num_tokens(self) -> int:
        """T: tokens this rank dispatched."""
        return self.route.num_tokens

    @property
    def num_rows(self) -> int:
        """Expert-major rows on this rank, padding and static tail included."""
        return self.route.num_rows

    @property
    def num_recv(self) -> int:
        """Flat rows on this rank, static tail included."""
        return self.route.num_flat

    @property
    def row_map(self) -> torch.Tensor:
        """int32 [num_rows]: flat row of each expert-major row, -1 padding."""
        if self.route.row_map is not None:
            return self.route.row_map
        top_k = self.route.part_rows.shape[1]
        part = self.route.row_src.div(top_k, rounding_mode="floor")
        return part if self.route.part_flat is None else take(self.route.part_flat, part, -1)


@dataclass(frozen=True)
class DispatchResult(Late):
    """What one rank received.

    Attributes:
        x: [rows, H] in the dispatcher's dtype. `expert_major`: rows in plan order, each expert padded to
            `alignment`, padding zero. `flat`: one row per received token in (source rank, source token)
            order.
        weights: fp32, [rows] (`expert_major`) or [rows, K] (`flat`); 0 on padding; None if no weights were
            passed.
        counts, padded_counts, dropped: int32 [L] per local expert.
        handle: pass it to `combine`.
        expert_idx: `flat` only, int32 [rows, K], local expert of each slot, -1 empty.
        row_map: `flat` only, int32 [expert-major rows], flat row of each expert-major position, -1 padding.
        scales: scales of quantised wires; None for the others.
    """

    x: torch.Tensor
    weights: torch.Tensor | None
    counts: torch.Tensor
    padded_counts: torch.Tensor
    dropped: torch.Tensor
    handle: Handle
    expert_idx: torch.Tensor | None = field(default_factory=_none)
    row_map: torch.Tensor | None = field(default_factory=_none)
    scales: torch.Tensor | None = None


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes a dispatcher needs beside the caller's tensors, per rank, before anything is allocated.

    Attributes:
        window_bytes: memory that peers can see.
        staging_bytes: the largest send, receive and metadata buffers alive at one moment, by name, at
            `max_tokens` tokens on every rank. In exact mode the receive side is bounded by the worst routing.
    """

    window_bytes: int
    staging_bytes: dict[str, int]

    @property
    def total_bytes(self) -> int:
        return self.window_bytes + sum(self.staging_bytes.values())
