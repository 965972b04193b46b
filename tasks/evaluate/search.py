"""Exhaustive dense search: every passage is scored for every query.

Passages go through in chunks; each query keeps its best k, so that memory is that of the queries times
(k + chunk), a block of queries at a time. Scores are made where the model is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from gradeloom.schemas.errors import InputError

if TYPE_CHECKING:
    import torch

    from gradeloom.tasks.collection import Collection, Qrels, Run
    from gradeloom.tasks.encoder import Encoder

BLOCK = 1024  # queries scored at once


def queries_to_run(collection: Collection) -> dict[str, str]:
    """The queries with judgements; all of them where the collection has no judgements at all."""
    if not any(collection.qrels.values()):
        return dict(collection.queries)
    return {query: text for query, text in collection.queries.items() if collection.qrels.get(query)}


def tie_order(ids: Iterable[str]) -> list[str]:
    """Passage ids as equal scores order them: the greater id first, as trec_eval has it."""
    return sorted(ids, reverse=True)


def dense_run(
    encoder: Encoder,
    collection: Collection,
    *,
    k: int,
    pool: bool = False,
    exclude: Qrels | None = None,
    chunk: int = 50_000,
    progress: Callable[[int, int], None] | None = None,
) -> Run:
    """The k best passages of every query of `queries_to_run`, best first.

    Of equal scores the greater passage id comes first, as trec_eval has it.

    Args:
        encoder: see gradeloom.tasks.encoder.
        collection: what is searched.
        k: passages per query.
        pool: rank a query's judged passages only; no others are encoded.
        exclude: query id -> passages left out of its ranking.
        chunk: passages scored at once; changes memory, not results.
        progress: called with passages done and passages in all.

    Returns:
        Query id -> passage id -> score. A query for which no passage is left has an empty ranking.

    Raises:
        InputError: the model gives numbers that are not finite.
    """
    import torch

    queries = queries_to_run(collection)
    judged = {query: collection.qrels.get(query, {}) for query in queries} if pool else None
    ids = tie_order(
        {p for passages in judged.values() for p in passages if p in collection.passages}
        if judged is not None
        else collection.passages
    )
    if not queries or not ids:
        return {query: {} for query in queries}
    device = encoder.model.device
    vectors = torch.from_numpy(encoder.encode_queries(list(queries.values()))).to(device)
    column = {passage: n for n, passage in enumerate(ids)}
    only = _columns(judged, queries, column) if judged is not None else None
    never = _columns(exclude or {}, queries, column)
    best = [_Best(vectors[start : start + BLOCK], start, k) for start in range(0, len(vectors), BLOCK)]
    for start in range(0, len(ids), chunk):
        some = ids[start : start + chunk]
        texts = [collection.passages[passage] for passage in some]
        done = None if progress is None else _shifted(progress, start, len(ids))
        passages = torch.from_numpy(encoder.encode_passages(texts, progress=done)).to(device)
        for block in best:
            block.add(passages, start, only, never)
    rows = [row for block in best for row in block.rows()]
    return {query: {ids[n]: score for n, score in row} for query, row in zip(queries, rows, strict=True)}


class _Best:
    """The best k passages so far of a block of queries.

    Columns are kept in tie order and new ones follow after them, so of equal scores the first are taken.
    """

    def __init__(self, vectors: torch.Tensor, first: int, k: int) -> None:
        self._vectors = vectors
        self._first = first
        self._k = k
        self._scores = vectors.new_empty((len(vectors), 0))
        self._columns = self._scores.long()

    def add(
        self,
        passages: torch.Tensor,
        start: int,
        only: Sequence[NDArray[np.int64]] | None,
        never: Sequence[NDArray[np.int64]],
    ) -> None:
        """Merge passages (n, d) that stand in columns start, start + 1, ..."""
        import torch

        # In bfloat16 most scores would be ties.
        with torch.autocast(passages.device.type, enabled=False):
            scores = self._vectors @ passages.T
        if not torch.isfinite(scores).all():
            raise InputError("the model's scores are not finite numbers", field="encoder.model")
        lowest = -torch.inf
        for row, values in enumerate(scores):
            query = self._first + row
            if only is not None:
                here = torch.from_numpy(_within(only[query], start, len(passages))).to(scores.device)
                kept = values[here]
                values.fill_(lowest)
                values[here] = kept
            out = _within(never[query], start, len(passages))
            if len(out):
                values[torch.from_numpy(out).to(scores.device)] = lowest
        columns = torch.arange(start, start + len(passages), device=scores.device)
        scores = torch.cat([self._scores, scores], dim=1)
        columns = torch.cat([self._columns, columns.expand(len(scores), -1)], dim=1)
        chosen = _first_of_highest(scores, self._k)
        self._scores, self._columns = scores.gather(1, chosen), columns.gather(1, chosen)

    def rows(self) -> list[list[tuple[int, float]]]:
        """Per query (column, score), best first."""
        scores, order = self._scores.sort(dim=1, descending=True, stable=True)
        columns = self._columns.gather(1, order)
        return [
            [(n, score) for n, score in zip(*row, strict=True) if score != float("-inf")]
            for row in zip(columns.tolist(), scores.tolist(), strict=True)
        ]


def _first_of_highest(scores: torch.Tensor, k: int) -> torch.Tensor:
    """Indices (m, k), ascending, of the k highest scores (m, n) of each row; of equal ones the first.

    `topk` alone leaves open which of equal scores it takes.
    """
    import torch

    m, n = scores.shape
    if n <= k:
        return torch.arange(n, device=scores.device).expand(m, -1)
    threshold = scores.topk(k, dim=1).values[:, -1:]
    above, at = scores > threshold, scores == threshold
    room = k - above.sum(dim=1, keepdim=True)
    chosen = above | (at & (at.cumsum(dim=1, dtype=torch.int32) <= room))
    return chosen.nonzero()[:, 1].view(m, k)


def _columns(
    qrels: Mapping[str, Mapping[str, float]], queries: Iterable[str], column: Mapping[str, int]
) -> list[NDArray[np.int64]]:
    """Per query the ascending columns of its passages in `qrels`."""
    return [
        np.array(sorted(column[p] for p in qrels.get(query, {}) if p in column), np.int64)
        for query in queries
    ]


def _within(columns: NDArray[np.int64], start: int, n: int) -> NDArray[np.int64]:
    """Those of the columns that lie in start ... start + n - 1, counted from start."""
    first, last = np.searchsorted(columns, [start, start + n])
    return columns[first:last] - start


def _shifted(progress: Callable[[int, int], None], start: int, total: int) -> Callable[[int, int], None]:
    return lambda done, _: progress(start + done, total)
