"""`check_versions`: a package runs only with the ops, the torch and the vectors that it was compiled for."""

from __future__ import annotations

from tilerec.errors import ConfigError
from tilerec.export.manifest import OPS_ABI, Manifest
from tilerec.export.torch_library import torch_version

_LEVELS = ("DEFAULT", "AVX2", "AVX512")


def check_versions(manifest: Manifest, what: str, here: str) -> None:
    """Raise a `ConfigError` for a package that was made for other ops, another torch or wider vectors.

    Args:
        here: vector level of this machine, `torch.backends.cpu.get_cpu_capability()`.
    """
    if manifest.abi != OPS_ABI:
        raise ConfigError(
            f"{what}: got a package for version {manifest.abi} of tilerec's ops; expected {OPS_ABI}. Export the model "
            "again with this release."
        )
    if manifest.torch != torch_version():
        raise ConfigError(
            f"{what}: got a package of torch {manifest.torch}; expected torch {torch_version()}, which runs here. "
            f"Export the model again, or install torch {manifest.torch}."
        )
    if manifest.cpu != here and not (
        manifest.cpu in _LEVELS and here in _LEVELS and _LEVELS.index(manifest.cpu) < _LEVELS.index(here)
    ):
        raise ConfigError(
            f"{what}: got a package for {manifest.cpu}; expected code for {here}, which this processor has. Export the "
            "model on such a machine."
        )
