"""Feature processors: transformations of a feature's ids and weights before the lookup.

Nouns
  position         index of an id in its bag, from 0: `position_N = arange(N) - offsets[bag of N]`
  position weight  a learned number per feature and position; a pooled lookup multiplies the row at that position by it

Legend of the shapes in names: N ids, B bags of one feature, F features, FB bags of all features (feature-major),
L max_feature_length of one feature.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from tilerec.errors import ConfigError, InputError
from tilerec.modules.utils import check_size
from tilerec.ops.jagged.definition import repeat_segments
from tilerec.ops.runtime.fetch import host_readable
from tilerec.ops.runtime.upload import upload
from tilerec.sparse.jagged_tensor import JaggedTensor
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from tilerec.torch_private import assert_async

_NO_LIMIT = torch.iinfo(torch.int64).max


def _precise_errors(lengths: Tensor) -> bool:
    """Return True if the host can read `lengths` without waiting for a device: in eager mode, on the CPU."""
    return host_readable(lengths) and not torch.compiler.is_compiling()


def _assert_on_device(fits: Tensor, message: str) -> None:
    """Assert `fits` on its device, without blocking the host; skip meta tensors."""
    if not fits.is_meta:
        assert_async(fits, message)


def _count_from(first_B: Tensor, offsets_B1: Tensor, total: int) -> Tensor:
    """Number the ids of each bag upwards from `first_B`: `first[bag of n] + n - offsets[bag of n]`, int64 [N].

    first [0, 9, 5], offsets [0, 2, 2, 4] -> [0, 1, 5, 6]

    The result is one cumulative sum: a step of 1 per id, plus a jump at the start of each bag to its first number. The
    jumps of empty bags fall on the same id and add up. A lookup of every id's bag takes about three times as long.
    """
    jump_B = torch.diff(first_B - offsets_B1[:-1], prepend=first_B.new_ones(1)).to(torch.int64)
    step_N1 = torch.ones(total + 1, dtype=torch.int64, device=offsets_B1.device)
    return step_N1.scatter_add_(0, offsets_B1[:-1].to(torch.int64), jump_B).cumsum_(0)[:total]


class FeatureProcessor(nn.Module, abc.ABC):
    """Map from one feature's `JaggedTensor` to another, usually with other weights."""

    @abc.abstractmethod
    def forward(self, features: JaggedTensor) -> JaggedTensor: ...


