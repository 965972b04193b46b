"""Killed at any instant and started again, a run ends with the same release and asks nothing twice.

*In flight* is what was sent and not yet committed: only that may be asked again.
"""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import count, pairwise
from pathlib import Path

import pytest
from runs_for_tests import (
    AT_ONCE,
    COUNT,
    SMALL_FAULTS,
    Asked,
    Known,
    Place,
    answers,
    asked,
    at_once,
    fault_place,
    known,
    replay_place,
    requests_of,
    warm_up,
)

from gradeloom.tasks.release.verify import verify
from gradeloom.tasks.run import CRASH_POINTS

QUERIES = 6
WINDOW = 4


def fault(root: Path) -> Place:
    engine = {"truncate": 0.2, "bad_json": 0.1, "transport": SMALL_FAULTS, "window": WINDOW}
    return fault_place(root, QUERIES, engine=engine)


def replay(root: Path) -> Place:
    return replay_place(root, QUERIES)


MAKE: dict[str, Callable[[Path], Place]] = {"fault": fault, "replay": replay}


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Undisturbed]:
    """The run of an engine that nobody kills, made once."""

    @cache
    def run(engine: str) -> Undisturbed:
        place = MAKE[engine](tmp_path_factory.mktemp("undisturbed") / engine)
        warm_up()
        began = time.monotonic()
        ended = place.run_on(crash=COUNT)
        return Undisturbed(ended.digest, time.monotonic() - began, asked(place), ended.passed)

    return run


@dataclass(frozen=True)
class Undisturbed:
    digest: str
    seconds: float
    log: Sequence[Asked]
    passed: dict[str, int]


def test_an_undisturbed_run_asks_every_request_once(undisturbed: Callable[[str], Undisturbed]) -> None:
    """What the proofs below compare with is itself worth something."""
    log = undisturbed("fault").log
    assert len(answers(log)) >= QUERIES * 5  # a list and four judgements a query
    assert set(answers(log).values()) == {1}
    outcomes = {one.what for one in log}
    assert outcomes > {"stop", "truncate", "bad_json"}
    assert outcomes & set(SMALL_FAULTS)


# --- killed at a crash point ------------------------------------------------------------------


@dataclass(frozen=True)
class Moment:
    """What was known, and how long the request log was, when nothing of a killed run lived any more."""

    known: Known
    log: int


def moment(place: Place) -> Moment:
    return Moment(known(place), len(asked(place)))


def kill_and_resume(place: Place, crash: str) -> bool:
    """Kill a run at a crash point, resume it, check the log; False when the point was not reached."""
    ended = place.run_on(crash=crash)
    if not ended.killed:
        assert ended.code == 0, ended.error
        return False
    resume(place, f"killed at {crash}")
    return True


def resume(place: Place, after: str) -> None:
    """Resume a killed run to its end and check what it asks for and leaves."""
    kill = moment(place)
    ended = place.run_on()
    assert ended.code == 0, f"{after}: {ended.error}"
    verify(place.release)
    leftovers = [p for p in place.root.rglob("*") if p.name.endswith(".tmp") or ".staging" in p.name]
    assert leftovers == [], after
    if place.log.exists():
        assert_only_what_was_in_flight_is_asked_again(place, [kill])


def assert_only_what_was_in_flight_is_asked_again(place: Place, kills: Sequence[Moment]) -> None:
    """Check the request log of a run that was killed and resumed so many times and then finished."""
    log = asked(place)
    requests = requests_of(place)
    assert {one.digest for one in log} <= set(requests.ledger)  # we know every request for what it is
    ends = [*(kill.log for kill in kills[1:]), len(log)]
    assert set(answers(log[: kills[0].log]).values()) <= {1}
    for kill, end in zip(kills, ends, strict=True):
        before, after = log[: kill.log], log[kill.log : end]
        finished = requests.known_to(kill.known)
        assert not finished & {one.digest for one in after}, "asked again for what was on disk"
        assert set(answers(after).values()) <= {1}
        twice = set(answers(before)) & set(answers(after))
        assert len(twice) <= len(answers(before)) - len(finished), "more than what was in flight"
        assert len(twice) <= WINDOW, "more was in flight than the window lets out"


