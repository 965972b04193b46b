"""Graded qrels with declared transforms, mixed into lists to train on.

    collection -> transformed (which judgements, with which grades) -> mix (one list a query) -> dataset

What is mixed are ids and grades. A text stays where its collection holds it and is looked up when a row of
the data set is read.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import floor, nan
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from gradeloom.schemas.errors import InputError
from gradeloom.schemas.retriever import TrainingSource
from gradeloom.schemas.rows import digest
from gradeloom.tasks.collection import Collection, Qrels
from gradeloom.tasks.source_forms import lines

if TYPE_CHECKING:
    import datasets


# --- transforms -----------------------------------------------------------------------------


def transformed(collection: Collection, source: TrainingSource, *, seed: int) -> Qrels:
    """The judgements that a source gives to training, in the order of the collection's queries.

    Judgements whose query or passage the collection does not hold, or holds without text, are left out
    first. Then, in the order of the fields of `TrainingSource`:

    1. `label`: which grade each has; one without (the judge abstained) is left out.
    2. `exclude_queries`, then `limit`: the first N of the queries left; then `share`: so many of these
       (rounded, at least one), drawn by the seed; a smaller share is part of a larger one.
    3. `keep`, then `map`, then `constant`: by grade, and a new one.
    4. Per query `top`, `bottom` of the rest, `random` of the rest; equal grades are drawn among by the
       seed. None of the three: everything.

    What is drawn depends on the seed and the ids alone, not on the order of judgements.

    Args:
        collection: with the judgements, and those by other labels.
        source: the transforms; where it says the collection lies is not looked at.
        seed: of what is drawn.

    Returns:
        Query id -> passage id -> grade; no query is without a judgement.

    Raises:
        InputError: the collection has no such label, or the file of excluded queries cannot be read.
    """
    return _transform(collection, source, seed)[0]


def _transform(collection: Collection, source: TrainingSource, seed: int) -> tuple[Qrels, Counter[str]]:
    """`transformed`, and what each step dropped, in judgements."""
    dropped: Counter[str] = Counter()
    qrels = _labelled(collection, source, dropped)

    def only(queries: Iterable[str], reason: str) -> None:
        kept = set(queries)
        for query_id in [query_id for query_id in qrels if query_id not in kept]:
            dropped[reason] += len(qrels.pop(query_id))

    if source.exclude_queries is not None:
        only(qrels.keys() - _ids(source.exclude_queries), "exclude_queries")
    if source.limit is not None:
        only(list(qrels)[: source.limit], "limit")
    if source.share < 1:
        size = max(1, floor(source.share * len(qrels) + 0.5))
        only(sorted(qrels, key=lambda query_id: digest(str(seed), query_id, length=32))[:size], "share")

    result: Qrels = {}
    for query_id, grades in qrels.items():
        graded = _regraded(grades, source)
        dropped["keep"] += len(grades) - len(graded)
        chosen = _chosen(query_id, graded, source, seed)
        dropped["top, bottom, random"] += len(graded) - len(chosen)
        if chosen:
            result[query_id] = chosen
    return result, dropped


def _labelled(collection: Collection, source: TrainingSource, dropped: Counter[str]) -> Qrels:
    """The grades of the wanted label, of queries and passages that have a text."""
    if source.label != "grade" and source.label not in collection.grades:
        raise InputError(
            f"source '{source.name}' has no label '{source.label}': releases have, without `qrels` of a file",
            field="label",
        )
    labels = collection.qrels if source.label == "grade" else collection.grades[source.label]
    dropped["query not there"] = sum(
        len(grades) for query_id, grades in collection.qrels.items() if query_id not in collection.queries
    )
    result: Qrels = {}
    for query_id in collection.queries:
        found: dict[str, float] = {}
        of_query = labels.get(query_id, {})
        for passage_id in collection.qrels.get(query_id, {}):
            if not collection.passages.get(passage_id):
                dropped["passage not there"] += 1
            elif passage_id not in of_query:
                dropped["no label"] += 1
            else:
                found[passage_id] = of_query[passage_id]
        if found:
            result[query_id] = found
    return result


def _ids(path: str) -> set[str]:
    try:
        return {line.decode().strip() for _, line in lines(Path(path))}
    except UnicodeDecodeError as error:
        raise InputError("query ids, one a line, in UTF-8 were expected", file=path) from error


def _regraded(grades: Mapping[str, float], source: TrainingSource) -> dict[str, float]:
    low, high = source.keep if source.keep is not None else (-float("inf"), float("inf"))
    kept = {passage_id: grade for passage_id, grade in grades.items() if low <= grade <= high}
    if source.constant is not None:
        return dict.fromkeys(kept, source.constant)
    return {passage_id: source.map.get(grade, grade) for passage_id, grade in kept.items()}


def _chosen(query_id: str, grades: dict[str, float], source: TrainingSource, seed: int) -> dict[str, float]:
    """The top, bottom and random ones; everything when none of the three is asked for."""
    if source.top is None and source.bottom is None and source.random is None:
        return grades
    drawn = sorted(grades, key=lambda passage_id: digest(str(seed), query_id, passage_id, length=32))
    left = sorted(drawn, key=lambda passage_id: -grades[passage_id])
    top, left = left[: source.top or 0], left[source.top or 0 :]
    split = max(0, len(left) - (source.bottom or 0))
    left, bottom = left[:split], left[split:]
    rest = set(left)
    random = [passage_id for passage_id in drawn if passage_id in rest][: source.random or 0]
    return {passage_id: grades[passage_id] for passage_id in (*top, *bottom, *random)}


# --- mixing ---------------------------------------------------------------------------------


class Ranked(NamedTuple):
    """A passage of a list: in which of the mixed collections, its id there, and its grade."""

    part: int
    passage_id: str
    grade: float


@dataclass(frozen=True, slots=True)
class TrainingList:
    """A query and its passages, from the highest grade to the lowest."""

    query_id: str
    query: str
    passages: tuple[Ranked, ...]


@dataclass(frozen=True)
class TrainingLists:
    """What a retriever is trained on.

    Attributes:
        lists: one a query, in the order in which sources and their collections name them.
        width: K, the passages of a row of `dataset()`; no list has more.
        accounting: per source, in judgements: `judgements` came in (of so many `queries`), so many were
            dropped for each reason, the rest are `used`, in so many `lists`. Reasons: `query not there`,
            `passage not there` (or without text), `no label`, a transform's name, `repeated` (a passage
            that stands in the list with a grade as high), `nothing to learn` (see `mix`), `cut` to K.
        texts: per mixed collection, passage id -> text.
    """

    lists: tuple[TrainingList, ...]
    width: int
    accounting: dict[str, dict[str, int]]
    texts: tuple[Mapping[str, str], ...] = field(repr=False)

    @cached_property
    def digest(self) -> str:
        """32 hex digits over K and every list's ids, grades and texts, in their order."""
        each = (
            digest(
                one.query_id,
                one.query,
                *(part for k in range(len(one.passages)) for part in self._told(one, k)),
            )
            for one in self.lists
        )
        return digest(str(self.width), *each, length=32)

    def _told(self, one: TrainingList, k: int) -> tuple[str, str, str]:
        return one.passages[k].passage_id, repr(float(one.passages[k].grade)), self.text(one, k)

    def text(self, one: TrainingList, k: int) -> str:
        """The text of a list's passage k (0 is the highest graded); empty where it has no more."""
        if k >= len(one.passages):
            return ""
        passage = one.passages[k]
        return self.texts[passage.part][passage.passage_id]

    def dataset(self) -> datasets.Dataset:
        """The lists as sentence-transformers' trainer reads them; no text is copied.

        Columns: `query`, `passage_0` ... `passage_{K-1}` from the highest grade to the lowest, "" where a
        list has no more, and `label`, K grades, NaN where a passage is absent.

        The Arrow table holds the number of each list; a transform puts texts in their place when rows are
        read. Selecting, shuffling and removing columns keep the transform. What leaves it out
        (`with_format`, `save_to_disk`) sees numbers, and in another process it does not unpickle.
        """
        import datasets
        import pyarrow as pa

        numbers = pa.array([str(number) for number in range(len(self.lists))], pa.string())
        columns = ["query", *(f"passage_{k}" for k in range(self.width))]
        labels = (
            [passage.grade for passage in one.passages] + [nan] * (self.width - len(one.passages))
            for one in self.lists
        )
        table = pa.table(
            {**dict.fromkeys(columns, numbers), "label": pa.array(list(labels), pa.list_(pa.float64()))}
        )
        result = datasets.Dataset(table, fingerprint=self.digest)
        result.set_transform(_Texts(self))
        return result


