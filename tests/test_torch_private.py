"""Each private name of torch that the library uses still does what the library needs it for."""

from __future__ import annotations

import ast
import importlib
import os
import pickle
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo.testing
import torch._inductor.config
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import default_collate

from tilerec import ops as ops
from tilerec import torch_private as private


class _Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2


class _Watch(torch.autograd.Function):
    """The identity, which keeps what a check finds out in its backward."""

    @staticmethod
    def forward(ctx, check, found, *tensors):  # type: ignore[no-untyped-def]
        ctx.check, ctx.found = check, found
        return sum(tensors)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        ctx.found.append(ctx.check(ctx))
        return None, None, *[grad] * len(ctx.next_functions)


@pytest.fixture
def one_rank(tmp_path: Path):  # type: ignore[no-untyped-def]
    dist.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1, timeout=timedelta(seconds=77)
    )
    yield
    dist.destroy_process_group()


def test_a_backward_pass_has_a_number_and_none_runs_outside() -> None:
    found: list[int] = []
    x = torch.ones(1, requires_grad=True)
    for _ in range(2):
        _Watch.apply(lambda _: private.graph_task_id(), found, x).backward()
    assert private.graph_task_id() == -1
    assert found[0] != found[1]
    assert min(found) >= 0


def test_a_pass_knows_which_leaves_it_accumulates_into() -> None:
    def reached(ctx) -> list[bool | str]:  # type: ignore[no-untyped-def]
        out: list[bool | str] = []
        for node, _ in ctx.next_functions:
            try:
                out.append(private.will_execute(node))
            except RuntimeError:
                out.append("returned")
        return out

    found: list[list[bool | str]] = []
    x, y = torch.ones(1, requires_grad=True), torch.ones(1, requires_grad=True)
    _Watch.apply(reached, found, x, y).backward()
    _Watch.apply(reached, found, x, y).backward(inputs=[y])
    torch.autograd.grad(_Watch.apply(reached, found, x, y), [x])
    assert found == [[True, True], [False, True], ["returned", False]]


@pytest.mark.parametrize("kept", [True, False])
def test_a_pass_knows_whether_it_keeps_its_graph(kept: bool) -> None:
    found: list[bool] = []
    x = torch.ones(1, requires_grad=True)
    _Watch.apply(lambda _: private.keeps_graph(), found, x).backward(retain_graph=kept)
    assert found == [kept]


def test_a_callback_runs_after_all_nodes_of_a_pass() -> None:
    order: list[str] = []
    x = torch.ones(1, requires_grad=True)
    x.register_post_accumulate_grad_hook(lambda _: order.append("leaf"))
    _Watch.apply(lambda _: private.after_backward(lambda: order.append("end")), [], x).backward()
    assert order == ["leaf", "end"]


def test_below_autograd_nothing_is_recorded() -> None:
    x = torch.ones(2, requires_grad=True)
    with private.BelowAutograd():
        y = x * 2
    assert not y.requires_grad
    assert (x * 2).requires_grad


def test_active_modes_are_counted() -> None:
    assert (private.dispatch_mode_count(), private.function_mode_count()) == (0, 0)
    with TorchDispatchMode():
        assert private.dispatch_mode_count() == 1
    with TorchFunctionMode():
        assert private.function_mode_count() == 1


