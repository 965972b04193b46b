"""Results of `gradeloom retriever` as people read them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from gradeloom.flows.show import Page

if TYPE_CHECKING:
    from gradeloom.flows.evaluate import EvaluateResult
    from gradeloom.flows.mine import MineResult
    from gradeloom.flows.probe import ProbeResult
    from gradeloom.flows.retriever import RetrieverResult
    from gradeloom.tasks.evaluate.retrieval import Evaluation


def trained(result: RetrieverResult, ui: str | None) -> None:
    """The end of `retriever train`.

    Args:
        result: how it ended.
        ui: where Prefect shows the run, if it does.
    """
    page = Page()
    page.path("model: ", result.model)
    page.line(f"steps: {result.steps:,}")
    if result.accounting:
        page.line()
        _accounting(page, result.accounting)
    if result.evaluation is not None:
        page.line()
        _evaluation(page, result.evaluation)
    if result.bias is not None:
        page.line()
        _bias(page, result.bias)
    page.line()
    if result.evaluation is not None:
        page.path("results: ", result.folder / "evaluation")
    for name, path in result.plots():
        page.path(f"{name}: ", path)
    page.path("this run in the Prefect UI: ", f"{ui} (if nothing answers there: `gradeloom ui`)" if ui
              else "not recorded; start `gradeloom ui` before a run")  # fmt: skip
    page.line("next:")
    page.path(
        "  ", f"gradeloom retriever evaluate --config retriever-evaluate --retriever trained={result.model}"
    )


def evaluated(result: EvaluateResult) -> None:
    """The end of `retriever evaluate`."""
    page = Page()
    _evaluation(page, result.evaluation)
    page.line()
    page.path("results: ", result.folder)
    page.path("runs: ", result.folder / "runs")


def mined(result: MineResult) -> None:
    """The end of `retriever mine`."""
    page = Page()
    for name, number in result.accounting.items():
        page.line(f"{name}: {number:,}")
    if result.out is None:
        page.line(f"no file was written: {result.stopped}")
        return
    page.path("judgements: ", result.out)
    page.line("next: add the collection to the training's `data` once more, with these judgements:")
    page.path("  ", f"{{name: negatives, …, qrels: {result.out}}}")


def probed(result: ProbeResult) -> None:
    """The end of `retriever probe`."""
    page = Page()
    table = result.table()
    page.table(table.header, table.rows)
    page.line()
    for sentence in result.said:
        page.line(sentence)
    page.line()
    page.path("results: ", result.folder)


def _accounting(page: Page, accounting: dict[str, dict[str, int]]) -> None:
    columns = list(dict.fromkeys(name for counts in accounting.values() for name in counts))
    page.table(
        ("data", *(name.replace("_", " ") for name in columns)),
        [(source, *(counts.get(name, 0) for name in columns)) for source, counts in accounting.items()],
    )


def _evaluation(page: Page, evaluation: Evaluation) -> None:
    table = evaluation.table()
    page.table(table.header, table.rows)
    page.line(table.note, style="dim")
    comparisons = evaluation.comparison_table()
    if comparisons.rows:
        page.line()
        page.table(comparisons.header, comparisons.rows)
        page.line(comparisons.note, style="dim")


def _bias(page: Page, bias: dict[str, Any]) -> None:
    """Source bias; see `gradeloom.tasks.evaluate.bias`."""

    def cell(value: float | None, interval: Sequence[float] | None, form: str) -> str:
        if value is None:
            return "-"
        return f"{value:{form}}" + (
            f" ({interval[0]:{form}} .. {interval[1]:{form}})" if interval is not None else ""
        )

    rows = [
        (when, cell(bias[when]["w_minus_half"], bias[when]["w_interval"], "+.3f"),
         cell(bias[when]["d"], bias[when]["d_interval"], "+.1f"))
        for when in ("before", "after")
    ]  # fmt: skip
    change = bias["change"]
    rows.append(
        ("change", cell(change["w"], change["w_interval"], "+.3f"),
         cell(change["d"], change["d_interval"], "+.1f"))
    )  # fmt: skip
    page.table(("source bias", "w - 1/2", "D, %"), rows)
    page.line(
        f"w - 1/2 above 0 and D below 0 favour what a language model wrote ({change['queries']} queries, "
        "95% intervals)",
        style="dim",
    )
