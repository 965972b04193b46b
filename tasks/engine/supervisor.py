"""A child command that dies with us, together with everything it ever started.

    gradeloom ──pipe──> supervisor ──> command (leader of a session of its own) ──> its children …

We start a small supervisor process (this module, run by `python -m`) and hold the write end of its
standard input. The supervisor starts the command in a new session and then only watches: when its
input ends (we died, even by SIGKILL, or asked for a stop), when the command ends, or when it is
signalled, it stops every member of the session and waits until the last one is gone. Should the
supervisor itself be killed, we do the same from here.

*Members* are the processes of the command's session and their descendants. A server's workers often
survive the death of the process that started them; they do not survive this.
(`PR_SET_PDEATHSIG` is no substitute: it covers one process, and follows the thread that started it.)

The supervisor starts in well under 0.2 s: it imports the standard library and psutil.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

import psutil

GRACE = 10.0
"""Seconds between TERM and KILL when a stop is asked for."""
LAST_GRACE = 1.0
"""The same when we, the command or the supervisor died: nothing is left to be finished."""
TIDYING = 2.0
"""Seconds after KILL that a resource tracker has for its work."""
UNKILLABLE = 60.0
"""Seconds after KILL until we stop waiting for a process stuck in the kernel."""
TICK = 0.1
TAIL_BYTES = 64 * 1024


class Supervised:
    """A command under a supervisor. Not restartable: make another one.

    Args:
        command: program and arguments.
        env: the whole environment of the command; nothing is added.
        log: file to which its output and errors are appended.
        scratch: a folder to remove, whoever died, when everything is gone.
    """

    def __init__(
        self, command: Sequence[str], *, env: Mapping[str, str], log: Path, scratch: Path | None = None
    ) -> None:
        self.command = list(command)
        self.env = dict(env)
        self.log = log
        self.scratch = scratch
        self.session: int | None = None
        """Process id of the command, which is also its session's id; None before `start`."""
        self.supervisor: int | None = None
        """Process id of the supervisor; None before `start`."""
        self._log_start = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._ended = threading.Event()
        self._gone = threading.Event()

    def start(self) -> None:
        """Start the command; return once it runs.

        Raises:
            OSError: the log cannot be written or the command cannot be started.
        """
        assert self._process is None, "already started"
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self._log_start = log.tell()
            # -P: a file of the working directory must not pass for a module of the supervisor.
            supervisor = [sys.executable, "-P", "-m", "gradeloom.tasks.engine.supervisor"]
            process = subprocess.Popen(
                [*supervisor, str(self.scratch or ""), *self.command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=self.env,
                start_new_session=True,
            )
        self._process, self.supervisor = process, process.pid
        assert process.stdout is not None
        report = process.stdout.readline().decode().strip()
        if not report.isdigit():
            process.wait()
            self._gone.set()
            raise OSError(f"cannot start {self.command[0]}: {report or self.last_lines() or 'no report'}")
        self.session = int(report)
        threading.Thread(
            target=self._watch, args=(process, process.stdout, self.session), name="watch-engine", daemon=True
        ).start()

    def alive(self) -> bool:
        """Whether both the command and its supervisor run."""
        return self.session is not None and not self._ended.is_set()

    def stop(self, grace: float = GRACE) -> None:
        """Stop every member, TERM first and KILL after `grace` seconds; return when all are gone.

        Raises:
            OSError: a member cannot be killed (stuck in the kernel).
        """
        process = self._process
        if process is None:
            return
        assert process.stdin is not None
        with contextlib.suppress(OSError, ValueError):  # it may have ended, or be stopped by another thread
            process.stdin.write(f"{grace}\n".encode())
            process.stdin.close()
        if not self._gone.wait(grace + 2):
            process.kill()  # the supervisor itself hangs; the watching thread finishes its work
        self._gone.wait()
        left = members(self.session) if self.session is not None else set()
        if left:
            raise OSError(f"processes {sorted(p.pid for p in left)} of {self.command[0]} cannot be killed")

    def last_lines(self, n: int = 20) -> str:
        """The last lines that the command wrote since it was started."""
        try:
            with self.log.open("rb") as f:
                end = f.seek(0, os.SEEK_END)
                f.seek(max(self._log_start, end - TAIL_BYTES))
                return "\n".join(f.read().decode(errors="replace").splitlines()[-n:])
        except OSError:
            return ""

    def _watch(self, process: subprocess.Popen[bytes], report: IO[bytes], session: int) -> None:
        """Notice the end of the command, outlive the supervisor, do its work if it was killed."""
        report.readline()  # a line when the command ended, end-of-file when the supervisor did
        self._ended.set()
        process.wait()
        if process.returncode != 0:
            end_session(session, set(), LAST_GRACE)
            _remove(self.scratch)
        self._gone.set()


# --- members ----------------------------------------------------------------------------------


def members(session: int, known: set[psutil.Process] | None = None) -> set[psutil.Process]:
    """The living processes of a session, of `known`, and all their descendants. Zombies count as gone."""
    found = set(known or ())
    children: dict[int, list[psutil.Process]] = {}
    for process in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError, PermissionError, psutil.NoSuchProcess):
            children.setdefault(process.ppid(), []).append(process)
            if os.getsid(process.pid) == session:
                found.add(process)
    found = {process for process in found if _lives(process)}
    unseen = list(found)
    while unseen:
        new = {child for child in children.get(unseen.pop().pid, []) if child not in found and _lives(child)}
        found |= new
        unseen += new
    return found


