"""How ranks learn, before rows move, that one of them refused its arguments or called differently."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

import torch

from flexep._native.plan import HEADER_INTS
from flexep.config import DispatcherConfig
from flexep.dispatchers.backend import Published
from flexep.errors import CollectiveMismatch, FlexEPError, PeerRefused
from flexep.group import Group
from flexep.transport.collectives import HEADERS, Collectives

# Bits of a call that every rank must share: gradients are collective, and so are the weights that travel.
CALL_BITS = {
    "x requires grad": 1,
    "weights given": 2,
    "weights require grad": 4,
    "flat rows": 8,
    "cached handle": 16,
}


CALLS = tuple(HEADERS)
TOKENS = 2  # column of what everybody said that holds T


def stamp(call: str, num_tokens: int, bits: int, registered: bool) -> tuple[int, int, int, int]:
    """What one rank says about its call, one of `CALLS`, behind how much in it is wrong. `registered`: x lies in the
    window and is read there."""
    return CALLS.index(call), num_tokens, bits, int(registered)


def header_of(call: str) -> str:
    """The operation in which every rank says, int32 [n] with the same n in every call, so that ranks in different calls
    meet there too: a header {how much is wrong, stamp}, and counts."""
    return HEADERS[call]


def exchange_headers(
    collectives: Collectives, call: str, gather: Callable[[str], Sequence[torch.Tensor | None]]
) -> Published:
    """What every rank says in `header_of(call)`, which gather(op) brings. Checks the headers on the host (one host
    wait).

    Raises PeerRefused when another rank refused its arguments, CollectiveMismatch when calls differ. A rank
    that itself refused finds its own rank in PeerRefused.refused and raises its own error instead.
    """
    gathered = gather(header_of(call))[0]
    assert gathered is not None
    host = collectives.to_host(gathered)
    wrong, calls, tokens, bits, registered = zip(*host[:, :HEADER_INTS].tolist(), strict=True)
    refused = {rank: "" for rank, count in enumerate(wrong) if count}
    if refused:
        raise PeerRefused(call, refused)
    if len(set(calls)) > 1:
        raise CollectiveMismatch(call, _differences([{"call": CALLS[number]} for number in calls]))
    if len(set(bits)) > 1:
        views = [{name: "yes" if one & bit else "no" for name, bit in CALL_BITS.items()} for one in bits]
        raise CollectiveMismatch(call, _differences(views))
    return Published(gathered, host, list(tokens), [bool(one) for one in registered])


def agree_on_config(
    group: Group, config: DispatcherConfig | None, error: FlexEPError | None, timeout: float
) -> None:
    """Compares every rank's constructor arguments. Collective; exactly one of `config` and `error` is given.

    Raises `error` on the ranks that have one, PeerRefused beside them, CollectiveMismatch where arguments
    differ.
    """
    mine = {
        "error": None if error is None else str(error),
        "config": None if config is None else config.as_text(),
    }
    said = [json.loads(payload) for payload in group.all_gather(json.dumps(mine).encode(), timeout)]
    if error is not None:
        raise error
    refused = {rank: one["error"] for rank, one in enumerate(said) if one["error"] is not None}
    if refused:
        raise PeerRefused("Dispatcher", refused)
    differences = _differences([one["config"] for one in said])
    if differences:
        raise CollectiveMismatch("Dispatcher", differences)


def _differences(by_rank: Sequence[Mapping[str, str]]) -> dict[str, dict[str, list[int]]]:
    out: dict[str, dict[str, list[int]]] = {}
    for field in by_rank[0]:
        by_value: dict[str, list[int]] = defaultdict(list)
        for rank, config in enumerate(by_rank):
            by_value[config[field]].append(rank)
        if len(by_value) > 1:
            out[field] = dict(by_value)
    return out
