"""Sparse tensors: what a batch of features is made of."""

from tilerec.sparse.jagged_tensor import JaggedTensor, jt_is_equal
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor, kjt_is_equal
from tilerec.sparse.keyed_tensor import KeyedTensor
from tilerec.sparse.keys import UnknownKeyError
from tilerec.sparse.validate import validate_keyed_jagged_tensor

__all__ = [
    "JaggedTensor",
    "KeyedJaggedTensor",
    "KeyedTensor",
    "UnknownKeyError",
    "jt_is_equal",
    "kjt_is_equal",
    "validate_keyed_jagged_tensor",
]
