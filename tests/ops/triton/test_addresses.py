"""One kernel, many tensors: distances, alignments, numbers on the device."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tilerec.ops.lookup.triton import backend as lookup
from tilerec.ops.random.triton import backend as random
from tilerec.ops.runtime import upload as sending
from tilerec.ops.runtime.triton.addresses import (
    base,
    cached_per_stream,
    constants,
    distances,
    upload,
)
from tilerec.ops.runtime.triton.rows import reads
from tilerec.ops.update.triton import tables as update_tables

CPU = torch.device("cpu")


def test_a_tensor_is_found_at_its_distance_from_the_base() -> None:
    flat = torch.arange(100.0)
    tensors = [flat[40:60], flat[:0], flat[8:20].view(3, 4), flat[60:]]
    assert base(tensors) is tensors[0]
    assert distances(tensors) == [0, 0, -32, 20]


def test_tensors_of_separate_storages_lie_whole_elements_apart() -> None:
    tensors = [torch.zeros(7), torch.zeros(5, 3), torch.zeros(1)]
    for tensor, distance in zip(tensors, distances(tensors), strict=True):
        assert tensors[0].data_ptr() + 4 * distance == tensor.data_ptr()


def test_distances_count_from_the_first_tensor_that_has_memory() -> None:
    flat = torch.zeros(30)
    tensors = [torch.zeros(0, 4), flat[10:20], flat[:5]]
    assert base(tensors) is tensors[1]
    assert distances(tensors) == [0, 0, -10]
    assert distances([torch.zeros(0, 4)]) == [0]


def test_constants_are_made_once_and_uploads_every_time() -> None:
    assert constants((1, 2, 2**40), CPU) is constants((1, 2, 2**40), CPU)
    assert constants((), CPU).tolist() == []
    assert constants((1, 2, 2**40), CPU).tolist() == [1, 2, 2**40]
    one, other = upload([3, -1], CPU), upload([3, -1], CPU)
    assert one.tolist() == other.tolist() == [3, -1]
    one[0] = 5
    assert other.tolist() == [3, -1]


def test_arrays_are_uploaded_too() -> None:
    sent = upload(np.array([3, 4], dtype=np.int64), CPU)
    assert sent.dtype == torch.int64
    assert sent.tolist() == [3, 4]
    assert upload([], CPU).dtype == torch.int64


def test_what_a_stream_sends_is_made_once_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another stream would not wait for it, and its memory would be used again before the other has read it."""
    made: list[int] = []

    @cached_per_stream(2)
    def layout(number: int) -> list[int]:
        made.append(number)
        return [number]

    stream = 0
    monkeypatch.setattr(sending, "current_stream", lambda: stream)
    first = layout(1)
    assert layout(1) is first
    stream = 1
    assert layout(1) is not first
    assert made == [1, 1]
    layout(2)  # the oldest goes
    stream = 0
    assert layout(1) is not first
    assert made == [1, 1, 2, 1]


def test_what_a_graph_captures_sending_is_not_kept_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its copy runs when the graph is replayed, so until then there is nothing in it."""
    capturing = True
    monkeypatch.setattr(sending, "capturing", lambda: capturing)
    monkeypatch.setattr(sending, "_OF_GRAPHS", [])

    @cached_per_stream(2)
    def layout(number: int) -> list[int]:
        return [number]

    in_graph = layout(1)
    assert sending._OF_GRAPHS == []
    capturing = False
    before = layout(1)
    assert before is not in_graph
    capturing = True
    monkeypatch.setattr(sending, "current_stream", lambda: 7)
    assert layout(1) is before
    assert [before] == sending._OF_GRAPHS  # graphs hold no references


def test_rows_of_e4m3_are_left_to_the_reference_where_gpus_do_not_convert_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A kernel that converts them does not compile there: neither lookups nor updates nor initial values."""
    fp8, device = torch.float8_e4m3fn, torch.device("cuda", 0)
    for version, capability, served in (
        ("12.8", (8, 0), False),
        ("12.8", (8, 9), True),
        ("12.8", (9, 0), True),
        (None, (9, 4), False),
    ):
        monkeypatch.setattr(torch.version, "cuda", version)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        reads.cache_clear()
        assert reads(fp8, device) == served
        assert reads(torch.bfloat16, device)
    reads.cache_clear()
    assert reads(fp8, CPU)
    assert lookup.reads is update_tables.reads is random.reads is reads
