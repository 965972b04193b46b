"""The picture of a calibration: grades of people against the judge's, and what expected grades are worth."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from gradeloom.schemas.calibration import Agreement, Calibration

_BLUE, _ORANGE = "#0072B2", "#D55E00"  # Okabe and Ito


def plot_calibration(calibration: Calibration, path: Path) -> None:
    """Draw the confusion of grades and, where there are expected grades, their reliability.

    Args:
        calibration: what is drawn; with a mapped agreement its reliability is drawn, too.
        path: of the PNG.
    """
    from matplotlib.figure import Figure  # without pyplot: Agg, and no state of the process

    shown = calibration.agreement
    panels = 2 if shown.expected is not None else 1
    figure = Figure(figsize=(4.6 * panels, 4.4), layout="constrained", dpi=150)
    _confusion(figure.add_subplot(1, panels, 1), shown)
    if panels == 2:
        _reliability(figure.add_subplot(1, panels, 2), calibration)
    figure.savefig(path, format="png")


def _confusion(axes: Axes, agreement: Agreement) -> None:
    """Counts; the shade of a cell is its share of the row, so that rare grades can be seen, too."""
    columns = [*map(str, agreement.grades), *(["abstained"] if any(agreement.abstained) else [])]
    rows = [
        [*row, silent][: len(columns)]
        for row, silent in zip(agreement.matrix, agreement.abstained, strict=True)
    ]
    shares = [[cell / max(sum(row), 1) for cell in row] for row in rows]
    axes.imshow(shares, cmap="Blues", vmin=0, vmax=1, aspect="auto")
    for y, row in enumerate(rows):
        for x, cell in enumerate(row):
            dark = shares[y][x] > 0.55
            axes.text(x, y, f"{cell:,}", ha="center", va="center", color="white" if dark else "black", size=9)
    axes.set_xticks(range(len(columns)), columns)
    axes.set_yticks(range(len(rows)), list(map(str, agreement.grades)))
    axes.set_xlabel("grade of the judge")
    axes.set_ylabel("grade of people")
    value = agreement.kappa.value
    axes.set_title("pairs" if value is None else f"pairs; kappa {value:.3f}", fontsize=10)
    axes.spines[:].set_visible(False)


def _reliability(axes: Axes, calibration: Calibration) -> None:
    ends = calibration.agreement.grades[0], calibration.agreement.grades[-1]
    axes.plot(ends, ends, color="0.6", linewidth=0.8, linestyle=":", label="as people grade")
    lines = [("expected grade", calibration.agreement, _BLUE, "o")]
    if calibration.isotonic is not None:
        lines.append(("mapped (isotonic)", calibration.isotonic.agreement, _ORANGE, "s"))
    for label, agreement, colour, marker in lines:
        if agreement.expected is not None:
            bins = agreement.expected.reliability
            axes.plot([b.expected for b in bins], [b.human for b in bins], color=colour, marker=marker,
                      markersize=4.5, label=label)  # fmt: skip
    axes.set_xlabel("expected grade of the judge, mean of each bin")
    axes.set_ylabel("mean grade of people")
    axes.set_title("reliability", fontsize=10)
    axes.grid(color="0.92")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9)
