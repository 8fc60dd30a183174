"""Small functions and bases with TorchRec's names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import tilerec
from tilerec.compat import comm, modules, test_utils
from tilerec.compat.awaitable import LazyNoWait, NoWait
from tilerec.compat.streamable import Multistreamable, Pipelineable
from tilerec.compat.types import (
    NullShardedModuleContext,
    QuantizedCommCodecs,
    ShardedModule,
    ShardedTensor,
    rank_device,
)
from tilerec.data.batch import Batch
from tilerec.errors import ConfigError


@pytest.mark.parametrize(("local", "world", "size", "hosts"), [("", 4, 4, 1), ("2", 8, 2, 4), ("2", 3, 3, 1)])
def test_ranks_of_a_host_follow_the_launcher(
    local: str, world: int, size: int, hosts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
    assert comm.get_local_size(world) == size
    assert comm.get_num_groups(world) == hosts
    assert (comm.get_local_rank(world, 1), comm.get_group_rank(world, 1)) == (1, 0)
    with pytest.raises(ConfigError, match="no process group"):
        comm.get_local_size()


def test_batches_are_pipelineable_and_a_programs_own_must_define_both_methods() -> None:
    features = tilerec.KeyedJaggedTensor.from_lengths_sync(["a"], torch.tensor([1]), torch.tensor([1]))
    batch = Batch(torch.zeros(1, 1), features, torch.zeros(1))
    assert all(isinstance(each, (Pipelineable, Multistreamable)) for each in (batch, features))

    class Half(Pipelineable):
        def record_stream(self, stream: Any) -> None: ...

    with pytest.raises(TypeError, match="abstract"):
        Half()  # type: ignore[abstract]


def test_features_of_a_dictionary_become_a_batch() -> None:
    nested = torch.nested.nested_tensor_from_jagged(torch.tensor([1, 2, 3]), torch.tensor([0, 2, 3]))
    found = modules.maybe_td_to_kjt({"a": nested, "b": torch.tensor([[4], [5]])}, ["b", "a"])
    assert (found.keys(), found.values().tolist(), found.lengths().tolist()) == (
        ["b", "a"], [4, 5, 1, 2, 3], [1, 1, 2, 1],
    )  # fmt: skip
    assert modules.maybe_td_to_kjt(found) is found
    with pytest.raises(ConfigError, match="a: got a int"):
        modules.maybe_td_to_kjt({"a": 3})


def test_dictionaries_of_state_and_sizes() -> None:
    assert modules.filter_state_dict({"a.b.c": 1, "a.d": 2, "e": 3}, "a") == {"b.c": 1, "d": 2}
    state = {"a": 1}
    modules.add_prefix_to_state_dict(state, "p.")
    assert state == {"p.a": 1}
    assert (modules.append_prefix("x", "y"), modules.append_prefix("", "y")) == ("x.y", "y")
    assert (modules.prod([2, 3]), modules.gb_to_bytes(modules.bytes_to_gb(2**31))) == (6, 2**31)
    assert modules.placement("cuda", 9, 8) == "rank:9/cuda:1"
    assert modules.none_throws(3) == 3
    with pytest.raises(AssertionError, match="empty"):
        modules.none_throws(None, "empty")


def test_a_programs_own_sharded_module_runs_its_steps_in_order() -> None:
    class Doubled(ShardedModule[Any, Any, Any, Any]):
        def create_context(self) -> list[str]:
            return []

        def input_dist(self, ctx: Any, *input: Any, **kwargs: Any) -> Any:
            return NoWait(NoWait(input[0]))

        def compute(self, ctx: Any, dist_input: Any) -> Any:
            return dist_input * 2

        def output_dist(self, ctx: Any, output: Any) -> Any:
            return LazyNoWait(output)

    assert Doubled()(torch.tensor(4)).wait() == 8
    with pytest.raises(TypeError, match="abstract"):
        ShardedModule()  # type: ignore[abstract]


def test_values_of_types() -> None:
    assert (rank_device("cpu", 3), rank_device("cuda", 3)) == (torch.device("cpu"), torch.device("cuda", 3))
    codec = QuantizedCommCodecs().forward
    assert torch.equal(codec.decode(codec.encode(torch.ones(2))), torch.ones(2))
    with pytest.raises(ConfigError, match="tables are DTensors"):
        ShardedTensor()
    with pytest.raises(AttributeError, match="expected no attributes"):
        NullShardedModuleContext().x = 1  # type: ignore[attr-defined]


def test_test_helpers_compare_models() -> None:
    assert 0 < test_utils.get_free_port() < 65536
    assert test_utils.skip_if_asan(len) is len
    torch.manual_seed(1)
    one, two = nn.Linear(2, 2), nn.Linear(2, 2)
    test_utils.assert_state_buffers_parameters_equal(one, one)
    with pytest.raises(AssertionError, match="weight differs"):
        test_utils.assert_state_buffers_parameters_equal(one, two)
    draw = test_utils.seed_and_log(lambda: torch.rand(1))
    assert draw() == draw()
