"""Rounds of dispatch, experts and combine whose result every rank knows by itself, so that thousands can be checked.

x holds small integers and expert e multiplies by 1 + e mod 3, so every sum is exact in bf16: z is x times the sum of
its experts' factors. Runs on the CPU too, where the logic of these tests is tried.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

import flexep
from flexep.testing.worker import RankContext

H, K, T = 256, 4, 48
SLEEP_CYCLES = 2_000_000  # about a millisecond
SLEEP_SECONDS = 0.001


class Rounds:
    """A dispatcher, inputs of its rank, and how many elements came back wrong, counted on the device.

    With `static` nothing waits for the device, and a round can be captured.
    """

    def __init__(
        self,
        ctx: RankContext,
        backend: str,
        static: bool,
        domain_size: int | None = None,
        ahead: bool = False,
    ) -> None:
        self.experts = 2 * ctx.size + 1
        self.device = ctx.device
        self.static = static
        # Every slot of every rank may meet at one expert.
        rows = ctx.size * T * K + 8 * self.experts if static else None
        self.ep = flexep.Dispatcher(
            ctx.group, num_experts=self.experts, hidden=H, top_k=K, max_tokens=T, backend=backend, alignment=8,
            domain_size=domain_size, capacity=rows, overflow="drop", timeout=60.0, send_ahead=ahead,
        )  # fmt: skip
        here = self.ep.table.expert_of_place[self.ep.table.places(ctx.rank)].tolist()
        self.local = torch.tensor([*map(factor, here), 0], dtype=torch.bfloat16, device=self.device)
        factors = [*map(factor, range(self.experts)), 0]  # the last for the empty slot, -1
        self.factors = torch.tensor(factors, dtype=torch.float32, device=self.device)
        self.wrong = torch.zeros((), dtype=torch.int64, device=self.device)

    def inputs(self, tokens: int, rng: random.Random) -> tuple[torch.Tensor, torch.Tensor]:
        """x and topk_idx of a routing that is drawn too: anywhere, to a few experts, or to one."""
        generator = torch.Generator(device=self.device).manual_seed(rng.getrandbits(62))
        x = torch.randint(-4, 5, (tokens, H), device=self.device, generator=generator).bfloat16()
        width = rng.choice((1, 2, self.experts, self.experts))
        first = rng.randrange(self.experts)
        idx = torch.randint(-1, width, (tokens, K), device=self.device, generator=generator)
        return x, torch.where(idx < 0, idx, (idx + first) % self.experts)

    def expected(self, x: torch.Tensor, idx: torch.Tensor) -> torch.Tensor:
        return (x.float() * self.factors[idx].sum(1, keepdim=True)).bfloat16()

    def arrive(self, x: torch.Tensor, idx: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Dispatch and experts: y and the handle."""
        r = self.ep.dispatch(x, idx)
        padded = r.handle.padded_counts
        rest = r.x.shape[0] - padded.sum().view(1)
        rows = torch.repeat_interleave(self.local, torch.cat([padded, rest.int()]), output_size=r.x.shape[0])
        return r.x * rows[:, None], r.handle

    def __call__(self, x: torch.Tensor, idx: torch.Tensor) -> torch.Tensor:
        y, handle = self.arrive(x, idx)
        return self.ep.combine(y, handle)

    def compare(self, z: torch.Tensor, want: torch.Tensor) -> None:
        self.wrong += (z != want).sum()

    def finish(self) -> int:
        """Elements that were wrong; the dispatcher is gone afterwards."""
        self.ep.check()
        self.ep.destroy()
        return int(self.wrong)


def factor(expert: int) -> int:
    return 1 + expert % 3


# -- many rounds with changing routing, delays, streams, and memory that is taken away at once


def soak(ctx: RankContext, backend: str, domain_size: int | None, iterations: int, seed: int) -> int:
    """Wrong elements of all rounds. What ranks must agree on is drawn from `seed`, the rest from their rank too."""
    alike, own = random.Random(seed), random.Random(f"{seed}/{ctx.rank}")
    ways = [
        (static, ahead) for static in (False, True) for ahead in (False, True)[: 1 + (domain_size is None)]
    ]
    every = [Rounds(ctx, backend, static, domain_size, ahead) for static, ahead in ways]
    streams = Streams(ctx.device)
    for _ in range(iterations):
        rounds = alike.choice(every)
        with streams.next(own):
            # Often as many as before: what is sent ahead of such a round is a graph with another x.
            x, idx = rounds.inputs(own.choice((T, own.randrange(T + 1))), own)
            want = rounds.expected(x, idx)
            dawdle(own, ctx.device)
            y, handle = rounds.arrive(x, idx)
            take_away(x, idx)
            del x, idx
            dawdle(own, ctx.device)
            z = rounds.ep.combine(y, handle)
            take_away(y)
            del y, handle
            rounds.compare(z, want)
    return sum(rounds.finish() for rounds in every)


class Streams:
    """Some streams, of which the next begins where the one before ends; none on the CPU."""

    def __init__(self, device: torch.device) -> None:
        self._all: list[Any] = []
        if device.type == "cuda":
            self._all = [torch.cuda.Stream(device) for _ in range(3)]
            self._last = torch.cuda.current_stream(device)

    @contextmanager
    def next(self, rng: random.Random) -> Iterator[None]:
        if not self._all:
            yield
            return
        stream = rng.choice(self._all)
        stream.wait_stream(self._last)
        self._last = stream
        with torch.cuda.stream(stream):
            yield


def dawdle(rng: random.Random, device: torch.device) -> None:
    """Now and then the device, the host, or both are late."""
    if rng.random() < 0.2 and device.type == "cuda":
        torch.cuda._sleep(rng.randrange(SLEEP_CYCLES))
    if rng.random() < 0.1:
        time.sleep(rng.random() * SLEEP_SECONDS)


def take_away(*tensors: torch.Tensor) -> None:
    """Overwrites them in stream order. The caller drops them next, so that the allocator gives them out again."""
    for tensor in tensors:
        tensor.fill_(99)


# -- graphs


class Captured:
    """A round over inputs of its own, captured once (on the CPU: run each time)."""

    def __init__(self, rounds: Rounds, tokens: int) -> None:
        self._rounds = rounds
        self._tokens = tokens
        self.x, self.idx = rounds.inputs(tokens, random.Random(0))
        self._replay: Callable[[], None] = self._run
        self._run()
        if rounds.device.type == "cuda":
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self._run()
            self._replay = graph.replay

    def _run(self) -> None:
        self.z = self._rounds(self.x, self.idx)

    def check(self, rng: random.Random) -> None:
        """Replays with new tokens and new routing."""
        x, idx = self._rounds.inputs(self._tokens, rng)
        self.x.copy_(x)
        self.idx.copy_(idx)
        self._replay()
        self._rounds.compare(self.z, self._rounds.expected(self.x, self.idx))


def interleaved_graphs(ctx: RankContext, backend: str, replays: int, seed: int, ahead: bool = False) -> int:
    """Wrong elements of two graphs of one dispatcher, of different sizes, replayed in any order, with eager rounds
    between them."""
    alike, own = random.Random(seed), random.Random(f"{seed}/{ctx.rank}")
    rounds = Rounds(ctx, backend, static=True, ahead=ahead)
    graphs = [Captured(rounds, T), Captured(rounds, T // 3)]
    for _ in range(replays):
        alike.choice(graphs).check(own)
        if alike.random() < 0.05:
            x, idx = rounds.inputs(own.randrange(T + 1), own)
            rounds.compare(rounds(x, idx), rounds.expected(x, idx))
        dawdle(own, ctx.device)
    return rounds.finish()
