"""The configuration of a graded run: pydantic models read from YAML and shown as a form in Prefect.

A field is either *content* (it changes rows; it enters stage fingerprints and the manifest) or
*operational* (roots, endpoints, concurrency, timeouts: it never does). Operational fields are
declared with `operational(...)`; `content_view` drops them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
VERSION = re.compile(r"(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)(-rc\.[1-9]\d*)?")


class Settings(BaseModel):
    """Base of all settings: unknown keys are refused, values are immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @field_validator("*")
    @classmethod
    def _storable(cls, value: Any) -> Any:
        """What JSON, SQLite and file systems cannot hold is refused where it is set."""
        for part in _leaves(value):
            if isinstance(part, int) and not -(2**63) <= part < 2**63:
                raise ValueError("expected a number that fits into 64 bits")
            if isinstance(part, str) and "\0" in part:
                raise ValueError("holds the control character U+0000")
        return value


def _leaves(value: Any) -> Iterator[Any]:
    """A setting's plain values; settings inside it have checked theirs."""
    if isinstance(value, dict):
        value = (*value, *value.values())
    if isinstance(value, tuple):
        for part in value:
            yield from _leaves(part)
    else:
        yield value


def operational(default: Any = ..., **kwargs: Any) -> Any:
    """A field that says where or how fast, never what: kept out of fingerprints and manifests."""
    return Field(default, json_schema_extra={"operational": True}, **kwargs)


def content_view(settings: BaseModel) -> dict[str, Any]:
    """The settings that change rows, as plain JSON values, operational fields left out."""
    view: dict[str, Any] = {}
    for name, info in type(settings).model_fields.items():
        extra = info.json_schema_extra
        if isinstance(extra, dict) and extra.get("operational"):
            continue
        view[name] = _plain(getattr(settings, name))
    return view


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return content_view(value)
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    return value


# --- source ---------------------------------------------------------------------------------


class SourceConfig(Settings):
    """Where queries come from."""

    path: str | None = operational(
        None,
        description="A file (.jsonl .tsv .csv .parquet .txt .topics, optionally .gz) or BEIR folder.",
    )
    dataset: str | None = Field(
        None, min_length=1, description="A Hugging Face data set name, instead of a path."
    )
    config: str | None = Field(None, description="Configuration of the Hugging Face data set.")
    split: str = Field("train", description="Split of the Hugging Face data set.")
    revision: str | None = Field(None, description="Revision of the Hugging Face data set.")
    format: Literal["auto", "jsonl", "tsv", "csv", "parquet", "trec", "beir", "huggingface"] = "auto"
    id_field: str | None = Field(
        None, description="Field that holds the query id; default: _id, query_id, qid or id, else a digest."
    )
    text_field: str | None = Field(
        None, description="Field that holds the query text; default: text, query, title or question."
    )
    on_bad: Literal["error", "reject"] = Field(
        "error", description="A bad row (empty, duplicate, unreadable) stops the run, or is a counted reject."
    )

    @model_validator(mode="after")
    def _one_place(self) -> SourceConfig:
        if (self.path is None) == (self.dataset is None):
            raise ValueError("give either `path` (a file or folder) or `dataset` (a Hugging Face name)")
        return self


# --- engine ---------------------------------------------------------------------------------


class EngineBase(Settings):
    window: int = operational(64, ge=1, le=65536, description="Requests outstanding at once.")
    request_timeout: float = operational(600.0, gt=0, description="Seconds until a request counts as lost.")
    transport_retries: int = operational(
        8, ge=0, description="Times one attempt is sent again after a transport fault."
    )
    retry_delay: float = operational(0.5, ge=0, description="First pause in seconds; doubles up to 30 s.")
    tokenizer: str | None = Field(
        None, description="Folder or hub name of the tokenizer that counts prompt tokens; vllm: the model's."
    )


