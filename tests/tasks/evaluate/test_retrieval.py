from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import orjson
import pyarrow.parquet as pq
import pytest

from gradeloom.schemas.errors import InputError
from gradeloom.tasks.evaluate.retrieval import PER_QUERY, Comparison, Evaluation, Row, Table, evaluation
from gradeloom.tasks.evaluate.significance import (
    bootstrap_interval,
    holm,
    randomisation_test,
    smallest_detectable,
)
from gradeloom.tasks.evaluate.trec import read_run, write_run
from gradeloom.tasks.run import RunDirectory

BASE = {"q1": 0.2, "q2": 0.4, "q3": 0.6, "q4": 0.8}
GOOD = {"q4": 0.9, "q3": 0.7, "q2": 0.6, "q1": 0.5}  # +.3 +.2 +.1 +.1, in another order
EVEN = {"q1": 0.3, "q2": 0.3, "q3": 0.6, "q4": 0.8}  # +.1 -.1 0 0


def row(place: str, retriever: str, values: dict[str, float], measure: str = "nDCG@10") -> Row:
    return Row(place, retriever, {measure: values})


def numbers(values: dict[str, float]) -> list[float]:
    return [values[query] for query in sorted(values)]


def compared(found: Evaluation, place: str | None, retriever: str, measure: str = "nDCG@10") -> Comparison:
    key = (place, retriever, measure)
    (one,) = (c for c in found.comparisons if (c.set, c.retriever, c.measure) == key)
    return one


@pytest.fixture
def three() -> Evaluation:
    return evaluation([row("A", "base", BASE), row("A", "good", GOOD), row("A", "even", EVEN)])


# --- means and comparisons ------------------------------------------------------------------


def test_means_and_intervals(three: Evaluation) -> None:
    assert [(m.set, m.retriever, m.measure, m.queries) for m in three.means] == [
        ("A", name, "nDCG@10", 4) for name in ("base", "good", "even")
    ]
    assert [m.mean for m in three.means] == pytest.approx([0.5, 0.675, 0.5])
    for mean, values in zip(three.means, (BASE, GOOD, EVEN), strict=True):
        assert (mean.low, mean.high) == bootstrap_interval(numbers(values), strata=["A"] * 4, seed=0)
        assert mean.low < mean.mean < mean.high
    assert three.mean("A", "good", "nDCG@10") is three.means[1]
    assert three.mean("A", "good", "AP") is None
    assert three.mean(None, "good", "nDCG@10") is None  # one set: nothing to pool
    assert (three.sets, three.retrievers, three.measures) == (["A"], ["base", "good", "even"], ["nDCG@10"])


def test_an_interval_by_hand() -> None:
    """Of 0 and 1, a quarter of the resamples is (0, 0) and a quarter (1, 1)."""
    found = evaluation([row("A", "base", {"q1": 0, "q2": 1}), row("A", "one", {"q1": 0.3, "q2": 0.3})])
    assert [(m.mean, m.low, m.high) for m in found.means] == [(0.5, 0, 1), pytest.approx((0.3, 0.3, 0.3))]


def test_comparisons_by_hand(three: Evaluation) -> None:
    """good: of 16 sign vectors only all plus and all minus reach .7; even: 0 is always reached."""
    assert [(c.set, c.retriever, c.queries) for c in three.comparisons] == [
        ("A", "good", 4),
        ("A", "even", 4),
    ]
    good, even = three.comparisons
    assert (good.difference, even.difference) == (pytest.approx(0.175), pytest.approx(0, abs=1e-12))
    assert (good.p, even.p) == (2 / 16, 1)
    assert (good.p_holm, even.p_holm) == (2 * 2 / 16, 1)
    # Variance of .3 .2 .1 .1 about .175: .0275 / 3; standard error: its root, over the root of 4.
    assert good.smallest_detectable == pytest.approx((2.241403 + 0.841621) * math.sqrt(0.0275 / 3 / 4))


