"""Memory that is used again, but never while an array refers to it."""

from __future__ import annotations

import gc

import numpy as np
import torch

from tilerec.data.arena import Arena


def test_arrays_do_not_overlap() -> None:
    arena = Arena(chunk_bytes=1 << 12)
    arrays = [arena.empty(count, kind) for count in (1, 7, 100, 0, 600) for kind in (np.int8, np.float32, np.int64)]
    for number, array in enumerate(arrays):
        array.fill(number)
    assert all((array == number).all() for number, array in enumerate(arrays))
    assert all(array.ctypes.data % 16 == 0 for array in arrays if len(array))


def test_a_chunk_comes_back_when_no_tensor_refers_to_it() -> None:
    arena = Arena(chunk_bytes=1 << 12)
    kept = torch.from_numpy(arena.empty(256, np.int64))
    kept.fill_(7)
    for _ in range(20):
        arena.empty(256, np.int64).fill(9)
    assert (kept == 7).all()
    view = kept[3:]
    del kept
    gc.collect()
    for _ in range(20):
        arena.empty(512, np.int64).fill(9)
    assert (view == 7).all()


def test_freed_chunks_are_used_again() -> None:
    arena = Arena(chunk_bytes=1 << 16)
    places = set()
    for _ in range(50):
        array = arena.empty(1 << 13, np.int64)
        places.add(array.ctypes.data)
        del array
    assert len(places) <= 3


def test_take_and_joined_copy() -> None:
    arena = Arena()
    source = np.arange(10)
    assert arena.take(source, np.array([9, 0, 9])).tolist() == [9, 0, 9]
    assert arena.joined([source[:2], source[8:]]).tolist() == [0, 1, 8, 9]