def mix(
    parts: Sequence[tuple[TrainingSource, Collection]], *, passages: int | None, seed: int
) -> TrainingLists:
    """Transform each source and join them into lists.

    - Sources that have the same query, id and text, give it one list: real positives (`constant: 3`) and
      random BM25 passages (`constant: 1`) go with synthetic passages of grades 3 to 0.
    - A passage, by its text, stands in a list once: with its highest grade, from the first source that
      gives it that. So a mined negative that is a known positive is no negative.
    - A list whose passages all have one grade of 0 or less is dropped: other queries' passages are 0, too,
      so there is nothing to tell apart. A list of one higher grade (real positives alone) stays: the
      batch has its negatives, though the losses over own passages alone (`ordinal`) learn nothing from it.
    - A longer list than K is cut so that its grades stay spread: in turns over its grades, each turn takes
      one passage of every grade that has one left; where less than a turn is left, the grades are
      taken evenly from highest to lowest. Which passage of a grade is drawn by the seed.

    Args:
        parts: sources with the collections that they name.
        passages: K; None: as many as the longest list has.
        seed: of everything drawn.

    Raises:
        InputError: no list is left, or as `transformed`.
    """
    counts: list[Counter[str]] = []
    joined: dict[tuple[str, str], list[Ranked]] = {}
    for part, (source, collection) in enumerate(parts):
        qrels, dropped = _transform(collection, source, seed)
        counts.append(dropped)
        for query_id, grades in qrels.items():
            found = joined.setdefault((query_id, collection.queries[query_id]), [])
            found += (Ranked(part, passage_id, grade) for passage_id, grade in grades.items())

    texts = tuple(collection.passages for _, collection in parts)
    lists = []
    for (query_id, query), found in joined.items():
        ranked = _without_repeats(found, texts, counts)
        if len({passage.grade for passage in ranked}) == 1 and ranked[0].grade <= 0:
            _count(counts, ranked, "nothing to learn")
            continue
        kept = ranked if passages is None else _cut(query_id, ranked, passages, seed)
        _count(counts, set(ranked) - set(kept), "cut")
        _count(counts, kept, "used")
        for part in {passage.part for passage in kept}:
            counts[part]["lists"] += 1
        lists.append(TrainingList(query_id, query, tuple(kept)))

    accounting = {
        source.name: _account(collection, dropped)
        for (source, collection), dropped in zip(parts, counts, strict=True)
    }
    if not lists:
        raise InputError(f"no list is left to train on ({_said(accounting)})", field="data")
    width = passages if passages is not None else max(len(one.passages) for one in lists)
    return TrainingLists(tuple(lists), width, accounting, texts)


