"""TorchRec's functions that make a model for inference, with its argument names. See `tilerec.quantized`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from tilerec.quantized.embedding import QuantEmbeddingCollection as QuantEmbeddingCollection
from tilerec.quantized.embedding_bag import QuantEmbeddingBagCollection as QuantEmbeddingBagCollection
from tilerec.quantized.managed import QuantManagedCollisionEmbeddings as QuantManagedCollisionEmbeddings
from tilerec.quantized.quantize import quantize_tables
from tilerec.quantized.row_type import AnyRowType
from tilerec.spec.ignored_settings import warn_ignored_settings

_WITHOUT_EFFECT = {
    "additional_qconfig_spec_keys": "collections are found by their class, wherever they are in the model",
    "additional_mapping": "every collection has one quantized form",
    "quantization_mapping": "every collection has one quantized form",
}


def quantize_embeddings(
    module: nn.Module,
    dtype: AnyRowType,
    inplace: bool,
    additional_qconfig_spec_keys: Sequence[type[nn.Module]] | None = None,
    additional_mapping: Mapping[type[nn.Module], type[nn.Module]] | None = None,
    output_dtype: torch.dtype = torch.float,
    per_table_weight_dtype: Mapping[str, AnyRowType] | None = None,
) -> nn.Module:
    """Quantize the embedding collections of a module: `quantize_tables` under TorchRec's name.

    Args:
        dtype: `torch.qint8` or `torch.int8` (8 bits), `torch.quint4x2`, `torch.quint2x4`, `torch.float16`, …; or any
            other name of `row_type`.
        inplace: True frees the float rows of `module`.
        additional_qconfig_spec_keys, additional_mapping: no effect, with a warning.
    """
    given: dict[str, Any] = {
        "additional_qconfig_spec_keys": additional_qconfig_spec_keys,
        "additional_mapping": additional_mapping,
    }
    warn_ignored_settings("quantize_embeddings", given, _WITHOUT_EFFECT, 1)
    return quantize_tables(module, dtype, per_table=per_table_weight_dtype, output_dtype=output_dtype, inplace=inplace)


def quantize_inference_model(
    model: nn.Module,
    quantization_mapping: Mapping[str, type[nn.Module]] | None = None,
    per_table_weight_dtype: Mapping[str, AnyRowType] | None = None,
    fp_weight_dtype: AnyRowType = torch.int8,
    quantization_dtype: AnyRowType = torch.int8,
    output_dtype: torch.dtype = torch.float,
) -> nn.Module:
    """Quantize a model in place, and return it.

    Args:
        quantization_mapping: no effect, with a warning.
        per_table_weight_dtype: row types of single tables, by table name.
        fp_weight_dtype: of the tables behind feature processors.
        quantization_dtype: of all other tables.
        output_dtype: of the lookups.
    """
    given = {"quantization_mapping": quantization_mapping}
    warn_ignored_settings("quantize_inference_model", given, _WITHOUT_EFFECT, 1)
    return quantize_tables(
        model, quantization_dtype, per_table=per_table_weight_dtype, processed_dtype=fp_weight_dtype,
        output_dtype=output_dtype, inplace=True,
    )  # fmt: skip
