"""The windows of a group, whatever they lie in, and collectives over them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flexep._native.window import WindowShape
from flexep.errors import Unavailable
from flexep.group import Group
from flexep.transport._window import Window as Window
from flexep.transport.collectives import Collectives, Traffic
from flexep.transport.device_window import DeviceWindow
from flexep.transport.host_window import HostWindow


def make_window(group: Group, shape: WindowShape, timeout: float) -> Window:
    """The windows of a group, collectively. Raises Unavailable where ranks cannot reach each other's memory."""
    if group.device.type != "cuda":
        return HostWindow(group, shape, timeout)
    if not torch.cuda.is_available():
        raise Unavailable(f"{group.device}: this torch sees no CUDA GPU")
    return DeviceWindow(group, shape, timeout)


class WindowCollectives(Collectives):
    """What dispatchers agree on and exchange beside rows, over a window."""

    def __init__(self, window: Window) -> None:
        super().__init__(window.group, window.timeout)
        self.window = window

    def counted(self) -> dict[str, Traffic]:
        return self.window.traffic()

    def to_host(self, received: torch.Tensor) -> torch.Tensor:
        """What a GPU has not received it has not written either: raises what the window has met."""
        host = received.cpu()
        self.window.raise_met()
        return host

    def gather_ints(self, ints: Sequence[torch.Tensor], op: str) -> list[torch.Tensor]:
        return self.window.publish(ints, op)

    def all_gather(self, tensors: Sequence[torch.Tensor], op: str) -> list[torch.Tensor]:
        gathered = self.window.publish([t.contiguous().view(-1) for t in tensors], op)
        return [g.view(-1, *t.shape[1:]) for g, t in zip(gathered, tensors, strict=True)]

    def all_to_all(
        self,
        sends: Sequence[torch.Tensor],
        send_splits: Sequence[Sequence[int]],
        recv_splits: Sequence[Sequence[int]],
        op: str,
    ) -> list[torch.Tensor]:
        sends = [send.contiguous() for send in sends]
        device = self.group.device
        to, come = (
            [torch.tensor(splits, dtype=torch.int32, device=device) for splits in all_splits]
            for all_splits in (send_splits, recv_splits)
        )
        recvs = [
            send.new_empty((sum(splits), *send.shape[1:]))
            for send, splits in zip(sends, recv_splits, strict=True)
        ]
        self.window.exchange_records(sends, to, recvs, come, op)
        return recvs
