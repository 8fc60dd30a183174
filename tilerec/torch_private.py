"""Every private name of PyTorch that the library uses, each with its reason and its public substitute.

No other file of the library uses a name of torch or triton that begins with an underscore; a test enforces it. When a
release of PyTorch moves a name, mend it here: `tests/test_torch_private.py` fails for the one that moved. `make
check-torch` runs these tests under the oldest and the newest supported release.

Functions that run in every call of an op are plain references to torch's own, so that they cost nothing more.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode as DispatchMode

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor, Placement
    from torch.export import ExportedProgram

__all__ = ["DispatchMode", "FakeTensor", "FunctionalTensor", "pytree"]

P = ParamSpec("P")
T = TypeVar("T")

# ---------------------------------------------------------------------------------------------- the autograd engine

graph_task_id: Callable[[], int] = torch._C._current_graph_task_id
"""Return the number of the backward pass that runs in this thread, -1 outside of one. No public substitute."""

will_execute: Callable[[Any], bool] = torch._C._will_engine_execute_node
"""Return whether the running backward pass accumulates into a leaf's `AccumulateGrad` node.

Raises RuntimeError for a leaf whose gradient the pass returns (`torch.autograd.grad`). Substitute: none; without it, a
table that `backward(inputs=...)` leaves out would be updated.
"""

keeps_graph: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph
"""Return whether the running backward pass keeps its graph (`retain_graph=True`). No public substitute."""


def after_backward(callback: Callable[[], None]) -> None:
    """Call a function when the running backward pass ends.

    Substitute: none that runs after all of a pass's nodes; FSDP and DDP use this one, too.
    """
    torch.autograd.Variable._execution_engine.queue_callback(callback)


# ------------------------------------------------------------------------- the dispatcher, its modes and its tracers

BelowAutograd = torch._C._AutoDispatchBelowAutograd
"""A context in which ops skip their autograd kernels.

`torch.library.register_autograd` does the same and costs 100 us more a call (docs/design.md).
"""

without_torch_function = torch._C.DisableTorchFunctionSubclass
"""A context in which `__torch_function__` of subclasses is not called. torch's documentation names it."""

dispatch_mode_count: Callable[[], int] = torch._C._len_torch_dispatch_stack
"""Return the number of active `TorchDispatchMode`s. No public substitute."""

function_mode_count: Callable[[], int] = torch._C._len_torch_function_stack
"""Return the number of active `TorchFunctionMode`s. No public substitute."""

functorch_is_active: Callable[[], bool] = torch._C._are_functorch_transforms_active
"""Return whether a transform of `torch.func` is active. No public substitute."""

is_functorch_wrapped: Callable[[Tensor], bool] = torch._C._functorch.is_functorch_wrapped_tensor
"""Return whether a tensor is a transform's wrapper. No public substitute."""

device_of: Callable[[Tensor], torch.device] = torch._C.TensorBase.device.__get__
"""Return a tensor's device; `tensor.device` for tensors that have no `__torch_function__`, in half the time."""

dtype_of: Callable[[Tensor], torch.dtype] = torch._C.TensorBase.dtype.__get__  # type: ignore[attr-defined]
"""Return a tensor's data type: mapped in C over the tables of a call, half of what a loop costs."""


def disable_dynamo(function: Callable[P, T]) -> Callable[P, T]:
    """Return the function behind a graph break.

    `torch.compiler.disable` does the same and imports the compiler (seconds) where it decorates.
    """
    return torch._disable_dynamo(function)


def schema_of(namespace: str, op: str) -> Any:
    """Return an op's `torch.FunctionSchema`. Substitute: parse `str(op)`."""
    return getattr(getattr(torch.ops, namespace), op).default._schema


assert_async = torch._assert_async
"""Raise on the host, or trap in the kernel on a GPU, if a 0-d tensor is false; the host does not wait."""

foreach_add_ = torch._foreach_add_
"""Add to every tensor of a list, in one launch. The name has no public form; `torch.optim` uses it."""

LOCAL_SCALAR_DENSE = torch.ops.aten._local_scalar_dense.default
"""The op behind `Tensor.item()`, as `__torch_dispatch__` sees it."""

TO_COPY = torch.ops.aten._to_copy.default
"""The op behind `Tensor.to()`, as `__torch_dispatch__` sees it."""