def test_without_torch_function_a_subclass_is_not_called() -> None:
    calls = []

    class Own(Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            calls.append(func)
            with private.without_torch_function():
                return func(*args, **(kwargs or {}))

    torch.ones(1).as_subclass(Own) + 1
    assert len(calls) == 1


def test_a_dispatch_mode_comes_before_a_subclass() -> None:
    seen = []

    class Mode(private.DispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Mode():
        torch.ones(1) + 1
    assert torch.ops.aten.add.Tensor in seen


def test_a_functorch_transform_and_its_tensors_are_noticed() -> None:
    found = []

    def f(x: Tensor) -> Tensor:
        found.append((private.functorch_is_active(), private.is_functorch_wrapped(x)))
        return x * x

    torch.func.grad(f)(torch.tensor(3.0))
    assert found == [(True, True)]
    assert not private.functorch_is_active()
    assert not private.is_functorch_wrapped(torch.ones(1))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_device_of_a_tensor_is_its_own(device: str) -> None:
    assert private.device_of(torch.empty(1, device=device)) == torch.device(device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_the_type_of_a_tensor_is_its_own(dtype: torch.dtype) -> None:
    assert private.dtype_of(torch.empty(1, dtype=dtype)) == dtype


def test_a_disabled_function_breaks_the_graph() -> None:
    seen: list[bool] = []

    @private.disable_dynamo
    def outside(x: Tensor) -> Tensor:
        seen.append(torch.compiler.is_compiling())
        return x + 1

    assert private.frame_compiler() is None
    compiled = torch.compile(lambda x: outside(x * 2) * 3, backend="eager")
    assert compiled(torch.ones(1)).item() == 9.0
    assert seen == [False]


def test_writes_are_counted_through_views_and_by_hand() -> None:
    x = torch.zeros(3)
    before = private.version_of(x)
    x[:1].fill_(1)
    torch.autograd.graph.increment_version(x)
    assert private.version_of(x) == before + 2
    with torch.inference_mode():
        assert private.version_of(torch.zeros(1)) == 0


def test_an_op_has_a_schema_with_named_arguments() -> None:
    assert [argument.name for argument in private.schema_of("aten", "relu").arguments] == ["self"]


def test_an_assertion_on_the_cpu_raises_with_its_message() -> None:
    private.assert_async(torch.tensor(True), "fine")
    with pytest.raises(RuntimeError, match="not fine"):
        private.assert_async(torch.tensor(False), "not fine")


def test_a_list_is_added_to_in_place() -> None:
    numbers = [torch.tensor(1), torch.tensor(5)]
    private.foreach_add_(numbers, 1)
    assert numbers == [torch.tensor(2), torch.tensor(6)]


def test_item_and_to_arrive_at_a_dispatch_mode_as_these_ops() -> None:
    seen = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Mode():
        torch.ones(1).to(torch.float64).item()
    assert private.TO_COPY in seen
    assert private.LOCAL_SCALAR_DENSE in seen


def test_a_view_differs_from_a_tensor_of_its_own() -> None:
    x = torch.ones(4)
    assert private.is_view(x[1:])
    assert not private.is_view(x)


@pytest.mark.parametrize(
    "register",
    ["register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook",
     "register_full_backward_pre_hook"],
)  # fmt: skip
def test_a_module_with_a_hook_of_any_kind_runs_more_than_its_forward(register: str) -> None:
    layer = torch.nn.Linear(2, 2)
    assert private.runs_forward_only(layer, torch.nn.Linear)
    assert not private.runs_forward_only(layer, torch.nn.Module)
    for add in (getattr(layer, register), getattr(torch.nn.modules.module, register.replace("_f", "_module_f", 1))):
        handle = add(lambda *_: None)
        assert not private.runs_forward_only(layer, torch.nn.Linear)
        handle.remove()
    assert private.runs_forward_only(layer, torch.nn.Linear)


def test_a_build_without_gpus_has_device_0_and_stream_0() -> None:
    if torch.version.cuda is None and torch.version.hip is None:
        assert private.current_device() == 0
        assert private.current_raw_stream(0) == 0
    elif torch.cuda.is_available():
        assert private.current_device() == torch.cuda.current_device()
        assert private.current_raw_stream(0) == torch.cuda.current_stream(0).cuda_stream


def test_submodules_and_buffers_are_the_modules_own() -> None:
    module = nn.Sequential(nn.BatchNorm1d(3))
    inner = private.submodules(module)["0"]
    assert inner is module[0]
    private.buffers(inner)["running_mean"] = torch.ones(5)
    assert module[0].running_mean.shape == (5,)
    assert private.parameters(inner)["weight"] is module[0].weight


def test_holders_of_a_storage_are_its_tensors_and_its_python_object() -> None:
    whole = torch.zeros(4)
    storage = whole.untyped_storage()
    assert private.storage_holders(storage) == 2
    part = whole[1:]
    assert private.storage_holders(storage) == 3
    del part
    assert private.storage_holders(storage) == 2


def test_an_active_profiler_is_seen() -> None:
    assert not private.profiler_is_active()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert private.profiler_is_active()
    assert not private.profiler_is_active()


def test_hooks_around_a_modules_state_are_listed() -> None:
    module, ran = nn.Linear(1, 1), []
    before = module.register_state_dict_pre_hook(lambda *_: ran.append("save"))
    module.register_load_state_dict_pre_hook(lambda *_: ran.append("load"))
    assert list(private.state_dict_pre_hooks(module)) == [before.id]
    assert len(private.load_state_dict_pre_hooks(module)) == 1
    for hook in private.state_dict_pre_hooks(module).values():
        hook(module, "", False)
    assert ran == ["save"]


@pytest.mark.parametrize("when", ["state_dict_pre", "state_dict_post", "load_state_dict_pre", "load_state_dict_post"])
def test_hooks_around_an_optimizers_state_are_listed(when: str) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))])
    assert not private.optimizer_hooks(optimizer, when)
    what, _, side = when.rpartition("_")
    handle = getattr(optimizer, f"register_{what}_{side}_hook")(lambda *_: None)
    assert list(private.optimizer_hooks(optimizer, when)) == [handle.id]


