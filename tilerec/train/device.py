"""The device of a run."""

from __future__ import annotations

import os

import torch

from tilerec.errors import ConfigError
from tilerec.ops.runtime.gpu import is_gpu


def run_device(name: str, ranks: int) -> torch.device:
    """Return the device of this rank.

    Args:
        name: `train.device` of the config.
        ranks: number of ranks of the run.

    Raises:
        ConfigError: this machine or this torch does not support the device.
    """
    device = torch.device(name)
    if is_gpu(device) and name == device.type and ranks > 1 and torch.cuda.device_count():
        # One GPU per rank, by torchrun's number of the rank on its host; if there are fewer GPUs, ranks share them.
        device = torch.device(device.type, int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    try:
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(
            f"train.device: got {name!r}, which this machine or this torch does not support. Use 'cpu'."
        ) from error
    return device
