"""Sparse tensors: jagged, keyed jagged and keyed tensors, the inputs and outputs of embedding modules."""

from tilerec.sparse.collate import collate_bags, collate_features
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
    "collate_bags",
    "collate_features",
    "jt_is_equal",
    "kjt_is_equal",
    "validate_keyed_jagged_tensor",
]
