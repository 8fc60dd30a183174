"""`KeyedJaggedTensor`: the sparse features of a batch, several jagged tensors in one run of values.

Glossary
    key         a feature's name; F of them
    stride      bags per key = batch size B; with a *variable batch* each key has its own, see `sparse/strides.py`
    inverse     for a variable batch: which bag of each key every sample of the full batch uses
    bag         the ids of one sample for one key
    lengths     ids per bag, flat and key-major: bag b of key f is number f * B + b
    key offsets where each key's ids begin in the values, on the host [F + 1]

    values    = ids of key 0 | ids of key 1 | …         each key's ids = bag 0 | bag 1 | …
    offsets_S1[f * B + b] = where bag b of key f begins,  S = F * B (or the sum of the strides)

Everything but the key offsets lives on the batch's device. `sync()` (or anything that slices values by key: `kjt["f"]`,
`to_dict`, `split`) fetches the key offsets: one wait for the device, once per batch.

In a compiled program a synced batch is sliced by numbers that are inputs of the graph: one graph for every batch,
except that torch makes another for a feature with no id or just one. An unsynced batch is sliced in one graph always,
but reads the numbers inside of it: that takes `torch._dynamo.config.capture_scalar_outputs = True`.

An exporter wants the batch size to be the size of a dimension. Lengths given as a table [F, B] stay one, so export with
a batch whose lengths are a table and whose dimension 1 is dynamic: the program then takes every batch size. Of flat
lengths it only knows F * B, and torch guards that F * B // F is not 1; such a program takes batches of one sample when
it is exported under `torch.fx.experimental._config.patch(backed_size_oblivious=True)`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, pairwise, repeat
from operator import sub
from typing import Any, final

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from tilerec.errors import InputError
from tilerec.ops.jagged import offsets_from_lengths, select_segments
from tilerec.ops.upload import upload
from tilerec.sparse.items import check_ids, check_items
from tilerec.sparse.jagged_tensor import (
    JaggedTensor,
    describe_bags,
    describe_parts,
    jt_is_equal,
    readable,
)
from tilerec.sparse.keys import Keys, shorten
from tilerec.sparse.segments import Segments, checked_segments
from tilerec.sparse.strides import Strides

InverseIndices = tuple[list[str], Tensor]
"""Keys, and for each of them the bag every sample of the full batch uses, int [F, B]."""


@final
class KeyedJaggedTensor:
    """Ids of several features over one batch.

    Args:
        keys: feature names, each once.
        values: [N] ids (or [N, ...] floating-point items), all bags of the first key, then of the second, and so on.
        weights: one number per id, [N]; none by default.
        lengths: ids per bag, [F * B] or [F, B]; int32 or int64.
        offsets: where bags begin, [F * B + 1], from 0 to N. One of the two is required.
        stride: batch size. It follows from the lengths; only a tensor without keys needs it. Of a variable batch it
            follows from the inverse indices, or is the largest key's: another one warns and has no effect.
        stride_per_key_per_rank: [F][R] bags of each key from each rank: a batch whose size varies by key.
        stride_per_key, lengths_offset_per_key, index_per_key: follow from the above and are checked against it.
        length_per_key, offset_per_key: ids per key and where they begin, if known: spare `sync()`.
        jt_dict: what `to_dict` shall return, if known.
        inverse_indices: (keys, int [F, B]): which bag each sample of the full batch uses, for deduplicated batches.

    Raises `InputError` for repeated keys, values that are neither [N] nor floating point, weights that are not one
    number each, lengths that are not integers or not a whole number of bags per key, a stride that contradicts them,
    and anything that is not a tensor. Types and shapes are checked here, since that waits for no device; that lengths
    sum to N and offsets begin at 0 when key offsets are fetched; the rest by `validate_keyed_jagged_tensor`.

    Two features, two samples; "a": [1, 2], []; "b": [3], [4, 5]::

        KeyedJaggedTensor(["a", "b"], torch.tensor([1, 2, 3, 4, 5]), lengths=torch.tensor([2, 0, 1, 2]))
    """

    __slots__ = (
        "_inverse_indices",
        "_jt_dict",
        "_key_offsets",
        "_keys",
        "_segments",
        "_stride",
        "_strides",
        "_values",
        "_weights",
    )

    def __init__(
        self,
        keys: Sequence[str],
        values: Tensor,
        weights: Tensor | None = None,
        lengths: Tensor | None = None,
        offsets: Tensor | None = None,
        stride: int | None = None,
        stride_per_key_per_rank: Tensor | Sequence[Sequence[int]] | None = None,
        stride_per_key: Sequence[int] | None = None,
        length_per_key: Sequence[int] | None = None,
        lengths_offset_per_key: Sequence[int] | None = None,
        offset_per_key: Sequence[int] | None = None,
        index_per_key: dict[str, int] | None = None,
        jt_dict: dict[str, JaggedTensor] | None = None,
        inverse_indices: InverseIndices | None = None,
    ) -> None:
        check_items("KeyedJaggedTensor", values, weights)
        check_ids("KeyedJaggedTensor", values)
        self._keys = Keys.of(keys)
        self._values = values
        self._weights = weights
        variable = stride_per_key_per_rank is not None and len(stride_per_key_per_rank) > 0
        self._segments = checked_segments(
            "KeyedJaggedTensor", lengths, offsets, rows=None if variable else len(self._keys)
        )
        self._strides = None
        # A tensor without keys has no lengths to read its batch size from.
        self._stride = 0
        self._inverse_indices = _checked_inverse(inverse_indices)
        self._key_offsets: list[int] | None = None
        self._jt_dict: dict[str, JaggedTensor] | None = None
        if stride_per_key_per_rank is not None and variable:
            self._strides = Strides.checked(len(self._keys), stride_per_key_per_rank)
        elif len(self._keys) == 0:
            self._stride = 0 if stride is None else stride
        self._check_stride(stride)
        if offset_per_key is not None:
            self._key_offsets = list(offset_per_key)
        elif length_per_key is not None:
            self._key_offsets = list(accumulate(length_per_key, initial=0))
        if self._key_offsets is not None:
            self._check_key_offsets(self._key_offsets)
        for name, given, derived in (
            ("stride_per_key", stride_per_key, self.stride_per_key),
            ("lengths_offset_per_key", lengths_offset_per_key, self.lengths_offset_per_key),
        ):
            if given and list(given) != derived():
                raise InputError(
                    f"KeyedJaggedTensor: {name} is {list(given)[:8]}, but the lengths say {derived()[:8]}."
                )
        if index_per_key is not None and index_per_key != self._keys.positions():
            raise InputError(
                "KeyedJaggedTensor: index_per_key contradicts keys; leave it out, it follows from them."
            )
        if jt_dict is not None:
            if tuple(jt_dict) != self._keys.names:
                raise InputError(
                    "KeyedJaggedTensor: jt_dict and keys differ; leave jt_dict out, it follows from the rest."
                )
            self._jt_dict = dict(jt_dict)

    def _check_stride(self, stride: int | None) -> None:
        """Lengths must be whole bags per key: a remainder would silently shift every later key."""
        bags, keys = self._segments.count(), len(self._keys)
        if self._strides is not None:
            wanted = sum(self._strides.per_key())
            if bags != wanted:
                raise InputError(
                    f"KeyedJaggedTensor: {bags} lengths, but stride_per_key_per_rank sums to {wanted} bags; wanted one "
                    f"length per bag."
                )
            if stride is not None and not torch.compiler.is_compiling() and stride != self.stride():
                warnings.warn(
                    f"KeyedJaggedTensor: stride {stride} has no effect, this variable batch has {self.stride()}: the "
                    f"samples of its inverse indices, or the largest key's bags without them; leave stride out.",
                    stacklevel=4,
                )
            return
        if keys == 0:
            if bags != 0:
                raise InputError(f"KeyedJaggedTensor: no keys, but {bags} lengths; wanted none.")
            return
        if bags % keys != 0:
            raise InputError(
                f"KeyedJaggedTensor: {bags} lengths are not a multiple of the {keys} keys; wanted one "
                f"length per key and "
                f"sample. For batch sizes that vary by key pass stride_per_key_per_rank=."
            )
        if stride is not None and stride * keys != bags:
            raise InputError(
                f"KeyedJaggedTensor: stride {stride} with {keys} keys wants {stride * keys} lengths, got {bags}; leave "
                f"stride out, it follows from the lengths."
            )

    def _check_key_offsets(self, key_offsets: list[int]) -> None:
        if len(key_offsets) != len(self._keys) + 1:
            raise InputError(
                f"KeyedJaggedTensor: {len(key_offsets) - 1} lengths per key for {len(self._keys)} keys; "
                f"wanted one each."
            )
        if key_offsets[0] != 0:
            raise InputError(
                f"KeyedJaggedTensor: the first offset is {key_offsets[0]}; wanted 0, since values that belong to no "
                f"bag would shift the features; pass values[offsets[0]:] and offsets - offsets[0]."
            )
        if sorted(key_offsets) != key_offsets:
            raise InputError(
                "KeyedJaggedTensor: a feature has a negative number of ids; wanted lengths that are not negative; "
                "validate_keyed_jagged_tensor() tells which bag is wrong."
            )
        if key_offsets[-1] != self._values.shape[0]:
            raise InputError(
                f"KeyedJaggedTensor: the lengths sum to {key_offsets[-1]}, but there are "
                f"{self._values.shape[0]} values; "
                f"validate_keyed_jagged_tensor() tells which bag is wrong."
            )

    # -- making ------------------------------------------------------------------------------------------------

    @staticmethod
    def from_offsets_sync(
        keys: Sequence[str],
        values: Tensor,
        offsets: Tensor,
        weights: Tensor | None = None,
        stride: int | None = None,
        stride_per_key_per_rank: Sequence[Sequence[int]] | None = None,
        inverse_indices: InverseIndices | None = None,
    ) -> KeyedJaggedTensor:
        """From offsets, with the key offsets fetched now."""
        return KeyedJaggedTensor(
            keys,
            values,
            weights,
            offsets=offsets,
            stride=stride,
            stride_per_key_per_rank=stride_per_key_per_rank,
            inverse_indices=inverse_indices,
        ).sync()

    @staticmethod
    def from_lengths_sync(
        keys: Sequence[str],
        values: Tensor,
        lengths: Tensor,
        weights: Tensor | None = None,
        stride: int | None = None,
        stride_per_key_per_rank: Sequence[Sequence[int]] | None = None,
        inverse_indices: InverseIndices | None = None,
    ) -> KeyedJaggedTensor:
        """From lengths, with the key offsets fetched now."""
        return KeyedJaggedTensor(
            keys,
            values,
            weights,
            lengths=lengths,
            stride=stride,
            stride_per_key_per_rank=stride_per_key_per_rank,
            inverse_indices=inverse_indices,
        ).sync()

    @staticmethod
    def from_jt_dict(
        jt_dict: dict[str, JaggedTensor], force_variable_stride: bool = False
    ) -> KeyedJaggedTensor:
        """The features of a dict in its order.

        Features of different batch sizes make a variable batch; `force_variable_stride` makes one in any case.
        """
        if not jt_dict:
            return KeyedJaggedTensor.empty()
        parts = list(jt_dict.values())
        for key, part in jt_dict.items():
            if not isinstance(part, JaggedTensor):
                raise InputError(
                    f"KeyedJaggedTensor.from_jt_dict: {key!r} is a {type(part).__name__}; wanted a JaggedTensor; "
                    f"JaggedTensor.from_dense makes one of a list of tensors."
                )
        weighted = [part.weights_or_none() is not None for part in parts]
        if any(weighted) and not all(weighted):
            lacking = [key for key, has in zip(jt_dict, weighted, strict=True) if not has]
            raise InputError(
                f"KeyedJaggedTensor.from_jt_dict: {lacking[:8]} have no weights, the others do; give all or none."
            )
        strides = [part._segments.count() for part in parts]
        variable = force_variable_stride or any(stride != strides[0] for stride in strides)
        return KeyedJaggedTensor(
            tuple(jt_dict),
            torch.cat([part.values() for part in parts]),
            torch.cat([part.weights() for part in parts]) if all(weighted) else None,
            torch.cat([part.lengths() for part in parts]),
            stride_per_key_per_rank=[[stride] for stride in strides] if variable else None,
        )

    @staticmethod
    def concat(kjt_list: Sequence[KeyedJaggedTensor]) -> KeyedJaggedTensor:
        """The features of all tensors, one tensor after the other; batch sizes must agree.

        Tensors without keys add nothing. Key offsets are joined if all parts know theirs. Inverse indices must
        be on all parts or on none. Raises `InputError` for an empty list, repeated keys, or parts that do not
        fit together.
        """
        if not kjt_list:
            raise InputError("KeyedJaggedTensor.concat: the list is empty; wanted at least one tensor.")
        for kjt in kjt_list:
            if not isinstance(kjt, KeyedJaggedTensor):
                raise InputError(
                    f"KeyedJaggedTensor.concat: the list holds a {type(kjt).__name__}; wanted keyed jagged tensors."
                )
        parts = [kjt for kjt in kjt_list if len(kjt._keys) > 0]
        if len(parts) <= 1:
            return (parts or list(kjt_list))[0]
        _check_alike("weights", parts, lambda part: part._weights is not None)
        _check_alike("variable batch sizes", parts, lambda part: part._strides is not None)
        _check_alike("inverse indices", parts, lambda part: part._inverse_indices is not None)
        strides = None
        if parts[0]._strides is not None:
            counts = [row for part in parts for row in part.stride_per_key_per_rank()]
            strides = Strides.checked(len(counts), counts)
        else:
            for part in parts[1:]:
                if part.stride() != parts[0].stride():
                    raise InputError(
                        f"KeyedJaggedTensor.concat: batch sizes {parts[0].stride()} (keys {parts[0].keys()[:4]}) and "
                        f"{part.stride()} (keys {part.keys()[:4]}) differ; wanted one batch size."
                    )
        inverse_indices = None
        if parts[0]._inverse_indices is not None:
            pairs = [part.inverse_indices() for part in parts]
            inverse_indices = (
                [key for keys, _ in pairs for key in keys],
                torch.cat([index for _, index in pairs]),
            )
        known = [part._key_offsets for part in parts]
        key_lengths = [
            end - start for offsets in known if offsets is not None for start, end in pairwise(offsets)
        ]
        return _assemble(
            Keys.of([key for part in parts for key in part._keys]),
            torch.cat([part._values for part in parts]),
            torch.cat([part.weights() for part in parts]) if parts[0]._weights is not None else None,
            Segments(torch.cat([part.lengths() for part in parts]), None),
            strides=strides,
            inverse_indices=inverse_indices,
            key_offsets=None
            if any(offsets is None for offsets in known)
            else list(accumulate(key_lengths, initial=0)),
        )

    @staticmethod
    def empty(
        is_weighted: bool = False,
        device: torch.device | None = None,
        values_dtype: torch.dtype | None = None,
        weights_dtype: torch.dtype | None = None,
        lengths_dtype: torch.dtype = torch.int32,
    ) -> KeyedJaggedTensor:
        """No keys and no bags."""
        weights = torch.empty(0, dtype=weights_dtype, device=device) if is_weighted else None
        lengths = torch.empty(0, dtype=lengths_dtype, device=device)
        return _assemble(
            Keys.of(()),
            torch.empty(0, dtype=values_dtype, device=device),
            weights,
            Segments(lengths, None),
            stride=0,
        )

    @staticmethod
    def empty_like(kjt: KeyedJaggedTensor, device: torch.device | None = None) -> KeyedJaggedTensor:
        """No keys and no bags, with the dtypes and the batch size of `kjt`."""
        like = JaggedTensor.empty_like(kjt._as_jagged(), device)
        return _assemble(
            Keys.of(()), like.values(), like.weights_or_none(), like._segments, stride=kjt.stride()
        )

    # -- reading -----------------------------------------------------------------------------------------------

    def keys(self) -> list[str]:
        """Feature names in order; the caller's own list."""
        return list(self._keys.names)

    def values(self) -> Tensor:
        """All ids, key by key [N, ...]."""
        return self._values

    def weights(self) -> Tensor:
        """One number per id; `InputError` if there are none."""
        if self._weights is None:
            raise InputError(
                "KeyedJaggedTensor: it has no weights; pass weights= when it is made, or ask weights_or_none()."
            )
        return self._weights

    def weights_or_none(self) -> Tensor | None:
        """One number per id, or None."""
        return self._weights

    def lengths(self) -> Tensor:
        """Ids per bag, flat and key-major [F * B]."""
        return self._segments.lengths()

    def lengths_or_none(self) -> Tensor | None:
        """Lengths if they were given or asked for before."""
        return self._segments.lengths_or_none()

    def offsets(self) -> Tensor:
        """Where bags begin [F * B + 1]."""
        return self._segments.offsets()

    def offsets_or_none(self) -> Tensor | None:
        """Offsets if they were given or asked for before."""
        return self._segments.offsets_or_none()

    def stride(self) -> int:
        """Batch size. Of a variable batch: the full batch's if inverse indices tell, else the largest key's."""
        if len(self._keys) == 0:
            return self._stride
        if self._strides is None:
            return self._segments.count() // len(self._keys)
        if self._inverse_indices is not None:
            return self._inverse_indices[1].shape[-1]
        return max(self._strides.per_key())

    def stride_per_key(self) -> list[int]:
        """Bags of each key [F]."""
        if self._strides is not None:
            return self._strides.per_key()
        bags, keys = self._segments.count(), len(self._keys)
        return [bags // keys] * keys if keys else []

    def stride_per_key_per_rank(self) -> list[list[int]]:
        """Bags of each key from each rank [F][R]; empty unless the batch is variable."""
        return [] if self._strides is None else [list(row) for row in self._strides.counts()]

    def variable_stride_per_key(self) -> bool:
        """Whether the keys may differ in batch size."""
        return self._strides is not None

    def inverse_indices(self) -> InverseIndices:
        """Keys and int [F, B]: the bag every sample of the full batch uses; `InputError` if there are none."""
        if self._inverse_indices is None:
            raise InputError(
                "KeyedJaggedTensor: it has no inverse indices; pass inverse_indices= when it is made, or ask "
                "inverse_indices_or_none()."
            )
        return self._inverse_indices

    def inverse_indices_or_none(self) -> InverseIndices | None:
        """Inverse indices, or None."""
        return self._inverse_indices

    def sync(self) -> KeyedJaggedTensor:
        """Fetch the key offsets: one wait for the device, now rather than at the first slice.

        Raises `InputError` if the lengths do not sum to the number of values.
        """
        self._host_key_offsets()
        return self

    def unsync(self) -> KeyedJaggedTensor:
        """Forget the key offsets and what was sliced with them."""
        self._key_offsets = None
        self._jt_dict = None
        return self

    def length_per_key(self) -> list[int]:
        """Ids of each key [F]."""
        key_offsets = self._host_key_offsets()
        return list(map(sub, key_offsets[1:], key_offsets[:-1]))

    def length_per_key_or_none(self) -> list[int] | None:
        """Ids of each key if the key offsets are at hand."""
        return None if self._key_offsets is None else self.length_per_key()

    def offset_per_key(self) -> list[int]:
        """Where each key's ids begin [F + 1]; the caller's own list."""
        return list(self._host_key_offsets())

    def _host_key_offsets(self) -> list[int]:
        """Where each key's ids begin, fetched once."""
        if self._key_offsets is not None:
            return self._key_offsets
        key_offsets: list[int] = self._key_offsets_F1().tolist()
        if not torch.compiler.is_compiling():
            self._check_key_offsets(key_offsets)
            self._key_offsets = key_offsets
        return key_offsets

    def offset_per_key_or_none(self) -> list[int] | None:
        """Where each key's ids begin if that is at hand."""
        return None if self._key_offsets is None else list(self._key_offsets)

    def lengths_offset_per_key(self) -> list[int]:
        """Where each key's bags begin in the lengths [F + 1]."""
        if self._strides is not None:
            return self._strides.bag_offsets()
        stride = self.stride()
        return [stride * position for position in range(len(self._keys) + 1)]

    def index_per_key(self) -> dict[str, int]:
        """Feature name -> position; the caller's own dict."""
        return self._keys.positions()

    def device(self) -> torch.device:
        """Where the values are."""
        return self._values.device

    def size_in_bytes(self) -> int:
        """Memory of every tensor held."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self._tensors())

    def _key_offsets_F1(self) -> Tensor:
        """Where each key's ids begin, on the device: every B-th bag's offset."""
        offsets_S1 = self._segments.offsets()
        if self._strides is not None:
            return offsets_S1.index_select(0, upload(self._strides.bag_offsets(), offsets_S1.device))
        keys = len(self._keys)
        stride = self._segments.count() // keys if keys else 0
        if torch.compiler.is_compiling():
            # A slice would guard on the number of offsets.
            return offsets_S1.index_select(0, torch.arange(keys + 1, device=offsets_S1.device) * stride)
        if stride == 0:
            return torch.zeros(keys + 1, dtype=offsets_S1.dtype, device=offsets_S1.device)
        return offsets_S1[::stride]

    # -- slicing by key ----------------------------------------------------------------------------------------

    # `kjt[0]` asks for a feature named 0, so Python's iteration by position must not be tried.
    __iter__ = None

    def __contains__(self, key: object) -> bool:
        """Whether there is a feature of that name."""
        return key in self._keys

    def __getitem__(self, key: str) -> JaggedTensor:
        """The bags of one feature, as views; `UnknownKeyError` (a `KeyError` too) if it is not there."""
        position = self._keys.position(key)
        if not torch.compiler.is_compiling() and self._jt_dict is not None:
            return self._jt_dict[key]
        key_offsets = self._host_key_offsets()
        start, end = key_offsets[position], key_offsets[position + 1]
        if self._strides is None:
            stride = self._segments.count() // len(self._keys)
            first_bag, last_bag = stride * position, stride * (position + 1)
        else:
            bag_offsets = self._strides.bag_offsets()
            first_bag, last_bag = bag_offsets[position], bag_offsets[position + 1]
        return JaggedTensor.from_segments(
            self._values[start:end],
            None if self._weights is None else self._weights[start:end],
            Segments(self._segments.lengths()[first_bag:last_bag], None),
        )

    def to_dict(self, compute_offsets: bool = True) -> dict[str, JaggedTensor]:
        """Every feature's bags, as views; remembered until `unsync`, so do not edit the dict.

        With `compute_offsets` the offsets of all features are computed together.
        """
        if torch.compiler.is_compiling():
            return self._make_dict(compute_offsets)
        if self._jt_dict is None:
            self._jt_dict = self._make_dict(compute_offsets)
        return self._jt_dict

    def _make_dict(self, compute_offsets: bool) -> dict[str, JaggedTensor]:
        if len(self._keys) == 0:
            return {}
        key_lengths = self.length_per_key()
        strides = self.stride_per_key()
        values = self._values.split(key_lengths)
        weights = [None] * len(values) if self._weights is None else self._weights.split(key_lengths)
        lengths = self._segments.lengths().split(strides)
        rows: Iterable[tuple[Tensor, int] | None] = repeat(None)
        if compute_offsets and not torch.compiler.is_compiling():
            rows = self._offset_rows(strides)
        make = JaggedTensor.from_segments
        return {
            key: make(value, weight, Segments(length, None, row))
            for key, value, weight, length, row in zip(
                self._keys.names, values, weights, lengths, rows, strict=False
            )
        }

    def _offset_rows(self, strides: list[int]) -> Iterable[tuple[Tensor, int] | None]:
        """Each key's bag offsets counted from its own first id: one subtraction gives those of all keys."""
        offsets_S1 = self._segments.offsets()
        if self._strides is not None:
            # Rows of different lengths make no table; each key derives its own.
            return repeat(None)
        stride = strides[0]
        # Row f holds the B + 1 offsets of key f; neighbouring rows overlap in one entry.
        rows_FB1 = (
            offsets_S1.unfold(0, stride + 1, stride) if stride else offsets_S1.new_zeros(len(strides), 1)
        )
        return zip(repeat(rows_FB1 - rows_FB1[:, :1]), range(len(strides)), strict=False)

    def split(self, segments: Sequence[int]) -> list[KeyedJaggedTensor]:
        """Neighbouring features, `segments[i]` of them in part i, as views; the sizes must sum to the number of keys.

        split([1, 2]) of keys a, b, c -> keys a | keys b, c
        """
        parts = self._keys.split(segments)
        bounds = list(accumulate(segments, initial=0))
        key_offsets = self._host_key_offsets()
        bag_bounds = self.lengths_offset_per_key()
        cuts = [key_offsets[bound] for bound in bounds]
        sizes = [end - start for start, end in pairwise(cuts)]
        values = self._values.split(sizes)
        weights = [None] * len(values) if self._weights is None else self._weights.split(sizes)
        lengths = self._segments.lengths().split(
            [bag_bounds[end] - bag_bounds[start] for start, end in pairwise(bounds)]
        )
        stride = self.stride()
        return [
            _assemble(
                keys,
                value,
                weight,
                Segments(length, None),
                stride=stride,
                strides=None if self._strides is None else self._strides.select(range(first, last)),
                inverse_indices=_inverse_of(keys, self._inverse_indices),
                key_offsets=[offset - cut for offset in key_offsets[first : last + 1]],
            )
            for keys, value, weight, length, (first, last), cut in zip(
                parts, values, weights, lengths, pairwise(bounds), cuts[:-1], strict=True
            )
        ]

    def permute(self, indices: Sequence[int], indices_tensor: Tensor | None = None) -> KeyedJaggedTensor:
        """The features at `indices`, in that order; features may be left out, or repeated.

        A feature named twice is there twice, and asked for by name it is any of its equal copies. Such a tensor can be
        sliced, permuted and looked up; making another of its `keys()` or joining it with others is refused.

        `indices_tensor` is the same list on the batch's device, if there is one. Only a permutation that
        leaves features out or repeats some needs the key offsets (and so may wait for the device).
        """
        keys = self._keys.select(indices)
        order_P = upload(indices, self._values.device) if indices_tensor is None else indices_tensor
        if order_P.shape != (len(keys),):
            raise InputError(
                f"permute: indices_tensor has shape {list(order_P.shape)} for {len(keys)} indices; wanted the same "
                f"list; leave it out, it follows from them."
            )
        lengths, strides = self._permute_lengths(indices, order_P)
        source_F1 = self._key_offsets_F1().long()
        target_P1 = offsets_from_lengths(source_F1.diff().index_select(0, order_P))
        key_offsets = None
        if self._key_offsets is not None or sorted(indices) != list(range(len(self._keys))):
            key_offsets = self._permute_key_offsets(indices, target_P1)
        total = self._values.shape[0] if key_offsets is None else key_offsets[-1]
        values = select_segments(self._values, source_F1, order_P, target_P1, total)
        weights = self._weights
        if weights is not None:
            weights = select_segments(weights, source_F1, order_P, target_P1, total)
        return _assemble(
            keys,
            values,
            weights,
            Segments(lengths, None),
            stride=self.stride(),
            strides=strides,
            inverse_indices=_inverse_of(keys, self._inverse_indices),
            key_offsets=key_offsets,
        )

    def _permute_key_offsets(self, indices: Sequence[int], target_P1: Tensor) -> list[int]:
        """The permuted tensor's key offsets, without a wait if this one's are known."""
        if _on_host(target_P1) and not torch.compiler.is_compiling():
            key_offsets: list[int] = target_P1.tolist()
            return key_offsets
        key_lengths = self.length_per_key()
        return list(accumulate([key_lengths[index] for index in indices], initial=0))

    def _permute_lengths(self, indices: Sequence[int], order_P: Tensor) -> tuple[Tensor, Strides | None]:
        lengths_S = self._segments.lengths()
        if self._strides is None:
            keys = len(self._keys)
            rows_FB = lengths_S.view(keys, lengths_S.shape[0] // keys if keys else 0)
            return rows_FB.index_select(0, order_P).view(-1), None
        strides = self._strides.select(indices)
        # A key's bags are a segment of the lengths, just as its ids are a segment of the values.
        source, target = self._strides.bag_offsets(), strides.bag_offsets()
        lengths_P = select_segments(
            lengths_S,
            upload(source, lengths_S.device),
            order_P,
            upload(target, lengths_S.device),
            target[-1],
        )
        return lengths_P, strides

    def flatten_lengths(self) -> KeyedJaggedTensor:
        """The same tensor: lengths are always flat. Kept for code that calls it."""
        return self._with(self._values, self._weights, self._segments)

    # -- moving ------------------------------------------------------------------------------------------------

    def to(
        self, device: torch.device, non_blocking: bool = False, dtype: torch.dtype | None = None
    ) -> KeyedJaggedTensor:
        """A copy on `device` (tensors already there are shared); `dtype` converts the weights, never the ids."""

        def move(tensor: Tensor) -> Tensor:
            return tensor.to(device, non_blocking=non_blocking)

        weights = self._weights
        if weights is not None:
            weights = weights.to(device=device, dtype=dtype, non_blocking=non_blocking)
        return self._with(move(self._values), weights, self._segments.map(move), move)

    def pin_memory(self) -> KeyedJaggedTensor:
        """A copy in page-locked memory, for transfers that overlap."""

        def pin(tensor: Tensor) -> Tensor:
            return tensor.pin_memory()

        weights = None if self._weights is None else pin(self._weights)
        return self._with(pin(self._values), weights, self._segments.map(pin), pin)

    def copy_(self, kjt: KeyedJaggedTensor, non_blocking: bool = False) -> KeyedJaggedTensor:
        """Overwrite this tensor's memory with `kjt`, which must have the same keys and shapes."""
        if self._keys != kjt._keys:
            raise InputError(
                f"KeyedJaggedTensor.copy_: keys {self.keys()[:8]} and {kjt.keys()[:8]} differ; wanted the same."
            )
        if self._strides != kjt._strides:
            raise InputError(
                "KeyedJaggedTensor.copy_: the batch sizes by key and rank differ; wanted the same."
            )
        if (self._inverse_indices is None) != (kjt._inverse_indices is None):
            raise InputError(
                "KeyedJaggedTensor.copy_: only one of the two has inverse indices; wanted both or none."
            )
        self._as_jagged().copy_(kjt._as_jagged(), non_blocking)
        if self._inverse_indices is not None:
            self._inverse_indices[1].copy_(kjt.inverse_indices()[1], non_blocking=non_blocking)
            self._inverse_indices = (list(kjt.inverse_indices()[0]), self._inverse_indices[1])
        self._key_offsets = kjt._key_offsets
        self._jt_dict = None
        return self

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the memory alive until work queued on `stream` is done. No effect for tensors on the host."""
        for tensor in self._tensors():
            if tensor.device.type != "cpu":
                tensor.record_stream(stream)

    def clear_storage(self) -> int:
        """Free the memory under every tensor held and return its bytes; nothing can be read afterwards."""
        freed = 0
        for tensor in self._tensors():
            storage = tensor.untyped_storage()
            freed += storage.nbytes()
            storage.resize_(0)
        return freed

    def _tensors(self) -> list[Tensor]:
        held = [self._values, *self._segments.tensors()]
        if self._weights is not None:
            held.append(self._weights)
        if self._inverse_indices is not None:
            held.append(self._inverse_indices[1])
        return held

    def _with(
        self,
        values: Tensor,
        weights: Tensor | None,
        segments: Segments,
        move: Callable[[Tensor], Tensor] = lambda tensor: tensor,
    ) -> KeyedJaggedTensor:
        inverse_indices = self._inverse_indices
        if inverse_indices is not None:
            inverse_indices = (inverse_indices[0], move(inverse_indices[1]))
        return _assemble(
            self._keys,
            values,
            weights,
            segments,
            stride=self._stride,
            strides=self._strides,
            inverse_indices=inverse_indices,
            key_offsets=self._key_offsets,
        )

    def __str__(self) -> str:
        if len(self._keys) == 0:
            return "KeyedJaggedTensor()\n"
        if self._values.is_meta:
            return f"{self._describe()}\n"
        rows = []
        for key in self._keys:
            bags = describe_bags(self[key], indent=8)
            if self._weights is not None:
                bags = f"{{\n        {bags}\n    }}"
            rows.append(f'    "{key}": {bags}')
        return "KeyedJaggedTensor({\n" + ",\n".join(rows) + "\n})\n"

    def __repr__(self) -> str:
        """The bags of a small tensor that can be read, shapes otherwise: a debugger asks at any time."""
        flat = self._as_jagged()
        sound = readable(flat) and (
            int(flat.offsets()[0]) == 0 and int(flat.offsets()[-1]) == self._values.shape[0]
        )
        return str(self) if sound else self._describe()

    def _describe(self) -> str:
        return f"KeyedJaggedTensor(keys {shorten(self._keys.names)}, {describe_parts(self._as_jagged())})"

    def _as_jagged(self) -> JaggedTensor:
        """All bags of all keys, one after the other."""
        return JaggedTensor.from_segments(self._values, self._weights, self._segments)

    def __reduce__(self) -> tuple[Any, ...]:
        leaves, context = _flatten(self)
        return _rebuild, (leaves, _dump_context(context), self._key_offsets)


def _assemble(
    keys: Keys,
    values: Tensor,
    weights: Tensor | None,
    segments: Segments,
    stride: int = 0,
    strides: Strides | None = None,
    inverse_indices: InverseIndices | None = None,
    key_offsets: list[int] | None = None,
) -> KeyedJaggedTensor:
    """A tensor of parts that are known to fit; checks nothing. `stride` counts only where there are no keys."""
    kjt = KeyedJaggedTensor.__new__(KeyedJaggedTensor)
    kjt._keys = keys
    kjt._values = values
    kjt._weights = weights
    kjt._segments = segments
    kjt._stride = stride
    kjt._strides = strides
    kjt._inverse_indices = inverse_indices
    kjt._key_offsets = key_offsets
    kjt._jt_dict = None
    return kjt


def _on_host(tensor: Tensor) -> bool:
    """Whether its values can be read without waiting for a device."""
    return tensor.device.type == "cpu"


def _check_alike(
    what: str, parts: Sequence[KeyedJaggedTensor], has: Callable[[KeyedJaggedTensor], bool]
) -> None:
    flags = [has(part) for part in parts]
    if any(flags) and not all(flags):
        lacking = parts[flags.index(False)]
        raise InputError(
            f"KeyedJaggedTensor.concat: the part with keys {lacking.keys()[:4]} has no {what}, the others have; "
            f"wanted all or none."
        )


def _checked_inverse(given: InverseIndices | None) -> InverseIndices | None:
    """A caller's inverse indices; what they say is checked where it is used, and by `validate_keyed_jagged_tensor`."""
    if given is None:
        return None
    if not isinstance(given, (tuple, list)) or len(given) != 2 or not isinstance(given[1], Tensor):
        raise InputError(
            f"KeyedJaggedTensor: inverse_indices are a {type(given).__name__}; wanted a pair (keys, int tensor "
            f"[keys, batch])."
        )
    keys, index_FB = given
    if index_FB.dtype not in (torch.int64, torch.int32):
        raise InputError(
            f"KeyedJaggedTensor: inverse indices have dtype {index_FB.dtype}; wanted torch.int64 or torch.int32."
        )
    if index_FB.dim() != 2 or (not torch.compiler.is_compiling() and index_FB.shape[0] != len(keys)):
        raise InputError(
            f"KeyedJaggedTensor: inverse indices for {shorten(keys)} have shape {list(index_FB.shape)}; wanted one row "
            f"per key and one column per sample of the full batch, [{len(keys)}, batch]."
        )
    return keys, index_FB


def _inverse_of(keys: Keys, inverse_indices: InverseIndices | None) -> InverseIndices | None:
    """The rows of `inverse_indices` that belong to `keys`, in their order."""
    if inverse_indices is None:
        return None
    names, index_FB = inverse_indices
    row = {name: position for position, name in enumerate(names)}
    if tuple(names) == keys.names:
        return inverse_indices
    lacking = [key for key in keys if key not in row]
    if lacking:
        raise InputError(
            f"KeyedJaggedTensor: inverse indices are for {shorten(names)}, none for {shorten(lacking)}; wanted a row "
            f"for every key of a variable batch; add them to inverse_indices."
        )
    chosen = upload([row[key] for key in keys], index_FB.device)
    return list(keys.names), index_FB.index_select(0, chosen)


def kjt_is_equal(kjt_1: object, kjt_2: object) -> bool:
    """Whether two tensors hold the same features: keys in order, batch sizes, ids, weights and inverse indices.

    False for tensors on different devices, and for anything that is not a `KeyedJaggedTensor`.
    """
    if not isinstance(kjt_1, KeyedJaggedTensor) or not isinstance(kjt_2, KeyedJaggedTensor):
        return False
    if kjt_1._keys != kjt_2._keys or kjt_1._strides != kjt_2._strides or kjt_1.stride() != kjt_2.stride():
        return False
    inverse_1, inverse_2 = kjt_1._inverse_indices, kjt_2._inverse_indices
    if inverse_1 is None or inverse_2 is None:
        if inverse_1 is not inverse_2:
            return False
    elif (
        list(inverse_1[0]) != list(inverse_2[0])
        or inverse_1[1].device != inverse_2[1].device
        or not torch.equal(inverse_1[1], inverse_2[1])
    ):
        return False
    return jt_is_equal(kjt_1._as_jagged(), kjt_2._as_jagged())


# A pytree with one leaf per tensor that was given. Keys, and which leaves there are, are static; batch sizes
# follow from shapes, those of a variable batch are a leaf. What was fetched or derived is not part of the
# value: it changes neither the structure nor the number of graphs.

_Context = tuple[tuple[str, ...], tuple[str, ...], int, tuple[str, ...]]
"""Keys, the names of the leaves, the batch size of a tensor without keys, the keys of the inverse indices."""


def _flatten(kjt: KeyedJaggedTensor) -> tuple[list[Any], _Context]:
    parts = {
        "values": kjt._values,
        "weights": kjt._weights,
        "lengths": kjt._segments.given_lengths,
        "offsets": kjt._segments.given_offsets,
        "stride_per_key_per_rank": None if kjt._strides is None else kjt._strides.tensor(),
        "inverse_indices": None if kjt._inverse_indices is None else kjt._inverse_indices[1],
    }
    present = {name: part for name, part in parts.items() if part is not None}
    inverse_keys = () if kjt._inverse_indices is None else tuple(kjt._inverse_indices[0])
    stride = kjt._stride if len(kjt._keys) == 0 else 0
    return list(present.values()), (kjt._keys.names, tuple(present), stride, inverse_keys)


def _flatten_with_keys(kjt: KeyedJaggedTensor) -> tuple[list[tuple[Any, Any]], _Context]:
    leaves, context = _flatten(kjt)
    return [(pytree.GetAttrKey(name), leaf) for name, leaf in zip(context[1], leaves, strict=True)], context


def _unflatten(leaves: Any, context: _Context) -> KeyedJaggedTensor:
    keys, present, stride, inverse_keys = context
    parts = dict(zip(present, leaves, strict=True))
    strides = parts.get("stride_per_key_per_rank")
    inverse = parts.get("inverse_indices")
    return _assemble(
        Keys.known(keys),
        parts["values"],
        parts.get("weights"),
        Segments(parts.get("lengths"), parts.get("offsets")),
        stride=stride,
        strides=None if strides is None else Strides(None, strides),
        inverse_indices=None if inverse is None else (list(inverse_keys), inverse),
    )


def _dump_context(context: _Context) -> list[Any]:
    keys, present, stride, inverse_keys = context
    return [list(keys), list(present), stride, list(inverse_keys)]


def _load_context(dumped: list[Any]) -> _Context:
    keys, present, stride, inverse_keys = dumped
    return tuple(keys), tuple(present), stride, tuple(inverse_keys)


pytree.register_pytree_node(
    KeyedJaggedTensor,
    _flatten,
    _unflatten,
    serialized_type_name="tilerec.KeyedJaggedTensor",
    to_dumpable_context=_dump_context,
    from_dumpable_context=_load_context,
    flatten_with_keys_fn=_flatten_with_keys,
)


def _rebuild(
    leaves: list[Any], dumped_context: list[Any], key_offsets: list[int] | None
) -> KeyedJaggedTensor:
    """Undo `__reduce__`: a copy, or what comes out of a pickle."""
    kjt = _unflatten(leaves, _load_context(dumped_context))
    kjt._key_offsets = key_offsets
    return kjt


# Nothing but tensors, names and numbers goes in: `torch.load(weights_only=True)` and `torch.export.load` may read it.
torch.serialization.add_safe_globals([_rebuild])
