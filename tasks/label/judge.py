"""The relevance judge: a second reading of every generated grade (METHODS 1a).

A judge answers with one unconstrained token. The probability of each grade is read from that token's
log-probabilities, so that what falls outside the grades stays visible; under a grammar the grades
would always sum to 1. Where an endpoint gives no log-probabilities, the share of n samples stands in.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Protocol

from gradeloom.schemas.config import JudgeConfig, Level
from gradeloom.schemas.errors import InputError
from gradeloom.schemas.rows import JudgedRow, Judgement, ListRow, PairVerdict, Status, digest
from gradeloom.tasks.engine.types import UNREACHABLE, Asked, Completion, Request, Sampling
from gradeloom.tasks.prompts import Prompt

TOP_LOGPROBS = 20
FIRST, SECOND = "A", "B"

_FAILURES: dict[str, tuple[Status, str]] = {
    "refused": ("failed", "judge_refused"),
    "prompt_too_long": ("rejected", "judge_prompt_too_long"),
    "not_recorded": ("failed", "not_recorded"),
    "unreachable": ("failed", UNREACHABLE),
}


class Engine(Protocol):
    """What the judge needs of an engine."""

    @property
    def identity(self) -> str: ...

    async def complete(self, asked: Asked, request: Request) -> Completion: ...


def read_judgement(
    logprobs: Sequence[tuple[str, float]] | None,
    grades: Sequence[int],
    *,
    intended: int,
    min_mass: float,
    method: str = "logprobs",
) -> Judgement:
    """Read one passage's judgement from the log-probabilities of the answer's first token.

    Tokens that differ only by white space around them (`3`, ` 3`, `3\\n`) are the same grade and their
    probabilities add up. With m the sum over the grade tokens seen and p^ = p / m, the judged grade is
    the arg-max of p^ (of equals, the lower grade), the expected grade is sum of g p^(g), and the
    entropy is that of p^, in nats. A grade whose token is not among those returned is null, never 0.

    Args:
        logprobs: (token, natural log-probability) pairs; None when the engine gave none.
        grades: the grades of the scale, in any order.
        intended: the grade that the passage was written for.
        min_mass: an m below this abstains; the figures are kept.
        method: what to write into the judgement.
    """
    labels = {str(grade): grade for grade in grades}
    seen: dict[int, float] = {}
    for token, logprob in logprobs or ():
        grade = labels.get(token.strip())
        if grade is not None:
            seen[grade] = seen.get(grade, 0.0) + _probability(logprob)
    return _judgement(seen, grades, intended=intended, min_mass=min_mass, method=method)


def read_samples(
    answers: Sequence[str], grades: Sequence[int], *, intended: int, min_mass: float
) -> Judgement:
    """Read one passage's judgement from sampled answers.

    An answer that, stripped, is not exactly one grade lies outside the scale: m is the share of
    readable answers, the probability of a grade its share of all answers. Here 0 is a real 0.
    """
    drawn = [answer.strip() for answer in answers]
    counts = {grade: float(drawn.count(str(grade))) for grade in grades}
    return _judgement(
        counts, grades, out_of=len(answers), intended=intended, min_mass=min_mass, method="samples"
    )


def read_preference(logprobs: Sequence[tuple[str, float]], *, min_mass: float) -> str | None:
    """`A` or `B`, whichever is more probable; None for equals, or a mass on the two below `min_mass`."""
    p = {FIRST: 0.0, SECOND: 0.0}
    for token, logprob in logprobs:
        label = token.strip()
        if label in p:
            p[label] += _probability(logprob)
    if p[FIRST] + p[SECOND] < min_mass or p[FIRST] == p[SECOND]:
        return None
    return max(p, key=lambda label: p[label])


@dataclass(frozen=True)
class Judge:
    """Judges the passages of one list, one after the other.

    The passages of a list share the prompt up to the passage, so asking for them in a row keeps the
    engine's prefix cache warm; the flow judges many lists at once.

    Attributes:
        config: the judge's settings.
        levels: the levels of the scale.
        seed: the run's seed; only method `samples` uses it.
        fingerprint: the fingerprint of the stage.
        prompt: asks for the grade of one passage.
        pair_prompt: asks which of two passages is more relevant; None unless `pairwise`.
    """

    config: JudgeConfig
    levels: tuple[Level, ...]
    seed: int
    fingerprint: str
    prompt: Prompt
    pair_prompt: Prompt | None = None

    @classmethod
    def create(cls, config: JudgeConfig, levels: Sequence[Level], *, seed: int, fingerprint: str) -> Judge:
        """Load the prompts that the settings name.

        Raises:
            InputError: a prompt is missing or cannot be read.
        """
        pair = Prompt.load(config.pairwise_prompt) if config.pairwise else None
        return cls(config, tuple(levels), seed, fingerprint, Prompt.load(config.prompt), pair)

    @property
    def grades(self) -> tuple[int, ...]:
        """Grades of the scale, ascending."""
        return tuple(sorted(level.grade for level in self.levels))

    @property
    def labels(self) -> tuple[str, ...]:
        """The answers that must each be a single token of the judge's tokenizer."""
        return tuple(map(str, self.grades)) + ((FIRST, SECOND) if self.config.pairwise else ())

    def requests(self, row: ListRow) -> list[Request]:
        """Every request that this list leads to, in the order and form they are sent."""
        asked = self._passage_questions(row) + self._pair_questions(row)
        return [request for question in asked for request in question.requests]

    async def __call__(self, engine: Engine, row: ListRow) -> JudgedRow:
        """Judge one list.

        Returns:
            The row, kept, with one judgement a passage, abstentions included. The first request
            without an answer ends it: failed (`judge_refused`, `not_recorded`, `engine_unreachable`)
            or rejected (`judge_prompt_too_long`), `grade` naming the passage. Tokens are summed over
            all requests, cached or not.

        Raises:
            InputError: the engine gave no log-probabilities and `judge.method` needs them.
        """
        tokens = _Tokens()
        judgements: list[Judgement] = []
        letters: dict[str, str | None] = {}
        for question in self._passage_questions(row) + self._pair_questions(row):
            answers = []
            for attempt, request in enumerate(question.requests):
                completion = await engine.complete(self._asked(row, question.part, attempt), request)
                tokens.add(completion)
                if completion.outcome in _FAILURES:
                    return _without_answer(row, question, completion, tokens)
                answers.append(completion)
            if question.is_pair:
                letters[question.part] = self._letter(answers[0])
            else:
                judgements.append(self._judgement(answers, question.grade, engine.identity))
        return JudgedRow(
            id=row.id, ordinal=row.ordinal, judgements=judgements, pairs=_verdicts(row, letters),
            prompt_tokens=tokens.prompt, completion_tokens=tokens.completion,
        )  # fmt: skip

    def _asked(self, row: ListRow, part: str, attempt: int) -> Asked:
        return Asked("judge", self.fingerprint, row.id, part, attempt, row.query_id)

    def _passage_questions(self, row: ListRow) -> list[_Question]:
        questions = []
        for passage in row.passages:
            part = str(passage.grade)
            messages = self.prompt.render(levels=self.levels, query=row.query, passage=passage.text)
            requests = [Request(messages, sampling) for sampling in self._samplings(row.id, part)]
            questions.append(_Question(part, passage.grade, requests))
        return questions

    def _samplings(self, row_id: str, part: str) -> list[Sampling]:
        if self.config.method == "logprobs":
            return [Sampling(max_tokens=1, temperature=0.0, top_logprobs=TOP_LOGPROBS)]
        return [
            Sampling(
                max_tokens=1, temperature=self.config.temperature, seed=_seed(self.seed, row_id, part, i)
            )
            for i in range(self.config.samples)
        ]

    def _pair_questions(self, row: ListRow) -> list[_Question]:
        """Each pair in both orders; `3>2` shows the passage of grade 3 first.

        Under method `samples` the letter is the one answer at temperature 0.
        """
        if self.pair_prompt is None:
            return []
        top = TOP_LOGPROBS if self.config.method == "logprobs" else 0
        sampling = Sampling(max_tokens=1, temperature=0.0, top_logprobs=top)
        questions = []
        for one, other in combinations(row.passages, 2):
            for first, second in ((one, other), (other, one)):
                messages = self.pair_prompt.render(query=row.query, first=first.text, second=second.text)
                part = _pair_part(first.grade, second.grade)
                questions.append(_Question(part, first.grade, [Request(messages, sampling)], is_pair=True))
        return questions

    def _judgement(self, answers: Sequence[Completion], intended: int, identity: str) -> Judgement:
        min_mass = self.config.min_mass
        if self.config.method == "samples":
            texts = [answer.text for answer in answers]
            return read_samples(texts, self.grades, intended=intended, min_mass=min_mass)
        method = "recorded" if identity.startswith("replay:") else "logprobs"
        logprobs = _logprobs(answers[0])
        return read_judgement(logprobs, self.grades, intended=intended, min_mass=min_mass, method=method)

    def _letter(self, answer: Completion) -> str | None:
        if self.config.method == "logprobs":
            return read_preference(_logprobs(answer), min_mass=self.config.min_mass)
        letter = answer.text.strip()
        return letter if letter in (FIRST, SECOND) else None


