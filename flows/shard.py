"""One shard of a graded run: its rows, stage by stage."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from gradeloom.flows.pacing import Tally
from gradeloom.schemas.rows import DecisionRow, JudgedRow, Judgement, LabelRow, ListRow, QueryRow, Row
from gradeloom.tasks.release.write import Story

R = TypeVar("R", bound=Row)


@dataclass
class Shard:
    """One shard's rows, stage by stage. Held only while it is worked on or released."""

    ordinal: int
    source: list[QueryRow]
    lists: list[ListRow] = field(default_factory=list)
    filtered: list[DecisionRow] = field(default_factory=list)
    deduplicated: list[DecisionRow] | None = None
    judged: list[JudgedRow] = field(default_factory=list)
    labels: list[LabelRow] = field(default_factory=list)

    @property
    def queries(self) -> list[QueryRow]:
        return kept(self.source)

    def passing(self, decisions: Sequence[Row]) -> list[ListRow]:
        """The lists whose decision is `kept`."""
        ids = {row.id for row in kept(decisions)}
        return [row for row in self.lists if row.id in ids]

    def tally(self) -> Tally:
        """This shard's sums."""
        judgements = [judgement for row in self.judged for judgement in row.judgements]
        return Tally(
            shards=1,
            rows=len(self.source),
            accepted=len(kept(self.labels)),
            tokens=sum(r.prompt_tokens + r.completion_tokens for r in self.lists)
            + sum(r.prompt_tokens + r.completion_tokens for r in self.judged),
            truncated=sum(row.truncated > 0 for row in self.lists),
            judgements=len(judgements),
            abstained=sum(judgement.abstained for judgement in judgements),
        )

    def stages(self) -> list[tuple[str, Sequence[Row]]]:
        return [
            ("source", self.source),
            ("generate", self.lists),
            ("filter", self.filtered),
            ("near_duplicates", self.deduplicated or []),
            ("judge", self.judged),
            ("label", self.labels),
        ]

    def stories(self) -> Iterator[Story]:
        """What became of each source row, in order."""
        last: dict[str, tuple[str, Row]] = {}
        for stage, rows in self.stages():
            last.update((row.id, (stage, row)) for row in rows)
        lists = {row.id: row for row in self.lists}
        judged = {row.id: row for row in self.judged}
        labels = {row.id: row for row in self.labels}
        for query in self.source:
            stage, decision = last[query.id]
            yield Story(
                query, lists.get(query.id), judged.get(query.id), labels.get(query.id), stage, decision
            )


def kept(rows: Sequence[R]) -> list[R]:
    return [row for row in rows if row.status == "kept"]


def reading(judgement: Judgement | None) -> dict[str, int | float | bool | None]:
    """What a judge read in a passage, for people to look at; all None without a judge."""
    if judgement is None:
        return {"judged": None, "mass": None, "abstained": None}
    return {"judged": judgement.judged, "mass": judgement.mass, "abstained": judgement.abstained}
