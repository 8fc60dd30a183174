"""`Signature`: the arguments of an exported model: their tensors, names and sizes.

    forward(dense_features, sparse_features)           arguments, by position
      dense_features            float32 [batch, 13]     an input of one tensor
      sparse_features           keys user, item         an input of several tensors
        sparse_features.values  int64 [sparse_features.ids]
        sparse_features.lengths int32 [2, batch]

A size is a number or a name. Equal names are equal sizes; `batch` is the number of samples. Lengths have a row per key:
of a flat list the number of samples would be a quotient, and `torch.export` would assume that it is not 1.

Nothing here imports torch: a server reads signatures without it. arguments.py has the tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tilerec.errors import InputError

BATCH = "batch"

Size = int | str


@dataclass(frozen=True)
class TensorSpec:
    """Name, dtype (`float32`) and sizes of one tensor."""

    name: str
    dtype: str
    shape: tuple[Size, ...]

    def line(self) -> str:
        """Return the spec as text without spaces inside of a part: `dense_features float32 batch 13`."""
        return " ".join([self.name, self.dtype, *map(str, self.shape)])

    def check_shape(self, shape: Sequence[int], sizes: dict[str, int]) -> None:
        """Raise an `InputError` for another shape.

        Args:
            sizes: values of the named sizes found so far; is extended.
        """
        if len(shape) != len(self.shape) or not all(_fits(own, want, sizes) for own, want in zip(shape, self.shape)):  # noqa: B905
            known = {name: size for name, size in sizes.items() if any(name in str(want) for want in self.shape)}
            raise InputError(
                f"Input '{self.name}': got shape {list(shape)}; expected [{', '.join(map(str, self.shape))}]"
                f"{f' with {known}' if known else ''}. Check that all inputs have the same samples."
            )


@dataclass(frozen=True)
class InputSpec:
    """An input: a tensor, or a jagged batch of several.

    Attributes:
        kind: "Tensor", "JaggedTensor" or "KeyedJaggedTensor".
        keys: of a `KeyedJaggedTensor`, in the order of the tensors.
    """

    name: str
    kind: str
    tensors: tuple[TensorSpec, ...]
    keys: tuple[str, ...] = ()


@dataclass(frozen=True)
class Signature:
    """Arguments of a model, flattened into inputs.

    Attributes:
        arguments: names of the parameters of `forward`, by position.
        structure: containers of the inputs, as text.
    """

    arguments: tuple[str, ...]
    inputs: tuple[InputSpec, ...]
    structure: str

    def specs(self) -> list[TensorSpec]:
        """Return the specs of all tensors, in order."""
        return [spec for own in self.inputs for spec in own.tensors]


def _fits(own: int, want: Size, sizes: dict[str, int]) -> bool:
    return own == (want if isinstance(want, int) else sizes.setdefault(want, own))
