"""Registration of all ops: plain-PyTorch reference kernels, and native CPU and Triton kernels if available.

Importing this file makes every op usable. No other file imports backends, except those of their own family.
"""

from __future__ import annotations

import warnings

import torch

from tilerec.ops import references as references
from tilerec.ops.runtime.cpu.library import LibraryStatus, library
from tilerec.ops.runtime.cpu.library import advise_huge_pages as advise_huge_pages
from tilerec.ops.runtime.cpu.library import release_pages as release_pages
from tilerec.ops.runtime.cpu.library import status as status_of_library
from tilerec.ops.runtime.cpu.memory import outputs_from as outputs_from
from tilerec.ops.runtime.cpu.memory import reused_empty as reused_empty
from tilerec.ops.runtime.cpu.memory import size_class as size_class
from tilerec.ops.runtime.cpu.row_gate import RowWrite as RowWrite
from tilerec.ops.runtime.cpu.row_gate import row_gate as row_gate
from tilerec.ops.runtime.triton.library import TritonStatus, serves_gpus
from tilerec.ops.runtime.triton.library import status as status_of_triton
from tilerec.torch_private import untested_version


def _register_cpu() -> bool:
    native = library()
    if native is None:
        return False
    from tilerec.ops import cpu_backends

    cpu_backends.register(native)
    return True


def _register_gpu() -> bool:
    if not serves_gpus():
        return False
    from tilerec.ops import gpu_backends

    gpu_backends.register()
    return True


if _untested := untested_version(torch.__version__):
    warnings.warn(_untested, stacklevel=2)

NATIVE_CPU = _register_cpu()
"""True if the native CPU library provides CPU kernels in this process.

Otherwise `tilerec.ops.runtime.cpu.library.reason()` returns the reason.
"""

TRITON = _register_gpu()
"""True if Triton kernels run the ops on GPUs in this process.

Otherwise `tilerec.ops.runtime.triton.library.status()` returns the reason.
"""


def gpu_kernels_serve(device: torch.device) -> bool:
    """Return True if GPU kernels serve the ops on this device: False on CPUs, and on GPUs with reference kernels."""
    return TRITON and device.type == "cuda"


def native_status() -> LibraryStatus:
    """Return the native CPU library of this process, or the reason why there is none."""
    return status_of_library()


def triton_status() -> TritonStatus:
    """Return the version of Triton, or the reason why its kernels do not run."""
    return status_of_triton()
