"""Functions that run inside the ranks of a pool."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from flexep.testing.worker import RankContext
from flexep.training import loop
from flexep.training.config import TrainConfig
from flexep.training.gradients import clip_by_global_norm, sum_copies
from flexep.training.loop import Trainer, build_model, make_dispatcher, train
from flexep.training.text import cut_batch, load_text


def world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def reduce_and_clip(
    context: RankContext, copied_grad: list[float], owned_grads: list[list[float]], max_norm: float
) -> dict[str, object]:
    """One copied parameter, any number of owned ones, with these gradients on this rank."""

    def parameter(grad: list[float]) -> nn.Parameter:
        made = nn.Parameter(torch.zeros(len(grad)))
        made.grad = torch.tensor(grad)
        return made

    copied, owned = parameter(copied_grad), [parameter(grad) for grad in owned_grads]
    loss = sum_copies([copied], torch.tensor(1.0 + context.rank), world())
    summed = copied.grad.tolist()
    norm = clip_by_global_norm([copied], owned, max_norm, world())
    return {
        "loss": loss.item(),
        "summed": summed,
        "norm": norm.item(),
        "copied": copied.grad.tolist(),
        "owned": [p.grad.tolist() for p in owned],
    }


def losses(context: RankContext, config: TrainConfig) -> list[float]:
    """The losses of a whole run, as this rank saw them."""
    return train(config, world()).losses


def repeatable_losses(context: RankContext, config: TrainConfig) -> list[float]:
    """The same, attention's backward adding in a fixed order too."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        return losses(context, config)
    finally:
        torch.use_deterministic_algorithms(False)


def _expert_gradients_times_ranks(copied: list, owned: list, *rest: Any) -> torch.Tensor:
    for parameter in owned:
        parameter.grad.mul_(dist.get_world_size())
    return clip_by_global_norm(copied, owned, *rest)


def _norm_without_experts(copied: list, owned: list, *rest: Any) -> torch.Tensor:
    return clip_by_global_norm(copied, [], *rest)


def _mean_of_copies(copied: list, loss: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    total = sum_copies(copied, loss, group)
    for parameter in copied:
        parameter.grad.div_(group.size())
    return total


def _copies_left_alone(copied: list, loss: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    total = loss.detach().clone()
    dist.all_reduce(total, group=group)
    return total


MUTANTS = {
    "expert gradients times ranks": ("clip_by_global_norm", _expert_gradients_times_ranks),
    "norm without experts": ("clip_by_global_norm", _norm_without_experts),
    "mean of copies": ("sum_copies", _mean_of_copies),
    "copies left alone": ("sum_copies", _copies_left_alone),
}


def mutant_losses(context: RankContext, config: TrainConfig, mutant: str) -> list[float]:
    """The losses of a run with a planted bug."""
    name, planted = MUTANTS[mutant]
    with mock.patch.object(loop, name, planted):
        return losses(context, config)


def first_gradients(context: RankContext, config: TrainConfig) -> dict[str, torch.Tensor]:
    """Gradients after the first step (reduced and clipped), experts by their global id."""
    text = load_text()
    with make_dispatcher(config, context.group) as dispatcher:
        trainer = Trainer(config, build_model(config, dispatcher), world())
        cut = {"seed": config.seed, "step": 0, "batch": config.batch, "seq": config.seq}
        trainer.step(0, *cut_batch(text, **cut, rank=context.rank, ranks=context.size))
        grads = {}
        for name, parameter in trainer.model.named_parameters():
            if "experts" not in name:
                grads[name] = parameter.grad
        for layer, block in enumerate(trainer.model.blocks):
            experts = block.moe.experts[0]
            for place, expert in enumerate(experts.expert_ids):
                grads[f"{layer}.{expert}.w13"] = experts.w13.grad[place]
                grads[f"{layer}.{expert}.w2"] = experts.w2.grad[place]
        return grads


def die(process_group: dist.ProcessGroup, rank: int) -> None:
    """That rank is killed; the others would wait for a minute."""
    if process_group.rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def raise_error(process_group: dist.ProcessGroup, error: Exception) -> None:
    if process_group.rank() == 0:
        raise error
    time.sleep(60)


def write_sum(process_group: dist.ProcessGroup, folder: str) -> None:
    total = torch.tensor(float(process_group.rank() + 1))
    dist.all_reduce(total, group=process_group)
    (Path(folder) / str(process_group.rank())).write_text(f"{total.item()} {torch.get_num_threads()}")
