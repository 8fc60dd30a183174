"""Memory that is used again, but never while an array refers to it."""

from __future__ import annotations

import gc

import numpy as np
import pyarrow as pa
import torch

from tilerec.data import pooled_memory


def test_arrays_do_not_overlap() -> None:
    arrays = [pooled_memory.empty(count, kind) for count in (1, 7, 0, 600) for kind in (np.int8, np.float32, np.int64)]
    for number, array in enumerate(arrays):
        array.fill(number)
    assert all((array == number).all() for number, array in enumerate(arrays))
    assert all(array.ctypes.data % 16 == 0 for array in arrays if len(array))


def test_memory_stays_while_a_tensor_refers_to_it() -> None:
    kept = torch.from_numpy(pooled_memory.empty(256, np.int64))
    kept.fill_(7)
    view = kept[3:]
    del kept
    gc.collect()
    for _ in range(200):
        pooled_memory.empty(256, np.int64).fill(9)
    assert (view == 7).all()


def test_blocks_come_back_when_no_tensor_refers_to_them() -> None:
    blocks = pooled_memory.Blocks()
    kept = torch.from_numpy(blocks.empty(1 << 17, np.int64)[5:])
    kept.fill_(7)
    places = set()
    for _ in range(20):
        array = blocks.empty(1 << 17, np.int64)
        array.fill(9)
        places.add(array.ctypes.data)
        del array
        gc.collect()
    assert (kept == 7).all()
    assert len(places) == 1
    place = kept.data_ptr() - 40
    del kept
    gc.collect()
    again = [blocks.empty((1 << 17) - 3, np.int64) for _ in range(2)]
    assert place in {array.ctypes.data for array in again}


def test_blocks_that_stay_free_are_returned() -> None:
    blocks = pooled_memory.Blocks()
    before = pa.total_allocated_bytes()
    held = [blocks.empty(1 << 20, np.int8) for _ in range(10)]
    assert pa.total_allocated_bytes() == before + (10 << 20)
    del held
    gc.collect()
    blocks.begin_round()
    used = blocks.empty(1 << 20, np.int8)
    assert pa.total_allocated_bytes() == before + (10 << 20)
    blocks.begin_round()
    assert pa.total_allocated_bytes() == before + (1 << 20)
    del used
    gc.collect()
    blocks.begin_round()
    blocks.begin_round()
    assert pa.total_allocated_bytes() == before


def test_joined_copies() -> None:
    source = np.arange(10)
    both = pooled_memory.joined([source[:2], source[8:]])
    source.fill(0)
    assert both.tolist() == [0, 1, 8, 9]
