"""Every private name of PyTorch that the library uses, each with its reason and its public substitute.

No other file of the library uses a name of torch or triton that begins with an underscore; a test enforces it. When a
release of PyTorch moves a name, mend it here: `tests/test_torch_private.py` fails for the one that moved. `make
check-torch` runs these tests under the oldest and the newest supported release.

Functions that run in every call of an op are plain references to torch's own, so that they cost nothing more.
"""

from __future__ import annotations

import functools
import re
import sys
import warnings
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch
import torch.fx.experimental._config
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch._library.effects import EffectType
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


@functools.cache
def _autograd_keys() -> Any:
    """Return the dispatch keys that are excluded below autograd. First called outside of kernels, at import."""
    before = torch._C._dispatch_tls_local_exclude_set()
    with BelowAutograd():
        return torch._C._dispatch_tls_local_exclude_set() - before


_autograd_keys()


def autograd_visible() -> AbstractContextManager[None]:
    """Return a context in which ops record autograd's graph, for eager code inside of an op's kernel.

    Kernels run with autograd's dispatch keys excluded. No public substitute.
    """
    excluded = torch._C._dispatch_tls_local_exclude_set() - _autograd_keys()
    guard: AbstractContextManager[None] = torch._C._ForceDispatchKeyGuard(
        torch._C._dispatch_tls_local_include_set(), excluded
    )
    return guard


def constant_in_programs(function: Callable[P, T]) -> Callable[P, T]:
    """Have tracers call a function once, and take its result for a constant, without guards.

    `torch.compiler.assume_constant_result` does the same and imports the compiler (seconds) where it decorates.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def keep_order(op: Any) -> None:
    """Have compilers keep all calls of an op, in the order of the program, although its schema shows no effects.

    Substitute: none for ops without mutated arguments; a compiler drops a call whose result is not used.
    """
    torch.library._register_effectful_op(op, EffectType.ORDERED)


def trace_all_sizes(compiled: Any) -> None:
    """Have the tracer of a `torch.compile(module)` take sizes of 0 and 1 for numbers like others.

    Substitute: `torch._dynamo.decorators.mark_unbacked` of a batch's tensors; it fails where a model compares sizes.
    """
    if context := getattr(compiled, "dynamo_ctx", None):  # None: not compiled, by disable=True
        make_graph = context.callback
        context.callback = functools.partial(_with_sizes_as_numbers, make_graph)
        vars(context.callback).update(vars(make_graph))  # torch reads them
        compiled._initialize()  # takes the callback


def _with_sizes_as_numbers(make_graph: Any, *args: Any) -> Any:
    with torch.fx.experimental._config.patch(backed_size_oblivious=True, use_duck_shape=False):  # type: ignore[attr-defined]
        return make_graph(*args)


def change_inductor_graphs(op: Any, change: Callable[[torch.fx.Node], None]) -> bool:
    """Have inductor call a function for every call of an op in its graphs, after its other passes.

    Returns False as long as inductor is not loaded. Substitute: `torch._inductor.config.post_grad_custom_post_pass`, a
    setting of the user's.
    """
    if "torch._inductor.fx_passes.post_grad" not in sys.modules:
        return False
    from torch._inductor.fx_passes.post_grad import pass_patterns
    from torch._inductor.pattern_matcher import CallFunctionVarArgs, Match, register_graph_pattern

    def changed(match: Match, *_: Any, **__: Any) -> None:
        change(match.output_node())

    register_graph_pattern(CallFunctionVarArgs(op), pass_dict=pass_patterns[-1])(changed)
    return True


without_torch_function = torch._C.DisableTorchFunctionSubclass
"""A context in which `__torch_function__` of subclasses is not called. torch's documentation names it."""

dispatch_mode_count: Callable[[], int] = torch._C._len_torch_dispatch_stack
"""Return the number of active `TorchDispatchMode`s. No public substitute."""

function_mode_count: Callable[[], int] = torch._C._len_torch_function_stack
"""Return the number of active `TorchFunctionMode`s. No public substitute."""

profiler_is_active: Callable[[], bool] = torch._C._autograd._profiler_enabled
"""Return whether a profiler records the ops that run. `torch.autograd` has it under a private name only."""

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


