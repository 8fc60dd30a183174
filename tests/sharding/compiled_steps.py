"""Steps of compiled models that a rank runs for one test each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd

from tests.parity.harness import TILINGS
from tests.sharding.compiled_models import Case, assert_twins, batch, model, planned
from tilerec.comms.process import ProcessGroupComms
from tilerec.errors import TilerecError
from tilerec.optim.attach import apply_optimizer_in_backward
from tilerec.parallel.compiled_model import compile_model
from tilerec.parallel.resharding.reshard import reshard
from tilerec.sharding.late_calls import run_late
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor


def _twins(case: Case) -> tuple[nn.Module, nn.Module, nn.Module, ProcessGroupComms]:
    torch._dynamo.reset()
    group = ProcessGroupComms()
    eager, twin = model(case, group), model(case, group)
    return eager, twin, compile_model(twin, backend=case.backend), group


def _train(case: Case, forward: Callable[..., Tensor], step: int, rank: int) -> None:
    forward(*batch(case, step, rank)).backward()


def outcome(act: Callable[[], Any]) -> str:
    """Return the name and the text of an error that `act` raises, or "" if it raises none."""
    try:
        act()
    except TilerecError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def bad_id() -> list[str]:
    """Rank 1 has an id outside its table; then all ranks train again. Returns the outcomes: eager, compiled, after."""
    case = Case("sum", "row_wise")
    eager, twin, compiled, group = _twins(case)

    def wrong(forward: Callable[..., Tensor]) -> str:
        dense_BD, features = batch(case, 0, group.rank)
        if group.rank == 1:
            features = KeyedJaggedTensor(features.keys(), features.values() + 100, lengths=features.lengths())
        return outcome(lambda: forward(dense_BD, features))

    found = [wrong(eager), wrong(compiled)]
    for forward in (eager, compiled):
        _train(case, forward, 0, group.rank)
    assert_twins(case, eager, twin)
    return found


def other_mode() -> list[str]:
    """Rank 1 evaluates while rank 0 trains. Returns the outcomes: eager, compiled."""
    case = Case("sum", "row_wise")
    eager, _, compiled, group = _twins(case)

    def act(forward: Callable[..., Tensor]) -> str:
        with torch.set_grad_enabled(group.rank == 0):
            return outcome(lambda: forward(*batch(case, 0, group.rank)))

    return [act(eager), act(compiled)]


class _PartlyUsed(nn.Module):
    """The loss adds the looked-up rows times a factor; without one it does not depend on them."""

    def __init__(self, model: Any, factor: float | None) -> None:
        super().__init__()
        self.model, self.factor = model, factor

    def forward(self, dense_BD: Tensor, features: KeyedJaggedTensor) -> Tensor:
        pooled_BC = self.model.tables(features).values()
        loss = self.model.linear(dense_BD).sum()
        return loss if self.factor is None else loss + self.factor * pooled_BC.sum()


def unused_output(compiled: bool, factor: float | None) -> None:
    """Train two steps; rank 0 uses the rows, and other ranks use them with this factor."""
    torch._dynamo.reset()
    case, group = Case("sum", "row_wise"), ProcessGroupComms()
    forward: Any = _PartlyUsed(model(case, group), 1.0 if group.rank == 0 else factor)
    if compiled:
        forward = compile_model(forward, backend=case.backend)
    for step in range(2):
        _train(case, forward, step, group.rank)


def changed_training() -> None:
    """Tables are frozen, thawed, and get an optimizer after the model has been compiled: as in eager mode."""
    case = Case("sum", "mixed", attached=False)
    eager, twin, compiled, group = _twins(case)

    def both(change: Callable[[nn.Module], Any], step: int) -> None:
        for own in (eager, twin):
            change(own)
        for forward in (eager, compiled):
            _train(case, forward, step, group.rank)
        assert_twins(case, eager, twin)

    both(lambda own: own.tables.embedding_bags["ab"].weight.requires_grad_(False), 0)
    both(lambda own: own.tables.embedding_bags["ab"].weight.requires_grad_(True), 1)
    both(lambda own: apply_optimizer_in_backward(torch.optim.SGD, own.tables.parameters(), {"lr": 0.1}), 2)
    both(lambda own: own.tables.embedding_bags["ab"].weight.requires_grad_(False), 3)  # no other graph


def cut_again(attached: bool) -> int:
    """Tables are cut in another way after the model has been compiled: as in eager mode. Returns this rank's tiles."""
    torch._dynamo.reset()
    case, group = Case("sum", attached=attached), ProcessGroupComms()
    eager, twin = planned(case, group), planned(case, group)
    compiled = compile_model(twin, backend=case.backend)
    for step in range(3):
        for own, forward in ((eager, eager), (twin, compiled)):
            if step == 1:
                bags = own.tables.embedding_bags
                cut = {
                    name: TILINGS["two_tiles"](table.config.num_embeddings, table.config.embedding_dim, ((0, 1),), 0)
                    for name, table in bags.items()
                }
                reshard(own, {"tables": cut})
            _train(case, forward, step, group.rank)
        assert_twins(case, eager, twin)
    return len(twin.tables.embedding_bags["ab"].leaves())  # type: ignore[union-attr, operator, index]


_FLYING: dict[str, int] = {}  # bytes by name of message, sent and not yet waited for
_SEEN: list[dict[str, int]] = []


@torch.library.custom_op("tilerec_tests::dense_part", mutates_args=())
def _dense_part(values: Tensor) -> Tensor:
    _SEEN.append(dict(_FLYING))
    return values.clone()


_dense_part.register_fake(torch.empty_like)


class _Overlapping(nn.Module):
    """Rows are looked up before the dense part, and used after it."""

    def __init__(self, tables: Any) -> None:
        super().__init__()
        self.tables = tables

    def forward(self, dense_BD: Tensor, features: KeyedJaggedTensor) -> Tensor:
        pooled_BC = self.tables(features).values()
        return torch.mm(_dense_part(dense_BD).t(), pooled_BC)


class _Logged:
    """A message that counts as in flight until it is waited for."""

    def __init__(self, name: str, handle: Any, sent: int) -> None:
        self.name, self.handle = name, handle
        _FLYING[name] = sent

    def wait(self) -> Tensor:
        _FLYING.pop(self.name, None)
        arrived: Tensor = self.handle.wait()
        return arrived


def _ordered(graph: torch.fx.GraphModule, _: Any) -> Any:
    """Compile a graph to itself, with its late calls in the order that inductor gives them."""
    for node in graph.graph.find_nodes(op="call_function", target=torch.ops.tilerec.finish_sharded_lookup.default):
        run_late(node)
    graph.recompile()
    return make_boxed_func(graph.forward)


def in_flight(inductor: bool) -> dict[str, int]:
    """Return the bytes in flight, by name of message, while the dense part of a step runs."""
    case = Case("sum", "row_wise")
    torch._dynamo.reset()
    group = ProcessGroupComms()
    tables: Any = model(case, group).tables
    backend: Any = "inductor" if inductor else aot_autograd(fw_compiler=_ordered)
    forward = compile_model(_Overlapping(tables), backend=backend)
    own = tables.exchange.group
    post = own.all_to_all

    def logged(name: str, into: Tensor, out: Tensor, *splits: Any) -> _Logged:
        return _Logged(name, post(name, into, out, *splits), out.nbytes)

    object.__setattr__(own, "all_to_all", logged)
    _SEEN.clear()
    forward(*batch(case, 0, group.rank)).sum().backward()
    return _SEEN[-1]
