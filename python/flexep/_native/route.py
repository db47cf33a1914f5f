"""The router on tensors: thin wrappers over csrc/ops/route.h that check, allocate and pass pointers.

Shape letters: T tokens, E experts, K chosen experts a token. On CUDA tensors a kernel is enqueued on the current
stream and nothing waits for it.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from flexep._native._load import _C
from flexep.errors import ArgumentError

MAX_TOP_K: int = _C.route_max_top_k
MAX_EXPERTS: int = _C.route_max_experts
SCORES = {"softmax": 0, "softmax_after": 1, "sigmoid": 2, "sqrt_softplus": 3}
GROUP_SCORES = {"max": False, "top2": True}
_CODE = {torch.float32: 0, torch.bfloat16: 2}
INT32_MAX = 2**31 - 1


class Rule(NamedTuple):
    """How to score, choose and weigh; the fields are those of csrc/ops/route.h, checked here."""

    score: str
    top_k: int
    num_groups: int
    topk_groups: int
    group_score: str
    renormalize: bool
    scaling: float

    def check(self, num_experts: int) -> None:
        """Raises ArgumentError for a value that E experts do not allow."""
        size, rest = divmod(num_experts, max(1, self.num_groups))
        within = self.topk_groups * size
        checks = (
            ("num_experts", num_experts, 1 <= num_experts <= MAX_EXPERTS, f"1 to {MAX_EXPERTS}"),
            ("score", self.score, self.score in SCORES, f"one of {', '.join(SCORES)}"),
            ("group_score", self.group_score, self.group_score in GROUP_SCORES, "max or top2"),
            ("num_groups", self.num_groups, self.num_groups >= 1 and not rest, f"a divisor of {num_experts}"),
            ("topk_groups", self.topk_groups, 1 <= self.topk_groups <= self.num_groups, "1 to num_groups"),
            ("top_k", self.top_k, 1 <= self.top_k <= min(MAX_TOP_K, within), _top_k_range(within)),
        )
        for name, value, accepted, expected in checks:
            if not accepted:
                raise ArgumentError(name, value, expected)


def _top_k_range(within: int) -> str:
    return f"1 to {MAX_TOP_K}, and at most the {within} experts of the chosen groups"


@functools.lru_cache(maxsize=64)
def _compiled(rule: Rule) -> _C.RouteRule:
    return _C.RouteRule(
        score=SCORES[rule.score], top_k=rule.top_k, num_groups=rule.num_groups, topk_groups=rule.topk_groups,
        top2=GROUP_SCORES[rule.group_score], renormalize=rule.renormalize, scaling=rule.scaling,
    )  # fmt: skip


def check_logits(logits_TE: torch.Tensor) -> None:
    """Raises ArgumentError for what is not a matrix of logits, fp32 or bf16."""
    if logits_TE.dim() != 2:
        raise ArgumentError("logits", tuple(logits_TE.shape), "2 dimensions, [tokens, experts]")
    if logits_TE.dtype not in _CODE:
        raise ArgumentError("logits", logits_TE.dtype, "torch.float32 or torch.bfloat16")
    if logits_TE.shape[0] * MAX_TOP_K > INT32_MAX:
        raise ArgumentError("logits", tuple(logits_TE.shape), f"at most {INT32_MAX // MAX_TOP_K} tokens")


def check_like(
    name: str, value: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...], logits_TE: torch.Tensor
) -> None:
    """Raises ArgumentError for another dtype, shape or device than this argument has beside these logits."""
    if value.dtype != dtype:
        raise ArgumentError(name, value.dtype, str(dtype))
    if tuple(value.shape) != shape:
        raise ArgumentError(name, tuple(value.shape), str(shape))
    if value.device != logits_TE.device:
        raise ArgumentError(name, str(value.device), f"the device of the logits, {logits_TE.device}")


def route(
    logits_TE: torch.Tensor,
    bias_E: torch.Tensor | None,
    padding_T: torch.Tensor | None,
    rule: Rule,
    with_probs: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Weights fp32 [T, K], probabilities fp32 [T, E] ([0, E] unless asked for), and ids int32 [T, K]."""
    check_logits(logits_TE)
    (T, E), device = logits_TE.shape, logits_TE.device
    rule.check(E)
    if bias_E is not None:
        check_like("bias", bias_E, torch.float32, (E,), logits_TE)
        bias_E = bias_E.contiguous()
    if padding_T is not None:
        check_like("padding_mask", padding_T, torch.bool, (T,), logits_TE)
        padding_T = padding_T.contiguous()
    logits_TE = logits_TE.contiguous()
    ids_TK = torch.empty(T, rule.top_k, dtype=torch.int32, device=device)
    weights_TK = torch.empty(T, rule.top_k, device=device)
    probs_TE = torch.empty(T if with_probs else 0, E, device=device)
    with torch.cuda.device_of(logits_TE):
        _C.route(
            rule=_compiled(rule), logits=logits_TE.data_ptr(), dtype=_CODE[logits_TE.dtype],
            bias=_address(bias_E), padding=_address(padding_T), tokens=T, experts=E,
            ids=ids_TK.data_ptr(), weights=weights_TK.data_ptr(),
            probs=probs_TE.data_ptr() if with_probs else 0, threads=torch.get_num_threads(),
            stream=_stream(device),
        )  # fmt: skip
    return weights_TK, probs_TE, ids_TK


def route_grad(
    logits_TE: torch.Tensor,
    ids_TK: torch.Tensor,
    grad_weights_TK: torch.Tensor | None,
    grad_probs_TE: torch.Tensor | None,
    rule: Rule,
) -> torch.Tensor:
    """The gradient of the logits, [T, E] in their dtype, from those of weights and probabilities."""
    check_logits(logits_TE)
    (T, E), device = logits_TE.shape, logits_TE.device
    rule.check(E)
    check_like("ids", ids_TK, torch.int32, (T, rule.top_k), logits_TE)
    if grad_weights_TK is not None:
        check_like("grad_weights", grad_weights_TK, torch.float32, (T, rule.top_k), logits_TE)
        grad_weights_TK = grad_weights_TK.contiguous()
    stride = E
    if grad_probs_TE is not None:
        check_like("grad_probs", grad_probs_TE, torch.float32, (T, E), logits_TE)
        # The gradient of a sum over tokens is one row for all of them: it is read as that.
        if E > 1 and grad_probs_TE.stride(1) != 1:
            grad_probs_TE = grad_probs_TE.contiguous()
        stride = grad_probs_TE.stride(0)
    logits_TE, ids_TK = logits_TE.contiguous(), ids_TK.contiguous()
    grad_TE = torch.empty_like(logits_TE)
    with torch.cuda.device_of(logits_TE):
        _C.route_grad(
            rule=_compiled(rule), logits=logits_TE.data_ptr(), dtype=_CODE[logits_TE.dtype],
            ids=ids_TK.data_ptr(), grad_weights=_address(grad_weights_TK),
            grad_probs=_address(grad_probs_TE), grad_probs_stride=stride, tokens=T, experts=E,
            grad_logits=grad_TE.data_ptr(), threads=torch.get_num_threads(), stream=_stream(device),
        )  # fmt: skip
    return grad_TE


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _stream(device: torch.device) -> int | None:
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else None
