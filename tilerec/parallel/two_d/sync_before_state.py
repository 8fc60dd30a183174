"""Hook of `state_dict` that averages replicas first, so that the saved state is that of all of them."""

from __future__ import annotations

from typing import Any

from torch import nn

from tilerec.parallel.two_d.running_groups import TwoD
from tilerec.torch_private import state_dict_pre_hooks


class _SyncBeforeStateDict:
    """Hook that averages replicas before every `state_dict` of a module."""

    def __init__(self, two_d: TwoD) -> None:
        self.two_d = two_d

    def __call__(self, *_: object) -> None:
        self.two_d.sync_all()

    def __deepcopy__(self, memo: dict[int, Any]) -> _SyncBeforeStateDict:
        return self  # `sync_before_state_dict` replaces it on a copied model


def sync_before_state_dict(module: nn.Module, two_d: TwoD) -> None:
    hooks = state_dict_pre_hooks(module)
    for key in [key for key, hook in hooks.items() if isinstance(hook, _SyncBeforeStateDict)]:
        del hooks[key]
    module.register_state_dict_pre_hook(_SyncBeforeStateDict(two_d))
