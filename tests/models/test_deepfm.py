from __future__ import annotations

import io
import itertools

import pytest
import torch

from tilerec.errors import ConfigError, InputError
from tilerec.models.deepfm import DenseArch, FMInteractionArch, OverArch, SimpleDeepFMNN, SparseArch
from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from tilerec.sparse.keyed_tensor import KeyedTensor
from tilerec.spec.table import EmbeddingBagConfig

DIM, DENSE, HIDDEN, DEEP = 3, 5, 7, 4


def tables(device: str | None = None) -> EmbeddingBagCollection:
    configs = [
        EmbeddingBagConfig(20, DIM, "t1", feature_names=["b"]),
        EmbeddingBagConfig(20, DIM, "t2", feature_names=["a", "b"]),
    ]
    return EmbeddingBagCollection(configs, device=device)


def batch(size: int) -> tuple[torch.Tensor, KeyedJaggedTensor]:
    lengths = torch.randint(0, 4, (2 * size,))
    ids = torch.randint(0, 20, (int(lengths.sum()),))
    return torch.randn(size, DENSE), KeyedJaggedTensor.from_lengths_sync(["a", "b"], ids, lengths)


@pytest.mark.parametrize("size", [0, 1, 5])
@pytest.mark.parametrize("per_embedding", [False, True])
def test_probabilities_are_those_of_the_paper_sample_by_sample(size: int, per_embedding: bool) -> None:
    model = SimpleDeepFMNN(DENSE, tables(), HIDDEN, DEEP, per_embedding=per_embedding).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    state = model.state_dict()
    dense, sparse = batch(size)
    out = model(dense.double(), sparse)
    assert out.shape == (size, 1)

    def linear(name: str, x: torch.Tensor) -> torch.Tensor:
        return state[f"{name}.weight"] @ x + state[f"{name}.bias"]

    for sample in range(size):
        x = linear("dense_arch.model.0", dense[sample].double()).clamp(min=0)
        vectors = [linear("dense_arch.model.2", x).clamp(min=0)]
        for table, feature in (("t1", "b"), ("t2", "a"), ("t2", "b")):
            rows = state[f"sparse_arch.embedding_bag_collection.embedding_bags.{table}.weight"]
            vectors.append(rows[sparse[feature].to_dense()[sample]].sum(0))
        flat = torch.cat(vectors)
        deep = linear("inter_arch.deep_fm.dense_module.0", flat).clamp(min=0)
        pairs = itertools.combinations(vectors if per_embedding else flat, 2)
        machine = sum((a * b).sum() for a, b in pairs)
        logit = linear("over_arch.model.0", torch.cat([vectors[0], deep, machine.reshape(1)]))  # type: ignore[union-attr]
        torch.testing.assert_close(out[sample], 1 / (1 + torch.exp(-logit)))


def test_names_of_the_state_are_fixed() -> None:
    assert list(SimpleDeepFMNN(DENSE, tables(), HIDDEN, DEEP).state_dict()) == [
        "sparse_arch.embedding_bag_collection.embedding_bags.t1.weight",
        "sparse_arch.embedding_bag_collection.embedding_bags.t2.weight",
        *(f"dense_arch.model.{n}.{p}" for n in (0, 2) for p in ("weight", "bias")),
        "inter_arch.deep_fm.dense_module.0.weight",
        "inter_arch.deep_fm.dense_module.0.bias",
        "over_arch.model.0.weight",
        "over_arch.model.0.bias",
    ]


def test_it_compiles_in_one_graph_with_gradients() -> None:
    model = SimpleDeepFMNN(DENSE, tables(), HIDDEN, DEEP)
    compiled = torch.compile(lambda d, s: model(d, s).sum(), fullgraph=True, backend="aot_eager")
    inputs = batch(4)
    wanted = torch.autograd.grad(model(*inputs).sum(), model.parameters())
    torch.testing.assert_close(torch.autograd.grad(compiled(*inputs), model.parameters()), wanted)


def test_an_exported_model_runs_after_a_save_and_load_on_other_batch_sizes() -> None:
    model = SimpleDeepFMNN(DENSE, tables(), HIDDEN, DEEP).eval()
    example = batch(4)
    shapes = torch.export.ShapesCollection()
    for tensor in (example[0], example[1].values(), example[1].lengths()):
        shapes[tensor] = {0: torch.export.Dim.DYNAMIC}
    with torch.no_grad():
        program = torch.export.export(model, example, dynamic_shapes=shapes)
        buffer = io.BytesIO()
        torch.export.save(program, buffer)
        buffer.seek(0)
        loaded = torch.export.load(buffer).module()
        for size in (0, 1, 4, 9):
            inputs = batch(size)
            torch.testing.assert_close(loaded(*inputs), model(*inputs))


def test_dense_device_is_for_all_but_the_tables() -> None:
    model = SimpleDeepFMNN(DENSE, tables(), HIDDEN, DEEP, dense_device=torch.device("meta"))
    meta = {n for n, p in model.named_parameters() if p.is_meta}
    assert meta == {n for n, _ in model.named_parameters() if "embedding_bags" not in n}


def test_stages_have_the_shapes_they_say() -> None:
    dense, sparse = batch(2)
    assert SparseArch(tables())(sparse).keys() == ["b@t1", "a", "b@t2"]
    assert DenseArch(DENSE, HIDDEN, DIM)(dense).shape == (2, DIM)
    pooled = KeyedTensor.from_tensor_list(["x", "y"], [torch.randn(2, DIM), torch.randn(2, 5)])
    assert FMInteractionArch(2 * DIM + 5, ["x", "y"], DEEP)(torch.randn(2, DIM), pooled).shape == (
        2,
        DIM + DEEP + 1,
    )
    assert FMInteractionArch(DIM, [], DEEP)(torch.ones(2, DIM), pooled).shape == (2, DIM)
    assert OverArch(4)(torch.randn(2, 4)).shape == (2, 1)


def test_sizes_and_inputs_that_do_not_fit_are_named() -> None:
    for sizes, name in (
        ((0, 7, 4), "in_features"),
        ((5, 0, 4), "hidden_layer_size"),
        ((5, 7, 0), "deep_fm_dimension"),
    ):
        with pytest.raises(ConfigError, match=f"{name}: got 0"):
            SimpleDeepFMNN(sizes[0], tables(), sizes[1], sizes[2])
    with pytest.raises(ConfigError, match="embedding_dim: got -1"):
        DenseArch(5, 7, -1)
    mixed = EmbeddingBagCollection([EmbeddingBagConfig(9, 3, "t1"), EmbeddingBagConfig(9, 4, "t2")])
    with pytest.raises(ConfigError, match="SimpleDeepFMNN: got embedding_dim 4 of table 't2'"):
        SimpleDeepFMNN(DENSE, mixed, HIDDEN, DEEP)
    with pytest.raises(InputError, match=r"DenseArch: got input of shape \[2, 4\]"):
        DenseArch(5, 7, 3)(torch.zeros(2, 4))
    pooled = KeyedTensor.from_tensor_list(["x"], [torch.zeros(2, DIM)])
    with pytest.raises(InputError, match=r"got 6 elements .* expected fm_in_features=7"):
        FMInteractionArch(7, ["x"], DEEP)(torch.zeros(2, DIM), pooled)
