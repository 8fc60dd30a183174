from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch._dynamo.testing
from torch import nn

from tilerec.errors import ConfigError, InputError
from tilerec.models.dlrm import DLRM, DLRM_DCN, DenseArch, DLRM_Projection, DLRMTrain, OverArch, SparseArch
from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.modules.feature_processed import FeatureProcessedEmbeddingBagCollection
from tilerec.modules.feature_processor import PositionWeightedModuleCollection
from tilerec.optim.attach import apply_optimizer_in_backward
from tilerec.parallel.compiled_model import compile_model
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from tilerec.spec.table import EmbeddingBagConfig

# torch 2.13's tracer makes an instance of every autograd.Function it meets, which torch itself deprecates
traced = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")

DIM, DENSE = 3, 5


def tables(device: str | None = None) -> EmbeddingBagCollection:
    configs = [
        EmbeddingBagConfig(20, DIM, "t1", feature_names=["b"]),
        EmbeddingBagConfig(20, DIM, "t2", feature_names=["a", "b"], pooling="mean"),
    ]
    return EmbeddingBagCollection(configs, device=device)


Make = Callable[..., nn.Module]
MODELS: dict[str, Make] = {
    "DLRM": lambda ebc, **kw: DLRM(ebc, DENSE, [4, DIM], [6, 1], **kw),
    "DLRM_DCN": lambda ebc, **kw: DLRM_DCN(ebc, DENSE, [4, DIM], [6, 1], 2, 3, **kw),
    "DLRM_Projection": lambda ebc, **kw: DLRM_Projection(ebc, DENSE, [4, DIM], [6, 1], [7, 2 * DIM], [4 * DIM], **kw),
}


@dataclass
class Batch:
    dense_features: torch.Tensor
    sparse_features: KeyedJaggedTensor
    labels: torch.Tensor


def batch(size: int, dtype: torch.dtype = torch.float32) -> Batch:
    lengths = torch.randint(0, 4, (2 * size,))
    ids = torch.randint(0, 20, (int(lengths.sum()),))
    return Batch(
        torch.randn(size, DENSE, dtype=dtype),
        KeyedJaggedTensor.from_lengths_sync(["a", "b"], ids, lengths),
        torch.randint(0, 2, (size,)),
    )


def perceptrons(state: dict[str, torch.Tensor], name: str, x: torch.Tensor, layers: int) -> torch.Tensor:
    """`max(0, W x + b)`, layer after layer, for one sample."""
    for layer in range(layers):
        linear = f"{name}._mlp.{layer}._linear"
        x = (state[f"{linear}.weight"] @ x + state[f"{linear}.bias"]).clamp(min=0)
    return x


def logit_by_hand(model: str, state: dict[str, torch.Tensor], dense: torch.Tensor, bags: dict[str, list[int]]) -> float:
    """One sample, from the state dict and the paper."""
    rows = {t: state[f"sparse_arch.embedding_bag_collection.embedding_bags.{t}.weight"] for t in ("t1", "t2")}
    pooled = []
    for table, feature, mean in (("t1", "b", False), ("t2", "a", True), ("t2", "b", True)):
        total = sum((rows[table][i] for i in bags[feature]), torch.zeros(DIM, dtype=torch.float64))
        pooled.append(total / max(len(bags[feature]), 1) if mean else total)
    vectors = [perceptrons(state, "dense_arch.model", dense, 2), *pooled]
    x = torch.cat(vectors)
    if model == "DLRM":
        met = [vectors[i] @ vectors[j] for i in range(4) for j in range(i + 1, 4)]
        x = torch.cat([vectors[0], torch.stack(met)])
    elif model == "DLRM_DCN":
        x_0 = x
        for layer in range(2):
            w, v, b = (state[f"inter_arch.crossnet.{n}.{layer}"] for n in ("W_kernels", "V_kernels", "bias"))
            x = x_0 * (w @ (v @ x) + b) + x
    else:
        left = perceptrons(state, "inter_arch.interaction_branch1.model", x, 2).view(2, DIM)
        right = perceptrons(state, "inter_arch.interaction_branch2.model", x, 1).view(DIM, 4)
        x = torch.cat([vectors[0], (left @ right).flatten()])
    hidden = perceptrons(state, "over_arch.model.0", x, 1)
    return float(state["over_arch.model.1.weight"][0] @ hidden + state["over_arch.model.1.bias"][0])


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("size", [0, 1, 5])
def test_logits_are_those_of_the_paper_sample_by_sample(name: str, size: int) -> None:
    model = MODELS[name](tables()).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.5)
    inputs = batch(size, torch.float64)
    logits = model(inputs.dense_features, inputs.sparse_features)
    assert logits.shape == (size, 1)
    bags = {k: [b.tolist() for b in inputs.sparse_features[k].to_dense()] for k in ("a", "b")}
    for sample in range(size):
        wanted = logit_by_hand(
            name, model.state_dict(), inputs.dense_features[sample], {k: bags[k][sample] for k in bags}
        )
        assert float(logits[sample, 0].detach()) == pytest.approx(wanted, rel=1e-9)