@pytest.mark.parametrize("engine", ["fault", "replay"])
def test_killed_at_crash_points(
    engine: str, tmp_path: Path, undisturbed: Callable[[str], Undisturbed]
) -> None:
    """Every point, the first, a middle and the last time it is passed."""
    reference = undisturbed(engine)
    assert set(reference.passed) == set(CRASH_POINTS)
    crashes = {f"{p}:{n}" for p, last in reference.passed.items() for n in (1, (last + 1) // 2, last)}
    missed = killed_at(engine, sorted(crashes), tmp_path, reference.digest)
    # How many rows a commit takes, and so how many commits there are, is a matter of timing.
    assert missed <= {f"before-commit:{n}" for n in range(2, reference.passed["before-commit"] + 1)}


def killed_at(engine: str, crashes: Sequence[str], root: Path, digest: str) -> set[str]:
    """Kill a run of its own at each crash point and resume it; which of them were not reached."""

    def one(crash: str) -> bool:
        place = MAKE[engine](root / crash.replace(":", "-"))
        reached = kill_and_resume(place, crash)
        assert place.digest() == digest, crash
        shutil.rmtree(place.root)
        return reached

    reached = at_once(one, crashes)
    return {crash for crash, was_reached in zip(crashes, reached, strict=True) if not was_reached}


@pytest.mark.long
@pytest.mark.parametrize("point", CRASH_POINTS)
@pytest.mark.parametrize("engine", ["fault", "replay"])
def test_killed_at_every_crash_point(
    engine: str, point: str, tmp_path: Path, undisturbed: Callable[[str], Undisturbed]
) -> None:
    """Every time the point is passed, until a run ends undisturbed."""
    digest = undisturbed(engine).digest
    kills = 0
    for batch in batches(count(1), AT_ONCE):
        missed = killed_at(engine, [f"{point}:{n}" for n in batch], tmp_path, digest)
        kills += len(batch) - len(missed)
        if missed:
            break
    assert kills >= {"before-manifest": 1, "before-commit": 5}.get(point, 2 * QUERIES)


def batches(numbers: Iterator[int], size: int) -> Iterator[list[int]]:
    while True:
        yield [next(numbers) for _ in range(size)]


# --- killed at any moment ---------------------------------------------------------------------


def killed_at_moments(engine: str, moments: Sequence[float], root: Path, reference: Undisturbed) -> None:
    """Kill runs of their own at these shares of a run's time (or earlier, were it too late), and resume."""

    def one(number: int) -> None:
        place = MAKE[engine](root / str(number))
        seconds = moments[number] * reference.seconds
        while not killed_after(place, seconds):
            shutil.rmtree(place.root)
            place = MAKE[engine](root / str(number))
            seconds /= 2
        resume(place, f"killed after {seconds:.3f} s")
        assert place.digest() == reference.digest

    at_once(one, range(len(moments)))


def killed_after(place: Place, seconds: float) -> bool:
    running = place.start()
    time.sleep(seconds)
    return running.kill().killed


@pytest.mark.parametrize("engine", ["fault", "replay"])
def test_killed_at_random_moments(
    engine: str, tmp_path: Path, undisturbed: Callable[[str], Undisturbed]
) -> None:
    moments = [random.Random(f"{engine} {n}").random() for n in range(2)]
    killed_at_moments(engine, moments, tmp_path, undisturbed(engine))


@pytest.mark.long
@pytest.mark.parametrize("engine", ["fault", "replay"])
def test_killed_at_twenty_random_moments(
    engine: str, tmp_path: Path, undisturbed: Callable[[str], Undisturbed]
) -> None:
    moments = [random.Random(f"{engine} of twenty {n}").random() for n in range(20)]
    killed_at_moments(engine, moments, tmp_path, undisturbed(engine))


def test_killed_again_and_again(tmp_path: Path, undisturbed: Callable[[str], Undisturbed]) -> None:
    """Every start is killed at its ninth answer, until one needs no ninth."""
    place = fault(tmp_path / "again")
    kills: list[Moment] = []
    while place.run_on(crash="after-response:9").killed:
        kills.append(moment(place))
    assert len(kills) >= 3
    for earlier, later in pairwise(kills):
        assert earlier.known.ledger <= later.known.ledger
    assert place.digest() == undisturbed("fault").digest
    assert_only_what_was_in_flight_is_asked_again(place, kills)