onednn_linear: Callable[..., Tensor] | None = getattr(
    getattr(torch.ops.mkldnn, "_linear_pointwise", None), "default", None
)
"""Return `input @ weightᵀ + bias` by oneDNN, for strided tensors; None in builds without oneDNN. torch.compile uses it.

Arguments: input, weight, bias or None, "none", [], "". Substitute: `linear` of tensors made by `Tensor.to_mkldnn()`,
which copies all operands and the result.
"""

onednn_is_enabled: Callable[[], bool] = torch._C._get_mkldnn_enabled
"""Return whether `torch.backends.mkldnn.flags` leaves oneDNN on. No public substitute reads the flag."""


def is_view(tensor: Tensor) -> bool:
    """Return whether autograd takes a tensor for a view. Substitute: none that excludes detached views."""
    return tensor._is_view()


def version_of(tensor: Tensor) -> int:
    """Return how often a tensor's memory was written, as torch counts; 0 for inference tensors, which have no counter.

    Ops of tilerec write through raw pointers, and raise the counter by the public
    `torch.autograd.graph.increment_version`. Substitute for the read: none.
    """
    return 0 if tensor.is_inference() else tensor._version


# ------------------------------------------------------------------------------------------------------------ CUDA

current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", int)
"""Return the current GPU's number; 0 in a build without CUDA.

`torch.cuda.current_device` does the same, behind an initialization check: ten times the time, once a launch.
"""

current_raw_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", abs)
"""Return the address of a GPU's current stream. Substitute: `torch.cuda.current_stream(d).cuda_stream`, 1 us more."""


# --------------------------------------------------------------------------------------- modules, optimizers, DDP


def submodules(module: nn.Module) -> dict[str, nn.Module | None]:
    """Return a module's own dict of submodules, read in a tenth of the time that `module.name` takes."""
    return module._modules


def buffers(module: nn.Module) -> dict[str, Tensor | None]:
    """Return a module's own dict of buffers, to replace one by a tensor of another size."""
    return module._buffers


def state_dict_pre_hooks(module: nn.Module) -> dict[int, Any]:
    """Return a module's hooks that run before `state_dict`. Substitute: none that lists or finds them."""
    return module._state_dict_pre_hooks


def uncompiled(module: nn.Module) -> nn.Module:
    """Return the module inside of `torch.compile(module)`, else the module. No public substitute."""
    inner: nn.Module = getattr(module, "_orig_mod", module)
    return inner


def state_hooks(module: nn.Module) -> list[dict[int, Any]]:
    """Return the dicts of a module's hooks around `state_dict` and `load_state_dict`. No public substitute."""
    return [
        module._state_dict_hooks,
        module._state_dict_pre_hooks,
        module._load_state_dict_pre_hooks,
        module._load_state_dict_post_hooks,
    ]


def load_state_dict_pre_hooks(module: nn.Module) -> dict[int, Any]:
    """Return a module's hooks that run before `load_state_dict`. Substitute: none that lists or finds them."""
    return module._load_state_dict_pre_hooks


def optimizer_hooks(optimizer: Optimizer, when: str) -> dict[int, Any]:
    """Return an optimizer's hooks around its state dict, for an optimizer that overrides `state_dict`.

    Args:
        when: "state_dict_pre", "state_dict_post", "load_state_dict_pre" or "load_state_dict_post".
    """
    return getattr(optimizer, f"_optimizer_{when}_hooks")


def scale_of(scaler: Any) -> Tensor | None:
    """Return the scale of a `torch.amp.GradScaler` on its device. `get_scale` waits for the device."""
    return scaler._scale


def active_ddp() -> DistributedDataParallel | None:
    """Return the `DistributedDataParallel` whose forward runs. No public substitute."""
    return DistributedDataParallel._active_ddp_module


def ddp_parameters(wrapper: DistributedDataParallel) -> Iterable[nn.Parameter]:
    """Return the parameters whose gradients a `DistributedDataParallel` reduces. No public substitute."""
    return wrapper._module_parameters


def ignore_in_ddp(module: nn.Module, names: Iterable[str]) -> None:
    """Have `DistributedDataParallel` leave parameters and buffers of a module alone.

    torch's documentation names this function, in spite of its underscore.
    """
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, list(names))


