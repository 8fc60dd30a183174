"""Managed collision as a device has it, without looking at what it holds: the host's bits, and replays that count on.

There is no device here: ids that are on the CPU are treated as if they were not (`host_looks`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.modules.recorded import Recorded
from tilerec.modules import managed_collision
from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.modules.evict import DistanceLFU_EvictionPolicy, HashZchEvictionConfig, LFU_EvictionPolicy
from tilerec.modules.hash_zch import HashZchManagedCollisionModule
from tilerec.modules.managed_collection import ManagedCollisionCollection
from tilerec.modules.managed_collision import ManagedCollisionModule
from tilerec.modules.managed_embedding import ManagedCollisionEmbeddingBagCollection
from tilerec.modules.mch import MCHManagedCollisionModule
from tilerec.optim.attach import apply_optimizer_in_backward
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from tilerec.spec.optimizer import Adam, OptimizerSpec, RowWiseAdagrad
from tilerec.spec.table import DataType, EmbeddingBagConfig

ROWS, STEPS = 24, 7
TIME = [0]


@pytest.fixture(autouse=True)
def _clock_at_zero() -> None:
    TIME[0] = 0


def clock() -> int:
    return TIME[0]


def lru() -> ManagedCollisionModule:
    return HashZchManagedCollisionModule(ROWS, "cpu", 2, eviction_policy_name="LRU_EVICTION")


def ttl() -> ManagedCollisionModule:
    return HashZchManagedCollisionModule(
        ROWS, "cpu", 2, eviction_policy_name="PER_FEATURE_TTL_EVICTION", clock=clock,
        eviction_config=HashZchEvictionConfig(["a", "b_readonly", "c"], per_feature_ttl=[1, 2, 0]),
    )  # fmt: skip


def mch() -> ManagedCollisionModule:
    return MCHManagedCollisionModule(ROWS, "cpu", DistanceLFU_EvictionPolicy(1.5), 3, buckets=3)


def admitting() -> ManagedCollisionModule:
    return MCHManagedCollisionModule(ROWS, "cpu", LFU_EvictionPolicy(), 1, buckets=2, admission_threshold=2)


def falling_back() -> ManagedCollisionModule:
    return HashZchManagedCollisionModule(ROWS, "cpu", 2)


def dropping() -> ManagedCollisionModule:
    return HashZchManagedCollisionModule(ROWS, "cpu", 2, eviction_policy_name="LFU_EVICTION", disable_fallback=True)


MODULES = {make.__name__: make for make in (lru, ttl, mch, admitting, falling_back, dropping)}


def users(kind: str, optimizer: OptimizerSpec | None, **options: Any) -> ManagedCollisionEmbeddingBagCollection:
    torch.manual_seed(3)
    configs = [
        EmbeddingBagConfig(ROWS, 4, "t", feature_names=["a", "b_readonly", "c"], **options),
        EmbeddingBagConfig(9, 3, "plain", feature_names=["p"]),
    ]
    made = ManagedCollisionEmbeddingBagCollection(
        EmbeddingBagCollection(configs), ManagedCollisionCollection({"t": MODULES[kind]()}, configs), True
    )
    if optimizer is not None:
        apply_optimizer_in_backward(optimizer, made.parameters())
    return made


def batch(step: int) -> KeyedJaggedTensor:
    """20 ids, of which some are old; as many in every step."""
    ids = torch.randint(0, 30 + 9 * step, (20,), generator=torch.Generator().manual_seed(step)) * 10**15 - 5
    lengths = torch.tensor([5, 0, 4, 3, 2, 3, 1, 2])
    ids[17:] = torch.tensor([1, 8, 3])
    return KeyedJaggedTensor(["a", "b_readonly", "c", "p"], ids, lengths=lengths, length_per_key=[5, 7, 5, 3])


def train(module: ManagedCollisionEmbeddingBagCollection) -> list[Tensor]:
    seen = []
    for step in range(STEPS):
        TIME[0] = step // 2
        out, remapped = module(batch(step))
        assert remapped is not None
        out.values().square().sum().backward()
        seen += [out.values().detach(), remapped.values(), remapped.lengths()]
    out, remapped = module.eval()(batch(1))
    assert remapped is not None
    module.train()
    return [*seen, out.values().detach(), remapped.values()]


def left(module: ManagedCollisionEmbeddingBagCollection) -> dict[str, Any]:
    """All that a run leaves."""
    optimizer = module.embedding_module.fused_optimizer.state_dict()["state"]
    found = {**module.state_dict(), **{f"{p} {n}": v for p, own in optimizer.items() for n, v in own.items()}}
    grads = {f"{name}.grad": p.grad for name, p in module.named_parameters() if p.grad is not None}
    return {**found, **grads}


@contextmanager
def on_device() -> Iterator[None]:
    """As if ids were on a device."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ManagedCollisionModule, "host_looks", property(lambda self: False))
        yield


