"""DCN-V2, shared bottom, MMoE and PLE: plain torch gives the same logits and gradients, for any features and tasks."""

from __future__ import annotations

import io
import os

import pytest
import torch
from torch import nn

from tests.models.click_models import BOTH, MODELS, ONE_DENSE, ONE_SPARSE, Features
from tilerec.errors import ConfigError, InputError
from tilerec.models.dcn import DCNv2
from tilerec.models.mmoe import MMoE
from tilerec.models.ple import PLE
from tilerec.models.shared_bottom import SharedBottom
from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.modules.feature_processed import FeatureProcessedEmbeddingBagCollection
from tilerec.modules.feature_processor import PositionWeightedModuleCollection
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from tilerec.spec.table import EmbeddingBagConfig

# torch 2.13's tracer makes an instance of every autograd.Function it meets, which torch itself deprecates
traced = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")

NIGHTLY = pytest.mark.skipif(os.environ.get("TILEREC_NIGHTLY") != "1", reason="all are exported daily: nightly")
QUICK = ("dcn, stacked", "mmoe")


def _drawn(name: str, features: Features, tasks: int, dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    model = MODELS[name][0](features.bags(), features.dense, tasks).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.5)
    return model


@pytest.mark.parametrize("size", [0, 1, 5])
@pytest.mark.parametrize(
    ("features", "tasks"), [(BOTH, 1), (BOTH, 3), (ONE_DENSE, 2), (ONE_SPARSE, 1)], ids=["one", "three", "dense", "ids"]
)
@pytest.mark.parametrize("name", MODELS)
def test_logits_and_gradients_are_those_of_plain_torch(name: str, features: Features, tasks: int, size: int) -> None:
    model = _drawn(name, features, tasks)
    dense, sparse = features.batch(size, torch.float64)
    state = {key: value.detach().clone().requires_grad_() for key, value in model.state_dict().items()}
    wanted = MODELS[name][1](state, features.input(state, dense, sparse), tasks)
    logits = model(dense, sparse)
    assert logits.shape == (size, tasks)
    torch.testing.assert_close(logits, wanted)
    factors = torch.randn(size, tasks, dtype=torch.float64)
    (logits * factors).sum().backward()
    (wanted * factors).sum().backward()
    for key, parameter in model.named_parameters():
        expected = state[key].grad
        torch.testing.assert_close(parameter.grad, torch.zeros_like(parameter) if expected is None else expected)


@traced
@pytest.mark.parametrize("name", [name if name in QUICK else pytest.param(name, marks=NIGHTLY) for name in MODELS])
def test_it_compiles_in_one_graph_with_gradients(name: str) -> None:
    model = _drawn(name, BOTH, 2, torch.float32)
    compiled = torch.compile(lambda d, s: model(d, s).square().sum(), fullgraph=True, backend="aot_eager", dynamic=True)
    for size in (4, 7):
        inputs = BOTH.batch(size)
        wanted = torch.autograd.grad(model(*inputs).square().sum(), list(model.parameters()))
        got = torch.autograd.grad(compiled(*inputs), list(model.parameters()))
        # Eager crosses add in another order than compiled ones: numbers near zero differ by roundings of large ones.
        largest = max(grad.abs().max().item() for grad in wanted)
        torch.testing.assert_close(got, wanted, rtol=1.3e-6, atol=max(1e-5, 1e-6 * largest))


@pytest.mark.parametrize("name", MODELS)
def test_an_exported_model_runs_after_a_save_and_load_on_other_batch_sizes(name: str) -> None:
    model = _drawn(name, BOTH, 2, torch.float32).eval()
    example = BOTH.batch(4)
    shapes = torch.export.ShapesCollection()
    for tensor in (example[0], example[1].values(), example[1].lengths()):
        shapes[tensor] = {0: torch.export.Dim.DYNAMIC}
    with torch.no_grad():
        program = torch.export.export(model, example, dynamic_shapes=shapes)
        buffer = io.BytesIO()
        torch.export.save(program, buffer)
        buffer.seek(0)
        loaded = torch.export.load(buffer).module()
        for size in (0, 1, 9):
            inputs = BOTH.batch(size, seed=1)
            torch.testing.assert_close(loaded(*inputs), model(*inputs))


@pytest.mark.parametrize("name", MODELS)
def test_a_prefetched_batch_gives_the_same_logits(name: str) -> None:
    model = _drawn(name, BOTH, 2, torch.float32)
    dense, sparse = BOTH.batch(6)
    assert torch.equal(model(dense, model.prefetch(sparse)), model(dense, sparse))  # type: ignore[operator]
    without = _drawn(name, ONE_DENSE, 2, torch.float32)
    dense, sparse = ONE_DENSE.batch(6)
    assert without.prefetch(sparse) is sparse  # type: ignore[operator]


def test_names_of_the_states_are_fixed() -> None:
    tables = [f"embedding_bag_collection.embedding_bags.{name}.weight" for name in ("t1", "t2")]

    def linears(stage: str, layers: int = 1) -> list[str]:
        return [f"{stage}._mlp.{n}._linear.{p}" for n in range(layers) for p in ("weight", "bias")]

    def outputs(*stages: str) -> list[str]:
        return [f"{stage}.{p}" for stage in stages for p in ("weight", "bias")]

    towers = [
        name for t in (0, 1) for name in [*linears(f"task_towers.towers.{t}.0"), *outputs(f"task_towers.towers.{t}.1")]
    ]
    crosses = [f"crossnet.{name}.{layer}" for name in ("kernels", "bias") for layer in (0, 1)]
    assert list(_drawn("dcn, stacked", BOTH, 2).state_dict()) == [
        *tables,
        *crosses,
        *linears("deep_arch", 2),
        *outputs("over_arch"),
    ]
    assert list(_drawn("shared bottom", BOTH, 2).state_dict()) == [*tables, *linears("bottom"), *towers]
    assert list(_drawn("mmoe", BOTH, 2).state_dict()) == [
        *tables,
        *(name for e in range(3) for name in linears(f"experts.{e}", 2)),
        "gates.0.weight",
        "gates.1.weight",
        *towers,
    ]
    last = [name for name in _drawn("ple", BOTH, 2).state_dict() if name.startswith("levels.1.gates")]
    assert last == ["levels.1.gates.0.weight", "levels.1.gates.1.weight"]


