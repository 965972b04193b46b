"""Audits of a release by people: a blind sample of its passages, and the stored result.

    <root>/<name>/.audits/<version>-<sample>.json

An audit lies beside the release, which is never added to, and belongs to its manifest's digest.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import orjson
from pydantic import BaseModel, ValidationError

from gradeloom.schemas.audit import Audit, AuditFigures, AuditGroup, AuditItem, AuditKey, AuditLabel
from gradeloom.schemas.errors import InputError
from gradeloom.schemas.manifest import Manifest
from gradeloom.schemas.rows import digest
from gradeloom.tasks.release.catalog import MANIFEST, read_manifest
from gradeloom.tasks.release.tables import read_rows, table_files
from gradeloom.tasks.release.verify import require_untouched
from gradeloom.tasks.run import write_bytes_whole

SMALLEST_GROUP = 10
"""Passages that a group holds at least; a smaller one is drawn from together with the rest of its grade."""

APART = 0.5
"""An expected grade that is at least so far from the intended one is a disagreement."""

KEY = "key.json"
AUDITS = ".audits"

M = TypeVar("M", bound=BaseModel)

_COLUMNS = ["query_id", "query", "passages", "passage_ids", "intended", "judged", "expected", "abstained",
            "grade"]  # fmt: skip


@dataclass(frozen=True)
class ReleasedPassage:
    """A passage of a list. `judged` and `expected` are None where the judge gave nothing."""

    query_id: str
    query: str
    passage_id: str
    text: str
    grade: float
    intended: int
    judged: int | None
    expected: float | None
    abstained: bool

    @property
    def released(self) -> int:
        """Its grade as in qrels."""
        return math.floor(self.grade + 0.5)

    @property
    def disagreement(self) -> bool:
        """Whether the judge abstained, or said another grade than the intended one, or nearly so."""
        if self.abstained:
            return True
        if self.judged is None:
            return False
        apart = self.expected is not None and abs(self.expected - self.intended) >= APART
        return self.judged != self.intended or apart


def released_passages(folder: Path) -> Iterator[ReleasedPassage]:
    """Every passage of a graded release, in order.

    Raises:
        InputError: the release has no graded lists, or a file cannot be read.
    """
    if not table_files(folder, "lists"):
        kind = read_manifest(folder).content.kind
        raise InputError(f"a release of kind '{kind}' holds no graded lists to audit", file=folder)
    for _, row in read_rows(folder, "lists", _COLUMNS):
        columns = (row[name] for name in ("passage_ids", "passages", "grade", *_COLUMNS[4:8]))
        for passage_id, text, grade, intended, judged, expected, abstained in zip(*columns, strict=True):
            yield ReleasedPassage(
                row["query_id"], row["query"], passage_id, text, grade, intended, judged, expected, abstained
            )


# --- the sample -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Sample:
    """What is to be looked at: `passages` in the order of the key's items."""

    key: AuditKey
    levels: list[dict[str, Any]]
    passages: list[ReleasedPassage]


def draw_sample(folder: Path, *, n: int, raters: int, seed: int) -> Sample:
    """Draw passages of a release at random, as many of every group as of another, as far as there are.

    A group is a released grade, parted by whether the judge disagrees. One pass over the lists; memory
    grows with n, not with the release.

    Args:
        folder: the release.
        n: passages.
        raters: people who are to look at all of them.
        seed: decides which passages, and their order.

    Raises:
        InputError: no graded release or a changed one, or n is more than it holds or fewer than two of
            every group.
    """
    require_untouched(folder)
    manifest = read_manifest(folder)
    drawn: dict[tuple[int, bool], _Drawn] = {}
    for passage in released_passages(folder):
        drawn.setdefault((passage.released, passage.disagreement), _Drawn(n)).add(passage, seed)
    groups = _groups(drawn, n)
    sizes = {group: found.passages for group, found in groups.items()}
    if n > sum(sizes.values()):
        raise InputError(f"the release holds {sum(sizes.values())} passages, {n} were asked for", field="--n")
    taken = _even(sizes, n)
    if any(taken[group] < min(2, sizes[group]) for group in groups):
        raise InputError(
            f"{n} passages are too few: expected at least {2 * len(groups)}, two of each of the "
            f"{len(groups)} groups (grades, parted by whether the judge agrees)",
            field="--n",
        )
    chosen = [
        (passage, place)
        for place, (group, found) in enumerate(groups.items())
        for passage in found.first(taken[group])
    ]
    chosen.sort(key=lambda one: digest("order", str(seed), one[0].query_id, one[0].passage_id))
    levels = sorted(manifest.content.config["levels"], key=lambda level: -level["grade"])
    key = AuditKey(
        name=manifest.content.name,
        version=manifest.content.version,
        digest=manifest.digest,
        seed=seed,
        raters=raters,
        grades=[level["grade"] for level in levels],
        groups=[
            AuditGroup(
                grade=grade, disagreement=apart, passages=sizes[grade, apart], sampled=taken[grade, apart],
                probability=taken[grade, apart] / sizes[grade, apart],
            )
            for grade, apart in groups
        ],
        items=[
            AuditItem(
                item=_item(manifest, seed, passage), query_id=passage.query_id,
                passage_id=passage.passage_id, group=place,
            )
            for passage, place in chosen
        ],
    )  # fmt: skip
    return Sample(key, levels, [passage for passage, _ in chosen])


def group_of(key: AuditKey, passage: ReleasedPassage) -> int:
    """The place of a passage's group among those of the key."""
    for place, group in enumerate(key.groups):
        if group.grade == passage.released and group.disagreement in (None, passage.disagreement):
            return place
    raise AssertionError("a passage of the release belongs to none of the key's groups")