def same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]) if isinstance(value, Tensor) else value == other[name], name


@pytest.mark.filterwarnings("ignore:Table 't':UserWarning")
@pytest.mark.parametrize("optimizer", [RowWiseAdagrad(lr=0.1), None])
@pytest.mark.parametrize("kind", MODULES)
def test_a_device_gives_the_bits_of_the_host(kind: str, optimizer: OptimizerSpec | None) -> None:
    host, device = users(kind, optimizer), users(kind, optimizer)
    seen = train(host)
    with on_device():
        for mine, theirs in zip(train(device), seen, strict=True):
            assert torch.equal(mine, theirs)
        found, stats, place = left(device), device.stats(), device.inspect("a", 10**15 - 5)
    same(found, left(host))
    assert stats == host.stats()
    assert place == host.inspect("a", 10**15 - 5)
    assert stats["t"].total.evictions > 3 or kind == "falling_back"


@pytest.mark.parametrize("data_type", [DataType.BF16, DataType.FP8])
def test_rows_of_any_type_begin_anew(data_type: DataType) -> None:
    host, device = (users("lru", Adam(lr=0.1), data_type=data_type) for _ in range(2))
    seen = train(host)
    with on_device():
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(train(device), seen, strict=True))


def test_rows_under_an_init_fn_begin_anew() -> None:
    host, device = (users("lru", RowWiseAdagrad(lr=0.1), init_fn=torch.nn.init.normal_) for _ in range(2))
    train(host)
    with on_device():
        train(device)
        found = left(device)
    same(found, left(host))


@pytest.mark.parametrize("kind", ["lru", "ttl", "mch", "admitting"])
def test_the_same_ops_again_are_the_next_step(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CUDA graph of the forward, as far as there can be one without a GPU."""
    host, device = (users(kind, RowWiseAdagrad(lr=0.1)) for _ in range(2))
    ids = device.managed_collision_collection
    monkeypatch.setattr(managed_collision, "capturing", lambda: True)
    place = batch(0)
    with torch.no_grad():
        for step in range(STEPS):
            TIME[0] = step // 2
            with on_device():
                ids.tick()
                if not step:
                    recorded = Recorded(lambda: device(place))
                else:
                    place.values().copy_(batch(step).values())
                    recorded.replay()
            pooled, remapped = host(batch(step))
            assert torch.equal(recorded.result[0].values(), pooled.values())
            assert torch.equal(recorded.result[1].values(), remapped.values())
    with on_device():
        found, stats = left(device), device.stats()
        assert ids.modules_by_table["t"].step == STEPS
    same(found, left(host))
    assert stats == host.stats()
    assert stats["t"].total.evictions > 3


def test_who_asks_for_lost_rows_gets_those_alone() -> None:
    """And what nobody asks for does not pile up."""
    module, host, lost = lru(), lru(), set()
    for own in (module, host):
        own.bind("t", ["a"])
    for step in range(30):
        ids = torch.arange(20) + 11 * step
        lost |= set(host.map(ids, [20], 0).evicted_M.tolist())
        with on_device():
            module.keep_evicted(module.map(ids, [20], 0).evicted_M)
            assert sum(part.numel() for part in module.evicted._parts) <= 2 * ROWS + 40
    with on_device():
        rows = module.evict()
        assert rows is not None
        assert set(rows.tolist()) == lost
        assert module.evict() is None
        module.keep_evicted(torch.full((9,), -1))
        assert module.evict() is None


def test_steps_go_where_the_ids_go() -> None:
    """What was counted on one device is counted on with another, and loaded there."""
    module, other = lru(), lru()
    for own in (module, other):
        own.bind("t", ["a"])
    for _ in range(3):
        module.map(torch.arange(4), [4], 0)
    module.to("cpu")  # as if to another device
    with on_device():
        assert module.step == 3
        module.map(torch.arange(4), [4], 0)
        assert int(module._step) == 3  # nobody told the host
        assert int(module.state_dict()["step"]) == 4
        other.load_state_dict(module.state_dict())
        other.map(torch.arange(4), [4], 0)
        assert other.last.max() == other.step == 5
        module.reset_parameters()
        assert module.step == 0
    assert module.step == 0
