"""Windows in the memory of GPUs that reach each other's: what the ranks of an opening do with it."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

import torch

from flexep.config import Environment
from flexep.errors import Unavailable
from flexep.transport._opening import Hello, Reserver, check_size
from flexep.transport.gpu_memory import Gpu, GpuMapping, is_capturing

PROOF_BYTES = 16  # behind every window: what its rank wrote there, peers must read


def refuse_capture() -> None:
    """Raises Unavailable while a CUDA graph is captured: memory made then would be the graph's."""
    if is_capturing():
        raise Unavailable(
            "windows cannot be opened while a CUDA graph is captured: make the dispatcher before the capture"
        )


class PeerReserver(Reserver):
    """GPU memory that processes whose GPUs reach each other share; several of them may be on one GPU."""

    name = "peer"

    def __init__(self, nbytes: int, ranks: int, device: torch.device) -> None:
        super().__init__(nbytes, ranks)
        self._device = device
        self._proof = secrets.token_bytes(PROOF_BYTES)

    def introduce(self) -> Hello:
        check_size(self.nbytes)
        if not Environment.read().peer:
            raise Unavailable(
                "windows between GPU processes have not been measured yet: set FLEXEP_PEER=1 on every rank to use "
                "them all the same, or backend='alltoall'"
            )
        refuse_capture()
        index = self._device.index
        self._gpu = Gpu(torch.cuda.current_device() if index is None else index)
        granularity = self._gpu.granularity()
        self._reserved = -(-(self.nbytes + PROOF_BYTES) // granularity) * granularity
        return {
            "gpu": self._gpu.uuid,
            "reaches": self._gpu.reaches(),
            "reserved": self._reserved,
            "proof": self._proof.hex(),
        }

    def check(self, hellos: Sequence[Hello]) -> None:
        """Where a process does not see a peer's GPU, mapping its memory tells."""
        blind = {
            rank: [peer for peer, other in enumerate(hellos) if not hello["reaches"].get(other["gpu"], True)]
            for rank, hello in enumerate(hellos)
        }
        which = [f"rank {rank} not that of ranks {peers}" for rank, peers in blind.items() if peers]
        if which:
            raise Unavailable(
                f"GPUs cannot reach each other's memory: {', '.join(which)}; use backend='alltoall'"
            )

    def reserve(self) -> tuple[int, GpuMapping]:
        try:
            with self._gpu.create(self._reserved).kept_unless_failed() as mapping:
                mapping.write(self.nbytes, self._proof)
                return self._gpu.export(mapping), mapping
        except Unavailable as error:
            raise Unavailable(
                f"cannot reserve a window of {self.nbytes} bytes on GPU {self._gpu.ordinal}: {error}; "
                f"{self._gpu.free_bytes()} bytes are free, those that torch keeps for itself left out"
            ) from error

    def map(self, fd: int, peer: int, hello: Hello) -> GpuMapping:
        """Also reads the peer's proof: what is mapped is that memory, and this GPU can load it."""
        try:
            with self._gpu.open(fd, hello["reserved"]).kept_unless_failed() as mapping:
                if mapping.read(self.nbytes, PROOF_BYTES).hex() != hello["proof"]:
                    raise Unavailable("what the rank wrote there is not what this GPU reads")
                return mapping
        except Unavailable as error:
            raise Unavailable(
                f"GPU {self._gpu.ordinal} cannot map the window of rank {peer} on GPU {hello['gpu']}: {error}; "
                "use backend='alltoall'"
            ) from error
