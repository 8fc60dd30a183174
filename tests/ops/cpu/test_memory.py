"""Reused memory: what is freed is taken again, what is held is left alone, and tensors in it are like any other."""

from __future__ import annotations

import copy
import pickle
import threading

import pytest
import torch

from tilerec.ops.runtime.cpu import memory
from tilerec.ops.runtime.cpu.memory import reused_empty, size_class

SHAPE = (300, 100)


@pytest.fixture(autouse=True)
def small_and_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "MIN_REUSED_BYTES", 64)
    monkeypatch.setattr(memory, "_BLOCKS", memory._Blocks())


@pytest.mark.parametrize("size", [64, 65, 1000, 4096, 4097, 27 << 20, (1 << 33) + 1])
def test_a_size_class_holds_its_size_and_hardly_more(size: int) -> None:
    assert size <= size_class(size) <= size * 9 / 8 + 1
    assert size_class(size_class(size)) == size_class(size)


def test_memory_comes_back_when_the_last_view_is_gone() -> None:
    first = reused_empty(SHAPE, torch.float32)
    place, view = first.data_ptr(), first[1:]
    del first
    other = reused_empty(SHAPE, torch.float32)
    assert other.data_ptr() != place, "a view still reads this memory"
    del view
    assert reused_empty(SHAPE, torch.float32).data_ptr() == place


def test_memory_that_autograd_saved_is_not_given_away() -> None:
    x = reused_empty(SHAPE, torch.float32).fill_(3.0).requires_grad_()
    y = x * x
    held = x.data_ptr()
    loss = y.sum()
    del x
    assert reused_empty(SHAPE, torch.float32).data_ptr() != held
    (grad,) = torch.autograd.grad(loss, [loss.grad_fn.next_functions[0][0].next_functions[0][0].variable])
    assert torch.equal(grad, torch.full(SHAPE, 6.0))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int8])
def test_a_tensor_in_reused_memory_is_like_any_other(dtype: torch.dtype) -> None:
    tensor = reused_empty(SHAPE, dtype).fill_(7)
    assert tensor.shape == SHAPE
    assert tensor.is_contiguous()
    for twin in (copy.deepcopy(tensor), pickle.loads(pickle.dumps(tensor)), tensor.clone()):
        assert torch.equal(twin, tensor)
        assert twin.data_ptr() != tensor.data_ptr()
    tensor.share_memory_()
    assert bool((tensor == 7).all())


def test_small_empty_and_foreign_tensors_are_torchs_own() -> None:
    assert reused_empty(3, torch.float32).untyped_storage().resizable()
    assert reused_empty((0, 5), torch.float32).shape == (0, 5)
    assert reused_empty(SHAPE, torch.float32, torch.device("meta")).is_meta


def test_no_more_free_memory_is_kept_than_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "MAX_FREE_BYTES", 3 * size_class(120_000))
    tensors = [reused_empty(SHAPE, torch.float32) for _ in range(7)]
    del tensors
    assert memory._BLOCKS.kept() == 3 * size_class(120_000)


def test_threads_never_get_each_others_memory() -> None:
    wrong = []

    def work(mark: int) -> None:
        for _ in range(50):
            tensor = reused_empty(SHAPE, torch.int64).fill_(mark)
            if not bool((tensor == mark).all()):
                wrong.append(mark)

    threads = [threading.Thread(target=work, args=(mark,)) for mark in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
