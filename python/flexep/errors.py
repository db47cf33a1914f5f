"""Everything FlexEP raises. Each error names the value that caused it; all derive from FlexEPError."""

from __future__ import annotations

from collections.abc import Sequence


class FlexEPError(Exception):
    """Base class of every error that FlexEP raises on purpose."""


class ArgumentError(FlexEPError, ValueError):
    """An argument was refused before anything moved.

    Attributes: `argument` (its name), `value` (what was passed), `expected` (what would have been accepted).
    """

    def __init__(self, argument: str, value: object, expected: str) -> None:
        super().__init__(f"{argument} = {value!r}: expected {expected}")
        self.argument = argument
        self.value = value
        self.expected = expected

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), (self.argument, self.value, self.expected))


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


class CollectiveMismatch(FlexEPError):
    """Ranks passed different values to a collective call. Raised on every rank.

    Attribute `differences`: {field: {value (as text): [ranks that passed it]}}.
    """

    def __init__(self, what: str, differences: dict[str, dict[str, list[int]]]) -> None:
        lines = [
            f"{field}: " + " against ".join(f"{value} ({_ranks(ranks)})" for value, ranks in by_value.items())
            for field, by_value in differences.items()
        ]
        super().__init__(f"{what}: ranks disagree about {'; '.join(lines)}")
        self.what = what
        self.differences = differences

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), (self.what, self.differences))


class PeerRefused(FlexEPError):
    """Another rank refused its own arguments, so this rank's call was called off; nothing moved.

    Attributes: `what` (the call), `refused` ({rank: its message, "" if only the fact is known}).
    """

    def __init__(self, what: str, refused: dict[int, str]) -> None:
        text = "; ".join(
            f"rank {rank}" + (f" ({message})" if message else "") for rank, message in refused.items()
        )
        super().__init__(f"{what}: called off because another rank refused its arguments: {text}")
        self.what = what
        self.refused = refused

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), (self.what, self.refused))


class Timeout(FlexEPError, TimeoutError):
    """A wait passed its deadline. The group it happened on must not be used again.

    Attributes: `op`, `waiting_rank`, `awaited_ranks` (empty when the transport cannot tell), `seconds`. One-sided
    transports raise it on every living rank, also on those that did not wait themselves, and add `epoch` (number of
    the operation on its window), `word` (the signal word, a name of docs/protocol.md), `want` and `got` ((epoch,
    chunks) that it should have said and did); None elsewhere.
    """

    def __init__(
        self,
        op: str,
        waiting_rank: int,
        awaited_ranks: tuple[int, ...],
        seconds: float,
        epoch: int | None = None,
        word: str | None = None,
        want: tuple[int, int] | None = None,
        got: tuple[int, int] | None = None,
    ) -> None:
        who = _ranks(awaited_ranks) if awaited_ranks else "a peer"
        where = "" if word is None else f" (epoch {epoch}, word {word}: want {want}, got {got})"
        super().__init__(f"{op}: rank {waiting_rank} waited {seconds:g} s for {who}{where}")
        self.op = op
        self.waiting_rank = waiting_rank
        self.awaited_ranks = awaited_ranks
        self.seconds = seconds
        self.epoch = epoch
        self.word = word
        self.want = want
        self.got = got

    def __reduce__(self) -> tuple[object, ...]:
        fields = (self.op, self.waiting_rank, self.awaited_ranks, self.seconds)
        return (type(self), (*fields, self.epoch, self.word, self.want, self.got))


class PeerLost(FlexEPError):
    """The connection to a peer broke while an operation ran. The group must not be used again."""


class WindowBusy(FlexEPError, RuntimeError):
    """Two operations on one window at once. One dispatcher serves one operation at a time; nothing moved."""


class WindowBroken(FlexEPError, RuntimeError):
    """A window on which an operation failed, or that was left, cannot be used again: make a new dispatcher on a new
    group."""


class CapacityExceeded(FlexEPError):
    """More rows arrived than the static capacity holds; the kept set moved, the rest were dropped.

    Attributes: `dropped` (rows dropped on all ranks together), `capacity` (rows a rank).
    """

    def __init__(self, dropped: int, capacity: int) -> None:
        super().__init__(
            f"{dropped} rows did not fit a capacity of {capacity} rows and were dropped; "
            "raise capacity, or pass overflow='drop' to accept it"
        )
        self.dropped = dropped
        self.capacity = capacity

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), (self.dropped, self.capacity))


class HandleMismatch(FlexEPError):
    """A handle was used with a dispatcher that did not make it, or after that dispatcher was destroyed."""


class Unavailable(FlexEPError, RuntimeError):
    """A back end or transport cannot run here; the message says why and what to use instead."""


class NotBuilt(FlexEPError, RuntimeError):
    """The compiled module lacks this part; the message names the build option."""