def test_comparisons_are_those_of_the_tests() -> None:
    """More sign vectors than permutations: random ones, and the seed decides."""
    names = [f"q{n:02}" for n in range(20)]
    values = {
        "base": {q: (n * 7 % 20) / 20 for n, q in enumerate(names)},
        "x": {q: (n * 3 % 20) / 20 + 0.1 for n, q in enumerate(names)},
        "y": {q: (n * 11 % 20) / 20 - 0.2 for n, q in enumerate(names)},
    }
    rows = [row("A", name, own) for name, own in values.items()]
    found = evaluation(rows, permutations=500, seed=3)
    assert (found.permutations, found.seed) == (500, 3)
    tests = {
        name: randomisation_test(numbers(values[name]), numbers(values["base"]), permutations=500, seed=3)
        for name in ("x", "y")
    }
    adjusted = holm({name: test.p for name, test in tests.items()})
    for name, test in tests.items():
        one = compared(found, "A", name)
        assert not test.exact
        assert (one.p, one.p_holm) == (test.p, adjusted[name])
        assert one.difference == pytest.approx(test.difference)
        differences = [values[name][q] - values["base"][q] for q in names]
        assert one.smallest_detectable == pytest.approx(smallest_detectable(differences, alpha=0.05 / 2))
    other = evaluation(rows, permutations=500, seed=4)
    assert [c.p for c in other.comparisons] != [c.p for c in found.comparisons]


def test_holm_is_within_a_measure_and_a_set() -> None:
    """One retriever compared by two measures on two sets: nothing to correct for."""
    values = {"nDCG@10": GOOD, "AP": GOOD}
    base = {"nDCG@10": BASE, "AP": BASE}
    found = evaluation([Row(s, r, v) for s in ("A", "B") for r, v in (("base", base), ("good", values))])
    per_set = [c for c in found.comparisons if c.set is not None]
    assert len(per_set) == 4
    assert {(c.p, c.p_holm) for c in per_set} == {(2 / 16, 2 / 16)}


def test_pooled_comparison_by_hand() -> None:
    """A: .2 and .4, weighing a quarter each; B: -.1, weighing a half: T = .05 + .1 - .05.

    Of the eight |+-.05 +-.1 +-.05|, six are .1 or more.
    """
    found = evaluation([
        row("A", "base", {"q1": 0.1, "q2": 0.2}), row("A", "new", {"q1": 0.3, "q2": 0.6}),
        row("B", "base", {"q1": 0.5}), row("B", "new", {"q1": 0.4}),
    ])  # fmt: skip
    pooled = compared(found, None, "new")
    assert (pooled.difference, pooled.p, pooled.queries) == (pytest.approx(0.1), 6 / 8, 3)
    assert math.isnan(pooled.smallest_detectable)  # B has one query
    mean = found.mean(None, "new", "nDCG@10")
    assert mean is not None
    assert (mean.mean, mean.queries) == (pytest.approx((0.45 + 0.4) / 2), 3)
    low, high = bootstrap_interval([0.3, 0.6, 0.4], strata=["A", "A", "B"], seed=0)
    assert (mean.low, mean.high) == (low, high) == pytest.approx((0.35, 0.5))


def test_pooled_are_those_with_a_row_on_every_set() -> None:
    found = evaluation([
        row("A", "base", BASE), row("A", "good", GOOD), row("A", "even", EVEN),
        row("B", "base", BASE), row("B", "good", GOOD),
    ])  # fmt: skip
    assert [m.retriever for m in found.means if m.set is None] == ["base", "good"]
    assert [c.retriever for c in found.comparisons if c.set is None] == ["good"]
    assert compared(found, "A", "good").p_holm == 2 * 2 / 16
    assert compared(found, "B", "good").p_holm == 2 / 16
    # Eight differences of one sign: 2 of 256.
    assert compared(found, None, "good").p == 2 / 256


