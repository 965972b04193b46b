"""What a graded run may be expected to cost, before anything is sent."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gradeloom.flows.pacing import Estimate
from gradeloom.schemas.rows import ListRow, Passage, QueryRow
from gradeloom.tasks.engine.types import Message, Request
from gradeloom.tasks.generate.graded import GradedGenerator
from gradeloom.tasks.label.judge import Judge

TOKENS_PER_WORD = 1.35
"""English in the tokenizers of today."""


def expected_tokens(
    sample: Sequence[QueryRow],
    rows: int,
    generator: GradedGenerator,
    judge: Judge | None,
    count: Callable[[Sequence[Message]], int | None],
) -> Estimate:
    """Tokens for `rows` queries: prompts as a few queries have them, answers as long as is asked for.

    Args:
        sample: the queries to extrapolate from.
        rows: of the whole source.
        count: tokens of a prompt, or None where there is no tokenizer.
    """
    if not sample:
        return Estimate(0, 0)
    words = _words_asked_for(generator)
    lists = [_list_of(row, generator, words) for row in sample]
    asked = [request for row in sample for request in generator.requests(row)]
    judged = [request for row in lists for request in judge.requests(row)] if judge else []
    prompt = sum(_prompt_tokens(request, count) for request in asked + judged)
    answer = min(len(generator.rubric) * (words * TOKENS_PER_WORD + 10), generator.generation.max_tokens)
    completion = len(sample) * answer + sum(request.sampling.max_tokens for request in judged)
    scale = rows / len(sample)
    return Estimate(round(prompt * scale), round(completion * scale))


def _words_asked_for(generator: GradedGenerator) -> int:
    buckets = generator.generation.attributes.length
    if not buckets:
        return 100
    return round(sum(bucket.min_words + bucket.max_words for bucket in buckets) / 2 / len(buckets))


def _list_of(row: QueryRow, generator: GradedGenerator, words: int) -> ListRow:
    """A list of passages of the expected length, to see what judging it costs."""
    passages = [Passage(grade=level.grade, text="word " * words) for level in generator.rubric]
    return ListRow(id=row.id, ordinal=row.ordinal, query_id=row.query_id, query=row.query, passages=passages)


def _prompt_tokens(request: Request, count: Callable[[Sequence[Message]], int | None]) -> float:
    counted = count(request.messages)
    if counted is not None:
        return counted
    return sum(len(message["content"].split()) for message in request.messages) * TOKENS_PER_WORD
