"""The training loop of one rank."""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import flexep
from flexep.errors import ArgumentError, FlexEPError, PeerRefused
from flexep.moe.layer import MoELayer
from flexep.moe.lm import ByteLM
from flexep.training.config import DTYPES, TrainConfig
from flexep.training.gradients import clip_by_global_norm, sum_copies
from flexep.training.text import cut_batch, load_text, num_windows

MAX_GRAD_NORM = 1.0
WARMUP_STEPS = 10

OnStep = Callable[[int, float, float], None]
"""Called after every step with (step, loss, tokens per second so far)."""


class LossNotFinite(FlexEPError):
    """The loss of a step was NaN or infinite. Raised on every rank; attributes `step`, `loss`."""

    def __init__(self, step: int, loss: float) -> None:
        super().__init__(f"the loss of step {step} is {loss}; try a smaller lr")
        self.step = step
        self.loss = loss

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), (self.step, self.loss))


@dataclass(frozen=True)
class TrainReport:
    """What a run leaves. `losses` has one global mean a step (nats a byte), before that step's update."""

    losses: list[float]
    dispatcher: str
    ranks: int
    tokens_per_second: float
    seconds: float
    text_sha256: str
    config: dict[str, object]
    versions: dict[str, str]


def build_model(config: TrainConfig, dispatcher: flexep.Dispatcher) -> ByteLM:
    """The language model of `config`; all its blocks share one dispatcher."""

    def make_moe(name: str) -> MoELayer:
        return MoELayer(
            dispatcher, inner=config.inner, weights_at=config.weights_at, seed=config.seed, name=name
        )

    model = ByteLM(
        make_moe,
        hidden=config.hidden,
        num_layers=config.layers,
        max_seq=config.seq,
        dtype=DTYPES[config.dtype],
        seed=config.seed,
    )
    return model.to(dispatcher.group.device)


def make_dispatcher(config: TrainConfig, group: flexep.Group) -> flexep.Dispatcher:
    """The dispatcher of `config` on `group`; the largest share of the batch sets max_tokens."""
    most_sequences = math.ceil(config.batch / config.ranks)
    return flexep.Dispatcher(
        group,
        num_experts=config.experts,
        hidden=config.hidden,
        top_k=config.top_k,
        max_tokens=most_sequences * config.seq,
        backend=config.dispatcher,
        dtype=DTYPES[config.dtype],
        layout=config.layout,
        domain_size=config.domain_size,
    )


class Trainer:
    """Model and optimizer of one rank; `step` is forward, backward, gradients over ranks, update."""

    def __init__(self, config: TrainConfig, model: ByteLM, process_group: dist.ProcessGroup) -> None:
        self.config = config
        self.model = model
        self.process_group = process_group
        self.copied, self.owned = model.split_parameters()
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=config.lr, betas=(0.9, 0.95), weight_decay=0.0
        )

    def step(self, step: int, inputs_BS: Tensor, targets_BS: Tensor) -> Tensor:
        """One update from this rank's part of the global batch. Returns the global loss, on the device."""
        for param_group in self.optimizer.param_groups:
            param_group["lr"] = self.config.lr * min(1.0, (step + 1) / WARMUP_STEPS)
        self.optimizer.zero_grad(set_to_none=True)
        logits_BSV = self.model(inputs_BS)
        total = F.cross_entropy(logits_BSV.flatten(0, 1), targets_BS.flatten(), reduction="sum")
        loss = total / (self.config.batch * self.config.seq)
        loss.backward()
        loss = sum_copies(self.copied, loss, self.process_group)
        clip_by_global_norm(self.copied, self.owned, MAX_GRAD_NORM, self.process_group)
        self.optimizer.step()
        return loss


def _finite_loss(trainer: Trainer, step: int, batch: Sequence[Tensor]) -> float:
    """The loss of one step. A model that diverged may show it first by routing weights that are refused."""
    try:
        loss = trainer.step(step, *batch).item()
    except (ArgumentError, PeerRefused) as error:
        if isinstance(error, ArgumentError) and error.argument != "topk_weights":
            raise
        raise LossNotFinite(step, math.nan) from error
    if not math.isfinite(loss):
        raise LossNotFinite(step, loss)
    return loss


def train(
    config: TrainConfig, process_group: dist.ProcessGroup, on_step: OnStep | None = None
) -> TrainReport:
    """Train on this rank; all ranks of `process_group` call it. Reads the loss on the host once a step.

    Raises:
        LossNotFinite: on every rank, at the first step whose loss is NaN or infinite.
    """
    text = load_text()
    num_windows(text, config.seq)  # refuses a sequence longer than the text before anything is built
    group = flexep.Group.from_process_group(process_group)
    with make_dispatcher(config, group) as dispatcher:
        trainer = Trainer(config, build_model(config, dispatcher), process_group)
        losses: list[float] = []
        tokens = 0
        start = time.perf_counter()
        for step in range(config.steps):
            batch = cut_batch(
                text,
                seed=config.seed,
                step=step,
                batch=config.batch,
                seq=config.seq,
                rank=group.rank,
                ranks=group.size,
            )
            losses.append(_finite_loss(trainer, step, [part.to(group.device) for part in batch]))
            tokens += config.batch * config.seq
            if on_step is not None:
                on_step(step, losses[-1], tokens / (time.perf_counter() - start))
        seconds = time.perf_counter() - start
        name = dispatcher.config.backend
    versions = {"python": platform.python_version(), "torch": torch.__version__, "flexep": flexep.__version__}
    settings = {field: value for field, value in vars(config).items() if field not in ("dispatcher", "ranks")}
    return TrainReport(
        losses=losses,
        dispatcher=name,
        ranks=group.size,
        tokens_per_second=tokens / seconds,
        seconds=seconds,
        text_sha256=text.sha256,
        config=settings,
        versions=versions,
    )
