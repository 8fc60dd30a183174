"""EmbeddingBagCollection: the values, the leaves, the attached optimizers."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import Tensor, nn

from tilerec.errors import ConfigError, InputError
from tilerec.modules.embedding import EmbeddingCollection
from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.optim.attach import apply_optimizer_in_backward, set_sparse_grad
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from tilerec.spec.table import DataType, EmbeddingBagConfig, EmbeddingConfig, PoolingType
from tilerec.storage.table_rows import NonFiniteGradientError


def configs(**changes) -> list[EmbeddingBagConfig]:
    return [
        EmbeddingBagConfig(11, 4, "user", feature_names=["user", "friend"], **changes),
        EmbeddingBagConfig(7, 3, "item", feature_names=["item"], pooling=PoolingType.MEAN, **changes),
    ]


def batch(size: int = 3, seed: int = 0, weighted: bool = False, keys: tuple[str, ...] = ("item", "user", "friend")):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 4, (len(keys) * size,), generator=generator, dtype=torch.int32)
    total = int(lengths.sum())
    values = torch.randint(0, 7, (total,), generator=generator)
    weights = torch.rand(total, generator=generator) if weighted else None
    return KeyedJaggedTensor.from_lengths_sync(list(keys), values, lengths, weights)


def plain(ebc: EmbeddingBagCollection, kjt: KeyedJaggedTensor, leaves: dict[str, Tensor] | None = None) -> Tensor:
    """The same with torch.nn.functional.embedding_bag, feature by feature."""
    blocks = []
    for config in ebc.embedding_bag_configs():
        weight = leaves[config.name] if leaves is not None else ebc.embedding_bags[config.name].weight
        for feature in config.feature_names:
            jagged = kjt[feature]
            rows = weight[jagged.values().long()]
            if ebc.is_weighted():
                rows = rows * jagged.weights()[:, None].to(rows.dtype)
            lengths = jagged.lengths().long()
            bag = torch.repeat_interleave(torch.arange(lengths.numel()), lengths)
            total = torch.zeros(lengths.numel(), weight.shape[1], dtype=weight.dtype).index_add(0, bag, rows)
            if config.pooling is PoolingType.MEAN:
                total = total / lengths.clamp(min=1)[:, None]
            blocks.append(total)
    return torch.cat(blocks, dim=1)


@pytest.mark.parametrize("size", [0, 1, 5])
@pytest.mark.parametrize("weighted", [False, True])
def test_pooled_values_equal_plain_torch(size: int, weighted: bool) -> None:
    ebc = EmbeddingBagCollection(configs(), is_weighted=weighted)
    kjt = batch(size, weighted=weighted)
    out = ebc(kjt)
    assert out.keys() == ["user", "friend", "item"]
    assert out.length_per_key() == [4, 4, 3]
    torch.testing.assert_close(out.values(), plain(ebc, kjt))


def test_a_feature_of_several_tables_is_called_feature_at_table() -> None:
    tables = [EmbeddingBagConfig(9, 4, name, feature_names=["f"]) for name in ("a", "b")]
    ebc = EmbeddingBagCollection(tables)
    out = ebc(KeyedJaggedTensor.from_lengths_sync(["f"], torch.tensor([1, 2]), torch.tensor([1, 1])))
    assert out.keys() == ["f@a", "f@b"]
    assert torch.equal(out["f@b"], ebc.embedding_bags["b"].weight[[1, 2]])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_output_has_the_tables_type_and_to_changes_both(dtype: torch.dtype) -> None:
    ebc = EmbeddingBagCollection(configs(dtype=dtype))
    assert ebc(batch()).values().dtype == dtype
    assert ebc.to(torch.float32)(batch()).values().dtype == torch.float32
    assert (
        EmbeddingBagCollection(configs(dtype=dtype), output_dtype=DataType.FP32)(batch()).values().dtype
        == torch.float32
    )


def test_tables_may_be_called_like_a_dictionarys_methods() -> None:
    ebc = EmbeddingBagCollection([EmbeddingBagConfig(3, 2, name) for name in ("items", "keys", "values", "weight")])
    assert next(iter(ebc.state_dict())) == "embedding_bags.items.weight"
    assert len(list(ebc.embedding_bags.items())) == len(ebc.embedding_bags) == 4
    assert copy.deepcopy(ebc).embedding_bags["keys"].weight.shape == (3, 2)


def test_mixed_table_types_promote() -> None:
    tables = [EmbeddingBagConfig(9, 4, "a", "BF16"), EmbeddingBagConfig(9, 4, "b", torch.float32)]
    ebc = EmbeddingBagCollection(tables)
    kjt = batch(keys=("a", "b"))
    assert ebc(kjt).values().dtype == torch.float32
    assert ebc.embedding_bags["a"].weight.dtype == torch.bfloat16


# ------------------------------------------------------------------------------------------------ leaves


def tied(ebc: EmbeddingBagCollection) -> None:
    """Each parameter is a leaf, the lookup reads it, and a write to it shows at once."""
    for name, parameter in ebc.named_parameters():
        assert type(parameter) is nn.Parameter, name
        assert parameter.is_leaf, name
        assert not parameter._is_view(), name
    storages = {(p.dtype, p.device): p.untyped_storage().data_ptr() for p in ebc.parameters()}
    assert all(p.untyped_storage().data_ptr() == storages[(p.dtype, p.device)] for p in ebc.parameters())
    kjt = batch(4, 3)
    with torch.no_grad():
        ebc.embedding_bags["user"].weight.fill_(1.0)
        lengths = kjt["user"].lengths()
        assert torch.equal(ebc(kjt)["user"][:, 0].float(), lengths.float())


@pytest.mark.parametrize(
    "change",
    [
        "none",
        "bf16",
        "half-and-back",
        "double",
        "to-device",
        "deepcopy",
        "pickle",
        "torch.save",
        "load",
        "assign",
        "meta",
    ],
)
def test_parameters_stay_tied_to_their_storage(change: str) -> None:
    ebc = EmbeddingBagCollection(configs(), device="meta" if change == "meta" else None)
    apply_optimizer_in_backward(torch.optim.Adam, ebc.parameters(), {"lr": 0.1})
    if change != "meta":
        ebc(batch()).values().sum().backward()
    if change == "bf16":
        ebc.to(torch.bfloat16)
    elif change == "half-and-back":
        ebc.half().float()
    elif change == "double":
        ebc.double()
    elif change == "to-device":
        ebc.to("cpu")
    elif change == "deepcopy":
        ebc = copy.deepcopy(ebc)
    elif change == "pickle":
        ebc = pickle.loads(pickle.dumps(ebc))
    elif change == "torch.save":
        buffer = io.BytesIO()
        torch.save(ebc, buffer)
        buffer.seek(0)
        ebc = torch.load(buffer, weights_only=False)
    elif change in ("load", "assign"):
        state = {name: torch.randn_like(value) for name, value in ebc.state_dict().items()}
        ebc.load_state_dict(state, assign=change == "assign")
        assert torch.equal(ebc.embedding_bags["item"].weight, state["embedding_bags.item.weight"])
        if change == "assign":
            ebc.to("cpu")  # an assigned tensor keeps its own memory until the module is moved
    elif change == "meta":
        ebc.to_empty(device="cpu")
        ebc.reset_parameters()
    tied(ebc)
    before = ebc.embedding_bags["user"].weight.detach().clone()
    updates = 0 if change == "meta" else 1
    assert int(ebc.fused_optimizer.state_dict()["state"]["embedding_bags.user.weight"]["step"]) == updates
    kjt = batch(4, 3)
    ebc(kjt).values().sum().backward()
    weight = ebc.embedding_bags["user"].weight
    touched = torch.unique(torch.cat([kjt["user"].values(), kjt["friend"].values()]))
    moved = (weight != before).any(dim=1).nonzero().flatten()
    assert torch.equal(moved, touched)
    state = ebc.fused_optimizer.state_dict()["state"]["embedding_bags.user.weight"]
    assert int(state["step"]) == updates + 1
    assert state["exp_avg"].dtype == (torch.float64 if change == "double" else torch.float32)


def test_a_copy_trains_alone() -> None:
    ebc = EmbeddingBagCollection(configs())
    apply_optimizer_in_backward(torch.optim.SGD, ebc.parameters(), {"lr": 0.1})
    twin = copy.deepcopy(ebc)
    before = {name: value.clone() for name, value in ebc.state_dict().items()}
    twin(batch()).values().sum().backward()
    assert all(torch.equal(value, before[name]) for name, value in ebc.state_dict().items())
    assert not torch.equal(twin.embedding_bags["user"].weight, ebc.embedding_bags["user"].weight)
    twin.fused_optimizer.param_groups[0]["lr"] = 5.0
    assert ebc.fused_optimizer.param_groups[0]["lr"] == 0.1


def test_initial_values_depend_on_seed_name_and_place_only() -> None:
    def build(rows: int, seed: int) -> Tensor:
        torch.manual_seed(seed)
        return EmbeddingBagCollection(
            [EmbeddingBagConfig(rows, 5, "t", weight_init_max=1, weight_init_min=-1)]
        ).state_dict()["embedding_bags.t.weight"]

    assert torch.equal(build(20, 1), build(20, 1))
    assert torch.equal(build(20, 1)[:7], build(7, 1))
    assert not torch.equal(build(20, 1), build(20, 2))


def test_init_fn_fills_blocks_in_place_or_by_its_result() -> None:
    tables = [
        EmbeddingBagConfig(5, 2, "a", init_fn=lambda rows: rows.fill_(2.0)),
        EmbeddingBagConfig(5, 2, "b", init_fn=lambda rows, row_offset: torch.full_like(rows, 3.0 + row_offset)),
    ]
    ebc = EmbeddingBagCollection(tables)
    assert (ebc.embedding_bags["a"].weight == 2).all()
    assert (ebc.embedding_bags["b"].weight == 3).all()


# ------------------------------------------------------------------------------------------------ gradients


@pytest.mark.parametrize("weighted", [False, True])
def test_without_an_optimizer_grad_is_filled_and_accumulates(weighted: bool) -> None:
    ebc = EmbeddingBagCollection(configs(), is_weighted=weighted)
    leaves = {c.name: ebc.embedding_bags[c.name].weight.detach().clone().requires_grad_() for c in configs()}
    for seed in (1, 2):
        kjt = batch(4, seed, weighted)
        (ebc(kjt).values() ** 2).sum().backward()
        (plain(ebc, kjt, leaves) ** 2).sum().backward()
    for name, leaf in leaves.items():
        torch.testing.assert_close(ebc.embedding_bags[name].weight.grad, leaf.grad)


def test_sparse_grad_holds_the_touched_rows_and_torch_steps_it() -> None:
    ebc = EmbeddingBagCollection(configs())
    reference = copy.deepcopy(ebc)
    set_sparse_grad(ebc.parameters())
    kjt = batch(4, 1)
    optimizer = torch.optim.SGD(ebc.parameters(), lr=0.1)
    (ebc(kjt).values() ** 2).sum().backward()
    (reference(kjt).values() ** 2).sum().backward()
    for got, want in zip(ebc.parameters(), reference.parameters(), strict=True):
        assert got.grad.is_sparse
        torch.testing.assert_close(got.grad.to_dense(), want.grad)
    optimizer.step()
    torch.optim.SGD(reference.parameters(), lr=0.1).step()
    for got, want in zip(ebc.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize(
    ("cls", "kwargs"),
    [
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        (torch.optim.Adagrad, {"lr": 0.1}),
        (torch.optim.Adam, {"lr": 0.1}),
        (torch.optim.AdamW, {"lr": 0.1, "weight_decay": 0.1}),
    ],
)
def test_an_attached_optimizer_equals_torchs_on_batches_that_touch_every_row(cls, kwargs) -> None:
    ebc = EmbeddingBagCollection(configs(dtype=torch.float64))
    leaves = {c.name: ebc.embedding_bags[c.name].weight.detach().clone().requires_grad_() for c in configs()}
    apply_optimizer_in_backward(cls, ebc.parameters(), kwargs)
    optimizer = cls(leaves.values(), **kwargs)
    every = torch.arange(11), torch.arange(7)
    for step in range(6):
        values = torch.cat([every[1], every[1][torch.randperm(7)], every[0], torch.tensor([1, 3, 3])])
        lengths = torch.tensor([7, 7, 11, 0, 1, 2])
        kjt = KeyedJaggedTensor.from_lengths_sync(["item", "user", "friend"], values, lengths)
        weight = torch.randn(2, 11, dtype=torch.float64)
        (ebc(kjt).values() ** 2 * weight).sum().backward()
        optimizer.zero_grad()
        (plain(ebc, kjt, leaves) ** 2 * weight).sum().backward()
        optimizer.step()
        for name, leaf in leaves.items():
            parameter = ebc.embedding_bags[name].weight
            assert parameter.grad is None
            torch.testing.assert_close(
                parameter.detach(), leaf.detach(), rtol=1e-11, atol=1e-12, msg=f"{name} step {step}"
            )


def test_a_table_looked_up_twice_is_updated_once_with_the_sum() -> None:
    """Twice in a step and by two kinds of collection; the same as one dense gradient step."""
    ebc = EmbeddingBagCollection(configs())
    ec = EmbeddingCollection([EmbeddingConfig(11, 4, "user", feature_names=["user"])])
    ec.embeddings["user"].weight = ebc.embedding_bags["user"].weight
    leaf = ebc.embedding_bags["user"].weight.detach().clone().requires_grad_()
    other = ebc.embedding_bags["item"].weight.detach().clone().requires_grad_()
    apply_optimizer_in_backward(torch.optim.Adagrad, ebc.parameters(), {"lr": 0.1})
    optimizer = torch.optim.Adagrad([leaf], lr=0.1)
    first, second = batch(4, 1), batch(2, 2)

    def loss(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return (a**2).sum() + (b**3).sum() + c.sum()

    loss(ebc(first).values(), ebc(second).values(), ec(first)["user"].values()).backward()
    leaves = {"user": leaf, "item": other}
    loss(plain(ebc, first, leaves), plain(ebc, second, leaves), leaf[first["user"].values()]).backward()
    optimizer.step()
    touched = leaf.grad.abs().sum(1) > 0
    torch.testing.assert_close(ebc.embedding_bags["user"].weight[touched], leaf[touched])
    state = ebc.fused_optimizer.state_dict()["state"]["embedding_bags.user.weight"]
    assert int(state["step"]) == 1


def test_a_shared_holder_shares_the_optimizer_through_a_copy() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ebc = EmbeddingBagCollection(configs())
            self.ec = EmbeddingCollection([EmbeddingConfig(11, 4, "user", feature_names=["user"])])
            self.ec.embeddings["user"] = self.ebc.embedding_bags["user"]

    model = Both()
    apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 1.0})
    model = copy.deepcopy(model)
    kjt = batch(3, 1)
    before = model.ebc.embedding_bags["user"].weight.detach().clone()
    model.ec(kjt)["user"].values().sum().backward()
    counts = torch.bincount(kjt["user"].values(), minlength=11)
    torch.testing.assert_close(model.ebc.embedding_bags["user"].weight.detach(), before - counts[:, None])
    assert model.ec.embeddings["user"].weight is model.ebc.embedding_bags["user"].weight


def test_two_forwards_then_two_backwards_update_twice() -> None:
    ebc = EmbeddingBagCollection(configs())
    apply_optimizer_in_backward(torch.optim.SGD, ebc.parameters(), {"lr": 0.5})
    before = {name: value.clone() for name, value in ebc.state_dict().items()}
    first, second = ebc(batch(3, 1)).values(), ebc(batch(3, 2)).values()
    first.sum().backward()
    second.sum().backward()
    dense = EmbeddingBagCollection(configs())
    dense.load_state_dict(before)
    (dense(batch(3, 1)).values().sum() + dense(batch(3, 2)).values().sum()).backward()
    for got, want in zip(ebc.parameters(), dense.parameters(), strict=True):
        torch.testing.assert_close(got, want - 0.5 * want.grad)


def test_a_forward_without_backward_blocks_nothing() -> None:
    ebc = EmbeddingBagCollection(configs())
    apply_optimizer_in_backward(torch.optim.SGD, ebc.parameters(), {"lr": 0.5})
    ebc(batch(3, 1))
    ebc(batch(3, 1)).values().sum().backward()
    assert int(ebc.fused_optimizer.state_dict()["state"]["embedding_bags.user.weight"]["step"]) == 1


def test_a_second_backward_through_a_kept_graph_is_an_error() -> None:
    ebc = EmbeddingBagCollection(configs())
    apply_optimizer_in_backward(torch.optim.SGD, ebc.parameters(), {"lr": 0.5})
    loss = ebc(batch()).values().sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="ran a second time"):
        loss.backward()


def test_a_pass_that_died_leaves_nothing_behind() -> None:
    """An error elsewhere in the backward: its records are dropped, the next pass updates with its own alone."""
    ebc = EmbeddingBagCollection(configs())
    apply_optimizer_in_backward(torch.optim.SGD, ebc.parameters(), {"lr": 0.5})
    scale = torch.ones(1, requires_grad=True)
    scale.register_hook(lambda grad: 1 / 0)
    before = ebc.embedding_bags["user"].weight.detach().clone()
    out = ebc(batch()).values()
    with pytest.raises(ZeroDivisionError):
        (out.sum() + (scale * 2).sum()).backward()
    kjt = batch(3, 5)
    moved = ebc.embedding_bags["user"].weight.detach().clone()
    ebc(kjt)["user"].sum().backward()
    counts = torch.bincount(kjt["user"].values(), minlength=11)
    torch.testing.assert_close(ebc.embedding_bags["user"].weight.detach(), moved - 0.5 * counts[:, None])
    assert torch.equal(moved, before)


def test_one_frozen_one_attached_one_plain_table() -> None:
    tables = [EmbeddingBagConfig(9, 4, name, feature_names=["f"]) for name in ("frozen", "attached", "plain")]
    ebc = EmbeddingBagCollection(tables)
    ebc.embedding_bags["frozen"].weight.requires_grad_(False)
    apply_optimizer_in_backward(torch.optim.SGD, [ebc.embedding_bags["attached"].weight], {"lr": 1.0})
    before = {name: value.clone() for name, value in ebc.state_dict().items()}
    ebc(KeyedJaggedTensor.from_lengths_sync(["f"], torch.tensor([1, 1]), torch.tensor([2]))).values().sum().backward()
    changed = {name: not torch.equal(value, before[name]) for name, value in ebc.state_dict().items()}
    assert changed == {f"embedding_bags.{n}.weight": n == "attached" for n in ("frozen", "attached", "plain")}
    grads = {name: table.weight.grad for name, table in ebc.embedding_bags.items()}
    assert grads["frozen"] is None
    assert grads["attached"] is None
    assert torch.equal(grads["plain"][1], torch.full((4,), 2.0))


def test_sample_weight_gradients_read_the_weights_before_the_update() -> None:
    ebc = EmbeddingBagCollection(configs(), is_weighted=True)
    kjt = batch(3, 2, weighted=True)
    kjt.weights().requires_grad_()
    expected = torch.autograd.grad((plain(ebc, kjt) ** 2).sum(), kjt.weights())[0]
    apply_optimizer_in_backward(torch.optim.SGD, ebc.parameters(), {"lr": 10.0})
    (ebc(kjt).values() ** 2).sum().backward()
    torch.testing.assert_close(kjt.weights().grad, expected)


@pytest.mark.parametrize("policy", ["error", "skip"])
def test_gradients_that_are_not_finite_raise_or_are_counted(policy: str) -> None:
    ebc = EmbeddingBagCollection(configs())
    from tilerec.spec.optimizer import SGD

    apply_optimizer_in_backward(SGD(0.1, non_finite=policy), ebc.parameters())
    before = {name: value.clone() for name, value in ebc.state_dict().items()}
    loss = (ebc(batch(4, 1)).values() * float("inf")).sum()
    if policy == "error":
        with pytest.raises(NonFiniteGradientError, match="Table 'user': the summed gradient of row"):
            loss.backward()
    else:
        loss.backward()
        assert ebc.embedding_bags["user"].rows.skipped_rows > 0
    assert all(torch.equal(value, before[name]) for name, value in ebc.state_dict().items())


def test_a_written_learning_rate_holds_from_the_next_backward() -> None:
    ebc = EmbeddingBagCollection(configs())
    apply_optimizer_in_backward(torch.optim.SGD, ebc.parameters(), {"lr": 1.0})
    scheduler = torch.optim.lr_scheduler.StepLR(ebc.fused_optimizer, step_size=1, gamma=0.5)
    kjt = batch(3, 1)
    counts = torch.bincount(kjt["item"].values(), minlength=7) > 0
    deltas = []
    for _ in range(3):
        before = ebc.embedding_bags["item"].weight.detach().clone()
        ebc(kjt)["item"].sum().backward()
        deltas.append((ebc.embedding_bags["item"].weight.detach() - before)[counts].sum())
        scheduler.optimizer.step()
        scheduler.step()
    assert deltas[1].item() == pytest.approx(deltas[0].item() / 2, rel=1e-4)
    assert deltas[2].item() == pytest.approx(deltas[0].item() / 4, rel=1e-4)


def test_optimizer_state_is_saved_by_name_and_loaded_in_place() -> None:
    ebc, twin = EmbeddingBagCollection(configs()), EmbeddingBagCollection(configs())
    for module in (ebc, twin):
        apply_optimizer_in_backward(torch.optim.Adam, module.parameters(), {"lr": 0.1})
    ebc(batch(3, 1)).values().sum().backward()
    twin.load_state_dict(ebc.state_dict())
    twin.fused_optimizer.load_state_dict(copy.deepcopy(ebc.fused_optimizer.state_dict()))
    for module in (ebc, twin):
        (module(batch(3, 2)).values() ** 2).sum().backward()
    for got, want in zip(twin.parameters(), ebc.parameters(), strict=True):
        assert torch.equal(got, want)


# ------------------------------------------------------------------------------------ other tensors for the leaves


@pytest.mark.parametrize("attached", [False, True])
def test_functional_call_gives_the_gradient_to_the_tensor_it_was_given(attached: bool) -> None:
    """The table itself is neither read nor updated, and the next plain step updates it as ever."""
    ebc = EmbeddingBagCollection(configs())
    if attached:
        apply_optimizer_in_backward(torch.optim.SGD, ebc.parameters(), {"lr": 0.5})
    kjt = batch(4, 1)
    name = "embedding_bags.user.weight"
    given = torch.randn(11, 4, requires_grad=True)
    before = {key: value.clone() for key, value in ebc.state_dict().items()}
    leaves = {"user": given.detach().clone().requires_grad_(), "item": before["embedding_bags.item.weight"]}
    (plain(ebc, kjt, leaves) ** 2).sum().backward()

    def loss(weight: Tensor) -> Tensor:
        return (torch.func.functional_call(ebc, {name: weight}, (kjt,)).values() ** 2).sum()

    (got,) = torch.autograd.grad(loss(given), [given])
    torch.testing.assert_close(got, leaves["user"].grad)
    loss(given).backward()
    torch.testing.assert_close(given.grad, leaves["user"].grad)
    loss(given * 1).backward()  # not a leaf: the gradient goes on
    torch.testing.assert_close(given.grad, 2 * leaves["user"].grad)
    assert ebc.embedding_bags["user"].weight.grad is None
    assert torch.equal(ebc.embedding_bags["user"].weight, before[name])
    ebc(kjt).values().sum().backward()
    assert torch.equal(ebc.embedding_bags["user"].weight, before[name]) is not attached


@pytest.mark.parametrize("transform", ["grad", "vjp", "jvp", "vmap", "weights"])
def test_a_transform_of_a_lookup_is_refused_and_one_around_frozen_tables_works(transform: str) -> None:
    ebc = EmbeddingBagCollection(configs(), is_weighted=True)
    kjt = batch(3, weighted=True)
    name = "embedding_bags.item.weight"
    weight = ebc.embedding_bags["item"].weight.detach().clone()
    for parameter in ebc.parameters():
        parameter.requires_grad_(False)

    def loss(weight: Tensor) -> Tensor:
        return torch.func.functional_call(ebc, {name: weight}, (kjt,)).values().sum()

    def of_weights(weights: Tensor) -> Tensor:
        return ebc(KeyedJaggedTensor(kjt.keys(), kjt.values(), weights, kjt.lengths())).values().sum()

    run = {
        "grad": lambda: torch.func.grad(loss)(weight),
        "vjp": lambda: torch.func.vjp(loss, weight),
        "jvp": lambda: torch.func.jvp(loss, (weight,), (weight,)),
        "vmap": lambda: torch.func.vmap(loss)(torch.stack([weight, weight])),
        "weights": lambda: torch.func.jvp(of_weights, (kjt.weights(),), (kjt.weights(),)),
    }[transform]
    with pytest.raises(RuntimeError, match=r"EmbeddingBagCollection: lookups do not support torch\.func transforms"):
        run()
    dense = torch.func.grad(lambda scale: (ebc(kjt).values() * scale).sum())(torch.tensor(2.0))
    torch.testing.assert_close(dense, ebc(kjt).values().sum())


def test_a_collection_may_be_made_under_any_default_device() -> None:
    with torch.device("meta"):
        ebc = EmbeddingBagCollection(configs())
    assert ebc.device.type == "meta"
    ebc.to_empty(device="cpu")
    ebc.reset_parameters()
    tied(ebc)


# ------------------------------------------------------------------------------------------------ bad input


def test_bad_input_is_named() -> None:
    ebc = EmbeddingBagCollection(configs())
    with pytest.raises(InputError, match="feature 'friend' of table 'user' is not in the batch"):
        ebc(batch(keys=("item", "user")))
    bad = KeyedJaggedTensor.from_lengths_sync(
        ["item", "user", "friend"], torch.tensor([1, 12, 0]), torch.tensor([1, 1, 1])
    )
    with pytest.raises(InputError, match="Table 'user': got id 12 of feature 'user'"):
        ebc(bad)
    floats = KeyedJaggedTensor.from_lengths_sync(["item", "user", "friend"], torch.zeros(3), torch.tensor([1, 1, 1]))
    with pytest.raises(InputError, match=r"got ids of dtype torch\.float32"):
        ebc(floats)
    with pytest.raises(ConfigError, match="got two tables named 'a'"):
        EmbeddingBagCollection([EmbeddingBagConfig(2, 2, "a"), EmbeddingBagConfig(2, 2, "a")])
    with pytest.raises(ConfigError, match="got num_embeddings=0"):
        EmbeddingBagConfig(0, 4, "t")


def test_a_collection_may_have_no_tables() -> None:
    ebc = EmbeddingBagCollection(tables=[])
    batch = KeyedJaggedTensor.from_lengths_sync(["item"], torch.tensor([1]), torch.tensor([1, 0]))
    pooled = ebc(batch)
    assert (pooled.keys(), pooled.values().shape, ebc.device) == ([], (2, 0), torch.device("cpu"))
    assert (list(ebc.parameters()), ebc.state_dict(), ebc.embedding_bag_configs()) == ([], {}, [])
    assert EmbeddingCollection(tables=[])(batch) == {}


def test_clamping_counts_and_warns() -> None:
    ebc = EmbeddingBagCollection(configs(), on_bad_id="clamp")
    bad = KeyedJaggedTensor.from_lengths_sync(
        ["item", "user", "friend"], torch.tensor([-4, 12, 0]), torch.tensor([1, 1, 1])
    )
    with pytest.warns(UserWarning, match="2 ids of this batch lay outside"):
        out = ebc(bad)
    assert ebc.clamped_ids == 2
    assert torch.equal(out["item"][0], ebc.embedding_bags["item"].weight[0])
    assert torch.equal(out["user"][0], ebc.embedding_bags["user"].weight[10])


def test_a_feature_is_clamped_into_each_of_its_tables() -> None:
    tables = [
        EmbeddingBagConfig(4, 2, "small", feature_names=["f"]),
        EmbeddingBagConfig(9, 2, "large", feature_names=["f", "g"]),
        EmbeddingBagConfig(6, 2, "middle", feature_names=["f"]),
    ]
    ebc = EmbeddingBagCollection(tables, on_bad_id="clamp")
    ec = EmbeddingCollection(
        [EmbeddingConfig(c.num_embeddings, 2, c.name, feature_names=c.feature_names) for c in tables],
        on_bad_id="clamp",
    )
    kjt = KeyedJaggedTensor.from_lengths_sync(
        ["f", "ignored", "g"], torch.tensor([-1, 3, 5, 7, 20, 99, 8]), torch.tensor([5, 1, 1])
    )
    want = {"small": [0, 3, 3, 3, 3], "middle": [0, 3, 5, 5, 5], "large": [0, 3, 5, 7, 8]}
    for module in (ebc, ec):
        with pytest.warns(UserWarning, match="4 ids of this batch lay outside"):
            out = module(kjt)
        assert module.clamped_ids == 4
        for name, rows in want.items():
            if module is ebc:
                weight = ebc.embedding_bags[name].weight
                torch.testing.assert_close(out[f"f@{name}"], weight[rows].sum(0, keepdim=True))
            else:
                assert torch.equal(out[f"f@{name}"].values(), ec.embeddings[name].weight[rows])
    assert torch.equal(out["g"].values(), ec.embeddings["large"].weight[[8]])


def test_what_is_no_batch_and_what_is_no_name_is_said() -> None:
    ebc = EmbeddingBagCollection(configs())
    for value, kind in (
        ({"item": torch.tensor([1])}, "dict"),
        (torch.tensor([1]), "Tensor"),
        (None, "NoneType"),
    ):
        with pytest.raises(InputError, match=f"EmbeddingBagCollection: got a {kind}; expected a KeyedJaggedTensor"):
            ebc(value)
    with pytest.raises(ConfigError, match="got table name 5 of type int; expected a str"):
        EmbeddingBagCollection([EmbeddingBagConfig(3, 2, 5)])  # type: ignore[arg-type]


def test_a_variable_batch_is_expanded_by_its_inverse_indices() -> None:
    ebc = EmbeddingBagCollection(configs())
    kjt = KeyedJaggedTensor(
        ["item", "user", "friend"], torch.tensor([1, 2, 3, 4, 5]), lengths=torch.tensor([1, 2, 0, 1, 1]),
        stride_per_key_per_rank=[[1], [2], [2]],
        inverse_indices=(["item", "user", "friend"], torch.tensor([[0, 0, 0], [1, 0, 1], [0, 0, 1]])),
    )  # fmt: skip
    out = ebc(kjt)
    weights = {name: table.weight for name, table in ebc.embedding_bags.items()}
    torch.testing.assert_close(out["item"], weights["item"][[1, 1, 1]])
    user = torch.stack([weights["user"][2] + weights["user"][3], torch.zeros(4)])
    torch.testing.assert_close(out["user"], user[[1, 0, 1]])
    torch.testing.assert_close(out["friend"], weights["user"][[4, 4, 5]])
    out.values().sum().backward()
    assert weights["item"].grad[1, 0] == 3


@pytest.mark.parametrize("readers", [1, 2])
def test_a_variable_batch_of_one_key_is_expanded_too(readers: int) -> None:
    configs = [
        EmbeddingBagConfig(5, 3, "a", feature_names=["item"]),
        EmbeddingBagConfig(9, 2, "b", feature_names=["item"]),
    ]
    ebc = EmbeddingBagCollection(configs[:readers])
    kjt = KeyedJaggedTensor(
        ["item"],
        torch.tensor([1, 2, 3]),
        lengths=torch.tensor([2, 1]),
        stride_per_key_per_rank=[[2]],
        inverse_indices=(["item"], torch.tensor([[0, 1, 1, 0]])),
    )
    plain = KeyedJaggedTensor(["item"], torch.tensor([1, 2, 3, 3, 1, 2]), lengths=torch.tensor([2, 1, 1, 2]))
    assert torch.equal(ebc(kjt).values(), ebc(plain).values())
