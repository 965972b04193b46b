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

Count = Callable[[Sequence[Message]], int | None]
"""Tokens of a prompt, or None where there is no tokenizer."""


def expected_tokens(
    sample: Sequence[QueryRow],
    rows: int,
    generator: GradedGenerator,
    judge: Judge | None,
    *,
    count: Count | None,
    count_judge: Count | None,
) -> Estimate:
    """Tokens for `rows` queries: prompts as a few queries have them, answers as long as is asked for.

    Args:
        sample: the queries to extrapolate from.
        rows: of the whole source.
        count: of the generator's engine; None when it costs nothing.
        count_judge: of the judge's.
    """
    if not sample:
        return Estimate(0, 0)
    prompt = completion = 0.0
    words = _words_asked_for(generator)
    if count is not None:
        asked = [request for row in sample for request in generator.requests(row)]
        prompt += sum(_prompt_tokens(request, count) for request in asked)
        levels = len(generator.rubric) * len(sample) / len(asked)  # of one answer
        answer = min(levels * (words * TOKENS_PER_WORD + 10), generator.generation.max_tokens)
        completion += len(asked) * answer
    if judge is not None and count_judge is not None:
        judged = [r for row in sample for r in judge.requests(_list_of(row, generator, words))]
        prompt += sum(_prompt_tokens(request, count_judge) for request in judged)
        completion += sum(request.sampling.max_tokens for request in judged)
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


def _prompt_tokens(request: Request, count: Count) -> float:
    counted = count(request.messages)
    if counted is not None:
        return counted
    return sum(len(message["content"].split()) for message in request.messages) * TOKENS_PER_WORD