def test_unjudged_is_not_tested() -> None:
    values = {"nDCG@10": BASE, "unjudged@10": BASE}
    found = evaluation([Row("A", "base", values), Row("A", "good", {"nDCG@10": GOOD, "unjudged@10": GOOD})])
    assert {m.measure for m in found.means} == {"nDCG@10", "unjudged@10"}
    assert {c.measure for c in found.comparisons} == {"nDCG@10"}


def test_the_baseline_is_as_named_or_the_first() -> None:
    rows = [row("A", "base", BASE), row("A", "good", GOOD)]
    assert evaluation(rows).baseline == "base"
    turned = evaluation(rows, baseline="good")
    assert turned.baseline == "good"
    assert compared(turned, "A", "base").difference == pytest.approx(-0.175)
    with pytest.raises(InputError, match=r"field 'baseline': there is no row 'bm25'.*base, good"):
        evaluation(rows, baseline="bm25")


def test_refused_rows() -> None:
    with pytest.raises(ValueError, match="needs a row"):
        evaluation([])
    with pytest.raises(ValueError, match="twice"):
        evaluation([row("A", "x", BASE), row("A", "x", GOOD)])
    with pytest.raises(ValueError, match="of different queries"):
        evaluation([row("A", "x", BASE), row("A", "y", {"q1": 0.1})])
    for name in ("", "../up", "a/b", "-x", "a b", "x" * 101):
        with pytest.raises(ValueError, match="is no name"):
            row(name, "x", BASE)
        with pytest.raises(ValueError, match="is no name"):
            row("A", name, BASE)


# --- tables ---------------------------------------------------------------------------------

EIGHT = {f"q{n}": n / 20 for n in range(8)}


def test_table_marks_what_differs() -> None:
    """All eight differ by .1: p = 2/256, twice that with Holm. A change of one query is no difference."""
    found = evaluation([
        row("A", "base", EIGHT),
        row("A", "up", {q: v + 0.1 for q, v in EIGHT.items()}),
        row("A", "same", EIGHT | {"q0": 0.08}),
    ])  # fmt: skip
    assert compared(found, "A", "up").p_holm == 4 / 256
    table = found.table()
    assert table.header == ("set", "retriever", "queries", "nDCG@10")
    assert table.rows == [
        ("A", "base", "8", "0.175"), ("A", "up", "8", "0.275 *"), ("A", "same", "8", "0.185"),
    ]  # fmt: skip
    assert "differs from base, p < 0.05" in table.note
    assert "seed 0" in table.note
    assert "nDCG has linear gain" in table.note
    comparisons = found.comparison_table()
    assert "10,000 permutations at most, seed 0" in comparisons.note
    assert comparisons.header == (
        "set", "measure", "retriever", "difference", "p", "p (Holm)", "detectable", "queries",
    )  # fmt: skip
    # .08 / 8; its standard deviation over 8 is .08 / sqrt(8), so the standard error is .01; two
    # differences are tested: (2.24140 + .84162) * .01.
    assert comparisons.rows[1] == (
        "A", "nDCG@10", "same", "+0.0100", "1.0000", "1.0000", "0.0308", "8",
    )  # fmt: skip
    assert comparisons.rows[0][:6] == ("A", "nDCG@10", "up", "+0.1000", "0.0078", "0.0156")


def test_the_mark_wants_the_adjusted_p() -> None:
    """Six of one sign: p = 2/64 = .031, which two comparisons make .062."""
    six = {q: v for q, v in EIGHT.items() if q < "q6"}
    up = {q: v + 0.1 for q, v in six.items()}
    alone = evaluation([row("A", "base", six), row("A", "up", up)])
    assert [line[3] for line in alone.table().rows] == ["0.125", "0.225 *"]
    two = evaluation([row("A", "base", six), row("A", "up", up), row("A", "more", up)])
    assert compared(two, "A", "up").p == 2 / 64
    assert [line[3] for line in two.table().rows] == ["0.125", "0.225", "0.225"]


