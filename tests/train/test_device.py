"""The device "auto": a GPU if every rank of the machine has one."""

from __future__ import annotations

import pytest
import torch

from tilerec.train.config import TrainConfig
from tilerec.train.device import resolved_device, run_device


@pytest.mark.parametrize(
    ("gpus", "local_ranks", "expected"),
    [(0, 1, "cpu"), (1, 1, "cuda"), (1, 2, "cpu"), (8, 8, "cuda"), (8, None, "cpu")],
)
def test_auto_is_a_gpu_if_there_is_one_for_each_rank(
    monkeypatch: pytest.MonkeyPatch, gpus: int, local_ranks: int | None, expected: str
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert resolved_device("auto", local_ranks) == expected
    assert resolved_device("cuda:1", local_ranks) == "cuda:1"


def test_ranks_that_do_not_know_their_place_share_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert run_device(TrainConfig().device, 2) == torch.device("cpu")