frame_compiler: Callable[[], object] = torch._C._dynamo.eval_frame.get_eval_frame_callback
"""Return what compiles the frames of this thread's calls, None outside of compiled functions. No public substitute."""


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


def runs_forward_only(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Return whether a call of this module runs `kind.forward` and no hook. No public substitute lists hooks."""
    return type(module) is kind and not (
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or torch.nn.modules.module._has_any_global_hook()
    )


def is_view(tensor: Tensor) -> bool:
    """Return whether autograd takes a tensor for a view. Substitute: none that excludes detached views."""
    return tensor._is_view()


def storage_holders(storage: torch.UntypedStorage) -> int:
    """Return the number of owners of a storage: tensors on it, and its Python object. No public substitute."""
    return int(torch._C._storage_Use_Count(storage._cdata))


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


def parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return a module's own dict of parameters."""
    return module._parameters


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


def begin_ddp_forward(wrapper: DistributedDataParallel) -> None:
    """Do the work of a `DistributedDataParallel` around the forward of its module, of which it needs no result.

    Substitute: none in a compiled program, where its own `forward` breaks the graph.
    """
    wrapper._pre_forward()
    wrapper._post_forward(())


def defers_first_reduction(wrapper: DistributedDataParallel) -> bool:
    """Return whether gradients are still to be reduced at the end of a backward: the first one of a static graph."""
    return bool(wrapper.static_graph and not wrapper._static_graph_delay_allreduce_enqueued)


def reduce_deferred(wrapper: DistributedDataParallel) -> Callable[[], None]:
    """Return the function that reduces all gradients at the end of the first backward of a static graph."""
    wrapper._static_graph_delay_allreduce_enqueued = True
    reducer: Any = wrapper.reducer
    reduce: Callable[[], None] = reducer._delay_all_reduce
    return reduce


def ignore_in_ddp(module: nn.Module, names: Iterable[str]) -> None:
    """Have `DistributedDataParallel` leave parameters and buffers of a module alone.

    torch's documentation names this function, in spite of its underscore.
    """
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, list(names))


def register_collate(kind: type, collate: Callable[..., Any]) -> None:
    """Have `torch.utils.data.default_collate` join items of a type by `collate(items, *, collate_fn_map)`.

    torch's documentation names this mapping, in spite of its underscore.
    """
    from torch.utils.data._utils.collate import default_collate_fn_map

    default_collate_fn_map[kind] = collate


def exclude_from_fsdp(module: nn.Module) -> None:
    """Have `fully_shard` of a model leave a module and its parameters alone.

    It skips modules with torch's mark of `replicate`. Substitute: `fully_shard(model, ignored_params=...)` by the user.
    """
    from torch.distributed._composable.contract import REGISTRY_KEY, RegistryItem

    module.__dict__.setdefault(REGISTRY_KEY, {})["replicate"] = RegistryItem()


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


