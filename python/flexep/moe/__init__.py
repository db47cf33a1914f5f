"""The reference layer: router, SwiGLU experts, and the MoE layer over a Dispatcher."""

from flexep.moe.experts import Experts
from flexep.moe.feed_forward import FeedForward
from flexep.moe.layer import MoELayer
from flexep.moe.router import Router, Routing
from flexep.moe.router_config import RouterConfig
from flexep.moe.saved_bytes import saved_bytes
from flexep.moe.upcycle import upcycle

__all__ = [
    "Experts",
    "FeedForward",
    "MoELayer",
    "Router",
    "RouterConfig",
    "Routing",
    "saved_bytes",
    "upcycle",
]
