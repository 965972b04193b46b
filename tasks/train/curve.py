"""The learning curve: loss and dev measures over the steps of a training, as JSON and as a plot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from gradeloom.schemas.errors import InputError
from gradeloom.tasks.run import write_bytes_whole, write_whole

FILE, PLOT = "curve.json", "curve.png"
PREFIX = "eval_"
TRAINER_KEYS = frozenset(
    {"step", "epoch", "eval_runtime", "eval_samples_per_second", "eval_steps_per_second"}
)


@dataclass(frozen=True)
class Curve:
    """How a training went.

    Attributes:
        steps: of the whole training.
        measure: the dev measure that counts, or None without dev set.
        rows: one per evaluation: `step`, `loss` (mean since the row before; None at step 0) and every
            dev measure by name. Without dev set one row at each step where there would be one.
        losses: [step, mean loss since the entry before].
    """

    steps: int
    measure: str | None
    rows: list[dict[str, Any]]
    losses: list[tuple[int, float]]

    @property
    def best(self) -> dict[str, Any] | None:
        """The row of the highest dev measure, the earliest of equals."""
        measure = self.measure
        if measure is None:
            return None
        rows = [row for row in self.rows if row.get(measure) is not None]
        return max(rows, key=lambda row: (row[measure], -row["step"]), default=None)


def curve_of(history: Sequence[dict[str, Any]], *, steps: int, every: int, measure: str | None) -> Curve:
    """The curve out of a trainer's history.

    Args:
        history: the entries that transformers' trainer logs.
        steps: of the training.
        every: where rows stand without a dev set.
        measure: the dev measure that counts.
    """
    losses = [(int(entry["step"]), float(entry["loss"])) for entry in history if "loss" in entry]
    found: dict[int, dict[str, Any]] = {}
    for entry in history:
        values = {
            key.removeprefix(PREFIX): value
            for key, value in entry.items()
            if key.startswith(PREFIX) and key not in TRAINER_KEYS
        }
        if values:
            found[int(entry["step"])] = values
    if not found:
        found = {step: {} for step in [*range(every, steps, every), steps]}
    rows = []
    before = 0
    for step, values in sorted(found.items()):
        rows.append({"step": step, "loss": _mean_loss(losses, before, step), **values})
        before = step
    return Curve(steps, measure, rows, losses)


def _mean_loss(losses: Sequence[tuple[int, float]], after: int, until: int) -> float | None:
    """Mean loss per step in (after, until]; an entry covers the steps since the one before it."""
    total = covered = 0.0
    last = 0
    for step, loss in losses:
        if after < step <= until:
            total += loss * (step - last)
            covered += step - last
        last = step
    return total / covered if covered else None


def write_curve(folder: Path, curve: Curve) -> None:
    """Write `curve.json` and `curve.png`."""
    facts = {"steps": curve.steps, "measure": curve.measure, "curve": curve.rows, "losses": curve.losses}
    data = orjson.dumps(facts, option=orjson.OPT_INDENT_2 | orjson.OPT_SERIALIZE_NUMPY)
    write_bytes_whole(folder / FILE, data)
    write_whole(folder / PLOT, lambda temporary: _plot(curve, temporary))


def read_curve(folder: Path) -> Curve:
    """Read `curve.json`.

    Raises:
        InputError: not there, or damaged.
    """
    file = folder / FILE
    try:
        facts = orjson.loads(file.read_bytes())
        losses = [(int(step), float(loss)) for step, loss in facts["losses"]]
        rows = [{**row, "step": int(row["step"])} for row in facts["curve"]]
        return Curve(int(facts["steps"]), facts["measure"], rows, losses)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError("the learning curve is missing or damaged; delete the folder", file=file) from error


def _plot(curve: Curve, path: Path) -> None:
    from matplotlib.figure import Figure  # a figure of its own: no backend, no global state

    figure = Figure(figsize=(6.0, 4.0), layout="constrained", dpi=150)
    axes = figure.add_subplot()
    if curve.losses:
        steps, losses = zip(*curve.losses, strict=True)
        axes.plot(steps, losses, color="0.6", linewidth=1, label="loss")
    axes.set_xlabel("step")
    axes.set_ylabel("training loss")
    axes.spines[["top", "right"]].set_visible(False)
    measure = curve.measure
    points = [(row["step"], row[measure]) for row in curve.rows if measure and row.get(measure) is not None]
    if measure is not None and points:
        other = axes.twinx()
        steps, values = zip(*points, strict=True)
        other.plot(steps, values, color="#0072B2", marker="o", markersize=4)
        name = measure.replace("$", r"\$")  # no mathematics out of a name
        other.set_ylabel(name, color="#0072B2")
        other.spines["top"].set_visible(False)
    figure.savefig(path, format="png")
