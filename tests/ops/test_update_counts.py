"""Update counts and learning rates in tensors."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tilerec.errors import InputError
from tilerec.ops.update.calls import RuleTables
from tilerec.ops.update.counts import check_counts


def _tables(lr: Tensor) -> RuleTables:
    count = torch.zeros((), dtype=torch.int64)
    return RuleTables([torch.zeros(1, 1)], [], "sgd", [], [], [0, 0], [0], [0], None, [count], lr)


@pytest.mark.parametrize("lr", [torch.tensor([0.1]), torch.tensor(1)])
def test_a_learning_rate_of_another_shape_or_type_is_refused(lr: Tensor) -> None:
    check_counts("update", _tables(torch.tensor(0.1)))
    with pytest.raises(InputError, match=r"update: lr has shape .* expected one floating-point number"):
        check_counts("update", _tables(lr))
