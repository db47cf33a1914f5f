"""Random routing problems whose right answer does not hang on the last bit, and the settings to try them with."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st

from flexep.moe.router_config import RouterConfig
from flexep.ref import router as ref

KINDS = (
    {"score": "softmax"},
    {"score": "softmax", "pre_softmax": False},
    {"score": "sigmoid"},
    {"score": "sqrt_softplus"},
)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def rule_of(config: RouterConfig) -> ref.Rule:
    names = ref.Rule.__dataclass_fields__
    return ref.Rule(**{name: getattr(config, name) for name in names})


@st.composite
def configs(draw: Any, **fixed: Any) -> RouterConfig:
    """Any score, any groups that divide the experts, any K that the groups allow."""
    groups = draw(st.integers(1, 4))
    size = draw(st.integers(1, 5))
    topk_groups = draw(st.integers(1, groups))
    top_k = draw(st.integers(1, min(topk_groups * size, 6)))
    kind = draw(st.sampled_from([k for k in KINDS if top_k > 1 or k.get("pre_softmax", True)]))
    return RouterConfig(
        num_experts=groups * size,
        top_k=top_k,
        num_groups=groups,
        topk_groups=topk_groups,
        group_score=draw(st.sampled_from(["top2", "max"])),
        renormalize=draw(st.booleans()),
        scaling=draw(st.sampled_from([1.0, 2.5])),
        **kind,
        **fixed,
    )


def clear_logits(
    num_tokens: int, config: RouterConfig, bias_E: torch.Tensor | None, seed: int
) -> torch.Tensor:
    """fp32 [T, E] logits without close calls: the choice stays the same when every key moves by 1e-4.

    So fp32 and fp64 must choose alike.
    """
    random, rule = generator(seed), rule_of(config)
    rows: list[torch.Tensor] = []
    bias_E = torch.zeros(config.num_experts) if bias_E is None else bias_E
    while len(rows) < num_tokens:
        row = 2 * torch.randn(1, config.num_experts, generator=random)
        nudges = [torch.zeros(config.num_experts)]
        nudges += [1e-4 * torch.randn(config.num_experts, generator=random) for _ in range(6)]
        chosen = [ref.choose(row, rule, bias_E + nudge) for nudge in nudges]
        if all(each == chosen[0] for each in chosen):
            rows.append(row)
    return torch.cat(rows) if rows else torch.zeros(0, config.num_experts)


def scaled_close(ours: torch.Tensor, theirs: torch.Tensor, tolerance: float, name: str = "") -> None:
    """Each value within `tolerance` of the largest value of its counterpart."""
    scale = theirs.abs().max().item() if theirs.numel() else 1.0
    torch.testing.assert_close(
        ours.double(),
        theirs.double(),
        rtol=0,
        atol=tolerance * max(scale, 1e-3),
        msg=lambda m: f"{name}: {m}",
    )
