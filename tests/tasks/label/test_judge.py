from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradeloom.schemas.config import TREC_LEVELS, JudgeConfig, ReplayEngine
from gradeloom.schemas.errors import InputError
from gradeloom.schemas.rows import Judgement, ListRow, Passage
from gradeloom.tasks.engine.replay import ReplayBackend
from gradeloom.tasks.engine.types import Asked, Completion, Request, Sampling
from gradeloom.tasks.label.judge import Judge, read_judgement, read_preference, read_samples
from gradeloom.tasks.prompts import Prompt

GRADES = (3, 2, 1, 0)


def logs(**p: float) -> list[tuple[str, float]]:
    """`logs(g0=.1, g1=.2)`: log-probabilities of the tokens 0 and 1."""
    return [(name.removeprefix("g"), math.log(value)) for name, value in p.items()]


def read(logprobs: Any, min_mass: float = 0.5) -> Judgement:
    return read_judgement(logprobs, GRADES, intended=3, min_mass=min_mass)


# --- reading one token ----------------------------------------------------------------------


def test_a_judgement_by_hand() -> None:
    judgement = read(logs(g0=0.1, g1=0.2, g2=0.3, g3=0.3, The=0.1))
    assert judgement.mass == pytest.approx(0.9)
    assert judgement.expected == pytest.approx(1.7 / 0.9)  # (0*.1 + 1*.2 + 2*.3 + 3*.3) / .9
    # 1/9 ln 9 + 2/9 ln 4.5 + 2 * 1/3 ln 3 = .244136 + .334239 + .732408
    assert judgement.entropy == pytest.approx(1.310783, abs=1e-6)
    assert judgement.probabilities == pytest.approx([0.1, 0.2, 0.3, 0.3])
    assert not judgement.abstained
    assert (judgement.grade, judgement.method) == (3, "logprobs")


def test_of_equal_grades_the_lower_is_judged() -> None:
    assert read([("3", -0.7), ("2", -0.7), ("1", -3.0)]).judged == 2


def test_a_token_not_returned_is_null_and_not_zero() -> None:
    judgement = read(logs(g3=0.5, g2=0.25))
    assert judgement.probabilities == [None, None, pytest.approx(0.25), pytest.approx(0.5)]
    assert judgement.mass == pytest.approx(0.75)
    assert judgement.expected == pytest.approx(8 / 3)  # (2*.25 + 3*.5) / .75
    assert judgement.judged == 3


def test_a_token_returned_with_no_probability_is_a_real_zero() -> None:
    assert read([("3", 0.0), ("0", -math.inf), ("1", -9999.0)]).probabilities == [0.0, 0.0, None, 1.0]


def test_tokens_that_differ_by_white_space_add_up() -> None:
    judgement = read(
        [("3", math.log(0.2)), (" 3", math.log(0.3)), ("3\n", math.log(0.1)), ("\t2", math.log(0.4))]
    )
    assert judgement.probabilities == [None, None, pytest.approx(0.4), pytest.approx(0.6)]
    assert judgement.judged == 3


@pytest.mark.parametrize("token", ["33", "3.", "three", "-3", "4", "", " ", "３", "³", "03"])
def test_other_tokens_are_outside_the_scale(token: str) -> None:
    judgement = read([(token, math.log(0.6)), ("1", math.log(0.4))], min_mass=0.0)
    assert judgement.mass == pytest.approx(0.4)
    assert judgement.judged == 1


def test_below_the_mass_it_abstains_and_keeps_the_figures() -> None:
    judgement = read(logs(g3=0.3, g2=0.1, Sure=0.6))
    assert judgement.abstained
    assert (judgement.judged, judgement.mass) == (3, pytest.approx(0.4))
    assert judgement.expected == pytest.approx(2.75)


def test_at_the_mass_it_does_not_abstain() -> None:
    assert not read([("3", math.log(0.5))], min_mass=0.5).abstained


@pytest.mark.parametrize("logprobs", [None, [], [("The", -0.1), ("A", -2.0)]])
def test_nothing_seen_abstains_even_without_a_threshold(logprobs: Any) -> None:
    assert read(logprobs, min_mass=0.0) == Judgement(grade=3, probabilities=[None] * 4)


def test_no_mass_at_all_abstains_even_without_a_threshold() -> None:
    judgement = read([("3", -math.inf)], min_mass=0.0)
    assert judgement == Judgement(grade=3, mass=0.0, probabilities=[None, None, None, 0.0])
    assert judgement.abstained


TOKENS = st.sampled_from(["0", "1", "2", "3", " 3", "2\n", "x", "10", ""])
LOGPROBS = st.lists(st.tuples(TOKENS, st.floats(-50, 0.001) | st.just(-math.inf)), max_size=20)


