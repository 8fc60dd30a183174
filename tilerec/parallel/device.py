"""Where a sharded model lives: what a user says, as a `torch.device` that this machine has."""

from __future__ import annotations

import torch

from tilerec.errors import ConfigError


def device_of(device: torch.device | str | int, who: str) -> torch.device:
    """The device, if it is here: asked before a model is changed.

    Args:
        device: a number is that of an accelerator, as torch reads it.
        who: takes it, for messages.

    Raises:
        ConfigError: this machine has no such device.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    others = torch.accelerator.is_available() and count == 0  # an accelerator of another kind: torch knows
    if isinstance(device, int) and not others and not 0 <= device < count:
        raise ConfigError(f"{who}: device={device} is a number of an accelerator, and {_here(count)}")
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(
            f"{who}: device={device!r} is none that torch knows ({error}); pass 'cpu' or 'cuda:0'."
        ) from error
    if found.type == "cuda" and (found.index or 0) >= count:
        raise ConfigError(f"{who}: device='{found}' is a GPU, and {_here(count)}")
    return found


def _here(count: int) -> str:
    if not count:
        return "torch finds none here; pass device='cpu', or install a torch that was built for your GPU."
    return (
        f"torch finds {count} GPU{'s' if count > 1 else ''} here, numbered from 0; pass cuda:{count - 1} or less "
        "(the rank on its own host, LOCAL_RANK, and not the rank in the world)."
    )
