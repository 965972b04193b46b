from __future__ import annotations

import csv
import gzip
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import kendalltau
from sklearn.metrics import cohen_kappa_score, precision_recall_fscore_support

from gradeloom.schemas.calibration import FileIdentity
from gradeloom.schemas.errors import InputError
from gradeloom.tasks.collection import read_qrels
from gradeloom.tasks.evaluate.calibration import (
    Grades,
    Human,
    JudgeLabels,
    agreement,
    human_labels,
    pair_counts,
    read_labels,
    rounded,
    system_ranking,
)


def people(tmp_path: Path, text: str, limit: int | None = None) -> Human:
    path = tmp_path / "qrels.txt"
    path.write_text(text)
    return human_labels(path, read_qrels(path), limit=limit)


def labels(tmp_path: Path, human: Human, text: str) -> JudgeLabels:
    path = tmp_path / "labels.txt"
    path.write_text(text)
    return read_labels(path, human)


def run(name: str, **scores: dict[str, float]) -> tuple[FileIdentity, dict[str, dict[str, float]]]:
    return FileIdentity(name=name, sha256=name), scores


# --- labels ---------------------------------------------------------------------------------


def test_people_give_whole_grades_and_the_first_queries_are_those_of_the_file(tmp_path: Path) -> None:
    human = people(tmp_path, "b 0 p 1\na 0 p 2\nb 0 r 0\n", limit=1)
    assert human.grades == {"b": {"p": 1, "r": 0}}
    assert (human.identity.qrels.name, human.identity.limit) == ("qrels.txt", 1)
    with pytest.raises(InputError, match=r"qrels\.txt: query 'a', passage 'p': the grade is 1\.5"):
        people(tmp_path, "a 0 p 1.5\n")


def test_a_label_file_may_abstain_and_may_hold_expected_grades(tmp_path: Path) -> None:
    human = people(tmp_path, "a 0 p 0\na 0 r 3\na 0 s 1\n")
    assert labels(tmp_path, human, "a 0 p 0\na 0 r 2\na 0 s -1\n") == JudgeLabels(
        {"a": {"p": 0, "r": 2}}, {}, frozenset({("a", "s")})
    )
    real = labels(tmp_path, human, "a 0 p 0.49\na 0 r 2.5\na 0 s 1\n")
    assert real.grades == {"a": {"p": 0, "r": 3, "s": 1}}
    assert real.expected == {"a": {"p": 0.49, "r": 2.5, "s": 1.0}}


def test_a_negative_grade_of_people_is_a_grade_of_the_judge_too(tmp_path: Path) -> None:
    human = people(tmp_path, "a 0 p -2\na 0 r 1\n")
    assert labels(tmp_path, human, "a 0 p -2\na 0 r -3\n") == JudgeLabels(
        {"a": {"p": -2}}, {}, frozenset({("a", "r")})
    )


def test_labels_of_queries_beyond_the_limit_are_not_looked_at(tmp_path: Path) -> None:
    human = people(tmp_path, "a 0 p 0\nb 0 p 1\n", limit=1)
    assert labels(tmp_path, human, "a 0 p 0\nb 0 p 1\nc 0 p 9\n").grades == {"a": {"p": 0}}


def test_every_pair_is_counted_once() -> None:
    human: Grades = {"a": {"p": 0, "r": 1, "s": 2, "t": 3}, "b": {"p": 0, "r": 1}}
    said = JudgeLabels(
        {"a": {"p": 0, "x": 1}, "c": {"p": 1}}, {}, frozenset({("a", "r"), ("z", "z")}),
        {("a", "s"): "no_text", ("b", "p"): "judge_prompt_too_long", ("b", "r"): "judge_prompt_too_long"},
    )  # fmt: skip
    counts = pair_counts(human, said)
    assert (counts.human, counts.both, counts.queries) == (6, 1, 1)
    assert (counts.abstained, counts.missing_judge, counts.missing_human) == (1, 1, 2)
    assert counts.unanswered == {"judge_prompt_too_long": 2, "no_text": 1}
    assert counts.human == counts.both + counts.abstained + 3 + counts.missing_judge


def test_sets_without_a_common_pair_are_refused() -> None:
    with pytest.raises(InputError, match="no pair of query and passage in common"):
        pair_counts({"a": {"p": 1}}, JudgeLabels({"a": {"r": 1}}))


