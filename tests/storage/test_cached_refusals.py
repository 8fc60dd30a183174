"""Uses of cached tables that are refused, with the way out."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.storage.cached_tables import (
    KEYS,
    batch,
    ebc,
    everything,
    output,
)
from tilerec import (
    CacheParams,
    ConfigError,
    KeyedJaggedTensor,
    cache_tables,
    uncache_tables,
)
from tilerec.spec.optimizer import (
    SGD,
)
from tilerec.storage import row_cache


def test_a_table_without_an_optimizer_is_read_and_not_trained() -> None:
    plain, other = ebc(None), cache_tables(ebc(None), 0.15)
    kjt = batch(random.Random(15))
    with torch.no_grad():
        assert torch.equal(output(plain, kjt), output(other, kjt))
    with pytest.raises(ConfigError, match=r"Table 'a': it is cached and has no attached optimizer.*requires_grad_"):
        output(other, kjt)
    other.requires_grad_(False)
    assert torch.equal(output(plain, kjt), output(other, kjt))


def test_asking_autograd_for_a_cached_tables_gradient_is_an_error() -> None:
    module = cache_tables(ebc(SGD(0.1)), 0.15)
    out = output(module, batch(random.Random(16)))
    with pytest.raises(RuntimeError, match="cached table"):
        torch.autograd.grad(out.sum(), [module.embedding_bags["a"].weight])


def test_a_second_backward_is_an_error_and_updates_nothing() -> None:
    module = cache_tables(ebc(SGD(0.1)), 0.15)
    out = output(module, batch(random.Random(17))).sum()
    out.backward(retain_graph=True)
    before = everything(module)
    with pytest.raises(RuntimeError, match="a second time"):
        out.backward()
    for a, b in zip(before, everything(module), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("load_factor", [0.0, -0.1, 1.5, float("nan"), "0.2", True])
def test_a_load_factor_outside_its_range_is_refused(load_factor: Any) -> None:
    with pytest.raises(ConfigError, match=r"got load_factor=.*above 0 and at most 1"):
        cache_tables(ebc(None), load_factor)
    with pytest.raises(ConfigError, match="load_factor"):
        CacheParams(load_factor=load_factor)


def test_words_that_say_nothing_are_refused_or_warned_about() -> None:
    with pytest.raises(ConfigError, match="CacheAlgorithm"):
        cache_tables(ebc(None), 0.2, "mru")
    with pytest.raises(ConfigError, match="without tables"):
        cache_tables(nn.Linear(1, 1))
    with pytest.raises(ConfigError, match="reserved_memory"):
        CacheParams(reserved_memory=-1.0)
    with pytest.warns(UserWarning, match="precision"):
        CacheParams(precision="FP16")
    assert CacheParams.from_json(CacheParams("lfu", 0.5, 8.0).to_json()) == CacheParams("lfu", 0.5, 8.0)


def test_no_memory_for_the_lines_is_told_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    module, kjt = cache_tables(ebc(SGD(0.1)), 0.2), batch(random.Random(18))

    def none(*args: Any, **kwargs: Any) -> Tensor:
        raise RuntimeError("not enough memory")

    monkeypatch.setattr(row_cache.torch, "empty", none)
    message = r"Table 'a': no memory on cpu for 64 cache lines of 32 bytes"
    with torch.no_grad(), pytest.raises(ConfigError, match=message):
        module(kjt)


def test_export_is_refused_with_the_way_out() -> None:
    module, kjt = cache_tables(ebc(SGD(0.1)), 0.2), batch(random.Random(35))

    class Whole(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, values: Tensor, lengths: Tensor) -> Tensor:
            return self.inner(KeyedJaggedTensor(KEYS, values, lengths=lengths)).values()

    args = (kjt.values(), kjt.lengths())
    with pytest.raises(ConfigError, match=r"uncache_tables\(copy\.deepcopy\(module\)\)"):
        torch.export.export(Whole(module), args, strict=False)
    program = torch.export.export(Whole(uncache_tables(copy.deepcopy(module))), args, strict=False)
    assert torch.equal(program.module()(*args), output(module, kjt))
