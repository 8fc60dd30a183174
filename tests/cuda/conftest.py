"""A test on a GPU finds no reports of earlier tests' kernels, and PyTorch's default sync debug mode."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch

from tilerec.errors import TilerecError
from tilerec.ops.runtime.readback import drain


@pytest.fixture(scope="session", autouse=True)
def _sync_debug_mode_has_warned() -> None:
    """PyTorch warns once per process that `set_sync_debug_mode` is a prototype. Tests turn warnings into errors."""
    if not torch.cuda.is_available():
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("warn")
    torch.cuda.set_sync_debug_mode("default")


@pytest.fixture(autouse=True)
def _reports_end_with_their_test() -> Iterator[None]:
    yield
    if not torch.cuda.is_available():
        return
    # A test that failed inside a block without waits would leave the mode to all others.
    torch.cuda.set_sync_debug_mode("default")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(64):  # the first error ends it, the others have their turn next time
            try:
                drain(torch.device("cuda"))
                return
            except TilerecError:
                continue