@pytest.mark.parametrize("name", MODELS)
def test_names_of_the_state_are_fixed(name: str) -> None:
    def linears(stage: str, layers: int) -> list[str]:
        return [f"{stage}._mlp.{n}._linear.{p}" for n in range(layers) for p in ("weight", "bias")]

    inner = {
        "DLRM": [],
        "DLRM_DCN": [f"inter_arch.crossnet.{n}.{i}" for n in ("W_kernels", "V_kernels", "bias") for i in range(2)],
        "DLRM_Projection": [
            *linears("inter_arch.interaction_branch1.model", 2),
            *linears("inter_arch.interaction_branch2.model", 1),
        ],
    }[name]
    assert list(MODELS[name](tables()).state_dict()) == [
        *(f"sparse_arch.embedding_bag_collection.embedding_bags.{t}.weight" for t in ("t1", "t2")),
        *linears("dense_arch.model", 2),
        *inner,
        *linears("over_arch.model.0", 1),
        "over_arch.model.1.weight",
        "over_arch.model.1.bias",
    ]


@traced
@pytest.mark.parametrize("name", MODELS)
def test_it_compiles_in_one_graph_with_gradients(name: str) -> None:
    model = MODELS[name](tables())
    compiled = torch.compile(lambda d, s: model(d, s).square().sum(), fullgraph=True, backend="aot_eager", dynamic=True)
    for size in (4, 7):
        inputs = batch(size)
        wanted = torch.autograd.grad(
            model(inputs.dense_features, inputs.sparse_features).square().sum(), model.parameters()
        )
        got = torch.autograd.grad(compiled(inputs.dense_features, inputs.sparse_features), model.parameters())
        torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("name", MODELS)
def test_an_exported_model_runs_after_a_save_and_load_on_other_batch_sizes(name: str) -> None:
    model = MODELS[name](tables()).eval()
    example = (batch(4).dense_features, batch(4).sparse_features)
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
            inputs = (batch(size).dense_features, batch(size).sparse_features)
            torch.testing.assert_close(loaded(*inputs), model(*inputs))


# … and looks at `.grad` of inputs that are no leaves
@traced
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_compiling_the_dense_path_changes_neither_names_nor_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    model = DLRM(tables(), DENSE, [4, DIM], [6, 1])
    inputs = batch(4)
    wanted, names = model(inputs.dense_features, inputs.sparse_features), list(model.state_dict())
    used: list[str] = []

    def compile_(module: nn.Module, mode: str) -> None:
        used.append(f"{type(module).__name__} {mode}")

    with monkeypatch.context() as patch:
        patch.setattr(nn.Module, "compile", compile_)
        model.compile_dense_path("default")
    assert used == ["DenseArch default", "InteractionArch default", "OverArch default"]
    for stage in (model.dense_arch, model.inter_arch, model.over_arch):
        stage.compile(backend="aot_eager")
    torch.testing.assert_close(model(inputs.dense_features, inputs.sparse_features), wanted)
    assert list(model.state_dict()) == names


@pytest.mark.parametrize("name", MODELS)
def test_dense_device_is_for_all_but_the_tables(name: str) -> None:
    model = MODELS[name](tables(), dense_device=torch.device("meta"))
    meta = {n for n, p in model.named_parameters() if p.is_meta}
    assert meta == {n for n, _ in model.named_parameters() if "embedding_bags" not in n}


def test_a_meta_model_made_real_gives_the_logits_of_its_state() -> None:
    model = DLRM(tables(), DENSE, [4, DIM], [6, 1])
    empty = DLRM(tables("meta"), DENSE, [4, DIM], [6, 1], dense_device=torch.device("meta"))
    assert not list(empty.buffers())
    empty.to_empty(device="cpu")
    empty.load_state_dict(model.state_dict())
    inputs = batch(3)
    assert torch.equal(
        empty(inputs.dense_features, inputs.sparse_features),
        model(inputs.dense_features, inputs.sparse_features),
    )
    assert torch.equal(
        copy.deepcopy(model)(inputs.dense_features, inputs.sparse_features),
        model(inputs.dense_features, inputs.sparse_features),
    )


