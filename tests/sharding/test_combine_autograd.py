"""The exchange as one node of autograd: what a loss leaves out, what runs twice, where no gradient is wanted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.sharding.routed_batches import batch_of, rows, sharded
from tilerec.comms.group import Group
from tilerec.errors import InputError
from tilerec.optim.attach import apply_optimizer_in_backward
from tilerec.sharding.combine_autograd import pooled_output
from tilerec.spec.optimizer import SGD, Adagrad, Adam
from tilerec.spec.plan import Wire
from tilerec.spec.tile import Tiling
from tilerec.testing.batches import random_batch
from tilerec.testing.virtual import run_virtual_ranks

TABLE = torch.arange(80).view(20, 4) % 97.0


# ---------------------------------------------------------------------------------------------------- output


def test_slots_lie_side_by_side_in_a_uniform_output() -> None:
    output = pooled_output([2, 3], [4, 4], True, [None, None])
    flat = torch.arange(20.0)
    assert output.size == 20
    assert torch.equal(output.block(flat, 0), flat.view(4, 5)[:, :2])
    assert torch.equal(output.block(flat, 1), flat.view(4, 5)[:, 2:])


def test_slots_follow_each_other_where_their_bags_differ() -> None:
    output = pooled_output([2, 3], [4, 1], False, [None, None])
    flat = torch.arange(11.0)
    assert output.size == 11
    assert torch.equal(output.block(flat, 0), flat[:8].view(4, 2))
    assert torch.equal(output.block(flat, 1), flat[8:].view(1, 3))


def test_means_divide_their_own_columns_only() -> None:
    output = pooled_output([1, 2], [2, 2], True, [None, torch.tensor([2.0, 4.0])])
    assert torch.equal(
        output.divide_(torch.full((6,), 8.0)).view(2, 3), torch.tensor([[8.0, 4.0, 4.0], [8.0, 2.0, 2.0]])
    )


def test_a_gradient_in_rows_of_a_wider_matrix_is_read_where_it_is() -> None:
    output = pooled_output([1, 2], [2, 2], True, [None, torch.tensor([2.0, 4.0])])
    wide = torch.arange(10.0).view(2, 5)
    seen, flat = output.of_gradient(wide[:, 1:4])
    assert flat.untyped_storage().data_ptr() == wide.untyped_storage().data_ptr()
    assert torch.equal(seen.block(flat, 0), wide[:, 1:2])
    assert torch.equal(seen.block(flat, 1), wide[:, 2:4])
    divided = seen.divide_(flat.clone())
    assert torch.equal(seen.block(divided, 1), torch.tensor([[1.0, 1.5], [7 / 4, 2.0]]))


@pytest.mark.parametrize("view", ["transposed", "expanded", "every second"])
def test_a_gradient_in_another_order_is_copied(view: str) -> None:
    output = pooled_output([1, 2], [4, 4], True, [None, None])
    made = torch.arange(24.0)
    views = {"transposed": made[:12].view(3, 4).t(), "expanded": made[:3].expand(4, 3), "every second": made.view(4, 6)}
    grad = views[view][:, ::2] if view == "every second" else views[view]
    seen, flat = output.of_gradient(grad)
    assert torch.equal(torch.cat([seen.block(flat, 0), seen.block(flat, 1)], dim=1), grad)


def test_no_slots_and_no_samples_make_an_empty_output() -> None:
    assert pooled_output([], [], True, []).size == 0
    assert pooled_output([4], [0], True, [None]).size == 0


# ---------------------------------------------------------------------------------------------------- backward


def trained(group: Group, loss: Any, features: tuple[str, ...] = ("a", "b"), hosts: Any = None) -> Tensor:
    """The rank's rows after one step of SGD(lr=1) on `loss(rank, out)`."""
    module = sharded(group, rows(20, group.size), features, hosts=hosts)
    apply_optimizer_in_backward(SGD(lr=1.0), module.parameters())
    bags = [[0, 5, 10, 15], [1, 6, 11, 16]]
    loss(group.rank, module(batch_of(bags * len(features), keys=features))).backward()
    return module.embedding_bags["t"].weight.detach()


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_concatenation_after_the_lookup_trains_as_the_output_itself(ranks: int) -> None:
    scale = torch.arange(1.0, 17.0).view(2, 8)

    def beside(rank: int, out: Any) -> Tensor:
        joined = torch.cat([torch.ones(2, 3), out.values(), torch.ones(2, 1)], dim=1)
        return (joined * torch.nn.functional.pad(scale, (3, 1))).sum()

    def alone(rank: int, out: Any) -> Tensor:
        return (out.values() * scale).sum()

    joined, itself = (run_virtual_ranks(ranks, trained, loss) for loss in (beside, alone))
    assert all(torch.equal(own, other) for own, other in zip(joined, itself, strict=True))


