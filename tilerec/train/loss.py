"""The training loss and its scale.

Gradients of W ranks are summed and divided by W. The result is the gradient of the mean over the global batch exactly
if a rank's loss is

    sum over its own samples * W / B_global

This is the local mean if all local batches have one size, and 0 for a rank without samples.

Legend: B samples, T tasks, W ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from tilerec.errors import ConfigError


def click_loss(
    logits: Tensor,
    labels: Tensor,
    weights_B: Tensor | None = None,
    *,
    task_weights: Sequence[float] = (),
    global_batch: int | None = None,
    world_size: int = 1,
) -> Tensor:
    """Return binary cross entropy, scaled so that the update equals that of the mean over the global batch.

    The mean is over samples and tasks: sum over b and t of weight_b weight_t BCE_bt / (B T). As in torch, weights
    do not change the divisor, so it needs no communication.

    Args:
        logits: [B] or [B, 1] for one task, [B, T] for several.
        labels: [B] or [B, T], from 0 to 1.
        weights_B: of the samples; None for 1.
        task_weights: of the tasks [T]; () for 1.
        global_batch: samples of all ranks together; B if None.
        world_size: W.

    Returns:
        float32 scalar. Logits 0, 0 on any labels: log 2 = 0.693 with one rank.

    Raises:
        ConfigError: logits, labels and weights differ in the number of tasks.
    """
    if logits.numel() != labels.numel():
        raise ConfigError(
            f"Loss: got logits of shape {tuple(logits.shape)} for labels of shape {tuple(labels.shape)}; expected one "
            "logit per sample and task. Use a model with one output per task of the data."
        )
    total = labels.shape[0] if global_batch is None else global_batch
    tasks = labels.shape[1] if labels.dim() == 2 else 1
    weights = weights_B
    if weights is not None:
        weights = weights.float()[:, None] if labels.dim() == 2 else weights.float()
    if task_weights:
        if len(task_weights) != tasks:
            raise ConfigError(
                f"task.weights: got {len(task_weights)} weights; expected one for each of the {tasks} tasks. "
                "Correct the list."
            )
        weights_T = logits.new_tensor(task_weights, dtype=torch.float32)
        weights = weights_T if weights is None else weights * weights_T
    summed = binary_cross_entropy_with_logits(
        logits.reshape(labels.shape).float(), labels.float(), weights, reduction="sum"
    )
    return summed * (world_size / max(total * tasks, 1))
