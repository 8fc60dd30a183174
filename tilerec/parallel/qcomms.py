"""Number formats on the wire in TorchRec's words; a plan says the same with `Wire`, table by table."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, unique

from tilerec.spec.plan import Wire, to_enum


@unique
class CommType(Enum):
    """Number formats that rows and gradients can travel in."""

    FP32 = "fp32"
    FP16 = "fp16"
    BF16 = "bf16"
    INT8 = "int8"


@unique
class CommOp(Enum):
    """What travels; all three are one exchange here."""

    POOLED_EMBEDDINGS_ALL_TO_ALL = "pooled_embeddings_all_to_all"
    POOLED_EMBEDDINGS_REDUCE_SCATTER = "pooled_embeddings_reduce_scatter"
    SEQUENCE_EMBEDDINGS_ALL_TO_ALL = "sequence_embeddings_all_to_all"


@dataclass(frozen=True)
class QCommsConfig:
    """Number formats of rows (`forward_precision`) and of their gradients (`backward_precision`)."""

    forward_precision: CommType | str = CommType.FP32
    backward_precision: CommType | str = CommType.FP32

    def wire(self) -> Wire:
        """The same as a plan's `Wire`."""
        formats = [
            to_enum(CommType, getattr(self, name), f"QCommsConfig: {name}")
            for name in ("forward_precision", "backward_precision")
        ]
        return Wire(formats[0].value, formats[1].value)


def get_qcomm_codecs(qcomms_config: QCommsConfig | None) -> Wire:
    """The formats of a config; as they are summed without one."""
    return Wire() if qcomms_config is None else qcomms_config.wire()


def get_qcomm_codecs_registry(
    qcomms_config: QCommsConfig, comm_ops: list[CommOp] | None = None
) -> dict[str, Wire]:
    """A sharder's `qcomm_codecs_registry`: the same formats for every kind of exchange, or for those named."""
    return {op.name: get_qcomm_codecs(qcomms_config) for op in comm_ops or list(CommOp)}