@pytest.mark.parametrize("kind", [DCNv2, SharedBottom, MMoE, PLE])
def test_dense_device_is_for_all_but_the_tables(kind: type[nn.Module]) -> None:
    sizes: dict[type[nn.Module], tuple[object, ...]] = {
        DCNv2: (2, [5]),
        SharedBottom: ([6], [4], 2),
        MMoE: (3, [6], [4], 2),
        PLE: (2, 1, 1, [6], [4], 2),
    }
    model = kind(BOTH.bags(), BOTH.dense, *sizes[kind], dense_device=torch.device("meta"))
    meta = {name for name, parameter in model.named_parameters() if parameter.is_meta}
    assert meta == {name for name, _ in model.named_parameters() if "embedding_bags" not in name}


def test_one_expert_is_a_shared_bottom() -> None:
    experts = MMoE(BOTH.bags(), BOTH.dense, 1, [6], [4], 2)
    bottom = SharedBottom(BOTH.bags(), BOTH.dense, [6], [4], 2)
    state = {name.replace("experts.0", "bottom"): value for name, value in experts.state_dict().items()}
    bottom.load_state_dict({name: value for name, value in state.items() if "gates" not in name})
    inputs = BOTH.batch(5)
    torch.testing.assert_close(experts(*inputs), bottom(*inputs))


def test_a_task_of_ple_leaves_the_experts_of_other_tasks_alone_in_the_last_level() -> None:
    model = PLE(BOTH.bags(), BOTH.dense, 1, 2, 1, [6], [4], 2)
    model(*BOTH.batch(5))[:, 0].sum().backward()
    touched = {name for name, p in model.named_parameters() if p.grad is not None and p.grad.any()}
    assert any("task_experts.0" in name for name in touched)
    assert not any("task_experts.1" in name for name in touched)


def test_the_logit_of_the_documentation() -> None:
    model = DCNv2(None, 1, 1, [])
    for parameter, value in zip(model.parameters(), (2.0, 1.0, 1.0, 0.0), strict=True):
        nn.init.constant_(parameter, value)
    assert model(torch.tensor([[3.0]]), ONE_DENSE.batch(1)[1]).item() == 24


def test_tables_behind_feature_processors_serve_as_well() -> None:
    tables = EmbeddingBagCollection([EmbeddingBagConfig(9, 3, "t", feature_names=["a"])], is_weighted=True)
    bags = FeatureProcessedEmbeddingBagCollection(tables, PositionWeightedModuleCollection({"a": 3}))
    model = DCNv2(bags, 0, 1, [4])
    sparse = KeyedJaggedTensor.from_lengths_sync(["a"], torch.tensor([1, 2, 3]), torch.tensor([2, 1]))
    model(torch.zeros(2, 0), model.prefetch(sparse)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_sizes_that_do_not_fit_are_named() -> None:
    bags = BOTH.bags()
    with pytest.raises(ConfigError, match="DCNv2: got no features; expected at least one"):
        DCNv2(None, 0, 2, [4])
    with pytest.raises(ConfigError, match="DCNv2: structure: got 'deep'; expected 'stacked' or 'parallel'"):
        DCNv2(bags, 4, 2, [4], structure="deep")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="got cross_num_experts=2 with full matrices"):
        DCNv2(bags, 4, 2, [4], cross_num_experts=2)
    with pytest.raises(ConfigError, match="cross_low_rank_dim: got -1"):
        DCNv2(bags, 4, 2, [4], cross_low_rank_dim=-1)
    with pytest.raises(ConfigError, match="num_layers: got -1"):
        DCNv2(bags, 4, -1, [4])
    with pytest.raises(ConfigError, match="dense_in_features: got -1"):
        SharedBottom(bags, -1, [4], [], 1)
    with pytest.raises(ConfigError, match="num_tasks: got 0"):
        SharedBottom(bags, 4, [4], [], 0)
    with pytest.raises(ConfigError, match="MMoE: num_experts: got 0"):
        MMoE(bags, 4, 0, [4], [], 2)
    with pytest.raises(ConfigError, match=r"MMoE: got expert_layer_sizes=\[\]; expected at least one layer"):
        MMoE(bags, 4, 2, [], [], 2)
    with pytest.raises(ConfigError, match=r"PLE: got expert_layer_sizes=\[\]"):
        PLE(bags, 4, 1, 1, 1, [], [], 2)
    with pytest.raises(ConfigError, match="PLE: num_shared_experts: got 0"):
        PLE(bags, 4, 1, 1, 0, [4], [], 2)


def test_dense_features_that_do_not_fit_are_named() -> None:
    dense, sparse = BOTH.batch(4)
    model = DCNv2(BOTH.bags(), BOTH.dense, 2, [4])
    with pytest.raises(InputError, match=r"DCNv2: got dense features of shape \[4, 3\]; expected \[batch, 4\]"):
        model(dense[:, :3], sparse)
    with pytest.raises(InputError, match=r"of shape \[4\]; expected \[batch, 4\]"):
        model(dense[0], sparse)
