"""What `gradeloom judge calibrate` found, as people read it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from gradeloom.flows.show import Page

if TYPE_CHECKING:
    from gradeloom.schemas.calibration import Agreement, Calibration, Estimate, PairCounts, SystemRanking


def calibrated(calibration: Calibration, usage: Mapping[str, Any] | None, written: Mapping[str, str]) -> None:
    """The figures of a calibration.

    Args:
        calibration: what was found.
        usage: requests and tokens of a judge that was run.
        written: what -> the file it was written to.
    """
    page = Page()
    page.line(f"judge: {calibration.judge.name}")
    page.line(f"people: {calibration.human.qrels.name}" + _limited(calibration.human.limit))
    page.line(f"domain: {calibration.domain or 'not given (--domain NAME)'}")
    page.line(f"pairs: {_pairs(calibration.pairs)}")
    if usage is not None:
        page.line(
            f"requests: {usage['requests_sent']:,} sent, {usage['requests_cached']:,} answered before; "
            f"{usage['prompt_tokens_sent'] + usage['completion_tokens_sent']:,} tokens"
        )
    page.line()
    _figures(page, calibration)
    page.line()
    _confusion(page, calibration.agreement)
    if calibration.ranking is not None:
        page.line()
        _ranking(page, calibration.ranking)
    if written:
        page.line()
    for what, file in written.items():
        page.path(f"{what}: ", file)
    if "mapping" in written:
        page.line("next: map another set's expected grades with it")
        page.path(
            "  ", f"gradeloom judge calibrate --qrels OTHER --labels OTHER --isotonic {written['mapping']}"
        )


def _limited(limit: int | None) -> str:
    return "" if limit is None else f", the first {limit:,} queries"


def _pairs(pairs: PairCounts) -> str:
    silent = [f"{n:,} {reason}" for reason, n in pairs.unanswered.items()]
    parts = [
        f"{pairs.human:,} graded by people, {pairs.both:,} of them by the judge ({pairs.queries:,} queries)",
        f"{pairs.abstained:,} abstentions",
        *([f"without an answer: {', '.join(silent)}"] if silent else []),
        f"{pairs.missing_judge:,} unknown to the judge",
        f"{pairs.missing_human:,} graded by the judge alone",
    ]
    return "; ".join(parts)


def _figures(page: Page, calibration: Calibration) -> None:
    columns = {"judge": calibration.agreement}
    if calibration.isotonic is not None:
        columns["mapped (isotonic)"] = calibration.isotonic.agreement
    shown = calibration.agreement
    rows = [
        ("kappa, all grades", *(_estimate(a.kappa) for a in columns.values())),
        ("kappa, quadratic", *(_estimate(a.quadratic_kappa) for a in columns.values())),
        (f"kappa, from {shown.binary_at} on", *(_estimate(a.binary_kappa) for a in columns.values())),
        ("equal grades", *(_number(a.exact) for a in columns.values())),
    ]
    if shown.expected is not None:
        expected = [a.expected for a in columns.values()]
        rows.append(("Pearson, expected grade", *(_number(e.pearson if e else None) for e in expected)))
        rows.append(("RMSE, expected grade", *(_number(e.rmse if e else None) for e in expected)))
    page.table(("", *columns), rows)
    page.line("95% intervals by bootstrap over queries", style="dim")


def _confusion(page: Page, agreement: Agreement) -> None:
    page.table(
        ("people", *(f"judge {grade}" for grade in agreement.grades), "abstained", "precision", "recall"),
        [
            (f"grade {one.grade}", *row, silent, _number(one.precision), _number(one.recall))
            for one, row, silent in zip(
                agreement.per_grade, agreement.matrix, agreement.abstained, strict=True
            )
        ],
    )


def _ranking(page: Page, ranking: SystemRanking) -> None:
    page.table(
        ("run", f"{ranking.measure}, people", f"{ranking.measure}, judge"),
        [(s.run.name, f"{s.human:.3f}", f"{s.judge:.3f}") for s in ranking.systems],
    )
    tau = ranking.kendall_tau
    page.line(
        f"Kendall's tau: {'not defined' if tau is None else f'{tau:.3f}'} ({ranking.queries:,} queries)"
    )
    if ranking.left_out:
        page.line(
            f"{ranking.left_out:,} passages that the judge did not grade were taken out of the rankings",
            style="dim",
        )


def _estimate(estimate: Estimate) -> str:
    interval = ""
    if estimate.low is not None and estimate.high is not None:
        interval = f" ({estimate.low:.3f} .. {estimate.high:.3f})"
    return _number(estimate.value) + interval


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
