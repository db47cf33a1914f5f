"""Bit comparison and digests of tensors; NaN compares as NaN."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from flexep.testing.case import Case

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Mismatch:
    """One thing that differs from the oracle: which case, rank, tensor or promise, and how."""

    case: Case
    rank: int
    what: str
    detail: str

    def __str__(self) -> str:
        return (
            f"{self.case.dispatcher}/{self.case.transport}, rank {self.rank}: {self.what}: {self.detail}\n"
            f"  flexep verify --case '{self.case.to_json()}'"
        )


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bits as integers, every NaN made the same one."""
    tensor = tensor.detach().cpu().contiguous()
    if tensor.is_floating_point() and (is_nan := tensor.isnan()).any():
        tensor = torch.where(is_nan, torch.nan, tensor)
    return raw(tensor)


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bits as integers, as they are."""
    return tensor.detach().view(_BITS[tensor.element_size()])


def differs(got: torch.Tensor | None, want: torch.Tensor | None) -> str | None:
    """How `got` differs from `want` in dtype, shape or any bit; None when it does not."""
    if got is None or want is None:
        return None if got is want else f"got {_kind(got)}, want {_kind(want)}"
    if got.dtype != want.dtype or got.shape != want.shape:
        return f"got {_kind(got)}, want {_kind(want)}"
    got, want = got.detach().cpu().contiguous(), want.detach().contiguous()
    if torch.equal(raw(got), raw(want)):
        return None
    wrong = bits(got) != bits(want)
    return _first(wrong, got, want) if wrong.any() else None


def outside(got: torch.Tensor | None, want: torch.Tensor, tolerance: torch.Tensor) -> str | None:
    """How fp `got` leaves the fp64 `want` +- `tolerance`; where `want` is not finite only that is asked of
    `got`."""
    if got is None or got.shape != want.shape:
        return f"got {_kind(got)}, want {_kind(want)}"
    value = got.detach().cpu().double()
    finite = want.isfinite()
    wrong = torch.where(finite, ~((value - want).abs() <= tolerance), value.isfinite())
    return _first(wrong, got, want) if wrong.any() else None


def _kind(tensor: torch.Tensor | None) -> str:
    return "None" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"


def _first(wrong: torch.Tensor, got: torch.Tensor, want: torch.Tensor) -> str:
    at = tuple(wrong.nonzero()[0].tolist())
    values = f"got {got[at].item()!r}, want {want[at].item()!r}"
    return f"{int(wrong.sum())} of {wrong.numel()} differ; at {list(at)} {values}"


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor inside nested dataclasses, lists, tuples and dicts, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name))
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)


def digest(value: Any) -> str:
    """Hash of every bit of every tensor inside `value`."""
    sha = hashlib.sha256()
    for tensor in tensors_in(value):
        sha.update(f"{tensor.dtype}{list(tensor.shape)}".encode())
        sha.update(bits(tensor).numpy().data)
    return sha.hexdigest()[:16]
