"""Initial values: the bits of a place in a table, also where a user's function draws them from torch's generators."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tilerec.errors import ConfigError
from tilerec.modules import initial_values as initial
from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.modules.initial_values import fill_initial
from tilerec.spec.table import EmbeddingBagConfig

KEY = (5, 7)


def offset_normal(rows: Tensor, row_offset: int) -> Tensor:
    """Draws from torch's generator and knows where it is."""
    return torch.randn(rows.shape, dtype=rows.dtype) + row_offset


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "in place": lambda rows: nn.init.normal_(rows),
    "by its result": lambda rows: torch.rand_like(rows),
    "with row_offset": offset_normal,
    "a part only": lambda rows: rows[: rows.shape[0] // 2].normal_(),
    "partial": functools.partial(nn.init.uniform_, a=-2.0, b=3.0),
    "builtin": torch.Tensor.normal_,
}


def config(rows: int, dim: int, init_fn: Callable[..., Any] | None, dtype: Any = "FP32") -> EmbeddingBagConfig:
    return EmbeddingBagConfig(rows, dim, "t", init_fn=init_fn, data_type=dtype)


def tile(table: EmbeddingBagConfig, r0: int, r1: int, c0: int, c1: int) -> Tensor:
    out = torch.full((r1 - r0, c1 - c0), 9.0, dtype=table.torch_dtype)
    fill_initial(out, table, KEY, r0, c0)
    return out


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(initial, "INIT_BLOCK", 8)


@pytest.mark.parametrize("dtype", ["FP32", "BF16"])
@pytest.mark.parametrize("dim", [1, 3, 257])
@pytest.mark.parametrize("init_fn", [None, *FUNCTIONS.values()], ids=["uniform", *FUNCTIONS])
def test_a_tile_has_the_bits_of_the_whole_table(init_fn: Callable[..., Any] | None, dim: int, dtype: str) -> None:
    table = config(27, dim, init_fn, dtype)
    whole = tile(table, 0, 27, 0, dim)
    assert whole.unique().numel() > 8
    for r0, r1 in ((0, 8), (0, 27), (3, 5), (7, 9), (8, 24), (13, 27), (26, 27), (9, 9)):
        for c0, c1 in ((0, dim), (dim // 2, dim), (0, (dim + 1) // 2)):
            assert torch.equal(tile(table, r0, r1, c0, c1), whole[r0:r1, c0:c1])


@pytest.mark.parametrize("init_fn", FUNCTIONS.values(), ids=FUNCTIONS)
def test_the_callers_generator_stays_as_it_was(init_fn: Callable[..., Any]) -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    tile(config(27, 3, init_fn), 5, 20, 0, 2)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_callers_generator_stays_as_it_was_when_the_function_raises() -> None:
    def fails(rows: Tensor) -> None:
        nn.init.normal_(rows)
        raise RuntimeError("no file")

    before = torch.get_rng_state()
    with pytest.raises(RuntimeError, match="no file"):
        tile(config(9, 3, fails), 0, 9, 0, 3)
    assert torch.equal(torch.get_rng_state(), before)


def test_blocks_and_tables_and_seeds_differ() -> None:
    def build(seed: int) -> EmbeddingBagCollection:
        torch.manual_seed(seed)
        return EmbeddingBagCollection(
            [EmbeddingBagConfig(16, 3, name, init_fn=nn.init.normal_) for name in ("one", "other")]
        )

    first, again, second = (dict(build(seed).named_parameters()) for seed in (1, 1, 2))
    one, other = first.values()
    assert all(torch.equal(first[name], again[name]) for name in first)
    different = [one[:8], one[8:], other[:8], other[8:], next(iter(second.values()))[:8]]
    for i, a in enumerate(different):
        assert not any(torch.equal(a, b) for b in different[:i])


def test_a_reset_writes_the_first_values_again_and_nothing_stays_of_others() -> None:
    for init_fn in FUNCTIONS.values():
        ebc = EmbeddingBagCollection([config(27, 3, init_fn)])
        first = ebc.embedding_bags["t"].weight.detach().clone()
        with torch.no_grad():
            ebc.embedding_bags["t"].weight.fill_(4.0)
        torch.rand(5)
        ebc.reset_parameters()
        assert torch.equal(ebc.embedding_bags["t"].weight, first)


def test_threads_that_initialise_at_once_do_not_disturb_each_other() -> None:
    started = threading.Barrier(4)

    def slow(rows: Tensor) -> None:
        for row in rows:
            row.normal_()

    table = config(200, 3, slow)
    want, got = tile(table, 0, 200, 0, 3), {}

    def run(i: int) -> None:
        started.wait()
        got[i] = tile(table, 0, 200, 0, 3)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(got[i], want) for i in range(4))


@pytest.mark.parametrize("place", [(0, 9, 0, 3), (2, 5, 1, 2)])
def test_a_result_of_another_shape_is_refused_whole_or_cut(place: tuple[int, int, int, int]) -> None:
    with pytest.raises(ConfigError, match=r"Table 't': init_fn returned shape \(2, 2\).*shape \(8, 3\)"):
        tile(config(9, 3, lambda rows: torch.zeros(2, 2)), *place)


def test_a_cut_of_a_block_takes_what_the_function_returned_in_another_type() -> None:
    table = config(9, 3, lambda rows: torch.randn(rows.shape, dtype=torch.float64), "BF16")
    assert torch.equal(tile(table, 1, 7, 1, 3), tile(table, 0, 9, 0, 3)[1:7, 1:3])
