"""`tilerec doctor`: check an installation, as plain text to read or to paste into a report.

Each check gives one line: a state, a name, and values. `broken` stands for a part that training needs and that does not
work; the command's exit status is then 1. `note` stands for a limit that costs speed or stops larger runs. Both have a
next move.
"""

from __future__ import annotations

import os
import platform
import resource
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import typer

from tilerec.terminal import print_plain

if TYPE_CHECKING:
    from torch import Tensor

GROUP_TIMEOUT_S = 60.0
"""Limit of the test with two processes; each of them imports torch, which takes seconds on a slow disk."""
SHARED_MEMORY = 64 * 2**20
"""Docker's default size of /dev/shm, which is too small for loaders with workers."""
OPEN_FILES = 4_096
"""Fewer are too few for hundreds of ranks or files."""
_EXTRAS = {"pyarrow": "data", "rich": "cli", "torchmetrics": "train", "starlette": "serve", "ray": "ray"}


@dataclass(frozen=True)
class Finding:
    """Result of a check.

    Attributes:
        move: what to do, for a state other than "ok".
    """

    state: Literal["ok", "note", "broken"]
    name: str
    text: str
    move: str = ""

    def __str__(self) -> str:
        line = f"{self.state:<7} {self.name:<16} {self.text}"
        return f"{line}\n{'':24} -> {self.move}" if self.move else line


def doctor() -> None:
    """Check this installation: versions, kernels, GPUs, a group of two processes, and limits.

    The exit status is 1 if a part is broken.
    """
    states = []
    for check in (_versions, _extras, _native, _compiler, _lookup, _gpus, _group, _limits):
        for finding in _guarded(check):
            print_plain(str(finding))
            states.append(finding.state)
    notes = states.count("note")
    print_plain(f"{states.count('broken')} broken, {notes} {'note' if notes == 1 else 'notes'}")
    if "broken" in states:
        raise typer.Exit(1)


def own_version() -> str:
    """Return the version of the installed package."""
    from tilerec.version import __version__

    return __version__


