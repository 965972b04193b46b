"""Canary, target and budget: decisions that depend on finished shards in order and nothing else."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gradeloom.flows.pacing import Estimate, Pace, Tally, out_of_reach
from gradeloom.schemas.config import CanaryConfig, RunConfig
from gradeloom.schemas.manifest import StageAccount


def pace(rows: int = 100, expected: int = 1000, **run: object) -> Pace:
    return Pace(RunConfig.model_validate({"shard_rows": 10, "wave": 4, **run}), rows, Estimate(expected, 0))


def shard(accepted: int, tokens: int = 100, rows: int = 10) -> Tally:
    return Tally(shards=1, rows=rows, accepted=accepted, tokens=tokens)


def finish(pace: Pace, ordinal: int, accepted: int, tokens: int = 100) -> None:
    first = ordinal * 10
    pace.finished(shard(accepted, tokens), list(range(first, first + accepted)))


def test_without_bounds_the_wave_is_the_only_limit() -> None:
    p = pace()
    assert [p.room_for_another(n, n) for n in range(6)] == [True, True, True, True, False, False]


def test_the_target_cuts_at_the_row_that_reaches_it() -> None:
    p = pace(target=7)
    finish(p, 0, 5)
    assert not p.enough
    finish(p, 1, 4)
    assert (p.cut, p.cut_reason) == (11, "target_reached")
    assert not p.room_for_another(2, 0)


def test_a_target_that_even_luck_cannot_reach_stops_the_run() -> None:
    p = pace(rows=30, target=29)
    finish(p, 0, 1)
    assert p.stopped is not None
    assert "target of 29 lists is out of reach: 1 of 10 rows accepted, 20 rows left" in p.stopped


def test_a_source_that_ends_before_the_target_gives_no_release() -> None:
    p = pace(rows=10, target=10)
    finish(p, 0, 10 - 1)
    account = StageAccount(stage="source", rows=10, kept=10)
    assert "target of 10 lists" in (p.verdict([account]) or "")


def test_the_canary_goes_alone_and_stops_a_bad_run() -> None:
    p = pace(canary=CanaryConfig(rows=10, min_accept=0.5))
    assert p.room_for_another(0, 0)
    assert not p.room_for_another(1, 1)
    finish(p, 0, 4)
    wanted = "accept rate 0.400, wanted at least 0.5. Nothing more was spent"
    assert p.stopped == f"the canary of 10 rows is out of bounds: {wanted}"


def test_the_canary_lets_a_good_run_go_on() -> None:
    p = pace(canary=CanaryConfig(rows=10, min_accept=0.5))
    finish(p, 0, 5)
    assert p.room_for_another(1, 0)


def test_the_budget_bounds_what_is_started() -> None:
    p = pace(budget_tokens=250)  # 10 tokens a row are expected
    assert p.room_for_another(0, 0)
    assert p.room_for_another(1, 1)
    assert not p.room_for_another(2, 2)
    assert not p.enough  # what runs may turn out cheaper


def test_a_spent_budget_without_target_releases_what_there_is() -> None:
    p = pace(budget_tokens=250)
    finish(p, 0, 5)
    finish(p, 1, 5)
    assert not p.room_for_another(2, 0)
    assert (p.cut, p.cut_reason) == (19, "budget_spent")


def test_a_spent_budget_before_the_target_says_what_to_change() -> None:
    p = pace(budget_tokens=150, target=50)
    finish(p, 0, 5)
    assert not p.room_for_another(1, 0)
    assert p.stopped is not None
    assert "100 spent, about 10 a row, 5 lists accepted. Raise run.budget_tokens" in p.stopped


def test_too_many_failures_and_nothing_kept() -> None:
    p = pace(max_failed=0.2)
    finish(p, 0, 1)
    bad = [StageAccount(stage="generate", rows=10, kept=7, failed=3, reasons={"bad_json": 3})]
    assert p.verdict(bad) == "3 of 10 rows failed, more than run.max_failed 0.2 allows: 3 bad_json"
    empty = pace()
    finish(empty, 0, 0)
    none = [StageAccount(stage="source", rows=10, kept=10)]
    none += [StageAccount(stage="filter", rows=10, rejected=10, reasons={"too_long": 9, "refusal": 1})]
    assert empty.verdict(none) == "nothing was kept: 9 too_long, 1 refusal"


def test_out_of_reach_is_all_but_impossible() -> None:
    assert out_of_reach(3, 2, 90, 100)  # more than there are rows left
    assert not out_of_reach(2, 2, 48, 98)  # two accepted of two: one in four, and all is paid for already
    assert not out_of_reach(57, 59, 0, 1)  # one row tells next to nothing
    assert out_of_reach(57, 59, 0, 30)
    assert not out_of_reach(0, 5, 1, 9)
    # 0 of 1: the upper bound is 1 - .001 = .999. All of 2: .998; all of 7000: .999 ** 7000 = .0009.
    assert not out_of_reach(6_900, 6_900, 0, 1)
    assert out_of_reach(7_000, 7_000, 0, 1)


def test_a_target_that_the_last_rows_may_still_reach_does_not_stop_the_run() -> None:
    p = pace(rows=100, target=50, shard_rows=98)
    p.finished(shard(48, rows=98), list(range(48)))
    assert p.stopped is None


@given(
    accepted=st.lists(st.integers(0, 10), min_size=1, max_size=12),
    costs=st.lists(st.integers(10, 300), min_size=12, max_size=12),
    target=st.one_of(st.none(), st.integers(1, 60)),
    budget=st.one_of(st.none(), st.integers(100, 2000)),
    waves=st.tuples(st.integers(1, 6), st.integers(1, 6)),
)
def test_the_cut_does_not_depend_on_how_many_shards_are_in_progress(
    accepted: list[int], costs: list[int], target: int | None, budget: int | None, waves: tuple[int, int]
) -> None:
    def drive(wave: int) -> tuple[int | None, str | None, bool]:
        p = pace(rows=10 * len(accepted), target=target, budget_tokens=budget, wave=wave)
        running: list[int] = []
        started = 0
        while True:
            while started < len(accepted) and p.room_for_another(started, len(running)):
                running.append(started)
                started += 1
            if not running or p.enough:
                return p.cut, p.cut_reason, p.stopped is not None
            ordinal = running.pop(0)
            finish(p, ordinal, accepted[ordinal], costs[ordinal])

    assert drive(waves[0]) == drive(waves[1])
