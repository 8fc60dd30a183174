"""`capturable`: update counts and learning rates as tensors give the bits that numbers give; captures are kept right.

The same updates run on a GPU under CUDA graphs (`tests/cuda/test_capture.py`); here everything but the capture itself.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.optim.lr_scheduler import ExponentialLR, StepLR

from tests.optim.capturable_specs import SPECS
from tilerec.errors import ConfigError
from tilerec.modules.cached_tables import cache_tables
from tilerec.modules.embedding import EmbeddingCollection
from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.optim.attach import apply_optimizer_in_backward
from tilerec.optim.loading_plan import write_setting
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from tilerec.spec.optimizer import (
    SGD,
    Adam,
    OptimizerSpec,
)
from tilerec.spec.table import EmbeddingBagConfig, EmbeddingConfig
from tilerec.storage import shared_param_group as hyper_group
from tilerec.storage import table_rows


def batch(step: int, keys: str = "xy") -> KeyedJaggedTensor:
    generator = torch.Generator().manual_seed(step)
    lengths = torch.randint(0, 4, (len(keys) * 3,), generator=generator)
    ids = torch.randint(0, 5, (int(lengths.sum()),), generator=generator)
    return KeyedJaggedTensor(list(keys), ids, lengths=lengths)


def collection(dtype: torch.dtype = torch.float32, device: str = "cpu") -> EmbeddingBagCollection:
    torch.manual_seed(3)
    return EmbeddingBagCollection(
        [
            EmbeddingBagConfig(7, 4, "a", feature_names=["x", "y"], dtype=dtype),
            EmbeddingBagConfig(5, 9, "b", feature_names=["x"], dtype=dtype),
        ],
        device=torch.device(device),
    )


def step(module: Any, number: int) -> None:
    module(batch(number)).values().float().square().sum().backward()


def left(module: Any) -> list[Tensor]:
    """Rows and states; counts are there like any state."""
    state = module.fused_optimizer.state_dict()["state"]
    return [p.detach() for p in module.parameters()] + [
        value for own in state.values() for _, value in sorted(own.items())
    ]


def assert_same_bits(one: Any, other: Any) -> None:
    mine, theirs = left(one), left(other)
    assert len(mine) == len(theirs)
    for a, b in zip(mine, theirs, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


WIDE = [(name, torch.float64) for name in ("adamw",)]


@pytest.mark.parametrize(
    ("name", "dtype"), [*[(n, t) for n in SPECS for t in (torch.float32, torch.bfloat16)], *WIDE], ids=str
)
def test_every_rule_has_the_bits_it_has_by_numbers(name: str, dtype: torch.dtype) -> None:
    """Float64 tables go to the reference, the others to the native library; bfloat16 rounds at random."""
    runs = []
    for capturable, lr in ((False, 0.1), (True, 0.1), (True, torch.tensor(0.1, dtype=torch.float64))):
        module = collection(dtype)
        spec = replace(SPECS[name], capturable=capturable)
        settings = {key: value for key, value in spec.to_json().items() if key not in ("optimizer", "lr")}
        apply_optimizer_in_backward(type(spec), module.parameters(), {"lr": lr, **settings})
        group = module.fused_optimizer.param_groups[0]
        for number, rate in enumerate((0.1, 0.05, 0.2)):
            write_setting(group, "lr", rate)  # what schedulers do
            step(module, number)
        assert (group["lr"] is lr) == isinstance(lr, Tensor)
        runs.append(module)
    assert_same_bits(runs[0], runs[1])
    assert_same_bits(runs[0], runs[2])


@pytest.mark.parametrize("schedule", [lambda o: StepLR(o, 1, gamma=0.5), lambda o: ExponentialLR(o, 0.9)])
@pytest.mark.parametrize("tensor", [False, True])
def test_torchs_schedulers_drive_numbers_and_tensors_alike(schedule: Callable[[Any], Any], tensor: bool) -> None:
    runs = []
    for capturable in (False, True):
        module = collection()
        lr = torch.tensor(0.1, dtype=torch.float64) if tensor and capturable else 0.1
        apply_optimizer_in_backward(Adam, module.parameters(), {"lr": lr, "capturable": capturable})
        face = module.fused_optimizer
        scheduler = schedule(face)
        for number in range(4):
            step(module, number)
            face.step()
            scheduler.step()
        assert float(face.param_groups[0]["lr"]) < 0.1
        assert isinstance(face.param_groups[0]["lr"], Tensor) == (tensor and capturable)
        runs.append(module)
    assert_same_bits(*runs)


def test_a_number_written_to_lr_is_where_updates_read_it_at_once() -> None:
    """Replays run nothing of the host: what is written between them must have arrived."""
    module = collection()
    apply_optimizer_in_backward(Adam, module.parameters(), {"lr": 0.5, "capturable": True})
    rows = module.embedding_bags["a"].rows
    rate = rows.rate(torch.device("cpu"))
    assert rate.item() == 0.5
    module.fused_optimizer.param_groups[0]["lr"] = 0.25
    assert rate.item() == 0.25
    assert rows.rate(torch.device("cpu")) is rate
    with pytest.raises(ConfigError, match="got lr=-1"):
        module.fused_optimizer.param_groups[0]["lr"] = -1
    assert rate.item() == 0.25


def test_captured_graphs_keep_their_tensors() -> None:
    """Counts, rates and slots stay the same tensors over steps, state dicts, loads and other numbers written."""
    module = collection()
    apply_optimizer_in_backward(Adam, module.parameters(), {"lr": 0.1, "capturable": True})
    rows = module.embedding_bags["b"].rows

    def read() -> list[int]:
        cpu = torch.device("cpu")
        return [t.data_ptr() for t in (rows.count_on(cpu), rows.rate(cpu), *rows.slots)]

    before = read()
    step(module, 0)
    face = module.fused_optimizer
    face.save_param_groups(True)
    saved = copy.deepcopy(face.state_dict())
    step(module, 1)
    face.param_groups[0]["lr"] = 0.3
    face.param_groups[0]["weight_decay"] = 0.1
    step(module, 2)
    face.load_state_dict(saved)
    module.float()
    assert read() == before
    assert rows.updates == 1
    assert face.param_groups[0]["lr"] == rows.rate(torch.device("cpu")).item() == 0.1


@pytest.mark.parametrize("first", [False, True])
def test_state_is_the_same_and_loads_into_the_other(first: bool) -> None:
    """Half a run by numbers and half by tensors, or the other way round."""
    whole, half, rest = collection(), collection(), collection()
    for module, capturable in ((whole, False), (half, first), (rest, not first)):
        apply_optimizer_in_backward(Adam(lr=0.1, capturable=capturable), module.parameters())
    for number in range(4):
        step(whole, number)
        step(half if number < 2 else rest, number) if number != 1 else step(half, number)
        if number == 1:
            saved = io.BytesIO()
            state = half.fused_optimizer.state_dict()
            own = next(iter(state["state"].values()))
            assert own["step"].dtype == torch.int64
            assert own["step"].shape == ()
            torch.save({"model": half.state_dict(), "optimizer": state}, saved)
            saved.seek(0)
            loaded = torch.load(saved, weights_only=True)
            rest.load_state_dict(loaded["model"])
            rest.fused_optimizer.load_state_dict(loaded["optimizer"])
    assert_same_bits(whole, rest)


def test_a_table_of_several_lookups_is_counted_once_per_pass() -> None:
    runs = []
    for capturable in (False, True):
        torch.manual_seed(5)
        bags = EmbeddingBagCollection([EmbeddingBagConfig(7, 4, "a", feature_names=["x", "y"])])
        rows = EmbeddingCollection([EmbeddingConfig(7, 4, "a", feature_names=["y"])])
        rows.embeddings["a"] = bags.embedding_bags["a"]
        apply_optimizer_in_backward(Adam(lr=0.1, capturable=capturable), bags.parameters())
        for number in range(3):
            own = batch(number)
            total = bags(own).values().sum() + bags(own).values().square().sum()
            (total + rows(own)["y"].values().sum()).backward()
        assert bags.embedding_bags["a"].rows.updates == 3
        runs.append(bags)
    assert_same_bits(*runs)


def test_an_update_that_failed_is_not_counted() -> None:
    module = collection()
    apply_optimizer_in_backward(Adam(lr=0.1, capturable=True), module.parameters())
    rows = module.embedding_bags["a"].rows
    whole, rows.state["exp_avg"] = rows.state["exp_avg"], torch.zeros(2, 3)
    with pytest.raises(Exception, match=r"slot|shape"):
        step(module, 0)
    assert [table.rows.updates for table in module.embedding_bags.values()] == [0, 0]
    rows.state["exp_avg"] = whole
    step(module, 0)
    assert [table.rows.updates for table in module.embedding_bags.values()] == [1, 1]


def test_groups_with_equal_numbers_keep_their_own_rates() -> None:
    module = collection()
    rates = [torch.tensor(0.1), torch.tensor(0.1)]
    for parameter, lr in zip(module.parameters(), rates, strict=True):
        apply_optimizer_in_backward(SGD, [parameter], {"lr": lr, "capturable": True})
    before = [p.detach().clone() for p in module.parameters()]
    rates[0].fill_(0.0)
    module(batch(0)).values().sum().backward()
    after = [p.detach() for p in module.parameters()]
    assert torch.equal(before[0], after[0])
    assert not torch.equal(before[1], after[1])


@pytest.mark.parametrize("tensor", [False, True])
def test_copies_and_pickles_go_on_by_tensors_of_their_own(tensor: bool) -> None:
    module = collection()
    lr = torch.tensor(0.1) if tensor else 0.1
    apply_optimizer_in_backward(Adam, module.parameters(), {"lr": lr, "capturable": True})
    step(module, 0)
    twins = [copy.deepcopy(module), pickle.loads(pickle.dumps(module))]
    step(module, 1)
    for twin in twins:
        assert [table.rows.updates for table in twin.embedding_bags.values()] == [1, 1]
        step(twin, 1)
        assert_same_bits(module, twin)
        write_setting(twin.fused_optimizer.param_groups[0], "lr", 0.5)
    assert float(module.fused_optimizer.param_groups[0]["lr"]) == pytest.approx(0.1)


def test_tables_without_memory_get_theirs_with_their_counts() -> None:
    module, other = collection(device="meta"), collection()
    for own in (module, other):
        apply_optimizer_in_backward(Adam(lr=0.1, capturable=True), own.parameters())
    module.to_empty(device="cpu")
    module.load_state_dict(other.state_dict())
    for own in (module, other):
        step(own, 0)
    assert_same_bits(module, other)


def test_cached_tables_count_where_they_are_updated() -> None:
    runs = []
    for capturable in (False, True):
        module = collection()
        apply_optimizer_in_backward(Adam(lr=0.1, capturable=capturable), module.parameters())
        cache_tables(module, load_factor=1.0)
        for number in range(3):
            step(module, number)
        runs.append(module)
    assert_same_bits(*runs)


def test_a_group_that_becomes_capturable_or_is_so_no_more_goes_on() -> None:
    module, other = collection(), collection()
    for own in (module, other):
        apply_optimizer_in_backward(Adam(lr=0.1), own.parameters())
    for number, capturable in enumerate((False, True, True, False)):
        module.fused_optimizer.param_groups[0]["capturable"] = capturable
        step(module, number)
        step(other, number)
    assert_same_bits(module, other)


# ---------------------------------------------------------------------------------------------------- captures


@pytest.fixture
def capture(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Says whether a graph is being captured; nothing is."""
    now = [False]
    for module in (hyper_group, table_rows):
        monkeypatch.setattr(module, "capturing", lambda: now[0])

    def say(capturing: bool) -> None:
        now[0] = capturing

    return say


