"""The device of a run."""

from __future__ import annotations

import os

import torch

from tilerec.errors import ConfigError
from tilerec.ops.runtime.gpu import is_gpu

AUTO = "auto"
"""The setting that takes a GPU if this machine has one for each of its ranks, and the CPU otherwise."""


def resolved_device(name: str, local_ranks: int | None) -> str:
    """Return "cuda" or "cpu" for "auto", and other names as they are.

    Args:
        local_ranks: ranks on this machine; None if unknown: "auto" is then the CPU, as ranks could share a GPU.
    """
    if name != AUTO:
        return name
    return "cuda" if local_ranks is not None and 0 < local_ranks <= torch.cuda.device_count() else "cpu"


def run_device(name: str, ranks: int) -> torch.device:
    """Return the device of this rank.

    Args:
        name: `train.device` of the config.
        ranks: number of ranks of the run.

    Raises:
        ConfigError: this machine or this torch does not support the device.
    """
    known = os.environ.get("LOCAL_WORLD_SIZE", "1" if ranks == 1 else "")
    name = resolved_device(name, int(known) if known else None)
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
