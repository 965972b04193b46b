"""Isotonic mapping of a judge's expected grades to human grades, never used on what it was fitted on."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
from pydantic import ValidationError

from gradeloom.schemas.calibration import IsotonicMapping, Judge
from gradeloom.schemas.errors import InputError
from gradeloom.schemas.rows import digest
from gradeloom.tasks.collection import Qrels
from gradeloom.tasks.evaluate.calibration import Human, JudgeLabels, Pair, expected_pairs


def fit_isotonic(human: Human, labels: JudgeLabels, *, judge: Judge, domain: str | None) -> IsotonicMapping:
    """Fit the monotone mapping with the least squared distance to human grades.

    scikit-learn's `IsotonicRegression` (pool adjacent violators), every pair with weight 1.

    Args:
        human: people's grades; their identity is stored with the mapping.
        labels: the judge's, with expected grades.
        judge: who gave them.
        domain: for people.

    Raises:
        InputError: no pair has an expected and a human grade.
    """
    from sklearn.isotonic import IsotonicRegression

    pairs = expected_pairs(human.grades, labels.expected)
    if not pairs:
        raise InputError(
            "a mapping is fitted on expected grades, and there are none: labels that are not whole, or a "
            "judge that is run, give them",
            field="--fit-isotonic",
        )
    expected, grades = np.array(pairs, dtype=np.float64).T
    fitted = IsotonicRegression(out_of_bounds="clip").fit(expected, grades)
    return IsotonicMapping(
        domain=domain,
        human_labels=human.identity,
        judge=judge,
        expected=tuple(map(float, fitted.X_thresholds_)),
        human=tuple(map(float, fitted.y_thresholds_)),
        fitted_pairs=tuple(
            sorted(
                _pair_digest(query_id, passage_id)
                for query_id, by_passage in labels.expected.items()
                for passage_id in by_passage.keys() & human.grades.get(query_id, {}).keys()
            )
        ),
    )


def apply_isotonic(mapping: IsotonicMapping, expected: Qrels, *, human: Human | None = None) -> Qrels:
    """The mapped value of every expected grade: linear between the knots, constant beyond the last.

    Args:
        mapping: as fitted or read.
        expected: query id -> passage id -> expected grade.
        human: the grades that the result will be compared with, if any.

    Raises:
        InputError: the mapping was fitted on `human`'s file, or on some of these pairs.
    """
    require_unseen(mapping, [(q, p) for q, by_passage in expected.items() for p in by_passage], human)
    return {
        query_id: {
            passage_id: float(np.interp(value, mapping.expected, mapping.human))
            for passage_id, value in by_passage.items()
        }
        for query_id, by_passage in expected.items()
    }


def require_unseen(mapping: IsotonicMapping, pairs: Iterable[Pair], human: Human | None) -> None:
    """Refuse a mapping on what it was fitted on.

    Args:
        mapping: as fitted or read.
        pairs: whose expected grades are to be mapped.
        human: the grades that the result will be compared with, if any.

    Raises:
        InputError: the mapping was fitted on `human`'s file, or on some of these pairs.
    """
    fitted_on = mapping.human_labels.qrels
    if human is not None and human.identity.qrels.sha256 == fitted_on.sha256:
        raise InputError(
            f"this mapping was fitted on these very judgements ({fitted_on.name}); a mapping is only used "
            "on other ones: fit it on another set",
            field="--isotonic",
        )
    seen = frozenset(mapping.fitted_pairs)
    again = sum(_pair_digest(*pair) in seen for pair in pairs)
    if again:
        raise InputError(
            f"this mapping was fitted on {again:,} of these pairs (in {fitted_on.name}); a mapping is only "
            "used on other ones: fit it on another set",
            field="--isotonic",
        )


def read_isotonic(path: str | Path) -> IsotonicMapping:
    """A stored mapping.

    Raises:
        InputError: it cannot be read, or is no mapping.
    """
    try:
        return IsotonicMapping.model_validate_json(Path(path).read_bytes())
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror or error}", file=path) from error
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise InputError(
            f"is no isotonic mapping as `judge calibrate --fit-isotonic` writes it ({first['msg']})",
            file=path,
            field=place or None,
        ) from error


def _pair_digest(query_id: str, passage_id: str) -> str:
    return digest(query_id, passage_id, length=12)
