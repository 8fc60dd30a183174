"""Devices that are not here: said before a model is changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.parallel.test_shard import bags, raised
from tilerec.comms.group import Group
from tilerec.errors import ConfigError
from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.parallel.device import device_of
from tilerec.parallel.env import ShardingEnv
from tilerec.parallel.model_parallel import DistributedModelParallel
from tilerec.parallel.shard import shard
from tilerec.planner.helpers import row_wise


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`gpus(2)`: torch says that it finds two."""

    def set_count(count: int) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: count > 0)

    return set_count


def test_a_gpu_where_there_is_none_is_refused_with_what_to_pass(gpus: Any) -> None:
    gpus(0)
    for device in (0, 3, -1, "cuda", "cuda:0", torch.device("cuda", 1)):
        with pytest.raises(ConfigError, match=r"who: device=.* finds none here; pass device='cpu'"):
            device_of(device, "who")
    assert device_of("cpu", "who") == device_of(torch.device("cpu"), "who") == torch.device("cpu")


def test_a_gpu_beyond_those_that_are_there_is_refused_with_their_number(gpus: Any) -> None:
    gpus(2)
    for device in (2, "cuda:2", torch.device("cuda", 7)):
        with pytest.raises(ConfigError, match=r"finds 2 GPUs here, .*pass cuda:1 or less .*LOCAL_RANK"):
            device_of(device, "who")
    assert device_of("cuda:1", "who") == torch.device("cuda:1")
    assert device_of("cuda", "who") == torch.device("cuda")


def test_what_is_no_device_is_refused() -> None:
    for device in ("gpu", "cpu:x", 1.5):
        with pytest.raises(ConfigError, match=r"device: got .*, which torch rejects"):
            device_of(device, "who")  # type: ignore[arg-type]


def test_a_wrapped_model_on_a_device_that_is_not_here_stays_as_it_was(gpus: Any) -> None:
    gpus(0)
    model = bags()
    with pytest.raises(ConfigError, match="DistributedModelParallel: device=0 is the index of an accelerator"):
        DistributedModelParallel(model, ShardingEnv.from_local(1, 0), device=0)
    assert type(model) is EmbeddingBagCollection
    assert DistributedModelParallel(model, ShardingEnv.from_local(1, 0), device="cpu").device.type == "cpu"


def test_a_rank_whose_device_is_not_here_is_heard_by_the_others(gpus: Any) -> None:
    gpus(0)

    def run(group: Group) -> None:
        shard(bags(), row_wise(), group, f"cuda:{group.rank}" if group.rank else "cpu")

    assert "device='cuda:1' is a GPU" in raised(2, run)
