"""Permutation, padding and routing maps on one rank, as torch custom ops (`torch.ops.flexep`) with
autograd."""

from flexep._native.memory import release_memory
from flexep.ops.cast import dequantize_rows, quantize_rows
from flexep.ops.chunks import sort_chunks_by_index, transpose_chunks
from flexep.ops.maps import indices_to_multihot, multihot_to_indices, pad_routing_map
from flexep.ops.padding import pad, quantize_and_pad, unpad
from flexep.ops.permute import Permuted, permute, unpermute
from flexep.ops.rows import dot_rows, gather_rows, reduce_rows

__all__ = [
    "Permuted",
    "dequantize_rows",
    "dot_rows",
    "gather_rows",
    "indices_to_multihot",
    "multihot_to_indices",
    "pad",
    "pad_routing_map",
    "permute",
    "quantize_and_pad",
    "quantize_rows",
    "reduce_rows",
    "release_memory",
    "sort_chunks_by_index",
    "transpose_chunks",
    "unpad",
    "unpermute",
]