# --- agreement ------------------------------------------------------------------------------


def test_agreement_by_hand() -> None:
    # 20 both relevant, 5 only people, 10 only the judge, 15 neither: Cohen's kappa is .4.
    cells = [(1, 1)] * 20 + [(1, 0)] * 5 + [(0, 1)] * 10 + [(0, 0)] * 15
    human: Grades = {f"q{i % 7}": {} for i in range(50)}
    said: Grades = {query: {} for query in human}
    for i, (grade, judged) in enumerate(cells):
        human[f"q{i % 7}"][f"p{i}"], said[f"q{i % 7}"][f"p{i}"] = grade, judged
    found = agreement(human, JudgeLabels(said), binary_at=1)
    assert found.matrix == ((15, 10), (5, 20))
    assert found.kappa.value == found.binary_kappa.value == found.quadratic_kappa.value == 0.4
    assert found.exact == 0.7
    assert [(g.precision, g.recall) for g in found.per_grade] == [(0.75, 0.6), (0.666667, 0.8)]
    assert [(g.human, g.judge, g.both) for g in found.per_grade] == [(25, 20, 15), (25, 30, 20)]
    assert found.expected is None


PAIRS = st.lists(
    st.tuples(st.sampled_from("abc"), st.integers(0, 3), st.integers(0, 3)), min_size=2, max_size=40
)


@settings(deadline=None, max_examples=60)
@given(PAIRS)
def test_figures_are_those_of_scikit_learn(pairs: list[tuple[str, int, int]]) -> None:
    human: Grades = {}
    said: Grades = {}
    for i, (query, grade, judged) in enumerate(pairs):
        human.setdefault(query, {})[str(i)] = grade
        said.setdefault(query, {})[str(i)] = judged
    scale = (0, 1, 2, 3)
    found = agreement(human, JudgeLabels(said, scale=scale), resamples=2)
    _, grades, judged_grades = zip(*pairs, strict=True)
    if len({*grades, *judged_grades}) > 1:
        kappa = cohen_kappa_score(grades, judged_grades, labels=scale)
        quadratic = cohen_kappa_score(grades, judged_grades, labels=scale, weights="quadratic")
        assert found.kappa.value == pytest.approx(kappa, abs=1e-6)
        assert found.quadratic_kappa.value == pytest.approx(quadratic, abs=1e-6)
    binary = [[grade >= 2 for grade in column] for column in (grades, judged_grades)]
    if len({*binary[0], *binary[1]}) > 1:
        assert found.binary_kappa.value == pytest.approx(cohen_kappa_score(*binary), abs=1e-6)
    precision, recall, *_ = precision_recall_fscore_support(
        grades, judged_grades, labels=scale, zero_division=np.nan
    )
    for one, p, r in zip(found.per_grade, precision, recall, strict=True):
        assert one.precision == (None if np.isnan(p) else pytest.approx(p, abs=1e-6))
        assert one.recall == (None if np.isnan(r) else pytest.approx(r, abs=1e-6))


def test_intervals_are_those_of_drawing_whole_queries() -> None:
    rng = np.random.default_rng(7)
    per_query = [rng.integers(0, 4, size=(rng.integers(5, 30), 1)) for _ in range(12)]
    per_query = [np.hstack([g, np.clip(g + rng.integers(-1, 2, g.shape), 0, 3)]) for g in per_query]
    human = {f"q{i}": {str(k): int(g) for k, (g, _) in enumerate(q)} for i, q in enumerate(per_query)}
    said = {f"q{i}": {str(k): int(j) for k, (_, j) in enumerate(q)} for i, q in enumerate(per_query)}
    found = agreement(human, JudgeLabels(said), resamples=200, seed=3)
    draws = np.random.default_rng(3).integers(12, size=(200, 12))
    kappas = [cohen_kappa_score(*np.vstack([per_query[i] for i in draw]).T) for draw in draws]
    assert (found.kappa.low, found.kappa.high) == pytest.approx(np.quantile(kappas, [0.025, 0.975]), abs=1e-6)


