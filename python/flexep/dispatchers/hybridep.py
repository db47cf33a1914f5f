"""HybridEP-style: one-sided and hierarchical. A token crosses its rail once for each remote domain, and inside the
domain goes on to the ranks of its experts; partial sums are added inside a domain before they cross back.
"""

from __future__ import annotations

from flexep.dispatchers.one_sided import OneSidedBackend


class HybridEP(OneSidedBackend):
    """Right for several domains (`domain_size`): multi-node NVLink, several nodes. With one domain it is deepep."""

    name = "hybridep"

    @property
    def hop_size(self) -> int:
        return self.config.domain_size or self.config.num_ranks
