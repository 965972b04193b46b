"""The configurations of `gradeloom retriever`: train, evaluate, mine."""

from __future__ import annotations

from typing import Annotated, Literal, Protocol, TypeVar

from pydantic import Field, field_validator, model_validator

from gradeloom.schemas.config import NAME, JudgeConfig, Settings, operational

_NAME = f"^{NAME.pattern}$"  # pydantic searches; a name is a folder's name


class _Named(Protocol):
    @property
    def name(self) -> str: ...


Named = TypeVar("Named", bound=_Named)

# --- the model ------------------------------------------------------------------------------


class LoraConfig(Settings):
    """Low-rank adapters instead of all weights (peft)."""

    rank: int = Field(16, ge=1)
    alpha: int = Field(32, ge=1)
    dropout: float = Field(0.05, ge=0, lt=1)
    target_modules: tuple[str, ...] | None = Field(
        None, description="Modules that get an adapter; default: all linear layers."
    )


class EncoderConfig(Settings):
    """A sentence-transformers model and how text goes into it."""

    model: str = Field(
        "bundled",
        description="`bundled` (all-MiniLM-L6-v2), a folder (also a trained retriever), or a hub name.",
    )
    revision: str | None = Field(None, description="Hub revision of the model.")
    query_tokens: int = Field(64, ge=4, description="Queries are cut after so many tokens.")
    passage_tokens: int = Field(256, ge=4, description="Passages are cut after so many tokens.")
    query_prompt: str = Field("", description="Put before every query (`query: `); default: the model's own.")
    passage_prompt: str = Field("", description="Put before every passage; default: the model's own.")
    trust_remote_code: bool = False
    device: str | None = operational(None, description="cpu, cuda, cuda:1, mps; default: the best there is.")
    batch_size: int = operational(32, ge=1, description="Texts encoded at once when searching.")


# --- collections and data -------------------------------------------------------------------


class CollectionConfig(Settings):
    """Queries, passages and graded judgements: a release, a BEIR folder, or three files."""

    release: str | None = Field(None, description="A release: folder, URL, `name` or `name@version`.")
    path: str | None = Field(None, description="A BEIR folder: corpus.jsonl, queries.jsonl, qrels/*.tsv.")
    split: str = Field("test", description="Which qrels of the BEIR folder: qrels/<split>.tsv.")
    queries: str | None = Field(None, description="File of queries: .jsonl .tsv .parquet, optionally .gz.")
    corpus: str | None = Field(None, description="File of passages: _id, text and optionally title.")
    qrels: str | None = Field(
        None, description="File of judgements: TREC (`qid 0 docid grade`), BEIR .tsv, or .parquet. "
        "Given beside `release` or `path`, it takes the place of theirs.",
    )  # fmt: skip

    @model_validator(mode="after")
    def _one_place(self) -> CollectionConfig:
        files = (self.queries, self.corpus)
        ways = (self.release is not None) + (self.path is not None) + any(f is not None for f in files)
        if ways != 1:
            raise ValueError(
                "give one of `release`, `path` (a BEIR folder), or `queries` + `corpus` + `qrels`"
            )
        if any(f is not None for f in files) and None in (*files, self.qrels):
            raise ValueError("`queries`, `corpus` and `qrels` belong together")
        return self


class TrainingSource(CollectionConfig):
    """Graded qrels with declared transforms, applied in the order of the fields."""

    name: str = Field(min_length=1)
    label: Literal["grade", "intended", "judged", "expected"] = Field(
        "grade", description="Which grades of a release's lists; other collections have `grade` alone."
    )
    exclude_queries: str | None = Field(None, description="File with query ids, one a line, to leave out.")
    limit: int | None = Field(None, ge=1, description="Use the first N queries that are left ...")
    share: float = Field(1.0, gt=0, le=1, description="... and of them a seeded share.")
    keep: tuple[float, float] | None = Field(None, description="Keep judgements from..to, both included.")
    map: dict[float, float] = Field({}, description="Old grade -> new grade; others stay.")
    constant: float | None = Field(None, description="One grade for all that is kept (real positives: 3).")
    top: int | None = Field(None, ge=0, description="Per query: the k highest grades ...")
    bottom: int | None = Field(None, ge=0, description="... and the k lowest of the rest ...")
    random: int | None = Field(
        None, ge=0, description="... and k drawn from the rest. All unset: everything."
    )


