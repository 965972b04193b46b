"""The probe: what is drawn, what is asked, and how the answer is said; once from end to end."""

from __future__ import annotations

import asyncio
import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_stories import cut, facts, kept
from tiny_retriever import make_place, tiny_config

from gradeloom.flows import probe as probing
from gradeloom.flows.orchestrate import Orchestration
from gradeloom.flows.probe import NOISE, ProbeResult, answer, ask, drawn, run_probe
from gradeloom.flows.progress import Progress
from gradeloom.flows.retriever import Material
from gradeloom.schemas.config import ReleaseConfig
from gradeloom.schemas.errors import InputError
from gradeloom.schemas.retriever import RetrieverConfig
from gradeloom.tasks.release.write import cut_release
from gradeloom.tasks.train.graded_qrels import Ranked, TrainingList, TrainingLists


def material(ids: list[str]) -> Material:
    lists = tuple(TrainingList(query_id, f"text {query_id}", (Ranked(0, "p", 1.0),)) for query_id in ids)
    return Material(TrainingLists(lists, 1, {}, ({"p": "passage"},)), {}, None)


def ids_of(found: Material) -> list[str]:
    return [one.query_id for one in found.lists.lists]


# --- what is drawn ----------------------------------------------------------------------------


@given(st.sets(st.text(min_size=1, max_size=4), min_size=4, max_size=40), st.integers(0, 3))
def test_a_smaller_draw_is_part_of_a_larger_one(ids: set[str], seed: int) -> None:
    whole = material(sorted(ids))
    draws = [set(ids_of(drawn(whole, size, seed))) for size in range(len(ids) + 1)]
    assert [len(queries) for queries in draws] == list(range(len(ids) + 1))
    assert all(small <= large for small, large in pairwise(draws))


@given(st.sets(st.integers(0, 99), min_size=8, max_size=40), st.sets(st.integers(100, 199), max_size=40))
def test_a_release_and_its_parent_share_what_they_can(both: set[int], added: set[int]) -> None:
    parent = [f"q{n}" for n in sorted(both)]
    child = parent + [f"q{n}" for n in sorted(added)]
    size = len(parent) // 2
    small, large = (set(ids_of(drawn(material(ids), size, 0))) for ids in (parent, child))
    # What the child drew of the parent's queries, the parent drew, too.
    assert large & set(parent) <= small


def test_a_draw_keeps_the_order_and_is_told_apart_by_its_digest() -> None:
    whole = material([f"q{n}" for n in range(8)])
    parts = [drawn(whole, 3, seed) for seed in range(4)]
    assert all(ids_of(part) == sorted(ids_of(part)) for part in parts)
    assert len({part.lists.digest for part in (whole, *parts)}) == len({tuple(ids_of(p)) for p in parts}) + 1


# --- what is asked, and how it is answered ----------------------------------------------------


def test_questions_are_tested_together() -> None:
    better = {"s": {f"q{n}": 0.6 for n in range(10)}}
    worse = {"s": {f"q{n}": 0.5 for n in range(10)}}
    noisy = {"s": {f"q{n}": 0.5 + (0.1 if n % 2 else -0.1) for n in range(10)}}
    one, other = ask(
        [("more queries", "a", "b", better, worse), ("release against parent", "a", "c", noisy, worse)], 2000
    )
    # Ten differences of +.1: of 1,024 sign vectors two are as extreme. Holm doubles the smaller p of two.
    assert one.difference == pytest.approx(0.1)
    assert one.p == pytest.approx(2 / 1024)
    assert one.p_holm == pytest.approx(4 / 1024)
    assert (other.difference, other.p, other.p_holm) == (pytest.approx(0), 1.0, 1.0)
    # sd of ten times +-.1 is .1 sqrt(10/9); at .05 / 2 (2.24140 + .84162) sd / sqrt(10) = .10277.
    assert other.smallest_detectable == pytest.approx(0.1028, abs=1e-4)
    assert answer(one, "nDCG@10 on s") == (
        "a against b: +0.100 nDCG@10 on s (p = 0.004, 10 test queries): "
        "more queries helped, and still more may."
    )
    assert answer(other, "nDCG@10 on s") == (
        "a against c: +0.000 nDCG@10 on s (p = 1.000, 10 test queries): "
        "no difference that could be told from chance; a difference below 0.103 would mostly be missed."
    )


