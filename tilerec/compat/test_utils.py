"""TorchRec's helpers for tests."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

F = TypeVar("F")


def get_free_port() -> int:
    """Return the number of a TCP port that is free now."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port: int = free.getsockname()[1]
        return port


def is_asan() -> bool:
    """Return False: this build has no address sanitizer."""
    return False


is_tsan = is_asan_or_tsan = is_asan


def skip_if_asan(func: F) -> F:
    """Return the test: this build has no address sanitizer."""
    return func


skip_if_asan_class = skip_if_asan


def cuda_device_count() -> int:
    """Return the number of GPUs."""
    return torch.cuda.device_count()


def seed_and_log(wrapped_func: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function with torch's generator seeded by 0 before each call."""

    @wraps(wrapped_func)
    def seeded(*args: Any, **kwargs: Any) -> Any:
        torch.manual_seed(0)
        return wrapped_func(*args, **kwargs)

    return seeded


def init_distributed_single_host(
    rank: int, world_size: int, backend: str, local_size: int | None = None
) -> dist.ProcessGroup:
    """Return a process group of ranks of this host. MASTER_ADDR and MASTER_PORT name the rendezvous.

    Args:
        local_size: ranks of each host, if the test pretends several; sets LOCAL_WORLD_SIZE.
    """
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size))
    os.environ["LOCAL_WORLD_SIZE"] = str(local_size or world_size)
    os.environ["LOCAL_RANK"] = str(rank % (local_size or world_size))
    dist.init_process_group(rank=rank, world_size=world_size, backend=backend)
    group = dist.group.WORLD
    assert group is not None
    return group


def get_state_buffers_parameters(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Return a model's state dict, buffers and parameters."""
    return {
        "state_dict": dict(model.state_dict()),
        "named_buffers": dict(model.named_buffers()),
        "named_parameters": dict(model.named_parameters()),
    }


def assert_state_buffers_parameters_equal(
    model_1: nn.Module, model_2: nn.Module, check_named_buffers: bool = True, check_named_parameters: bool = True,
    check_state_dict: bool = True,
) -> None:  # fmt: skip
    """Raise an AssertionError if names or values of two models differ."""
    one, two = get_state_buffers_parameters(model_1), get_state_buffers_parameters(model_2)
    checks = (
        ("named_buffers", check_named_buffers),
        ("named_parameters", check_named_parameters),
        ("state_dict", check_state_dict),
    )
    for kind, wanted in checks:
        if wanted:
            assert one[kind].keys() == two[kind].keys(), f"{kind}: {sorted(one[kind].keys() ^ two[kind].keys())}"
            for name, value in one[kind].items():
                torch.testing.assert_close(value, two[kind][name], rtol=0, atol=0, msg=f"{kind}: {name} differs")
