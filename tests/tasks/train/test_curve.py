"""The learning curve, by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gradeloom.schemas.errors import InputError
from gradeloom.tasks.train.curve import Curve, curve_of, read_curve, write_curve

MEASURE = "dev_nDCG@10"


def evaluated(step: int, value: float) -> dict[str, Any]:
    return {
        "step": step, "epoch": step / 10, f"eval_{MEASURE}": value, "eval_dev_MRR@10": 0.5,
        "eval_runtime": 0.1, "eval_samples_per_second": 0.0, "eval_steps_per_second": 0.0,
    }  # fmt: skip


def logged(step: int, loss: float) -> dict[str, Any]:
    return {"step": step, "loss": loss, "grad_norm": 1.0, "learning_rate": 1e-5}


HISTORY = [
    evaluated(0, 0.25), logged(2, 4.0), logged(4, 2.0), logged(5, 1.0), evaluated(5, 0.75),
    logged(6, 1.0), logged(8, 0.5), evaluated(8, 0.75), {"step": 8, "train_loss": 2.0, "train_runtime": 1.0},
]  # fmt: skip


def test_a_row_per_evaluation_with_the_mean_loss_since_the_one_before() -> None:
    curve = curve_of(HISTORY, steps=8, every=5, measure=MEASURE)
    assert [row["step"] for row in curve.rows] == [0, 5, 8]
    assert [row[MEASURE] for row in curve.rows] == [0.25, 0.75, 0.75]
    assert set(curve.rows[1]) == {"step", "loss", MEASURE, "dev_MRR@10"}
    # An entry is the mean over the steps since the entry before: 2 steps of 4, 2 of 2, 1 of 1.
    assert [row["loss"] for row in curve.rows] == [None, (2 * 4 + 2 * 2 + 1) / 5, (1 + 2 * 0.5) / 3]
    assert curve.losses == [(2, 4.0), (4, 2.0), (5, 1.0), (6, 1.0), (8, 0.5)]


def test_the_best_is_the_earliest_of_equals() -> None:
    best = curve_of(HISTORY, steps=8, every=5, measure=MEASURE).best
    assert best is not None
    assert (best["step"], best[MEASURE]) == (5, 0.75)


def test_without_a_dev_set_rows_stand_where_they_would() -> None:
    curve = curve_of([logged(step, float(step)) for step in range(1, 9)], steps=8, every=3, measure=None)
    assert curve.rows == [{"step": 3, "loss": 2.0}, {"step": 6, "loss": 5.0}, {"step": 8, "loss": 7.5}]
    assert curve.best is None


@pytest.mark.parametrize("measure", [MEASURE, None])
def test_it_is_read_as_it_was_written(tmp_path: Path, measure: str | None) -> None:
    curve = curve_of(HISTORY if measure else HISTORY[1:4], steps=8, every=5, measure=measure)
    write_curve(tmp_path, curve)
    assert read_curve(tmp_path) == curve
    assert json.loads((tmp_path / "curve.json").read_bytes())["steps"] == 8
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert {file.name for file in tmp_path.iterdir()} == {"curve.json", "curve.png"}


def test_a_name_is_no_mathematics_in_the_plot(tmp_path: Path) -> None:
    write_curve(tmp_path, Curve(1, r"$\frac{$", [{"step": 1, "loss": None, r"$\frac{$": 0.5}], []))
    assert (tmp_path / "curve.png").exists()


def test_a_damaged_one_is_an_error_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="missing or damaged"):
        read_curve(tmp_path)
    (tmp_path / "curve.json").write_text('{"steps": 3')
    with pytest.raises(InputError, match="missing or damaged"):
        read_curve(tmp_path)
