from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from gradeloom.tasks.evaluate import significance as module
from gradeloom.tasks.evaluate.significance import (
    bootstrap_interval,
    holm,
    randomisation_test,
    smallest_detectable,
)

NUMBERS = st.floats(-1, 1).map(lambda x: round(x, 3))

# --- randomisation test ---------------------------------------------------------------------


def test_exact_by_hand() -> None:
    """d = 1, 2, -0.5: of |+-1 +-2 +-.5|, eight sums, 2.5 or more are +-2.5 (observed) and +-3.5."""
    test = randomisation_test([2, 3, 0.5], [1, 1, 1], permutations=100, seed=0)
    assert (test.n, test.exact, test.permutations) == (3, True, 8)
    assert test.difference == pytest.approx(2.5 / 3)
    assert test.p == 4 / 8


def test_exact_is_that_of_scipy() -> None:
    rng = np.random.default_rng(0)
    for n in (2, 5, 9):
        a, b = rng.normal(0.3, 1, n), rng.normal(0, 1, n)
        expected = stats.permutation_test(
            (a, b), lambda x, y, axis: (x - y).mean(axis=axis), permutation_type="samples",
            vectorized=True, n_resamples=1000,
        )  # fmt: skip
        test = randomisation_test(a, b, permutations=1000, seed=0)
        assert test.exact
        assert test.difference == pytest.approx(expected.statistic)
        assert test.p == pytest.approx(expected.pvalue)


def test_random_flips_agree_with_scipy() -> None:
    rng = np.random.default_rng(1)
    a, b = rng.normal(0.25, 1, 50), rng.normal(0, 1, 50)
    expected = stats.permutation_test(
        (a, b), lambda x, y, axis: (x - y).mean(axis=axis), permutation_type="samples",
        vectorized=True, n_resamples=20_000, rng=1,
    ).pvalue  # fmt: skip
    test = randomisation_test(a, b, permutations=20_000, seed=0)
    assert not test.exact
    # Two independent estimates of one share: four standard errors of their difference.
    assert test.p == pytest.approx(expected, abs=4 * math.sqrt(2 * expected * (1 - expected) / 20_000))


def test_p_counts_the_observed_order_as_one() -> None:
    """Sixty equal gains: no random flip in a thousand keeps all signs."""
    test = randomisation_test([1.0] * 60, [0.0] * 60, permutations=999, seed=0)
    assert test.p == 1 / 1000


def test_the_outcome_does_not_depend_on_the_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(2)
    a, b = rng.normal(0.2, 1, 40), rng.normal(0, 1, 40)
    whole = randomisation_test(a, b, permutations=3000, seed=5)
    exact = randomisation_test(a[:10], b[:10], permutations=3000, seed=5)
    monkeypatch.setattr(module, "_BLOCK", 1000)
    assert randomisation_test(a, b, permutations=3000, seed=5) == whole
    assert randomisation_test(a[:10], b[:10], permutations=3000, seed=5) == exact
    assert randomisation_test(a, b, permutations=3000, seed=6).p != whole.p


def test_strata_weigh_the_same() -> None:
    """Set x: one query, d = 3. Set y: d = 1, 1. Statistic (3 + 1) / 2 = 2, flips +-1.5 +-.25 * 2 each."""
    test = randomisation_test([3, 1, 1], [0, 0, 0], strata=["x", "y", "y"], permutations=100, seed=0)
    assert test.difference == 2.0
    assert test.p == 2 / 8  # +-(1.5 + .25 + .25) alone
    pooled = randomisation_test([3, 1, 1], [0, 0, 0], permutations=100, seed=0)
    assert pooled.difference == pytest.approx(5 / 3)


def test_stratified_is_scipys_on_the_same_statistic() -> None:
    rng = np.random.default_rng(3)
    a, b = rng.normal(0.3, 1, 10), rng.normal(0, 1, 10)
    strata = ["x"] * 3 + ["y"] * 7

    def statistic(x: np.ndarray, y: np.ndarray, axis: int) -> np.ndarray:
        d = np.moveaxis(x - y, axis, -1)
        return np.asarray((d[..., :3].mean(-1) + d[..., 3:].mean(-1)) / 2)

    expected = stats.permutation_test(
        (a, b), statistic, permutation_type="samples", vectorized=True, n_resamples=2000
    )
    test = randomisation_test(a, b, strata=strata, permutations=2000, seed=0)
    assert test.difference == pytest.approx(float(expected.statistic))
    assert test.p == pytest.approx(expected.pvalue)


@given(st.lists(st.tuples(NUMBERS, NUMBERS), min_size=1, max_size=12))
def test_exchange_mirrors_the_difference_and_keeps_p(pairs: list[tuple[float, float]]) -> None:
    a, b = zip(*pairs, strict=True)
    one = randomisation_test(a, b, permutations=5000, seed=0)
    other = randomisation_test(b, a, permutations=5000, seed=0)
    assert (other.difference, other.p) == (-one.difference, one.p)
    assert 0 < one.p <= 1


def test_equal_values_are_no_evidence_at_all() -> None:
    values = [0.1 * i for i in range(100)]
    test = randomisation_test(values, values, permutations=1000, seed=0)
    assert (test.difference, test.p, test.n) == (0.0, 1.0, 100)


