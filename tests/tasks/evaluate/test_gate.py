from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from made_stories import cut, kept
from pydantic import ValidationError

from gradeloom.schemas.config import GateRule
from gradeloom.tasks.evaluate.gate import Figure, Verdict, diversity, judged_figures, share, summary, verdict


class Axes:
    """Every text is embedded along the axis of its number: `about thing 3` along the fourth."""

    def encode_passages(self, texts: list[str]) -> np.ndarray:
        return np.eye(16)[[int(text.rsplit(" ", 1)[1]) for text in texts]]


def rule(**settings: object) -> GateRule:
    return GateRule.model_validate({"metric": "grade_precision", "min": 0.5, "n_min": 4} | settings)


def released(root: Path, lists: int = 6) -> Path:
    """The judge agrees on grades 2, 1 and 0 and reads the 3 as a 2."""
    return cut(root, [kept(n) for n in range(lists)]).path


def test_precision_of_grades_counts_passages_by_their_released_grade(tmp_path: Path) -> None:
    rules = [rule(level=3), rule(level=2), rule(level=None), rule(level=7), rule(source="audit")]
    found = judged_figures(released(tmp_path), rules)
    assert found[0] == Figure(0.0, 0.0, 6)
    assert found[1] == Figure(1.0, 1.0, 6)
    assert found[2] == Figure(0.75, 0.75, 24)  # the same share in every list: no spread
    assert found[3] == Figure(None, None, 0)
    assert found[4] is None


def test_what_the_judge_did_not_read_does_not_count(tmp_path: Path) -> None:
    folder = cut(tmp_path, [kept(0), kept(1, judged=False)]).path
    assert judged_figures(folder, [rule(level=2)]) == [Figure(1.0, 1.0, 1)]


def test_a_bound_is_that_of_whole_queries() -> None:
    # 40 queries of five passages, all right or all wrong: as uncertain as 40 passages, not 200.
    right = np.array([5.0] * 20 + [0.0] * 20)
    whole = share(right, np.full(40, 5.0))
    assert (whole.value, whole.n) == (0.5, 200)
    assert whole.bound == pytest.approx(0.5 - 1.645 * np.sqrt(0.25 / 40), abs=0.02)
    alone = share(np.tile([1.0, 0.0], 100), np.ones(200))
    assert alone.bound == pytest.approx(0.5 - 1.645 * np.sqrt(0.25 / 200), abs=0.01)


@pytest.mark.parametrize(
    ("figure", "why"),
    [
        (None, "was not measured"),
        (Figure(0.9, 0.8, 3), "rests on 3 passages, the rule asks for 4"),
        (Figure(None, None, 9), "its bound is not defined"),
        (Figure(0.9, float("nan"), 9), "its bound is not defined"),
        (Figure(0.55, 0.49, 9), "its lower bound 0.490 is below 0.5"),
        (Figure(0.55, 0.5, 9), None),
    ],
)
def test_a_rule_passes_only_when_its_bound_reaches_it(figure: Figure | None, why: str | None) -> None:
    found = verdict(rule(), figure)
    assert (found.why, found.passed) == (why, why is None)


def test_a_gate_is_passed_when_every_rule_is() -> None:
    good = Verdict({"metric": "grade_precision"}, 0.9, 0.8, 9, None)
    bad = Verdict({"metric": "grade_precision"}, 0.4, 0.3, 9, "its lower bound 0.300 is below 0.5")
    assert summary([good])["passed"]
    assert summary([])["passed"]
    told = summary([good, bad])
    assert not told["passed"]
    assert [one["passed"] for one in told["rules"]] == [True, False]
    assert told["rules"][1]["why"] == bad.why


def test_diversity_is_one_less_the_mean_cosine_of_passages_of_different_queries(tmp_path: Path) -> None:
    rules = [rule(metric="diversity", level=3), rule(metric="diversity", level=7)]
    folder = released(tmp_path)
    assert judged_figures(folder, rules, encoder=Axes()) == [  # type: ignore[arg-type]
        Figure(1.0, 1.0, 6), Figure(None, None, 0),
    ]  # fmt: skip
    assert judged_figures(folder, rules) == [None, None]


def test_diversity_of_a_crowd_and_a_stranger() -> None:
    # Of 10 vectors 9 are one: 36 of 45 pairs have cosine 1, the other 9 have 0.
    found = diversity(np.eye(2)[[0] * 9 + [1]])
    assert found.value == pytest.approx(9 / 45)
    assert found.bound == 0.0  # in a third of the resamples the stranger is not there


def test_diversity_looks_at_ten_thousand_pairs_at_most() -> None:
    vectors = np.random.default_rng(1).normal(size=(400, 8))
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    found = diversity(vectors)
    gram = vectors @ vectors.T
    every = 1 - (gram.sum() - 400) / (400 * 399)
    assert found.value == pytest.approx(every, abs=0.01)
    assert found.bound is not None
    assert found.bound < every


def test_people_are_not_asked_for_diversity() -> None:
    with pytest.raises(ValidationError, match="diversity is measured, not audited"):
        rule(metric="diversity", source="audit")
