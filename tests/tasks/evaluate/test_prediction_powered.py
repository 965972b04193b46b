"""Prediction-powered means: against formulas written out, by symmetry, and how often they are right."""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binomtest, t

from gradeloom.tasks.collection import read_qrels
from gradeloom.tasks.evaluate.prediction_powered import Estimate, prediction_powered_mean

NAN = math.nan


def made(seed: int, n: int, other: int) -> tuple[np.ndarray, np.ndarray]:
    """n labelled rows and others, with a judge that is biased by 2 and correlated with the labels."""
    rng = np.random.default_rng(seed)
    y = rng.normal(size=n + other)
    f = y + rng.normal(scale=0.7, size=n + other) + 2
    y[n:] = NAN
    return y, f


# --- the formulas -----------------------------------------------------------------------------


def test_by_hand() -> None:
    # mean y 2, mean f 1 of the labelled, 3 of the others; cov(y, f) = 2, n/N = 1,
    # f = 0, 2, 2, 4: mean 2, var 8/3; lambda = 2 / (2 * 8/3) = 3/8; theta = 2 + 3/8 * (3 - 1).
    found = prediction_powered_mean([1, 3, NAN, NAN], [0, 2, 2, 4], [1, 2, 3, 4])
    assert found.tuning == (0.375,)
    assert found.value == 2.75
    # y - lambda f = 1, 2.25: var 25/32, over 2; lambda^2 var(2, 4) / 2 = 9/64.
    assert found.se**2 == pytest.approx(25 / 64 + 9 / 64)
    assert (found.n, found.clusters) == (2, 2)
    assert found.high - found.value == pytest.approx(t.ppf(0.975, 1) * found.se)
    assert found.value - found.bound == pytest.approx(t.ppf(0.95, 1) * found.se)


@pytest.mark.parametrize(("n", "other"), [(5, 3), (12, 40), (40, 12)])
def test_independent_rows_give_the_published_formula(n: int, other: int) -> None:
    y, f = made(1, n, other)
    found = prediction_powered_mean(y, f, np.arange(n + other))
    own, others = f[:n], f[n:]
    tuning = np.cov(y[:n], own)[0, 1] / ((1 + n / other) * f.var(ddof=1))
    assert found.tuning[0] == pytest.approx(tuning)
    assert found.value == pytest.approx(y[:n].mean() + tuning * (others.mean() - own.mean()))
    variance = tuning**2 * others.var(ddof=1) / other + (y[:n] - tuning * own).var(ddof=1) / n
    assert found.se == pytest.approx(math.sqrt(variance))