def fix_ddp_buckets(wrapper: DistributedDataParallel) -> None:
    """Have `DistributedDataParallel` keep one order of gradients in its buckets from the first step on.

    It otherwise orders them anew after the first step of a process, by the order in which they were ready. With three
    or more ranks the sums of that step then have other roundings. Substitute: `find_unused_parameters=True`, which
    walks the graph at each step.
    """
    wrapper.reducer._push_all_rebuilt_params()


def is_ddp_ignored(parameter: Tensor) -> bool:
    """Return whether `DistributedDataParallel` leaves a parameter alone. No public substitute."""
    return getattr(parameter, "_ddp_ignored", False)


def apply_in_backward(
    optimizer_class: Any, parameters: Iterable[nn.Parameter], options: dict[str, Any], hooks: bool
) -> None:
    """Step dense parameters in their backward pass. torch's documentation names this function, and TorchRec's users
    call it."""
    from torch.distributed.optim import _apply_optimizer_in_backward

    _apply_optimizer_in_backward(optimizer_class, parameters, options, hooks)


def timeout_of(process_group: Any, device: torch.device) -> timedelta | None:
    """Return a process group's own time-out; None where its backend has none to show. No public substitute."""
    backend = process_group._get_backend(device)
    return getattr(getattr(backend, "options", None), "_timeout", None)


# ---------------------------------------------------------------------------------------------------------- DTensor


def new_dtensor(
    cls: type[DTensor], local: Tensor, mesh: Any, placements: tuple[Placement, ...], shape: torch.Size,
    strides: tuple[int, ...],
) -> Any:  # fmt: skip
    """Return an object of a subclass of `DTensor`, with placements of its own.

    `DTensor.from_local` makes plain DTensors only, and communicates.
    """
    from torch.distributed.tensor._dtensor_spec import (
        DTensorSpec,
        TensorMeta,
    )  # what a tensor in tiles alone needs

    spec = DTensorSpec(mesh, placements, tensor_meta=TensorMeta(shape, strides, local.dtype))
    return torch.Tensor._dtensor__new__(cls, local, spec, requires_grad=False)


def local_tensor(tensor: DTensor) -> Tensor:
    """Return a DTensor's local part itself. `to_local` returns it through autograd, as another object."""
    return tensor._local_tensor


# ---------------------------------------------------------------------------------------------- export, AOTInductor


def any_sizes() -> AbstractContextManager[None]:
    """Return a context in which `torch.export` assumes nothing about sizes, not even that they are not 0 or 1.

    Without it, an exported program refuses a batch of no sample, or of one. Public substitute: none.
    """
    from torch.fx.experimental import _config

    context: AbstractContextManager[None] = _config.patch(backed_size_oblivious=True)  # type: ignore[attr-defined]
    return context


def compile_package(program: ExportedProgram, path: str) -> None:
    """Compile a program with AOTInductor into an archive without its constants; torch's documentation names this.

    The code needs the vector instructions of this machine, and no others that its processor may have.
    """
    import torch._inductor
    from torch._inductor import config

    options: dict[str, Any] = {"aot_inductor.package_constants_in_so": False}
    if hasattr(config.cpp, "march"):  # torch >= 2.13
        options["cpp.march"] = ""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch about itself
        torch._inductor.aoti_compile_and_package(program, package_path=path, inductor_configs=options)


def readable_op_calls(data: bytes) -> bytes:
    """Return a compiled archive's list of op calls (JSON) such that this torch reads the dtypes in it as meant.

    The list has the numbers of torch.export's own enumeration of dtypes. torch 2.11 takes them for those of C++, so
    that an op that should return float32 returns float64.
    """
    if tuple(map(int, str(torch.__version__).split(".")[:2])) >= (2, 12):
        return data
    in_cpp = {number: number - 1 for number in range(1, 13)} | {13: 15}  # bfloat16
    return re.sub(rb'("as_scalar_type": )(\d+)', lambda own: own[1] + b"%d" % in_cpp[int(own[2])], data)


def package_loader(path: str) -> Any:
    """Return the loader of a compiled archive, which runs it. `torch._inductor.aoti_load_package` makes it as well, but
    reads the archive's other files into memory."""
    import torch._C._aoti

    return torch._C._aoti.AOTIModelPackageLoader(path, "model", False, 1, -1)
