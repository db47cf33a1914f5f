"""The reference layer: router, SwiGLU experts, and the MoE layer over a Dispatcher."""

from flexep.moe.experts import Experts
from flexep.moe.layer import MoELayer
from flexep.moe.router import Router, softmax_topk

__all__ = ["Experts", "MoELayer", "Router", "softmax_topk"]
