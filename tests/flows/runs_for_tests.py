"""Whole runs of the graded flow, each in a process of its own that may be killed.

The processes are forked from a server that has everything imported, so that a run of a few rows takes
a second and not five. What a run asked for is read from its fault server's request log.
"""

from __future__ import annotations

import ctypes
import hashlib
import multiprocessing
import os
import shutil
import signal
import sqlite3
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar

import orjson
import psutil
import yaml

from gradeloom.flows.configure import load_config
from gradeloom.schemas.config import FaultEngine, GradedConfig
from gradeloom.schemas.rows import ListRow, QueryRow
from gradeloom.tasks.engine.http import HttpBackend
from gradeloom.tasks.engine.types import Request
from gradeloom.tasks.generate.graded import GradedGenerator
from gradeloom.tasks.label.judge import Judge
from gradeloom.tasks.run import RunDirectory, _crossed

NAME = "tale"
"""The release that all these runs make."""

COUNT = "count"
"""Instead of a crash point: pass them all and count."""

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(
    [
        "pytest", "runs_for_tests", "datasets", "sklearn.linear_model", "sklearn.feature_extraction.text",
        "gradeloom.flows.cli", "gradeloom.flows.graded", "gradeloom.flows.orchestrate",
        "gradeloom.flows.show", "gradeloom.tasks.engine.fault",
    ]
)  # fmt: skip


AT_ONCE = 3
"""Runs side by side: they mostly wait for processes to start and for disks."""

A = TypeVar("A")
B = TypeVar("B")


def at_once(work: Callable[[A], B], over: Iterable[A]) -> list[B]:
    """The results of some work, a few at a time, in order."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(work, over))


def warm_up() -> None:
    """Have everything imported, so that the next run takes the time of a run."""
    nothing = _FORKS.Process(target=int)
    nothing.start()
    nothing.join()


_FORKING = threading.Lock()
"""multiprocessing looks after all children in `start`; two threads that do so misread an exit code."""


# --- a place and its runs -------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """A folder with a configuration, its source, and the run, releases and cache made from it."""

    root: Path
    namespace: int | None = None
    """Process whose mount namespace runs are started in."""

    @property
    def run(self) -> Path:
        return self.root / "runs" / NAME

    @property
    def releases(self) -> Path:
        return self.root / "releases"

    @property
    def release(self) -> Path:
        return self.releases / NAME / "0.1.0"

    @property
    def cache(self) -> Path:
        return self.root / "cache"

    @property
    def log(self) -> Path:
        """The fault server's request log."""
        return self.root / "requests.jsonl"

    def config(self, *sets: str) -> GradedConfig:
        return load_config(str(self.root / "config.yaml"), sets)

    def run_on(self, *sets: str, crash: str | None = None, env: Mapping[str, str] | None = None) -> Ended:
        """Run the command to its end, whatever that is."""
        return self.start(*sets, crash=crash, env=env).wait()

    def start(self, *sets: str, crash: str | None = None, env: Mapping[str, str] | None = None) -> Running:
        """Start the command: `gradeloom graded run --config … --set … --json`.

        Args:
            sets: `key=value`, as after --set.
            crash: `<crash point>:<n>`, or COUNT.
            env: more environment variables.
        """
        number = len(list(self.root.glob("command-*.out")))
        said = self.root / f"command-{number:03d}"
        for stream in (".out", ".err"):
            said.with_suffix(stream).touch()
        variables = {"GRADELOOM_HOME": str(self.root / "home"), **(env or {})}
        if crash is not None:
            variables["GRADELOOM_CRASH"] = crash
        arguments = ["graded", "run", "--config", str(self.root / "config.yaml"), "--json"]
        for one in sets:
            arguments += ["--set", one]
        process = _FORKS.Process(target=_command, args=(arguments, str(said), variables, self.namespace))
        with _FORKING:
            process.start()
        return Running(self, said, process)

    def digest(self) -> str:
        """The release's content digest."""
        digest: str = orjson.loads((self.release / "manifest.json").read_bytes())["digest"]
        return digest

    def copy(self, root: Path) -> Place:
        """The same folder elsewhere, as it is now; its configuration names the new paths."""
        shutil.copytree(self.root, root)
        text = (root / "config.yaml").read_text().replace(str(self.root), str(root))
        (root / "config.yaml").write_text(text)
        return Place(root)


