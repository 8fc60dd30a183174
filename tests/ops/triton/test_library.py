"""Where Triton stands: whether it can serve, and why not."""

from __future__ import annotations

import importlib.util
import sys

import pytest
import torch

from tilerec.ops.runtime.triton import library
from tilerec.ops.runtime.triton.library import TritonStatus


@pytest.mark.parametrize("value", ["0", "off", "False", "no"])
def test_it_can_be_turned_off(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEREC_TRITON", value)
    assert library._find() == TritonStatus("TILEREC_TRITON=0")


def test_without_triton_the_reason_says_where_it_comes_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    found = library._find()
    assert "Triton is not installed" in found.reason
    assert str(found) == f"Triton kernels: not used ({found.reason})"


def test_a_triton_that_cannot_be_imported_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setitem(sys.modules, "triton", None)
    assert "cannot be imported" in library._find().reason


def test_its_version_is_told_and_whether_it_interprets() -> None:
    triton = pytest.importorskip("triton")
    found = library._find()
    assert not found.reason
    assert found.version == triton.__version__
    assert found.interpreted == bool(triton.knobs.runtime.interpret)
    assert str(found).startswith(f"Triton kernels: Triton {triton.__version__}")


@pytest.mark.parametrize("built_for", ["cuda", "hip"])
@pytest.mark.parametrize("reason", ["", "Triton is not installed"])
def test_builds_for_gpus_are_served_where_triton_is(
    built_for: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(library, "status", lambda: TritonStatus(reason))
    assert not library.serves_gpus()
    monkeypatch.setattr(torch.version, built_for, "12.8")
    assert library.serves_gpus() == (not reason)


def test_a_cpu_build_does_not_even_import_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(library, "status", lambda: pytest.fail("asked"))
    assert not library.serves_gpus()