class EvaluationSet(CollectionConfig):
    """A test collection and how it is measured."""

    name: str = Field(min_length=1, pattern=_NAME)
    binary_at: float = Field(1, description="Grades from here count as relevant for MRR, recall and AP.")
    gain_offset: float = Field(0, description="Taken off every grade to get its gain (MedQuAD: 1).")
    pool: bool = Field(False, description="Re-rank each query's judged passages instead of searching all.")
    exclude: str | None = Field(
        None, description="TREC qrels: passages left out of a query's ranking (Cranfield's source papers).",
    )  # fmt: skip


# --- the loss -------------------------------------------------------------------------------


class LossTerm(Settings):
    """One term of the loss. The formulas are in gradeloom.tasks.train.losses."""

    kind: Literal["gaussian", "aligned", "ordinal", "kl", "infonce"] = "aligned"
    weight: float = Field(1.0, gt=0)
    temperature: float | None = Field(
        None, gt=0, description="Of the predictions; default: 0.05 for normalised embeddings, else 1."
    )
    label_temperature: float = Field(0.4, gt=0, description="Of the targets; 1 is as published.")
    target_mass: float | None = Field(
        None, gt=0, lt=1, description="Mass of a list's top grade at any B, instead of label_temperature.",
    )  # fmt: skip
    in_batch: Literal["zero", "masked"] | None = Field(
        None,
        description="Other queries' passages have label 0, or take no part; default: masked for `ordinal`, "
        "else zero.",
    )
    power: float = Field(2.0, ge=1, description="r of `ordinal`; 1 is W1.")
    positives: Literal["grade", "top"] = Field(
        "grade", description="`infonce`: grades >= positive_grade, or each list's highest only."
    )
    positive_grade: float = 2.0

    def temperature_for(self, normalised: bool) -> float:
        """The temperature of the predictions, embeddings being of unit length or not."""
        return self.temperature or (0.05 if normalised else 1.0)

    @property
    def own_list(self) -> bool:
        """Whether other queries' passages take no part."""
        return (self.in_batch or ("masked" if self.kind == "ordinal" else "zero")) == "masked"


# --- train ----------------------------------------------------------------------------------


class TrainingConfig(Settings):
    batch_size: int = Field(16, ge=1, description="Queries per loss and device.")
    passages: int | None = Field(
        None, ge=2, description="Passages per query (K); default: the longest list's."
    )
    epochs: float = Field(1.0, gt=0)
    max_steps: int | None = Field(None, ge=1, description="Stop here instead.")
    learning_rate: float = Field(2e-5, gt=0)
    warmup: float = Field(0.05, ge=0, lt=1, description="Share of the steps.")
    weight_decay: float = Field(0.0, ge=0)
    freeze_layers: int = Field(
        0, ge=0, description="Embeddings and so many lower layers are left as they are."
    )
    lora: LoraConfig | None = None
    chunk: int | None = Field(
        None,
        ge=1,
        description="Texts per forward pass: gradients are cached (GradCache), so that large batches fit. "
        "Decides which dropout is drawn, and nothing else.",
    )
    gather: bool = Field(True, description="Several devices: one loss over the queries of all.")
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    seed: int = 0
    save_steps: int | None = operational(
        None, ge=1, description="Checkpoint every so many steps; default: 10 times a run."
    )
    eval_steps: int | None = operational(
        None, ge=1, description="Evaluate on `dev` so often; default: 10 times a run."
    )
    keep_checkpoints: int = operational(2, ge=1)


class MeasuresConfig(Settings):
    """What is computed, and against what."""

    measures: tuple[str, ...] = Field(
        ("nDCG@10", "MRR@10", "R@100", "AP", "unjudged@10"),
        description="nDCG@k (linear gain), nDCG-exp@k (2^g - 1), MRR@k, R@k, P@k, AP, unjudged@k.",
    )
    depth: int = Field(1000, ge=1, description="Passages per query in a run.")
    bm25: bool = Field(True, description="BM25 as a row.")
    baseline: str | None = Field(
        None, description="Row that the others are tested against; default: the first."
    )
    permutations: int = Field(10_000, ge=100, description="Of the paired randomisation test.")
    seed: int = 0


