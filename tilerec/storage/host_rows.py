"""`HostRows`: the rows of host tensors, read and written from a device.

On a GPU a tensor's memory is pinned, and a second tensor over the same bytes, labelled as a device tensor, gives
kernels direct access. Kernels then read and write rows on demand, without waiting for the host.
If the driver refuses to pin (a limit on locked memory), the host gathers rows and copies them, with a warning.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections import Counter
from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from tilerec.ops.cache.definition import indexable

_PIN_COUNTS: Counter[int] = Counter()
"""Number of `HostRows` that need the storage at an address pinned."""


@final
class HostRows:
    """Rows of host tensors, accessible from a device.

    Args:
        tensors: `[rows, ...]`, contiguous, in host memory (or on the device).
        device: the device that reads and writes the rows.
    """

    def __init__(self, tensors: Sequence[Tensor], device: torch.device) -> None:
        self.tensors, self.device = list(tensors), device
        views = [
            indexable(own) if own.device.type == device.type else _over_pinned(own, device, self) for own in tensors
        ]
        known = [view for view in views if view is not None]
        self._here = known if len(known) == len(views) else None

    @property
    def here(self) -> list[Tensor] | None:
        """The tensors' bytes as the device addresses them; None if the device has no access."""
        return self._here

    def read_into(self, lines: Sequence[Tensor], at: Tensor, rows: Tensor) -> None:
        """Copy table rows to lines: `lines[k][at] = tensors[k][rows]`."""
        for k, own in enumerate(lines):
            if self._here is not None:
                found = self._here[k].index_select(0, rows)
            else:
                found = indexable(self.tensors[k]).index_select(0, rows.cpu()).pin_memory()
                found = found.to(self.device, non_blocking=True)
            indexable(own).index_copy_(0, at, found)

    def write_from(self, lines: Sequence[Tensor], at: Tensor, rows: Tensor) -> None:
        """Copy lines to table rows: `tensors[k][rows] = lines[k][at]`."""
        for k, own in enumerate(lines):
            values = indexable(own).index_select(0, at)
            if self._here is not None:
                self._here[k].index_copy_(0, rows, values)
            else:
                indexable(self.tensors[k]).index_copy_(0, rows.cpu(), values.cpu())


class _DeviceView:
    """Host memory described for CUDA by `__cuda_array_interface__`."""

    def __init__(self, tensor: Tensor, width: int) -> None:
        count = tensor.nbytes // tensor.shape[0] // width
        self.__cuda_array_interface__ = {
            "shape": (tensor.shape[0], count),
            "typestr": f"<i{width}" if width > 1 else "|u1",
            "data": (tensor.data_ptr(), False),
            "version": 3,
            "strides": None,
        }
        self.keeps = tensor


def _over_pinned(tensor: Tensor, device: torch.device, user: HostRows) -> Tensor | None:
    """Return a device tensor over the tensor's memory, pinned while `user` lives; None if pinning fails."""
    if not tensor.numel():
        return torch.empty_like(indexable(tensor), device=device)
    try:
        if not tensor.is_contiguous():
            raise RuntimeError("its rows are not contiguous")
        with torch.cuda.device(device):
            _pin(tensor, user)
        row = tensor.nbytes // tensor.shape[0]
        width = next(w for w in (8, 4, 2, 1) if row % w == 0 and tensor.data_ptr() % w == 0)
        view: Tensor = torch.as_tensor(_DeviceView(tensor, width), device=device)
        if view.data_ptr() != tensor.data_ptr():  # a copy: writes to it would not reach the table
            raise RuntimeError(f"{device} and the host address it differently")
        return view.view(tensor.dtype if tensor.dtype.itemsize > 1 else torch.uint8).view(tensor.shape)
    except RuntimeError as error:
        _forget_error(device)
        warnings.warn(
            f"cached rows: {tensor.nbytes / 2**30:.1f} GiB of host memory cannot be pinned ({error}), so the host's "
            "cores gather the rows. Raise the limit on locked memory (ulimit -l).",
            stacklevel=2,
        )
        return None


def _forget_error(device: torch.device) -> None:
    """Clear CUDA's pending error with a dummy kernel: the next launch after a failed call reports the failure."""
    with contextlib.suppress(RuntimeError):
        torch.ones(1, device=device)


def _pin(tensor: Tensor, user: HostRows) -> None:
    if tensor.is_pinned() and not _PIN_COUNTS[tensor.untyped_storage().data_ptr()]:
        return  # pinned by its owner
    storage, runtime, device = tensor.untyped_storage(), torch.cuda.cudart(), user.device
    assert runtime is not None
    address = storage.data_ptr()
    if not _PIN_COUNTS[address]:
        torch.cuda.check_error(runtime.cudaHostRegister(address, storage.nbytes(), 0))
    _PIN_COUNTS[address] += 1

    def unpin() -> None:
        _PIN_COUNTS[address] -= 1
        if not _PIN_COUNTS[address]:
            torch.cuda.synchronize(device)
            runtime.cudaHostUnregister(address)

    weakref.finalize(user, unpin)  # runs before the tensor's memory is freed: `user` references the tensor
