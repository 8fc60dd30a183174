"""Modules that change how features are keyed: for models written as a chain of modules.

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
        """Every feature's bags, as views."""
        return keyed_jagged_tensor.to_dict()


@final
class ComputeJTDictToKJT(nn.Module):
    """`KeyedJaggedTensor.from_jt_dict` as a module."""

    def forward(self, jt_dict: dict[str, JaggedTensor]) -> KeyedJaggedTensor:
        """The features of the dict in its order; different batch sizes make a variable batch."""
        return KeyedJaggedTensor.from_jt_dict(jt_dict)


@final
class KTRegroupAsDict(nn.Module):
    """`KeyedTensor.regroup_as_dict` with the copies worked out once, at the first batch of a kind.

    Args:
        groups: for each output the keys whose columns it consists of.
        keys: the name of each output.
        emb_dtype: convert the outputs to this type; as they are by default.
        multi_device: has no effect: inputs of any device work the same way.

    Raises `ConfigError` unless there is one name per group, each once.
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
                f"KTRegroupAsDict: {len(groups)} groups and names {list(keys)}; wanted one name per group, each once."
            )
        if multi_device:
            warnings.warn("KTRegroupAsDict: multi_device has no effect; leave it out.", stacklevel=2)
        self._groups = tuple(tuple(group) for group in groups)
        self._keys = tuple(keys)
        self._dtype: torch.dtype | None = None if emb_dtype is None else data_type_to_dtype(emb_dtype)
        self._inputs: tuple[Columns, ...] | None = None
        self._plan: RegroupPlan | None = None

    def forward(self, keyed_tensors: Sequence[KeyedTensor]) -> dict[str, Tensor]:
        """For each group, by name, the columns of its keys side by side."""
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
