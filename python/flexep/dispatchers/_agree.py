"""How ranks learn, before rows move, that one of them refused its arguments or called differently."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from flexep.config import DispatcherConfig
from flexep.dispatchers.backend import Published
from flexep.errors import CollectiveMismatch, FlexEPError, PeerRefused
from flexep.group import Group
from flexep.transport.collectives import Collectives

# Bits of a call that every rank must share: gradients are collective, and so are the weights that travel.
CALL_BITS = {
    "x requires grad": 1,
    "weights given": 2,
    "weights require grad": 4,
    "flat rows": 8,
    "cached handle": 16,
}


CALLS = ("dispatch", "combine")


@dataclass(frozen=True)
class Header:
    """What one rank says about its call, one of `CALLS`. `refused` may be a scalar device tensor, so that nobody
    waits to say it. `registered`: x lies in the window and is read there."""

    call: str
    refused: torch.Tensor | bool
    num_tokens: int
    bits: int
    registered: bool = False

    def tensor(self, device: torch.device) -> torch.Tensor:
        refused = (
            self.refused.to(torch.int32)
            if isinstance(self.refused, torch.Tensor)
            else torch.tensor(int(self.refused))
        )
        rest = torch.tensor(
            [CALLS.index(self.call), self.num_tokens, self.bits, int(self.registered)], dtype=torch.int32
        )
        return torch.cat([refused.to(device, torch.int32).view(1), rest.to(device, non_blocking=True)])


HEADER_INTS = 5


def exchange_headers(
    collectives: Collectives, headers: Sequence[Header], payload: Sequence[torch.Tensor], read: bool
) -> Published:
    """Gathers every rank's header and payload, int32 [n] with the same n in every call, so that ranks in
    different calls meet here too. With `read`, checks the headers on the host (one host wait).

    Raises PeerRefused when another rank refused its arguments, CollectiveMismatch when calls differ. A rank
    that itself refused finds its own rank in PeerRefused.refused and raises its own error instead.
    """
    call = headers[0].call
    if not read:  # nobody would look at a header, and a captured graph must not hold its host memory
        return Published(
            collectives.all_gather([p[None] for p in payload], f"{call}.header")[0], None, None, None
        )
    sends = [torch.cat([h.tensor(p.device), p])[None] for h, p in zip(headers, payload, strict=True)]
    gathered = collectives.all_gather(sends, f"{call}.header")[0]
    host = collectives.to_host(gathered)
    said = host[:, :HEADER_INTS].tolist()
    refused = {rank: "" for rank, (status, *_) in enumerate(said) if status}
    if refused:
        raise PeerRefused(call, refused)
    views = [{"call": CALLS[number]} for _, number, *_ in said]
    if not _differences(views):
        views = [
            {name: "yes" if bits & bit else "no" for name, bit in CALL_BITS.items()} for *_, bits, _ in said
        ]
    differences = _differences(views)
    if differences:
        raise CollectiveMismatch(call, differences)
    return Published(
        gathered[:, HEADER_INTS:],
        host[:, HEADER_INTS:],
        [tokens for _, _, tokens, _, _ in said],
        [bool(registered) for *_, registered in said],
    )


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