def _command(
    arguments: list[str], said: str, variables: dict[str, str], namespace: int | None = None
) -> None:
    os.environ.update(variables)
    if namespace is not None:
        _enter(namespace)
    for number, suffix in ((1, ".out"), (2, ".err")):
        handle = os.open(said + suffix, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(handle, number)
    from gradeloom.flows.cli import run

    code = run(arguments)
    if os.environ.get("GRADELOOM_CRASH") == COUNT:
        Path(said + ".passed").write_bytes(orjson.dumps(dict(_crossed)))
    sys.stdout.flush()
    sys.stderr.flush()
    sys.exit(code)


def _enter(pid: int) -> None:
    """Join the mount namespace of a process (Python 3.11 has no os.setns)."""
    handle = os.open(f"/proc/{pid}/ns/mnt", os.O_RDONLY)
    here = Path.cwd()
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.setns(handle, 0x20000) == 0, os.strerror(ctypes.get_errno())
    os.close(handle)
    os.chdir(here)


@dataclass(frozen=True)
class Running:
    """A command at work."""

    place: Place
    said: Path
    process: BaseProcess

    def kill(self) -> Ended:
        """SIGKILL, at this very moment."""
        self.process.kill()
        return self.wait()

    def wait(self) -> Ended:
        """The end of the command and of every process it started."""
        ended = self.end()
        wait_until(lambda: not processes_of(self.place), "the processes of a run that ended are gone")
        return ended

    def end(self) -> Ended:
        """The end of the command."""
        while (code := self._exit_code()) is None:
            time.sleep(0.005)
        passed = self.said.with_suffix(".passed")
        out = self.said.with_suffix(".out").read_text()
        error = self.said.with_suffix(".err").read_text()
        return Ended(
            code,
            orjson.loads(out) if out.startswith("{") else {},
            error,
            orjson.loads(passed.read_bytes()) if passed.exists() else {},
        )

    def _exit_code(self) -> int | None:
        with _FORKING:
            return self.process.exitcode


@dataclass(frozen=True)
class Ended:
    """How a command ended.

    Attributes:
        code: its exit code; negative when a signal ended it.
        said: the JSON it printed, {} if none.
        error: its standard error.
        passed: how often it passed each crash point, if it was started with `crash=COUNT`.
    """

    code: int
    said: dict[str, Any]
    error: str
    passed: dict[str, int]

    @property
    def killed(self) -> bool:
        return self.code == -signal.SIGKILL

    @property
    def digest(self) -> str:
        assert self.code == 0, self.error
        return str(self.said["digest"])

    @property
    def last_line(self) -> str:
        return self.error.splitlines()[-1]


def processes_of(place: Place) -> list[int]:
    """Supervisors and fault servers that runs of this place have started, by their request log."""
    mark = f'"log":"{place.log}"'
    found = []
    for process in psutil.process_iter():
        try:
            mine = mark in process.environ().get("GRADELOOM_FAULT", "")
            if mine and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def wait_until(condition: Callable[[], bool], what: str, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"did not come true in {seconds:.0f} s: {what}"
        time.sleep(0.01)


# --- making places --------------------------------------------------------------------------

SMALL_FAULTS = {"die": 0.05, "bad_body": 0.05, "rate_limited": 0.05, "server_error": 0.05}
"""Transport faults, 20 % in all, that cost next to no time."""


def fault_place(root: Path, queries: int, **changes: Any) -> Place:
    """A place for runs through the fault engine.

    Args:
        root: made anew.
        queries: how many the source has.
        changes: by section of the configuration, e.g. `run={"wave": 1}`; added to what is there.
    """
    root.mkdir(parents=True)
    lines = [f"q{n}\twhat is told of the number {n} in tale {n * n}\n" for n in range(queries)]
    (root / "queries.tsv").write_text("".join(lines))
    place = Place(root)
    config: dict[str, dict[str, Any]] = {
        "source": {"path": str(root / "queries.tsv"), "format": "tsv"},
        "engine": {
            "kind": "fault", "seed": 7, "window": 4, "log": str(place.log), "retry_delay": 0,
            "transport_retries": 12,
        },
        "label": {"policy": "agreed"},
        "run": {"root": str(root / "runs"), "shard_rows": 2, "wave": 2, "max_failed": 0.5},
        "release": {"name": NAME, "root": str(root / "releases")},
        "cache": {"root": str(root / "cache")},
    }  # fmt: skip
    return _write(place, config, changes)


def replay_place(root: Path, queries: int, **changes: Any) -> Place:
    """A place for runs through the replay engine, with lists and judgements written here."""
    root.mkdir(parents=True)
    grades = (0, 1, 2, 3)
    words = ["of", "old", "there", "lived", "a", "king", "who", "had", "no", "daughter", "and", "one", "son"]
    lists, judgements = [], []
    for n in range(queries):
        texts = {str(grade): " ".join(f"{word}{n}{grade}" for word in words) for grade in grades}
        lists.append({"query_id": f"q{n}", "query": f"who was king {n}?", "passages": texts})
        for level in grades:
            judged = 0 if n == 2 else level  # the third list is dropped
            p = [0.85 if grade == judged else 0.05 for grade in grades]
            judgements.append({"query_id": f"q{n}", "level": level, "grade": judged, "p": p})
    for name, rows in (("lists", lists), ("judgements", judgements)):
        (root / f"{name}.jsonl").write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
    recorded = {"kind": "replay", "path": str(root / "lists.jsonl"), "adapter": "graded_lists", "window": 4}
    config: dict[str, dict[str, Any]] = {
        "source": {"path": str(root / "lists.jsonl")},
        "engine": recorded,
        "judge": {
            "engine": {"kind": "replay", "path": str(root / "judgements.jsonl"), "adapter": "judgements"}
        },
        "generation": {"attempts": 1},
        "label": {"policy": "agreed"},
        "run": {"root": str(root / "runs"), "shard_rows": 2, "wave": 2, "max_failed": 0.5},
        "release": {"name": NAME, "root": str(root / "releases")},
        "cache": {"root": str(root / "cache")},
    }  # fmt: skip
    return _write(Place(root), config, changes)


def _write(place: Place, config: dict[str, dict[str, Any]], changes: dict[str, Any]) -> Place:
    for section, settings in changes.items():
        if isinstance(settings, dict):
            config.setdefault(section, {}).update(settings)
        else:
            config[section] = settings
    (place.root / "config.yaml").write_text(yaml.safe_dump(config))
    return place


# --- what was asked ---------------------------------------------------------------------------

Key = tuple[str, str, str, int, str]
"""(fingerprint, row, part, attempt, stage): the ledger's key."""

FAULTS = ("stall", "die", "bad_body", "rate_limited", "server_error")


@dataclass(frozen=True)
class Asked:
    """One line of the request log: a request, and what the server did with it."""

    digest: str
    what: str

    @property
    def answered(self) -> bool:
        """The server gave a model outcome (which may not have reached anybody)."""
        return self.what not in FAULTS


def asked(place: Place) -> list[Asked]:
    """The request log so far, in the order in which requests reached the server."""
    if not place.log.exists():
        return []
    lines = [orjson.loads(line) for line in place.log.read_bytes().splitlines()]
    return [Asked(line["digest"], line["what"]) for line in lines]


def answers(log: Iterable[Asked]) -> Counter[str]:
    """How often each request was answered."""
    return Counter(one.digest for one in log if one.answered)


@dataclass(frozen=True)
class Known:
    """What a run had on disk at some moment."""

    ledger: frozenset[Key]
    cache: frozenset[str]


def known(place: Place) -> Known:
    """Ledger and cache as they are; read from a copy, for opening a file of a killed process mends it."""
    ledger = _rows(place.run / "ledger.sqlite", "SELECT fingerprint, row, part, attempt, stage FROM outcomes")
    cache = _rows(place.cache / "requests.sqlite", "SELECT digest FROM completions")
    return Known(frozenset(ledger), frozenset(digest for (digest,) in cache))


def _rows(database: Path, sql: str) -> list[Any]:
    if not database.exists():
        return []
    copy = database.parent / "copy"
    copy.mkdir()
    try:
        for file in database.parent.glob(f"{database.name}*"):
            if not file.name.endswith("-shm"):  # the index of the log is made again
                shutil.copy(file, copy / file.name)
        with closing(sqlite3.connect(copy / database.name)) as db:
            made = db.execute("SELECT COUNT(*) FROM sqlite_master").fetchone() != (0,)
            return db.execute(sql).fetchall() if made else []
    finally:
        shutil.rmtree(copy)


@dataclass(frozen=True)
class Requests:
    """Every request a finished run may have made: by the server's digest, its ledger and cache keys."""

    ledger: dict[str, Key] = field(default_factory=dict)
    cache: dict[str, str] = field(default_factory=dict)

    def known_to(self, before: Known) -> set[str]:
        """Digests of requests whose outcome was on disk."""
        return {d for d, key in self.ledger.items() if key in before.ledger} | {
            d for d, key in self.cache.items() if key in before.cache
        }


def requests_of(place: Place, *sets: str) -> Requests:
    """Every attempt at every row of a finished run, rendered anew from its shards."""
    config = place.config(*sets)
    engine = config.engine
    assert isinstance(engine, FaultEngine)
    identity = f"fault:{engine.seed}:{engine.truncate:g}/{engine.bad_json:g}/{engine.duplicate:g}"
    run = RunDirectory(Path(config.run.root) / config.release.name)
    stages = orjson.loads((run.path / "run.json").read_bytes())["stages"]
    backend = HttpBackend(["unix:/nowhere"], model="fault", identity=identity, request_timeout=1)
    found = Requests()

    def add(key: Key, request: Request) -> None:
        body = orjson.dumps(backend._body(request))
        key_of_server = engine.seed.to_bytes(8, "big", signed=True)
        digest = hashlib.blake2b(body, digest_size=16, key=key_of_server).hexdigest()
        # A row that stands in shards of two sizes is met twice.
        assert found.ledger.get(digest, key) == key, "two attempts make the same request"
        found.ledger[digest] = key
        found.cache[digest] = request.digest(identity)

    generator = GradedGenerator.create(config, stages["generate"])
    for query in shard_rows(run, "source", stages["source"], QueryRow):
        for attempt in range(config.generation.attempts):
            (request,) = generator.requests(query, attempt)
            add((stages["generate"], query.id, "", attempt, "generate"), request)
    if config.judge is not None:
        judge = Judge.create(config.judge, config.levels, seed=config.run.seed, fingerprint=stages["judge"])
        for row in shard_rows(run, "generate", stages["generate"], ListRow):
            for passage, request in zip(row.passages, judge.requests(row), strict=True):
                add((stages["judge"], row.id, str(passage.grade), 0, "judge"), request)
    return found


def shard_rows(run: RunDirectory, stage: str, fingerprint: str, row_type: type[Any]) -> Iterator[Any]:
    """The rows of one stage, shard after shard."""
    files = run.stage(stage, fingerprint, row_type)
    for path in sorted(files.folder.glob("*.parquet")):
        yield from files.read(path) or []