@pytest.mark.parametrize("spec", [Adam(lr=0.1), SGD(lr=0.1)], ids=repr)
def test_a_capture_by_numbers_is_refused_and_says_what_to_pass(
    spec: OptimizerSpec, capture: Callable[[bool], None]
) -> None:
    module = collection()
    apply_optimizer_in_backward(spec, module.parameters())
    before = [p.detach().clone() for p in module.parameters()]
    capture(True)
    words = r"Table 'a' \(and 1 more\): its update by \w+ is captured .*Attach the optimizer with {'capturable': True}"
    with pytest.raises(ConfigError, match=words):
        step(module, 0)
    assert all(map(torch.equal, before, module.parameters()))
    assert module.embedding_bags["a"].rows.updates == 0


def test_what_a_capture_would_freeze_is_told(capture: Callable[[bool], None]) -> None:
    module = collection()
    apply_optimizer_in_backward(Adam(lr=0.1, capturable=True), module.parameters())
    group = module.fused_optimizer.param_groups[0]
    capture(True)
    step(module, 0)
    with pytest.raises(ConfigError, match="lr was written during the capture"):
        group["lr"] = 0.3
    capture(False)
    group["lr"] = 0.2  # replays read it
    group["weight_decay"] = 0.0  # as it was
    with pytest.warns(UserWarning, match=r"Adam: weight_decay was written after .*keep the old value\. Capture again"):
        group["weight_decay"] = 0.1
    with pytest.warns(
        UserWarning, match=r"lr was written after .*Write the new value into the old tensor with fill_\(\)"
    ):
        group["lr"] = torch.tensor(0.3)
    write_setting(group, "lr", 0.4)  # in place


