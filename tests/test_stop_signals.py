"""Interrupted ranks: they end, whatever they wait for, and remove their temporary files."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tilerec import stop_signals
from tilerec.command_policy import interrupt_by_exception, interrupt_by_signal

# Loads the file alone, because the package imports torch.
_PRELUDE = f"""
import importlib.util, os, signal, sys, tempfile, threading
from multiprocessing import Pipe
spec = importlib.util.spec_from_file_location("stop_signals", {stop_signals.__file__!r})
module = importlib.util.module_from_spec(spec)
sys.modules["stop_signals"] = module
spec.loader.exec_module(module)
StopSignals = module.StopSignals

def stuck():
    # As in a call of C code: no Python handler runs in the main thread.
    signal.pthread_sigmask(signal.SIG_BLOCK, {{signal.SIGUSR1}})
    while True:
        signal.sigwait({{signal.SIGUSR1}})
"""


def _python(script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a script in a new session, so that it can signal its whole process group."""
    return subprocess.run(
        [sys.executable, "-c", _PRELUDE + script], capture_output=True, text=True, timeout=120, start_new_session=True,
        env={**os.environ, **environment},
    )  # fmt: skip


def test_a_rank_that_waits_for_its_peers_ends_at_once_with_its_launcher() -> None:
    found = _python("""
ours, theirs = Pipe()
with StopSignals(theirs, grace_s=1e6):
    ours.close()
    stuck()
""")
    assert (found.returncode, found.stderr) == (143, "")


def test_a_rank_that_waits_for_its_peers_ends_at_once_on_sigterm() -> None:
    found = _python("""
ours, theirs = Pipe()
with StopSignals(theirs, grace_s=1e6):
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        stuck()
    except KeyboardInterrupt:
        stuck()
""")
    assert found.returncode == 143


@pytest.mark.parametrize("stop", ["ours.close()", "os.kill(os.getpid(), signal.SIGTERM)"])
def test_a_rank_whose_main_thread_runs_no_python_ends_after_the_grace_time(stop: str) -> None:
    found = _python(f"""
ours, theirs = Pipe()
with StopSignals(theirs, grace_s=0.01) as signals:
    signals.begin()
    try:
        {stop}
        stuck()
    except KeyboardInterrupt:
        stuck()
""")
    assert found.returncode == 143


@pytest.mark.parametrize("ignored", [True, False])
def test_a_rank_cleans_up_when_its_launcher_ends(tmp_path: Path, ignored: bool) -> None:
    """Commands in the background ignore SIGINT."""
    found = _python(f"""
if {ignored}:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
ours, theirs = Pipe()
try:
    with StopSignals(theirs, grace_s=60) as signals:
        signals.begin()
        with tempfile.NamedTemporaryFile(dir={str(tmp_path)!r}):
            ours.close()
            threading.Event().wait()
except KeyboardInterrupt:
    print("stopped")
""")
    assert found.stdout == "stopped\n"
    assert list(tmp_path.iterdir()) == []


def test_workers_of_a_rank_have_signals_of_their_own() -> None:
    found = _python("""
ours, theirs = Pipe()
with StopSignals(theirs, grace_s=60) as signals:
    signals.begin()
    worker = os.fork()
    if not worker:
        os.kill(os.getpid(), signal.SIGTERM)
        os._exit(0)
    _, status = os.waitpid(worker, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGTERM
print("goes on")
assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
""")
    assert found.stdout == "goes on\n"


# The ranks of these tests start no training loop, so their fork server need not import it and torch's compiler.
_SMALL_SERVER = """
from tilerec.train import launch
launch._PRELOADED = launch._PRELOADED[:2]
"""

_COMMAND = f"""{_SMALL_SERVER}
from tilerec.run_cli.ranks import run_on_ranks
from tests.test_stop_signals import write_and_stop
try:
    run_on_ranks(write_and_stop, {{folder!r}}, os.getpid(), {{group}}, nproc=2, device="cpu")
finally:
    print(sorted(os.listdir({{folder!r}})))
"""


def write_and_stop(group: object, folder: str, launcher: int, whole_group: bool) -> None:
    """On rank 0, begin to write a file, and stop the command; rank 1 waits for rank 0."""
    import threading

    from tilerec.atomic_file import open_replacement

    if group.rank:  # type: ignore[attr-defined]
        group.barrier()  # type: ignore[attr-defined]
    with open_replacement(Path(folder) / "out", "Result"):
        assert len(list(Path(folder).iterdir())) == 1
        if whole_group:
            os.killpg(launcher, signal.SIGTERM)
        else:
            os.kill(launcher, signal.SIGTERM)
        threading.Event().wait()


@pytest.mark.parametrize("whole_group", [True, False])
def test_a_stopped_command_ends_with_its_ranks_and_without_temporary_files(tmp_path: Path, whole_group: bool) -> None:
    found = _python(_COMMAND.format(folder=str(tmp_path), group=whole_group))
    assert (found.returncode, found.stdout) == (143, "[]\n"), found.stderr


def test_ranks_end_when_the_start_of_another_rank_is_interrupted() -> None:
    found = _python(f"""{_SMALL_SERVER}
from multiprocessing import context
from tests.test_stop_signals import write_and_stop
start = context.ForkServerProcess.start

def interrupted(process):
    if process.name == "rank 1":
        raise KeyboardInterrupt
    start(process)
    first.append(process)

first = []
context.ForkServerProcess.start = interrupted
try:
    launch.launch(2, write_and_stop, "", 0, False)
except KeyboardInterrupt:
    print(first[0].exitcode)
""")
    assert found.stdout == "143\n", found.stderr