class VllmEngine(EngineBase):
    """A vLLM server started, watched and stopped by gradeloom, on CPU or GPU."""

    kind: Literal["vllm"] = "vllm"
    model: str = Field(
        "bundled", description="`bundled` (SmolLM2-135M-Instruct), a local folder, or a hub name."
    )
    revision: str | None = Field(None, description="Hub revision of the model.")
    dtype: str = "auto"
    max_model_len: int = Field(2048, ge=64)
    trust_remote_code: bool = False
    python: str = operational(
        ".venv-vllm/bin/python", description="Interpreter of the environment that holds vLLM."
    )
    args: tuple[str, ...] = operational(
        (),
        description="More arguments for the vLLM server. Those that are not about speed alone count as part "
        "of the model.",
    )
    env: dict[str, str] = operational(
        {}, description="More environment variables for the server; no secrets."
    )
    listen: Literal["unix", "tcp"] = operational("unix", description="Unix socket, or 127.0.0.1 with a key.")
    startup_timeout: float = operational(900.0, gt=0)
    stall_timeout: float = operational(
        300.0, gt=0, description="Seconds without any answer, while requests are out, until a restart."
    )
    restarts: int = operational(3, ge=0, description="Restarts without progress in between until giving up.")


def _leads_somewhere(url: str) -> bool:
    if url.startswith("unix:"):
        return url != "unix:"
    try:
        parts = urlsplit(url)
        return bool(parts.hostname) and parts.port != 0 and not re.search(r"\s", url)
    except ValueError:
        return False


class OpenAIEngine(EngineBase):
    """One or many OpenAI-compatible endpoints."""

    kind: Literal["openai"] = "openai"
    model: str = Field(description="Model name that the endpoints serve.")
    revision: str | None = Field(None, description="Your name for the weights behind the endpoints.")
    max_model_len: int | None = Field(None, ge=64)
    endpoints: tuple[str, ...] = operational(
        description="Base URLs, e.g. http://10.0.0.7:8000/v1; unix:/path/to.sock works too.", min_length=1
    )
    api_key_env: str | None = operational(
        None, description="NAME of the environment variable that holds the API key, never the key."
    )

    @field_validator("endpoints")
    @classmethod
    def _no_secret_in_url(cls, endpoints: tuple[str, ...]) -> tuple[str, ...]:
        for url in endpoints:
            if "@" in url.split("://", 1)[-1].split("/", 1)[0]:
                raise ValueError("an endpoint must not hold `user:password@`; use api_key_env")
            if re.search(r"[?&](api[-_]?key|key|token)=", url, re.IGNORECASE):
                raise ValueError("an endpoint must not hold a key; use api_key_env")
            if not url.startswith(("http://", "https://", "unix:")):
                raise ValueError("an endpoint starts with http://, https:// or unix:")
            if not _leads_somewhere(url):
                raise ValueError(f"{url!r} names no host or socket, e.g. http://10.0.0.7:8000/v1")
        return endpoints

    @field_validator("api_key_env")
    @classmethod
    def _a_name_not_a_key(cls, name: str | None) -> str | None:
        if name is not None and not re.fullmatch(r"[A-Z_][A-Z0-9_]{0,63}", name):
            raise ValueError("api_key_env is the NAME of an environment variable, e.g. OPENAI_API_KEY")
        return name


class ReplayEngine(EngineBase):
    """Recorded completions, matched by (stage, source id, part, attempt). For tests and examples."""

    kind: Literal["replay"] = "replay"
    path: str = operational(description="The recorded file.")
    adapter: Literal["graded_lists", "judgements"] = Field(description="How the file is read.")


class FaultRates(Settings):
    """Shares of requests (0..1) that meet each fault; what happens depends on the request alone."""

    stall: float = Field(0.0, ge=0, le=1, description="No answer until the client gives up.")
    die: float = Field(0.0, ge=0, le=1, description="The connection is closed in the middle.")
    bad_body: float = Field(0.0, ge=0, le=1, description="The HTTP body is not JSON.")
    rate_limited: float = Field(0.0, ge=0, le=1, description="429.")
    server_error: float = Field(0.0, ge=0, le=1, description="500.")