@dataclass(frozen=True, slots=True)
class _Question:
    """One thing asked about a list: its requests are the attempts 0, 1, … of one part."""

    part: str
    grade: int
    requests: list[Request]
    is_pair: bool = False


@dataclass(slots=True)
class _Tokens:
    prompt: int = 0
    completion: int = 0

    def add(self, completion: Completion) -> None:
        self.prompt += completion.prompt_tokens
        self.completion += completion.completion_tokens


def _judgement(
    seen: dict[int, float],
    grades: Sequence[int],
    *,
    out_of: int = 1,
    intended: int,
    min_mass: float,
    method: str,
) -> Judgement:
    """The judgement that follows from the weight of each grade seen, out of a total weight."""
    scale = sorted(grades)
    probabilities = [seen[grade] / out_of if grade in seen else None for grade in scale]
    total = math.fsum(seen.values())
    mass = min(total / out_of, 1.0) if seen else None  # printed log-probabilities may sum to 1 + 1e-7
    if mass is None or mass == 0:
        return Judgement(grade=intended, mass=mass, probabilities=probabilities, method=method)
    p = {grade: seen[grade] / total for grade in scale if grade in seen}
    expected = math.fsum(grade * share for grade, share in p.items())
    return Judgement(
        grade=intended,
        judged=max(p, key=lambda grade: p[grade]),  # the first of equals, and `p` ascends
        expected=min(max(expected, scale[0]), scale[-1]),
        entropy=abs(math.fsum(share * math.log(share) for share in p.values() if share > 0)),
        mass=mass,
        probabilities=probabilities,
        abstained=mass < min_mass,
        method=method,
    )


