"""The training loss and its scale.

Gradients of W ranks are summed and divided by W. The result is the gradient of the mean over the global batch exactly
if a rank's loss is

    sum over its own samples * W / B_global

This is the local mean if all local batches have one size, and 0 for a rank without samples.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits


def click_loss(
    logits: Tensor, labels_B: Tensor, *, global_batch: int | None = None, world_size: int = 1
) -> Tensor:
    """Return binary cross entropy, scaled so that the update equals that of the mean over the global batch.

    Args:
        logits: [B] or [B, 1].
        labels_B: [B].
        global_batch: samples of all ranks together; B if None.
        world_size: W.

    Returns:
        float32 scalar. Logits 0, 0 on any labels: log 2 = 0.693 with one rank.
    """
    total = labels_B.numel() if global_batch is None else global_batch
    summed = binary_cross_entropy_with_logits(logits.reshape(-1).float(), labels_B.float(), reduction="sum")
    return summed * (world_size / max(total, 1))
