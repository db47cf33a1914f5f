"""How many records and rows a one-sided plan can need, from the arguments alone: what static mode allocates."""

from __future__ import annotations

from flexep._native.arrivals import Sizes
from flexep.config import DispatcherConfig


def most_sizes(config: DispatcherConfig, hop_size: int, num_tokens: int) -> Sizes:
    """The sizes of a rank with that many tokens, for records that travel in hops of `hop_size` ranks, at most.

    No more records reach a rank than it has rows: without a capacity, one for every slot of everybody's.
    """
    R, K, T = config.num_ranks, config.top_k, config.max_tokens
    rows = R * T * K if config.capacity_rows is None else config.capacity_rows
    flat, D = min(R * T, rows), R // hop_size
    if D == 1:
        return Sizes(num_tokens * min(K, R), flat, rows)
    relayed = min(D * T, hop_size * rows)
    handed = min(relayed * min(K, hop_size), hop_size * rows)
    return Sizes(num_tokens * min(K, D), flat, rows, relayed, handed)


def metadata_bytes(config: DispatcherConfig, hop_size: int) -> int:
    """Records of one rank that are alive at once, with weights, at max_tokens tokens."""
    most = most_sizes(config, hop_size, config.max_tokens)
    record, over_rail = 4 * (1 + 2 * config.top_k), 4 * (1 + 3 * config.top_k)
    left = most.left * (record if hop_size == config.num_ranks else over_rail)
    return left + most.relayed * over_rail + (most.handed + most.flat) * record
