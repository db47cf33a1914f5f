"""How large a one-sided dispatcher's window is: rings of chunks within a budget."""

from __future__ import annotations

import math

from flexep._native.window import MAX_CHUNKS, WindowShape
from flexep.config import ROW_BYTES, DispatcherConfig
from flexep.dispatchers._agree import HEADER_INTS
from flexep.errors import ArgumentError

SLOTS = 2  # chunks of a ring: one is read while the next is written
DEFAULT_BYTES = 32 << 20  # of all rings
CHUNK_BYTES = (
    512 << 10
)  # a chunk that stays in a core's cache between the one who writes it and the one who reads it
MAIL_BYTES = 64 << 10


def window_shape(config: DispatcherConfig, hop_size: int) -> WindowShape:
    """The shape of every rank's window, for rows that travel in hops of `hop_size` ranks.

    The budget (`config.window_bytes`, or 32 MiB) is for the rings of rows: half for rows that are pulled (one ring
    for a rank's own rows, one for each domain it relays), half for partial sums that are pushed (one for each rank or
    domain that pushes here).

    Raises ArgumentError when the budget does not hold one token a chunk.
    """
    R, D = config.num_ranks, config.num_ranks // hop_size
    pull_row = config.row_bytes
    push_row = config.hidden * max(config.dtype.itemsize, config.combine_dtype.itemsize)
    pull_line = SLOTS * (1 if D == 1 else 1 + D) * pull_row
    push_line = SLOTS * (R if D == 1 else R + D) * push_row
    budget = DEFAULT_BYTES if config.window_bytes is None else config.window_bytes
    least = math.ceil(config.max_tokens / MAX_CHUNKS)
    tokens = [
        min(budget // 2 // line, max(1, config.max_tokens), max(1, CHUNK_BYTES // row))
        for line, row in ((pull_line, pull_row), (push_line, push_row))
    ]
    if config.window_bytes is None:
        tokens = [max(1, least, n) for n in tokens]
    if min(tokens) < max(1, least):
        needed = 2 * max(1, least) * max(pull_line, push_line)
        raise ArgumentError("window_bytes", config.window_bytes, f"at least {needed} bytes for this shape")
    record = 4 * (1 + 3 * config.top_k)
    mail = min(MAIL_BYTES, max(record, config.max_tokens * record))
    return WindowShape(
        ranks=R,
        domain_size=hop_size,
        slices=1,
        slots=SLOTS,
        pull_tokens=tokens[0],
        push_tokens=tokens[1],
        pull_row_bytes=pull_row,
        push_row_bytes=push_row,
        mail_bytes=math.ceil(mail / ROW_BYTES) * ROW_BYTES,
        board_ints=HEADER_INTS + config.num_experts + R + max(1, D),
        registered_rows=config.max_tokens if config.zero_copy else 0,
    )