class RetrieverConfig(Settings):
    """Train a retriever on graded data, then evaluate it on named sets."""

    name: str = Field(pattern=_NAME)
    encoder: EncoderConfig = EncoderConfig()
    data: tuple[TrainingSource, ...] = Field(min_length=1)
    loss: tuple[LossTerm, ...] = Field((LossTerm(),), min_length=1)
    training: TrainingConfig = TrainingConfig()
    dev: EvaluationSet | None = Field(
        None, description="Evaluated during training; makes the learning curve."
    )
    sets: tuple[EvaluationSet, ...] = Field((), description="Evaluated before and after training.")
    measures: MeasuresConfig = MeasuresConfig()
    twins: str | None = Field(
        None, description="JSONL of query_id, passage_id, twin: source bias before and after."
    )
    twins_set: str | None = Field(
        None, description="Name of the set (or dev) the twins belong to; default: the first."
    )
    root: str = operational("retrievers", min_length=1, description="Folder of trained retrievers.")
    releases: str = operational("releases", min_length=1, description="Folder of releases.")

    @field_validator("data")
    @classmethod
    def _names(cls, data: tuple[TrainingSource, ...]) -> tuple[TrainingSource, ...]:
        return _distinct(data)

    @field_validator("sets")
    @classmethod
    def _set_names(cls, sets: tuple[EvaluationSet, ...]) -> tuple[EvaluationSet, ...]:
        return _distinct(sets)


# --- evaluate -------------------------------------------------------------------------------


class NamedEncoder(EncoderConfig):
    name: str = Field(pattern=_NAME)


class EvaluateConfig(Settings):
    """Several retrievers on several sets."""

    retrievers: tuple[NamedEncoder, ...] = ()
    sets: tuple[EvaluationSet, ...] = Field(min_length=1)
    measures: MeasuresConfig = MeasuresConfig()
    root: str = operational("evaluations", min_length=1)
    name: str = Field("evaluation", pattern=_NAME)
    releases: str = operational("releases", min_length=1)

    @field_validator("sets")
    @classmethod
    def _set_names(cls, sets: tuple[EvaluationSet, ...]) -> tuple[EvaluationSet, ...]:
        return _distinct(sets)

    @field_validator("retrievers")
    @classmethod
    def _names(cls, retrievers: tuple[NamedEncoder, ...]) -> tuple[NamedEncoder, ...]:
        return _distinct(retrievers)


# --- mine -----------------------------------------------------------------------------------


class Bm25Miner(Settings):
    kind: Literal["bm25"] = "bm25"


class EncoderMiner(EncoderConfig):
    kind: Literal["encoder"] = "encoder"


class MineConfig(Settings):
    """Hard (or random) negatives for a collection's queries, as a qrels file."""

    collection: CollectionConfig
    by: Annotated[Bm25Miner | EncoderMiner, Field(discriminator="kind")] = Bm25Miner()
    depth: int = Field(1000, ge=1, description="Candidates are a query's top so many.")
    skip: int = Field(0, ge=0, description="The first so many candidates are left out.")
    count: int = Field(2, ge=1, description="Negatives per query.")
    pick: Literal["top", "random"] = Field("top", description="The highest candidates, or a seeded draw.")
    positive_grade: float = Field(1, description="Judged from here: a positive.")
    exclude: Literal["positives", "judged"] = Field(
        "positives", description="Judged passages that are never a negative."
    )
    max_score: float | None = Field(
        None, description="Margin: at most this ratio of the lowest-scoring positive, e.g. 0.95.",
    )  # fmt: skip
    grade: float = Field(0, description="The grade that a negative gets.")
    judge: JudgeConfig | None = Field(
        None,
        description="Read every pick first; what it grades >= positive_grade or abstains on is left out.",
    )
    seed: int = 0
    out: str = operational("negatives.parquet", min_length=1)
    releases: str = operational("releases", min_length=1)


def _distinct(named: tuple[Named, ...]) -> tuple[Named, ...]:
    names = [one.name for one in named]
    if len(set(names)) != len(names):
        raise ValueError("every name may stand once")
    return named
