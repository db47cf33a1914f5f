"""What one benchmark run measures, as a value that validates itself and can be typed again."""

from __future__ import annotations

import dataclasses
import math
import shlex
from dataclasses import dataclass, replace

import torch

import flexep
from flexep.config import DispatcherConfig
from flexep.errors import ArgumentError
from flexep.ref import World
from flexep.testing.case import DTYPES, ROUTINGS, Case
from flexep.testing.inputs import make_world, topk_indices

WORKLOADS = {name.split("_")[0]: name for name in ROUTINGS if name[0] == "W"}
# own_rank: no row crosses; next_rank: every row does.
ROUTING_NAMES = ("uniform", "zipf", "hot", "own_rank", "next_rank", *WORKLOADS)
BASELINES = ("torch", "symm_mem", "deep_ep", "copy_engine")
ON_CPU = ("torch",)  # baselines that run there
ALL = ("all",)
BESIDE = ("none", "gemm")


@dataclass(frozen=True, kw_only=True)
class BenchCase:
    """One run. `tokens` is T of every rank (the largest, where the routing makes them ragged).

    dispatchers, baselines: names, or ALL: those that can run here; the run says why the others cannot.
    mode: exact (sizes from a host wait) or capacity (static sizes of `capacity` times tokens * top_k rows a
    rank, overflow dropped). fresh: every dispatch plans anew; else they use one handle. weights: combine
    multiplies rows by their routing weights, or none exist. domain_size: ranks of a domain, as the dispatchers take
    it. time_limit: seconds that one library may take for one operation; at least MIN_SAMPLES are taken whatever it
    says. pairs: the longest chained run. num_sms: GPU multiprocessors a dispatcher may take. send_ahead: whether
    one-sided dispatchers send x before the plan. beside: what runs next to every operation, in a measurement of its
    own.
    """

    device: str = "cpu"
    ranks: int = 4
    dispatchers: tuple[str, ...] = ALL
    baselines: tuple[str, ...] = ON_CPU
    tokens: int = 2048
    hidden: int = 1024
    experts: int = 64
    top_k: int = 8
    dtype: str = "bf16"
    domain_size: int | None = None
    routing: str = "uniform"
    layout: str = "expert_major"
    mode: str = "exact"
    capacity: float = 1.25
    fresh: bool = True
    alignment: int = 16
    weights: str = "none"
    seed: int = 0
    time_limit: float = 12.0
    pairs: int = 128
    num_sms: int | None = None
    send_ahead: bool | None = None
    beside: str = "none"

    def __post_init__(self) -> None:
        for name in ("ranks", "tokens", "hidden", "experts", "top_k", "alignment", "pairs"):
            self._require(name, getattr(self, name) >= 1, "at least 1")
        choices = {
            "device": ("cpu", "cuda"), "dtype": tuple(DTYPES), "routing": ROUTING_NAMES,
            "layout": ("expert_major", "flat"), "mode": ("exact", "capacity"), "weights": ("none", "combine"),
            "beside": BESIDE,
        }  # fmt: skip
        for name, values in choices.items():
            self._require(name, getattr(self, name) in values, f"one of {', '.join(values)}")
        self._check_names("dispatchers", tuple(flexep.BACKENDS))
        self._check_names("baselines", BASELINES)
        self._require("dispatchers", bool(self.dispatchers or self.baselines), "something to measure")
        self._require("beside", self.beside == "none" or self.device == "cuda", "none on the CPU")
        for name in ("capacity", "time_limit"):
            self._require(name, 0 < getattr(self, name) < math.inf, "a positive number")
        unweighted = self.layout == "expert_major" or self.weights == "none"
        self._require("weights", unweighted, "none with layout flat: flat rows are sums of weighted rows")
        self._check_sizes()

    def _check_names(self, argument: str, known: tuple[str, ...]) -> None:
        values = getattr(self, argument)
        if values == ALL:
            return
        for value in values:
            if value not in known:
                raise ArgumentError(argument, value, f"all, or some of {', '.join(known)}")
            if argument == "baselines" and self.device == "cpu" and value not in ON_CPU:
                raise ArgumentError(
                    argument, value, f"{', '.join(ON_CPU)} on the CPU: it moves memory of GPUs"
                )
        self._require(argument, len(set(values)) == len(values), "every name once")

    def _check_sizes(self) -> None:
        """The dispatchers' own rules, before any rank starts."""
        _ = self.config

    @property
    def config(self) -> DispatcherConfig:
        """The arguments of a one-sided dispatcher."""
        world = self.world
        return DispatcherConfig(
            num_ranks=world.num_ranks, num_experts=world.num_experts, hidden=world.hidden, top_k=world.top_k,
            max_tokens=world.max_tokens, backend="deepep", dtype=world.dtype, wire=None, combine_wire=None,
            domain_size=self.domain_size, layout=world.layout, alignment=world.alignment, capacity=world.capacity,
            overflow="drop", num_sms=self.num_sms, timeout=1.0, placement=world.placement, reduction="ordered",
            send_ahead=self.send_ahead,
        )  # fmt: skip

    def _require(self, name: str, accepted: bool, expected: str) -> None:
        if not accepted:
            raise ArgumentError(name, getattr(self, name), expected)

    @property
    def sends_ahead(self) -> bool:
        """Whether deepep sends every row to every peer before the plan; hybridep too, with one domain."""
        return self.config.sends_ahead(between_gpus=self.device == "cuda")

    @property
    def data(self) -> Case:
        """The case that keys the inputs: routing, x and weights depend on (seed, rank, step) and sizes alone."""
        names = {**WORKLOADS, "hot": WORKLOADS["W1"], "next_rank": "own_rank"}
        routing = names.get(self.routing, self.routing)
        return Case(
            ranks=self.ranks, experts=self.experts, hidden=self.hidden, top_k=self.top_k, tokens=self.tokens,
            seed=self.seed, routing=routing, alignment=self.alignment, layout=self.layout,
            y_layout=self.layout, weights=self.weights, dtype=self.dtype, domain_size=self.domain_size,
        )  # fmt: skip

    @property
    def world(self) -> World:
        """The dispatchers' arguments, for the oracle."""
        return replace(make_world(self.data), capacity=self.capacity if self.mode == "capacity" else None)

    def topk_idx(self, world: World, step: int) -> list[torch.Tensor]:
        """int64 [T, K] of every rank."""
        chosen = topk_indices(self.data, world, step)
        return chosen[1:] + chosen[:1] if self.routing == "next_rank" else chosen

    @property
    def asked(self) -> BenchCase:
        """The case without what changes no answer."""
        return replace(
            self, device="cpu", dispatchers=ALL, baselines=ON_CPU, time_limit=1.0, pairs=1, num_sms=None,
            send_ahead=None, beside="none", fresh=True,
        )  # fmt: skip

    @property
    def inputs(self) -> BenchCase:
        """The case without what changes no input either."""
        return replace(self.asked, layout="expert_major", mode="exact", alignment=1, domain_size=None)

    @property
    def steps(self) -> int:
        """Different routings that take turns: a hot spot that rotates needs some, the others have one."""
        return 4 if self.routing == "W6" else 1

    def command(self) -> str:
        """The command that runs this case again, every option spelled out."""
        words = ["flexep", "bench"]
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is None:
                continue
            if field.name == "fresh":
                words.append("--fresh" if value else "--cached")
                continue
            if field.name == "send_ahead":
                words.append("--send-ahead" if value else "--no-send-ahead")
                continue
            text = (",".join(value) or "none") if isinstance(value, tuple) else str(value)
            words += [f"--{field.name.replace('_', '-')}", text]
        return shlex.join(words)