Group = tuple[int, bool | None]


class _Drawn:
    """How many passages a group has, and the `n` that come first in the order of a seeded digest."""

    def __init__(self, n: int) -> None:
        self.passages = 0
        self._n = n
        self._heap: list[tuple[int, int, ReleasedPassage]] = []

    def add(self, passage: ReleasedPassage, seed: int) -> None:
        place = int(digest("sample", str(seed), passage.query_id, passage.passage_id), 16)
        self.passages += 1
        # Two entries never come to comparing their passages: no ordinal stands twice.
        self._push((-place, -self.passages, passage))

    def merged(self, other: _Drawn) -> _Drawn:
        both = _Drawn(self._n)
        for number, (place, _, passage) in enumerate(sorted(self._heap + other._heap, key=lambda e: e[:2])):
            both._push((place, number, passage))
        both.passages = self.passages + other.passages
        return both

    def first(self, n: int) -> list[ReleasedPassage]:
        return [passage for _, _, passage in sorted(self._heap, key=lambda e: e[:2], reverse=True)[:n]]

    def _push(self, entry: tuple[int, int, ReleasedPassage]) -> None:
        if len(self._heap) < self._n:
            heapq.heappush(self._heap, entry)
        else:
            heapq.heappushpop(self._heap, entry)


def _groups(drawn: dict[tuple[int, bool], _Drawn], n: int) -> dict[Group, _Drawn]:
    """The groups that are drawn from, from the highest grade to the lowest."""
    groups: dict[Group, _Drawn] = {}
    for grade in sorted({grade for grade, _ in drawn}, reverse=True):
        agreed, apart = (drawn.get((grade, disagreement), _Drawn(n)) for disagreement in (False, True))
        if min(agreed.passages, apart.passages) < SMALLEST_GROUP:
            groups[grade, None] = agreed.merged(apart)
        else:
            groups[grade, False], groups[grade, True] = agreed, apart
    return groups


def _even(sizes: dict[Group, int], n: int) -> dict[Group, int]:
    """n over the groups: one at a time to the group that has fewest, if it holds more."""
    taken = dict.fromkeys(sizes, 0)
    for _ in range(n):
        room = [group for group, size in sizes.items() if taken[group] < size]
        taken[min(room, key=lambda group: taken[group])] += 1
    return taken


def _item(manifest: Manifest, seed: int, passage: ReleasedPassage) -> str:
    # A letter in front, or spreadsheets take the likes of 12e45678 for numbers.
    return "p" + digest(manifest.digest, str(seed), passage.query_id, passage.passage_id, length=10)


# --- key and audits as files ----------------------------------------------------------------


def as_bytes(record: BaseModel) -> bytes:
    """A record as JSON for people and machines, the same for the same record."""
    return orjson.dumps(
        record.model_dump(), option=orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS | orjson.OPT_APPEND_NEWLINE
    )


def read_key(folder: Path) -> AuditKey:
    """The key of a sample.

    Raises:
        InputError: it is not there, or is no key.
    """
    return _read(folder / KEY, AuditKey)


def audited_release(root: Path | str, key: AuditKey) -> Path:
    """The folder of the release that a key is about; it must be that very release.

    Raises:
        InputError: it is not under the root, was changed, or is another one of that name and version.
    """
    folder = Path(root) / key.name / key.version
    if not (folder / MANIFEST).is_file():
        raise InputError(
            f"the release {key.name}@{key.version} that was sampled is not here; --root names the folder "
            f"of releases that it is in",
            file=folder,
        )
    require_untouched(folder)
    found = read_manifest(folder).digest
    if found != key.digest:
        raise InputError(
            f"the sample is of a release of digest {key.digest[:12]}, this one has {found[:12]}; labels "
            "count for the release they were given to",
            file=folder,
            field="digest",
        )
    return folder


def store_audit(
    root: Path | str, key: AuditKey, labels: Sequence[AuditLabel], figures: AuditFigures
) -> tuple[Audit, Path]:
    """Keep an audit beside its release, whole or not at all, in place of an earlier one of the same sample.

    Raises:
        InputError: it cannot be written.
    """
    audit = Audit(
        name=key.name, version=key.version, digest=key.digest, sample=key.sample(), seed=key.seed,
        groups=key.groups, labels=list(labels), figures=figures,
    )  # fmt: skip
    path = Path(root) / key.name / AUDITS / f"{key.version}-{audit.sample}.json"
    write_bytes_whole(path, as_bytes(audit))
    return audit, path


def read_audits(root: Path | str, name: str, version: str) -> list[Audit]:
    """The audits of a release, the one with most labelled passages first.

    Those of another release that once had this name and version (another digest) are left out.

    Raises:
        InputError: there is no such release, or an audit cannot be read.
    """
    home = Path(root) / name
    manifest = read_manifest(home / version)
    found = [
        _read(path, Audit)
        for path in sorted((home / AUDITS).glob("*.json"))
        if path.stem.rpartition("-")[0] == version
    ]
    own = [audit for audit in found if audit.digest == manifest.digest]
    return sorted(own, key=lambda audit: -sum(any(g is not None for g in one.grades) for one in audit.labels))


def _read(path: Path, record: type[M]) -> M:
    try:
        data = orjson.loads(path.read_bytes())
        return record.model_validate(data)
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}", file=path) from error
    except orjson.JSONDecodeError as error:
        raise InputError(f"not valid JSON: {error}", file=path) from error
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise InputError(first["msg"], file=path, field=field) from error
