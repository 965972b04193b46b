"""BM25 as a baseline: bm25s, Lucene's variant, k1 = 0.9, b = 0.4, English stop words, no stemmer.

    score(q, d) = sum over the terms t of q:
                  ln(1 + (N - n_t + 0.5) / (n_t + 0.5)) * tf / (tf + k1 * (1 - b + b * |d| / avgdl))

(Kamphuis et al. 2020, "Which BM25 do you mean?"; k1 and b as Anserini and BEIR set them.) A word is two or
more word characters, lower case.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from gradeloom.tasks.evaluate.search import queries_to_run, tie_order

if TYPE_CHECKING:
    from gradeloom.tasks.collection import Collection, Qrels, Run

K1, B = 0.9, 0.4


def bm25_run(collection: Collection, *, k: int, pool: bool = False, exclude: Qrels | None = None) -> Run:
    """The k best passages of every query of `queries_to_run`, best first.

    Of equal scores the greater passage id comes first, as trec_eval has it. Passages that share no word
    with a query are not found; with `pool` they stand at the end, with score 0.

    Args:
        collection: what is searched; statistics are of all its passages, with `pool`, too.
        k: passages per query.
        pool: rank a query's judged passages only.
        exclude: query id -> passages left out of its ranking.

    Returns:
        Query id -> passage id -> score. A query for which no passage is left has an empty ranking.
    """
    import bm25s

    queries = queries_to_run(collection)
    ids = tie_order(collection.passages)
    words = bm25s.tokenize([collection.passages[p] for p in ids], stopwords="english", show_progress=False)
    asked = bm25s.tokenize(list(queries.values()), stopwords="english", show_progress=False, return_ids=False)
    index = bm25s.BM25(method="lucene", k1=K1, b=B)
    if words.vocab:  # an index of nothing cannot be made
        index.index(words, show_progress=False)
    column = {passage: n for n, passage in enumerate(ids)}
    run: Run = {}
    for query, terms in zip(queries, asked, strict=True):
        known = [words.vocab[term] for term in terms if term in words.vocab]
        scores = index.get_scores_from_ids(known) if known else np.zeros(len(ids), np.float32)
        if pool:
            columns = np.array(sorted(column[p] for p in collection.qrels.get(query, {}) if p in column), int)
        else:
            columns = np.flatnonzero(scores)
        left_out = [column[p] for p in (exclude or {}).get(query, {}) if p in column]
        columns = columns[~np.isin(columns, left_out)]
        run[query] = {ids[n]: float(scores[n]) for n in _best(scores, columns, k)}
    return run


def _best(scores: NDArray[np.float32], columns: NDArray[np.int_], k: int) -> NDArray[np.int_]:
    """The k of some ascending columns with the highest scores, best first; of equal scores the first."""
    if len(columns) > k:
        threshold = np.partition(scores[columns], len(columns) - k)[len(columns) - k]
        columns = columns[scores[columns] >= threshold]
    order: NDArray[np.int_] = np.argsort(-scores[columns], kind="stable")
    return columns[order[:k]]
