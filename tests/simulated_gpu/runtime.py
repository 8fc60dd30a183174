"""`torch.cuda` over the simulated device (`device.cpp`), and Triton's interpreter on its tensors.

Only what the library and its tests call is here.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch._dynamo  # lists functions of `torch.cuda` as they are
import triton.language as tl
from torch._dynamo.trace_rules import get_torch_obj_rule_map
from triton.runtime import interpreter

from tests.ops.triton.interpreter import quick

_LIBRARY: ctypes.CDLL
_WAITS = [0]
"""How often the host has waited for the device."""
_ONE_AT_A_TIME = threading.RLock()
"""The interpreter changes Triton's language while it runs a kernel, for every thread."""
_CALLBACK = ctypes.CFUNCTYPE(None)
DEVICES = 2
CAPABILITY = (9, 0)


def _index(device: Any = None) -> int:
    if device is None or isinstance(device, int):
        return _LIBRARY.sg_current_device() if device is None or device < 0 else int(device)
    index = torch.device(device).index
    return int(_LIBRARY.sg_current_device() if index is None else index)


class Stream(torch.Stream):
    """Everything is done when it is given: a stream is a number."""

    def __new__(cls, device: Any = None, priority: int = 0, **known: Any) -> Any:
        index = _index(device)
        number = known.get("stream_id")
        number = _LIBRARY.sg_new_stream() if number is None else number
        return super().__new__(cls, stream_id=number, device_index=index, device_type=1)  # type: ignore[call-overload]

    @property
    def cuda_stream(self) -> int:
        return int(self.stream_id)

    def synchronize(self) -> None:
        synchronize()

    def wait_stream(self, other: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def record_event(self, event: Any = None) -> Any:
        return event or Event()

    def query(self) -> bool:
        return True


_SLOW: dict[Any, int] = {}
"""Streams that were told to sleep (`torch.cuda._sleep`), with how often the host had waited by then."""


class Event:
    """What was recorded is done, and heard of late: when it is asked for a second time, or after a wait; of a stream
    that sleeps, after a wait only."""

    def __init__(self, enable_timing: bool = False, **_: Any) -> None:
        self._heard, self._slow = True, False

    def record(self, stream: Any = None) -> None:
        self._heard, self._waits = False, _waited()
        self._slow = _SLOW.get(current_stream() if stream is None else stream) == self._waits

    def wait(self, stream: Any = None) -> None: ...

    def query(self) -> bool:
        heard, self._heard = self._heard, not self._slow
        return heard or _waited() > self._waits

    def synchronize(self) -> None:
        synchronize()

    def elapsed_time(self, other: Any) -> float:
        return 1.0


def _waited() -> int:
    """How often the host has waited for the device: in ops that read it, and here."""
    return int(_LIBRARY.sg_waited()) + _WAITS[0]


def synchronize(device: Any = None) -> None:
    if _LIBRARY.sg_capturing():
        raise RuntimeError("operation not permitted when stream is capturing")
    mode = _LIBRARY.sg_sync_debug_mode()
    if mode == 2:
        raise RuntimeError("called a synchronizing CUDA operation")
    if mode == 1:
        warnings.warn("called a synchronizing CUDA operation", stacklevel=2)
    _WAITS[0] += 1


def current_stream(device: Any = None) -> Stream:
    index = _index(device)
    return Stream(index, stream_id=int(_LIBRARY.sg_current_stream(index)))


@contextlib.contextmanager
def stream(given: Any) -> Iterator[None]:
    if given is None:
        yield
        return
    index = given.device_index
    before, device = _LIBRARY.sg_current_stream(index), _LIBRARY.sg_current_device()
    _LIBRARY.sg_set_device(index)
    _LIBRARY.sg_set_stream(index, ctypes.c_int64(given.stream_id))
    try:
        yield
    finally:
        _LIBRARY.sg_set_stream(index, ctypes.c_int64(before))
        _LIBRARY.sg_set_device(device)


class device:
    def __init__(self, device: Any) -> None:
        self.index = None if device is None else _index(device)

    def __enter__(self) -> None:
        self.before = _LIBRARY.sg_current_device()
        if self.index is not None:
            _LIBRARY.sg_set_device(self.index)

    def __exit__(self, *_: Any) -> None:
        _LIBRARY.sg_set_device(self.before)


class device_of(device):
    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__(tensor.device if tensor.is_cuda else None)


class CUDAGraph:
    """A tape of kernels."""

    def __init__(self, keep_graph: bool = False) -> None:
        self._tape: int | None = None
        self._kept: list[Any] = []

    def replay(self) -> None:
        assert self._tape is not None, "captured first"
        _LIBRARY.sg_replay(ctypes.c_void_p(self._tape))

    def reset(self) -> None:
        self._tape = None

    def pool(self) -> tuple[int, int]:
        return (0, 0)


_NOW: list[CUDAGraph] = []


class graph:
    def __init__(self, cuda_graph: CUDAGraph, pool: Any = None, stream: Any = None, **_: Any) -> None:
        self.graph = cuda_graph
        self.stream = stream or Stream()

    def __enter__(self) -> None:
        self.on = globals()["stream"](self.stream)
        self.on.__enter__()
        self.graph._tape = _LIBRARY.sg_begin()
        _NOW.append(self.graph)

    def __exit__(self, *_: Any) -> None:
        _LIBRARY.sg_end()
        _NOW.pop()
        self.on.__exit__(None, None, None)


def set_sync_debug_mode(mode: int | str) -> None:
    _LIBRARY.sg_set_sync_debug_mode({"default": 0, "warn": 1, "error": 2}.get(mode, mode))


class _Runtime:
    def cudaHostRegister(self, address: int, count: int, flags: int) -> int:
        _LIBRARY.sg_pin(ctypes.c_int64(address), 1)
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        _LIBRARY.sg_pin(ctypes.c_int64(address), 0)
        return 0


def _launched(executor: Any) -> None:
    """Triton's kernels run on the bytes where they are, and are taped."""
    quick().__enter__()  # for good
    run = executor.__call__

    def twins(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return torch.ops.simulated_gpu.twin(value.detach())
        return tuple(map(twins, value)) if isinstance(value, tuple) else value

    def launch(self: Any, *args: Any, **kwargs: Any) -> None:
        given = [twins(a) for a in args], {k: twins(v) for k, v in kwargs.items()}

        def kernel() -> None:
            with _ONE_AT_A_TIME:
                run(self, *given[0], **given[1])

        kernel()
        callback = _CALLBACK(kernel)
        if _NOW:
            _NOW[-1]._kept.append((callback, args, kwargs))
        _LIBRARY.sg_tape(callback)

    executor.__call__ = launch


def _rounded(builder: Any) -> None:
    """Numbers become bfloat16 as on a GPU, to the nearest; the interpreter cuts them off."""
    cast = builder.cast_impl

    def cast_impl(self: Any, source: Any, to: Any) -> Any:
        if source.dtype.scalar != tl.float32 or to.scalar != tl.bfloat16:
            return cast(self, source, to)
        bits = np.ascontiguousarray(source.data).view(np.uint32)
        even = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        even = np.where(np.isnan(source.data), (bits >> 16) | 64, even)
        return interpreter.TensorHandle(even.astype(np.uint16).reshape(source.data.shape), tl.bfloat16)

    builder.cast_impl = cast_impl


def install(library: ctypes.CDLL) -> None:
    """Let `torch.cuda` be this device. Before anything else of torch is used."""
    global _LIBRARY
    _LIBRARY = library
    get_torch_obj_rule_map()
    library.sg_current_stream.restype = library.sg_new_stream.restype = ctypes.c_int64
    library.sg_begin.restype = ctypes.c_void_p
    library.sg_kernels.restype = library.sg_waited.restype = ctypes.c_int64
    cuda: Any = torch.cuda
    for made in (Stream, Event, CUDAGraph, graph, device, device_of, stream, current_stream, synchronize,
                 set_sync_debug_mode):  # fmt: skip
        setattr(cuda, made.__name__, made)

    def nothing(*_: Any, **__: Any) -> None: ...

    def always(value: Any) -> Callable[..., Any]:
        return lambda *_, **__: value

    cuda.default_stream = lambda device=None: Stream(_index(device), stream_id=0)
    cuda.current_device = lambda: library.sg_current_device()
    cuda.set_device = lambda device: library.sg_set_device(_index(device))
    cuda.get_sync_debug_mode = lambda: library.sg_sync_debug_mode()
    cuda.is_current_stream_capturing = lambda: bool(library.sg_capturing())
    cuda.is_available = cuda.is_initialized = always(True)
    cuda.device_count = always(DEVICES)
    cuda.get_device_capability = always(CAPABILITY)
    cuda.get_device_name = always("simulated GPU")
    cuda.mem_get_info = always((8 << 30, 16 << 30))
    cuda.memory_allocated = cuda.max_memory_allocated = cuda.memory_reserved = always(0)
    cuda.cudart = _Runtime
    cuda.check_error = nothing
    cuda._sleep = lambda cycles: _SLOW.__setitem__(current_stream(), _waited())
    for name in ("_lazy_init", "init", "empty_cache", "manual_seed", "manual_seed_all",
                 "reset_peak_memory_stats"):  # fmt: skip
        setattr(cuda, name, nothing)
    cuda.get_rng_state = lambda device=None: torch.get_rng_state()
    cuda.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
    cuda.get_device_properties = always(
        types.SimpleNamespace(name="simulated GPU", major=9, minor=0, total_memory=16 << 30, multi_processor_count=132)
    )
    torch._C._cuda_getDevice = lambda: library.sg_current_device()  # type: ignore[attr-defined]
    torch._C._cuda_getCurrentRawStream = lambda index: library.sg_current_stream(index)  # type: ignore[attr-defined]
    torch.version.cuda = "simulated"
    warnings.filterwarnings("ignore", message=".*CUDA initialization.*")
    _rounded(interpreter.InterpreterBuilder)
    _launched(interpreter.GridExecutor)