def test_worse_is_said_to_be_worse() -> None:
    better = {"s": {f"q{n}": 0.6 for n in range(10)}}
    worse = {"s": {f"q{n}": 0.5 for n in range(10)}}
    (one,) = ask([("release against parent", "a", "b", worse, better)], 2000)
    assert answer(one, "m").endswith("the release is worse than its parent.")


def test_one_test_query_detects_nothing() -> None:
    (one,) = ask([("more queries", "a", "b", {"s": {"q": 0.6}}, {"s": {"q": 0.5}})], 2000)
    assert math.isnan(one.smallest_detectable)
    assert answer(one, "m").endswith("told from chance.")


# --- from end to end --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Release made@0.2.0 of twelve queries, its parent 0.1.0 of the first eight."""
    folder = make_place(tmp_path_factory.mktemp("probe"))
    stories = [kept(n) for n in range(12)]
    cut(folder / "releases", stories[:8])
    cut_release(
        ReleaseConfig(name="made", version="0.2.0", parent="0.1.0", root=str(folder / "releases")),
        iter(stories), facts(stories), quality=lambda _: {}, observed=dict,
    )  # fmt: skip
    return folder


def config(place: Path, **more: Any) -> RetrieverConfig:
    made = tiny_config() | {
        "data": [{"name": "made", "release": "made"}], "root": str(place / "retrievers"),
        "releases": str(place / "releases"),
    }  # fmt: skip
    made["encoder"]["model"] = str(place / "encoder")
    for one in (made["dev"], *made["sets"]):
        one["path"] = str(place / "things")
    return RetrieverConfig.model_validate(made | more)


def run(config: RetrieverConfig, release: str, parent: str | None = None) -> ProbeResult:
    work = run_probe(
        config, progress=Progress(quiet=True), tasks=Orchestration(), release=release, parent=parent
    )
    return asyncio.run(work)


def test_a_release_is_probed_against_its_parent(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = run(config(place), "made")
    assert (found.release, found.parent, found.steps) == ("made@0.2.0", "made@0.1.0", 4)
    points = [(point.release, point.queries) for point in found.points]
    assert points == [(None, 0), *(("made@0.2.0", n) for n in (3, 6, 8, 12)), ("made@0.1.0", 8)]
    more, against = found.questions
    assert (more.a, more.b) == ("12 queries of made@0.2.0", "6 queries of made@0.2.0")
    assert (against.a, against.b) == ("8 queries of made@0.2.0", "8 queries of made@0.1.0")
    assert [question.queries for question in found.questions] == [8, 8]
    assert found.said[-1] == NOISE
    assert len(found.said) == 3
    assert found.folder == place / "retrievers" / "tiny-probe" / "made@0.2.0"
    written = json.loads((found.folder / "results.json").read_bytes())
    assert written["points"][0]["release"] is None
    whole = next(p for p in written["per_query"] if (p["release"], p["queries"]) == ("made@0.2.0", 8))
    values = whole["values"]["things"].values()
    assert found.points[3].mean == pytest.approx(sum(values) / 8)
    assert (found.folder / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert list(found.folder.glob("*.training")) == []  # models are not kept

    async def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("trained again")

    monkeypatch.setattr(probing, "train", never)
    again = run(config(place), "made@0.2.0")
    assert again.points == found.points


def test_a_release_without_a_parent_has_the_curve_alone(place: Path) -> None:
    found = run(config(place, name="alone"), "made@0.1.0")
    assert found.parent is None
    assert [point.queries for point in found.points] == [0, 2, 4, 8]
    assert [question.name for question in found.questions] == ["more queries"]


def test_what_cannot_be_probed_is_said(place: Path) -> None:
    with pytest.raises(InputError, match="cannot be compared with itself"):
        run(config(place), "made@0.1.0", "made@0.1.0")
    with pytest.raises(InputError, match="needs test sets"):
        run(config(place, sets=[], dev=None), "made")
    with pytest.raises(InputError, match=r"no version '9\.9\.9' of made"):
        run(config(place), "made@9.9.9")
