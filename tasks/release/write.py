"""Cut a release: rows to Parquet, card and manifest in a staging folder, checked, then renamed.

A release is whole or not there, and never changes:

    <root>/<name>/.lock                        held while a process cuts a version of this name
    <root>/<name>/.staging-<version>-<pid>/    what is being written
    <root>/<name>/<version>/                   what is released
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import orjson

from gradeloom.schemas.config import Level, ReleaseConfig
from gradeloom.schemas.errors import InputError
from gradeloom.schemas.manifest import Content, Manifest, ModelIdentity, ReleasedFile, StageAccount
from gradeloom.schemas.rows import JudgedRow, Judgement, LabelRow, ListRow, QueryRow, Row, digest
from gradeloom.tasks.release.card import render
from gradeloom.tasks.release.catalog import MANIFEST, next_version, read_manifest
from gradeloom.tasks.release.tables import TABLES, TableWriter, sync_file, table_files
from gradeloom.tasks.release.verify import check, round_half_up, sha256
from gradeloom.tasks.run import crash_point, sync_folder

CARD = "README.md"


@dataclass(frozen=True)
class Story:
    """What became of one source row. Stories come in ordinal order.

    Attributes:
        stage: the last stage that decided.
        decision: that stage's row: kept, rejected, failed or unused, and why.
    """

    query: QueryRow
    generated: ListRow | None
    judged: JudgedRow | None
    label: LabelRow | None
    stage: str
    decision: Row


@dataclass(frozen=True)
class Facts:
    """Everything else that the manifest's content says.

    Attributes:
        recipe: digest of all that decides the rows.
        config: the content view of the configuration, with its `levels`.
        prompts: prompt name -> digest.
        steps: stage -> version of its step.
        policy: the label policy after defaults.
        judge_independent: whether the judge is another model than the generator; None without a judge.
    """

    kind: str
    recipe: str
    config: dict[str, Any]
    prompts: dict[str, str]
    models: list[ModelIdentity]
    steps: dict[str, str]
    accounting: list[StageAccount]
    grades: tuple[int, ...]
    policy: str
    judge_independent: bool | None
    levels: Sequence[Level]


@dataclass(frozen=True)
class Released:
    """A release that stands. `already`: it stood before, with the same content."""

    path: Path
    manifest: Manifest
    already: bool


def cut_release(
    config: ReleaseConfig,
    stories: Iterable[Story],
    facts: Facts,
    *,
    quality: Callable[[Path], dict[str, Any]],
    observed: Callable[[], dict[str, Any]],
) -> Released:
    """Write, check and publish one version on disk.

    Args:
        config: name, version and root.
        stories: every source row that was worked on, in ordinal order; consumed once.
        facts: the rest of the manifest's content.
        quality: computes the quality figures from a folder that holds the tables.
        observed: times, host and so on, asked for at the end.

    Raises:
        InputError: nothing was kept; the version exists with other content; the disk is full or the
            place cannot be written; two passages of a list have one id. Nothing is left behind.
    """
    home = Path(config.root) / config.name
    target = home / config.version
    make_place(config)
    with alone(home), staging_folder(home, config.version) as staging:
        rows = _write_tables(staging, target, stories)
        if not rows["queries"]:
            raise InputError("no list was kept; a release without rows is not cut", file=target)
        figures = {
            "label_policy": facts.policy,
            "judge_independent": facts.judge_independent,
            **quality(staging),
        }
        with writing(target):
            _write_card(staging, config, facts, figures, rows)
        _reload(staging, target, rows)
        content = _content(staging, config, facts, figures)
        check(staging, content)
        now = datetime.now(UTC).isoformat(timespec="seconds")
        manifest = Manifest(
            digest=content.digest(), content=content, observed={**observed(), "released_at": now}
        )
        crash_point("before-manifest")
        with writing(target):
            _write_manifest(staging, manifest)
            return put_in_place(staging, target, manifest)


def existing(config: ReleaseConfig) -> Manifest | None:
    """The manifest of the version that a configuration names, or None when it is free.

    Raises:
        InputError: something else than a release stands in its place.
    """
    folder = Path(config.root) / config.name / config.version
    return read_manifest(folder) if folder.exists() else None


def make_place(config: ReleaseConfig) -> None:
    """Make the folder that a release will stand in, before anything is spent on its rows.

    Raises:
        InputError: it cannot be made.
    """
    home = Path(config.root) / config.name
    with writing(home / config.version):
        home.mkdir(parents=True, exist_ok=True)


# --- the place ------------------------------------------------------------------------------


@contextmanager
def writing(target: Path) -> Iterator[None]:
    """Turn what the disk refuses into an error that names the release."""
    try:
        yield
    except OSError as error:
        raise InputError(
            f"cannot write the release: {error.strerror or error}; nothing of it was left", file=target
        ) from error


@contextmanager
def alone(home: Path) -> Iterator[None]:
    """Wait for whoever cuts a version of this name. The kernel frees the lock of the dead."""
    with writing(home):
        handle = os.open(home / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        with writing(home):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


@contextmanager
def staging_folder(home: Path, version: str) -> Iterator[Path]:
    """An empty folder beside the releases, removed at the end unless it was renamed.

    The lock is held, so whatever staging folder is found was left by a process that died.
    """
    for leftover in home.glob(".staging-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    staging = home / f".staging-{version}-{os.getpid()}"
    try:
        with writing(home / version):
            staging.mkdir()
        yield staging
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def put_in_place(staging: Path, target: Path, manifest: Manifest) -> Released:
    """Rename the finished folder to its version, unless that stands already."""
    try:
        staging.rename(target)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise
        before = read_manifest(target)
        if before.digest == manifest.digest:
            return Released(target, before, already=True)
        home = target.parent
        free = next_version(home.parent, home.name, target.name)
        raise InputError(
            f"this version exists with other content, and a release never changes; the next free version"
            f" is {free}",
            file=target,
        ) from None
    sync_folder(target.parent)
    return Released(target, manifest, already=False)


# --- tables ---------------------------------------------------------------------------------


def _write_tables(staging: Path, target: Path, stories: Iterable[Story]) -> dict[str, int]:
    """Write the Parquet files; memory does not grow with the number of stories.

    Returns:
        Rows per table.
    """
    with ExitStack() as stack:
        with writing(target):
            writers = {table: TableWriter(staging / table, schema) for table, schema in TABLES.items()}
        for writer in writers.values():
            stack.callback(writer.abort)
        for story in stories:
            released = list(_rows(story))
            with writing(target):
                for table, row in released:
                    writers[table].add(row)
        with writing(target):
            for table, writer in writers.items():
                writer.close()
                sync_folder(staging / table)
    return {table: writer.rows for table, writer in writers.items()}


def _rows(story: Story) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows that a story adds, each with its table.

    Rows that are `unused` stand in no table, so that the next run takes them.
    """
    if story.decision.status == "kept":
        yield from _kept_rows(story)
    elif story.decision.status != "unused":
        yield "rejects", _reject_row(story)


