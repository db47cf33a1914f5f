"""The row functors composed from torch operations: a second opinion on csrc/ops, on either device.

gather and reduce give the same bits (a NaN is a NaN: its payload may differ): each product and each sum is a kernel of
its own, so nothing is fused. dot_rows sums in torch's order. Arguments are those of flexep.ops.rows.
"""

from __future__ import annotations

import torch


def gather_rows(
    src_MH: torch.Tensor, idx_N: torch.Tensor, weights_N: torch.Tensor | None = None
) -> torch.Tensor:
    """See flexep.ops.rows.gather_rows."""
    if src_MH.shape[0] == 0:
        return src_MH.new_zeros(idx_N.shape[0], src_MH.shape[1])
    empty_N1 = (idx_N < 0).unsqueeze(1)
    out_NH = src_MH.index_select(0, idx_N.clamp(min=0).long())
    if weights_N is not None:
        out_NH = (weights_N.unsqueeze(1) * out_NH.float()).to(src_MH.dtype)
    return torch.where(empty_N1, out_NH.new_zeros(()), out_NH)


def reduce_rows(
    src_MH: torch.Tensor,
    idx_TK: torch.Tensor,
    weights_TK: torch.Tensor | None,
    out_dtype: torch.dtype,
    sort: bool,
    groups_TK: torch.Tensor | None = None,
    group_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """See flexep.ops.rows.reduce_rows. One step per k, each over all tokens."""
    (T, K), H = idx_TK.shape, src_MH.shape[1]
    # Empty slots go last in either order; a stable sort keeps the order of k among equal indices.
    key_TK = torch.where(
        idx_TK < 0, torch.iinfo(torch.int32).max, idx_TK if sort else torch.zeros_like(idx_TK)
    )
    order_TK = key_TK.argsort(dim=1, stable=True)
    idx_TK = idx_TK.gather(1, order_TK)
    weights_TK = None if weights_TK is None else weights_TK.gather(1, order_TK)
    groups_TK = None if groups_TK is None else groups_TK.gather(1, order_TK)
    total_TH = src_MH.new_zeros(T, H, dtype=torch.float32)
    sum_TH = torch.zeros_like(total_TH)
    has_total_T1 = torch.zeros(T, 1, dtype=torch.bool, device=src_MH.device)
    for k in range(K):
        here_T1 = (idx_TK[:, k] >= 0).unsqueeze(1)
        term_TH = gather_rows(src_MH, idx_TK[:, k]).float()
        if weights_TK is not None:
            term_TH = weights_TK[:, k : k + 1] * term_TH
        starts_T1 = torch.full_like(here_T1, k == 0)
        if groups_TK is not None and k > 0:
            starts_T1 = (groups_TK[:, k] != groups_TK[:, k - 1]).unsqueeze(1)
        # A sum starts from its first term, not from zero: 0 + (-0) would lose the sign.
        grown_TH = torch.where(starts_T1, term_TH, sum_TH + term_TH)
        sum_TH = torch.where(here_T1, grown_TH, sum_TH)
        if groups_TK is not None:
            ends_T1 = here_T1 if k + 1 == K else here_T1 & (
                (groups_TK[:, k + 1] != groups_TK[:, k]) | (idx_TK[:, k + 1] < 0)
            ).unsqueeze(1)  # fmt: skip
            part_TH = sum_TH.to(group_dtype).float()
            added_TH = torch.where(has_total_T1, total_TH + part_TH, part_TH)
            total_TH = torch.where(ends_T1, added_TH, total_TH)
            has_total_T1 = has_total_T1 | ends_T1
    return (sum_TH if groups_TK is None else total_TH).to(out_dtype)


def dot_rows(a_MH: torch.Tensor, b_NH: torch.Tensor, idx_M: torch.Tensor) -> torch.Tensor:
    """See flexep.ops.rows.dot_rows."""
    products_MH = a_MH.float() * gather_rows(b_NH, idx_M).float()
    # The product of a zero row with Inf is NaN; an empty entry is 0 whatever stands in `a`.
    return torch.where(idx_M < 0, 0.0, products_MH.sum(dim=1))