class FaultEngine(EngineBase):
    """A deterministic stand-in server for tests and benchmarks of failure and scale. Not a model."""

    kind: Literal["fault"] = "fault"
    seed: int = 0
    truncate: float = Field(0.0, ge=0, le=1, description="Share of completions cut by `length`.")
    bad_json: float = Field(0.0, ge=0, le=1, description="Share of completions that do not parse.")
    duplicate: float = Field(0.0, ge=0, le=1, description="Share of lists that repeat an earlier text.")
    max_model_len: int | None = Field(None, ge=64)
    transport: FaultRates = operational(FaultRates())
    stall_seconds: float = operational(30.0, gt=0)
    latency: float = operational(0.0, ge=0, description="Seconds before every answer.")
    log: str | None = operational(None, description="Append-only request log (JSON lines).")


EngineConfig = Annotated[VllmEngine | OpenAIEngine | ReplayEngine | FaultEngine, Field(discriminator="kind")]


# --- generation -----------------------------------------------------------------------------


class Level(Settings):
    """One level of relevance."""

    grade: int = Field(ge=0, le=9, description="Higher is more relevant.")
    name: str = Field(min_length=1)
    definition: str = Field(min_length=1)


TREC_LEVELS = (
    Level(grade=3, name="perfectly relevant",
          definition="dedicated to the query and holds the exact answer"),
    Level(grade=2, name="highly relevant",
          definition="has some answer to the query, but it is partial, unclear or buried among other things"),
    Level(grade=1, name="related",
          definition="on the topic of the query and shares its vocabulary, but does not answer it"),
    Level(grade=0, name="irrelevant",
          definition="has nothing to do with the query"),
)  # fmt: skip


class LengthBucket(Settings):
    name: str
    min_words: int = Field(ge=1)
    max_words: int = Field(ge=1)

    @model_validator(mode="after")
    def _ordered(self) -> LengthBucket:
        if self.min_words > self.max_words:
            raise ValueError("min_words is greater than max_words")
        return self


class Attributes(Settings):
    """What is drawn, with a seed, for every query, so that the corpus is diverse."""

    length: tuple[LengthBucket, ...] = (
        LengthBucket(name="short", min_words=25, max_words=60),
        LengthBucket(name="medium", min_words=60, max_words=110),
        LengthBucket(name="long", min_words=110, max_words=180),
    )
    audience: tuple[str, ...] = ("a general reader", "a student", "a specialist", "a busy practitioner")
    style: tuple[str, ...] = (
        "an encyclopedia article", "a how-to page", "a forum reply", "a news report", "a product page",
        "a textbook section",
    )  # fmt: skip


class GenerationConfig(Settings):
    mode: Literal["together", "per_level"] = Field(
        "together", description="All levels in one completion, or one completion per level."
    )
    prompt: str | None = Field(
        None, description="Name in data/prompts or a YAML path; default follows the mode."
    )
    temperature: float = Field(0.9, ge=0, le=2)
    top_p: float = Field(0.95, gt=0, le=1)
    frequency_penalty: float = Field(
        0.0, ge=-2, le=2, description="Above 0 keeps small models out of loops; changes nothing at 0."
    )
    max_tokens: int = Field(1024, ge=16)
    attempts: int = Field(3, ge=1, le=20, description="Times a query is asked, each with another seed.")
    shuffle_levels: bool = Field(True, description="Ask for the levels in a seeded random order.")
    attributes: Attributes = Attributes()
    examples: str | None = operational(
        None, description="JSONL of example lists shown in the prompt: {query, passages: {grade: text}}."
    )
    examples_shown: int = Field(1, ge=0, le=8)


# --- filters --------------------------------------------------------------------------------


class StructureFilter(Settings):
    """Every level present once, none empty. Reason: `missing_level`, `empty_passage`."""

    kind: Literal["structure"] = "structure"


