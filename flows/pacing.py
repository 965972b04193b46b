"""How far a run goes: canary, target, token budget.

Decisions look at finished shards in order and at nothing else, so that neither timing nor the number
of shards in progress changes what is released.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from gradeloom.schemas.config import CanaryConfig, RunConfig
from gradeloom.schemas.manifest import StageAccount, rows_worked_on

UNLIKELY = 0.001
"""A target with less chance than this is not worth its tokens."""


@dataclass(frozen=True)
class Estimate:
    """Tokens that all rows of the source are expected to cost."""

    prompt_tokens: int
    completion_tokens: int

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass
class Tally:
    """Sums over finished shards.

    Attributes:
        rows: queries worked on. accepted: lists kept by the last stage. tokens: spent on them.
        truncated: rows with an attempt cut by the token limit. abstained: of `judgements`.
    """

    shards: int = 0
    rows: int = 0
    accepted: int = 0
    tokens: int = 0
    truncated: int = 0
    judgements: int = 0
    abstained: int = 0

    def add(self, other: Tally) -> None:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)


class Pace:
    """Whether another shard is wanted, and where the release is cut.

    Attributes:
        cut: the ordinal of the last row that counts, once all after it are surplus.
        cut_reason: `target_reached` or `budget_spent`.
        stopped: why the run cannot end in a release, in words.
    """

    def __init__(self, run: RunConfig, rows: int, expected: Estimate) -> None:
        self.run, self.rows, self.expected = run, rows, expected
        self.tally = Tally()
        self.cut: int | None = None
        self.cut_reason: str | None = None
        self.stopped: str | None = None

    @property
    def enough(self) -> bool:
        """No more shards are wanted."""
        return self.stopped is not None or self.cut is not None

    def room_for_another(self, started: int, running: int) -> bool:
        """May shard number `started` start while `running` are in progress?"""
        if running >= self.run.wave or self.enough:
            return False
        if self.run.canary and started and not self.tally.shards:
            return False  # the canary goes alone
        if self._affordable(started + 1):
            return True
        if not running:
            self._budget_spent()
        return False

    def finished(self, shard: Tally, accepted: Sequence[int]) -> bool:
        """Take in the next shard in order; `accepted` are the ordinals of its accepted rows.

        Returns:
            Whether the shard counts. One that was started while it looked affordable, and by the
            shards before it was not, is surplus.
        """
        if not self._affordable(self.tally.shards + 1):
            self._budget_spent()
            return False
        target = self.run.target
        if target is not None and self.tally.accepted + len(accepted) >= target:
            self.cut = accepted[target - self.tally.accepted - 1]
            self.cut_reason = "target_reached"
        first = not self.tally.shards
        self.tally.add(shard)
        if self.cut is None:
            if first and self.run.canary is not None:
                self.stopped = out_of_bounds(self.run.canary, self.tally)
            self.stopped = self.stopped or self._target_out_of_reach()
        return True

    def batch(self) -> int:
        """Shards of one phase where two models take turns: the canary alone, else what is still needed."""
        if self.run.canary and not self.tally.shards:
            return 1
        rate = max(self.tally.accepted / self.tally.rows, 0.01) if self.tally.rows else 1.0
        wanted = ((self.run.target or self.rows) - self.tally.accepted) / rate
        if self.run.budget_tokens is not None:
            wanted = min(wanted, (self.run.budget_tokens - self.tally.tokens) / self._tokens_per_row())
        return max(1, math.ceil(wanted / self.run.shard_rows))

    def verdict(self, accounting: Sequence[StageAccount]) -> str | None:
        """Why no release may be cut, or None."""
        if self.stopped is not None:
            return self.stopped
        worked = rows_worked_on(accounting)
        failed = sum(account.failed for account in accounting)
        if failed > self.run.max_failed * worked:
            return (
                f"{failed} of {worked} rows failed, more than run.max_failed {self.run.max_failed:g} allows: "
                + frequent_reasons(accounting, "failed")
            )
        if not self.tally.accepted:
            return "nothing was kept: " + frequent_reasons(accounting, "rejected")
        if self.run.target is not None and self.cut is None:
            return (
                f"the target of {self.run.target} lists was not reached: {self.tally.accepted} of {worked} "
                "rows were accepted. Give more queries, or lower run.target"
            )
        return None

    def _rows_until(self, shards: int) -> int:
        """Source rows in the first `shards` shards."""
        first = self.run.canary.rows if self.run.canary else self.run.shard_rows
        return min(self.rows, first + (shards - 1) * self.run.shard_rows)

    def _tokens_per_row(self) -> float:
        """What a row costs: as measured, before that as expected."""
        if self.tally.rows:
            return max(self.tally.tokens / self.tally.rows, 1.0)
        return max(self.expected.tokens / max(self.rows, 1), 1.0)

    def _affordable(self, shards: int) -> bool:
        """Do the first `shards` shards fit the budget, by what the finished ones cost?"""
        if self.run.budget_tokens is None:
            return True
        ahead = self._rows_until(shards) - self.tally.rows
        return self.tally.tokens + ahead * self._tokens_per_row() <= self.run.budget_tokens

    def _budget_spent(self) -> None:
        if self.run.target is None and self.tally.accepted:
            self.cut, self.cut_reason = self._rows_until(self.tally.shards) - 1, "budget_spent"
            return
        self.stopped = (
            f"the budget of {self.run.budget_tokens:,} tokens does not cover the next shard: "
            f"{self.tally.tokens:,} spent, about {self._tokens_per_row():,.0f} a row, "
            f"{self.tally.accepted} lists accepted. "
            "Raise run.budget_tokens, or lower run.target or run.shard_rows"
        )

    def _target_out_of_reach(self) -> str | None:
        """Would even a lucky rest fall short?"""
        target, tally = self.run.target, self.tally
        left = self.rows - tally.rows
        if target is None or not out_of_reach(target - tally.accepted, left, tally.accepted, tally.rows):
            return None
        return (
            f"the target of {target} lists is out of reach: {tally.accepted} of {tally.rows} rows accepted, "
            f"{left} rows left. Give more queries, or lower run.target"
        )


def out_of_bounds(canary: CanaryConfig, tally: Tally) -> str | None:
    """What is wrong with the canary shard, or None."""
    accept = tally.accepted / max(tally.rows, 1)
    truncated = tally.truncated / max(tally.rows, 1)
    abstained = tally.abstained / max(tally.judgements, 1)
    if accept < canary.min_accept:
        what = f"accept rate {accept:.3f}, wanted at least {canary.min_accept:g}"
    elif truncated > canary.max_truncated:
        what = f"truncation rate {truncated:.3f}, wanted at most {canary.max_truncated:g}"
    elif abstained > canary.max_abstained:
        what = f"judge abstention rate {abstained:.3f}, wanted at most {canary.max_abstained:g}"
    else:
        return None
    return f"the canary of {tally.rows} rows is out of bounds: {what}. Nothing more was spent"


def frequent_reasons(accounting: Sequence[StageAccount], status: str) -> str:
    """The most frequent reasons of the stages that have rows of a status, in words."""
    counts = [
        (n, f"{n} {reason}")
        for account in accounting
        if getattr(account, status)
        for reason, n in account.reasons.items()
    ]
    return ", ".join(text for _, text in sorted(counts, reverse=True)[:5]) or "no row at all"


def out_of_reach(wanted: int, left: int, hits: int, trials: int) -> bool:
    """Are `wanted` further hits in the `left` trials to come all but impossible, after `hits` in `trials`?

    Even at the upper 99.9 % bound of the hit rate (Clopper and Pearson, exact for few trials, too) the
    chance of so many is below one in a thousand.
    """
    from scipy.special import bdtrc, betaincinv  # type: ignore[import-untyped]

    if wanted > left:
        return True
    if wanted <= 0 or hits == trials:
        return False
    lucky = betaincinv(hits + 1, trials - hits, 1 - UNLIKELY)
    return bool(bdtrc(wanted - 1, left, lucky) < UNLIKELY)