def test_table_of_several_sets_and_measures() -> None:
    found = evaluation([
        Row("A", "base", {"AP": BASE}), Row("A", "good", {"AP": GOOD}),
        Row("B", "base", {"AP": {"q1": 0.1}, "P@5": {"q1": 0.2}}),
    ])  # fmt: skip
    table = found.table()
    assert table.rows == [
        ("A", "base", "4", "0.500", ""), ("A", "good", "4", "0.675", ""),
        ("B", "base", "1", "0.100", "0.200"), ("(all sets)", "base", "5", "0.300", ""),
    ]  # fmt: skip
    assert "linear" not in table.note  # no nDCG there


def test_comparison_table_leaves_open_what_is_not_known() -> None:
    found = evaluation([row("A", "base", {"q1": 0.1}), row("A", "new", {"q1": 0.3})])
    assert found.comparison_table().rows == [
        ("A", "nDCG@10", "new", "+0.2000", "1.0000", "1.0000", "", "1"),
    ]  # fmt: skip


def test_markdown_escapes() -> None:
    table = Table(("a|b", "<script>"), [("$x$", "0.1 *"), ("[l](u)\nnext", "`c` _d_ \\ ~~e~~")], "*: <b> & $")
    assert table.markdown().split("\n") == [
        r"| a\|b | \<script\> |",
        "| --- | --- |",
        r"| \$x\$ | 0.1 \* |",
        r"| \[l\](u) next | \`c\` \_d\_ \\ \~\~e\~\~ |",
        "",
        r"\*: \<b\> \& \$",
    ]


# --- the folder -----------------------------------------------------------------------------

RUN = {"q1": {"p1": 2.5, "p2": 0.125}, "q2": {"p2": 1.0}}


def with_runs(folder: Path, **about: Any) -> Evaluation:
    written = folder / "elsewhere.trec"
    write_run(written, {"q1": {"p9": 1.0}}, "tag")
    return evaluation(
        [
            Row("A", "base", {"nDCG@10": {"q1": 0.5, "q2": 0.25}, "AP": {"q1": 1}}, RUN),
            Row("A", "new", {"nDCG@10": {"q1": 0.5, "q2": 0.75}, "AP": {"q1": 1}}, written),
            Row("B", "base", {"nDCG@10": {"q1": 1.0}}),
        ],
        permutations=100, seed=5, about=about,
    )  # fmt: skip


