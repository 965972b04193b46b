"""The releases that lie under a root: list, find, describe, and the next free version."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import orjson
from pydantic import ValidationError

from gradeloom.schemas.config import NAME, VERSION
from gradeloom.schemas.errors import InputError
from gradeloom.schemas.manifest import Content, Manifest, accept_rate

MANIFEST = "manifest.json"
FORMAT = Content.model_fields["format"].default


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a release folder.

    Raises:
        InputError: there is none, it is no manifest, or one of another format than this version reads.
    """
    path = folder / MANIFEST
    try:
        written = path.read_bytes()
    except FileNotFoundError:
        raise InputError(f"no release here: {MANIFEST} is missing", file=folder) from None
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}", file=path) from error
    return parse_manifest(written, path)


def parse_manifest(written: bytes, path: Path | str) -> Manifest:
    """The manifest in the bytes of a file at `path`.

    Raises:
        InputError: it is no manifest, or one of another format than this version reads.
    """
    try:
        data = orjson.loads(written)
    except orjson.JSONDecodeError as error:
        raise InputError(f"not valid JSON: {error}", file=path) from error
    content = data.get("content") if isinstance(data, dict) else None
    found = content.get("format") if isinstance(content, dict) else None
    if found is not None and found != FORMAT:
        raise InputError(
            f"release format {found!r}; this gradeloom reads format {FORMAT}", file=path, field="format"
        )
    try:
        manifest = Manifest.model_validate(data)
        manifest.files()
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise InputError(f"not a release manifest: {first['msg']}", file=path, field=field) from error
    return manifest


@dataclass(frozen=True)
class Summary:
    """One line of `release list`.

    Attributes:
        path: its folder, or its URL.
        rows: rows per table; empty when the manifest cannot be read.
        released_at: UTC time of the cut, ISO 8601.
        latest: the highest version of its name that is no release candidate.
        problem: why the manifest cannot be read, if so.
    """

    name: str
    version: str
    path: Path | str
    kind: str = ""
    rows: dict[str, int] | None = None
    digest: str = ""
    released_at: str | None = None
    latest: bool = False
    problem: str | None = None


def list_releases(root: Path | str) -> list[Summary]:
    """Every release under a root, a folder or a URL, by name, then from the lowest version to the highest."""
    if is_url(root):
        from gradeloom.tasks.release.remote import list_releases_at

        return list_releases_at(str(root))
    root = Path(root)
    if not root.is_dir():
        return []
    summaries = []
    for home in sorted(root.iterdir()):
        if home.is_dir() and NAME.fullmatch(home.name):
            versions = _versions(home)
            latest = newest(versions)
            for version in versions:
                folder = home / version
                read = partial(read_manifest, folder)
                summaries.append(summary(home.name, version, folder, read, version == latest))
    return summaries


def find(root: Path | str, which: str) -> Path:
    """The folder of a release: a path to it, `name@version`, or `name` for its latest version.

    Args:
        root: of releases: a folder, or a URL.
        which: as above, or a URL. What lies at a URL is fetched; the folder is its local copy.

    Raises:
        InputError: there is no such release; the message says which there are. Or it cannot be fetched.
    """
    root, which = str(root).removeprefix("file://"), which.removeprefix("file://")
    url = url_of(root, which)
    if url is not None:
        from gradeloom.tasks.release.remote import local_copy

        return local_copy(url)
    if (Path(which) / MANIFEST).is_file():
        return Path(which)
    if "/" in which and Path(which).is_dir():
        read_manifest(Path(which))  # says what is wrong with it
    name, _, version = which.partition("@")
    home = Path(root) / name
    if not NAME.fullmatch(name) or not home.is_dir():
        known = sorted({summary.name for summary in list_releases(root)})
        raise InputError(f"no release '{which}' under {root}; there are: {', '.join(known) or 'none'}")
    return home / _chosen(name, version, _versions(home), root)


def url_of(root: Path | str, which: str) -> str | None:
    """Where `which` lies, when that is no folder here: at a URL of its own, or under a root at one.

    Raises:
        InputError: there is no such release under the root.
    """
    if is_url(which):
        return which
    if not is_url(root):
        return None
    from gradeloom.tasks.release.remote import open_place, versions_at

    name, _, version = which.partition("@")
    if not NAME.fullmatch(name):
        raise InputError(f"'{which}' is no release under {root}; expected NAME or NAME@VERSION")
    home = open_place(str(root)).below(name)
    return home.below(_chosen(name, version, versions_at(home), root)).url


