"""The picture of an evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradeloom.tasks.evaluate.retrieval import LEVEL

if TYPE_CHECKING:
    from gradeloom.tasks.evaluate.retrieval import Evaluation

MEASURE = "nDCG@10"

_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")  # Okabe and Ito
_MARKERS = "os^vDP"


def plot(result: Evaluation, path: Path) -> None:
    """Draw the means of every retriever on every set with their intervals, the baseline in black.

    Args:
        result: nDCG@10 is drawn where it was measured, else the first measure.
        path: of the PNG.
    """
    from matplotlib.figure import Figure  # without pyplot: Agg, and no state of the process

    measure = MEASURE if MEASURE in result.measures else result.measures[0]
    sets, retrievers = result.sets, result.retrievers
    step = 0.8 / len(retrievers)
    width = max(5.5, 1.5 + len(sets) * max(1.1, 0.3 * len(retrievers)))
    figure = Figure(figsize=(width, 4.2), layout="constrained", dpi=150)
    axes = figure.add_subplot()
    others = [retriever for retriever in retrievers if retriever != result.baseline]
    for i, retriever in enumerate(retrievers):
        found = [
            (at, mean) for at, name in enumerate(sets) if (mean := result.mean(name, retriever, measure))
        ]
        if not found:
            continue
        x = [at + (i - (len(retrievers) - 1) / 2) * step for at, _ in found]
        y = [mean.mean for _, mean in found]
        # A percentile interval can, for very skewed values, leave out the mean itself.
        down = [max(0.0, mean.mean - mean.low) for _, mean in found]
        up = [max(0.0, mean.high - mean.mean) for _, mean in found]
        if retriever == result.baseline:
            style: dict[str, Any] = {"color": "black", "marker": "D", "markerfacecolor": "white"}
            axes.hlines(y, [at - 0.45 for at, _ in found], [at + 0.45 for at, _ in found],
                        color="black", linewidth=0.8, linestyle=":")  # fmt: skip
        else:
            k = others.index(retriever)
            style = {"color": _COLOURS[k % len(_COLOURS)],
                     "marker": _MARKERS[k // len(_COLOURS) % len(_MARKERS)]}  # fmt: skip
        label = f"{retriever} (baseline)" if retriever == result.baseline else retriever
        axes.errorbar(
            x, y, yerr=[down, up], linestyle="none", capsize=2.5, markersize=5.5, label=label, **style
        )
    axes.set_xticks(range(len(sets)), [f"{name}\n{_queries(result, name, measure)} queries" for name in sets])
    axes.set_xlim(-0.5, len(sets) - 0.5)
    for edge in range(1, len(sets)):
        axes.axvline(edge - 0.5, color="0.9", linewidth=0.8)
    axes.set_ylabel(measure)
    axes.set_title(f"{measure} per set, with {LEVEL:.0%} intervals (bootstrap over queries)", fontsize=10)
    axes.grid(axis="y", color="0.92")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=min(len(retrievers), max(2, int(width // 2))),
                  frameon=False, fontsize=9)  # fmt: skip
    figure.savefig(path, format="png")


def _queries(result: Evaluation, name: str, measure: str) -> int:
    return max((m.queries for m in result.means if (m.set, m.measure) == (name, measure)), default=0)