class LengthFilter(Settings):
    """Words (or characters for scripts without spaces) in bounds. Reason: `too_short`, `too_long`."""

    kind: Literal["length"] = "length"
    min_words: int = Field(10, ge=0)
    max_words: int = Field(250, ge=1)

    @model_validator(mode="after")
    def _ordered(self) -> LengthFilter:
        if self.min_words > self.max_words:
            raise ValueError("min_words is greater than max_words")
        return self


class RefusalFilter(Settings):
    """Refusals and meta-talk ("as an AI", "level 3", "the query"). Reason: `refusal`, `meta_talk`."""

    kind: Literal["refusal"] = "refusal"


class QueryCopiedFilter(Settings):
    """A passage that is the query again. Reason: `query_copied`."""

    kind: Literal["query_copied"] = "query_copied"
    threshold: float = Field(
        0.8, gt=0, le=1,
        description="Highest allowed share of the passage's words that the copied query makes up.",
    )  # fmt: skip


class SiblingsFilter(Settings):
    """Passages of one list too alike. Reason: `siblings_alike`."""

    kind: Literal["siblings"] = "siblings"
    measure: Literal["rouge_l", "jaccard"] = "rouge_l"
    threshold: float = Field(0.7, gt=0, le=1)


class DecontaminateFilter(Settings):
    """Overlap with evaluation sets. Reason: `contaminated_query`, `contaminated_passage`."""

    kind: Literal["decontaminate"] = "decontaminate"
    sets: dict[str, str] = operational(
        {}, description="Name -> BEIR-like folder or query/passages file of an evaluation set."
    )
    ngram: int = Field(13, ge=3)


class NearDuplicatesFilter(Settings):
    """Exact and near duplicates over the whole data set. Reason: `duplicate`, `near_duplicate`.

    MinHash signatures propose, the true Jaccard similarity of word shingles decides.
    """

    kind: Literal["near_duplicates"] = "near_duplicates"
    threshold: float = Field(0.8, gt=0, le=1)
    shingle: int = Field(3, ge=1)
    bands: int = Field(10, ge=1)
    rows_per_band: int = Field(6, ge=1)
    seed: int = 42


FilterConfig = Annotated[
    StructureFilter | LengthFilter | RefusalFilter | QueryCopiedFilter | SiblingsFilter
    | DecontaminateFilter | NearDuplicatesFilter,
    Field(discriminator="kind"),
]  # fmt: skip

DEFAULT_FILTERS: tuple[Any, ...] = (
    StructureFilter(), LengthFilter(), RefusalFilter(), QueryCopiedFilter(), SiblingsFilter(),
    NearDuplicatesFilter(),
)  # fmt: skip


# --- judge and labels -----------------------------------------------------------------------


class JudgeConfig(Settings):
    engine: EngineConfig | None = Field(None, description="The judge's engine; default: the generator's.")
    prompt: str = "judge"
    method: Literal["logprobs", "samples"] = Field(
        "logprobs", description="One token's log-probabilities, or the share of n samples."
    )
    samples: int = Field(8, ge=1, description="Samples per passage for method `samples`.")
    temperature: float = Field(0.7, ge=0, description="Of method `samples`; `logprobs` uses 0.")
    min_mass: float = Field(0.5, ge=0, le=1, description="Mass on the grade tokens below this abstains.")
    pairwise: bool = Field(False, description="Also ask each pair of a list, in both orders.")
    pairwise_prompt: str = "judge_pair"


class LabelConfig(Settings):
    policy: Literal["intended", "judged", "agreed", "expected"] | None = Field(
        None, description="Default: `agreed` with an independent judge, else `intended`."
    )


# --- run, release, cache --------------------------------------------------------------------


class CanaryConfig(Settings):
    """Bounds checked on the first shard, before the rest is paid for."""

    rows: int = operational(50, ge=1, description="Rows of the first shard.")
    min_accept: float = operational(0.0, ge=0, le=1)
    max_truncated: float = operational(1.0, ge=0, le=1)
    max_abstained: float = operational(1.0, ge=0, le=1)


