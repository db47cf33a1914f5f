"""What a training run is made of, checked before anything starts."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flexep.dispatchers import BACKENDS
from flexep.errors import ArgumentError
from flexep.moe.layer import WEIGHTS_AT
from flexep.moe.lm import HEAD_DIM

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
LAYOUTS = ("expert_major", "flat")
DEVICES = ("cpu", "cuda")


@dataclass(frozen=True)
class TrainConfig:
    """One training run. `batch` counts sequences over all ranks, so that ranks never change what is learnt.

    Raises:
        ArgumentError: a value outside its range, named.
    """

    device: str = "cpu"
    ranks: int = 1
    dispatcher: str = "auto"
    steps: int = 60
    seed: int = 0
    hidden: int = 128
    inner: int = 256
    layers: int = 2
    experts: int = 8
    top_k: int = 2
    seq: int = 128
    batch: int = 16
    lr: float = 3e-3
    dtype: str = "float32"
    layout: str = "expert_major"
    weights_at: str = "expert"
    domain_size: int | None = None

    def __post_init__(self) -> None:
        for argument in ("ranks", "steps", "hidden", "inner", "layers", "experts", "top_k", "seq", "batch"):
            if getattr(self, argument) < 1:
                raise ArgumentError(argument, getattr(self, argument), "at least 1")
        if not 0 <= self.seed < 2**63:
            raise ArgumentError("seed", self.seed, "0 to 2**63 - 1")
        if not 0 < self.lr < float("inf"):
            raise ArgumentError("lr", self.lr, "a positive number")
        if self.hidden % HEAD_DIM:
            raise ArgumentError("hidden", self.hidden, f"a multiple of {HEAD_DIM}, the width of a head")
        if self.top_k > self.experts:
            raise ArgumentError("top_k", self.top_k, f"at most experts = {self.experts}")
        size = self.domain_size
        if size is not None and (size < 1 or self.ranks % size):
            raise ArgumentError("domain_size", size, f"None or a divisor of the {self.ranks} ranks")
        choices = {
            "device": DEVICES,
            "dtype": tuple(DTYPES),
            "layout": LAYOUTS,
            "weights_at": WEIGHTS_AT,
            "dispatcher": ("auto", *BACKENDS),
        }
        for argument, allowed in choices.items():
            if getattr(self, argument) not in allowed:
                raise ArgumentError(argument, getattr(self, argument), f"one of {', '.join(allowed)}")