def fresh_size(size: Any, parts: int) -> Any:
    """Return an unbacked size in place of a backed one, in a fake kernel: the traced program assumes nothing about it.

    Where traced code asks about it all the same, torch answers for the example's size, and the program asserts the
    answer. A constant size, an unbacked one, and a multiple of `parts` such as `parts * s0` are returned as they are.
    Public substitute: none that has an example.
    """
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
    from torch.utils._sympy.functions import FloorDiv

    if not isinstance(size, torch.SymInt) or free_unbacked_symbols(size):
        return size
    if not (size // parts).node.expr.has(FloorDiv):
        return size
    fresh: Any = torch.library.get_ctx().new_dynamic_size()
    env = fresh.node.shape_env
    # torch < 2.13 has the older name
    give = getattr(env, "set_real_tensor_prop_unbacked_vals", None) or env.set_unbacked_var_to_val
    give(fresh.node.expr, size.node.hint)
    return fresh


def compile_package(program: ExportedProgram, path: str) -> None:
    """Compile a program with AOTInductor into an archive without its constants; torch's documentation names this.

    The code needs the vector instructions of this machine, and no others that its processor may have. It reads all
    parameters and buffers from memory, so a value that is written there serves. Left alone, the compiler makes numbers
    in the code of those with up to 8 elements (the bias of a logit), and of results of equal elements
    (`temperature.exp()`). Its binary has no line tables and names no files, whose paths differ, so it has the same
    bytes in every process.
    """
    import torch._inductor
    from torch._inductor import config, cpp_builder
    from torch._inductor.graph import GraphLowering

    options: dict[str, Any] = {
        "aot_inductor.package_constants_in_so": False,
        "joint_graph_constant_folding": False,
    }
    if hasattr(config.cpp, "march"):  # torch >= 2.13
        options["cpp.march"] = ""
    if hasattr(config.aot_inductor, "enable_line_tables"):
        options["aot_inductor.enable_line_tables"] = False
    flags = cpp_builder._get_optimization_cflags

    def without_files(*args: Any, **kwargs: Any) -> Any:
        compiler, linker = flags(*args, **kwargs)
        return [*compiler, "Wno-builtin-macro-redefined", """D__FILE__='"model"'"""], [*linker, "Wl,-s"]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch about itself
        lower = GraphLowering.get_attr

        def keep_weights(graph: Any, target: str, *rest: Any) -> Any:
            # Constants of the program have this prefix; the compiler may write them into the code.
            with config.patch(always_keep_tensor_constants=not target.startswith("_tensor_constant")):
                return lower(graph, target, *rest)

        GraphLowering.get_attr = keep_weights  # type: ignore[assignment, method-assign]
        cpp_builder._get_optimization_cflags = without_files
        try:
            torch._inductor.aoti_compile_and_package(program, package_path=path, inductor_configs=options)
        finally:
            GraphLowering.get_attr = lower  # type: ignore[method-assign]
            cpp_builder._get_optimization_cflags = flags


def cpp_compiler() -> str | None:
    """Return the C++ compiler that `compile_package` and `torch.compile` use on the CPU; None if there is none."""
    from torch._inductor import cpp_builder, exc

    try:
        return cpp_builder.get_cpp_compiler()
    except exc.InvalidCxxCompiler:
        return None


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


# ------------------------------------------------------------------------------- torch's older sharded tensors (compat)


def older_shard(tensor: Tensor, offsets: Iterable[int], sizes: Iterable[int], placement: str) -> Any:
    """Return a `Shard` of torch's `ShardedTensor`: a tensor with its place. Substitute: none."""
    from torch.distributed._shard.metadata import ShardMetadata
    from torch.distributed._shard.sharded_tensor import Shard

    return Shard(tensor, ShardMetadata(list(offsets), list(sizes), placement))


def older_sharding_spec(shards: Iterable[tuple[Iterable[int], Iterable[int], str]]) -> Any:
    """Return an `EnumerableShardingSpec` of (offsets, sizes, placement). Substitute: none."""
    from torch.distributed._shard.metadata import ShardMetadata
    from torch.distributed._shard.sharding_spec import EnumerableShardingSpec

    return EnumerableShardingSpec([ShardMetadata(list(at), list(sizes), where) for at, sizes, where in shards])


def local_place(value: DTensor) -> tuple[Iterable[int], Iterable[int]]:
    """Return offsets and sizes of a DTensor's local tensor in the whole. Substitute: none that is public."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    sizes, offsets = compute_local_shape_and_global_offset(value.shape, value.device_mesh, value.placements)
    return offsets, sizes


# -------------------------------------------------------------------------- torch's optimizers in the backward (compat)


def replace_in_backward(function: Callable[..., Any]) -> Callable[..., Any]:
    """Replace `torch.distributed.optim._apply_optimizer_in_backward`, and return the function before.

    Substitute: `tilerec.optim.apply_optimizer_in_backward`, in programs that import it.
    """
    import torch.distributed.optim as optim

    before: Callable[..., Any] = optim._apply_optimizer_in_backward
    optim._apply_optimizer_in_backward = function
    return before


NEWEST_TESTED = (2, 13)
"""Newest minor version of torch that the tests ran with."""


def untested_version(version: str) -> str:
    """Return a warning if this version of torch is newer than the tests' newest; else "".

    No upper bound pins torch: private names that this file uses rarely change, and a pin stops every other package.
    """
    if tuple(map(int, version.split(".")[:2])) <= NEWEST_TESTED:
        return ""
    newest = ".".join(map(str, NEWEST_TESTED))
    return (
        f"torch: got {version}; expected {newest} or older, the newest tested one. If a call fails, use torch {newest}."
    )
