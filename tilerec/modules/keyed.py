"""Modules that convert between keyed containers, for models written as a chain of modules.

ComputeKJTToJTDict   KeyedJaggedTensor            -> dict of feature -> JaggedTensor
ComputeJTDictToKJT   dict of feature -> JaggedTensor -> KeyedJaggedTensor
KTRegroupAsDict      list of KeyedTensor          -> dict of group -> dense tensor
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor, nn

from tilerec.errors import ConfigError
from tilerec.sparse.columns import Columns
from tilerec.sparse.jagged_tensor import JaggedTensor
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from tilerec.sparse.keyed_tensor import KeyedTensor, common_key_dim
from tilerec.sparse.regroup import RegroupPlan
from tilerec.spec.table import DataType, data_type_to_dtype


@final
class ComputeKJTToJTDict(nn.Module):
    """`KeyedJaggedTensor.to_dict` as a module."""

    def forward(self, keyed_jagged_tensor: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Return the bags of every feature, as views."""
        return keyed_jagged_tensor.to_dict()


@final
class ComputeJTDictToKJT(nn.Module):
    """`KeyedJaggedTensor.from_jt_dict` as a module."""

    def forward(self, jt_dict: dict[str, JaggedTensor]) -> KeyedJaggedTensor:
        """Return the features of the dict in its order; different batch sizes make a variable batch."""
        return KeyedJaggedTensor.from_jt_dict(jt_dict)


@final
class KTRegroupAsDict(nn.Module):
    """`KeyedTensor.regroup_as_dict` with a cached copy plan, computed at the first batch and when columns change.

    Args:
        groups: for each output, the keys whose columns it contains.
        keys: the name of each output.
        emb_dtype: type of the outputs; None keeps the type of the inputs.
        multi_device: no effect; inputs of any device work the same way.

    Raises:
        ConfigError: not exactly one name per group, or a name twice.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[str]],
        keys: Sequence[str],
        emb_dtype: DataType | None = None,
        multi_device: bool = False,
    ) -> None:
        super().__init__()
        if len(groups) != len(keys) or len(set(keys)) != len(keys):
            raise ConfigError(
                f"KTRegroupAsDict: got {len(groups)} groups and keys={list(keys)}; expected one name per group, each "
                "once."
            )
        if multi_device:
            warnings.warn("KTRegroupAsDict: multi_device has no effect. Leave it out.", stacklevel=2)
        self._groups = tuple(tuple(group) for group in groups)
        self._keys = tuple(keys)
        self._dtype: torch.dtype | None = None if emb_dtype is None else data_type_to_dtype(emb_dtype)
        self._inputs: tuple[Columns, ...] | None = None
        self._plan: RegroupPlan | None = None

    def forward(self, keyed_tensors: Sequence[KeyedTensor]) -> dict[str, Tensor]:
        """Return, by name, the concatenated columns of each group's keys."""
        outputs = self._plan_for(keyed_tensors).apply(
            [keyed.values() for keyed in keyed_tensors], common_key_dim(keyed_tensors)
        )
        if self._dtype is not None:
            outputs = [output.to(self._dtype) for output in outputs]
        return dict(zip(self._keys, outputs, strict=True))

    def _plan_for(self, keyed_tensors: Sequence[KeyedTensor]) -> RegroupPlan:
        inputs = tuple(keyed.columns() for keyed in keyed_tensors)
        if torch.compiler.is_compiling():
            return RegroupPlan.make(inputs, self._groups)
        if self._plan is None or self._inputs != inputs:
            self._plan = RegroupPlan.make(inputs, self._groups)
            self._inputs = inputs
        return self._plan
