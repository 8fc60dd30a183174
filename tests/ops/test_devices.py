"""Every tensor of a call is on one device, whichever op it is."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.ops.op_cases import cases
from tilerec.errors import InputError
from tilerec.ops.runtime.devices import OTHER_DEVICE_ARGUMENTS, on_one_device


def _moves() -> list[tuple[str, str]]:
    """Each tensor argument of each op that has others beside it."""
    found = []
    for op, make in cases("cpu").items():
        schema = getattr(torch.ops.tilerec, op).default._schema
        given = [
            argument.name
            for argument, value in zip(schema.arguments, make(), strict=False)
            if argument.name not in OTHER_DEVICE_ARGUMENTS
            and (isinstance(value, Tensor) or (isinstance(value, list) and value and isinstance(value[0], Tensor)))
        ]
        found += [(op, name) for name in given if len(given) > 1]
    return found


@pytest.mark.parametrize(("op", "name"), _moves())
def test_a_tensor_on_meta_among_others_is_refused_by_name(op: str, name: str) -> None:
    overload = getattr(torch.ops.tilerec, op).default
    names = [argument.name for argument in overload._schema.arguments]
    arguments = list(cases("cpu")[op]())
    value = arguments[names.index(name)]
    moved = value.to("meta") if isinstance(value, Tensor) else [value[0].to("meta"), *value[1:]]
    arguments[names.index(name)] = moved
    with torch.no_grad(), pytest.raises(InputError, match="on meta") as caught:
        overload(*arguments)
    assert name in str(caught.value) or str(caught.value).startswith("Table '")


def test_all_tensors_on_meta_are_one_device() -> None:
    out, _ = torch.ops.tilerec.pooled_lookup(
        [torch.empty(4, 3, device="meta")], torch.empty(0, dtype=torch.int64),
        torch.empty(2, dtype=torch.int64, device="meta"), torch.empty(3, dtype=torch.int64, device="meta"), None, [0],
        [0], [0], [2], torch.float32, "f@t",
    )  # fmt: skip
    assert (out.device.type, out.shape) == ("meta", (2, 3))


def test_of_an_order_the_host_reads_the_last_tensor() -> None:
    """`order_rows` leaves the first keys of tables on the host, where an update on a GPU reads them."""
    called: list[int] = []
    schema = torch.ops.tilerec.update_rows_.default._schema
    names = [argument.name for argument in schema.arguments]
    update = on_one_device("update_rows_", lambda *given: called.append(len(given)), schema)
    far, near = torch.empty(4, device="meta"), torch.zeros(4)

    def given(*ordered: Tensor) -> list[object]:
        tensors = {"weights": [far], "grad": far, "ids": far, "offsets": far, "ordered": list(ordered)}
        return [tensors.get(name) for name in names]

    update(*given(far, far, far, near))
    assert called == [len(names)]
    with pytest.raises(InputError, match=r"update_rows_: .*ordered\[1\]"):
        update(*given(far, near, far, near))