@pytest.mark.parametrize("hosts", [None, [[0, 1], [2, 3]]], ids=["one host", "two hosts"])
def test_a_feature_that_one_rank_leaves_out_of_its_loss_gives_zeros_there(hosts: Any) -> None:
    """Ranks 0 to 2 use both features, rank 3 only "b": rows move by 2 + 2 + 2 + 1 quarters."""

    def loss(rank: int, out: Any) -> Tensor:
        return out["b"].sum() if rank == 3 else out.values().sum()

    got = torch.cat(run_virtual_ranks(4, trained, loss, ("a", "b"), hosts))
    touched = torch.tensor([0, 5, 10, 15, 1, 6, 11, 16])
    expected = TABLE.clone()
    expected[touched] -= 7 / 4
    assert torch.equal(got, expected)


def test_a_loss_of_one_sample_reaches_only_its_rows() -> None:
    def loss(rank: int, out: Any) -> Tensor:
        return out.values()[0].sum() * (rank == 1)

    got = torch.cat(run_virtual_ranks(4, trained, loss, ("a",)))
    expected = TABLE.clone()
    expected[[0, 5, 10, 15]] -= 1 / 4
    assert torch.equal(got, expected)


def test_gradients_that_are_no_plain_memory_travel_too() -> None:
    """`sum()` hands an expanded scalar back, a transpose other strides."""

    def loss(rank: int, out: Any) -> Tensor:
        return (out.values().T * torch.arange(1.0, 3.0)).T.sum() if rank else out.values().sum()

    got = torch.cat(run_virtual_ranks(4, trained, loss, ("a",)))
    expected = TABLE.clone()
    expected[[0, 5, 10, 15]] -= 4 / 4
    expected[[1, 6, 11, 16]] -= (1 + 3 * 2) / 4
    assert torch.equal(got, expected)


def test_a_second_backward_is_refused_on_every_rank() -> None:
    """Rank 2 holds nothing of the table, and raises all the same: the others would not take part."""

    def fn(group: Group) -> str:
        module = sharded(group, Tiling.of("t", 20, 4, [(0, 10, 0, 4, 0), (10, 20, 0, 4, 1)]))
        apply_optimizer_in_backward(SGD(lr=1.0), module.parameters())
        loss = module(batch_of([[1, 12]])).values().sum()
        loss.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="second time") as caught:
            loss.backward()
        return str(caught.value)

    assert all("look the features up again" in message for message in run_virtual_ranks(3, fn))


def test_a_second_backward_adds_to_the_gradients_of_tables_without_an_optimizer() -> None:
    def fn(group: Group) -> tuple[Tensor, Tensor]:
        module = sharded(group, Tiling.of("t", 20, 4, [(0, 20, 0, 4, 0)]))
        loss = module(batch_of([[1, 12]])).values().sum()
        loss.backward(retain_graph=True)
        first = module.embedding_bags["t"].weight.grad.clone()
        loss.backward()
        return first, module.embedding_bags["t"].weight.grad

    (once, twice), (nothing, still) = run_virtual_ranks(2, fn)
    assert once.sum() == 8
    assert torch.equal(twice, 2 * once)
    assert nothing.shape == still.shape == (0, 4)


def test_a_pass_that_asks_for_other_tensors_leaves_the_table_alone_and_meets_on_every_rank() -> None:
    """Rank 1 holds nothing of the table, so only its empty leaf says that the pass does not concern it."""

    def fn(group: Group) -> tuple[Tensor, Tensor]:
        module = sharded(group, Tiling.of("t", 20, 4, [(0, 20, 0, 4, 0)]))
        apply_optimizer_in_backward(SGD(lr=1.0), module.parameters())
        scale = torch.ones(4, requires_grad=True)
        loss = (module(batch_of([[1, 12]])).values() * scale).sum()
        loss.backward(inputs=[scale], retain_graph=True)
        before = module.embedding_bags["t"].weight.detach().clone()
        loss.backward(inputs=[module.embedding_bags["t"].weight])
        return before, module.embedding_bags["t"].weight.detach()

    (before, after), _ = run_virtual_ranks(2, fn)
    assert torch.equal(before, TABLE)
    expected = TABLE.clone()
    expected[[1, 12]] -= 1.0
    assert torch.equal(after, expected)


