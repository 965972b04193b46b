"""Nothing is lost when the transport fails or the model answers badly, and timing decides nothing."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import orjson
import pyarrow.parquet as pq
import pytest
from runs_for_tests import FAULTS, Place, answers, asked, at_once, fault_place

from gradeloom.schemas.manifest import Manifest
from gradeloom.tasks.release.verify import verify

QUERIES = 40
BAD_ANSWERS = {"truncate": 0.15, "bad_json": 0.15, "duplicate": 0.1}
EACH = {"die": 0.2, "bad_body": 0.2, "rate_limited": 0.2, "server_error": 0.2}
"""Every fault that costs no time at 20 %, so that four of five sendings fail."""


def manifest(place: Place) -> Manifest:
    return Manifest.model_validate_json((place.release / "manifest.json").read_bytes())


def queries_in(place: Place, table: str) -> list[str]:
    (file,) = (place.release / table).glob("train-*.parquet")
    ids: list[str] = pq.read_table(file, columns=["query_id"])["query_id"].to_pylist()
    return ids


@pytest.fixture(scope="session")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """A run whose model answers badly and whose transport never fails."""
    place = fault_place(
        tmp_path_factory.mktemp("faults") / "calm",
        QUERIES,
        engine={**BAD_ANSWERS, "window": 16},
        run={"shard_rows": 20},
    )
    assert place.run_on().code == 0
    return place


def run_like(calm: Place, root: Path, **changes: Any) -> Place:
    """The same rows, asked for in another way."""
    engine = {**BAD_ANSWERS, "window": 16, **changes.pop("engine", {})}
    run = {"shard_rows": 20, **changes.pop("run", {})}
    place = fault_place(root, QUERIES, engine=engine, run=run, **changes)
    ended = place.run_on()
    assert ended.code == 0, ended.error
    verify(place.release)
    return place


def test_every_row_is_accounted_for(calm: Place) -> None:
    stages = {account.stage: account for account in manifest(calm).content.accounting}
    assert list(stages) == ["source", "generate", "filter", "near_duplicates", "judge", "label"]
    assert stages["source"].rows == QUERIES
    assert stages["generate"].failed > 0  # a bad answer three times in a row
    assert set(stages["generate"].reasons) <= {"truncated", "bad_json"}
    assert stages["near_duplicates"].reasons["duplicate"] > 0
    assert stages["label"].reasons.keys() <= {"judge_abstained", "grades_disagree"}
    lists, rejects = queries_in(calm, "lists"), queries_in(calm, "rejects")
    assert sorted(lists + rejects, key=lambda q: int(q[1:])) == [f"q{n}" for n in range(QUERIES)]
    assert lists == sorted(lists, key=lambda q: int(q[1:]))
    assert len(lists) == stages["label"].kept


def test_a_bad_answer_is_asked_again_with_another_seed_and_no_more(calm: Place) -> None:
    seen = Counter(one.what for one in asked(calm))
    assert set(answers(asked(calm)).values()) == {1}
    assert not set(seen) & set(FAULTS)
    assert seen["truncate"] + seen["bad_json"] > 10
    # stops are lists and judgements: four judgements a list that reached the judge.
    stages = {account.stage: account for account in manifest(calm).content.accounting}
    assert seen["stop"] + seen["duplicate"] == stages["generate"].kept + 4 * stages["judge"].rows


@pytest.mark.parametrize(
    "transport",
    [
        pytest.param(EACH, id="four-kinds-at-20-percent-each"),
        pytest.param({"rate_limited": 0.6, "server_error": 0.2}, id="429-and-500"),
        pytest.param(
            {"stall": 0.04, "die": 0.04, "bad_body": 0.04, "rate_limited": 0.04, "server_error": 0.04},
            id="all-five-20-percent-in-all",
        ),
    ],
)
def test_transport_faults_change_nothing(transport: dict[str, float], calm: Place, tmp_path: Path) -> None:
    engine = {"transport": transport, "transport_retries": 60, "request_timeout": 0.4}
    place = run_like(calm, tmp_path / "faults", engine=engine)
    assert place.digest() == calm.digest()
    log = asked(place)
    assert {one.what for one in log} >= set(transport)
    # A request that was not answered in time is sent again; all others are answered once.
    late = {one.digest for one in log if one.answered} - set(answers(asked(calm)))
    assert late == set()
    failed = sum(not one.answered for one in log)
    assert 0.7 * sum(transport.values()) < failed / len(log) < 1.3 * sum(transport.values())


def test_concurrency_and_shards_change_nothing(calm: Place, tmp_path: Path) -> None:
    def one(ways: tuple[int, int, int]) -> None:
        window, wave, shard_rows = ways
        run = {"wave": wave, "shard_rows": shard_rows}
        place = run_like(calm, tmp_path / f"{window}-{wave}-{shard_rows}", engine={"window": window}, run=run)
        assert place.digest() == calm.digest(), ways
        assert answers(asked(place)) == answers(asked(calm)), ways
        outstanding = [orjson.loads(line)["outstanding"] for line in place.log.read_bytes().splitlines()]
        assert max(outstanding) <= window, ways

    at_once(one, [(1, 1, 50), (8, 4, 3), (64, 1, 3), (64, 4, 50), (8, 1, QUERIES)])


def digests(root: Path, variants: list[dict[str, Any]], window: tuple[int, ...]) -> set[str]:
    """The content digests of runs that differ in these settings of `run`, and in the window."""

    def one(n: int) -> str:
        engine = {**BAD_ANSWERS, "window": window[n]}
        place = fault_place(root / str(n), QUERIES, engine=engine, run=variants[n])
        ended = place.run_on()
        assert ended.code == 0, ended.error
        verify(place.release)
        return ended.digest

    return set(at_once(one, range(len(variants))))


@pytest.mark.parametrize("bound", [{"target": 15}, {"budget_tokens": 50_000}], ids=["target", "budget"])
def test_a_bound_cuts_at_the_same_row_whatever_the_concurrency(bound: dict[str, int], tmp_path: Path) -> None:
    variants = [{**bound, "wave": wave, "shard_rows": 5} for wave in (1, 2, 8)]
    assert len(digests(tmp_path, variants, (1, 16, 64))) == 1
    source, *_, label = manifest(Place(tmp_path / "0")).content.accounting
    assert source.rows == QUERIES
    assert source.unused > 0
    assert label.kept == bound.get("target", label.kept)
    assert label.kept > 0


def test_with_a_budget_other_shards_are_another_recipe(tmp_path: Path) -> None:
    """It is spent shard by shard, so that where shards end decides what is released."""
    place = fault_place(tmp_path / "budget", QUERIES, run={"budget_tokens": 50_000, "shard_rows": 5})
    assert place.run_on().code == 0
    assert place.run_on("run.wave=1").said["already"]
    ended = place.run_on("run.shard_rows=6")
    assert ended.code == 2
    assert "--set release.version=0.2.0" in ended.last_line


def test_a_target_cuts_at_the_same_row_whatever_the_shards(tmp_path: Path) -> None:
    variants = [{"target": 15, "shard_rows": rows} for rows in (2, 7, QUERIES)]
    assert len(digests(tmp_path, variants, (32, 32, 32))) == 1


def test_a_server_that_answers_nobody_ends_the_run_and_loses_nothing(calm: Place, tmp_path: Path) -> None:
    place = fault_place(
        tmp_path / "dead",
        QUERIES,
        engine={**BAD_ANSWERS, "transport": {"server_error": 1.0}, "transport_retries": 2},
    )
    ended = place.run_on()
    assert ended.code == 3
    assert ended.last_line.startswith("gradeloom: error: the engine does not answer: ")
    assert not place.releases.exists() or not list(place.releases.rglob("manifest.json"))
    ended = place.run_on("engine.transport.server_error=0", "run.shard_rows=20")
    assert ended.code == 0, ended.error
    assert place.digest() == calm.digest()
