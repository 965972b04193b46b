"""A supervised command and all it started die with us, whoever is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gradeloom.tasks.engine.supervisor import Supervised

ENV = {"PATH": os.environ["PATH"]}

# The command: a parent, a child in its session, and a grandchild that ignores TERM.
STUBBORN = 'trap "" TERM; echo stubborn; while :; do sleep 0.2; done'
FAMILY = f"trap 'exit 0' TERM; sh -c '{STUBBORN}' & sleep 300 & wait"


def session_of(pid: int) -> tuple[str, int] | None:
    """State and session id of a process, read from /proc, not through the code under test."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return fields[0], int(fields[3])


def living(session: int) -> list[int]:
    """Process ids of a session's members, zombies left out."""
    pids = (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())
    return sorted(pid for pid in pids if (s := session_of(pid)) and s[1] == session and s[0] != "Z")


def eventually(condition: Callable[[], bool], seconds: float = 20) -> None:
    """Wait for a condition; fail when it does not come."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "did not happen in time"
        time.sleep(0.02)


@pytest.fixture
def family(tmp_path: Path) -> Iterator[Supervised]:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    (scratch / "socket").touch()
    log = tmp_path / "logs" / "server.log"
    supervised = Supervised(["sh", "-c", FAMILY], env=ENV, log=log, scratch=scratch)
    supervised.start()
    eventually(lambda: "stubborn" in supervised.last_lines() and len(living(supervised.session or 0)) >= 4)
    yield supervised
    supervised.stop(grace=0.2)
    assert not scratch.exists()


def test_stop_returns_when_every_member_is_gone(family: Supervised) -> None:
    assert family.session is not None
    assert family.alive()
    family.stop(grace=0.3)
    assert living(family.session) == []
    assert not family.alive()
    family.stop()  # again: nothing to do


def test_stop_lets_a_command_end_itself(tmp_path: Path) -> None:
    tidy = (
        "import signal, sys; signal.signal(15, lambda *_: sys.exit('tidied up')); print('ready', flush=True)"
    )
    command = [sys.executable, "-c", f"{tidy}; signal.pause()"]
    supervised = Supervised(command, env=ENV, log=tmp_path / "log")
    supervised.start()
    eventually(lambda: supervised.last_lines() == "ready")
    supervised.stop(grace=10)
    assert supervised.last_lines() == "ready\ntidied up"


def test_supervisor_killed(family: Supervised) -> None:
    assert family.session is not None
    assert family.supervisor is not None
    os.kill(family.supervisor, signal.SIGKILL)
    eventually(lambda: not family.alive())
    eventually(lambda: living(family.session or 0) == [])


def test_supervisor_that_hangs_is_passed_over(family: Supervised) -> None:
    assert family.session is not None
    assert family.supervisor is not None
    os.kill(family.supervisor, signal.SIGSTOP)
    family.stop(grace=0.1)
    assert living(family.session) == []


def test_supervisor_asked_to_end_stops_the_command(family: Supervised) -> None:
    assert family.supervisor is not None
    os.kill(family.supervisor, signal.SIGTERM)
    eventually(lambda: living(family.session or 0) == [])


def test_command_killed_its_children_follow(family: Supervised) -> None:
    assert family.session is not None
    os.kill(family.session, signal.SIGKILL)
    eventually(lambda: not family.alive())
    eventually(lambda: living(family.session or 0) == [])


def test_command_that_ends_is_noticed(tmp_path: Path) -> None:
    supervised = Supervised(["sh", "-c", "echo going; exit 3"], env=ENV, log=tmp_path / "log")
    supervised.start()
    eventually(lambda: not supervised.alive())
    supervised.stop()
    assert supervised.last_lines() == "going"


def test_stopped_member_is_ended_too(family: Supervised) -> None:
    assert family.session is not None
    for pid in living(family.session):
        os.kill(pid, signal.SIGSTOP)
    family.stop(grace=0.2)
    assert living(family.session) == []


def test_descendant_in_a_session_of_its_own(tmp_path: Path) -> None:
    """A member that leaves the session is still known by its parent."""
    inner = "import os, time; os.setsid(); print('mine', os.getpid(), flush=True); time.sleep(300)"
    outer = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {inner!r}]).wait()"
    supervised = Supervised([sys.executable, "-c", outer], env=ENV, log=tmp_path / "log")
    supervised.start()
    eventually(lambda: supervised.last_lines().startswith("mine"))
    runaway = int(supervised.last_lines().split()[1])
    assert living(runaway) == [runaway]
    supervised.stop(grace=0.2)
    assert living(runaway) == []


OWNER = textwrap.dedent("""
    import os, sys, time
    from pathlib import Path
    from gradeloom.tasks.engine.supervisor import Supervised
    s = Supervised(["sh", "-c", sys.argv[1]], env={"PATH": os.environ["PATH"]}, log=Path(sys.argv[2]))
    s.start()
    if len(sys.argv) > 3 and os.fork() == 0:
        os.setsid()
        os.write(1, f"fork {os.getpid()}\\n".encode())
        time.sleep(300)
    os.write(1, f"session {s.session}\\n".encode())
    time.sleep(300)
