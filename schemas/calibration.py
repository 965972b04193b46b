"""A judge compared with people: the configuration of a judge to run, and the stored figures.

A stored `Calibration` is a function of its input files and the judge's answers alone: it holds no time,
no place and no path, so that equal inputs give equal files.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from gradeloom.schemas.config import NAME, TREC_LEVELS, CacheConfig, JudgeConfig, Level, Settings, operational
from gradeloom.schemas.manifest import ModelIdentity


class JudgeRunConfig(Settings):
    """A judge to be asked for the grades that people have given."""

    name: str = Field(pattern=f"^{NAME.pattern}$", description="Of the judge, and of its run directory.")
    judge: JudgeConfig = Field(description="As in a graded run, with an engine of its own.")
    levels: tuple[Level, ...] = Field(TREC_LEVELS, min_length=2, max_length=6)
    seed: int = Field(0, description="Of method `samples`.")
    root: str = operational("runs", min_length=1, description="Folder of run directories.")
    shard_pairs: int = operational(500, ge=1, description="Pairs that are asked about at once, at most.")
    cache: CacheConfig = CacheConfig()

    @model_validator(mode="after")
    def _consistent(self) -> JudgeRunConfig:
        if self.judge.engine is None:
            raise ValueError("judge.engine: a judge to calibrate needs an engine of its own")
        if self.judge.pairwise:
            raise ValueError("judge.pairwise: single passages are judged here; leave it out")
        if len({level.grade for level in self.levels}) != len(self.levels):
            raise ValueError("levels: every grade may stand once")
        return self


class _Stored(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class FileIdentity(_Stored):
    """A file by its name, without its folder, and the SHA-256 of its bytes."""

    name: str
    sha256: str


class LabelFileJudge(_Stored):
    """A judge known by a file of its labels."""

    kind: Literal["labels"] = "labels"
    name: str
    labels: FileIdentity


class ModelJudge(_Stored):
    """A judge that was run.

    Attributes:
        prompt: name -> digest.
        settings: what else decides its answers: method, min_mass, levels, …
        fingerprint: digest over model, prompt and settings: equal for the same judge on any collection.
    """

    kind: Literal["model"] = "model"
    name: str
    model: ModelIdentity
    prompt: dict[str, str]
    settings: dict[str, Any]
    fingerprint: str
    queries: FileIdentity
    corpus: FileIdentity


Judge = Annotated[LabelFileJudge | ModelJudge, Field(discriminator="kind")]


class HumanLabels(_Stored):
    """What people said: the whole file's identity, and how many of its queries were used (None: all)."""

    qrels: FileIdentity
    limit: int | None = None


class PairCounts(_Stored):
    """Pairs (query, passage), and what became of those that people graded.

    `human` = `both` + `abstained` + the sum of `unanswered` + `missing_judge`.

    Attributes:
        queries: with a pair that both graded.
        human: graded by people.
        both: graded by people and judge; all figures are over these.
        abstained: the judge was asked and would not say.
        unanswered: the judge gave no answer, by reason (`judge_prompt_too_long`, `no_text`, …).
        missing_judge: the judge's labels do not know the pair.
        missing_human: graded by the judge, not by people.
    """

    queries: int
    human: int
    both: int
    abstained: int = 0
    unanswered: dict[str, int] = {}
    missing_judge: int = 0
    missing_human: int = 0


class Estimate(_Stored):
    """A figure with its 95 % interval (percentile bootstrap over queries); None where it is not defined."""

    value: float | None
    low: float | None
    high: float | None


class GradeFigures(_Stored):
    """One grade: pairs that people, the judge, and both gave it.

    Precision is both / judge, recall both / human; None where nothing was given the grade.
    """

    grade: int
    human: int
    judge: int
    both: int
    precision: float | None
    recall: float | None


class Bin(_Stored):
    """Pairs whose expected grade lies between two bounds, and the mean human grade of these pairs."""

    pairs: int
    expected: float
    human: float


class ExpectedFigures(_Stored):
    """Expected against human grades: Pearson's r, root mean squared difference, reliability by bins."""

    pairs: int
    pearson: float | None
    rmse: float
    reliability: tuple[Bin, ...]


class Agreement(_Stored):
    """Judge against people.

    Attributes:
        grades: the scale, ascending.
        matrix: pairs, a row per human and a column per judge's grade.
        abstained: the judge's abstentions per human grade.
        exact: share of equal grades.
        kappa: Cohen's kappa over all grades.
        quadratic_kappa: with quadratic weights.
        binary_kappa: of grades from `binary_at` against lower ones.
    """

    grades: tuple[int, ...]
    matrix: tuple[tuple[int, ...], ...]
    abstained: tuple[int, ...]
    exact: float | None
    kappa: Estimate
    quadratic_kappa: Estimate
    binary_at: int
    binary_kappa: Estimate
    per_grade: tuple[GradeFigures, ...]
    expected: ExpectedFigures | None = None


class System(_Stored):
    """Mean nDCG@10 of a run under the grades of people and of the judge."""

    run: FileIdentity
    human: float
    judge: float


class SystemRanking(_Stored):
    """Do judge and people rank systems alike? Rankings without the passages that the judge did not grade.

    Attributes:
        queries: that the means are over.
        left_out: retrieved pairs that people graded and the judge did not; taken out of the rankings.
        kendall_tau: tau-b of the two columns; None for fewer than two runs, or where all are tied.
    """

    measure: Literal["nDCG@10"] = "nDCG@10"
    gain_offset: float = 0
    queries: int
    left_out: int
    kendall_tau: float | None
    systems: tuple[System, ...]


class MappedAgreement(_Stored):
    """Agreement of grades mapped by an isotonic mapping that was fitted elsewhere."""

    mapping: FileIdentity
    agreement: Agreement


class Calibration(_Stored):
    """A judge's agreement with people on one domain."""

    format: Literal[1] = 1
    kind: Literal["calibration"] = "calibration"
    domain: str | None
    human: HumanLabels
    judge: Judge
    pairs: PairCounts
    agreement: Agreement
    isotonic: MappedAgreement | None = None
    ranking: SystemRanking | None = None


class IsotonicMapping(_Stored):
    """A monotone mapping from a judge's expected grades to human grades, and what it was fitted on.

    Attributes:
        expected: knots, ascending, (K,).
        human: mapped values at the knots, (K,); linear between them, constant beyond.
        fitted_pairs: a digest of each pair that it was fitted on: it may not be evaluated on these.
    """

    format: Literal[1] = 1
    kind: Literal["isotonic"] = "isotonic"
    domain: str | None
    human_labels: HumanLabels
    judge: Judge
    expected: tuple[float, ...] = Field(min_length=1)
    human: tuple[float, ...] = Field(min_length=1)
    fitted_pairs: tuple[str, ...]

    @model_validator(mode="after")
    def _monotone(self) -> IsotonicMapping:
        if len(self.expected) != len(self.human):
            raise ValueError("expected and human must have one length")
        if list(self.expected) != sorted(self.expected) or list(self.human) != sorted(self.human):
            raise ValueError("expected and human must ascend")
        return self
