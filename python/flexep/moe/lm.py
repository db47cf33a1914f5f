"""A small decoder-only language model over bytes, with a mixture-of-experts layer in every block."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flexep.errors import ArgumentError
from flexep.moe.experts import Experts
from flexep.moe.init import keyed_normal
from flexep.moe.layer import MoELayer

NUM_BYTES = 256
HEAD_DIM = 32


class _Linear(nn.Module):
    """A linear map without bias whose fp32 weight is cast to the dtype of its input."""

    def __init__(self, num_in: int, num_out: int, seed: int, name: str, scale: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(keyed_normal((num_out, num_in), scale * num_in**-0.5, seed, name))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


class _Norm(nn.Module):
    """RMSNorm, computed in fp32."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), (x.shape[-1],), self.weight, eps=1e-6).to(x.dtype)


class _Attention(nn.Module):
    """Causal self-attention with heads of HEAD_DIM."""

    def __init__(self, hidden: int, seed: int, name: str) -> None:
        super().__init__()
        self.qkv = _Linear(hidden, 3 * hidden, seed, f"{name}.qkv")
        self.out = _Linear(hidden, hidden, seed, f"{name}.out")

    def forward(self, x_BSH: Tensor) -> Tensor:
        B, S, H = x_BSH.shape
        q, k, v = self.qkv(x_BSH).view(B, S, 3, H // HEAD_DIM, HEAD_DIM).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(B, S, H))


class _Block(nn.Module):
    """x + attention(norm(x)), then x + moe(norm(x))."""

    def __init__(self, hidden: int, moe: MoELayer, seed: int, name: str) -> None:
        super().__init__()
        self.attention_norm = _Norm(hidden)
        self.attention = _Attention(hidden, seed, f"{name}.attention")
        self.moe_norm = _Norm(hidden)
        self.moe = moe

    def forward(self, x_BSH: Tensor) -> Tensor:
        x_BSH = x_BSH + self.attention(self.attention_norm(x_BSH))
        x_TH = self.moe_norm(x_BSH).reshape(-1, x_BSH.shape[-1])
        return x_BSH + self.moe(x_TH).view_as(x_BSH)


class ByteLM(nn.Module):
    """Predicts the next byte. `make_moe(name)` returns the MoE layer of a block, built with that name.

    Parameters are fp32; activations are `dtype`. Every initial value is keyed by (seed, parameter name), so
    models that spread their experts over different numbers of ranks start equal.
    """

    def __init__(
        self,
        make_moe: Callable[[str], MoELayer],
        *,
        hidden: int,
        num_layers: int,
        max_seq: int,
        dtype: torch.dtype,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if hidden < HEAD_DIM or hidden % HEAD_DIM:
            raise ArgumentError("hidden", hidden, f"a multiple of {HEAD_DIM}, the width of an attention head")
        self.dtype = dtype
        self.embedding = nn.Parameter(keyed_normal((NUM_BYTES, hidden), 0.5, seed, "embedding"))
        self.position = nn.Parameter(keyed_normal((max_seq, hidden), 0.1, seed, "position"))
        self.blocks = nn.ModuleList(
            _Block(hidden, make_moe(f"block{layer}.moe"), seed, f"block{layer}")
            for layer in range(num_layers)
        )
        self.norm = _Norm(hidden)
        self.head = _Linear(hidden, NUM_BYTES, seed, "head", scale=0.5)

    def forward(self, bytes_BS: Tensor) -> Tensor:
        """int64 bytes [B, S], B >= 0 -> fp32 logits [B, S, 256]."""
        x_BSH = (F.embedding(bytes_BS, self.embedding) + self.position[: bytes_BS.shape[1]]).to(self.dtype)
        for block in self.blocks:
            x_BSH = block(x_BSH)
        return self.head(self.norm(x_BSH)).float()

    def split_parameters(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """(parameters every rank holds a copy of, parameters of the experts this rank owns)."""
        owned = [p for module in self.modules() if isinstance(module, Experts) for p in module.parameters()]
        owned_ids = {id(p) for p in owned}
        return [p for p in self.parameters() if id(p) not in owned_ids], owned