def test_an_abstention_is_no_grade() -> None:
    human: Grades = {"a": {"p": 3, "r": 0, "s": 3}}
    with_it = agreement(human, JudgeLabels({"a": {"p": 3, "r": 0}}, {}, frozenset({("a", "s")})))
    without = agreement({"a": {"p": 3, "r": 0}}, JudgeLabels({"a": {"p": 3, "r": 0}}))
    assert with_it.abstained == (0, 0, 0, 1)
    assert with_it.model_copy(update={"abstained": without.abstained}) == without


def test_a_judge_that_always_abstains_has_no_agreement() -> None:
    human: Grades = {"a": {"p": 3, "r": 0}}
    silent = frozenset({("a", "p"), ("a", "r")})
    found = agreement(human, JudgeLabels({}, {}, silent, scale=(0, 1, 2, 3)))
    assert (found.exact, found.kappa.value, found.kappa.low) == (None, None, None)
    assert found.abstained == (1, 0, 0, 1)


def test_expected_grades_by_hand() -> None:
    human: Grades = {"a": {"p": 0, "r": 1, "s": 2, "t": 3}}
    expected = {"a": {"p": 0.5, "r": 0.5, "s": 2.5, "t": 2.5}}
    found = agreement(human, JudgeLabels(rounded(expected), expected)).expected
    assert found is not None
    assert found.pearson == pytest.approx(2 / 5**0.5, abs=1e-6)  # cov 1, variances 1 and 1.25
    assert found.rmse == 0.5
    assert [(b.pairs, b.expected, b.human) for b in found.reliability] == [(2, 0.5, 0.5), (2, 2.5, 2.5)]


@pytest.mark.parametrize(
    ("grades", "judged", "at", "message"),
    [
        ((0, 1), 1, 2, r"--binary-at.*expected a grade from 1 to 1, got 2: the grades are 0 to 1"),
        ((1, 4), 4, 1, r"expected a grade from 2 to 4, got 1"),
        ((0, 3), 87, 2, r"the labels run from 0 to 87; grades of one scale, 10 at most"),
    ],
)
def test_scales_that_do_not_fit_are_refused(
    grades: tuple[int, int], judged: int, at: int, message: str
) -> None:
    human: Grades = {"a": {"p": grades[0], "r": grades[1]}}
    with pytest.raises(InputError, match=message):
        agreement(human, JudgeLabels({"a": {"p": judged}}), binary_at=at)


# --- systems --------------------------------------------------------------------------------


def test_systems_by_hand() -> None:
    human: Grades = {"a": {"p": 1, "r": 0}}
    said = JudgeLabels({"a": {"p": 0, "r": 1}})
    found = system_ranking([run("one", a={"p": 2, "r": 1}), run("two", a={"r": 2, "p": 1})], human, said)
    assert [(s.run.name, s.human, s.judge) for s in found.systems] == [
        ("one", 1.0, pytest.approx(1 / np.log2(3), abs=1e-6)),
        ("two", pytest.approx(1 / np.log2(3), abs=1e-6), 1.0),
    ]
    assert (found.kendall_tau, found.left_out, found.queries) == (-1.0, 0, 1)
    assert system_ranking([run("one", a={"p": 2})], human, said).kendall_tau is None


def test_a_passage_without_a_grade_of_the_judge_does_not_count_as_irrelevant() -> None:
    human: Grades = {"a": {"p": 3, "r": 3, "s": 0}}
    said = JudgeLabels({"a": {"r": 3, "s": 0}}, {}, frozenset({("a", "p")}))
    found = system_ranking([run("one", a={"p": 3, "r": 2, "s": 1})], human, said)
    assert found.left_out == 1
    (system,) = found.systems
    assert (system.human, system.judge) == (1.0, 1.0)  # r stands first once p is out of the way


def test_runs_of_other_queries_are_refused() -> None:
    with pytest.raises(InputError, match=r"one: ranks none of the 1 graded queries"):
        system_ranking([run("one", z={"p": 1})], {"a": {"p": 1}}, JudgeLabels({"a": {"p": 1}}))
    with pytest.raises(InputError, match="no pair was graded by people and judge"):
        system_ranking([run("one", a={"p": 1})], {"a": {"p": 1}}, JudgeLabels({}))


# --- real labels ----------------------------------------------------------------------------