def test_the_sparse_arch_stacks_features_in_its_order() -> None:
    arch = SparseArch(tables())
    inputs = batch(4)
    assert arch.sparse_feature_names == ["b@t1", "a", "b@t2"]
    assert (arch.F, arch.D) == (3, DIM)
    pooled = arch.embedding_bag_collection(inputs.sparse_features)
    out = arch(inputs.sparse_features)
    for number, name in enumerate(arch.sparse_feature_names):
        assert torch.equal(out[:, number], pooled[name])


class Reordered(nn.Module):
    """Tables that return their keys in another order, as a wrapper around them may."""

    def __init__(self, bags: EmbeddingBagCollection) -> None:
        super().__init__()
        self.bags = bags

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        return self.bags.embedding_bag_configs()

    def forward(self, features: KeyedJaggedTensor) -> object:
        pooled = self.bags(features)
        names = pooled.keys()[::-1]
        return type(pooled).from_tensor_list(names, [pooled[name] for name in names])


def test_the_sparse_arch_follows_names_not_places() -> None:
    bags = tables()
    inputs = batch(4)
    arch = SparseArch(Reordered(bags))  # type: ignore[arg-type]
    assert torch.equal(arch(inputs.sparse_features), SparseArch(bags)(inputs.sparse_features))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("size", [0, 1, 6])
def test_the_training_loss_is_binary_cross_entropy_by_hand(name: str, size: int) -> None:
    train = DLRMTrain(MODELS[name](tables()))
    inputs = batch(size)
    if size == 0:  # a mean over nothing
        loss, (_, logits, labels) = train(inputs)
        assert math.isnan(loss.item())
        assert logits.shape == labels.shape == (0,)
        return
    loss, (detached, logits, labels) = train(inputs)
    wanted = 0.0
    for logit, label in zip(logits.tolist(), inputs.labels.tolist(), strict=True):
        probability = 1 / (1 + math.exp(-logit))
        wanted -= math.log(probability if label else 1 - probability) / size
    assert loss.item() == pytest.approx(wanted, rel=1e-5)
    assert torch.equal(detached, loss.detach())
    assert not logits.requires_grad
    assert torch.equal(labels, inputs.labels)


def test_training_lowers_the_loss_with_attached_and_dense_optimizers() -> None:
    model = DLRMTrain(DLRM(tables(), DENSE, [8, DIM], [8, 1]))
    apply_optimizer_in_backward(
        torch.optim.Adagrad, model.model.sparse_arch.embedding_bag_collection.parameters(), {"lr": 0.1}
    )
    dense = [p for n, p in model.named_parameters() if "embedding_bags" not in n]
    optimizer = torch.optim.Adagrad(dense, lr=0.05)
    inputs = batch(32)
    losses = []
    for _ in range(25):
        optimizer.zero_grad()
        loss, _ = model(inputs)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


@traced
def test_a_compiled_step_with_an_attached_optimizer_moves_the_same_rows() -> None:
    eager = DLRMTrain(DLRM(tables(), DENSE, [4, DIM], [6, 1]))
    other = copy.deepcopy(eager)
    for model in (eager, other):
        bags = model.model.sparse_arch.embedding_bag_collection
        apply_optimizer_in_backward(torch.optim.Adagrad, bags.parameters(), {"lr": 0.1})
    compiled = torch.compile(
        lambda d, s, y: other(Batch(d, s, y))[0], fullgraph=True, backend="aot_eager", dynamic=True
    )
    for size in (4, 7):
        inputs = batch(size)
        eager(inputs)[0].backward()
        compiled(inputs.dense_features, inputs.sparse_features, inputs.labels).backward()
    for (name, wanted), got in zip(eager.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(got, wanted, msg=name)
        assert (got.grad is None) == ("embedding_bags" in name)


@pytest.mark.parametrize("name", MODELS)
def test_half_precision_and_autocast_stay_near_full_precision(name: str) -> None:
    model = MODELS[name](tables())
    inputs = batch(5)
    wanted = model(inputs.dense_features, inputs.sparse_features)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(inputs.dense_features, inputs.sparse_features)
    assert logits.dtype == torch.bfloat16
    torch.testing.assert_close(logits.float(), wanted, rtol=0.05, atol=0.05)
    logits.float().sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())
    logits = model.bfloat16()(inputs.dense_features.bfloat16(), inputs.sparse_features)
    assert logits.dtype == torch.bfloat16
    torch.testing.assert_close(logits.float(), wanted, rtol=0.05, atol=0.05)


