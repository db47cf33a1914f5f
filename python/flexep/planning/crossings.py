"""Rows or bytes that leave and reach every rank, by the wire they take. Shape letters: R ranks, D domains."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flexep.planning.topology import Topology


@dataclass(frozen=True)
class Crossings:
    """float64 [R] each. Link: inside a domain. Rail: between domains. A rank's own rows are never in it."""

    link_send: torch.Tensor
    link_recv: torch.Tensor
    rail_send: torch.Tensor
    rail_recv: torch.Tensor

    def reversed(self) -> Crossings:
        """The same rows on their way back."""
        return Crossings(self.link_recv, self.link_send, self.rail_recv, self.rail_send)

    def times(self, link: float, rail: float | None = None) -> Crossings:
        """Scaled, the rail by a factor of its own if there is one."""
        rail = link if rail is None else rail
        return Crossings(
            self.link_send * link, self.link_recv * link, self.rail_send * rail, self.rail_recv * rail
        )

    def plus(self, other: Crossings) -> Crossings:
        """Both together."""
        return Crossings(
            self.link_send + other.link_send,
            self.link_recv + other.link_recv,
            self.rail_send + other.rail_send,
            self.rail_recv + other.rail_recv,
        )

    @property
    def sent(self) -> torch.Tensor:
        """Everything a rank sends to other ranks."""
        return self.link_send + self.rail_send

    @property
    def link_busiest(self) -> torch.Tensor:
        """The link works in both directions at once: the larger of them."""
        return torch.maximum(self.link_send, self.link_recv)

    @property
    def rail_busiest(self) -> torch.Tensor:
        """The same of the rail."""
        return torch.maximum(self.rail_send, self.rail_recv)


def to_everyone(topology: Topology, rows_R: torch.Tensor) -> Crossings:
    """Every rank sends the same `rows_R` to each other rank."""
    R, S = topology.ranks, topology.domain_size
    in_domain = rows_R.view(-1, S).sum(1, keepdim=True).expand(-1, S).reshape(R)
    return Crossings(rows_R * (S - 1), in_domain - rows_R, rows_R * (R - S), rows_R.sum() - in_domain)


def direct(topology: Topology, rows_RR: torch.Tensor) -> Crossings:
    """From source (row) to destination (column) over the one wire that joins them."""
    D, S = topology.domains, topology.domain_size
    rows = rows_RR.reshape(D, S, D, S)
    own_R = rows_RR.diagonal()
    out_R = rows.sum(3).diagonal(dim1=0, dim2=2).T.reshape(-1)  # to the own domain
    in_R = rows.sum(1).diagonal(dim1=0, dim2=1).T.reshape(-1)  # from the own domain
    return Crossings(out_R - own_R, in_R - own_R, rows_RR.sum(1) - out_R, rows_RR.sum(0) - in_R)


def by_rail(topology: Topology, rows_RR: torch.Tensor, rows_RD: torch.Tensor) -> Crossings:
    """Once over the rail to the rank of the same index in each domain that needs the token, from there over
    the link to the destinations of that domain."""
    D, S = topology.domains, topology.domain_size
    arriving = rows_RR.reshape(D, S, D, S).sum(0).permute(1, 0, 2)  # [domain, index of relay, destination]
    relayed_DS = arriving.diagonal(dim1=1, dim2=2)  # the relay is the destination
    rail = rows_RD.reshape(D, S, D)
    own_DS = rail.diagonal(dim1=0, dim2=2).T
    return Crossings(
        (arriving.sum(2) - relayed_DS).reshape(-1),
        (arriving.sum(1) - relayed_DS).reshape(-1),
        (rail.sum(2) - own_DS).reshape(-1),
        (rail.sum(0).T - own_DS).reshape(-1),
    )