KNOWN = {
    ("gpt-4o", 19): (0.363, 0.595, 0.524), ("gpt-4o", 20): (0.341, 0.555, 0.450),
    ("gpt-4", 19): (0.338, 0.581, 0.512), ("gpt-4", 20): (0.325, 0.543, 0.427),
    ("DSV3", 19): (0.360, 0.597, 0.518), ("DSV3", 20): (0.358, 0.558, 0.427),
    ("Llama-3-8B-Instruct", 19): (0.108, 0.311, 0.244), ("Llama-3-8B-Instruct", 20): (0.115, 0.270, 0.187),
}  # fmt: skip


@pytest.mark.realdata
@pytest.mark.parametrize(("model", "year"), KNOWN, ids=lambda value: str(value))
def test_the_known_agreement_of_language_models(model: str, year: int, realdata: Path) -> None:
    qrels = realdata / f"trec_dl20{year}_passage_text" / "qrels.txt"
    human = human_labels(qrels, read_qrels(qrels))
    said = read_labels(realdata / "peer_labels" / f"umbrela_{model}_dl{year}.txt.gz", human)
    counts = pair_counts(human.grades, said)
    assert counts.human == counts.both == {19: 9260, 20: 11386}[year]
    found = agreement(human.grades, said, resamples=200)
    kappas = (found.kappa, found.quadratic_kappa, found.binary_kappa)
    assert tuple(round(kappa.value or 0, 3) for kappa in kappas) == KNOWN[model, year]
    for kappa in kappas:
        assert (kappa.low or 9) < (kappa.value or 0) < (kappa.high or -9)


@pytest.mark.realdata
def test_the_known_agreement_of_three_people(realdata: Path) -> None:
    """Chorus's single ratings, each rater in the place of the judge: pairwise .60-.68, quadratic .74-.80."""
    ratings: list[Grades] = [{}, {}, {}]
    with (realdata / "chorus_ecommerce_graded" / "Broad_Query_Set_individual_ratings.csv").open() as file:
        for row in csv.DictReader(file):
            for agent, grades in enumerate(ratings, start=1):
                grades.setdefault(row["query"], {})[row["docid"]] = int(row[f"agent_{agent}_rating"])
    found = [agreement(one, JudgeLabels(other), resamples=200) for one, other in combinations(ratings, 2)]
    assert {sum(map(sum, a.matrix)) for a in found} == {3188}
    kappas = sorted(round(a.kappa.value or 0, 2) for a in found)
    quadratic = sorted(round(a.quadratic_kappa.value or 0, 2) for a in found)
    assert (kappas[0], kappas[-1]) == (0.60, 0.68)
    assert (quadratic[0], quadratic[-1]) == (0.74, 0.80)


@pytest.mark.realdata
def test_a_judge_that_agrees_more_ranks_systems_more_alike(realdata: Path) -> None:
    """Twelve systems, from people's own ranking to noise, under GPT-4o's labels and Llama-3-8B's."""
    qrels = realdata / "trec_dl2019_passage_text" / "qrels.txt"
    human = human_labels(qrels, read_qrels(qrels))
    rng = np.random.default_rng(1)
    runs = [
        run(f"noise{noise}", **{
            q: {p: grade + noise * rng.normal() for p, grade in grades.items()}
            for q, grades in human.grades.items()
        })
        for noise in range(12)
    ]  # fmt: skip
    taus = []
    for model in ("gpt-4o", "Llama-3-8B-Instruct"):
        said = read_labels(realdata / "peer_labels" / f"umbrela_{model}_dl19.txt.gz", human)
        found = system_ranking(runs, human.grades, said)
        tau = kendalltau([s.human for s in found.systems], [s.judge for s in found.systems]).statistic
        assert found.kendall_tau == pytest.approx(tau, abs=1e-6)
        assert found.systems[0].human == 1.0
        taus.append(found.kendall_tau or 0)
    assert taus[0] > 0.8
    assert taus[0] >= taus[1]


@pytest.mark.realdata
def test_a_compressed_copy_gives_the_same_figures(realdata: Path, tmp_path: Path) -> None:
    qrels = realdata / "trec_dl2019_passage_text" / "qrels.txt"
    human = human_labels(qrels, read_qrels(qrels))
    packed = tmp_path / "labels.txt.gz"
    packed.write_bytes(gzip.compress(qrels.read_bytes()))
    found = agreement(human.grades, read_labels(packed, human), resamples=2)
    assert found.kappa.value == found.quadratic_kappa.value == found.binary_kappa.value == 1.0