class PositionWeightedModule(FeatureProcessor):
    """Learned weight of each id by its position in the bag; replaces the input's weights.

    Args:
        max_feature_length: L, the maximum number of ids per bag.
        device: of the weights.

    Shape: a `JaggedTensor` of N ids to one with the same ids and weights [N].

    State: `position_weight` [L], initially ones.

    Raises:
        ConfigError: L is below 1.
        InputError: a bag has more than L ids. Raised in eager mode on the CPU; otherwise the device raises a
            RuntimeError that names L.

    Weights [0.5, 0.2] over bags [7], [], [7, 8] give [0.5, 0.5, 0.2].
    """

    def __init__(self, max_feature_length: int, device: torch.device | None = None) -> None:
        super().__init__()
        length = check_size("PositionWeightedModule: max_feature_length", max_feature_length)
        self.position_weight = nn.Parameter(torch.empty(length, device=device))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set all weights to 1."""
        with torch.no_grad():
            self.position_weight.fill_(1.0)

    def forward(self, features: JaggedTensor) -> JaggedTensor:
        lengths_B, offsets_B1, limit = features.lengths(), features.offsets(), self.position_weight.shape[0]
        if _precise_errors(lengths_B):
            if lengths_B.numel() and int(lengths_B.max()) > limit:
                bag = int((lengths_B > limit).nonzero()[0])
                raise InputError(
                    f"PositionWeightedModule: got {int(lengths_B[bag])} ids in bag {bag}; expected at most "
                    f"max_feature_length={limit}. Increase max_feature_length or truncate the bags."
                )
        else:
            _assert_on_device(
                (lengths_B <= limit).all(),
                f"PositionWeightedModule: a bag has more ids than max_feature_length={limit}. Increase "
                "max_feature_length or truncate the bags.",
            )
        first_B = torch.zeros_like(offsets_B1[:-1])
        position_N = _count_from(first_B, offsets_B1, features.values().shape[0])
        return JaggedTensor(
            values=features.values(),
            weights=self.position_weight.index_select(0, position_N),
            lengths=lengths_B,
            offsets=offsets_B1,
        )

    def extra_repr(self) -> str:
        return f"max_feature_length={self.position_weight.shape[0]}"


class FeatureProcessorsCollection(nn.Module, abc.ABC):
    """Map from one `KeyedJaggedTensor` to another: feature processors of several features."""

    @abc.abstractmethod
    def forward(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor: ...


class PositionWeightedModuleCollection(FeatureProcessorsCollection):
    """`PositionWeightedModule` for several features, with one gather for any number of them.

    Features without an entry get weight 1. Entries for features that the batch lacks are unused. The input's weights
    are replaced.

    Args:
        max_feature_lengths: the maximum number of ids per bag, by feature.
        device: of the weights.

    Shape: a `KeyedJaggedTensor` of N ids to one with the same ids and weights [N].

    State: `position_weights.<feature>` [L], initially ones.

    Raises:
        ConfigError: a length is below 1, or a feature's name cannot be part of a parameter's name.
        InputError: a bag has more ids than its feature's length. Raised in eager mode on the CPU; otherwise the device
            raises a RuntimeError.

    Weights a: [0.5, 0.2], b: [3.0] over a's bags [7], [7, 8] and b's bags [], [9] give [0.5, 0.5, 0.2, 3.0].
    """

    def __init__(self, max_feature_lengths: dict[str, int], device: torch.device | None = None) -> None:
        super().__init__()
        self.position_weights = nn.ParameterDict()
        for name, length in max_feature_lengths.items():
            check_size(f"PositionWeightedModuleCollection: max_feature_lengths['{name}']", length)
            try:
                self.position_weights[name] = nn.Parameter(torch.empty(length, device=device))
            except KeyError as error:
                raise ConfigError(
                    f"PositionWeightedModuleCollection: feature '{name}' cannot name a parameter ({error.args[0]}). "
                    "Rename the feature."
                ) from None
        self.max_feature_lengths = dict(max_feature_lengths)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set all weights to 1."""
        with torch.no_grad():
            for weight in self.position_weights.values():
                weight.fill_(1.0)

    def forward(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        return weigh_by_position(features, dict(self.position_weights.items()))

    def extra_repr(self) -> str:
        return f"max_feature_lengths={self.max_feature_lengths}"


class FeatureProcessorDictWrapper(FeatureProcessorsCollection):
    """One `FeatureProcessor` per feature as a collection.

    Features without a processor get weight 1. If all processors are position-weighted modules, one gather computes all
    weights. Otherwise each processor is called separately, and may change its feature's ids and weights.

    Args:
        feature_processors: by feature.

    State: `_feature_processors.<feature>.*`.
    """

    def __init__(self, feature_processors: nn.ModuleDict) -> None:
        super().__init__()
        self._feature_processors = feature_processors

    def forward(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        return apply_feature_processors_to_kjt(features, dict(self._feature_processors.items()))


def weigh_by_position(features: KeyedJaggedTensor, weights: Mapping[str, Tensor]) -> KeyedJaggedTensor:
    """Return `features` with each id weighted by its position; features absent from `weights` get weight 1.

    The weights of the batch's features are concatenated into one vector, indexed by `start of the feature + position`.
    A final 1 serves the features without weights.

    Args:
        features: N ids.
        weights: by feature, [L] of one floating dtype.

    Raises:
        InputError: a bag has more ids than its feature has weights.
    """
    keys = features.keys()
    found = [weights.get(key) for key in keys]
    starts: list[int] = []
    limits: list[int] = []
    end = 0
    for weight in found:
        starts.append(end)
        limits.append(_NO_LIMIT if weight is None else weight.shape[0])
        end += 0 if weight is None else weight.shape[0]
    values, lengths_FB, offsets_FB1 = features.values(), features.lengths(), features.offsets()
    device, total = values.device, values.shape[0]
    _check_positions(features, lengths_FB, limits)
    first = next((weight for weight in found if weight is not None), None)
    if first is None:
        weight_N = torch.ones(total, device=device)
    else:
        table = torch.cat([weight for weight in found if weight is not None] + [first.new_ones(1)])
        start_FB = _per_bag(upload(starts, device), features)
        index_N = _count_from(start_FB, offsets_FB1, total)
        if any(weight is None for weight in found):
            has_FB = _per_bag(upload([int(weight is not None) for weight in found], device), features)
            has_N = repeat_segments(has_FB, offsets_FB1, total)
            index_N = torch.where(has_N > 0, index_N, end)
        weight_N = table.index_select(0, index_N)
    return _with_weights(features, weight_N)


def _per_bag(rows_F: Tensor, features: KeyedJaggedTensor) -> Tensor:
    """Expand one entry per feature to one per bag."""
    if not features.variable_stride_per_key():
        if torch.compiler.is_exporting():  # a reshape of expanded rows would refuse batches of one sample
            return rows_F.new_zeros(rows_F.shape[0], features.stride()).add(rows_F.unsqueeze(1)).view(-1)
        return rows_F.unsqueeze(1).expand(-1, features.stride()).reshape(-1)
    strides = features.stride_per_key()
    return rows_F.repeat_interleave(upload(strides, rows_F.device), output_size=sum(strides))


def _check_positions(features: KeyedJaggedTensor, lengths_FB: Tensor, limits: list[int]) -> None:
    limit_FB = _per_bag(upload(limits, lengths_FB.device), features)
    if not _precise_errors(lengths_FB):
        shown = [(key, limit) for key, limit in zip(features.keys(), limits, strict=True) if limit != _NO_LIMIT][:8]
        _assert_on_device(
            (lengths_FB <= limit_FB).all(),
            f"Position weights: a bag has more ids than the max_feature_length of its feature (features, lengths: "
            f"{shown}). Increase max_feature_length or truncate the bags.",
        )
        return
    if not bool((lengths_FB > limit_FB).any()):
        return
    place = int((lengths_FB > limit_FB).nonzero()[0])
    bag = place
    for key, stride, limit in zip(features.keys(), features.stride_per_key(), limits, strict=True):
        if bag < stride:
            raise InputError(
                f"Feature '{key}': got {int(lengths_FB[place])} ids in bag {bag}; expected at most "
                f"max_feature_length={limit}. Increase max_feature_length or truncate the bags."
            )
        bag -= stride
    raise AssertionError("the lengths have more entries than the sum of the strides")


def _with_weights(features: KeyedJaggedTensor, weights: Tensor) -> KeyedJaggedTensor:
    """Return the same bags with `weights` in place of their own."""
    variable = features.variable_stride_per_key()
    return KeyedJaggedTensor(
        keys=features.keys(),
        values=features.values(),
        weights=weights,
        lengths=features.lengths(),
        offsets=features.offsets(),
        stride=None if variable else features.stride(),
        stride_per_key_per_rank=features.stride_per_key_per_rank() if variable else None,
        offset_per_key=features.offset_per_key_or_none(),
        inverse_indices=features.inverse_indices_or_none(),
    )


def apply_feature_processors_to_kjt(
    features: KeyedJaggedTensor, feature_processors: Mapping[str, nn.Module]
) -> KeyedJaggedTensor:
    """Apply each feature's processor; features without a processor get weight 1.

    Raises:
        InputError: a feature that has a processor is not in the batch, or a processor returned no weights.
    """
    keys = features.keys()
    known = set(keys)
    missing = [name for name in feature_processors if name not in known]
    if missing:
        raise InputError(
            f"Feature '{missing[0]}': it has a processor but is not in the batch, whose features are {keys}. Add it "
            "to the batch."
        )
    position_weights = {
        name: processor.position_weight
        for name, processor in feature_processors.items()
        if type(processor) is PositionWeightedModule
    }
    if len(position_weights) == len(feature_processors):
        return weigh_by_position(features, position_weights)
    values, weights, lengths = [], [], []
    for key in keys:
        jagged: JaggedTensor = features[key]
        if key in feature_processors:
            jagged = feature_processors[key](jagged)
            if jagged.weights_or_none() is None:
                raise InputError(
                    f"Feature '{key}': its processor {type(feature_processors[key]).__name__} returned no weights. "
                    "Return a JaggedTensor with weights, for example ones."
                )
            weights.append(jagged.weights())
        else:
            weights.append(torch.ones(jagged.values().shape[0], device=jagged.values().device))
        values.append(jagged.values())
        lengths.append(jagged.lengths())
    variable = features.variable_stride_per_key()
    return KeyedJaggedTensor(
        keys=keys,
        values=torch.cat(values),
        weights=torch.cat(weights),
        lengths=torch.cat(lengths),
        stride=None if variable else features.stride(),
        stride_per_key_per_rank=features.stride_per_key_per_rank() if variable else None,
        inverse_indices=features.inverse_indices_or_none(),
    )
