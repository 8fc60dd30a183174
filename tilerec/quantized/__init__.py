"""Quantized tables for serving."""

from tilerec.ops.quantized.row_format import dequantize_rows as dequantize_rows
from tilerec.ops.quantized.row_format import quantize_rows as quantize_rows
from tilerec.quantized.embedding import QuantEmbeddingCollection as QuantEmbeddingCollection
from tilerec.quantized.embedding_bag import QuantEmbeddingBagCollection as QuantEmbeddingBagCollection
from tilerec.quantized.managed import QuantManagedCollisionEmbeddings as QuantManagedCollisionEmbeddings
from tilerec.quantized.quantize import quantize_tables as quantize_tables
from tilerec.quantized.row_type import RowType as RowType
from tilerec.quantized.row_type import row_type as row_type