def _guarded(check: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    """Yield the findings of a check, and its exception as a finding: the other checks still run."""
    name = check.__name__.strip("_")
    try:
        yield from check()
    except Exception as error:
        text = " ".join(str(error).split())
        yield Finding("broken", name, f"{type(error).__name__}: {text}", "Read the error; reinstall that part.")


def _versions() -> Iterator[Finding]:
    import torch

    from tilerec.torch_private import untested_version

    yield Finding("ok", "tilerec", f"{own_version()}, {Path(__file__).parent}")
    yield Finding("ok", "python", f"{platform.python_version()}, {sys.executable}")
    yield Finding("ok", "system", f"{platform.platform()}, {os.cpu_count()} cores")
    built = (
        f"CUDA {torch.version.cuda}"
        if torch.version.cuda
        else f"ROCm {torch.version.hip}"
        if torch.version.hip
        else "CPU"
    )
    newer = untested_version(torch.__version__)
    if newer:
        yield Finding("note", "torch", newer.split("; ")[1], "Run `make test` in a checkout.")
    yield Finding("ok", "torch", f"{torch.__version__}, {built} build, {torch.get_num_threads()} threads")


def _extras() -> Iterator[Finding]:
    from importlib import metadata

    found = [f"{name} {metadata.version(name)}" for name in _EXTRAS if find_spec(name)]
    missing = [f"{name} (tilerec[{extra}])" for name, extra in _EXTRAS.items() if not find_spec(name)]
    yield Finding("ok", "packages", ", ".join(["numpy " + metadata.version("numpy"), *found]))
    if missing:
        yield Finding("ok", "not installed", ", ".join(missing))


def _native() -> Iterator[Finding]:
    from tilerec.ops.backends import native_status

    found = native_status()
    if not found.reason:
        yield Finding("ok", "native library", f"{found.isa}, OpenMP: {found.openmp or 'none'}, {found.path}")
        if not found.openmp:
            yield Finding(
                "note", "native library", "one thread", "Install a torch with OpenMP (torch.__config__.show())."
            )
    elif found.path is None:
        yield Finding("note", "native library", f"off ({found.reason})", "Unset TILEREC_NATIVE to use it.")
    else:
        # Without it the reference kernels run, which are right and slow.
        state: Literal["note", "broken"] = "broken" if found.path.exists() else "note"
        move = "Install g++ and tilerec again, or run `make native` in a checkout."
        yield Finding(state, "native library", found.reason, move)


def _compiler() -> Iterator[Finding]:
    from tilerec.torch_private import cpp_compiler

    found = cpp_compiler()
    if found is None:
        yield Finding("note", "C++ compiler", "none; tilerec export and torch.compile need one", "Install g++.")
    else:
        yield Finding("ok", "C++ compiler", found)


def _lookup() -> Iterator[Finding]:
    """Compare a lookup and its update with torch's."""
    import torch

    off = _lookup_error("cpu")
    state: Literal["ok", "broken"] = "ok" if off < 1e-5 else "broken"
    yield Finding(state, "lookup on cpu", f"differs from torch by {off:.1g}", "" if off < 1e-5 else "Run `make test`.")
    if torch.cuda.device_count():
        off = _lookup_error("cuda")
        state = "ok" if off < 1e-5 else "broken"
        yield Finding(
            state,
            "lookup on cuda",
            f"differs from torch by {off:.1g}",
            "" if off < 1e-5 else "Run scripts/gpu_check.py.",
        )


def _lookup_error(device: str) -> float:
    import torch

    from tilerec.modules.embedding_bag import EmbeddingBagCollection
    from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
    from tilerec.spec.table import EmbeddingBagConfig

    config = EmbeddingBagConfig(num_embeddings=100, embedding_dim=16, name="table", feature_names=["id"])
    bags = EmbeddingBagCollection([config], device=torch.device(device))
    ids, lengths = torch.arange(64, device=device) * 7 % 100, torch.full((16,), 4, device=device)
    found = bags(KeyedJaggedTensor.from_lengths_sync(["id"], ids, lengths)).values()
    (weight,) = bags.parameters()
    wanted = torch.nn.functional.embedding_bag(ids.view(16, 4), weight, mode="sum")
    gradient: Tensor = torch.autograd.grad(found.square().sum(), weight)[0]
    reference: Tensor = torch.autograd.grad(wanted.square().sum(), weight)[0]
    return max((a - b).detach().abs().max().item() for a, b in ((found, wanted), (gradient, reference)))


def _gpus() -> Iterator[Finding]:
    import torch

    from tilerec.ops.backends import triton_status

    count = torch.cuda.device_count()
    triton = triton_status()
    version = triton.reason or f"{triton.version}{', interpreted' if triton.interpreted else ''}"
    if triton.reason and count:
        yield Finding("note", "Triton", version, "Install triton: on a GPU, lookups run as plain torch without it.")
    else:
        yield Finding("ok", "Triton", version)
    if not count:
        yield _without_gpu()
        return
    for index in range(count):
        about = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        text = (
            f"{about.name}, {free / 2**30:.1f} of {total / 2**30:.1f} GiB free, capability {about.major}.{about.minor}"
        )
        yield Finding("ok", f"cuda:{index}", text)
    nccl = torch.distributed.is_nccl_available()
    yield Finding(
        "ok" if nccl else "note", "NCCL", "available" if nccl else "missing", "" if nccl else "Ranks use gloo."
    )


def _without_gpu() -> Finding:
    import torch

    if not (shutil.which("nvidia-smi") or Path("/dev/nvidia0").exists()):
        inside = any(Path(mark).exists() for mark in ("/.dockerenv", "/run/.containerenv"))
        more = " (this container sees the host's GPUs with --gpus all)" if inside and torch.version.cuda else ""
        return Finding("ok", "GPUs", f"none; training runs on the CPU{more}")
    if torch.version.cuda is None:
        return Finding("note", "GPUs", "none for this CPU build of torch", "Install a CUDA build of torch.")
    text = "torch finds none beside an NVIDIA driver"
    return Finding("broken", "GPUs", text, "Compare the CUDA version of `nvidia-smi` with that of torch.")


def _group() -> Iterator[Finding]:
    """Add two numbers over gloo in two processes."""
    from tilerec.errors import TilerecError
    from tilerec.testing.ranks import run_ranks

    try:
        sums = run_ranks(2, _sum_of_ranks, timeout_s=GROUP_TIMEOUT_S)
    except (TilerecError, RuntimeError, OSError, TimeoutError) as error:
        text = " ".join(str(error).split())
        yield Finding("broken", "two processes", text, "Check the host name, 127.0.0.1, and GLOO_SOCKET_IFNAME.")
        return
    right = sums == [3.0, 3.0]
    move = "" if right else "Run `make test` in a checkout."
    yield Finding("ok" if right else "broken", "two processes", f"gloo all-reduce of 1 and 2: {sums}", move)


def _sum_of_ranks() -> float:
    import torch
    import torch.distributed as dist

    value = torch.tensor([1.0 + dist.get_rank()])
    dist.all_reduce(value)
    return float(value)


def _limits() -> Iterator[Finding]:
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = files != resource.RLIM_INFINITY and files < OPEN_FILES
    yield Finding("note" if few else "ok", "open files", _limit(files), f"ulimit -n {OPEN_FILES}" if few else "")
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    yield Finding("ok", "locked memory", _limit(locked))
    shared = Path("/dev/shm")
    if shared.is_dir():
        size = shutil.disk_usage(shared)
        small = size.total <= SHARED_MEMORY
        text = f"{size.free / 2**30:.2f} of {size.total / 2**30:.2f} GiB free"
        yield Finding("note" if small else "ok", "/dev/shm", text, "docker run --shm-size=8g" if small else "")
    else:
        yield Finding("note", "/dev/shm", "missing", "Mount a tmpfs there: processes share tensors in it.")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    yield Finding("ok", "memory", f"{memory / 2**30:.1f} GiB")


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else f"{value:,}"