def test_the_imports_of_a_command_end_on_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGINT)
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        interrupt_by_signal()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL
        interrupt_by_exception()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        interrupt_by_signal()
        interrupt_by_exception()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


_MASK_OF_A_CHILD = f"""{_SMALL_SERVER}
import multiprocessing, signal

def mask(pipe):
    pipe.send(sorted(int(one) for one in signal.pthread_sigmask(signal.SIG_BLOCK, [])))

def nothing(group):
    pass

if __name__ == "__main__":
    launch.launch(1, nothing)
    ours, theirs = multiprocessing.Pipe()
    child = multiprocessing.get_context("forkserver").Process(target=mask, args=(theirs,))
    child.start()
    print(ours.recv())
"""


def test_other_children_of_the_fork_server_get_their_signals(tmp_path: Path) -> None:
    """Else `terminate()` would not end them, and Ctrl-C would not reach them."""
    script = tmp_path / "script.py"
    script.write_text(_MASK_OF_A_CHILD)
    found = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=150, check=False)
    assert found.stdout.strip() == "[]", found.stdout + found.stderr


# Requests to save and stop -----------------------------------------------------------------------------------

_DEFER = """
signals = StopSignals(None, grace_s=60, repeat_s=0)
def request(number):
    os.kill(os.getpid(), number)
    while not signals.requested:
        pass
"""


@pytest.mark.parametrize(("number", "taken"), [("SIGTERM", 15), ("SIGUSR1", 15), ("SIGINT", 2)])
def test_a_deferred_signal_is_a_request(number: str, taken: int) -> None:
    found = _python(f"""{_DEFER}
before = signal.getsignal(signal.{number})
with signals:
    signals.begin()
    with signals.deferred():
        request(signal.{number})
        print("saves", signals.take())
assert signal.getsignal(signal.{number}) is before
""")
    assert (found.returncode, found.stdout) == (0, f"saves {taken}\n"), found.stderr


@pytest.mark.parametrize("first", ["SIGTERM", "SIGINT"])
@pytest.mark.parametrize("second", ["SIGTERM", "SIGINT"])
def test_a_second_signal_ends_at_once_and_differs_from_a_saved_end(first: str, second: str) -> None:
    found = _python(f"""{_DEFER}
with signals, signals.deferred():
    request(signal.{first})
    os.kill(os.getpid(), signal.{second})
    stuck()
""")
    assert found.returncode == 137


def test_ctrl_c_that_is_ignored_is_no_request() -> None:
    """Commands in the background ignore SIGINT."""
    found = _python(f"""{_DEFER}
signal.signal(signal.SIGINT, signal.SIG_IGN)
with signals, signals.deferred():
    os.kill(os.getpid(), signal.SIGINT)
    request(signal.SIGTERM)
    print("saves", signals.take())
""")
    assert (found.returncode, found.stdout) == (0, "saves 15\n"), found.stderr


def test_a_request_is_announced_with_its_signal() -> None:
    found = _python("""
announced = threading.Event()
def announce(number):
    print("request", number, flush=True)
    announced.set()
signals = StopSignals(None, grace_s=60, on_request=announce)
with signals, signals.deferred():
    os.kill(os.getpid(), signal.SIGINT)
    announced.wait()
    signals.take()
""")
    assert (found.returncode, found.stdout) == (0, "request 2\n"), found.stderr


def test_sigterm_after_an_early_warning_is_the_first_one() -> None:
    found = _python(f"""{_DEFER}
with signals, signals.deferred():
    request(signal.SIGUSR1)
    signals.take()
    request(signal.SIGTERM)
    print("saves", signals.take())
""")
    assert (found.returncode, found.stdout) == (0, "saves 15\n"), found.stderr


def test_a_sigterm_that_a_launcher_repeats_is_one_request() -> None:
    found = _python("""
signals = StopSignals(None, grace_s=60, repeat_s=1e6)
with signals, signals.deferred():
    for _ in range(2):
        os.kill(os.getpid(), signal.SIGTERM)
        while not signals.requested:
            pass
        print("saves", signals.take())
""")
    assert (found.returncode, found.stdout) == (0, "saves 15\nsaves 15\n"), found.stderr


@pytest.mark.parametrize(("number", "code"), [("SIGTERM", 143), ("SIGINT", 130)])
def test_a_request_that_nothing_acted_on_ends_the_block(number: str, code: int) -> None:
    found = _python(f"""{_DEFER}
with signals:
    signals.begin()
    with signals.deferred():
        request(signal.{number})
    print("not reached")
""")
    assert (found.returncode, found.stdout) == (code, ""), found.stderr


def test_a_rank_that_defers_signals_still_ends_with_its_launcher() -> None:
    found = _python("""
ours, theirs = Pipe()
try:
    with StopSignals(theirs, grace_s=60) as signals:
        signals.begin()
        with signals.deferred():
            ours.close()
            threading.Event().wait()
except KeyboardInterrupt:
    print("stopped")
""")
    assert found.stdout == "stopped\n", found.stderr


def test_handlers_of_the_caller_stay() -> None:
    found = _python("""
def own(number, frame):
    print("own", signal.Signals(number).name, flush=True)
signal.signal(signal.SIGUSR1, own)
with module.stop_request() as signals:
    os.kill(os.getpid(), signal.SIGUSR1)
    assert not signals.requested
signal.signal(signal.SIGTERM, own)
with module.stop_request() as signals:
    assert signals is None
    os.kill(os.getpid(), signal.SIGTERM)
""")
    assert found.stdout == "own SIGUSR1\nown SIGTERM\n", found.stderr