def _kept_rows(story: Story) -> Iterator[tuple[str, dict[str, Any]]]:
    assert story.generated is not None, f"{story.query.id} is kept without passages"
    assert story.label is not None, f"{story.query.id} is kept without labels"
    row = _list_row(story, story.generated)
    ids, grades = row["passage_ids"], story.label.labels
    if len(set(ids)) != len(ids):
        raise InputError(f"query '{story.query.query_id}': two passages of its list are the same")
    yield "lists", {**row, "grade": grades}
    yield "queries", {"_id": story.query.query_id, "text": story.query.query}
    for passage_id, passage, grade in zip(ids, row["passages"], grades, strict=True):
        yield "corpus", {"_id": passage_id, "title": "", "text": passage}
        score = round_half_up(grade)
        yield "qrels", {"query-id": story.query.query_id, "corpus-id": passage_id, "score": score}


def _reject_row(story: Story) -> dict[str, Any]:
    decision = story.decision
    return {
        **_list_row(story, story.generated),
        "stage": story.stage,
        "status": decision.status,
        "reason": decision.reason,
        "detail": decision.detail,
        "at_grade": decision.grade,
    }


def _list_row(story: Story, generated: ListRow | None) -> dict[str, Any]:
    """What `lists` and `rejects` have in common: a query and its passages as far as they came."""
    passages = generated.passages if generated else []
    by_grade = {j.grade: j for j in story.judged.judgements} if story.judged else {}
    readings = [by_grade.get(passage.grade, _UNREAD) for passage in passages]
    return {
        "query_id": story.query.query_id,
        "query": story.query.query,
        "passages": [passage.text for passage in passages],
        "passage_ids": [digest(story.query.id, str(passage.grade), passage.text) for passage in passages],
        "intended": [passage.grade for passage in passages],
        "judged": [reading.judged for reading in readings],
        "expected": [reading.expected for reading in readings],
        "entropy": [reading.entropy for reading in readings],
        "mass": [reading.mass for reading in readings],
        "abstained": [reading.abstained for reading in readings],
        "length": generated.length if generated else None,
        "audience": generated.audience if generated else None,
        "style": generated.style if generated else None,
    }


