"""Means that people's labels of a few rows and a judge's reading of all rows give together.

Prediction-powered inference (Angelopoulos, Bates, Fannjiang, Jordan & Zrnic, Science 2023; with the power
tuning of Angelopoulos, Duchi & Zrnic, "PPI++", arXiv 2311.01453). The judge may be wrong: what it says
makes the interval shorter, never the estimate biased.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Estimate:
    """A mean with its interval; NaN where it is not defined.

    Attributes:
        value: the estimate.
        se: its standard error.
        low, high: the two-sided interval.
        bound: the lower end of the one-sided interval of the same level.
        n: labelled rows.
        clusters: distinct clusters among them.
        tuning: lambda of every stratum, in the order of the sorted strata.
    """

    value: float
    se: float
    low: float
    high: float
    bound: float
    n: int
    clusters: int
    tuning: tuple[float, ...]


def prediction_powered_mean(
    y: ArrayLike,
    f: ArrayLike,
    clusters: ArrayLike,
    *,
    strata: ArrayLike | None = None,
    bounds: tuple[float, float] | None = None,
    level: float = 0.95,
) -> Estimate:
    r"""The mean of y over rows of which people labelled some and a judge read all.

    With n labelled rows (y, f) and N rows that only the judge read (f), PPI++, section 6:

        theta  = mean_n(y) + lambda (mean_N(f) - mean_n(f))
        lambda = cov_n(y, f) / [(1 + n/N) var_(n+N)(f)]
        SE^2   = var_n(y - lambda f) / n + lambda^2 var_N(f) / N        (independent rows)

    Rows of one query are alike, so the variance is that of sums over clusters (sandwich; Liang & Zeger
    1986). theta is, to first order, a sum of row scores: (y_i - lambda f_i - their mean) / n of a labelled
    row, lambda (f_j - their mean) / N of another. With a_c and b_c the sums of these two over cluster c,

        SE^2 = sum_c [sqrt((m-1) / m) a_c / (1 - n_c/n) + sqrt((M-1) / M) b_c / (1 - N_c/N)]^2,

    m and M being the numbers of clusters with labelled and with other rows, n_c and N_c these rows of
    cluster c. The factors are those of CR3 (Bell & McCaffrey 2002), close to the jackknife over clusters:
    few clusters of unequal sizes would else give intervals too short. Where every row is a cluster this
    is the SE^2 above; where a query has rows of both kinds, their covariance is in it.

    Within strata the labelled rows are taken to be drawn at random. theta is then the sum over strata of
    w_s theta_s, w_s being the stratum's share of the rows (the estimator weighted by inverse inclusion
    probabilities), each with its own lambda; a cluster's scores are summed over strata before squaring.
    The quantile is Student's t with (labelled clusters - strata) degrees of freedom.

    The interval is about the source that the rows came from, of which they are a sample: for the mean of
    these very rows it is wide by var(y) / (n + N) in SE^2, and there is no finite-population correction.

    A stratum whose labels are all the same shows no spread, which is not to say that there is none. Given
    `bounds`, it adds the variance that makes its own interval as wide as Clopper and Pearson's (1934),
    1 - (alpha / 2)^(1/m) of the distance to the farther bound. Intervals are cut at the bounds.

    Args:
        y: labels, (n + N,); NaN in the N rows that nobody labelled.
        f: the judge's reading of every row, finite, (n + N,).
        clusters: which rows belong together, (n + N,).
        strata: within which the labelled rows were drawn, (n + N,); default: one.
        bounds: the lowest and highest value that a label can have.
        level: coverage.

    Returns:
        NaN everywhere without a labelled row in some stratum. SE and interval are NaN where a stratum has
        labels of one cluster only, or the labelled clusters are no more than the strata. lambda is 0 where
        f does not vary, or either kind of row is of fewer than two clusters (all labelled: N = 0).

    Raises:
        ValueError: lengths differ, there are no rows, or f is not finite.
    """
    labels, readings = np.asarray(y, np.float64), np.asarray(f, np.float64)
    codes = _codes(clusters)
    groups = np.zeros(len(labels), np.int64) if strata is None else _codes(strata)
    if labels.ndim != 1 or not len(labels) == len(readings) == len(codes) == len(groups) > 0:
        raise ValueError("expected a label, a reading, a cluster and a stratum for each of one or more rows")
    if not np.isfinite(readings).all():
        raise ValueError("a reading of the judge is not a finite number")
    parts = [
        _stratum(labels[rows], readings[rows], codes[rows], int(codes.max()) + 1)
        for rows in (groups == s for s in range(int(groups.max()) + 1))
    ]
    shares = np.bincount(groups) / len(groups)
    labelled = np.unique(codes[~np.isnan(labels)])
    return _together(parts, shares, len(labelled), int((~np.isnan(labels)).sum()), bounds, level)


@dataclass(frozen=True)
class _Part:
    """A stratum: its estimate, its lambda, the scores of all clusters (G,), and, where all its labels are
    the same, what they are."""

    value: float
    tuning: float
    scores: Floats
    clusters: int
    same: float | None


def _stratum(y: Floats, f: Floats, clusters: Ints, total: int) -> _Part:
    people = ~np.isnan(y)
    own, other = clusters[people], clusters[~people]
    y, f, f_other = y[people], f[people], f[~people]
    if not len(y):
        return _Part(math.nan, 0.0, np.full(total, math.nan), 0, None)
    tuning = _tuning(y, f, f_other) if min(_distinct(own), _distinct(other)) > 1 else 0.0
    scores = _scores(y - tuning * f, own, total)
    value = y.mean()
    if tuning:
        value += tuning * (f_other.mean() - f.mean())
        scores += _scores(tuning * f_other, other, total)
    return _Part(float(value), tuning, scores, _distinct(own), float(y[0]) if np.ptp(y) == 0 else None)


def _tuning(y: Floats, f: Floats, f_other: Floats) -> float:
    pooled = np.concatenate([f, f_other])
    if np.ptp(pooled) == 0:
        return 0.0
    covariance = np.cov(y, f, ddof=1)[0, 1]
    return float(covariance / ((1 + len(f) / len(f_other)) * pooled.var(ddof=1)))


def _scores(values: Floats, clusters: Ints, total: int) -> Floats:
    """Of a mean of values, per cluster, with the small-sample factors; NaN with one cluster only."""
    sizes = np.bincount(clusters, minlength=total)
    found = np.count_nonzero(sizes)
    if found < 2:
        return np.full(total, math.nan)
    share = sizes / len(values)
    sums = np.bincount(clusters, values - values.mean(), total) / len(values)
    return math.sqrt((found - 1) / found) * sums / (1 - share)


def _together(
    parts: Sequence[_Part],
    shares: Floats,
    clusters: int,
    n: int,
    bounds: tuple[float, float] | None,
    level: float,
) -> Estimate:
    from scipy.stats import t  # type: ignore[import-untyped]

    value = float(sum(share * part.value for share, part in zip(shares, parts, strict=True)))
    tuning = tuple(part.tuning for part in parts)
    freedom = clusters - len(parts)
    scores = np.sum([share * part.scores for share, part in zip(shares, parts, strict=True)], axis=0)
    variance = float(scores @ scores)
    if freedom < 1 or not math.isfinite(variance):
        return Estimate(value, math.nan, math.nan, math.nan, math.nan, n, clusters, tuning)
    quantile = float(t.ppf((1 + level) / 2, freedom))
    if bounds is not None:
        variance += sum(
            (share * _unseen(part, bounds, level) / quantile) ** 2
            for share, part in zip(shares, parts, strict=True)
        )
    se = math.sqrt(variance)
    low, high = bounds or (-math.inf, math.inf)
    return Estimate(
        value=min(max(value, low), high),
        se=se,
        low=max(value - quantile * se, low),
        high=min(value + quantile * se, high),
        bound=max(value - float(t.ppf(level, freedom)) * se, low),
        n=n,
        clusters=clusters,
        tuning=tuning,
    )


def _unseen(part: _Part, bounds: tuple[float, float], level: float) -> float:
    """How far the mean of a stratum may lie from labels that are all the same."""
    if part.same is None:
        return 0.0
    share = 1 - math.pow((1 - level) / 2, 1 / part.clusters)
    return share * max(part.same - bounds[0], bounds[1] - part.same)


def _codes(values: ArrayLike) -> Ints:
    """Values as whole numbers from 0, in their sorted order."""
    return np.unique(np.asarray(values), return_inverse=True)[1].astype(np.int64)


def _distinct(clusters: Ints) -> int:
    return int(np.count_nonzero(np.bincount(clusters)))
