"""Are two retrievers different? Paired randomisation tests, Holm's correction, bootstrap intervals.

Everything is computed from per-query values of one measure. Where queries come from several data sets,
`strata` names each query's data set, and the statistic is the *mean over the data sets of their mean
difference*: every data set weighs the same, however many queries it has.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

_BLOCK = 1 << 21  # numbers drawn at once: 16 MB, whatever the number of queries


@dataclass(frozen=True)
class RandomisationTest:
    """Outcome of a paired randomisation test.

    Attributes:
        difference: the statistic, mean of a - b (over strata: mean of their means).
        p: two-sided p-value; never 0.
        n: pairs.
        permutations: sign flips that were looked at.
        exact: whether those were all there are.
    """

    difference: float
    p: float
    n: int
    permutations: int
    exact: bool


class Interval(NamedTuple):
    low: float
    high: float


def randomisation_test(
    a: ArrayLike,
    b: ArrayLike,
    *,
    strata: Sequence[str] | None = None,
    permutations: int = 10_000,
    seed: int,
) -> RandomisationTest:
    """Two-sided paired randomisation (Fisher) test on per-query values.

    Under the null hypothesis the two retrievers' values of a query could as well be exchanged, which
    flips the sign of its difference d_i = a_i - b_i. With weights w_i = 1/n, or 1/(S n_s) for a query
    of stratum s of S, the statistic is T = sum_i w_i d_i, and p is the share of sign vectors e with
    |sum_i e_i w_i d_i| >= |T|. A flip stays within its query, so strata change the weights and nothing
    else. Where the sign vectors are no more than `permutations` all are looked at and p is that share;
    else `permutations` random ones are, and p = (1 + #) / (1 + permutations), the observed one being
    one of them (Phipson & Smyth 2010). The test is the one Smucker, Allan & Carterette (CIKM 2007)
    recommend for retrieval.

    Args:
        a: per-query values, (n,).
        b: per-query values of the other retriever, in the same order, (n,).
        strata: each query's data set, (n,); None: all queries weigh the same.
        permutations: random sign vectors at most.
        seed: decides which.

    Raises:
        ValueError: no pairs, lengths that differ, or a value that is no finite number.
    """
    one, other = _finite(a), _finite(b)
    if one.ndim != 1 or one.shape != other.shape:
        raise ValueError(f"expected two values per query, got {one.shape} and {other.shape}")
    d = one - other
    weighted = d * _weights(len(d), strata)
    observed = abs(weighted.sum())
    moving = weighted[weighted != 0]  # flipping a zero changes nothing
    # Sums in another order differ in their last digits; what is equal must count as equal.
    reached = observed - 1e-12 * float(np.abs(moving).sum())
    exact = len(moving) < 63 and 2 ** len(moving) <= permutations
    total = 2 ** len(moving) if exact else permutations
    flips = _all_flips(len(moving)) if exact else _random_flips(len(moving), permutations, seed)
    hits = 0
    for flipped in flips:
        hits += int(np.count_nonzero(np.abs(weighted.sum() - 2 * (flipped @ moving)) >= reached))
    return RandomisationTest(
        difference=float(weighted.sum()),
        p=hits / total if exact else (1 + hits) / (1 + total),
        n=len(d),
        permutations=total,
        exact=exact,
    )


def holm(p: Mapping[str, float]) -> dict[str, float]:
    """Holm's (1979) step-down adjustment of p-values, which bounds the family-wise error rate.

    With p_(1) <= ... <= p_(m): adjusted p_(i) = max over j <= i of min(1, (m - j + 1) p_(j)).

    Args:
        p: name of a hypothesis -> its p-value.

    Returns:
        Name -> adjusted p-value, in the order given.
    """
    adjusted: dict[str, float] = {}
    highest = 0.0
    for rank, name in enumerate(sorted(p, key=lambda one: p[one])):
        highest = max(highest, min(1.0, (len(p) - rank) * p[name]))
        adjusted[name] = highest
    return {name: adjusted[name] for name in p}


def smallest_detectable(
    differences: ArrayLike,
    *,
    strata: Sequence[str] | None = None,
    alpha: float = 0.05,
    power: float = 0.8,
) -> float:
    """The smallest true difference that a two-sided test on so many queries would find.

    Normal approximation: (z_(1 - alpha/2) + z_power) * se, with se = sd / sqrt(n), or over S strata
    se = sqrt(sum_s sd_s^2 / n_s) / S; sd is that of the paired differences (n - 1 in the denominator).
    Where m hypotheses are corrected for by Holm, `alpha` / m gives the most cautious answer.

    Args:
        differences: paired per-query differences, (n,).
        strata: each query's data set, (n,).
        alpha: level of the test.
        power: chance of finding it.

    Returns:
        The difference in the measure's unit; NaN where a stratum has fewer than two queries.

    Raises:
        ValueError: no differences, or one that is no finite number.
    """
    d = _finite(differences)
    groups = _groups(len(d), strata)
    if any(len(group) < 2 for group in groups):
        return math.nan
    se = math.sqrt(sum(d[group].var(ddof=1) / len(group) for group in groups)) / len(groups)
    normal = NormalDist()
    return (normal.inv_cdf(1 - alpha / 2) + normal.inv_cdf(power)) * se


@dataclass(frozen=True)
class Compared:
    """One of several differences that were tested together.

    Attributes:
        difference, p, n: of the randomisation test.
        p_holm: adjusted over all that were tested together.
        smallest_detectable: with power .8 at alpha over the number of differences, Holm's strictest step.
    """

    difference: float
    p: float
    p_holm: float
    smallest_detectable: float
    n: int


def compared(
    pairs: Mapping[str, tuple[Sequence[float], Sequence[float], Sequence[str]]],
    *,
    permutations: int = 10_000,
    seed: int,
    alpha: float = 0.05,
) -> dict[str, Compared]:
    """Paired randomisation tests of several differences a - b, with Holm's correction over them.

    Args:
        pairs: name -> per-query values a and b, (n,), and each query's data set, (n,).
        permutations: see `randomisation_test`.
        seed: likewise.
        alpha: level of the tests together, for the smallest detectable difference.

    Raises:
        ValueError: as `randomisation_test`.
    """
    tests = {
        name: randomisation_test(a, b, strata=strata, permutations=permutations, seed=seed)
        for name, (a, b, strata) in pairs.items()
    }
    adjusted = holm({name: test.p for name, test in tests.items()})
    found = {}
    for name, (a, b, strata) in pairs.items():
        differences = [x - y for x, y in zip(a, b, strict=True)]
        detectable = smallest_detectable(differences, strata=strata, alpha=alpha / len(pairs))
        test = tests[name]
        found[name] = Compared(test.difference, test.p, adjusted[name], detectable, test.n)
    return found


def bootstrap_interval(
    values: ArrayLike,
    *,
    statistic: Callable[[NDArray[np.float64]], NDArray[np.float64]] | None = None,
    strata: Sequence[str] | None = None,
    level: float = 0.95,
    resamples: int = 10_000,
    seed: int,
) -> Interval:
    """Percentile bootstrap over queries, for a mean or a function of several means.

    Queries are drawn with replacement, within each stratum; a resample's means are the means over
    strata of their means.

    Args:
        values: per-query values, (n,), or k of them per query, (n, k).
        statistic: from the means (resamples, k) to what is wanted (resamples,); default: the one mean.
        strata: each query's data set, (n,).
        level: coverage.
        resamples: how many.
        seed: decides which.

    Returns:
        The interval; NaN where the statistic is not defined in some resample.

    Raises:
        ValueError: no values, or one that is no finite number.
    """
    x = _finite(values)
    x = x[:, None] if x.ndim == 1 else x
    rng = np.random.default_rng(seed)
    groups = _groups(len(x), strata)
    means = np.concatenate([
        np.mean([x[group[rng.integers(len(group), size=(block, len(group)))]].mean(axis=1)
                 for group in groups], axis=0)
        for block in _blocks(resamples, x.size)
    ])  # fmt: skip
    found = means[:, 0] if statistic is None else statistic(means)
    if not np.isfinite(found).all():
        return Interval(math.nan, math.nan)
    low, high = np.quantile(found, [(1 - level) / 2, (1 + level) / 2])
    return Interval(float(low), float(high))


def _finite(values: ArrayLike) -> NDArray[np.float64]:
    array = np.asarray(values, dtype=np.float64)
    if not np.isfinite(array).all():
        raise ValueError("a per-query value is not a finite number")
    return array


def _groups(n: int, strata: Sequence[str] | None) -> list[NDArray[np.int64]]:
    """The places of each stratum's queries."""
    if not n:
        raise ValueError("expected at least one query")
    if strata is None:
        return [np.arange(n)]
    if len(strata) != n:
        raise ValueError(f"{len(strata)} strata for {n} queries")
    places: dict[str, list[int]] = {}
    for place, stratum in enumerate(strata):
        places.setdefault(stratum, []).append(place)
    return [np.array(group) for group in places.values()]


def _weights(n: int, strata: Sequence[str] | None) -> NDArray[np.float64]:
    weights = np.empty(n)
    groups = _groups(n, strata)
    for group in groups:
        weights[group] = 1 / (len(groups) * len(group))
    return weights


def _blocks(total: int, each: int) -> Iterator[int]:
    """`total` in parts of at most _BLOCK numbers when one takes `each`."""
    size = max(1, _BLOCK // max(each, 1))
    for start in range(0, total, size):
        yield min(size, total - start)


def _all_flips(n: int) -> Iterator[NDArray[np.float64]]:
    """Every subset of n, as rows of zeros and ones."""
    start = 0
    for block in _blocks(2**n, n):
        numbers = np.arange(start, start + block)
        yield (numbers[:, None] >> np.arange(n) & 1).astype(np.float64)
        start += block


def _random_flips(n: int, total: int, seed: int) -> Iterator[NDArray[np.float64]]:
    rng = np.random.default_rng(seed)
    for block in _blocks(total, n):
        yield rng.integers(0, 2, size=(block, n), dtype=np.int8).astype(np.float64)
