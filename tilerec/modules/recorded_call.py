"""`RecordedCall`: base of modules that `torch.fx.symbolic_trace` records as one call and `torch.jit.script` refuses."""

from __future__ import annotations

from typing import Any, NoReturn

from torch.fx import Proxy

from tilerec.errors import ConfigError


def is_proxy(value: object) -> bool:
    """Return True for a value of `torch.fx.symbolic_trace`."""
    return isinstance(value, Proxy)


class RecordedCall:
    """A module whose call on a `torch.fx` proxy is one `call_module` node.

    A batch is no tensor, and the number of reads follows from its keys, so a trace cannot look inside.
    """

    @property
    def itself(self) -> RecordedCall:
        """The module. If it is the root of a trace, the traced module has it as its child of this name."""
        return self

    def _record(self, features: Any) -> Any:
        """Return the proxy of a call of this module with a proxy."""
        tracer = features.tracer
        path = "itself" if tracer.root is self else tracer.path_of_module(self)
        return tracer.create_proxy("call_module", path, (features,), {})

    def __prepare_scriptable__(self) -> NoReturn:
        """Raise a `ConfigError`: TorchScript has no batches of jagged features."""
        raise ConfigError(
            f"torch.jit.script: got a module with {type(self).__name__}; expected modules of tensors only. Write the "
            "model with tilerec.export.export(model, example, path): a C++ program runs the file without Python."
        )