def test_a_rate_that_is_not_on_the_device_yet_is_not_made_in_a_capture(
    capture: Callable[[bool], None],
) -> None:
    group = hyper_group.SharedParamGroup.of(Adam(lr=0.1, capturable=True))
    capture(True)
    with pytest.raises(ConfigError, match="Run a step before the capture"):
        group.rate(torch.device("cpu"))
    capture(False)
    assert group.rate(torch.device("cpu")).item() == 0.1


def test_rates_that_are_none_are_refused() -> None:
    module = collection()
    with pytest.raises(ConfigError, match="lr"):
        apply_optimizer_in_backward(Adam, module.parameters(), {"lr": torch.ones(2), "capturable": True})
    with pytest.raises(ConfigError, match="expected one floating-point number"):
        apply_optimizer_in_backward(Adam, module.parameters(), {"lr": torch.tensor(1), "capturable": True})
    with pytest.raises(ConfigError, match="got capturable='yes'; expected True or False"):
        Adam(lr=0.1, capturable="yes")  # type: ignore[arg-type]
    apply_optimizer_in_backward(Adam, module.parameters(), {"lr": torch.ones(1), "capturable": True})
    step(module, 0)  # torch takes such tensors, too
    module.fused_optimizer.param_groups[0]["lr"] = torch.empty((), device="meta")
    with pytest.raises(ConfigError, match=r"got lr as a tensor on meta; expected it on cpu, where its tables are"):
        step(module, 0)