def names(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


def test_write(tmp_path: Path) -> None:
    found = with_runs(tmp_path, gain={"A": 1})
    folder = tmp_path / "deep" / "results"
    found.write(folder)
    assert names(tmp_path / "deep") == [
        "results", "results/per_query.parquet", "results/plot.png", "results/results.json",
        "results/runs", "results/runs/A.base.trec", "results/runs/A.new.trec",
    ]  # fmt: skip
    facts = orjson.loads((folder / "results.json").read_bytes())
    assert facts == found.as_json()
    assert {key: facts[key] for key in ("baseline", "permutations", "seed", "interval", "about")} == {
        "baseline": "base", "permutations": 100, "seed": 5, "interval": 0.95, "about": {"gain": {"A": 1}},
    }  # fmt: skip
    assert facts["means"][0]["mean"] == 0.375
    assert facts["comparisons"][0] == {
        "set": "A", "retriever": "new", "measure": "nDCG@10", "difference": 0.25, "p": 1.0, "p_holm": 1.0,
        "smallest_detectable": pytest.approx(2.801585 * 0.25), "queries": 2,
    }  # fmt: skip
    table = pq.read_table(folder / "per_query.parquet")
    assert table.schema.equals(PER_QUERY)
    assert [tuple(line.values()) for line in table.to_pylist()] == [
        ("A", "base", "nDCG@10", "q1", 0.5), ("A", "base", "nDCG@10", "q2", 0.25),
        ("A", "base", "AP", "q1", 1.0),
        ("A", "new", "nDCG@10", "q1", 0.5), ("A", "new", "nDCG@10", "q2", 0.75),
        ("A", "new", "AP", "q1", 1.0),
        ("B", "base", "nDCG@10", "q1", 1.0),
    ]  # fmt: skip
    assert (folder / "plot.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert read_run(folder / "runs" / "A.base.trec") == RUN
    assert (folder / "runs" / "A.base.trec").read_text().split("\n")[0] == "q1 Q0 p1 1 2.5 base"
    assert (folder / "runs" / "A.new.trec").read_text() == "q1 Q0 p9 1 1.0 tag\n"


def test_what_is_not_a_number_is_null(tmp_path: Path) -> None:
    """The AP of A has one query, so what could be detected is not known."""
    with_runs(tmp_path).write(tmp_path / "results")
    text = (tmp_path / "results" / "results.json").read_text()
    ap = [c for c in orjson.loads(text)["comparisons"] if c["measure"] == "AP"]
    assert [c["smallest_detectable"] for c in ap] == [None]
    assert "NaN" not in text


def test_written_again(tmp_path: Path) -> None:
    folder = tmp_path / "results"
    with_runs(tmp_path, time=1).write(folder)
    evaluation([row("A", "base", BASE)], about={"time": 2}).write(folder)
    assert names(folder) == ["per_query.parquet", "plot.png", "results.json"]
    assert orjson.loads((folder / "results.json").read_bytes())["about"] == {"time": 2}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["elsewhere.trec", "results"]


def test_what_a_killed_process_left_goes(tmp_path: Path, three: Evaluation) -> None:
    """And no run directory around it takes it for a temporary file, which it would try to unlink."""
    for name in (".results.writing", ".results.replaced"):
        (tmp_path / name / "runs").mkdir(parents=True)
    with RunDirectory(tmp_path).locked():
        three.write(tmp_path / "results")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lock", "results"]


def test_an_empty_folder_is_taken(tmp_path: Path, three: Evaluation) -> None:
    (tmp_path / "results").mkdir()
    three.write(tmp_path / "results")
    assert names(tmp_path / "results") == ["per_query.parquet", "plot.png", "results.json"]


@pytest.mark.parametrize(
    "held",
    [
        ["thesis.tex"],
        ["results.json", "plot.png"],  # what a probe leaves
        ["results.json", "per_query.parquet", "plot.png", "thesis.tex"],
    ],
)
def test_something_else_is_refused(tmp_path: Path, three: Evaluation, held: list[str]) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    for name in held:
        (folder / name).write_text("mine")
    with pytest.raises(InputError, match=r"mine: holds something that is no evaluation"):
        three.write(folder)
    assert {path.name: path.read_text() for path in folder.iterdir()} == dict.fromkeys(held, "mine")
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_a_file_is_no_folder(tmp_path: Path, three: Evaluation) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(InputError, match="cannot write"):
        three.write(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"


def test_one_file_for_two_runs_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "results"
    found = evaluation([
        Row("a.b", "c", {"AP": BASE}, RUN), Row("a", "b.c", {"AP": BASE}, RUN),
    ])  # fmt: skip
    with pytest.raises(InputError, match=r"two rows would be runs/a\.b\.c\.trec"):
        found.write(folder)
    assert list(tmp_path.iterdir()) == []


def test_a_failed_replacement_leaves_the_old(
    tmp_path: Path, three: Evaluation, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "results"
    three.write(folder)
    before = {name: (folder / name).read_bytes() for name in names(folder)}
    rename = Path.rename

    def failing(self: Path, target: Path) -> Path:
        if target == folder and self.name != ".results.replaced":
            raise OSError(28, "No space left on device")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(InputError, match="No space left"):
        evaluation([row("A", "other", GOOD)]).write(folder)
    assert {name: (folder / name).read_bytes() for name in names(folder)} == before
    assert [path.name for path in tmp_path.iterdir()] == ["results"]
