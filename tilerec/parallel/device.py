"""Validation of the `device` argument of a sharded model."""

from __future__ import annotations

import torch

from tilerec.errors import ConfigError
from tilerec.ops.runtime.gpu import is_gpu


def device_of(device: torch.device | str | int, who: str) -> torch.device:
    """Return the argument as a `torch.device`, checked before a model is changed.

    Args:
        device: an integer is the index of an accelerator, as in torch.
        who: name of the function that takes `device`, for errors.

    Raises:
        ConfigError: this machine has no such device.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    others = torch.accelerator.is_available() and count == 0  # torch checks indices of other accelerators
    if isinstance(device, int) and not others and not 0 <= device < count:
        raise ConfigError(f"{who}: device={device} is the index of an accelerator, and {_gpus_found(count)}")
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(
            f"{who}: device: got {device!r}, which torch rejects ({error}); pass 'cpu' or 'cuda:0'."
        ) from error
    if is_gpu(found) and (found.index or 0) >= count:
        raise ConfigError(f"{who}: device='{found}' is a GPU, and {_gpus_found(count)}")
    return found


def _gpus_found(count: int) -> str:
    if not count:
        return "torch finds none here; pass device='cpu', or install a torch build for your GPU."
    return (
        f"torch finds {count} GPU{'s' if count > 1 else ''} here, numbered from 0; pass cuda:{count - 1} or less "
        "(LOCAL_RANK, the rank on its own host, not the rank in the world)."
    )