def test_the_level_is_kept() -> None:
    """Where the null hypothesis holds, p <= .1 in a tenth of the cases (400 tests: four standard errors)."""
    rng = np.random.default_rng(4)
    found = [
        randomisation_test(*rng.normal(0, 1, (2, 25)), permutations=199, seed=i).p <= 0.1 for i in range(400)
    ]
    assert np.mean(found) == pytest.approx(0.1, abs=0.06)


@pytest.mark.parametrize(
    ("a", "b", "strata"),
    [([], [], None), ([1.0], [math.nan], None), ([1.0, 2.0], [1.0, 3.0], ["x"]), ([1.0, 2.0], [1.0], None)],
    ids=["no pairs", "no number", "strata too few", "one value for two"],
)
def test_values_that_cannot_be_tested(a: list[float], b: list[float], strata: list[str] | None) -> None:
    with pytest.raises(ValueError, match=r"query|strata|finite"):
        randomisation_test(a, b, strata=strata, seed=0)


# --- Holm -----------------------------------------------------------------------------------


def test_holm_by_hand() -> None:
    """.01 * 4; .02 * 3 = .06; .03 * 2 = .06; .5 * 1."""
    adjusted = holm({"d": 0.5, "b": 0.02, "a": 0.01, "c": 0.03})
    assert list(adjusted) == ["d", "b", "a", "c"]
    assert adjusted == pytest.approx({"a": 0.04, "b": 0.06, "c": 0.06, "d": 0.5})
    # .011 * 3 = .033; .02 * 2 = .04; .015 stands between; nothing falls below an earlier one or beyond 1.
    assert holm({"x": 0.011, "y": 0.02, "z": 0.015}) == pytest.approx({"x": 0.033, "z": 0.033, "y": 0.033})
    assert holm({"x": 0.6, "y": 0.7}) == {"x": 1.0, "y": 1.0}
    assert holm({}) == {}


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_holm_rejects_what_the_step_down_procedure_rejects(p: list[float]) -> None:
    named = {str(i): value for i, value in enumerate(p)}
    rejected = set()
    for rank, name in enumerate(sorted(named, key=lambda one: named[one])):
        if (len(p) - rank) * named[name] > 0.05:
            break
        rejected.add(name)
    assert {name for name, value in holm(named).items() if value <= 0.05} == rejected


# --- smallest detectable difference ---------------------------------------------------------


def test_smallest_detectable_by_hand() -> None:
    """sd of 1, 2, 3, 4 is sqrt(5/3); (1.959964 + .841621) * sd / 2."""
    assert smallest_detectable([1, 2, 3, 4]) == pytest.approx(2.801585 * math.sqrt(5 / 3) / 2, abs=1e-5)


def test_smallest_detectable_over_strata_by_hand() -> None:
    """Variances 2 (n = 2) and 1 (n = 3): se = sqrt(2/2 + 1/3) / 2."""
    found = smallest_detectable([0, 2, 1, 2, 3], strata=["x", "x", "y", "y", "y"])
    assert found == pytest.approx(2.801585 * math.sqrt(4 / 3) / 2, abs=1e-5)
    assert math.isnan(smallest_detectable([1.0]))
    assert math.isnan(smallest_detectable([1.0, 2.0, 3.0], strata=["x", "y", "y"]))


def test_the_smallest_detectable_difference_is_found_four_times_in_five() -> None:
    rng = np.random.default_rng(5)
    size = smallest_detectable(rng.normal(0, 1, 100_000)) * math.sqrt(100_000 / 40)
    found = [
        randomisation_test(rng.normal(size, 1, 40), np.zeros(40), permutations=499, seed=i).p <= 0.05
        for i in range(300)
    ]
    assert np.mean(found) == pytest.approx(0.8, abs=0.1)


# --- bootstrap ------------------------------------------------------------------------------


def test_bootstrap_is_that_of_scipy() -> None:
    values = np.random.default_rng(6).normal(0.5, 0.2, 60)
    expected = stats.bootstrap((values,), np.mean, method="percentile", n_resamples=20_000, rng=1)
    found = bootstrap_interval(values, resamples=20_000, seed=0)
    assert found == pytest.approx(tuple(expected.confidence_interval), abs=0.003)


def test_bootstrap_of_a_function_of_means() -> None:
    """Two columns in a fixed ratio: the ratio of their means is that ratio in every resample."""
    x = np.random.default_rng(7).uniform(1, 2, 30)
    found = bootstrap_interval(
        np.stack([3 * x, x], axis=1), statistic=lambda m: m[:, 0] / m[:, 1], resamples=200, seed=0
    )
    assert found == pytest.approx((3.0, 3.0))


def test_bootstrap_stays_within_strata() -> None:
    """Constant within each set: their mean has no spread, and weighs the sets alike."""
    found = bootstrap_interval([1.0, 1.0, 1.0, 3.0], strata=["x", "x", "x", "y"], resamples=100, seed=0)
    assert found == (2.0, 2.0)


def test_bootstrap_by_hand() -> None:
    """0 and 1: the mean of two draws is 0, .5 or 1 with 1/4, 1/2, 1/4; the middle half is .5 at most wide."""
    assert bootstrap_interval([0.0, 1.0], level=0.98, seed=0) == (0.0, 1.0)
    assert bootstrap_interval([0.0, 1.0], level=0.4, seed=0) == (0.5, 0.5)


def test_bootstrap_of_what_is_not_defined() -> None:
    found = bootstrap_interval([0.0, 0.0], statistic=lambda m: m[:, 0] * np.nan, resamples=10, seed=0)
    assert math.isnan(found.low)
    assert math.isnan(found.high)