def test_every_tile_of_a_table_that_the_pass_names_is_updated() -> None:
    """Rank 0 holds two tiles; `weight` stands for the table."""

    def fn(group: Group) -> list[Tensor]:
        module = sharded(group, Tiling.of("t", 20, 4, [(0, 5, 0, 4, 0), (5, 10, 0, 4, 1), (10, 20, 0, 4, 0)]))
        apply_optimizer_in_backward(SGD(lr=1.0), module.parameters())
        table = module.embedding_bags["t"]
        module(batch_of([[1, 12]])).values().sum().backward(inputs=[table.weight])
        return [leaf.detach() for leaf in table.leaves()]

    (first, second), _ = run_virtual_ranks(2, fn)
    expected = TABLE.clone()
    expected[[1, 12]] -= 1.0
    assert torch.equal(first, expected[:5])
    assert torch.equal(second, expected[10:])


def test_a_table_that_is_frozen_on_one_rank_only_is_refused_on_all() -> None:
    def fn(group: Group) -> str:
        module = sharded(group, rows(20, 2))
        module.requires_grad_(group.rank == 0)
        with pytest.raises(InputError) as caught:
            module(batch_of([[1, 12]]))
        return str(caught.value)

    for message in run_virtual_ranks(2, fn):
        assert message.startswith(
            "Table 't': it trains without an attached optimizer on rank 0 and is frozen on rank 1"
        )


@pytest.mark.parametrize("attached", [False, True])
@pytest.mark.parametrize("freeze", [False, True])
def test_the_weight_says_for_all_tiles_of_a_table_whether_they_are_trained(freeze: bool, attached: bool) -> None:
    """Rank 0 holds two tiles, the second beside a copy on rank 1; `weight` is switched after the first step."""

    def fn(group: Group) -> list[tuple[bool, bool]]:
        module = sharded(group, Tiling.of("t", 20, 4, [(0, 10, 0, 4, 0), (10, 20, 0, 4, (0, 1))]))
        if attached:
            apply_optimizer_in_backward(SGD(lr=1.0), module.parameters())
        module.requires_grad_(freeze)
        table = module.embedding_bags["t"]
        moved = []
        for _ in range(2):
            before = [leaf.detach().clone() for leaf in table.leaves()]
            out = module(batch_of([[1, 12]])).values()
            if out.requires_grad:
                out.sum().backward()
            if not attached:
                with torch.no_grad():
                    for leaf in table.leaves():
                        if leaf.requires_grad and leaf.grad is not None:
                            leaf -= leaf.grad
            moved.append(tuple(not torch.equal(a, b) for a, b in zip(before, table.leaves(), strict=True)))
            table.weight.requires_grad_(not freeze)
        return moved

    both, one = run_virtual_ranks(2, fn)
    assert both == [(freeze, freeze), (not freeze, not freeze)]
    assert one == [(freeze,), (not freeze,)]


def test_overflow_on_the_wire_keeps_all_columns_of_the_row() -> None:
    """65,536 * 2 is finite here and infinite in fp16, in the first of four columns."""

    def fn(group: Group) -> list[Tensor]:
        tiling = Tiling.of("t", 20, 4, [(0, 20, 0, 2, 0), (0, 20, 2, 4, 1)])
        module = sharded(group, tiling, wires={"t": Wire(backward="fp16")})
        apply_optimizer_in_backward(SGD(lr=1.0, grad_scale=65536.0, non_finite="skip"), module.parameters())
        out = module(batch_of([[1], [12]])).values()
        out.backward(torch.tensor([[2.0, 0.5, 0.5, 0.5], [0.5, 0.5, 0.5, 0.5]]) * 65536)
        return [leaf.detach() for leaf in module.embedding_bags["t"].leaves()]

    whole = torch.cat([leaves[0] for leaves in run_virtual_ranks(2, fn)], dim=1)
    assert torch.equal(whole[1], TABLE[1])
    assert torch.equal(whole[12], TABLE[12] - 0.5)


def test_a_gradient_that_is_not_finite_says_who_else_knows() -> None:
    def fn(group: Group) -> str:
        module = sharded(group, rows(20, 2))
        apply_optimizer_in_backward(SGD(lr=1.0), module.parameters())
        out = module(batch_of([[1]])).values()
        try:
            out.backward(torch.full((1, 4), float("inf")))
        except ValueError as error:
            return str(error)
        return ""

    owner, other = run_virtual_ranks(2, fn)
    assert "Only ranks that hold such a row raise this" in owner
    assert other == ""


@pytest.mark.parametrize("rule", [SGD(lr=1.0, non_finite="skip"), Adagrad(lr=1.0, non_finite="skip"),
                                  Adam(lr=1.0, non_finite="skip")], ids=lambda rule: type(rule).__name__)  # fmt: skip