def test_clusters_are_summed_before_squaring() -> None:
    y, f = made(2, 12, 30)
    clusters = np.array([*(i // 3 for i in range(12)), *(i // 5 for i in range(30))])  # 0..3 on both sides
    found = prediction_powered_mean(y, f, clusters)
    (tuning,) = found.tuning
    total = 0.0
    for cluster in range(6):
        score = 0.0
        for rows, values in ((slice(0, 12), y - tuning * f), (slice(12, 42), tuning * f)):
            part, own = values[rows], clusters[rows] == cluster
            count = len(set(clusters[rows]))
            score += (
                math.sqrt((count - 1) / count)
                * (part[own] - part.mean()).sum()
                / len(part)
                / (1 - own.sum() / len(part))
            )
        total += score**2
    assert found.se == pytest.approx(math.sqrt(total))


def test_the_same_row_twice_in_its_query_tells_nothing_new() -> None:
    y, f = made(3, 100, 300)
    clusters = np.arange(400)
    once = prediction_powered_mean(y, f, clusters)
    twice = prediction_powered_mean(np.tile(y, 2), np.tile(f, 2), np.tile(clusters, 2))
    assert twice.value == pytest.approx(once.value, abs=0.01)  # lambda's variances have n - 1
    assert twice.se == pytest.approx(once.se, rel=0.02)
    independent = prediction_powered_mean(np.tile(y, 2), np.tile(f, 2), np.arange(800))
    assert independent.se == pytest.approx(once.se / math.sqrt(2), rel=0.02)


def test_strata_weigh_as_in_the_release() -> None:
    y, f = made(4, 30, 70)
    order = np.random.default_rng(0).permutation(100)
    y, f = y[order], f[order]
    strata = np.repeat(["a", "b"], [20, 80])
    found = prediction_powered_mean(y, f, np.arange(100), strata=strata)
    parts = [
        prediction_powered_mean(y[strata == s], f[strata == s], np.arange(sum(strata == s))) for s in "ab"
    ]
    assert found.tuning == pytest.approx([part.tuning[0] for part in parts])
    assert found.value == pytest.approx(0.2 * parts[0].value + 0.8 * parts[1].value)
    assert found.se == pytest.approx(math.hypot(0.2 * parts[0].se, 0.8 * parts[1].se))
    assert found.high - found.value == pytest.approx(t.ppf(0.975, 30 - 2) * found.se)


def test_a_query_in_two_strata_is_one_cluster() -> None:
    y, f = made(5, 10, 20)
    one = prediction_powered_mean(y, f, np.arange(30))
    both = prediction_powered_mean(
        np.tile(y, 2), np.tile(f, 2), np.tile(np.arange(30), 2), strata=np.repeat([0, 1], 30)
    )
    assert both.value == pytest.approx(one.value)
    assert both.se == pytest.approx(one.se)  # not less by the root of two: the rows move together


# --- the ends ---------------------------------------------------------------------------------


def nothing(found: Estimate) -> bool:
    return all(math.isnan(x) for x in (found.se, found.low, found.high, found.bound))


def test_no_label() -> None:
    found = prediction_powered_mean([NAN, NAN], [0, 1], [0, 1])
    assert math.isnan(found.value)
    assert nothing(found)
    assert (found.n, found.clusters) == (0, 0)


def test_no_label_in_one_of_the_strata() -> None:
    found = prediction_powered_mean([1, 0, 1, NAN, NAN], [0, 1, 0, 1, 0], range(5), strata=[0, 0, 0, 1, 1])
    assert math.isnan(found.value)
    assert nothing(found)


def test_one_label_is_an_estimate_without_an_interval() -> None:
    found = prediction_powered_mean([1, NAN, NAN], [5, 1, 9], [0, 1, 2])
    assert (found.value, found.tuning) == (1, (0,))
    assert nothing(found)


def test_labels_of_one_query_have_no_interval() -> None:
    found = prediction_powered_mean([1, 0, NAN, NAN], [5, 2, 1, 9], [7, 7, 1, 2])
    assert found.value == 0.5
    assert nothing(found)


def test_a_judge_that_always_says_the_same_has_no_part() -> None:
    found = prediction_powered_mean([1, 2, 3, NAN, NAN], [4] * 5, range(5))
    assert (found.value, found.tuning) == (2, (0,))
    assert found.se == pytest.approx(1 / math.sqrt(3))


def test_all_labelled_is_the_mean_of_the_labels() -> None:
    found = prediction_powered_mean([1, 2, 3], [0, 5, 1], range(3))
    assert (found.value, found.tuning) == (2, (0,))
    assert found.se == pytest.approx(1 / math.sqrt(3))


def test_what_is_no_input() -> None:
    with pytest.raises(ValueError, match="for each of one or more rows"):
        prediction_powered_mean([1, 2], [1], [0, 1])
    with pytest.raises(ValueError, match="for each of one or more rows"):
        prediction_powered_mean([], [], [])
    with pytest.raises(ValueError, match="not a finite number"):
        prediction_powered_mean([1, 2], [1, NAN], [0, 1])


@given(st.integers(0, 1000), st.floats(-5, 5), st.floats(0.1, 10), st.booleans())
@settings(max_examples=50, deadline=None)
def test_it_does_not_matter_on_which_scale_the_judge_speaks(
    seed: int, shift: float, scale: float, turned: bool
) -> None:
    y, f = made(seed, 12, 20)
    clusters = np.arange(32) // 2
    one = prediction_powered_mean(y, f, clusters)
    other = prediction_powered_mean(y, shift + (-scale if turned else scale) * f, clusters)
    assert (other.value, other.low, other.high) == pytest.approx((one.value, one.low, one.high))


# --- shares of 0 and 1 ------------------------------------------------------------------------


@pytest.mark.parametrize("right", [0, 1])
def test_labels_that_are_all_the_same_give_clopper_and_pearsons_interval(right: int) -> None:
    found = prediction_powered_mean([right] * 25 + [NAN] * 75, np.arange(100) % 7, range(100), bounds=(0, 1))
    exact = binomtest(25 * right, 25).proportion_ci(method="exact")
    assert (found.low, found.high) == pytest.approx((exact.low, exact.high))
    assert found.value == right


def test_a_stratum_whose_labels_are_all_the_same_keeps_its_doubt() -> None:
    y = [1.0] * 20 + [NAN] * 180 + [0, 1, 0, 1, 0, 1] + [NAN] * 4
    strata = [0] * 200 + [1] * 10
    without = prediction_powered_mean(y, [0] * 210, range(210), strata=strata)
    found = prediction_powered_mean(y, [0] * 210, range(210), strata=strata, bounds=(0, 1))
    assert found.value == without.value
    own = 200 / 210 * (1 - 0.025 ** (1 / 20)) / t.ppf(0.975, 24)
    assert found.se == pytest.approx(math.hypot(without.se, own))
    assert found.high == 1  # cut: no share is greater
    assert without.high > 0.99


# --- how often the interval holds the truth ---------------------------------------------------


class Coverage(NamedTuple):
    """Of 1,000 draws: the share whose interval held the truth, and mean widths with the judge and without."""

    share: float
    width: float
    labels_only: float


def test_a_sample_by_strata_covers_what_the_release_holds() -> None:
    """1,200 passages of 300 queries, drawn 30 each out of groups of very different sizes."""
    rng = np.random.default_rng(0)
    queries = np.repeat(np.arange(300), 4)
    ease = rng.normal(size=300)[queries]
    truth = (ease + rng.normal(size=1200) > -0.6).astype(float)
    f = np.clip(0.55 * truth + 0.2 + 0.25 * rng.normal(size=1200), 0, 1)
    strata = np.tile(np.arange(4), 300) * 2 + (f < 0.45)
    held, draws = 0, 400
    for _ in range(draws):
        y = np.full(1200, NAN)
        for stratum in range(8):
            rows = rng.permutation(np.flatnonzero(strata == stratum))[:30]
            y[rows] = truth[rows]
        found = prediction_powered_mean(y, f, queries, strata=strata, bounds=(0, 1))
        held += found.low <= truth.mean() <= found.high
    # More than 95 %: the interval is about the source of these rows, not these rows (see the docstring).
    assert 0.95 <= held / draws <= 0.995


class Queries:
    """DL19: people's grades and GPT-4o's of every query's passages, as `measure` has them."""

    def __init__(self, folder: Path, *, relevant: bool) -> None:
        people = read_qrels(folder / "trec_dl2019_passage_text" / "qrels.txt")
        judge = read_qrels(folder / "peer_labels" / "umbrela_gpt-4o_dl19.txt.gz")
        assert (len(people), sum(map(len, people.values()))) == (43, 9260)

        def measured(grades: list[float]) -> np.ndarray:
            return np.array(grades) >= 2 if relevant else np.array(grades)

        self.y = [measured([*people[query].values()]) for query in sorted(people)]
        self.f = [measured([judge[query][p] for p in people[query]]) for query in sorted(people)]
        self.truth = float(np.concatenate(self.y).mean())

    def estimate(self, chosen: np.ndarray, labelled: int, *, judge: bool = True) -> Estimate:
        """From labels of the first queries of those chosen; a query chosen twice is two clusters."""
        y = [self.y[q] if k < labelled else np.full(len(self.y[q]), NAN) for k, q in enumerate(chosen)]
        f = np.concatenate([self.f[q] for q in chosen]).astype(float)
        clusters = np.repeat(np.arange(len(chosen)), [len(part) for part in y])
        return prediction_powered_mean(np.concatenate(y), f if judge else np.zeros_like(f), clusters)

    def coverage(self, labelled: int, *, replace: bool = True, draws: int = 1000) -> Coverage:
        """Over draws of 43 queries, the first of which are labelled."""
        rng = np.random.default_rng(0)
        found, alone = [], []
        for _ in range(draws):
            chosen = rng.choice(43, 43, replace=replace)
            found.append(self.estimate(chosen, labelled))
            if len(alone) < 100:
                alone.append(self.estimate(chosen, labelled, judge=False))
        held = sum(one.low <= self.truth <= one.high for one in found)
        return Coverage(
            held / draws,
            float(np.mean([one.high - one.low for one in found])),
            float(np.mean([one.high - one.low for one in alone])),
        )


@pytest.mark.realdata
def test_twenty_queries_of_dl19_cover_the_full_value(realdata: Path) -> None:
    """Whole queries drawn with replacement out of DL19's 43, which so are the source that is estimated:
    the target is the full-data value, and no finite-population correction applies."""
    found = Queries(realdata, relevant=True).coverage(20)
    assert 0.93 <= found.share <= 0.97
    assert found.share == pytest.approx(0.945, abs=0.002)
    assert found.width < found.labels_only


@pytest.mark.long
@pytest.mark.realdata
@pytest.mark.parametrize(
    ("relevant", "labelled", "replace", "share"),
    [
        (False, 10, True, 0.901),  # ten clusters are too few: a shortfall of five points
        (False, 15, True, 0.933),
        (False, 20, True, 0.937),
        (False, 30, True, 0.941),
        (True, 10, True, 0.917),
        (True, 15, True, 0.943),
        (True, 20, True, 0.945),
        (True, 30, True, 0.948),
        # Without replacement the labelled queries are part of what is estimated; the interval is about
        # DL19's source, and so wider than DL19 itself needs.
        (True, 20, False, 0.989),
    ],
)
def test_coverage_on_dl19(realdata: Path, relevant: bool, labelled: int, replace: bool, share: float) -> None:
    found = Queries(realdata, relevant=relevant).coverage(labelled, replace=replace)
    assert found.share == pytest.approx(share, abs=0.003)