@given(LOGPROBS, st.floats(0, 1))
def test_what_is_read_stays_in_bounds(logprobs: list[tuple[str, float]], min_mass: float) -> None:
    judgement = read(logprobs, min_mass)
    if judgement.mass is None or judgement.mass == 0:
        assert judgement.abstained
        assert (judgement.judged, judgement.expected, judgement.entropy) == (None, None, None)
    else:
        assert 0 < judgement.mass <= 1
        assert judgement.abstained == (judgement.mass < min_mass)
        assert judgement.expected is not None
        assert 0 <= judgement.expected <= 3
        assert judgement.entropy is not None
        assert 0 <= judgement.entropy <= math.log(4) + 1e-12
        known = {g: p for g, p in enumerate(judgement.probabilities) if p is not None}
        assert judgement.judged == min(g for g in known if known[g] == max(known.values()))


@given(LOGPROBS, st.permutations(GRADES), st.randoms())
def test_neither_the_order_of_tokens_nor_of_grades_matters(
    logprobs: list[tuple[str, float]], grades: list[int], random: Any
) -> None:
    shuffled = random.sample(logprobs, len(logprobs))
    one = read(logprobs)
    other = read_judgement(shuffled, grades, intended=3, min_mass=0.5)
    assert [p is None for p in one.probabilities] == [p is None for p in other.probabilities]
    assert one.expected == pytest.approx(other.expected)
    assert one.mass == pytest.approx(other.mass)


# --- reading samples and letters ------------------------------------------------------------


def test_samples_by_hand() -> None:
    answers = ["3", " 3\n", "2", "3.", "I think 2", "3", "", "2"]
    judgement = read_samples(answers, GRADES, intended=2, min_mass=0.5)
    assert judgement.probabilities == [0.0, 0.0, 0.25, 0.375]  # 2 and 3 of 8; 0 was never drawn
    assert judgement.mass == 0.625
    assert judgement.expected == pytest.approx((2 * 2 + 3 * 3) / 5)
    assert (judgement.judged, judgement.abstained, judgement.method) == (3, False, "samples")


def test_samples_at_the_mass_do_not_abstain() -> None:
    answers = ["3"] * 3 + ["2"] * 2 + ["1"] * 2 + ["no"] * 3  # 7 of 10, in floats no sum of tenths
    assert not read_samples(answers, GRADES, intended=3, min_mass=0.7).abstained


def test_unreadable_samples_abstain() -> None:
    judgement = read_samples(["no", "none"], GRADES, intended=0, min_mass=0.0)
    assert judgement.abstained
    assert (judgement.judged, judgement.mass, judgement.probabilities) == (None, 0.0, [0.0] * 4)


@pytest.mark.parametrize(
    ("p", "letter"),
    [
        ({"A": 0.6, "B": 0.3}, "A"),
        ({"A": 0.3, " B": 0.2, "B\n": 0.2}, "B"),
        ({"B": 0.7}, "B"),
        ({"A": 0.25, "B": 0.25}, None),
        ({"A": 0.3, "B": 0.1, "The": 0.6}, None),  # .4 on the letters says too little
        ({"The": 0.9}, None),
    ],
)
def test_preference(p: dict[str, float], letter: str | None) -> None:
    logprobs = [(token, math.log(value)) for token, value in p.items()]
    assert read_preference(logprobs, min_mass=0.5) == letter


# --- judging a list -------------------------------------------------------------------------


GRADE_PROMPT = Prompt("judge", "1", "", "{{ query }}|{{ passage }}", "d1")
PAIR_PROMPT = Prompt("judge_pair", "1", "", "{{ query }}|{{ first }}|{{ second }}", "d2")


@dataclass
class FakeEngine:
    answer: Callable[[Asked, Request], Completion]
    identity: str = "fake:1"
    sent: list[tuple[Asked, Request]] = field(default_factory=list)

    async def complete(self, asked: Asked, request: Request) -> Completion:
        self.sent.append((asked, request))
        return self.answer(asked, request)


def grade_token(grade: int, p: float = 0.8, **kwargs: Any) -> Completion:
    """The usual outcome of one token: cut off by `length`, which is no failure here."""
    return Completion("length", str(grade), 100, 1, ((str(grade), math.log(p)),), **kwargs)


def a_list(query_id: str = "q7", row_id: str = "r1") -> ListRow:
    passages = [Passage(grade=g, text=f"text {g}") for g in (3, 2, 1)]
    return ListRow(id=row_id, ordinal=4, query_id=query_id, query="why", passages=passages)


def a_judge(seed: int = 0, **config: Any) -> Judge:
    settings = JudgeConfig(**config)
    pair = PAIR_PROMPT if settings.pairwise else None
    return Judge(settings, TREC_LEVELS, seed, "f00d", GRADE_PROMPT, pair)