""")


def start_owner(tmp_path: Path, *more: str) -> tuple[subprocess.Popen[str], dict[str, int]]:
    """Another process that supervises the family; what it printed, by name."""
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, FAMILY, str(tmp_path / "log"), *more], stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None
    said = dict(owner.stdout.readline().split() for _ in range(1 + len(more)))
    return owner, {name: int(pid) for name, pid in said.items()}


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_we_are_killed(tmp_path: Path, number: signal.Signals) -> None:
    owner, said = start_owner(tmp_path)
    eventually(lambda: len(living(said["session"])) >= 4)
    owner.send_signal(number)
    owner.wait()
    eventually(lambda: living(said["session"]) == [])


def test_we_are_killed_while_a_fork_of_ours_lives_on(tmp_path: Path) -> None:
    """A forked worker holds a copy of the pipe; the command must end all the same."""
    owner, said = start_owner(tmp_path, "fork")
    try:
        owner.kill()
        owner.wait()
        assert living(said["fork"]) == [said["fork"]]
        eventually(lambda: living(said["session"]) == [])
    finally:
        os.kill(said["fork"], signal.SIGKILL)


def test_other_children_do_not_hold_the_pipe(family: Supervised) -> None:
    """A child started meanwhile, inheriting all it can, has no end of the supervisor's pipes."""
    assert family.supervisor is not None
    ours = {str(Path(f"/proc/{family.supervisor}/fd/{fd}").readlink()) for fd in (0, 1)}
    seen = subprocess.run(
        ["ls", "-l", "/proc/self/fd"], close_fds=False, capture_output=True, text=True, check=True
    ).stdout
    assert "pipe:" in seen  # its own output
    assert not any(pipe in seen for pipe in ours)


def test_command_gets_this_environment_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_API_KEY", "s3cr3t")
    supervised = Supervised(["env"], env={**ENV, "COLOUR": "blue"}, log=tmp_path / "log")
    supervised.start()
    eventually(lambda: not supervised.alive())
    assert "COLOUR=blue" in supervised.last_lines()
    assert "s3cr3t" not in supervised.last_lines()


def test_last_lines_are_of_this_start_only(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("an earlier server's line\n")
    supervised = Supervised(["sh", "-c", "for i in 1 2 3 4 5; do echo line $i; done"], env=ENV, log=log)
    supervised.start()
    eventually(lambda: not supervised.alive())
    assert supervised.last_lines(2) == "line 4\nline 5"
    assert supervised.last_lines(99) == "line 1\nline 2\nline 3\nline 4\nline 5"
    assert log.read_text().startswith("an earlier server's line\nline 1\n")


def test_command_that_does_not_exist(tmp_path: Path) -> None:
    supervised = Supervised([str(tmp_path / "absent")], env=ENV, log=tmp_path / "log")
    with pytest.raises(OSError, match=r"absent: No such file or directory"):
        supervised.start()
    assert not supervised.alive()
    supervised.stop()


SHARED_MEMORY = textwrap.dedent("""
    import signal, time
    from multiprocessing.shared_memory import SharedMemory
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print(SharedMemory(create=True, size=4096).name, flush=True)
    time.sleep(300)
""")


def test_shared_memory_of_a_killed_member_is_given_back(tmp_path: Path) -> None:
    """Python's resource tracker, a member too, gets the time to remove it."""
    supervised = Supervised([sys.executable, "-c", SHARED_MEMORY], env=ENV, log=tmp_path / "log")
    supervised.start()
    eventually(lambda: supervised.last_lines() != "")
    segment = Path("/dev/shm") / supervised.last_lines().splitlines()[0]
    assert segment.exists()
    supervised.stop(grace=0.1)
    assert not segment.exists()
