"""The router on one GPU: `python -m bench.onegpu.route` prints one JSON line a measurement.

Calls of a measurement rotate among sets of logits which together are several times the L2 cache. `ratio_to_copy` is the
time of a device-to-device copy of the bytes that must move (logits read; ids, weights and, if asked for, probabilities
written) over the median: at these sizes a router is bound by launch and latency, not by bytes. Beside ours: the same in
torch (softmax or sigmoid, topk, renormalisation), the composition of flexep.moe, and Transformer Engine's fused router
if it is there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from bench.onegpu.timing import copy_us, emit, median_us
from flexep.moe.choose import choose, weigh
from flexep.moe.router_config import RouterConfig
from flexep.ops.route import choose_experts_grad, route

E, K = 256, 8
SETS_BYTES = 256 << 20
KINDS: dict[str, dict[str, Any]] = {
    "softmax": {"score": "softmax"},
    "softmax after": {"score": "softmax", "pre_softmax": False},
    "sigmoid, 8 groups, bias": {"score": "sigmoid", "num_groups": 8, "topk_groups": 4, "scaling": 2.5},
    "sqrt_softplus": {"score": "sqrt_softplus"},
}
Call = Callable[[torch.Tensor], object]


def report(
    op: str, kind: str, library: str, tokens: int, moved: int, call: Call, sets: list[torch.Tensor]
) -> None:
    took = median_us([lambda each=each: call(each) for each in sets])
    emit(
        op=op, kind=kind, tokens=tokens, hidden=0, alignment=0, experts=E, top_k=K, dtype=str(sets[0].dtype),
        median_us=took, ratio_to_copy=copy_us(moved) / took, library=library,
    )  # fmt: skip


def ours(options: dict[str, Any], bias: torch.Tensor | None, with_probs: bool) -> Call:
    return lambda logits: route(logits, bias, top_k=K, with_probs=with_probs, **options)


def composed(config: RouterConfig, bias: torch.Tensor | None) -> Call:
    def call(logits: torch.Tensor) -> object:
        idx = choose(logits, config, bias)
        return idx, weigh(logits, idx, config)

    return call


def plain_torch(options: dict[str, Any]) -> Call:
    """The shortest way in torch, without groups and bias, and without an order of ties."""

    def call(logits: torch.Tensor) -> object:
        scores = logits.softmax(-1) if options["score"] == "softmax" else logits.sigmoid()
        weights, idx = scores.topk(K, dim=-1)
        return idx.int(), weights / weights.sum(-1, keepdim=True)

    return call


def transformer_engine(options: dict[str, Any], bias: torch.Tensor | None) -> Call | None:
    """Its result is a mask and dense weights [T, E], not ids."""
    try:
        from transformer_engine.pytorch.router import fused_topk_with_score_function
    except ImportError:
        return None
    return lambda logits: fused_topk_with_score_function(
        logits, K, options.get("pre_softmax", True), options.get("num_groups"), options.get("topk_groups"),
        options.get("scaling"), options["score"].replace("_", ""), bias,
    )  # fmt: skip


def gradient(options: dict[str, Any], like: torch.Tensor, with_probs: bool) -> Call:
    """Of the weights, and of a sum of the probabilities over tokens, which is one row for all of them."""
    after = not options.get("pre_softmax", True)
    rule = ("softmax_after" if after else options["score"], K, options.get("num_groups", 1))
    rule = (*rule, options.get("topk_groups", 1), "top2", True, options.get("scaling", 1.0))
    idx = route(like, top_k=K, **options).idx
    by_weights = torch.randn(idx.shape, device="cuda")
    by_probs = torch.randn(E, device="cuda").expand(like.shape) if with_probs else None
    return lambda logits: choose_experts_grad(logits, idx, by_weights, by_probs, *rule)


def measure(tokens: int, kind: str, dtype: torch.dtype) -> None:
    options = KINDS[kind]
    bias = 0.1 * torch.randn(E, device="cuda") if "bias" in kind else None
    row = E * dtype.itemsize
    sets = [torch.randn(tokens, E, device="cuda").to(dtype) for _ in range(SETS_BYTES // (tokens * row))]
    least, probs = tokens * (row + 8 * K), tokens * 4 * E
    report("route", kind, "flexep", tokens, least, ours(options, bias, False), sets)
    report("route with probs", kind, "flexep", tokens, least + probs, ours(options, bias, True), sets)
    report(
        "route backward",
        kind,
        "flexep",
        tokens,
        least + tokens * row,
        gradient(options, sets[0], False),
        sets,
    )
    both = gradient(options, sets[0], True)
    report("route with probs backward", kind, "flexep", tokens, least + tokens * row, both, sets)
    if dtype != torch.float32:
        return
    config = RouterConfig(num_experts=E, top_k=K, **options)
    report("route", kind, "flexep, composed", tokens, least, composed(config, bias), sets)
    if kind in ("softmax", "sigmoid, 8 groups, bias"):
        report("route", kind.split(",")[0], "torch", tokens, least, plain_torch(options), sets)
    engine = transformer_engine(options, bias)
    if engine is not None:
        report("route", kind, "transformer_engine", tokens, tokens * (2 * row + E), engine, sets)


def main() -> None:
    torch.manual_seed(0)
    with torch.no_grad():
        for tokens in (4096, 8192):
            for kind in KINDS:
                measure(tokens, kind, torch.float32)
            measure(tokens, "softmax", torch.bfloat16)


if __name__ == "__main__":
    main()
