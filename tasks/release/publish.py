"""Publish a release: to a folder, or to an object store that fsspec opens (S3, GCS, …).

    <to>/<name>/<version>.claim          first, and only if it is not there: whose version this is
    <to>/<name>/<version>/…              the files, each read back and compared
    <to>/<name>/<version>/manifest.json  last: it makes the release exist

Readers look for the manifest, so they see the whole release or none. Killed at any point and started
again, publishing goes on with what is missing. A claim holds the release's digest: the same release may go
on under it, another is refused.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import orjson

from gradeloom.schemas.config import NAME, VERSION
from gradeloom.schemas.errors import InputError
from gradeloom.schemas.manifest import Manifest, ReleasedFile
from gradeloom.tasks.release.catalog import MANIFEST, free_version, is_url, read_manifest
from gradeloom.tasks.release.remote import Place, asking, open_place, read_remote_manifest, refuse_others
from gradeloom.tasks.release.verify import require_untouched
from gradeloom.tasks.release.write import alone, put_in_place, staging_folder, writing

Report = Callable[[int, int], None]
"""Called with (bytes done, bytes in all)."""


@dataclass(frozen=True)
class Bundle:
    """A release on disk, all of whose bytes are as they were released."""

    folder: Path
    manifest: Manifest
    files: list[ReleasedFile]

    @property
    def name(self) -> str:
        return self.manifest.content.name

    @property
    def version(self) -> str:
        return self.manifest.content.version

    @property
    def digest(self) -> str:
        return self.manifest.digest

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files)


@dataclass(frozen=True)
class Published:
    """How publishing ended.

    Attributes:
        url: where the release is, as `gradeloom release show` takes it.
        state: `published`; `already`: it stood there before; `planned`: a dry run.
        sent: files that were sent, or would be; those that an interrupted publishing had sent are not.
        sent_bytes: their sizes.
        commit: on the Hub, the commit.
    """

    url: str
    name: str
    version: str
    digest: str
    state: Literal["published", "already", "planned"]
    sent: list[str]
    sent_bytes: int
    commit: str | None = None


def read_bundle(folder: Path) -> Bundle:
    """A release that is to be published.

    Raises:
        InputError: it is no release, or a byte of it is not as it was released.
    """
    require_untouched(folder)
    manifest = read_manifest(folder)
    content = manifest.content
    if not NAME.fullmatch(content.name) or not VERSION.fullmatch(content.version):
        raise InputError("a release needs a name and a version", file=folder / MANIFEST, field="name")
    return Bundle(folder, manifest, manifest.files())


def publish(
    bundle: Bundle,
    to: str,
    *,
    single_writer: bool = False,
    dry_run: bool = False,
    report: Report = lambda done, total: None,
) -> Published:
    """Publish under a root.

    Args:
        bundle: the release.
        to: the root: a folder, or a URL that fsspec opens. The release will be `<to>/<name>/<version>`.
        single_writer: whoever calls vouches that nobody else publishes there; then the store need not be
            able to write a file only if it is not there.
        dry_run: look, and change nothing.
        report: progress.

    Raises:
        InputError: the version is taken by another release; the store cannot write only what is not there;
            it cannot be reached; or what was sent reads back differently. Nothing is published then.
    """
    to = to.removeprefix("file://")
    if not is_url(to):
        return _to_folder(bundle, Path(to), dry_run, report)
    place = open_place(f"{to.rstrip('/')}/{bundle.name}").below(bundle.version)
    if _stands(bundle, place):
        return _published(bundle, place.url, "already", [])
    if dry_run:
        _require_claimable(bundle, place)
        return _published(bundle, place.url, "planned", _to_send(bundle, place))
    _claim(bundle, place, single_writer)
    sent = _send(bundle, place, report)
    refuse_others(place, bundle.files)
    if not _put_manifest(bundle, place, single_writer):
        return _published(bundle, place.url, "already", sent)
    return _published(bundle, place.url, "published", sent)


def _published(
    bundle: Bundle, url: str, state: Literal["published", "already", "planned"], sent: list[ReleasedFile]
) -> Published:
    return Published(
        url, bundle.name, bundle.version, bundle.digest, state,
        [file.path for file in sent], sum(file.bytes for file in sent),
    )  # fmt: skip


# --- a folder -------------------------------------------------------------------------------


def _to_folder(bundle: Bundle, root: Path, dry_run: bool, report: Report) -> Published:
    """As a release is cut: copied to a staging folder, checked, renamed."""
    home = root / bundle.name
    target = home / bundle.version
    if dry_run and not target.exists():
        return _published(bundle, str(target), "planned", bundle.files)
    with writing(target):
        home.mkdir(parents=True, exist_ok=True)
    with alone(home), staging_folder(home, bundle.version) as staging:
        if not (target / MANIFEST).exists():
            done = 0
            for name, size in [*((f.path, f.bytes) for f in bundle.files), (MANIFEST, 0)]:
                with writing(target):
                    (staging / name).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(bundle.folder / name, staging / name)
                done += size
                report(done, bundle.bytes)
            require_untouched(staging)
        with writing(target):
            released = put_in_place(staging, target, bundle.manifest)
    state: Literal["already", "published"] = "already" if released.already else "published"
    return _published(bundle, str(target), state, [] if released.already else bundle.files)


# --- the claim ------------------------------------------------------------------------------


def _stands(bundle: Bundle, place: Place) -> bool:
    """Whether the release is there already.

    Raises:
        InputError: another one is.
    """
    standing = read_remote_manifest(place)
    if standing is None:
        return False
    if standing.digest != bundle.digest:
        raise _taken(bundle, place, f"exists with other content (digest {standing.digest[:12]})")
    return True


def _taken(bundle: Bundle, place: Place, how: str) -> InputError:
    home = _home(place)
    free = free_version(
        bundle.version,
        lambda version: (
            home.read(f"{version}.claim") is not None or home.below(version).read(MANIFEST) is not None
        ),
    )
    return InputError(
        f"this version {how}, and a release never changes; the next free version is {free}", file=place.url
    )


def _home(place: Place) -> Place:
    return Place(place.url.rpartition("/")[0], place.fs, place.path.rpartition("/")[0])


def _claim_name(bundle: Bundle) -> str:
    return f"{bundle.version}.claim"


def _claim_bytes(bundle: Bundle) -> bytes:
    """Two that write under equal claims write equal files.

    `files` are those that are no part of the digest; they may differ between two cuts of one content.
    """
    own = {file.path for file in bundle.manifest.content.files}
    beside = {file.path: file.sha256 for file in bundle.files if file.path not in own}
    return orjson.dumps(
        {"digest": bundle.digest, "files": beside},
        option=orjson.OPT_SORT_KEYS | orjson.OPT_APPEND_NEWLINE,
    )


def _require_claimable(bundle: Bundle, place: Place) -> bytes | None:
    """The claim that stands, None when there is none.

    Raises:
        InputError: it is another release's.
    """
    home, name = _home(place), _claim_name(bundle)
    found = home.read(name)
    if found is None or found == _claim_bytes(bundle):
        return found
    try:
        other = orjson.loads(found)["digest"]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        raise InputError(
            "is no claim of ours; delete it if nobody is publishing this version", file=f"{home.url}/{name}"
        ) from None
    if other == bundle.digest:
        raise InputError(
            "another cut of the same content, with another report, is being published under this claim; let"
            " its publisher finish, or delete the claim if nobody is publishing",
            file=f"{home.url}/{name}",
        )
    raise _taken(bundle, place, f"is claimed by a release with other content (digest {str(other)[:12]})")


def _claim(bundle: Bundle, place: Place, single_writer: bool) -> None:
    """Make the version ours, or find that it is.

    Raises:
        InputError: it is another's, or the store cannot tell.
    """
    home, name, mine = _home(place), _claim_name(bundle), _claim_bytes(bundle)
    if _require_claimable(bundle, place) is not None:
        return
    if single_writer:
        _put(home, name, mine)
        return
    if _put_if_absent(home, name, mine):
        # A store that ignores the condition, as some do, would have let a second claim overwrite ours.
        if not _put_if_absent(home, name, mine):
            return
        with asking(f"{home.url}/{name}"):
            home.fs.rm_file(f"{home.path}/{name}")
        raise InputError(
            "this store cannot write a file only if it is not there, so two publishers could mix their"
            " releases; if nobody else publishes here, use --single-writer",
            file=place.url,
        )
    _require_claimable(bundle, place)


def _put(place: Place, name: str, data: bytes) -> None:
    with asking(f"{place.url}/{name}"):
        place.fs.pipe_file(f"{place.path}/{name}", data)


def _put_if_absent(place: Place, name: str, data: bytes) -> bool:
    """Write a small file unless there is one; whether it was written.

    On S3 by `If-None-Match: *`, which is how s3fs opens with `x`.
    """
    with asking(f"{place.url}/{name}"):
        try:
            with place.fs.open(f"{place.path}/{name}", "xb") as f:
                f.write(data)
        except FileExistsError:
            return False
    return True


# --- files and manifest ---------------------------------------------------------------------


def _to_send(bundle: Bundle, place: Place) -> list[ReleasedFile]:
    """The files that are not there yet, by their sizes."""
    present = place.files()
    return [file for file in bundle.files if present.get(file.path) != file.bytes]


def _send(bundle: Bundle, place: Place, report: Report) -> list[ReleasedFile]:
    """Send what is missing, and read all back.

    Returns:
        What was sent.

    Raises:
        InputError: a file that was just sent reads back differently.
    """
    missing = {file.path for file in _to_send(bundle, place)}
    sent, done = [], 0
    for file in bundle.files:
        there = file.path not in missing and place.sha256(file.path) == file.sha256
        if not there:
            _upload(bundle, place, file, lambda n, done=done: report(done + n, bundle.bytes))  # type: ignore[misc]
            sent.append(file)
            if place.sha256(file.path) != file.sha256:
                raise InputError(
                    "reads back differently than it was sent; nothing was published",
                    file=f"{place.url}/{file.path}",
                )
        done += file.bytes
        report(done, bundle.bytes)
    return sent


def _upload(bundle: Bundle, place: Place, file: ReleasedFile, report: Callable[[int], None]) -> None:
    from fsspec.callbacks import Callback

    follow = Callback(hooks={"report": lambda size, value, **_: report(min(value, file.bytes))})
    with asking(f"{place.url}/{file.path}"):
        place.fs.put_file(str(bundle.folder / file.path), f"{place.path}/{file.path}", callback=follow)


def _put_manifest(bundle: Bundle, place: Place, single_writer: bool) -> bool:
    """Make the release exist; False when another publisher of the same one was first."""
    data = (bundle.folder / MANIFEST).read_bytes()
    if single_writer:
        _put(place, MANIFEST, data)
        first = True
    else:
        first = _put_if_absent(place, MANIFEST, data)
    if not _stands(bundle, place):
        raise InputError("the manifest was written, but is not there", file=f"{place.url}/{MANIFEST}")
    return first
