"""SASRec against a plain implementation for one sequence; causality, padding, and lengths from 0 to the maximum."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import layer_norm, softmax

from tilerec.errors import ConfigError, InputError
from tilerec.models.sasrec import SASRec
from tilerec.modules.embedding import EmbeddingCollection
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from tilerec.spec.table import EmbeddingConfig

DIM, ROWS, LONGEST = 8, 12, 5


def _model(heads: int = 2, blocks: int = 2, dropout: float = 0.0) -> SASRec:
    torch.manual_seed(0)
    tables = EmbeddingCollection([EmbeddingConfig(ROWS, DIM, "items", feature_names=["history", "item"])])
    model = SASRec(
        tables, sequence="history", target="item", max_length=LONGEST, num_heads=heads, num_blocks=blocks,
        dropout=dropout,
    )  # fmt: skip
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return model


def _features(sequences: list[list[int]], targets: list[int] | None = None) -> KeyedJaggedTensor:
    targets = targets if targets is not None else [0] * len(sequences)
    values = [one for sequence in sequences for one in sequence] + targets
    lengths = [len(one) for one in sequences] + [1] * len(targets)
    return KeyedJaggedTensor(
        ["history", "item"], torch.tensor(values, dtype=torch.int64), lengths=torch.tensor(lengths),
        stride=len(sequences),
    )  # fmt: skip


def _plain(model: SASRec, sequence: list[int], heads: int) -> Tensor:
    """Return the states of one sequence, with explicit loops over heads and positions."""
    count = len(sequence)
    x = model.embedding_collection.embeddings["items"].weight[sequence] * DIM**0.5 + model.positions[LONGEST - count :]
    for block in model.blocks:
        normed = layer_norm(x, (DIM,), block.attention_norm.weight, block.attention_norm.bias, 1e-8)
        query = normed @ block.query.weight.t() + block.query.bias
        key, value = (x @ block.key_value.weight.t() + block.key_value.bias).chunk(2, dim=1)
        mixed = torch.zeros(count, DIM)
        width = DIM // heads
        for head in range(heads):
            part = slice(head * width, (head + 1) * width)
            for p in range(count):
                scores = key[: p + 1, part] @ query[p, part] / width**0.5
                mixed[p, part] = softmax(scores, dim=0) @ value[: p + 1, part]
        x = x + mixed @ block.output.weight.t() + block.output.bias
        x = x + block.feed(layer_norm(x, (DIM,), block.feed_norm.weight, block.feed_norm.bias, 1e-8))
    return layer_norm(x, (DIM,), model.last_norm.weight, model.last_norm.bias, 1e-8)


@pytest.mark.parametrize("heads", [1, 2])
def test_states_are_those_of_a_plain_implementation(heads: int) -> None:
    model = _model(heads)
    sequences = [[1, 2, 3], [4], [5, 6, 7, 8, 9], [2, 2]]
    states = model(torch.zeros(4, 0), _features(sequences)).states
    expected = torch.cat([_plain(model, sequence, heads) for sequence in sequences])
    torch.testing.assert_close(states, expected, rtol=1e-4, atol=1e-5)


def test_a_state_depends_on_earlier_items_only_and_on_no_other_sequence() -> None:
    model = _model()
    one = model(torch.zeros(1, 0), _features([[1, 2, 3]])).states
    changed = model(torch.zeros(1, 0), _features([[1, 2, 9]])).states
    torch.testing.assert_close(one[:2], changed[:2])
    assert not torch.allclose(one[2], changed[2])
    beside = model(torch.zeros(3, 0), _features([[7, 7, 7, 7, 7], [1, 2, 3], []])).states
    torch.testing.assert_close(beside[5:], one, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("sequences", [[], [[]], [[], [], []], [[3]], [[1] * LONGEST]])
def test_every_length_up_to_the_longest_has_its_states(sequences: list[list[int]]) -> None:
    model = _model()
    out = model(torch.zeros(len(sequences), 0), _features(sequences))
    count = sum(map(len, sequences))
    assert out.states.shape == out.rows.shape == (count, DIM)
    assert out.target_rows.shape == (len(sequences), DIM)
    assert out.candidate_rows is None
    assert out.states.isfinite().all()
    out.states.sum().backward()
    assert all(parameter.grad is not None for name, parameter in model.named_parameters() if "embed" not in name)


def test_rows_and_candidates_are_those_of_the_table() -> None:
    model = _model()
    table = model.embedding_collection.embeddings["items"].weight
    out = model(torch.zeros(2, 0), _features([[1, 2], [3]], [4, 5]), torch.tensor([9, 9, 0]))
    assert torch.equal(out.rows, table[[1, 2, 3]])
    assert torch.equal(out.target_rows, table[[4, 5]])
    assert torch.equal(out.candidate_rows, table[[9, 9, 0]])


def test_dropout_acts_in_training_only() -> None:
    model = _model(dropout=0.5)
    features = _features([[1, 2, 3]])
    first, second = (model(torch.zeros(1, 0), features).states for _ in range(2))
    assert not torch.equal(first, second)
    model.eval()
    first, second = (model(torch.zeros(1, 0), features).states for _ in range(2))
    assert torch.equal(first, second)


def test_sequences_and_sizes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(InputError, match=r"a sequence of 6 items; expected at most max_length=5\. Set max_length"):
        _model()(torch.zeros(1, 0), _features([[1] * 6]))
    with pytest.raises(ConfigError, match=r"num_heads=3.*for dim 8; expected.*heads that divide the dim"):
        _model(heads=3)
    tables = EmbeddingCollection([EmbeddingConfig(4, 8, "items", feature_names=["history"])])
    with pytest.raises(ConfigError, match=r"expected one table with the features 'history' and 'item'"):
        SASRec(tables, sequence="history", target="item", max_length=3)
