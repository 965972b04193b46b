"""A run pays only for what is new: what an earlier run has, of itself or in the cache, is not asked again."""

from __future__ import annotations

import fcntl
from collections import Counter
from importlib.resources import files
from pathlib import Path

import orjson
import pytest
from runs_for_tests import Ended, Place, Running, asked, fault_place, replay_place, requests_of, wait_until

from gradeloom.tasks.release.catalog import read_manifest

QUERIES = 12


@pytest.fixture(scope="session")
def first(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """A finished run of the first eight of twelve queries."""
    place = fault_place(
        tmp_path_factory.mktemp("reuse") / "first", QUERIES, run={"shard_rows": 4, "limit": 8}
    )
    assert place.run_on().code == 0
    return place


@pytest.fixture
def place(first: Place, tmp_path: Path) -> Place:
    """The same, to go on with."""
    return first.copy(tmp_path / "reuse")


def asked_by(place: Place, *sets: str) -> tuple[Ended, Counter[str]]:
    """Run with other settings as version 0.2.0: how it ended, and what it asked for, by stage."""
    before = len(asked(place))
    ended = place.run_on("release.version=0.2.0", *sets)
    assert ended.code == 0, ended.error
    stages = {digest: key[-1] for digest, key in requests_of(place, *sets).ledger.items()}
    return ended, Counter(stages[one.digest] for one in asked(place)[before:])


def kept(ended: Ended, stage: str) -> int:
    return next(int(a["kept"]) for a in ended.said["accounting"] if a["stage"] == stage)


def test_the_first_run_asks_for_everything(first: Place) -> None:
    stages = {digest: key[-1] for digest, key in requests_of(first).ledger.items()}
    assert Counter(stages[one.digest] for one in asked(first)) == {"generate": 8, "judge": 32}


@pytest.mark.parametrize(
    "change",
    [
        pytest.param("label.policy=expected", id="label-policy"),
        pytest.param("judge.min_mass=0.9", id="judge-threshold"),
        pytest.param("filters.1.min_words=11", id="filter-threshold"),
        pytest.param("filters.5.threshold=0.7", id="near-duplicate-threshold"),
        pytest.param("run.target=3", id="target"),
        pytest.param("run.limit=4", id="fewer-queries"),
        pytest.param("run.shard_rows=3", id="other-shards"),
        pytest.param("generation.attempts=3", id="nothing-changed"),
    ],
)
def test_later_settings_cost_nothing(change: str, place: Place) -> None:
    _, requests = asked_by(place, change)
    assert requests == {}


def test_another_judge_prompt_costs_judgements_and_no_generation(place: Place) -> None:
    prompt = (files("gradeloom.data") / "prompts" / "judge.yaml").read_text()
    other = place.root / "stern.yaml"
    other.write_text(prompt.replace("system: |", "system: |\n  Be stern.", 1))
    assert other.read_text() != prompt
    ended, requests = asked_by(place, f"judge.prompt={other}")
    assert requests == {"judge": 4 * kept(ended, "near_duplicates")}


def test_a_looser_filter_costs_the_judgements_of_what_it_lets_through(place: Place) -> None:
    strict, requests = asked_by(place, "filters.1.max_words=100")
    assert requests == {}
    assert 0 < kept(strict, "filter") < 8

    fresh = fault_place(place.root / "fresh", QUERIES, run={"shard_rows": 4, "limit": 8})
    assert fresh.run_on("filters.1.max_words=100").code == 0
    before = len(asked(fresh))
    loose = fresh.run_on("release.version=0.2.0")
    new = kept(loose, "filter") - kept(strict, "filter")
    assert len(asked(fresh)) - before == 4 * new


def test_more_queries_cost_the_new_ones(place: Place) -> None:
    shards = {p: p.stat().st_mtime_ns for p in (place.run / "shards").rglob("*.parquet")}
    ended, requests = asked_by(place, "run.limit=12")
    assert requests == {"generate": 4, "judge": 16}
    assert kept(ended, "source") == 12
    after = {p: p.stat().st_mtime_ns for p in (place.run / "shards").rglob("*.parquet")}
    assert shards.items() <= after.items()  # reused, not written again
    assert len(after) == len(shards) * 3 // 2


def test_another_run_pays_only_for_what_the_cache_lacks(place: Place) -> None:
    _, requests = asked_by(place, f"run.root={place.root / 'elsewhere'}", "run.limit=9")
    assert requests == {"generate": 1, "judge": 4}


def test_without_the_cache_another_run_pays_again(place: Place) -> None:
    before = len(asked(place))
    ended = place.run_on(
        "release.version=0.2.0", f"run.root={place.root / 'elsewhere'}", "cache.enabled=false"
    )
    assert ended.code == 0, ended.error
    assert len(asked(place)) - before == 40


# --- what is released already -----------------------------------------------------------------


def test_the_same_again_is_already_released_and_starts_nothing(place: Place) -> None:
    before = {p: p.stat().st_mtime_ns for p in place.release.rglob("*")}
    (place.root / "file").write_text("")
    # A server whose request log cannot be written would not start.
    ended = place.run_on(f"engine.log={place.root / 'file' / 'log'}")
    assert ended.code == 0, ended.error
    assert (ended.said["already"], ended.said["digest"]) == (True, place.digest())
    assert {p: p.stat().st_mtime_ns for p in place.release.rglob("*")} == before


def test_a_version_with_other_settings_is_refused_and_the_next_one_named(place: Place) -> None:
    (place.releases / "tale" / "0.2.0").mkdir()
    before = len(asked(place))
    ended = place.run_on("label.policy=judged")
    assert ended.code == 2
    assert "--set release.version=0.3.0" in ended.last_line
    assert str(place.release) in ended.last_line
    assert len(asked(place)) == before


def test_run_json_says_what_was_asked_for(first: Place) -> None:
    described = orjson.loads((first.run / "run.json").read_bytes())
    assert (described["name"], described["version"]) == ("tale", "0.1.0")
    assert described["config"]["run"]["limit"] == 8
    assert described["config"] == read_manifest(first.release).content.config
    folders = {p.name for p in (first.run / "shards").iterdir()}
    assert folders == {f"{stage}-{fingerprint}" for stage, fingerprint in described["stages"].items()}


# --- two at once --------------------------------------------------------------------------------


def test_two_processes_on_one_run(tmp_path: Path) -> None:
    place = fault_place(tmp_path / "two", 2, engine={"latency": 0.5})
    one = place.start()
    wait_until(lambda: len(asked(place)) > 0, "the first is at work")
    other = place.start().end()
    assert other.code == 2
    assert f"another process (pid {one.process.pid}) works on this run" in other.last_line
    assert str(place.run) in other.last_line
    assert len(other.error.splitlines()) == 1
    assert one.wait().code == 0
    assert place.run_on().said["already"]


def cut_at_once(one: Place, other: Place) -> list[Ended]:
    """Run both, and hold them up until both are about to cut their release."""
    home = one.releases / "tale"
    home.mkdir(parents=True)
    with (home / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        both = [place.start(f"release.root={one.releases}") for place in (one, other)]
        wait_until(lambda: all(map(waits_for_a_lock, both)), "both want to cut")
    return [running.wait() for running in both]


def waits_for_a_lock(running: Running) -> bool:
    blocked = [line.split() for line in Path("/proc/locks").read_text().splitlines() if " -> " in line]
    return str(running.process.pid) in {fields[5] for fields in blocked}


def test_two_runs_cut_the_same_release_at_once(tmp_path: Path) -> None:
    one, other = replay_place(tmp_path / "one", 6), replay_place(tmp_path / "other", 6)
    ends = cut_at_once(one, other)
    assert [ended.code for ended in ends] == [0, 0]
    assert sorted(ended.said["already"] for ended in ends) == [False, True]
    assert {ended.digest for ended in ends} == {one.digest()}
    assert sorted(p.name for p in (one.releases / "tale").iterdir()) == [".lock", "0.1.0"]


def test_two_runs_cut_one_version_with_other_content_at_once(tmp_path: Path) -> None:
    one, other = replay_place(tmp_path / "one", 6), replay_place(tmp_path / "other", 7)
    ends = sorted(cut_at_once(one, other), key=lambda ended: ended.code)
    assert [ended.code for ended in ends] == [0, 2]
    assert ends[0].digest == one.digest()
    assert "0.2.0" in ends[1].last_line
    assert sorted(p.name for p in (one.releases / "tale").iterdir()) == [".lock", "0.1.0"]
