"""Row types by data: the order of the changes, their limits, and what is measured."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tilerec.errors import ConfigError, InputError
from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.quantized import quantize_tables, row_type
from tilerec.quantized.embedding_bag import QuantEmbeddingBagCollection
from tilerec.spec.table import EmbeddingBagConfig
from tilerec.train.saved_rows import HeldRows
from tilerec.train.table_conversion import TrainedTables
from tilerec.train.table_types import TableCosts, TypeCost, _after, _changes, choose_types, convert_all

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


def trained(model: Model) -> TrainedTables:
    """The tables of a served model, with the float rows of this one."""
    served = quantize_tables(model, "fp32")
    rows = {name: value.clone() for name, value in model.state_dict().items()}
    return TrainedTables(served, HeldRows(rows), torch.device("cpu"))


def test_each_type_is_measured_alone_and_rows_are_restored() -> None:
    model = Model()
    tables, score = trained(model), score_against(model)
    measured: list[list[bool]] = []

    def recorded(other: nn.Module) -> float:
        state, want = other.state_dict(), model.state_dict()
        measured.append([torch.equal(state[name], want[name]) for name in want])
        return score(other)  # type: ignore[operator, no-any-return]

    choice = choose_types(tables, recorded, TYPES, None, 1.0)
    # int2 rows of 8 columns have the bytes of int4 rows, so two types of each table are measured
    assert measured == [[True, True], *[[False, True]] * 2, *[[True, False]] * 2, [False, False]]
    by_name = {table.name: {cost.row_type: cost for cost in table.types} for table in choice.costs}
    assert [cost.bytes for cost in by_name["a"].values()] == [40 * 32, 40 * 12, 40 * 8]
    assert 8 < by_name["a"]["int4"].loss / by_name["b"]["int4"].loss < 12
    made = tables.model.tables
    assert isinstance(made, QuantEmbeddingBagCollection)
    assert {name: own.name for name, own in made.row_types().items()} == choice.types
    assert choice.ne == score(tables.model)  # type: ignore[operator]
    assert choice.bytes == made.size_in_bytes()
    assert choice.float_bytes == 2 * 40 * 32
    want = quantize_tables(model, per_table=choice.types).state_dict()
    assert all(torch.equal(value, want[name]) for name, value in tables.model.state_dict().items())


def test_one_type_of_all_tables_needs_no_score() -> None:
    model = Model()
    tables = trained(model)
    choice = convert_all(tables, row_type("int4"))
    assert choice.types == {"a": "int4", "b": "int4"}
    assert (choice.ne, choice.ne_change, choice.bytes) == (None, None, 2 * 40 * 8)
    want = quantize_tables(model, "int4").state_dict()
    assert all(torch.equal(value, want[name]) for name, value in tables.model.state_dict().items())
    assert [cost.row_type for cost in convert_all(trained(model), row_type("fp32")).costs[0].types] == ["fp32"]


def test_types_together_keep_the_limit_that_each_alone_kept() -> None:
    model = Model()

    def score(other: nn.Module) -> float:  # two tables together lose far more than their sum
        lost = [float((rows_of(other, name) - rows_of(model, name)).abs().mean()) for name in "ab"]
        return 1.0 + sum(lost) + (10.0 if min(lost) > 0 else 0.0)

    tables = trained(model)
    choice = choose_types(tables, score, TYPES[:1], None, 0.1)
    assert (choice.ne_change or 0) <= 0.1
    assert sorted(choice.types.values()) == ["fp32", "int8"]
    kept = next(name for name, own in choice.types.items() if own == "fp32")
    assert torch.equal(rows_of(tables.model, kept), rows_of(model, kept))
    with pytest.raises(
        ConfigError, match=r"--budget: got .* with --max-ne 10.0000%; expected limits that fit together"
    ):
        choose_types(trained(model), score, TYPES[:1], 40 * 24 + 10, 0.1)


def test_rows_that_cannot_be_quantized_and_undefined_scores_are_refused() -> None:
    model = Model()
    with pytest.raises(ConfigError, match="got nan on the held-out samples"):
        choose_types(trained(model), lambda _: float("nan"), TYPES, None, 1.0)
    empty = TrainedTables(nn.Linear(1, 1), HeldRows({}), torch.device("cpu"))
    with pytest.raises(ConfigError, match="a model without tables"):
        choose_types(empty, lambda _: 1.0, TYPES, None, 1.0)
    with torch.no_grad():
        model.tables.embedding_bags["b"].weight[3, 0] = torch.inf
    with pytest.raises(InputError, match="Table 'b': got inf in row 3"):
        choose_types(trained(model), lambda _: 1.0, TYPES, None, 1.0)