def test_a_row_with_one_column_that_is_not_finite_stays_whole_under_column_cuts(rule: Any) -> None:
    """Column 3 of sample 1's gradient is infinite: its row 12 keeps all four columns, as unsharded; row 1 moves."""

    def fn(group: Group, tiles: Any) -> list[Tensor]:
        module = sharded(group, Tiling.of("t", 20, 4, tiles))
        apply_optimizer_in_backward(rule, module.parameters())
        out = module(batch_of([[1], [12]])).values()
        out.backward(torch.tensor([[1.0, 1, 1, 1], [1, 1, 1, float("inf")]]))
        return [leaf.detach() for leaf in module.embedding_bags["t"].leaves()]

    (left,), (right,) = run_virtual_ranks(2, fn, [(0, 20, 0, 2, 0), (0, 20, 2, 4, 1)])
    ((whole,), _) = run_virtual_ranks(2, fn, [(0, 20, 0, 4, 0)])
    assert torch.equal(torch.cat([left, right], dim=1), whole)
    assert torch.equal(whole[12], TABLE[12])
    assert not torch.equal(whole[1], TABLE[1])


def test_without_grad_nothing_is_kept_and_nothing_travels_back() -> None:
    def fn(group: Group) -> tuple[bool, set[str]]:
        module = sharded(group, rows(20, 2))
        with torch.no_grad():
            out = module(batch_of([[1, 12]])).values()
        return out.requires_grad, {sent.name for sent in group.traffic}

    assert run_virtual_ranks(2, fn) == [(False, {"header", "ids", "rows"})] * 2


def test_frozen_tables_give_outputs_without_gradients() -> None:
    def fn(group: Group) -> bool:
        module = sharded(group, rows(20, 2))
        module.requires_grad_(False)
        return bool(module(batch_of([[1, 12]])).values().requires_grad)

    assert run_virtual_ranks(2, fn) == [False, False]


def test_dense_gradients_fill_the_leaf_of_each_tile() -> None:
    """Without an attached optimizer; summed over ranks and divided by W, zeros where no id fell."""

    def fn(group: Group) -> Tensor:
        module = sharded(group, rows(20, 4))
        module(batch_of([[0, 5, 5], [19]])).values().sum().backward()
        grad = module.embedding_bags["t"].weight.grad
        assert grad.is_contiguous()
        return grad

    grad = torch.cat(run_virtual_ranks(4, fn))
    expected = torch.zeros(20, 4)
    expected[0], expected[5], expected[19] = 1.0, 2.0, 1.0
    assert torch.equal(grad, expected)


def test_dense_gradients_add_up_over_backwards() -> None:
    def fn(group: Group) -> Tensor:
        module = sharded(group, rows(20, 2))
        for _ in range(3):
            module(batch_of([[0, 12]])).values().sum().backward()
        return module.embedding_bags["t"].weight.grad

    grad = torch.cat(run_virtual_ranks(2, fn))
    expected = torch.zeros(20, 4)
    expected[[0, 12]] = 3.0
    assert torch.equal(grad, expected)


def test_two_lookups_of_one_step_update_each_row_once() -> None:
    """Momentum would show a second update: v = g, w -= g, with g the sum of both lookups."""

    def fn(group: Group) -> Tensor:
        module = sharded(group, rows(20, 2))
        apply_optimizer_in_backward(SGD(lr=1.0, momentum=0.5), module.parameters())
        first, second = module(batch_of([[0, 12]])), module(batch_of([[0]]))
        (first.values().sum() + second.values().sum()).backward()
        assert int(module.embedding_bags["t"].rows.updates) == 1
        return module.embedding_bags["t"].weight.detach()

    got = torch.cat(run_virtual_ranks(2, fn))
    expected = TABLE.clone()
    expected[0] -= 2.0
    expected[12] -= 1.0
    assert torch.equal(got, expected)


def test_a_rank_without_samples_and_its_peers_meet_in_the_backward() -> None:
    def fn(group: Group) -> Tensor:
        module = sharded(group, rows(20, 2))
        apply_optimizer_in_backward(SGD(lr=1.0), module.parameters())
        features = random_batch(["a"], 20, 0) if group.rank else batch_of([[0, 12]])
        out = module(features).values()
        assert out.shape == (0 if group.rank else 1, 4)
        out.sum().backward()
        return module.embedding_bags["t"].weight.detach()

    got = torch.cat(run_virtual_ranks(2, fn))
    expected = TABLE.clone()
    expected[[0, 12]] -= 1 / 2
    assert torch.equal(got, expected)
