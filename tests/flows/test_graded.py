"""The composition of the graded flow: levels, models that take turns, rows that nobody could be asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from runs_for_tests import Place, answers, asked, fault_place

from gradeloom.flows.graded import GradedResult, GradedRun, run_graded
from gradeloom.flows.orchestrate import Orchestration
from gradeloom.flows.progress import Progress
from gradeloom.tasks.engine.engine import Engine
from gradeloom.tasks.release.tables import read_rows
from gradeloom.tasks.release.verify import verify

QUERIES = 24


async def run_here(place: Place, *sets: str) -> GradedResult:
    """A run in this very process."""
    with Progress(quiet=True) as progress:
        return await run_graded(place.config(*sets), progress=progress, tasks=Orchestration())


def two_models(root: Path, **run: Any) -> Place:
    return fault_place(
        root,
        QUERIES,
        engine={"truncate": 0.1, "bad_json": 0.1, "duplicate": 0.1, "window": 8},
        judge={"engine": {"kind": "fault", "seed": 11, "window": 8}},
        run={"shard_rows": 4, "wave": 3, **run},
    )


@pytest.mark.parametrize(
    "run",
    [
        {},
        {"target": 9},
        {"budget_tokens": 20_000},
        {"target": 9, "canary": {"rows": 3}},
        {"target": 9, "budget_tokens": 60_000, "wave": 1},
    ],
    ids=lambda run: "-".join(run) or "all",
)
async def test_models_that_take_turns_make_the_same_release(
    run: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two managed servers do not fit one device: one stops before the other is asked."""
    together = two_models(tmp_path / "together", **run)
    assert (await run_here(together)).stopped is None
    verify(together.release)

    working: set[Engine] = set()
    start, stop = Engine.start, Engine.stop

    async def alone(engine: Engine) -> None:
        working.add(engine)
        assert len(working) == 1, "two models on one device"
        await start(engine)

    async def gone(engine: Engine) -> None:
        await stop(engine)
        working.discard(engine)

    monkeypatch.setattr(Engine, "start", alone)
    monkeypatch.setattr(Engine, "stop", gone)
    monkeypatch.setattr(GradedRun, "_one_model_at_a_time", lambda _: True)
    in_turns = two_models(tmp_path / "turns", **run)
    assert (await run_here(in_turns)).stopped is None
    assert in_turns.digest() == together.digest()


async def test_models_that_take_turns_go_on_where_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GradedRun, "_one_model_at_a_time", lambda _: True)
    place = two_models(tmp_path / "turns")
    dies = "judge.engine.transport.server_error=1"
    with pytest.raises(Exception, match="the engine does not answer"):
        await run_here(place, dies, "judge.engine.transport_retries=1", "judge.engine.retry_delay=0")
    generated = len(asked(place))
    assert generated >= QUERIES
    await run_here(place)
    verify(place.release)
    assert len(asked(place)) == generated  # the judge has a log of its own: none


def test_rows_that_no_server_could_be_reached_for_are_asked_again(tmp_path: Path) -> None:
    """They failed for no reason of their own, and the same command goes on."""
    calm = fault_place(tmp_path / "calm", QUERIES, run={"max_failed": 0})
    assert calm.run_on().code == 0
    place = fault_place(
        tmp_path / "down",
        QUERIES,
        engine={"transport": {"server_error": 0.4}, "transport_retries": 1},
        run={"max_failed": 0},
    )
    ended = place.run_on()
    assert ended.code == 3
    assert "engine_unreachable" in ended.last_line
    ended = place.run_on("engine.transport.server_error=0")
    assert ended.code == 0, ended.error
    assert place.digest() == calm.digest()
    once = answers(asked(calm))
    assert {digest: n for digest, n in answers(asked(place)).items() if digest in once} == once


def test_the_bill_holds_what_the_target_left_over(tmp_path: Path) -> None:
    place = fault_place(tmp_path / "surplus", QUERIES, run={"target": 2, "wave": 4})
    usage = place.run_on().said["usage"]
    assert usage["tokens_paid"] == usage["prompt_tokens_sent"] + usage["completion_tokens_sent"]
    assert usage["tokens_paid"] > usage["tokens"] > 0


@pytest.mark.parametrize("mode", ["together", "per_level"])
@pytest.mark.parametrize(
    ("grades", "policy"), [((1, 0), "judged"), ((0, 2, 5), "expected"), ((9, 5, 4, 3, 1, 0), "agreed")]
)
def test_other_scales(mode: str, grades: tuple[int, ...], policy: str, tmp_path: Path) -> None:
    levels = [{"grade": g, "name": f"name {g}", "definition": f"definition {g}"} for g in grades]
    place = fault_place(
        tmp_path / "scale", 6, levels=levels, label={"policy": policy}, generation={"mode": mode},
        judge={"pairwise": True},
    )  # fmt: skip
    ended = place.run_on()
    assert ended.code == 0, ended.error
    verify(place.release)
    for _, row in read_rows(place.release, "lists"):
        assert row["intended"] == sorted(grades, reverse=True)
        assert set(row["judged"]) <= set(grades)
        assert all(min(grades) <= grade <= max(grades) for grade in row["grade"])
        assert policy != "agreed" or row["grade"] == row["intended"]