# Nobody asked the judge, so nobody abstained.
_UNREAD = Judgement(grade=0, abstained=False)


# --- card and manifest ----------------------------------------------------------------------


def _write_card(
    staging: Path, config: ReleaseConfig, facts: Facts, figures: dict[str, Any], rows: dict[str, int]
) -> None:
    sizes = {
        table: (n, sum(path.stat().st_size for path in table_files(staging, table)))
        for table, n in rows.items()
    }
    (staging / CARD).write_text(render(config, facts, sizes, figures), encoding="utf-8")
    sync_file(staging / CARD)


def _content(staging: Path, config: ReleaseConfig, facts: Facts, figures: dict[str, Any]) -> Content:
    return Content(
        kind=facts.kind,
        name=config.name,
        version=config.version,
        parent=config.parent,
        recipe=facts.recipe,
        config=facts.config,
        prompts=facts.prompts,
        models=facts.models,
        steps=facts.steps,
        files=_released_files(staging),
        accounting=facts.accounting,
        quality=figures,
    )


def _released_files(staging: Path) -> list[ReleasedFile]:
    import pyarrow.parquet as pq

    paths = sorted(str(path.relative_to(staging)) for path in staging.rglob("*") if path.is_file())
    return [
        ReleasedFile(
            path=path,
            sha256=sha256(staging / path),
            rows=pq.read_metadata(staging / path).num_rows if path.endswith(".parquet") else None,
            bytes=(staging / path).stat().st_size,
        )
        for path in paths
    ]


def _write_manifest(staging: Path, manifest: Manifest) -> None:
    data = orjson.dumps(
        manifest.model_dump(), option=orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS | orjson.OPT_APPEND_NEWLINE
    )
    (staging / MANIFEST).write_bytes(data)
    sync_file(staging / MANIFEST)
    sync_folder(staging)


# --- reload ---------------------------------------------------------------------------------


def _reload(staging: Path, target: Path, rows: dict[str, int]) -> None:
    """Load every configuration as its users will, and compare features and row counts."""
    from datasets import Features
    from datasets.exceptions import DatasetGenerationError

    cache = staging.with_name(f"{staging.name}-reload")
    try:
        for table, schema in TABLES.items():
            features, count = _loaded(staging, table, cache)
            assert features == Features.from_arrow_schema(schema), f"{table} loads with {features}"
            assert count == rows[table], f"{table} loads with {count} rows, {rows[table]} were written"
    except (OSError, DatasetGenerationError) as error:
        reason = error.__cause__ or error
        raise InputError(
            f"cannot load what was written; nothing of it was left: {reason}", file=target
        ) from error
    finally:
        shutil.rmtree(cache, ignore_errors=True)


def _loaded(staging: Path, table: str, cache: Path) -> tuple[Any, int]:
    """Features and rows of one configuration.

    Through the builder, for `load_dataset` reads a table without rows only as a stream, and streams
    import torch.
    """
    from datasets import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
        load_dataset_builder,
    )
    from pyarrow.dataset import ParquetFragmentScanOptions

    shown = not are_progress_bars_disabled()
    disable_progress_bars()
    try:
        builder = load_dataset_builder(
            str(staging),
            table,
            cache_dir=str(cache),
            fragment_scan_options=ParquetFragmentScanOptions(pre_buffer=False),  # else whole files in memory
        )
        builder.download_and_prepare()
        return builder.info.features, builder.info.splits["train"].num_examples
    finally:
        if shown:
            enable_progress_bars()
