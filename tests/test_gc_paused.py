"""The collector of cycles rests while a plan is made, and goes on as it was."""

from __future__ import annotations

import gc

import pytest

from tilerec.gc_paused import gc_paused


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_is_as_it_was_after_a_plan_or_an_error(enabled: bool) -> None:
    @gc_paused()
    def fails() -> None:
        raise KeyError(gc.isenabled())

    before = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        with pytest.raises(KeyError, match="False"):
            fails()
        assert gc.isenabled() is enabled
    finally:
        (gc.enable if before else gc.disable)()