def test_a_tensor_without_capturable_is_read_once() -> None:
    module = collection()
    lr = torch.tensor(0.5)
    apply_optimizer_in_backward(Adam, module.parameters(), {"lr": lr})
    group = module.fused_optimizer.param_groups[0]
    assert group["lr"] == 0.5
    group["lr"] = torch.tensor(0.25)
    assert type(group["lr"]) is float


# ------------------------------------------------------------------------------------------------------- loads


@pytest.mark.parametrize("tensor", [False, True])
@pytest.mark.parametrize("saved", [False, True])
def test_whether_updates_are_captured_is_not_loaded(saved: bool, tensor: bool) -> None:
    """A graph that was captured before a load goes on by its counts and its rate."""
    old, new = collection(), collection()
    apply_optimizer_in_backward(Adam(lr=0.5, capturable=saved), old.parameters())
    lr = torch.tensor(0.1) if tensor and not saved else 0.1
    apply_optimizer_in_backward(Adam, new.parameters(), {"lr": lr, "capturable": not saved})
    step(old, 0)
    faces = old.fused_optimizer, new.fused_optimizer
    for face in faces:
        face.save_param_groups(True)
    faces[1].load_state_dict(faces[0].state_dict())
    new.load_state_dict(old.state_dict())
    group = faces[1].param_groups[0]
    assert group["capturable"] is not saved
    assert group["lr"] == 0.5
    assert (group["lr"] is lr) == isinstance(lr, Tensor)
    for module in (old, new):
        step(module, 1)
    assert_same_bits(old, new)


def test_a_group_that_is_capturable_no_more_hears_of_its_rate() -> None:
    module = collection()
    apply_optimizer_in_backward(Adam, module.parameters(), {"lr": torch.tensor(0.1), "capturable": True})
    group = module.fused_optimizer.param_groups[0]
    group["capturable"] = False
    step(module, 0)
    before = [p.detach().clone() for p in module.parameters()]
    write_setting(group, "lr", 0.0)  # what schedulers do
    step(module, 1)
    assert all(map(torch.equal, before, module.parameters()))


@pytest.mark.parametrize("tensor", [False, True])
def test_torchs_distributed_checkpoints_take_and_load_it_in_place(tensor: bool, tmp_path: Path) -> None:
    def made() -> EmbeddingBagCollection:
        module = collection()
        lr = torch.tensor(0.1) if tensor else 0.1
        apply_optimizer_in_backward(Adam, module.parameters(), {"lr": lr, "capturable": True})
        return module

    old, new = made(), made()
    step(old, 0)
    faces = old.fused_optimizer, new.fused_optimizer
    write_setting(faces[0].param_groups[0], "lr", 0.5)
    for face in faces:
        face.save_param_groups(True)
    rows = new.embedding_bags["a"].rows

    def places() -> list[int]:
        return [t.data_ptr() for t in (*rows.state.values(), rows.rate(torch.device("cpu")))]

    before = places()
    dcp.save({"model": old.state_dict(), "optimizer": faces[0].state_dict()}, checkpoint_id=tmp_path, no_dist=True)
    state = {"model": new.state_dict(), "optimizer": faces[1].state_dict()}
    dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    new.load_state_dict(state["model"])
    faces[1].load_state_dict(state["optimizer"])
    assert places() == before
    assert rows.rate(torch.device("cpu")).item() == 0.5
    for module in (old, new):
        step(module, 1)
    assert_same_bits(old, new)
