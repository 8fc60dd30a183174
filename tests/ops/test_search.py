"""`best_rows`: the order of scores and places, ranges, words and bad input, by every backend alike."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tilerec.errors import ConfigError, InputError
from tilerec.ops import backends as backends
from tilerec.ops.runtime.cpu.library import library
from tilerec.ops.runtime.library import LIBRARY
from tilerec.ops.search.definition import MOST_COLUMNS, quantized

REFERENCE = LIBRARY.references["best_rows"]
BEST = torch.ops.tilerec.best_rows


@pytest.fixture(params=[0, 1, 2], ids=["base", "avx2", "avx512"])
def level(request: pytest.FixtureRequest) -> Iterator[int]:
    native = library()
    if native is None:
        pytest.skip("the native library does not serve")
    before = native.tr_isa()
    if native.tr_isa_choose(request.param) != request.param:
        native.tr_isa_choose(before)
        pytest.skip("this machine lacks the instruction set")
    yield request.param
    native.tr_isa_choose(before)


def call(
    batch: int, rows: int, dim: int, k: int, ranges: int, int8: bool, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, int]:
    """Arguments with many equal scores; float32 numbers are small integers, whose sums are exact in any order."""
    draw = torch.Generator().manual_seed(seed)
    table = torch.randint(-3, 4, (rows, dim), generator=draw).float()
    query = torch.randint(-3, 4, (batch, dim), generator=draw).float()
    scale = torch.zeros(0)
    if int8:
        query = torch.randn(batch, dim, generator=draw)
        table, scale = quantized(table)
    words = torch.randint(0, 4, (rows,), generator=draw)
    required = torch.randint(0, 2, (batch,), generator=draw)
    forbidden = 2 * torch.randint(0, 2, (batch,), generator=draw)
    first, last = torch.zeros(batch, 1, dtype=torch.int64), torch.full((batch, 1), rows + 5)
    if ranges > 1:  # in descending order
        cuts = torch.randint(0, rows, (batch, 2 * ranges), generator=draw).sort(1)[0].flip(1)
        first, last = cuts[:, 1::2], cuts[:, ::2]
    return query, table, scale, words, first, last, required, forbidden, k


@pytest.mark.parametrize("int8", [True, False], ids=["int8", "float32"])
@pytest.mark.parametrize(
    ("batch", "rows", "dim", "k", "ranges"),
    [(1, 1, 1, 1, 1), (70, 700, 64, 100, 1), (4, 3000, 17, 50, 3), (2, 300, 1100, 7, 1), (2, 64, 130, 70, 1),
     (3, 0, 4, 2, 1)],
)  # fmt: skip
def test_every_instruction_set_has_the_reference_s_bits(
    level: int, batch: int, rows: int, dim: int, k: int, ranges: int, int8: bool
) -> None:
    arguments = call(batch, rows, dim, k, ranges, int8)
    for got, want in zip(BEST(*arguments), REFERENCE(*arguments), strict=True):
        assert torch.equal(got, want)


def test_a_result_is_the_same_for_every_number_of_threads() -> None:
    arguments = call(5, 30_000, 16, 40, 1, int8=True)  # enough rows for several threads
    before = torch.get_num_threads()
    try:
        found = []
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            found.append(BEST(*arguments))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for one in found[1:] for a, b in zip(one, found[0], strict=True))


@pytest.mark.parametrize("best", [BEST, REFERENCE], ids=["op", "reference"])
def test_it_gives_the_worked_example_and_pads_what_is_missing(best: object) -> None:
    rows, one, zero = torch.tensor([[1.0], [3], [2], [3]]), torch.ones(1, dtype=torch.int64), torch.zeros(1, dtype=int)
    whole = (torch.tensor([[0]]), torch.tensor([[4]]))
    score, place = best(torch.tensor([[2.0]]), rows, torch.zeros(0), torch.ones(4, dtype=int), *whole, zero, zero, 3)
    assert (score.tolist(), place.tolist()) == ([[6, 6, 4]], [[1, 3, 2]])
    words = torch.tensor([1, 3, 0, 1])
    score, place = best(torch.tensor([[2.0]]), rows, torch.zeros(0), words, *whole, one, 2 * one, 3)
    assert (score.tolist(), place.tolist()) == ([[6, 2, -torch.inf]], [[3, 0, -1]])
    score, place = best(torch.tensor([[2e38]]), rows, torch.zeros(0), words, *whole, zero, zero, 2)
    assert (score.tolist(), place.tolist()) == ([[torch.inf, torch.inf]], [[1, 2]])


def test_codes_are_rounded_and_rows_without_a_size_are_zeros() -> None:
    codes, scales = quantized(torch.tensor([[127.0, -63.5, 0.5], [0, 0, 0], [1e-44, 0, 0], [torch.nan, 1, 2]]))
    assert codes[0].tolist() == [127, -64, 0]
    assert scales[0] == 1
    assert codes[1].tolist() == [0, 0, 0]
    assert bool(codes[2].abs().max() <= 127)
    assert scales[3].isnan()


@pytest.mark.parametrize(
    ("at", "value", "kind", "text"),
    [
        (0, torch.zeros(2, 5), InputError, r"got queries torch.float32 \[2, 5\]"),
        (0, torch.full((2, 4), torch.nan), InputError, "got query 0 with values that are not finite"),
        (0, torch.tensor([[0.0] * 4, [1, torch.inf, 0, 0]]), InputError, "got query 1 with values"),
        (1, torch.zeros(6, 4, dtype=torch.float16), ConfigError, "expected float32 or int8"),
        (2, torch.zeros(6), ConfigError, "expected a scale per row of int8"),
        (3, torch.zeros(5, dtype=torch.int64), ConfigError, "a word"),
        (4, torch.zeros(2, 3, dtype=torch.int64), ConfigError, "got ranges"),
        (6, torch.zeros(3, dtype=torch.int64), ConfigError, "required"),
        (8, -1, ConfigError, "k=-1"),
    ],
)
def test_what_does_not_fit_is_refused(at: int, value: object, kind: type[Exception], text: str) -> None:
    arguments = [*call(2, 6, 4, 3, 1, int8=False)]
    arguments[at] = value
    with pytest.raises(kind, match=rf"best_rows: .*{text}"):
        BEST(*arguments)


def test_rows_that_would_overflow_are_refused() -> None:
    arguments = [*call(1, 1, MOST_COLUMNS + 1, 1, 1, int8=True)]
    with pytest.raises(ConfigError, match="at most 65536 columns"):
        BEST(*arguments)
