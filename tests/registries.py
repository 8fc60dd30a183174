"""The registries of names, restored after a test: other tests of the process enumerate them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from tilerec.comms.codec import _CODECS
from tilerec.spec.optimizer import SPECS
from tilerec.spec.parameter_sharding import CODECS


@contextlib.contextmanager
def restored_registries() -> Iterator[None]:
    """Forget the optimizers and wire formats that are registered inside. Names of row rules stay taken."""
    specs, codecs, names = dict(SPECS), dict(_CODECS), list(CODECS)
    try:
        yield
    finally:
        SPECS.clear()
        SPECS.update(specs)
        _CODECS.clear()
        _CODECS.update(codecs)
        CODECS[:] = names
