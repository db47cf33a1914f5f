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
                "windows between GPU processes are switched off: set FLEXEP_PEER=1 on every rank, or use "
                "backend='alltoall'"
            )
        refuse_capture()
        index = self._device.index
        self._gpu = Gpu(torch.cuda.current_device() if index is None else index)
        self._kind = self._gpu.descriptor
        granularity = self._gpu.granularity()
        self._reserved = -(-(self.nbytes + PROOF_BYTES) // granularity) * granularity
        return {
            "gpu": self._gpu.uuid,
            "no_fabric": self._why_no_fabric(),
            "reaches": self._gpu.reaches(),
            "reserved": self._reserved,
            "proof": self._proof.hex(),
        }

    def _why_no_fabric(self) -> str | None:
        try:
            self._gpu.try_handle(self._gpu.fabric)
        except Unavailable as error:
            return str(error)
        return None

    def check(self, hellos: Sequence[Hello], elsewhere: str) -> None:
        """Descriptors where they can go, else fabric handles. Where a process does not see a peer's GPU, mapping its
        memory tells whether it can be reached."""
        refused = [f"rank {r}: {h['no_fabric']}" for r, h in enumerate(hellos) if h["no_fabric"] is not None]
        if elsewhere and refused:
            raise Unavailable(
                f"GPU memory does not reach every rank: {elsewhere}, and fabric handles, which would, are refused on "
                f"{'; '.join(refused)}; use backend='alltoall'"
            )
        if elsewhere:
            self._kind = self._gpu.fabric
        blind = {
            rank: [peer for peer, other in enumerate(hellos) if not hello["reaches"].get(other["gpu"], True)]
            for rank, hello in enumerate(hellos)
        }
        which = [f"rank {rank} not that of ranks {peers}" for rank, peers in blind.items() if peers]
        if which:
            raise Unavailable(
                f"GPUs cannot reach each other's memory: {', '.join(which)}; use backend='alltoall'"
            )

    def reserve(self) -> tuple[int | bytes, GpuMapping]:
        try:
            with self._gpu.create(self._reserved, self._kind).kept_unless_failed() as mapping:
                mapping.write(self.nbytes, self._proof)
                return self._gpu.export(mapping, self._kind), mapping
        except Unavailable as error:
            raise Unavailable(
                f"cannot reserve a window of {self.nbytes} bytes on GPU {self._gpu.ordinal}: {error}; "
                f"{self._gpu.free_bytes()} bytes are free, those that torch keeps for itself left out"
            ) from error

    def map(self, handle: int | bytes, peer: int, hello: Hello) -> GpuMapping:
        """Also reads the peer's proof: what is mapped is that memory, and this GPU can load it."""
        try:
            with self._gpu.open(handle, hello["reserved"]).kept_unless_failed() as mapping:
                if mapping.read(self.nbytes, PROOF_BYTES).hex() != hello["proof"]:
                    raise Unavailable("what the rank wrote there is not what this GPU reads")
                return mapping
        except Unavailable as error:
            raise Unavailable(
                f"GPU {self._gpu.ordinal} cannot map the window of rank {peer} on GPU {hello['gpu']}: {error}; "
                "use backend='alltoall'"
            ) from error
