"""The filters of one list, each a pure function of its settings and the row."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from gradeloom.schemas.config import (
    DecontaminateFilter,
    FilterConfig,
    LengthFilter,
    NearDuplicatesFilter,
    QueryCopiedFilter,
    RefusalFilter,
    SiblingsFilter,
    StructureFilter,
)
from gradeloom.schemas.rows import DecisionRow, ListRow
from gradeloom.tasks.filter.decontaminate import Contamination
from gradeloom.tasks.filter.refusals import find_meta_talk, find_refusal
from gradeloom.tasks.filter.text import common_subsequence, jaccard, rouge_l, words


@dataclass(frozen=True, slots=True)
class Verdict:
    """Why a list is rejected.

    Attributes:
        reason: the code.
        detail: more for people.
        grade: the intended grade of the passage that decided; None when the query did.
    """

    reason: str
    detail: str
    grade: int | None


def filter_list(
    filters: Sequence[FilterConfig],
    row: ListRow,
    *,
    grades: Sequence[int],
    contamination: Contamination | None = None,
) -> DecisionRow:
    """The decision on one list: filters in the declared order, the first that fails decides.

    Args:
        filters: the config's filters; `near_duplicates` is skipped: it sees the whole data set and
            has a stage of its own.
        row: a kept row of stage `generate`.
        grades: the config's grades.
        contamination: the loaded evaluation sets, when `decontaminate` is among the filters.
    """
    for config in filters:
        verdict = _apply(config, row, grades, contamination)
        if verdict is not None:
            return DecisionRow(
                id=row.id,
                ordinal=row.ordinal,
                status="rejected",
                reason=verdict.reason,
                detail=verdict.detail,
                grade=verdict.grade,
            )
    return DecisionRow(id=row.id, ordinal=row.ordinal)


def _apply(
    config: FilterConfig, row: ListRow, grades: Sequence[int], contamination: Contamination | None
) -> Verdict | None:
    match config:
        case StructureFilter():
            return structure(row, grades)
        case LengthFilter():
            return length(config, row)
        case RefusalFilter():
            return refusal(row, grades)
        case QueryCopiedFilter():
            return query_copied(config, row)
        case SiblingsFilter():
            return siblings(config, row)
        case DecontaminateFilter():
            return decontaminate(row, contamination)
        case NearDuplicatesFilter():
            return None


def structure(row: ListRow, grades: Sequence[int]) -> Verdict | None:
    """Every grade once, none without a word: `missing_level`, `empty_passage`."""
    count = Counter(passage.grade for passage in row.passages)
    for grade in sorted({*grades, *count}, reverse=True):
        if count[grade] != int(grade in grades):
            expected = ", ".join(map(str, sorted(grades, reverse=True)))
            got = ", ".join(str(passage.grade) for passage in row.passages) or "none"
            return Verdict("missing_level", f"expected grades {expected} once each, got {got}", grade)
    for passage in row.passages:
        if not words(passage.text):
            return Verdict("empty_passage", "no word in it", passage.grade)
    return None


def length(config: LengthFilter, row: ListRow) -> Verdict | None:
    """Between `min_words` and `max_words` words, both allowed: `too_short`, `too_long`.

    Punctuation does not count; "don't" is one word; in scripts without spaces every character is.
    """
    for passage in row.passages:
        n = len(words(passage.text))
        if n < config.min_words:
            return Verdict("too_short", f"{n} words, at least {config.min_words} wanted", passage.grade)
        if n > config.max_words:
            return Verdict("too_long", f"{n} words, at most {config.max_words} wanted", passage.grade)
    return None


def refusal(row: ListRow, grades: Sequence[int]) -> Verdict | None:
    """Refusals and talk about the task: `refusal`, `meta_talk`."""
    for passage in row.passages:
        found = find_refusal(passage.text)
        if found is not None:
            return Verdict("refusal", f"says {found!r}", passage.grade)
        found = find_meta_talk(passage.text, row.query, grades)
        if found is not None:
            return Verdict("meta_talk", f"says {found!r}", passage.grade)
    return None


def query_copied(config: QueryCopiedFilter, row: ListRow) -> Verdict | None:
    """A passage that is the query again, or little more: `query_copied`."""
    query = words(row.query)
    for passage in row.passages:
        share = copied_share(query, words(passage.text))
        if share > config.threshold:
            return Verdict("query_copied", f"{share:.2f} of its words are the query's", passage.grade)
    return None


def copied_share(query: Sequence[str], passage: Sequence[str]) -> float:
    """The share (0..1) of a passage's words that copies of the query make up.

    Copies are found as the longest common subsequence of the passage with the query said over and
    over, as often as fits: a word put in or left out does not hide a copy, and two copies count twice.
    """
    if not query or not passage:
        return 0.0
    times = -(-len(passage) // len(query))
    return common_subsequence(list(query) * times, passage) / len(passage)


def siblings(config: SiblingsFilter, row: ListRow) -> Verdict | None:
    """Two passages of one list too alike: `siblings_alike`; `grade` is the lower one of the two."""
    alike = rouge_l if config.measure == "rouge_l" else _word_overlap
    taken = [(passage.grade, words(passage.text)) for passage in row.passages]
    for (a, left), (b, right) in combinations(taken, 2):
        similarity = alike(left, right)
        if similarity > config.threshold:
            pair = f"passages of grades {max(a, b)} and {min(a, b)}"
            return Verdict("siblings_alike", f"{pair}: {config.measure} {similarity:.3f}", min(a, b))
    return None


def _word_overlap(a: Sequence[str], b: Sequence[str]) -> float:
    return jaccard(set(a), set(b))


def decontaminate(row: ListRow, contamination: Contamination | None) -> Verdict | None:
    """Overlap with evaluation sets: `contaminated_query`, `contaminated_passage`."""
    assert contamination is not None, "decontaminate: the evaluation sets were not loaded"
    name = contamination.query(row.query)
    if name is not None:
        return Verdict("contaminated_query", f"a query of {name}", None)
    for passage in row.passages:
        hit = contamination.passage(passage.text)
        if hit is not None:
            return Verdict("contaminated_passage", f"shares {hit.ngram!r} with {hit.name}", passage.grade)
    return None
