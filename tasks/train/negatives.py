"""Which of a query's candidates become hard negatives: the selection rule alone."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from gradeloom.schemas.retriever import MineConfig
from gradeloom.schemas.rows import digest
from gradeloom.tasks.collection import Qrels, Run


@dataclass(frozen=True)
class Negative:
    """A passage chosen as negative for a query.

    Attributes:
        query_id: of the query.
        passage_id: of the passage.
        score: in the run.
        rank: in the run, from 1.
    """

    query_id: str
    passage_id: str
    score: float
    rank: int


def choose_negatives(
    run: Run, qrels: Qrels, config: MineConfig, *, accounting: Counter[str] | None = None
) -> list[Negative]:
    """Choose each query's negatives from its ranking, from the highest score to the lowest.

    Candidates are the first `depth` by score (of equal scores the greater id is first, as trec_eval has
    it). A candidate falls for the first of these reasons:

    - `skip`: it is among the first `skip`;
    - `positive`: it is judged `positive_grade` or higher;
    - `judged`: it is judged at all, where `exclude` is `judged`;
    - `margin`: with `max_score` r, its score is above s - (1 - r) |s|, where s is the score of the
      lowest-scoring positive in the run, wherever it ranks. For s > 0 this is r s; it is below s for
      negative scores, too, when r < 1;
    - `no positive in the run`: with `max_score`, none of the query's positives is ranked, or it has none.
      Whatever is ranked then scores above the positives, or cannot be compared with any: it is not
      taken;
    - `surplus`: `count` others were taken: the highest, or, with `pick` `random`, those drawn by `seed`.

    Only the order by score counts, not that of `run` or `qrels`; a draw depends on the seed and the ids.
    Positives are known by their ids: a copy of one under another id is a candidate (`mix` finds it by its
    text).

    Args:
        run: rankings; a passage that is not in it is no candidate.
        qrels: the judgements.
        config: the settings.
        accounting: is told how many candidates fell for each reason, as above, that there were so many
            `candidates` and that so many were `chosen`; candidates are the sum of the others. Also, in
            `short queries`, how many queries got fewer than `count`.

    Returns:
        Negatives, query by query in the run's order, by rank.
    """
    counts: Counter[str] = Counter() if accounting is None else accounting
    chosen: list[Negative] = []
    for query_id, scores in run.items():
        left = _eligible(query_id, scores, qrels.get(query_id, {}), config, counts)
        picks = _picked(left, config)
        counts["surplus"] += len(left) - len(picks)
        counts["chosen"] += len(picks)
        counts["short queries"] += len(picks) < config.count
        chosen += picks
    return chosen


def _eligible(
    query_id: str,
    scores: dict[str, float],
    judged: dict[str, float],
    config: MineConfig,
    counts: Counter[str],
) -> list[Negative]:
    """The candidates that nothing speaks against, by rank."""
    positives = {passage_id for passage_id, grade in judged.items() if grade >= config.positive_grade}
    highest = _highest(scores, positives, config.max_score)
    ranking = sorted(scores, key=lambda passage_id: (scores[passage_id], passage_id), reverse=True)
    left = []
    for rank, passage_id in enumerate(ranking[: config.depth], 1):
        counts["candidates"] += 1
        score = scores[passage_id]
        if rank <= config.skip:
            counts["skip"] += 1
        elif passage_id in positives:
            counts["positive"] += 1
        elif config.exclude == "judged" and passage_id in judged:
            counts["judged"] += 1
        elif highest is None:
            counts["no positive in the run"] += 1
        elif score > highest:
            counts["margin"] += 1
        else:
            left.append(Negative(query_id, passage_id, score, rank))
    return left


def _highest(scores: dict[str, float], positives: set[str], ratio: float | None) -> float | None:
    """The highest score that a negative may have; None when there is nothing to compare with."""
    if ratio is None:
        return float("inf")
    found = [scores[passage_id] for passage_id in positives if passage_id in scores]
    if not found:
        return None
    lowest = min(found)
    return lowest * ratio if lowest > 0 else lowest - (1 - ratio) * abs(lowest)


def _picked(left: list[Negative], config: MineConfig) -> list[Negative]:
    if config.pick == "top":
        return left[: config.count]
    drawn = sorted(left, key=lambda one: digest(str(config.seed), one.query_id, one.passage_id, length=32))
    return sorted(drawn[: config.count], key=lambda one: one.rank)
