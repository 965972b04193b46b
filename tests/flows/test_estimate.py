"""What a run is expected to cost, before anything is sent."""

from __future__ import annotations

from typing import Any

import pytest

from gradeloom.flows.estimate import expected_tokens
from gradeloom.flows.pacing import Estimate
from gradeloom.schemas.config import GradedConfig
from gradeloom.schemas.rows import QueryRow
from gradeloom.tasks.engine.types import Message
from gradeloom.tasks.generate.graded import GradedGenerator
from gradeloom.tasks.label.judge import Judge

SAMPLE = [QueryRow(id=f"r{n}", ordinal=n, query_id=f"q{n}", query="why?") for n in range(2)]


def ten(messages: Any) -> int:
    """Every prompt has ten tokens."""
    return 10


def hundred(messages: Any) -> int:
    return 100


def estimate(rows: int = 20, *, count: Any = ten, count_judge: Any = hundred, **generation: Any) -> Estimate:
    config = GradedConfig.model_validate(
        {
            "source": {"path": "q.tsv"},
            "generation": {"attributes": {"length": [{"name": "x", "min_words": 60, "max_words": 140}]}}
            | generation,
            "release": {"name": "tale"},
        }
    )
    assert config.judge is not None
    judge = Judge.create(config.judge, config.levels, seed=0, fingerprint="")
    generator = GradedGenerator.create(config, "")
    return expected_tokens(SAMPLE, rows, generator, judge, count=count, count_judge=count_judge)


def test_by_hand() -> None:
    # A row: one prompt of 10 and an answer of 4 * (100 * 1.35 + 10) = 580; four of 100 and one token each.
    assert estimate() == Estimate(20 * (10 + 400), 20 * (580 + 4))


def test_an_answer_is_not_longer_than_it_may_be() -> None:
    assert estimate(max_tokens=300).completion_tokens == 20 * (300 + 4)
    # One call a level: the limit is each call's own.
    assert estimate(max_tokens=300, mode="per_level") == Estimate(20 * (40 + 400), 20 * (580 + 4))
    assert estimate(max_tokens=100, mode="per_level").completion_tokens == 20 * (400 + 4)


@pytest.mark.parametrize(
    ("counters", "expected"),
    [
        ({"count": None}, Estimate(20 * 400, 20 * 4)),
        ({"count_judge": None}, Estimate(20 * 10, 20 * 580)),
        ({"count": None, "count_judge": None}, Estimate(0, 0)),
    ],
)
def test_what_is_recorded_costs_nothing(counters: dict[str, Any], expected: Estimate) -> None:
    assert estimate(**counters) == expected


def test_without_a_tokenizer_words_are_counted() -> None:
    def unknown(messages: list[Message]) -> None:
        return None

    assert estimate(count=unknown, count_judge=None).prompt_tokens > 20 * 100