def test_the_scale_of_a_scaler_is_a_tensor_once_it_scaled() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    assert private.scale_of(scaler) is None
    scaler.scale(torch.ones(1))
    assert private.scale_of(scaler).item() == 8.0


def test_a_forward_knows_the_ddp_around_it(one_rank: None) -> None:
    found = []

    class Model(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            found.append(private.active_ddp())
            return super().forward(x)

    model = Model(2, 2)
    private.ignore_in_ddp(model, ["bias"])
    wrapped = DistributedDataParallel(model)
    wrapped(torch.ones(1, 2))
    assert found == [wrapped]
    assert private.active_ddp() is None
    assert [id(p) for p in private.ddp_parameters(wrapped)] == [id(model.weight)]
    assert private.is_ddp_ignored(model.bias)
    assert not private.is_ddp_ignored(model.weight)


def test_fully_shard_leaves_excluded_modules_alone(one_rank: None) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    private.exclude_from_fsdp(model[0])
    fully_shard(model)
    assert type(model[0].weight) is nn.Parameter
    assert isinstance(model[1].weight, DTensor)


def test_default_collate_takes_a_function_for_a_type() -> None:
    class Item:
        pass

    def count(items: list[Item], *, collate_fn_map: Any = None) -> int:
        return len(items)

    private.register_collate(Item, count)
    assert default_collate([{"item": Item()}, {"item": Item()}]) == {"item": 2}


@pytest.mark.parametrize("fixed", [True, False])
def test_ddp_keeps_the_order_of_its_buckets_after_its_first_step(one_rank: None, fixed: bool) -> None:
    wrapped = DistributedDataParallel(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    if fixed:
        private.fix_ddp_buckets(wrapped)
    wrapped(torch.ones(1, 2)).sum().backward()
    assert wrapped.reducer._rebuild_buckets() is not fixed
    wrapped(torch.ones(1, 2)).sum().backward()
    assert not wrapped.reducer._rebuild_buckets()


def test_dense_parameters_step_in_their_backward() -> None:
    parameter = nn.Parameter(torch.ones(1))
    private.apply_in_backward(torch.optim.SGD, [parameter], {"lr": 0.5}, True)
    (parameter * 1.0).sum().backward()
    assert parameter.item() == 0.5


def test_a_process_group_has_the_time_out_that_it_was_given(one_rank: None) -> None:
    found = private.timeout_of(dist.group.WORLD, torch.device("cpu"))
    assert found in (timedelta(seconds=77), None)


def test_a_dtensor_of_a_subclass_has_its_local_part(one_rank: None) -> None:
    class Own(DTensor):
        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            return func

    local, mesh = torch.ones(2, 3), init_device_mesh("cpu", (1,))
    made = private.new_dtensor(Own, local, mesh, (Replicate(),), torch.Size((2, 3)), (3, 1))
    assert isinstance(made, Own)
    assert made.shape == (2, 3)
    assert made.placements == (Replicate(),)
    assert private.local_tensor(made) is local


def test_pytree_takes_a_class_apart_and_puts_it_together() -> None:
    class Pair:
        def __init__(self, a: int, b: int) -> None:
            self.a, self.b = a, b

    private.pytree.register_pytree_node(Pair, lambda p: ([p.a, p.b], None), lambda parts, _: Pair(*parts))
    leaves, spec = private.pytree.tree_flatten(Pair(1, 2))
    assert leaves == [1, 2]
    assert private.pytree.tree_unflatten(leaves, spec).b == 2


def test_tensors_of_a_compiled_backward_are_fake_or_functional() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        assert isinstance(torch.ones(1), private.FakeTensor)
    assert issubclass(private.FunctionalTensor, Tensor)


@pytest.mark.skipif(private.onednn_linear is None, reason="this torch has no oneDNN")
def test_onednn_multiplies_strided_operands() -> None:
    left, right, bias = torch.randn(6, 4), torch.randn(5, 4), torch.randn(5)
    assert private.onednn_linear is not None
    found = private.onednn_linear(left, right, bias, "none", [], "")
    torch.testing.assert_close(found, left @ right.t() + bias)
    found = private.onednn_linear(left.t(), torch.randn(6, 5).fill_(2.0).t(), None, "none", [], "")
    torch.testing.assert_close(found, 2 * left.sum(0)[:, None].expand(4, 5))


@pytest.mark.filterwarnings("ignore:TF32 acceleration")
def test_the_flag_of_onednn_can_be_read() -> None:
    if not torch.backends.mkldnn.is_available():
        pytest.skip("this torch has no oneDNN")
    assert private.onednn_is_enabled()
    with torch.backends.mkldnn.flags(enabled=False):
        assert not private.onednn_is_enabled()


def test_autograd_records_inside_of_a_kernel_where_it_is_visible() -> None:
    x = torch.ones(1, requires_grad=True)
    with private.BelowAutograd():  # as in a kernel
        assert not (x * 2).requires_grad
        with private.autograd_visible():
            assert (x * 2).requires_grad
    assert private._autograd_keys() is private._autograd_keys()


def _program() -> tuple[torch.library.Library, list[str], Callable[[Tensor], Tensor]]:
    """A program that calls two ops without using their results, and the names of the ops that run."""
    library = torch.library.Library("tilerec_order", "FRAGMENT")
    calls: list[str] = []
    for name in ("dropped", "kept"):
        library.define(f"{name}(Tensor x) -> Tensor")
        library.impl(name, lambda x, name=name: calls.append(name) or x.clone(), "CPU")
        torch.library.register_fake(f"tilerec_order::{name}", torch.empty_like, lib=library)
    private.keep_order(torch.ops.tilerec_order.kept.default)

    def program(x: Tensor) -> Tensor:
        torch.ops.tilerec_order.kept(x)
        torch.ops.tilerec_order.dropped(x)
        return torch.mm(x, x)

    return library, calls, program


def test_compiled_programs_keep_calls_whose_order_is_kept() -> None:
    torch._dynamo.reset()
    library, calls, program = _program()
    torch.compile(program, fullgraph=True, backend="aot_eager")(torch.ones(2, 2))
    assert calls == ["kept"]
    library._destroy()


@pytest.mark.skipif(os.environ.get("TILEREC_NIGHTLY") != "1", reason="inductor's start takes seconds: nightly")
def test_inductor_passes_its_calls_of_an_op_to_a_function() -> None:
    torch._dynamo.reset()
    changed: list[str] = []
    importlib.import_module("torch._inductor.fx_passes.post_grad")
    assert private.change_inductor_graphs(torch.ops.aten.mm.default, lambda node: changed.append(node.name))
    torch.compile(lambda x: torch.mm(x, x), fullgraph=True, backend="inductor")(torch.ones(2, 2))
    assert changed == ["mm"]


def test_programs_take_the_result_of_a_constant_function_without_guards() -> None:
    torch._dynamo.reset()
    calls: list[int] = []

    @private.constant_in_programs
    def scale(x: Tensor) -> int:
        calls.append(int(x))
        return int(x) + 2

    compiled = torch.compile(lambda x, y: y * scale(x), fullgraph=True, backend="eager")
    for number in (1, 5):
        assert compiled(torch.tensor(number), torch.ones(1)).item() == 3
    assert calls == [1]


def test_sizes_of_0_and_1_need_no_graph_of_their_own_where_a_tracer_is_oblivious_of_them() -> None:
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(_Doubled(), fullgraph=True, dynamic=True, backend=counter)
    private.trace_all_sizes(compiled)
    for size in (1, 5, 0):
        assert compiled(torch.ones(size)).shape == (size,)
    assert counter.frame_count == 1


def test_rules_for_sizes_change_only_while_the_graph_is_made() -> None:
    torch._dynamo.reset()
    config: Any = torch.fx.experimental._config
    made: list[bool] = []
    called: list[bool] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        def call(*args: Any) -> Any:
            called.append(config.backed_size_oblivious)
            return graph.forward(*args)

        made.append(config.backed_size_oblivious)
        return call

    compiled = torch.compile(_Doubled(), fullgraph=True, dynamic=True, backend=backend)
    private.trace_all_sizes(compiled)
    compiled(torch.ones(3))
    torch.compile(lambda x: x + 1, fullgraph=True, dynamic=True, backend=backend)(torch.ones(3))
    assert made == [True, False]
    assert called == [False, False]
    assert private._with_sizes_as_numbers(lambda: config.backed_size_oblivious)
    assert pickle.loads(pickle.dumps(compiled.dynamo_ctx.callback.func)) is private._with_sizes_as_numbers


def test_a_wrapper_is_prepared_apart_from_the_forward_of_its_module(one_rank) -> None:  # type: ignore[no-untyped-def]
    wrapped = DistributedDataParallel(nn.Linear(2, 1), static_graph=True)
    assert private.defers_first_reduction(wrapped)
    ends: list[str] = []
    for _ in range(2):
        private.begin_ddp_forward(wrapped)
        out = wrapped.module(torch.ones(1, 2)).sum()
        if private.defers_first_reduction(wrapped):
            reduce = private.reduce_deferred(wrapped)

            def end(reduce: Callable[[], None] = reduce) -> None:
                ends.append("reduced")
                reduce()

            out = _Watch.apply(lambda _, end=end: private.after_backward(end), [], out)
        out.backward()
    assert ends == ["reduced"]
    assert torch.equal(wrapped.module.bias.grad, torch.full((1,), 2.0))


def test_a_compiled_module_has_its_module_inside() -> None:
    module = nn.Linear(1, 1)
    assert private.uncompiled(torch.compile(module)) is module
    assert private.uncompiled(module) is module


def test_the_hooks_of_a_module_s_state_are_listed() -> None:
    module = nn.Linear(1, 1)
    module.register_state_dict_pre_hook(lambda *_: None)
    assert [len(hooks) for hooks in private.state_hooks(module)] == [0, 1, 0, 0]


def test_a_program_of_any_sizes_takes_no_sample_and_one() -> None:
    shapes = ({0: torch.export.Dim("batch", min=0)},)
    with private.any_sizes():
        program = torch.export.export(nn.Linear(2, 1), (torch.ones(3, 2),), dynamic_shapes=shapes)
    assert [program.module()(torch.ones(size, 2)).shape[0] for size in (0, 1, 5)] == [0, 1, 5]


def test_a_fresh_size_is_its_own_only_where_torch_assumes_something_about_it() -> None:
    """`unbacked_rows` has the size of `private.fresh_size`."""

    class Halves(nn.Module):
        def forward(self, flat: Tensor, table: Tensor) -> Tensor:
            sizes = [torch.ops.tilerec.unbacked_rows(own, 2).shape[0] // 2 for own in (flat, table.view(-1))]
            return torch.zeros(sizes[0], sizes[1])

    dynamic = torch.export.Dim.DYNAMIC
    example = torch.ones(6), torch.ones(2, 3)
    program = torch.export.export(Halves(), example, dynamic_shapes=({0: dynamic}, {1: dynamic}))
    (shape,) = [node.meta["val"].shape for node in program.graph.nodes if "zeros" in str(node.target)]
    assert torch.fx.experimental.symbolic_shapes.free_unbacked_symbols(shape[0])
    assert not torch.fx.experimental.symbolic_shapes.free_unbacked_symbols(shape[1])
    assert program.module()(torch.ones(2), torch.ones(2, 5)).shape == (1, 5)


def test_a_shard_and_a_spec_of_shards_keep_their_places() -> None:
    shard = private.older_shard(torch.ones(2, 3), (4, 0), (2, 3), "rank:1/cpu")
    assert (shard.metadata.shard_offsets, shard.metadata.shard_sizes) == ([4, 0], [2, 3])
    spec = private.older_sharding_spec([((0, 0), (4, 3), "rank:0/cpu"), ((4, 0), (2, 3), "rank:1/cpu")])
    assert [s.shard_offsets for s in spec.shards] == [[0, 0], [4, 0]]


def test_a_dtensor_knows_the_place_of_its_local_part(one_rank: None) -> None:
    value = DTensor.from_local(torch.ones(2, 3), init_device_mesh("cpu", (1,)), [Shard(0)])
    offsets, sizes = private.local_place(value)
    assert (tuple(offsets), tuple(sizes)) == ((0, 0), (2, 3))


def test_torchs_function_that_attaches_optimizers_can_be_replaced() -> None:
    import torch.distributed.optim as optim

    before = private.replace_in_backward(len)
    try:
        assert optim._apply_optimizer_in_backward is len
    finally:
        assert private.replace_in_backward(before) is len
    assert optim._apply_optimizer_in_backward is before


# `private.compile_package`, `private.readable_op_calls` and `private.package_loader`: tests/export/test_package.py


@pytest.mark.parametrize(("named", "found"), [("no-such-compiler", None), ("g++", "g++")])
def test_a_compiler_that_cannot_run_is_none(named: str, found: str | None) -> None:
    with torch._inductor.config.patch({"cpp.cxx": (None, named)}):
        assert private.cpp_compiler() == found


def test_every_name_of_the_file_has_a_test() -> None:
    tree = ast.parse(Path(private.__file__).read_text())
    names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    annotated = (node.target for node in tree.body if isinstance(node, ast.AnnAssign))
    names |= {target.id for target in annotated if isinstance(target, ast.Name)}
    names |= {
        target.id
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name) and target.id not in ("__all__", "P", "T")
    }
    assert len(names) > 25
    text = Path(__file__).read_text()
    assert not {name for name in names | set(private.__all__) if f"private.{name}" not in text}


def test_threads_have_passes_of_their_own() -> None:
    found: list[int] = []
    x = torch.ones(1, requires_grad=True)

    def inside(_: object) -> int:
        thread = threading.Thread(target=lambda: found.append(private.graph_task_id()))
        thread.start()
        thread.join()
        return 0

    _Watch.apply(inside, [], x).backward()
    assert found == [-1]


@pytest.mark.parametrize("version", ["2.11.0", "2.13.1+cpu", "2.13.0a0+git1"])
def test_tested_versions_of_torch_cause_no_warning(version: str) -> None:
    assert private.untested_version(version) == ""


@pytest.mark.parametrize("version", ["2.14.0.dev20261101+cu130", "3.0.0"])
def test_a_newer_torch_is_named_with_the_newest_tested_one(version: str) -> None:
    newest = ".".join(map(str, private.NEWEST_TESTED))
    assert private.untested_version(version).startswith(f"torch: got {version}; expected {newest} or older")