def _probability(logprob: float) -> float:
    return math.exp(min(logprob, 0.0))  # rounding on the server may leave a tiny positive value


def _verdicts(row: ListRow, letters: dict[str, str | None]) -> list[PairVerdict]:
    """One verdict a pair: the passage preferred in both orders, or a tie."""
    verdicts = []
    for one, other in combinations([passage.grade for passage in row.passages], 2) if letters else ():
        there, back = letters[_pair_part(one, other)], letters[_pair_part(other, one)]
        winner = {(FIRST, SECOND): one, (SECOND, FIRST): other}.get((there or "", back or ""))
        verdicts.append(PairVerdict(first=one, second=other, winner=winner))
    return verdicts


def _without_answer(row: ListRow, question: _Question, completion: Completion, tokens: _Tokens) -> JudgedRow:
    status, reason = _FAILURES[completion.outcome]
    what = f"pair {question.part}" if question.is_pair else f"passage of grade {question.grade}"
    said = f": {completion.text}" if completion.text else ""
    return JudgedRow(
        id=row.id, ordinal=row.ordinal, status=status, reason=reason, detail=what + said,
        grade=question.grade, prompt_tokens=tokens.prompt, completion_tokens=tokens.completion,
    )  # fmt: skip


def _logprobs(answer: Completion) -> Sequence[tuple[str, float]]:
    if answer.logprobs is None:
        raise InputError(
            "the judge's engine gives no log-probabilities; set `judge.method: samples`",
            field="judge.method",
        )
    return answer.logprobs


def _pair_part(first: int, second: int) -> str:
    return f"{first}>{second}"


def _seed(seed: int, row_id: str, part: str, sample: int) -> int:
    return int(digest(str(seed), row_id, part, str(sample), length=8), 16) >> 1