def _without_repeats(
    found: Sequence[Ranked], texts: Sequence[Mapping[str, str]], counts: list[Counter[str]]
) -> list[Ranked]:
    """From the highest grade to the lowest; of equal texts the first in this order, then by source and id."""
    ordered = sorted(found, key=lambda passage: (-passage.grade, passage.part, passage.passage_id))
    seen: set[str] = set()
    ranked = []
    for passage in ordered:
        text = texts[passage.part][passage.passage_id]
        if text in seen:
            counts[passage.part]["repeated"] += 1
        else:
            seen.add(text)
            ranked.append(passage)
    return ranked


def _cut(query_id: str, ranked: list[Ranked], size: int, seed: int) -> list[Ranked]:
    """At most `size` of them, in their order; see `mix`."""
    if len(ranked) <= size:
        return ranked

    def drawn(passage: Ranked) -> str:
        return digest(str(seed), query_id, passage.passage_id, length=32)

    levels = [
        sorted((passage for passage in ranked if passage.grade == grade), key=drawn, reverse=True)
        for grade in sorted({passage.grade for passage in ranked}, reverse=True)
    ]
    kept: set[Ranked] = set()
    while len(kept) < size:
        turn = [level for level in levels if level]
        for index in _evenly(len(turn), size - len(kept)):
            kept.add(turn[index].pop())
    return [passage for passage in ranked if passage in kept]


def _evenly(n: int, size: int) -> Iterator[int]:
    """`size` of the numbers 0..n-1, from first to last at even distances; all when there are no more."""
    if size >= n:
        yield from range(n)
    elif size == 1:
        yield 0
    else:
        yield from (floor(i * (n - 1) / (size - 1) + 0.5) for i in range(size))


def _count(counts: list[Counter[str]], passages: Iterable[Ranked], reason: str) -> None:
    for passage in passages:
        counts[passage.part][reason] += 1


def _account(collection: Collection, counts: Counter[str]) -> dict[str, int]:
    """What came in, what was dropped and why, what is left; the sum is asserted."""
    judgements = sum(len(grades) for grades in collection.qrels.values())
    reasons = {reason: n for reason, n in counts.items() if n and reason not in ("used", "lists")}
    assert judgements == sum(reasons.values()) + counts["used"], (judgements, counts)
    return {
        "queries": sum(1 for grades in collection.qrels.values() if grades),
        "judgements": judgements,
        **reasons,
        "used": counts["used"],
        "lists": counts["lists"],
    }


def _said(accounting: Mapping[str, Mapping[str, int]]) -> str:
    return "; ".join(
        f"{name}: " + ", ".join(f"{reason} {n}" for reason, n in counts.items())
        for name, counts in accounting.items()
    )


# --- texts ----------------------------------------------------------------------------------


class _Texts:
    """Puts texts where a row holds the numbers of its list.

    `datasets` copies and pickles a transform with every operation, to tell data sets apart; the lists know
    better what they are, so that a copy is the same object and a pickle holds its digest.
    """

    def __init__(self, lists: TrainingLists) -> None:
        self.lists = lists
        _alive[lists.digest] = self

    def __call__(self, batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        return {column: self._column(column, values) for column, values in batch.items()}

    def _column(self, column: str, values: list[Any]) -> list[Any]:
        if column == "query":
            return [self.lists.lists[int(number)].query for number in values]
        if column.startswith("passage_"):
            k = int(column.removeprefix("passage_"))
            return [self.lists.text(self.lists.lists[int(number)], k) for number in values]
        return values

    def __deepcopy__(self, memo: dict[int, Any]) -> _Texts:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopened, (self.lists.digest,)


_alive: weakref.WeakValueDictionary[str, _Texts] = weakref.WeakValueDictionary()


def _reopened(print_: str) -> _Texts:
    found = _alive.get(print_)
    if found is None:
        raise RuntimeError("training lists are not pickled: another process has to read and mix them itself")
    return found