class RunConfig(Settings):
    root: str = operational("runs", min_length=1, description="Folder of run directories.")
    shard_rows: int = operational(500, ge=1)
    wave: int = operational(4, ge=1, description="Shards in progress at once.")
    seed: int = 0
    limit: int | None = Field(None, ge=1, description="Read only the first N rows of the source.")
    target: int | None = Field(None, ge=1, description="Stop at the first N accepted lists, in order.")
    budget_tokens: int | None = Field(
        None, ge=1, description="Prompt and completion tokens to spend at most."
    )
    max_failed: float = operational(0.2, ge=0, le=1, description="Share of failed rows above which: exit 3.")
    canary: CanaryConfig | None = operational(None)


class GateRule(Settings):
    """What a release must bear out; see `gradeloom.tasks.evaluate.gate`."""

    metric: Literal["grade_precision", "diversity"] = Field(
        description="Share of the passages of a grade that have it; 1 - mean cosine of passages of a grade, "
        "each of another query."
    )
    level: int | None = Field(None, description="The released grade; default: all together.")
    source: Literal["audit", "judge"] = Field(
        "judge", description="Who says so: people (`release audit`), or the release's judge."
    )
    min: float = Field(ge=0, le=1, description="The one-sided 95 % lower bound must reach it.")
    n_min: int = Field(100, ge=1, description="Passages that the figure must rest on.")

    @model_validator(mode="after")
    def _nobody_is_asked_for_diversity(self) -> GateRule:
        if self.metric == "diversity" and self.source == "audit":
            raise ValueError("diversity is measured, not audited; leave `source` out")
        return self


class ReleaseConfig(Settings):
    name: str
    version: str = "0.1.0"
    root: str = operational("releases", min_length=1)
    licence: str = Field("other", description="SPDX name for the data set card.")
    parent: str | None = Field(None, description="Version this one follows.")

    @field_validator("name")
    @classmethod
    def _name(cls, name: str) -> str:
        if not NAME.fullmatch(name):
            raise ValueError("a release name is lower case letters, digits, `.`, `_`, `-`, at most 64")
        return name

    @field_validator("version", "parent")
    @classmethod
    def _version(cls, version: str | None) -> str | None:
        if version is not None and not VERSION.fullmatch(version):
            raise ValueError("a version is MAJOR.MINOR.PATCH, e.g. 0.1.0")
        return version


class CacheConfig(Settings):
    root: str = operational(".gradeloom/cache", min_length=1)
    enabled: bool = operational(True)


class GradedConfig(Settings):
    """A graded-relevance run: queries in, a release of graded passages out."""

    source: SourceConfig
    levels: tuple[Level, ...] = Field(TREC_LEVELS, min_length=2, max_length=6)
    engine: EngineConfig = VllmEngine()
    generation: GenerationConfig = GenerationConfig()
    filters: tuple[FilterConfig, ...] = DEFAULT_FILTERS
    judge: JudgeConfig | None = JudgeConfig()
    label: LabelConfig = LabelConfig()
    run: RunConfig = RunConfig()
    release: ReleaseConfig
    cache: CacheConfig = CacheConfig()

    @model_validator(mode="after")
    def _consistent(self) -> GradedConfig:
        grades = [level.grade for level in self.levels]
        if len(set(grades)) != len(grades):
            raise ValueError("levels: every grade may stand once")
        kinds = [f.kind for f in self.filters]
        if "near_duplicates" in kinds[:-1]:
            raise ValueError("filters: near_duplicates sees the whole data set and must be the last")
        for kind in ("decontaminate", "near_duplicates"):
            if kinds.count(kind) > 1:
                raise ValueError(f"filters: {kind} may stand once")
        if self.judge is None and self.label.policy not in (None, "intended"):
            raise ValueError(f"label.policy {self.label.policy} needs a judge")
        return self

    @property
    def grades(self) -> tuple[int, ...]:
        """Grades from the highest to the lowest."""
        return tuple(sorted((level.grade for level in self.levels), reverse=True))
