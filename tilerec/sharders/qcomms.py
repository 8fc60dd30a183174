"""TorchRec's configuration of wire formats; plans have a `Wire` per table instead."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum, EnumMeta, unique
from typing import Any

from tilerec.errors import ConfigError
from tilerec.spec.ignored_settings import warn_ignored_settings
from tilerec.spec.plan import CODECS, Wire, to_enum

_SUPPORTED = (
    f"the formats of tilerec are {', '.join(CODECS)}; int8 and fp8 take one byte per number and one scale per row, "
    "bf16 has fp32's range"
)


class _Formats(EnumMeta):
    """Metaclass whose `AttributeError` for a missing format lists the supported formats."""

    # Up to Python 3.11 members are found by this method; from 3.12 on, before it is called.
    def __getattr__(cls, name: str) -> Any:
        members: dict[str, Any] = vars(cls).get("_member_map_", {})
        if name in members:
            return members[name]
        raise AttributeError(
            f"{cls.__name__}.{name} is not supported: {_SUPPORTED}."
            if name.isupper()
            else f"{cls.__name__} has no {name}."
        )


@unique
class CommType(Enum, metaclass=_Formats):
    """Wire formats of rows and gradients. There is no MX4 as in TorchRec; FP8 is e4m3, forward and backward."""

    FP32 = "fp32"
    FP16 = "fp16"
    BF16 = "bf16"
    INT8 = "int8"
    FP8 = "fp8"

    @classmethod
    def _missing_(cls, value: object) -> None:
        raise ConfigError(f"CommType({value!r}) is not supported: {_SUPPORTED}.")


@unique
class CommOp(Enum):
    """TorchRec's kinds of exchange; in tilerec all three are the same exchange."""

    POOLED_EMBEDDINGS_ALL_TO_ALL = "pooled_embeddings_all_to_all"
    POOLED_EMBEDDINGS_REDUCE_SCATTER = "pooled_embeddings_reduce_scatter"
    SEQUENCE_EMBEDDINGS_ALL_TO_ALL = "sequence_embeddings_all_to_all"


_UNSCALED = "rows and gradients are sent unscaled; if fp16 is too narrow (below 6e-8, from 65,520 on), use bf16"
_WITHOUT_EFFECT = {
    "forward_loss_scale": _UNSCALED,
    "backward_loss_scale": _UNSCALED,
    "fp8_quantize_dim": "fp8 has one scale per row",
    "fp8_quantize_dim_bwd": "fp8 has one scale per row",
    "fp8_bwd_uses_143": "fp8 is e4m3 with a scale per row, forward and backward",
    "fp8_output_dtype": "received rows have the dtype of the sums",
    "mx4_quantize_dim": "there is no mx4",
    "mx4_quantize_dim_bwd": "there is no mx4",
    "mx4_rounding_mode": "there is no mx4",
    "output_dtype": "use the collection's: EmbeddingBagCollection(output_dtype=...)",
}


@dataclass(frozen=True)
class QCommsConfig:
    """Wire formats of rows (`forward_precision`) and of their gradients (`backward_precision`).

    Args:
        forward_precision, backward_precision: a `CommType`, another library's member of the same value, the value, or
            the name of a registered wire format.
        forward_loss_scale, backward_loss_scale: ignored, because rows and gradients are sent unscaled. Values other
            than None and 1 cause a warning.
        fp8_…, mx4_…, output_dtype: ignored, with a warning.

    Raises:
        ConfigError: tilerec lacks the format.
    """

    forward_precision: CommType | str = CommType.FP32
    backward_precision: CommType | str = CommType.FP32
    forward_loss_scale: float | None = field(default=None, repr=False, compare=False)
    backward_loss_scale: float | None = field(default=None, repr=False, compare=False)
    fp8_quantize_dim: int | None = field(default=None, repr=False, compare=False)
    fp8_quantize_dim_bwd: int | None = field(default=None, repr=False, compare=False)
    fp8_bwd_uses_143: bool | None = field(default=False, repr=False, compare=False)
    fp8_output_dtype: Any = field(default=None, repr=False, compare=False)
    mx4_quantize_dim: int | None = field(default=None, repr=False, compare=False)
    mx4_quantize_dim_bwd: int | None = field(default=None, repr=False, compare=False)
    mx4_rounding_mode: Any = field(default=None, repr=False, compare=False)
    output_dtype: Any = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("forward_precision", "backward_precision"):
            given = getattr(self, name)
            if isinstance(given, str) and given in CODECS and given not in [kind.value for kind in CommType]:
                continue  # registered by the user
            try:
                format = to_enum(CommType, given, name)
            except ConfigError:
                raise ConfigError(f"QCommsConfig: {name}: got {given!r}; {_SUPPORTED}.") from None
            object.__setattr__(self, name, format)
        settings = {name: getattr(self, name) for name in _WITHOUT_EFFECT}
        for name in ("forward_loss_scale", "backward_loss_scale"):
            settings[name] = None if settings[name] == 1 else settings[name]
        warn_ignored_settings("QCommsConfig", settings, _WITHOUT_EFFECT, 3)

    def wire(self) -> Wire:
        """Return the formats as a `Wire` for plans."""
        forward, backward = self.forward_precision, self.backward_precision
        names = [each.value if isinstance(each, CommType) else each for each in (forward, backward)]
        return Wire(names[0], names[1])


def get_qcomm_codecs(qcomms_config: QCommsConfig | None) -> Wire:
    """Return the formats of a config; without a config, fp32 both ways (`Wire()`)."""
    return Wire() if qcomms_config is None else qcomms_config.wire()


def get_qcomm_codecs_registry(
    qcomms_config: QCommsConfig | None,
    comm_ops: Iterable[CommOp] | None = None,
    device: Any = None,
) -> dict[str, Wire]:
    """Return a sharder's `qcomm_codecs_registry`: the formats of `qcomms_config` for each kind of exchange.

    Args:
        comm_ops: a list of `CommOp`s, or of another library's members of the same values; None: all kinds.
        device: accepted for TorchRec scripts; formats are the same on every device.

    Raises:
        ConfigError: `comm_ops` is not a list of `CommOp`s.
    """
    if isinstance(comm_ops, (str, Enum)) or not isinstance(comm_ops, (Iterable, type(None))):
        raise ConfigError(
            f"get_qcomm_codecs_registry: comm_ops: got {comm_ops!r}; expected a list of CommOps, or None for all kinds "
            "of exchange."
        )
    ops = [to_enum(CommOp, op, "get_qcomm_codecs_registry: comm_ops") for op in comm_ops or CommOp]
    return {op.name: get_qcomm_codecs(qcomms_config) for op in ops}
