"""Row types by data: the order of the changes, their limits, and what is measured."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tilerec.errors import ConfigError, InputError
from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.quantized import row_type
from tilerec.quantized.embedding_bag import QuantEmbeddingBagCollection
from tilerec.spec.table import EmbeddingBagConfig
from tilerec.train.table_types import TableCosts, TypeCost, _after, _changes, choose_types

TYPES = [row_type(name) for name in ("int8", "int4", "int2")]


def costs(name: str, *types: tuple[str, int, float]) -> TableCosts:
    return TableCosts(name, 1, 1, tuple(TypeCost(*each) for each in types))


A = costs("a", ("fp32", 100, 0.0), ("int8", 27, 1e-6), ("int4", 14, 4e-5))
B = costs("b", ("fp32", 10, 0.0), ("int8", 3, 2e-6))
GAINS = costs("c", ("fp32", 50, 0.0), ("int8", 40, -5e-4))


def chosen(budget: int | None, max_ne: float | None, *tables: TableCosts) -> list[str]:
    return list(_after(tables, _changes(tables, budget, max_ne)).values())


def test_worked_example_takes_the_most_bytes_per_loss_first() -> None:
    assert _changes([A, B], 0 + 17, None) == [(0, 1), (1, 1), (0, 2)]
    assert chosen(109, None, A, B) == ["int8", "fp32"]
    assert chosen(36, None, A, B) == ["int8", "int8"]
    assert chosen(None, 4e-6, A, B) == ["int8", "int8"]
    assert chosen(None, 5e-5, A, B) == ["int4", "int8"]
    assert chosen(None, 0.0, A, B) == ["fp32", "fp32"]
    assert chosen(200, 0.0, A, B) == ["fp32", "fp32"]


def test_a_gain_of_one_table_pays_for_no_other() -> None:
    assert chosen(None, 5e-7, A, GAINS) == ["fp32", "int8"]


def test_a_budget_below_the_smallest_types_is_refused() -> None:
    with pytest.raises(ConfigError, match="--budget: got 16 B; expected at least 17 B, the size of all tables"):
        _changes([A, B], 16, None)


class Model(nn.Module):
    """Two tables, the first ten times as important as the second."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tables = EmbeddingBagCollection([EmbeddingBagConfig(40, 8, name, feature_names=[name]) for name in "ab"])


def rows_of(model: nn.Module, name: str) -> torch.Tensor:
    """A table's rows as results of lookups."""
    from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor

    ids = torch.arange(40).repeat(2)
    kjt = KeyedJaggedTensor(["a", "b"], ids, lengths=torch.ones(80, dtype=torch.int64))
    with torch.no_grad():
        return model.tables(kjt)[name].clone()  # type: ignore[operator, index, no-any-return, union-attr]


def score_against(model: Model) -> object:
    want = {name: rows_of(model, name) for name in "ab"}
    factor = {"a": 10.0, "b": 1.0}

    def score(other: nn.Module) -> float:
        return 1.0 + sum(factor[name] * float((rows_of(other, name) - want[name]).abs().mean()) for name in "ab")

    return score


def test_each_type_is_measured_alone_and_rows_are_restored() -> None:
    model = Model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    score = score_against(model)
    choice, made = choose_types(model, score, TYPES, None, 1.0)  # type: ignore[arg-type]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    by_name = {table.name: {cost.row_type: cost for cost in table.types} for table in choice.costs}
    assert [cost.bytes for cost in by_name["a"].values()] == [40 * 32, 40 * 12, 40 * 8]  # int2: 8 bytes a row, too
    assert 8 < by_name["a"]["int4"].ne_change / by_name["b"]["int4"].ne_change < 12
    assert isinstance(made.tables, QuantEmbeddingBagCollection)
    assert {name: own.name for name, own in made.tables.row_types().items()} == choice.types
    assert choice.ne == score(made)  # type: ignore[operator]
    assert choice.bytes == made.tables.size_in_bytes()
    assert choice.float_bytes == 2 * 40 * 32


def test_types_together_keep_the_limit_that_each_alone_kept() -> None:
    model = Model()

    def score(other: nn.Module) -> float:  # two tables together lose far more than their sum
        lost = [float((rows_of(other, name) - rows_of(model, name)).abs().mean()) for name in "ab"]
        return 1.0 + sum(lost) + (10.0 if min(lost) > 0 else 0.0)

    choice, _ = choose_types(model, score, TYPES[:1], None, 0.1)
    assert choice.ne_change <= 0.1
    assert sorted(choice.types.values()) == ["fp32", "int8"]
    with pytest.raises(
        ConfigError, match=r"--budget: got .* with --max-ne 10.0000%; expected limits that fit together"
    ):
        choose_types(model, score, TYPES[:1], 40 * 24 + 10, 0.1)


def test_rows_that_cannot_be_quantized_and_undefined_scores_are_refused() -> None:
    model = Model()
    with pytest.raises(ConfigError, match="got nan on the held-out samples"):
        choose_types(model, lambda _: float("nan"), TYPES, None, 1.0)
    with pytest.raises(ConfigError, match="a model without tables"):
        choose_types(nn.Linear(1, 1), lambda _: 1.0, TYPES, None, 1.0)
    with torch.no_grad():
        model.tables.embedding_bags["b"].weight[3, 0] = torch.inf
    with pytest.raises(InputError, match="Table 'b': got inf in row 3"):
        choose_types(model, lambda _: 1.0, TYPES, None, 1.0)