async def test_every_passage_is_asked_once_in_order() -> None:
    engine = FakeEngine(lambda asked, _: grade_token(int(asked.part), cached=asked.part == "2"))
    row = await a_judge()(engine, a_list())
    assert [asked for asked, _ in engine.sent] == [
        Asked("judge", "f00d", "r1", part=part, attempt=0, source_id="q7") for part in ("3", "2", "1")
    ]
    assert engine.sent[0][1] == Request(
        ({"role": "user", "content": "why|text 3"},), Sampling(max_tokens=1, temperature=0, top_logprobs=20)
    )
    assert (row.id, row.ordinal, row.status, row.reason) == ("r1", 4, "kept", None)
    assert [(j.grade, j.judged, j.method) for j in row.judgements] == [
        (3, 3, "logprobs"), (2, 2, "logprobs"), (1, 1, "logprobs"),
    ]  # fmt: skip
    assert (row.prompt_tokens, row.completion_tokens) == (300, 3)  # what came from a cache counts too
    assert row.pairs == []


@pytest.mark.parametrize(
    "config",
    [{}, {"method": "samples", "samples": 3}, {"pairwise": True}],
    ids=["logprobs", "samples", "pairs"],
)
async def test_requests_shows_what_is_sent(config: dict[str, Any]) -> None:
    judge = a_judge(**config)
    engine = FakeEngine(lambda *_: Completion("length", "3", 1, 1, (("3", -0.1),)))
    await judge(engine, a_list())
    assert judge.requests(a_list()) == [request for _, request in engine.sent]
    assert len({(asked.part, asked.attempt) for asked, _ in engine.sent}) == len(engine.sent)


async def test_an_abstention_keeps_the_row() -> None:
    row = await a_judge()(FakeEngine(lambda *_: grade_token(2, p=0.3)), a_list())
    assert row.status == "kept"
    assert [(j.abstained, j.judged) for j in row.judgements] == [(True, 2)] * 3


async def test_a_recording_is_marked_as_such() -> None:
    row = await a_judge()(FakeEngine(lambda *_: grade_token(2), identity="replay:judgements.jsonl"), a_list())
    assert {j.method for j in row.judgements} == {"recorded"}


@pytest.mark.parametrize(
    ("outcome", "status", "reason"),
    [
        ("refused", "failed", "judge_refused"),
        ("prompt_too_long", "rejected", "judge_prompt_too_long"),
        ("not_recorded", "failed", "not_recorded"),
        ("unreachable", "failed", "engine_unreachable"),
    ],
)
async def test_a_request_without_an_answer_ends_the_row(outcome: Any, status: str, reason: str) -> None:
    def answer(asked: Asked, request: Request) -> Completion:
        return grade_token(3) if asked.part == "3" else Completion(outcome, "the server's words", 7)

    engine = FakeEngine(answer)
    row = await a_judge()(engine, a_list())
    assert (row.status, row.reason, row.grade) == (status, reason, 2)
    assert row.detail == "passage of grade 2: the server's words"
    assert row.judgements == []
    assert (row.prompt_tokens, row.completion_tokens) == (107, 1)
    assert len(engine.sent) == 2  # nothing more is spent on the list


@pytest.mark.parametrize("config", [{}, {"pairwise": True}])
async def test_no_logprobs_is_said_with_the_way_out(config: dict[str, Any]) -> None:
    def answer(asked: Asked, request: Request) -> Completion:
        return Completion("stop", "A") if ">" in asked.part or not config else grade_token(3)

    with pytest.raises(InputError, match=r"set `judge\.method: samples`"):
        await a_judge(**config)(FakeEngine(answer), a_list())


async def test_samples_have_their_own_seeds_and_attempts() -> None:
    engine = FakeEngine(lambda asked, _: Completion("stop", "3" if asked.attempt else "?", 10, 1))
    row = await a_judge(method="samples", samples=4)(engine, a_list())
    assert [(a.part, a.attempt) for a, _ in engine.sent] == [(p, i) for p in "321" for i in range(4)]
    samplings = [request.sampling for _, request in engine.sent]
    assert len({s.seed for s in samplings}) == 12
    assert {(s.max_tokens, s.temperature, s.top_logprobs) for s in samplings} == {(1, 0.7, 0)}
    assert [j.mass for j in row.judgements] == [0.75] * 3
    assert {j.method for j in row.judgements} == {"samples"}
    assert (row.prompt_tokens, row.completion_tokens) == (120, 12)


