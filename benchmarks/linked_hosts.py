"""`LinkedHosts`: two network namespaces joined by a virtual cable; to a program each looks like a separate machine.

    with LinkedHosts(rate="100mbit") as hosts:
        hosts.popen(0, ["torchrun", ...])           runs on host 0, with `DEVICE`, a loopback and no other network

Needs Linux, root and iproute2; `why_not()` returns the missing requirement. On exit, only processes that these hosts
started are killed, and both namespaces are removed. The next program removes namespaces that a killed program left.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from types import TracebackType
from typing import Any

DEVICE = "link0"
"""The name of the cable's end on both hosts."""

ADDRESSES = ("10.77.0.1", "10.77.0.2")
_PREFIX = "tilerec-"


def why_not() -> str | None:
    """Return the reason why linked hosts are impossible here; None if they are possible."""
    if not sys.platform.startswith("linux"):
        return "network namespaces are a thing of Linux"
    if os.geteuid() != 0:
        return "making network namespaces takes root"
    if shutil.which("ip") is None:
        return "the program `ip` (iproute2) is not installed"
    name = f"{_PREFIX}{os.getpid()}-probe"
    try:
        _ip("netns", "add", name)
    except RuntimeError as error:
        return f"this system makes no network namespaces: {error}"
    _ip("netns", "del", name)
    return None


class LinkedHosts:
    """Two hosts, 0 and 1, with addresses `ADDRESSES`.

    Args:
        rate: bandwidth of the cable in each direction, in `tc`'s notation ("100mbit"); None: as fast as memory.

    Attributes:
        shaped: the reason why `rate` has no effect, or None if it has.
    """

    def __init__(self, rate: str | None = None) -> None:
        self.names = [f"{_PREFIX}{os.getpid()}-{host}" for host in range(2)]
        self.rate = rate
        self.shaped: str | None = None
        self._started: list[subprocess.Popen[Any]] = []

    def __enter__(self) -> LinkedHosts:
        _remove_orphans()
        try:
            for name in self.names:
                _ip("netns", "add", name)
            here, there = self.names
            _ip("link", "add", DEVICE, "netns", here, "type", "veth", "peer", "name", DEVICE, "netns", there)
            for name, address in zip(self.names, ADDRESSES, strict=True):
                _ip("-n", name, "addr", "add", f"{address}/30", "dev", DEVICE)
                for device in ("lo", DEVICE):
                    _ip("-n", name, "link", "set", device, "up")
                if self.rate is not None and self.shaped is None:
                    self.shaped = _shape(name, self.rate)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._started:
            # Each was started as the leader of its own process group.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for name in self.names:
            _remove(name)

    def popen(self, host: int, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a program on a host; it and its children are killed when the hosts are closed."""
        where = ["ip", "netns", "exec", self.names[host]]
        process = subprocess.Popen([*where, *command], start_new_session=True, **options)
        self._started.append(process)
        return process

    def free_port(self, host: int) -> int:
        """Return a TCP port of a host on which no process listens."""
        ask = f"import socket; s = socket.create_server(('{ADDRESSES[host]}', 0)); print(s.getsockname()[1])"
        run = ["ip", "netns", "exec", self.names[host], sys.executable, "-S", "-c", ask]
        return int(subprocess.run(run, check=True, capture_output=True, text=True).stdout)


def _shape(name: str, rate: str) -> str | None:
    """Limit the speed of a host's end; return the reason if that is impossible."""
    if shutil.which("tc") is None:
        return "the program `tc` (iproute2) is not installed"
    bucket = ["tbf", "rate", rate, "burst", "32kb", "latency", "200ms"]
    shaped = subprocess.run(
        ["tc", "-n", name, "qdisc", "add", "dev", DEVICE, "root", *bucket], capture_output=True, text=True
    )
    return None if shaped.returncode == 0 else f"tc: {shaped.stderr.strip()}"


def _ip(*arguments: str) -> str:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


def _remove(name: str) -> None:
    """Remove a namespace of this class, with the processes that still run in it."""
    with contextlib.suppress(RuntimeError):
        for pid in _ip("netns", "pids", name).split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        _ip("netns", "del", name)


def _remove_orphans() -> None:
    """Remove namespaces of programs that have ended."""
    for line in _ip("netns", "list").splitlines():
        name = line.split()[0] if line.strip() else ""
        owner = name.removeprefix(_PREFIX).split("-")[0]
        if name.startswith(_PREFIX) and owner.isdecimal() and not os.path.exists(f"/proc/{owner}"):
            _remove(name)