def _lives(process: psutil.Process) -> bool:
    try:
        # is_running compares start times, so that a pid used again is not mistaken for ours.
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def end_session(session: int, known: set[psutil.Process], grace: float) -> None:
    """TERM every member, KILL what is left after `grace` seconds, return when none is left.

    Returns also when a member outlives KILL by a minute: it is stuck in the kernel.
    """
    left = members(session, known)
    started = time.monotonic()
    _signal(left, signal.SIGTERM)
    _signal(left, signal.SIGCONT)  # a stopped process hears TERM only when it goes on
    while left and time.monotonic() < started + grace:
        time.sleep(TICK / 2)
        left = members(session, left)
    while left and time.monotonic() < started + grace + UNKILLABLE:
        late = time.monotonic() > started + grace + TIDYING
        # Again each time: a member may have forked in between.
        _signal({process for process in left if late or not _tidies(process)}, signal.SIGKILL)
        time.sleep(TICK / 2)
        left = members(session, left)


def _tidies(process: psutil.Process) -> bool:
    """Whether this is the resource tracker of Python's multiprocessing.

    It removes the shared memory of processes that were killed, and then ends by itself.
    """
    with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
        return any("multiprocessing.resource_tracker" in word for word in process.cmdline())
    return False


def _signal(processes: set[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


# --- the supervisor process -------------------------------------------------------------------


def _supervise(scratch: Path | None, command: Sequence[str]) -> int:
    """Run the command until it ends, our input ends, our parent changes, or we are signalled.

    Speaks to its parent on standard output: first the session's id (or why there is none), then a
    line once the command has ended. Hears on standard input: a line with the grace to give.
    """
    parent = os.getppid()
    signalled = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: signalled.set())
    try:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=sys.stderr, stderr=sys.stderr, start_new_session=True
        )
    except OSError as error:
        _say(error.strerror or str(error))
        return 1
    _say(str(child.pid))
    known: set[psutil.Process] = set()
    ticks = 0
    # The end of our input is the first sign of the parent's death. Its changed id is the second, for
    # a worker that the parent forked may hold a copy of the pipe.
    while not _ended(child.pid) and not signalled.is_set() and os.getppid() == parent:
        readable, _, _ = select.select([0], [], [], TICK)
        if readable:
            break
        if ticks % 20 == 0:  # who left the session is still known by its parent
            known = members(child.pid, known)
        ticks += 1
    _say("ended")
    end_session(child.pid, known, _grace())
    child.wait()
    _remove(scratch)
    return 0


def _ended(pid: int) -> bool:
    """Whether a child has ended, leaving it a zombie: its id, our session's name, is not given away."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _grace() -> float:
    readable, _, _ = select.select([0], [], [], 0)
    line = os.read(0, 64) if readable else b""
    try:
        return float(line)
    except ValueError:
        return LAST_GRACE


def _remove(folder: Path | None) -> None:
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)


def _say(line: str) -> None:
    with contextlib.suppress(BrokenPipeError):
        os.write(1, f"{line}\n".encode())


if __name__ == "__main__":
    raise SystemExit(_supervise(Path(sys.argv[1]) if sys.argv[1] else None, sys.argv[2:]))
