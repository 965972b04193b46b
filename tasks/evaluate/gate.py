"""The gate of a release: rules that its rows, or people who looked at some of them, must bear out.

A rule passes when the one-sided 95 % bound of its figure, by a bootstrap over queries, reaches what the
rule asks; a figure that is missing, or rests on fewer passages than `n_min`, does not pass. A bound that
cannot be computed is missing.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gradeloom.schemas.config import GateRule
from gradeloom.schemas.rows import digest
from gradeloom.tasks.evaluate.grades import rows
from gradeloom.tasks.evaluate.significance import bootstrap_interval

if TYPE_CHECKING:
    from gradeloom.tasks.encoder import Encoder

LEVEL = 0.95
"""Of the one-sided bound."""

PAIRS = 10_000
SAMPLED = 2_000
"""Passages of a level that are looked at for diversity, at most."""

_MANY = 10_000  # queries, from where a tenth of the resamples is enough
_COLUMNS = ("query_id", "passages", "judged", "abstained", "grade")


@dataclass(frozen=True)
class Figure:
    """An estimate, its one-sided 95 % bound on the side of caution, and the passages it rests on."""

    value: float | None
    bound: float | None
    n: int


@dataclass(frozen=True)
class Verdict:
    """What became of a rule.

    Attributes:
        rule: its settings.
        why: why it did not pass; None when it did.
    """

    rule: dict[str, Any]
    value: float | None
    bound: float | None
    n: int
    why: str | None

    @property
    def passed(self) -> bool:
        return self.why is None


def verdict(rule: GateRule, figure: Figure | None) -> Verdict:
    """Hold a figure against its rule."""
    settings = rule.model_dump(mode="json", exclude_none=True)
    if figure is None:
        return Verdict(settings, None, None, 0, "was not measured")
    why = None
    if figure.n < rule.n_min:
        why = f"rests on {figure.n} passages, the rule asks for {rule.n_min}"
    elif figure.bound is None or not math.isfinite(figure.bound):
        why = "its bound is not defined"
    elif figure.bound < rule.min:
        why = f"its lower bound {figure.bound:.3f} is below {rule.min:g}"
    return Verdict(settings, figure.value, figure.bound, figure.n, why)


def judged_figures(
    folder: Path, rules: Sequence[GateRule], *, encoder: Encoder | None = None
) -> list[Figure | None]:
    """The figures that a release's own rows give, one a rule; None for rules that ask people.

    One pass over the lists; memory grows with the queries by two numbers a level, not with their text.

    Args:
        folder: the release; `lists/` is read.
        rules: what is asked.
        encoder: for `diversity`; without one it is not measured.

    Raises:
        InputError: a file cannot be read or lacks a column.
    """
    counts: dict[int | None, _Counts] = {
        rule.level: _Counts(rule.level)
        for rule in rules
        if rule.metric == "grade_precision" and rule.source == "judge"
    }
    samples: dict[int | None, _Sample] = {
        rule.level: _Sample(rule.level) for rule in rules if rule.metric == "diversity"
    }
    for row in rows(folder / "lists", _COLUMNS):
        for count in counts.values():
            count.add(row)
        for sample in samples.values():
            sample.add(row)
    found: list[Figure | None] = []
    for rule in rules:
        if rule.metric == "diversity":
            found.append(samples[rule.level].figure(encoder) if encoder is not None else None)
        else:
            found.append(counts[rule.level].figure() if rule.source == "judge" else None)
    return found


def summary(verdicts: Iterable[Verdict]) -> dict[str, Any]:
    """The gate as a manifest holds it: whether it was passed, and every verdict."""
    each = [asdict(one) | {"passed": one.passed} for one in verdicts]
    return {"passed": all(one["passed"] for one in each), "rules": each}


def share(right: NDArray[np.float64], out_of: NDArray[np.float64]) -> Figure:
    """Sum of `right` over sum of `out_of`, (queries,) each, with a lower bound by resampled queries."""
    n = int(out_of.sum())
    if not n:
        return Figure(None, None, 0)
    bound = bootstrap_interval(
        np.stack([right, out_of], axis=1),
        statistic=lambda means: means[:, 0] / means[:, 1],
        level=2 * LEVEL - 1,
        resamples=10_000 if len(right) < _MANY else 1_000,
        seed=0,
    ).low
    return Figure(float(right.sum() / n), bound, n)


# --- precision of grades --------------------------------------------------------------------


@dataclass
class _Counts:
    """Per query, the passages of a released grade that the judge read, and those it agreed with."""

    level: int | None
    right: list[float] = field(default_factory=list)
    out_of: list[float] = field(default_factory=list)

    def add(self, row: Mapping[str, Any]) -> None:
        right = read = 0
        for grade, judged, abstained in zip(row["grade"], row["judged"], row["abstained"], strict=True):
            released = math.floor(grade + 0.5)
            if judged is not None and not abstained and self.level in (None, released):
                read += 1
                right += judged == released
        if read:
            self.right.append(right)
            self.out_of.append(read)

    def figure(self) -> Figure:
        return share(np.array(self.right, np.float64), np.array(self.out_of, np.float64))


# --- diversity ------------------------------------------------------------------------------


@dataclass
class _Sample:
    """The passages of a grade that come first in the order of a digest, at most one a query."""

    level: int | None
    _heap: list[tuple[int, str]] = field(default_factory=list)

    def add(self, row: Mapping[str, Any]) -> None:
        own = [
            text
            for text, grade in zip(row["passages"], row["grade"], strict=True)
            if self.level in (None, math.floor(grade + 0.5))
        ]
        if not own:
            return
        place = int(digest("diversity", row["query_id"]), 16)
        entry = -place, own[place % len(own)]
        if len(self._heap) < SAMPLED:
            heapq.heappush(self._heap, entry)
        else:
            heapq.heappushpop(self._heap, entry)

    def figure(self, encoder: Encoder) -> Figure:
        texts = [text for _, text in sorted(self._heap, reverse=True)]
        if len(texts) < 2:
            return Figure(None, None, len(texts))
        return diversity(np.asarray(encoder.encode_passages(texts), np.float64))


def diversity(vectors: NDArray[np.float64], *, seed: int = 0) -> Figure:
    """1 - mean cosine of up to 10,000 pairs of passages, each of another query.

    The bound resamples queries: a pair weighs the product of how often its two queries were drawn.

    Args:
        vectors: unit vectors, (queries, d), one passage a query; at least two.
        seed: decides pairs and resamples.
    """
    n = len(vectors)
    rng = np.random.default_rng(seed)
    one, other = np.triu_indices(n, k=1)
    if len(one) > PAIRS:
        chosen = rng.choice(len(one), PAIRS, replace=False)
        one, other = one[chosen], other[chosen]
    cosines = np.einsum("ij,ij->i", vectors[one], vectors[other])
    resampled = []
    for _ in range(1_000):
        drawn = np.bincount(rng.integers(n, size=n), minlength=n)
        weights = drawn[one] * drawn[other]
        if weights.any():
            resampled.append(1 - np.average(cosines, weights=weights))
    bound = float(np.quantile(resampled, 1 - LEVEL)) if resampled else None
    return Figure(float(1 - cosines.mean()), bound, n)