def is_url(place: Path | str) -> bool:
    """Whether this names something in a store, and not a folder here or a release."""
    return "://" in str(place) and not str(place).startswith("file://")


def _chosen(name: str, version: str, versions: list[str], root: Path | str) -> str:
    """The version that was asked for, or the latest one."""
    if version:
        if version not in versions:
            raise InputError(f"no version '{version}' of {name}; there are: {', '.join(versions) or 'none'}")
        return version
    latest = newest(versions)
    if latest is None:
        candidates = f"; name a candidate: {', '.join(versions)}" if versions else ""
        raise InputError(f"no released version of {name} under {root}{candidates}")
    return latest


def next_version(root: Path | str, name: str, after: str) -> str:
    """The next free minor version of a name under a root, a folder, after a version.

    Raises:
        InputError: `after` is no version.
    """
    return free_version(after, lambda version: (Path(root) / name / version).exists())


def free_version(after: str, taken: Callable[[str], bool]) -> str:
    """The next minor version after a version that is not taken.

    Raises:
        InputError: `after` is no version.
    """
    require_version(after)
    major, minor, *_ = order(after)
    while taken(f"{major}.{minor + 1}.0"):
        minor += 1
    return f"{major}.{minor + 1}.0"


def require_version(version: str) -> None:
    """Raise `InputError` when this is no version."""
    if not VERSION.fullmatch(version):
        raise InputError(f"'{version}' is not a version; expected MAJOR.MINOR.PATCH, e.g. 0.1.0")


def show(folder: Path) -> dict[str, Any]:
    """What a release is, as plain JSON values: identity, sizes, models, accounting, quality."""
    manifest = read_manifest(folder)
    content = manifest.content
    return {
        "name": content.name,
        "version": content.version,
        "parent": content.parent,
        "kind": content.kind,
        "path": str(folder),
        "digest": manifest.digest,
        "recipe": content.recipe,
        "released_at": manifest.observed.get("released_at"),
        "rows": table_rows(content),
        "bytes": sum(file.bytes for file in content.files),
        "accept_rate": accept_rate(content.accounting),
        "models": [model.model_dump() for model in content.models],
        "prompts": content.prompts,
        "accounting": [account.model_dump() for account in content.accounting],
        "quality": content.quality,
        "observed": manifest.observed,
    }


def table_rows(content: Content) -> dict[str, int]:
    """Rows per table, summed over its files."""
    rows: dict[str, int] = {}
    for file in content.files:
        if file.rows is not None:
            table = file.path.split("/", 1)[0]
            rows[table] = rows.get(table, 0) + file.rows
    return rows


def summary(name: str, version: str, path: Path | str, read: Callable[[], Manifest], latest: bool) -> Summary:
    """One line of `release list`; `read` reads the manifest."""
    try:
        manifest = read()
    except InputError as error:
        return Summary(name, version, path, latest=latest, problem=str(error))
    return Summary(
        name,
        version,
        path,
        kind=manifest.content.kind,
        rows=table_rows(manifest.content),
        digest=manifest.digest,
        released_at=manifest.observed.get("released_at"),
        latest=latest,
    )


def _versions(home: Path) -> list[str]:
    """The versions of one name, ascending. A folder without a manifest is no release."""
    found = [f.name for f in home.iterdir() if VERSION.fullmatch(f.name) and (f / MANIFEST).is_file()]
    return sorted(found, key=order)


def newest(versions: list[str]) -> str | None:
    """The highest of ascending versions that is no candidate."""
    return next((version for version in reversed(versions) if "-" not in version), None)


def order(version: str) -> tuple[int, int, int, int, int]:
    """Semantic order: 0.2.0-rc.2 < 0.2.0-rc.10 < 0.2.0 < 0.10.0."""
    core, _, candidate = version.partition("-rc.")
    major, minor, patch = (int(part) for part in core.split("."))
    return major, minor, patch, 0 if candidate else 1, int(candidate or 0)