def test_seeds_follow_from_run_seed_and_row_alone() -> None:
    def seeds(seed: int, row_id: str) -> list[int | None]:
        requests = a_judge(seed, method="samples").requests(a_list(row_id=row_id))
        return [request.sampling.seed for request in requests]

    assert seeds(1, "r1") == seeds(1, "r1")
    assert len({*seeds(1, "r1"), *seeds(2, "r1"), *seeds(1, "r2")}) == 3 * 3 * 8
    assert all(seed is not None and 0 <= seed < 2**31 for seed in seeds(1, "r1"))


def prefers(likes: Callable[[str, str], str]) -> FakeEngine:
    """An engine whose letter depends on the two grades in the order shown."""

    def answer(asked: Asked, request: Request) -> Completion:
        if ">" not in asked.part:
            return grade_token(int(asked.part))
        letter = likes(*asked.part.split(">"))
        return Completion("length", letter, 50, 1, ((letter, math.log(0.9)),))

    return FakeEngine(answer)


PAIRS = [(3, 2), (3, 1), (2, 1)]


@pytest.mark.parametrize("config", [{}, {"method": "samples"}], ids=["logprobs", "samples"])
@pytest.mark.parametrize(
    ("likes", "winners"),
    [
        (lambda first, second: "A" if first > second else "B", [3, 3, 2]),
        (lambda first, second: "A" if first < second else "B", [2, 1, 1]),
        (lambda first, second: "A", [None] * 3),
        (lambda first, second: "A" if first > second else "none", [None] * 3),
    ],
    ids=["higher", "lower", "always the first", "one order only"],
)
async def test_pairs_need_both_orders(likes: Any, winners: list[int | None], config: dict[str, Any]) -> None:
    row = await a_judge(pairwise=True, **config)(prefers(likes), a_list())
    assert [(v.first, v.second) for v in row.pairs] == PAIRS
    assert [v.winner for v in row.pairs] == winners


async def test_pairs_come_after_the_passages_in_both_orders() -> None:
    engine = prefers(lambda first, second: "A")
    row = await a_judge(pairwise=True)(engine, a_list())
    parts = [asked.part for asked, _ in engine.sent]
    assert parts == ["3", "2", "1", "3>2", "2>3", "3>1", "1>3", "2>1", "1>2"]
    assert engine.sent[4][1].messages[0]["content"] == "why|text 2|text 3"
    assert row.prompt_tokens == 3 * 100 + 6 * 50


async def test_a_failing_pair_names_the_passage_shown_first() -> None:
    def answer(asked: Asked, request: Request) -> Completion:
        return Completion("not_recorded") if ">" in asked.part else grade_token(3)

    row = await a_judge(pairwise=True)(FakeEngine(answer), a_list())
    assert (row.status, row.reason, row.grade, row.detail) == ("failed", "not_recorded", 3, "pair 3>2")


def test_labels() -> None:
    assert a_judge().labels == ("0", "1", "2", "3")
    assert a_judge(pairwise=True).labels == ("0", "1", "2", "3", "A", "B")


def test_the_shipped_prompts_hold_rubric_query_and_passages() -> None:
    judge = Judge.create(JudgeConfig(pairwise=True), TREC_LEVELS, seed=0, fingerprint="f00d")
    *passages, pair = ["\n".join(m["content"] for m in r.messages) for r in judge.requests(a_list())[:4]]
    for grade, text in zip((3, 2, 1), passages, strict=True):
        assert "why" in text
        assert f"text {grade}" in text
        assert all(level.definition in text for level in TREC_LEVELS)
        assert text.split(f"text {grade}")[0] == passages[0].split("text 3")[0]  # the shared prefix
    assert pair.index("text 3") < pair.index("text 2")


@pytest.mark.realdata
async def test_recorded_judgements_through_replay(realdata: Path) -> None:
    path = realdata / "recorded" / "judgements.jsonl"
    recorded = {(e["query_id"], e["level"]): e for e in map(json.loads, path.read_text().splitlines())}
    backend = ReplayBackend(ReplayEngine(path=str(path), adapter="judgements"))

    class Replayed:
        identity = backend.identity
        complete = staticmethod(backend.send)

    judge = Judge.create(JudgeConfig(), TREC_LEVELS, seed=0, fingerprint="f00d")
    for query_id in sorted({query_id for query_id, _ in recorded}):
        row = await judge(Replayed(), a_list(query_id))
        assert row.status == "kept"
        for judgement in row.judgements:
            entry = recorded[query_id, judgement.grade]
            assert judgement.method == "recorded"
            assert judgement.judged == entry["grade"]
            assert judgement.probabilities == pytest.approx(entry["p"])
            assert judgement.mass == pytest.approx(1.0)
            assert judgement.expected == pytest.approx(sum(g * p for g, p in enumerate(entry["p"])))
    assert (await judge(Replayed(), a_list("no such query"))).reason == "not_recorded"