def test_tables_behind_feature_processors_serve_as_well() -> None:
    configs = tables().embedding_bag_configs()
    processed = FeatureProcessedEmbeddingBagCollection(
        EmbeddingBagCollection(configs, is_weighted=True), PositionWeightedModuleCollection({"a": 3, "b": 3})
    )
    model = DLRM(processed, DENSE, [4, DIM], [6, 1])
    inputs = batch(4)
    model(inputs.dense_features, inputs.sparse_features).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    # position weights are ones at first, so the logits are those of the plain tables
    plain = DLRM(tables(), DENSE, [4, DIM], [6, 1])
    state = {n.replace("_embedding_bag_collection.", ""): t for n, t in model.state_dict().items()}
    plain.load_state_dict({n: t for n, t in state.items() if "position_weights" not in n})
    torch.testing.assert_close(
        plain(inputs.dense_features, inputs.sparse_features),
        model(inputs.dense_features, inputs.sparse_features),
    )


def test_stages_have_the_shapes_they_say() -> None:
    assert DenseArch(5, [4, 3])(torch.zeros(2, 5)).shape == (2, 3)
    assert OverArch(5, [4, 3, 2])(torch.zeros(2, 5)).shape == (2, 2)
    assert (OverArch(5, [4, 1])(torch.randn(64, 5)) < 0).any() or (OverArch(5, [4, 1])(-torch.ones(9, 5)) < 0).any()


def test_sizes_that_do_not_fit_are_named() -> None:
    with pytest.raises(
        ConfigError,
        match=r"DLRM: got dense_arch_layer_sizes=\[4, 2\]; expected .* embedding_dim 3 as the last",
    ):
        DLRM(tables(), DENSE, [4, 2], [6, 1])
    with pytest.raises(ConfigError, match=r"DLRM_DCN: got dense_arch_layer_sizes=\[\]"):
        DLRM_DCN(tables(), DENSE, [], [6, 1], 2, 3)
    with pytest.raises(ConfigError, match=r"OverArch: got layer_sizes=\[1\]; expected at least two layers"):
        DLRM(tables(), DENSE, [DIM], [1])
    with pytest.raises(ConfigError, match="OverArch: each of layer_sizes: got 0"):
        OverArch(4, [3, 0])
    with pytest.raises(
        ConfigError, match=r"interaction_branch2_layer_sizes=\[4\]; expected a multiple .* 3 as the last"
    ):
        DLRM_Projection(tables(), DENSE, [DIM], [6, 1], [6], [4])
    with pytest.raises(ConfigError, match="low_rank: got 0"):
        DLRM_DCN(tables(), DENSE, [DIM], [6, 1], 2, 0)
    mixed = EmbeddingBagCollection([EmbeddingBagConfig(9, 3, "t1"), EmbeddingBagConfig(9, 4, "t2")])
    with pytest.raises(ConfigError, match="DLRM: got embedding_dim 4 of table 't2' and 3 of table 't1'"):
        DLRM(mixed, DENSE, [DIM], [6, 1])


def test_inputs_that_do_not_fit_are_named() -> None:
    model = DLRM(tables(), DENSE, [4, DIM], [6, 1])
    inputs = batch(4)
    with pytest.raises(InputError, match=r"got input of shape \[4, 7\]; expected \[…, 5\]"):
        model(torch.zeros(4, 7), inputs.sparse_features)
    with pytest.raises(InputError, match=r"InteractionArch: got dense features of shape \[3, 3\]"):
        model(torch.zeros(3, DENSE), inputs.sparse_features)
    with pytest.raises(InputError, match=r"labels of shape \[4, 1\] for logits of shape \[4\]"):
        DLRMTrain(model)(Batch(inputs.dense_features, inputs.sparse_features, inputs.labels[:, None]))


@traced
@pytest.mark.parametrize(("name", "graphs"), [("DLRM", 1), ("DLRM_DCN", 2), ("DLRM_Projection", 2)])
def test_a_compiled_model_has_one_graph_for_batches_of_any_size_or_another_for_one_sample(
    name: str, graphs: int
) -> None:
    torch._dynamo.reset()
    model = MODELS[name](tables())
    twin = copy.deepcopy(model)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    forwards = compile_model(model, backend=counter), twin
    for size in (6, 8, 1, 0, 3):
        given = batch(size)
        losses = [forward(given.dense_features, given.sparse_features).square().sum() for forward in forwards]
        torch.testing.assert_close(*losses)
        for loss in losses:
            loss.backward()
        for one, other in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad)
    assert counter.frame_count == graphs
