"""How large a one-sided dispatcher's window is: rings of chunks within a budget."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass

import torch

from flexep._native.plan import HEADER_INTS
from flexep._native.window import AHEAD_SMS, MAX_CHUNKS, MAX_DEVICE_SLICES, MOST_MAIL_SLICES, WindowShape
from flexep.config import ROW_BYTES, DispatcherConfig
from flexep.errors import ArgumentError
from flexep.group import Group


@dataclass(frozen=True)
class _Rings:
    """What suits a window. `slots`: chunks of a ring, read and written at once. `pull_bytes`, `push_bytes`: of all
    rings. `chunk_bytes`: rows that are handed over together."""

    slots: int
    pull_bytes: int
    push_bytes: int
    chunk_bytes: int


# A whole window's chunk stays in a core's cache between the one who writes it and the one who reads it. A slice's is
# small so that the ends of the pipe are short, and rings are long enough to cover a credit's way back:
# docs/decisions/exchange-spike.md.
_WHOLE = _Rings(2, 16 << 20, 16 << 20, 512 << 10)
_SLICED = _Rings(4, 64 << 20, 128 << 20, 256 << 10)
# A chunk costs a slice up to 6 us beside its rows, so one with many tokens has larger ones, if the budget has room:
# docs/decisions/crews.md. Not of rows sent ahead, which come in pieces of their own. Home waits for whole chunks of
# partial sums, so of these a slice has so many at least, if they are more than one.
CHUNKS_OF_SLICE, FEWEST_PUSHED = 5, 4
LEAST_SLOTS = 2  # one is read while the next is written
MAIL_BYTES = 64 << 10
MPS_PART = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
# What two H200s reach between each other, and one multiprocessor of many in its own memory (48 of 16, 33 of 64):
# docs/performance.md#no-cliffs.
LINK_GB_S, SM_GB_S = 360, 36
SMS_STEP = 8


def _mps_part() -> float:
    """Percent of the GPU's multiprocessors that MPS gives this process, as far as its environment says.

    Raises ArgumentError for what is none.
    """
    said = os.environ.get(MPS_PART) or "100"
    try:
        part = float(said)
    except ValueError:
        part = math.nan
    if not 0 < part <= 100:
        raise ArgumentError(MPS_PART, said, "a percentage")
    return part


def sends_ahead(config: DispatcherConfig, group: Group, hop_size: int) -> bool:
    """Whether x goes to every peer before it is known who needs which rows: as the config says, and not over relays.

    Raises ArgumentError where it is asked for and rows travel over relays.
    """
    if hop_size < config.num_ranks:
        if config.send_ahead:
            raise ArgumentError("send_ahead", True, f"False where rows take two hops (domains of {hop_size})")
        return False
    return config.sends_ahead(between_gpus=group.device.type == "cuda" and not group.is_local)


def modelled_sms(config: DispatcherConfig) -> int:
    """Multiprocessors with which writing rows takes no longer than the link, rounded up to 8.

    A rank writes each row that arrives (flat), or K T rows (expert-major; as many are read by combine), while
    needed (R - 1) T rows come over the link: n SM_GB_S / LINK_GB_S >= written / came.
    """
    R = config.num_ranks
    came = max(1, R - 1) * config.needed
    written = config.top_k if config.layout == "expert_major" else came + config.needed
    return math.ceil(LINK_GB_S / SM_GB_S * written / came / SMS_STEP) * SMS_STEP


def num_slices(config: DispatcherConfig, group: Group, ahead: bool = False) -> int:
    """Parts of a window that work side by side: multiprocessors of a GPU that a rank's crews take; else 1.

    `config.num_sms`, or what the model says; fewer where the GPU or the tokens do not allow it. The ranks of a local
    group share one GPU, and all their CTAs must be there at once. Processes that share one under MPS take so little of
    their part that all of them fit into half of one: their parts may be the same multiprocessors, and a rank's other
    kernels must find room beside those that wait for it. Without that variable, or with more processes on a GPU than it
    has parts, `num_sms` must be small enough for that. Where rows are sent `ahead`, a few are left to the kernels that
    say so.
    """
    if group.device.type != "cuda" or not torch.cuda.is_available():
        return 1  # without a GPU there will be no window either: opening says so on every rank
    seen = torch.cuda.get_device_properties(group.device).multi_processor_count
    here, part = seen // len(group.hosted), _mps_part()
    if part < 100:
        here = int(here * part / 200)
    if ahead:
        here = min(here, (seen - AHEAD_SMS) // len(group.hosted))
    wanted = modelled_sms(config) if config.num_sms is None else config.num_sms
    return max(1, min(wanted, here, MAX_DEVICE_SLICES, config.max_tokens))


def _even(tokens: int, slices: int, least: int, most: int) -> int:
    """The tokens of a chunk, `most` or not much fewer, with which the slice that has most tokens has fewest.

    Slices take chunks in turns, so where the last turn is not full some slices wait for others.
    """
    sizes = range(min(most, max(least, math.ceil(most * 2 / 3))), most + 1)
    return min(sizes, key=lambda n: (n * math.ceil(tokens / (n * slices)) if n else 0, -n))


def window_shape(
    config: DispatcherConfig, hop_size: int, slices: int = 1, ahead: bool = False
) -> WindowShape:
    """The shape of every rank's window, for rows that travel in hops of `hop_size` ranks.

    The budget (`config.window_bytes`; 32 MiB, 192 with slices) is for the rings of rows: half for rows that are pulled
    (one ring for a rank's own rows, one for each domain it relays), half for partial sums that are pushed (one for
    each rank or domain that pushes here), two thirds with slices where no budget is given. A budget too small for
    `slices` makes them fewer.

    `ahead`: a place for every row of every peer, instead of rings of rows that are pulled.

    Raises ArgumentError when the budget does not hold one token a chunk.
    """
    R, D = config.num_ranks, config.num_ranks // hop_size
    rings = _SLICED if slices > 1 else _WHOLE
    pull_row = config.row_bytes
    push_row = config.hidden * max(config.dtype.itemsize, config.combine_dtype.itemsize)
    pull_line, push_line = (1 if D == 1 else 1 + D) * pull_row, (R if D == 1 else R + D) * push_row
    given = config.window_bytes
    pull, push = (rings.pull_bytes, rings.push_bytes) if given is None else (given // 2, given // 2)
    rooms = pull // pull_line, push // push_line  # tokens of all chunks of all slices
    slots = rings.slots if min(rooms) >= rings.slots * slices else LEAST_SLOTS
    slices = min(slices, max(1, min(rooms) // slots))
    of_slice = math.ceil(config.max_tokens / slices)
    least = max(1, math.ceil(of_slice / MAX_CHUNKS))
    fair = math.ceil(of_slice / CHUNKS_OF_SLICE) if slices > 1 else 0
    wanted = [
        max(rings.chunk_bytes // pull_row, 0 if ahead else fair),
        max(rings.chunk_bytes // push_row, fair),
    ]
    if slices > 1 and wanted[1] < of_slice:
        wanted[1] = min(wanted[1], math.ceil(of_slice / FEWEST_PUSHED))
    tokens = [
        min(room // (slices * slots), max(1, of_slice), max(least, some))
        for room, some in zip(rooms, wanted, strict=True)
    ]
    if slices > 1:
        tokens = [_even(config.max_tokens, slices, least, n) for n in tokens]
    if config.window_bytes is None:
        tokens = [max(least, n) for n in tokens]
    if min(tokens) < least:
        needed = 2 * least * LEAST_SLOTS * max(pull_line, push_line)
        raise ArgumentError("window_bytes", config.window_bytes, f"at least {needed} bytes for this shape")
    record = 4 * (1 + 3 * config.top_k)
    mail = min(MAIL_BYTES, max(1, math.ceil(config.max_tokens / min(slices, MOST_MAIL_SLICES))) * record)
    return WindowShape(
        ranks=R,
        domain_size=hop_size,
        slices=slices,
        slots=slots,
        pull_tokens=tokens[0],
        push_tokens=tokens[1],
        pull_row_bytes=pull_row,
        push_row_bytes=push_row,
        mail_bytes=math.ceil(mail / ROW_BYTES) * ROW_BYTES,
        board_ints=HEADER_INTS + config.num_experts + R + max(1, D),
        registered_rows=config.max_tokens if config.zero_copy else 0,
        landed_rows=config.max_tokens if ahead else 0,
    )
