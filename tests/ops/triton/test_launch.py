"""Launches of one kind are one program to Triton; the first is Triton's own, the others run what it compiled."""

from __future__ import annotations

import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel, make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from tilerec.ops.runtime.triton import launch as launching
from tilerec.ops.runtime.triton.launch import launch


def copy(out, values, count, scale, FACTOR: tl.constexpr, WIDE: tl.constexpr = 7):  # type: ignore[no-untyped-def]
    pass


# Compiled, wherever the tests run: nothing here is launched.
KERNEL = JITFunction(copy, do_not_specialize=["count"])
SPECIALIZED = JITFunction(copy)


class Compiled(CompiledKernel):
    """Stands for what Triton compiled, and notes what it is run with."""

    def __init__(self) -> None:
        self.module, self.function, self.packed_metadata = None, "function", "packed"
        self.runs: list[tuple[Any, ...]] = []

    @property
    def run(self) -> Any:
        return lambda *args: self.runs.append(args)


class Triton:
    """Stands for `JITFunction.run`."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self.compiled = Compiled()

    def run(self, kernel: Any, *args: Any, grid: Any, warmup: bool, **constants: Any) -> Any:
        self.asked.append((kernel, grid, args, constants))
        return self.compiled


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[Triton]:
    stand_in = Triton()
    monkeypatch.setattr(JITFunction, "run", lambda self, *args, **kwargs: stand_in.run(self, *args, **kwargs))
    monkeypatch.setattr(launching, "_KNOWN", {})
    monkeypatch.setattr(launching, "current_device", lambda: 3)
    monkeypatch.setattr(launching, "current_raw_stream", lambda device: 40 + device)
    return stand_in


FLOATS, NUMBERS = torch.zeros(64), torch.zeros(64, dtype=torch.int64)


def test_what_the_first_launch_compiled_is_run_by_the_second_with_all_arguments_in_order(
    asked: Triton,
) -> None:
    launch(KERNEL, (5, 2), FLOATS, NUMBERS, 10, 0.5, FACTOR=4, num_warps=1)
    assert asked.asked == [(KERNEL, (5, 2), (FLOATS, NUMBERS, 10, 0.5), {"FACTOR": 4, "num_warps": 1})]
    assert asked.compiled.runs == []
    launch(KERNEL, (6,), FLOATS, NUMBERS, 11, 1.5, FACTOR=4, num_warps=1)
    assert len(asked.asked) == 1
    assert asked.compiled.runs == [
        (6, 1, 1, 43, "function", "packed", None, None, None, FLOATS, NUMBERS, 11, 1.5, 4, 7)
    ]


def test_what_shows_another_face_is_asked_for_again(asked: Triton) -> None:
    launch(KERNEL, (1,), FLOATS, NUMBERS, 10, 0.5, FACTOR=4, num_warps=1)
    for arguments, constants in (
        ((FLOATS[1:], NUMBERS, 10, 0.5), {"FACTOR": 4, "num_warps": 1}),
        ((FLOATS, NUMBERS.int(), 10, 0.5), {"FACTOR": 4, "num_warps": 1}),
        ((FLOATS, NUMBERS, 2**31, 0.5), {"FACTOR": 4, "num_warps": 1}),
        ((FLOATS, NUMBERS, 2**63, 0.5), {"FACTOR": 4, "num_warps": 1}),
        ((FLOATS, NUMBERS, -(2**31) - 1, 0.5), {"FACTOR": 4, "num_warps": 2}),
        ((FLOATS, NUMBERS, 10, None), {"FACTOR": 4, "num_warps": 1}),
        ((FLOATS, NUMBERS, 10, 0.5), {"FACTOR": 5, "num_warps": 1}),
        ((FLOATS, NUMBERS, 10, 0.5), {"FACTOR": 4, "num_warps": 2}),
        ((FLOATS, NUMBERS, 10, 0.5), {"FACTOR": 4, "WIDE": 8, "num_warps": 1}),
    ):
        before = len(asked.asked)
        for _ in range(2):
            launch(KERNEL, (1,), *arguments, **constants)
        assert len(asked.asked) == before + 1, (arguments, constants)


def test_a_number_that_is_compiled_into_a_kernel_is_always_asked_for(asked: Triton) -> None:
    for count in (1, 1, 16, 3):
        launch(SPECIALIZED, (1,), FLOATS, NUMBERS, count, 0.5, FACTOR=4)
    assert len(asked.asked) == 4


def test_an_argument_by_name_is_always_asked_for(asked: Triton) -> None:
    for _ in range(2):
        launch(KERNEL, (1,), FLOATS, NUMBERS, 3, scale=0.5, FACTOR=4)
    assert len(asked.asked) == 2


def test_hooks_of_profilers_see_every_launch(asked: Triton) -> None:
    def hook(*_: object) -> None:
        pass

    hooks = launching._RUNTIME.launch_enter_hook
    launch(KERNEL, (1,), FLOATS, NUMBERS, 3, 0.5, FACTOR=4)
    hooks.add(hook)
    try:
        launch(KERNEL, (1,), FLOATS, NUMBERS, 3, 0.5, FACTOR=4)
    finally:
        hooks.remove(hook)
    launch(KERNEL, (1,), FLOATS, NUMBERS, 3, 0.5, FACTOR=4)
    assert (len(asked.asked), len(asked.compiled.runs)) == (2, 1)


@pytest.mark.parametrize("hook", [None, lambda _: None])
def test_a_hook_need_not_be_a_chain(asked: Triton, monkeypatch: pytest.MonkeyPatch, hook: Any) -> None:
    monkeypatch.setattr(launching, "_RUNTIME", SimpleNamespace(launch_enter_hook=hook, launch_exit_hook=None))
    for _ in range(2):
        launch(KERNEL, (1,), FLOATS, NUMBERS, 3, 0.5, FACTOR=4)
    assert len(asked.asked) == (1 if hook is None else 2)


def test_a_third_axis_and_what_triton_looks_into_are_always_asked_for(asked: Triton) -> None:
    for _ in range(2):
        launch(KERNEL, (1, 2, 3), FLOATS, NUMBERS, 3, 0.5, FACTOR=4)
    for scale in (tl.constexpr(1), tl.constexpr(2), (1, 2), (1, 2.0)):
        launch(KERNEL, (1,), FLOATS, NUMBERS, 3, scale, FACTOR=4)
    assert len(asked.asked) == 6


def test_two_launches_of_one_kind_are_one_program_to_triton(asked: Triton) -> None:
    """Triton's own binder, for an H200, says what it tells launches apart by."""
    backend = make_backend(GPUTarget("cuda", 90, 32))
    draw = random.Random(0)
    tensors = [
        FLOATS,
        FLOATS[1:],
        FLOATS[4:],
        FLOATS.half(),
        torch.nn.Parameter(FLOATS),
        NUMBERS,
        NUMBERS.int(),
    ]
    numbers = [0, 1, 16, 17, -1, 2**31 - 1, 2**31, -(2**31), 2**40, 2**63 - 1, 2**63, True]
    for kernel in (
        KERNEL,
        JITFunction(copy, do_not_specialize=["count"], do_not_specialize_on_alignment=["out"]),
    ):
        binder = create_function_from_signature(kernel.signature, kernel.params, backend)
        programs: dict[str, Compiled] = {}
        before = len(asked.asked)
        for _ in range(2000):
            arguments = (
                draw.choice(tensors), draw.choice(tensors), draw.choice(numbers), draw.choice([0.5, 2.0, None, False])
            )  # fmt: skip
            constants = {"FACTOR": draw.choice([1, 4]), "num_warps": draw.choice([1, 4])}
            _, specialization, options = binder(*arguments, **constants)
            asked.compiled = program = programs.setdefault(str((specialization, options)), Compiled())
            asks, runs = len(asked.asked), len(program.runs)
            launch(kernel, (1,), *arguments, **constants)
            assert len(asked.asked) > asks or len(program.runs) > runs, "another program ran"
        assert len(asked.asked) - before < 1900
