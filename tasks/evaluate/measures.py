"""Graded retrieval measures per query, through ir-measures (trec_eval's own code where it has the measure).

| name | value |
|---|---|
| `nDCG@k` | gain g (Järvelin & Kekäläinen 2002; trec_eval's ndcg_cut), discount 1/log2(rank + 1) |
| `nDCG-exp@k` | gain 2^g - 1 (Burges et al. 2005), same discount |
| `MRR@k` | 1 / rank of the first relevant passage, 0 beyond k |
| `R@k`, `P@k` | share of the relevant found by rank k; share of k that is relevant |
| `AP` | average precision |
| `unjudged@k` | share of the first k (of all, if fewer were retrieved) without a judgement |

`nDCG`, `nDCG-exp`, `MRR` and `AP` go without `@k`, too: the whole ranking. A gain is the grade minus
`gain_offset`, at least 0; relevant is a grade of `binary_at` or more, gain_offset or not.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gradeloom.schemas.errors import InputError
from gradeloom.tasks.evaluate.trec import ranked

if TYPE_CHECKING:
    from gradeloom.tasks.collection import Qrels, Run

NAMES = "nDCG@k, nDCG-exp@k, MRR@k, R@k, P@k, AP, unjudged@k"
_NAME = re.compile(r"(nDCG-exp|nDCG|MRR|R|P|AP|unjudged)(?:@([1-9][0-9]{0,8}))?")
_NEED_CUTOFF = frozenset({"R", "P", "unjudged"})
MOST_GAIN = 1 << 20  # trec_eval makes a table with one entry for every whole gain up to the highest


def measure(
    run: Run, qrels: Qrels, names: Sequence[str], *, binary_at: float = 1, gain_offset: float = 0
) -> dict[str, dict[str, float]]:
    """Values of a run, for every judged query.

    As in trec_eval (with `-c`): queries of the run without judgements do not count; a judged query that the
    run lacks counts 0 (unjudged@k, too: nothing was retrieved); so does a query without any relevant
    judgement, which stays in the mean; of equal scores the greater passage id ranks first.

    Args:
        run: query id -> passage id -> score.
        qrels: query id -> passage id -> grade. nDCG wants whole gains; the others take any grade.
        names: of measures, see above.
        binary_at: grades from here are relevant.
        gain_offset: taken off every grade to get its gain; negative gains become 0.

    Returns:
        Measure -> query id -> value, queries in the order of the qrels.

    Raises:
        InputError: an unknown measure; a gain that is not whole, or beyond what trec_eval can take; an id
            with a NUL character, where trec_eval's strings end.
    """
    measures = {name: _parse(name) for name in names}
    judged = {query: grades for query, grades in qrels.items() if grades}
    # Ranks in place of scores: trec_eval would compare these as 32-bit floats.
    rankings = {query: ranked(run[query]) for query in judged if run.get(query)}
    ranks = {
        query: {passage: float(len(ranking) - n) for n, passage in enumerate(ranking)}
        for query, ranking in rankings.items()
    }
    _require_no_nul(judged)
    _require_no_nul(ranks)
    values: dict[str, dict[str, float]] = {}
    for kinds, grade in (
        (("nDCG",), lambda g: _gain(g, gain_offset)),
        (("nDCG-exp",), lambda g: _exponential(_gain(g, gain_offset))),
        (("MRR", "R", "P", "AP", "unjudged"), lambda g: int(g >= binary_at)),
    ):
        wanted = {name: what for name, (kind, what) in measures.items() if kind in kinds}
        if wanted:
            values |= _values(ranks, _graded(judged, grade), wanted)
    for name, (kind, _) in measures.items():
        if kind == "unjudged":
            values[name] = {q: 1 - v if q in ranks else 0.0 for q, v in values[name].items()}
    return {name: values[name] for name in names}


def _require_no_nul(of: Mapping[str, Iterable[str]]) -> None:
    for query, passages in of.items():
        for what, one in (("query", query), *(("passage", passage) for passage in passages)):
            if "\0" in one:
                raise InputError(f"{what} id {one!r}: expected no NUL character")


def _parse(name: str) -> tuple[str, Any]:
    """A measure's kind, and ir-measures' object for it."""
    import ir_measures

    found = _NAME.fullmatch(name)
    if found is None or (found[2] is None and found[1] in _NEED_CUTOFF):
        raise InputError(f"unknown measure {name!r}; there are {NAMES}", field="measures")
    of = {
        "nDCG": ir_measures.nDCG, "nDCG-exp": ir_measures.nDCG, "MRR": ir_measures.RR, "R": ir_measures.R,
        "P": ir_measures.P, "AP": ir_measures.AP, "unjudged": ir_measures.Judged,
    }  # fmt: skip
    return found[1], of[found[1]] if found[2] is None else of[found[1]] @ int(found[2])


def _values(
    ranks: Run, qrels: dict[str, dict[str, int]], wanted: dict[str, Any]
) -> dict[str, dict[str, float]]:
    import ir_measures

    values: dict[Any, dict[str, float]] = {what: {} for what in wanted.values()}
    for value in ir_measures.iter_calc(list(values), qrels, ranks):
        values[value.measure][value.query_id] = float(value.value)
    return {name: {query: values[what][query] for query in qrels} for name, what in wanted.items()}


def _graded(qrels: Qrels, grade: Callable[[float], int]) -> dict[str, dict[str, int]]:
    graded: dict[str, dict[str, int]] = {}
    for query, grades in qrels.items():
        try:
            graded[query] = {passage: grade(g) for passage, g in grades.items()}
        except ValueError as error:
            raise InputError(f"judgements of query {query!r}: {error}", field="gain_offset") from None
    return graded


def _gain(grade: float, offset: float) -> int:
    gain = grade - offset
    if not float(gain).is_integer():
        raise ValueError(
            f"nDCG wants whole gains, got {gain:g} (grade {grade:g}, gain_offset {offset:g}); "
            "round the grades, or leave nDCG out of the measures"
        )
    if gain > MOST_GAIN:
        raise ValueError(f"nDCG takes gains up to {MOST_GAIN}, got {gain:g}")
    return max(0, int(gain))


def _exponential(gain: int) -> int:
    if gain > MOST_GAIN.bit_length() - 1:
        raise ValueError(f"nDCG-exp takes gains up to {MOST_GAIN.bit_length() - 1}, got {gain}")
    return (1 << gain) - 1
