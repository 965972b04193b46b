"""Releases at a URL: in any store that fsspec opens, or a data set of the Hugging Face Hub.

Whoever works with one works with a local copy, in which every file was checked:

    $GRADELOOM_HOME/releases/<SHA-256 of the manifest>/            whole
    $GRADELOOM_HOME/releases/.<SHA-256 of the manifest>.partial/   as far as it came; it goes on from there
"""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from gradeloom.schemas.config import NAME, VERSION
from gradeloom.schemas.errors import GradeloomError, InputError, first_line
from gradeloom.schemas.manifest import Manifest, ReleasedFile
from gradeloom.tasks.engine.models import home
from gradeloom.tasks.release.catalog import MANIFEST, Summary, newest, order, parse_manifest, summary
from gradeloom.tasks.release.verify import require_unedited, require_untouched, verify
from gradeloom.tasks.release.write import alone
from gradeloom.tasks.run import sync_folder, write_bytes_whole, write_whole

HUB = re.compile(r"hf://datasets/(?P<repo>[\w.-]+/[\w.-]+)(@(?P<revision>[\w./-]+))?")
# The Hub makes this one by itself.
_NOT_OURS = frozenset({".gitattributes"})
_CHUNK = 1 << 20


@dataclass(frozen=True)
class Place:
    """A folder of a store.

    Attributes:
        url: as people name it.
        fs: the store, an fsspec file system.
        path: the folder, as the store names it.
    """

    url: str
    fs: Any
    path: str

    def below(self, name: str) -> Place:
        """A folder in this one."""
        return Place(f"{self.url}/{name}", self.fs, f"{self.path}/{name}")

    def read(self, name: str) -> bytes | None:
        """A small file, or None when there is none.

        Raises:
            InputError: the store cannot be asked.
        """
        with asking(f"{self.url}/{name}"):
            try:
                return bytes(self.fs.cat_file(f"{self.path}/{name}"))
            except FileNotFoundError:
                return None

    def chunks(self, name: str) -> Iterator[bytes]:
        """The bytes of a file, piece by piece.

        Raises:
            InputError: there is no such file, or the store cannot be asked.
        """
        with asking(f"{self.url}/{name}"), self.fs.open(f"{self.path}/{name}", "rb") as f:
            while chunk := f.read(_CHUNK):
                yield chunk

    def sha256(self, name: str) -> str:
        """The SHA-256 of a file's bytes, 64 hex digits; raises as `chunks`."""
        found = hashlib.sha256()
        for chunk in self.chunks(name):
            found.update(chunk)
        return found.hexdigest()

    def files(self) -> dict[str, int]:
        """Every file below, by its path from here; its bytes.

        Raises:
            InputError: the store cannot be asked.
        """
        with asking(self.url):
            found = self.fs.find(self.path, detail=True)
        cut = len(self.path.rstrip("/")) + 1
        names = {path[cut:]: int(facts["size"]) for path, facts in found.items()}
        return {name: size for name, size in names.items() if name not in _NOT_OURS}

    def folders(self) -> list[str]:
        """The names of the folders in this one; raises as `files`."""
        with asking(self.url):
            try:
                found = self.fs.ls(self.path, detail=True)
            except FileNotFoundError:
                return []
        return sorted(PurePosixPath(one["name"]).name for one in found if one["type"] == "directory")


@contextmanager
def asking(url: str) -> Iterator[None]:
    """Turn what a store's library raises into one line that names the place."""
    try:
        yield
    except GradeloomError:
        raise
    except Exception as error:
        # Every store's library has errors of its own; what is none of theirs is a defect of ours.
        if type(error).__module__ == "builtins" and not isinstance(error, OSError):
            raise
        raise InputError(f"the store refuses or cannot be reached: {first_line(error)}", file=url) from error


def open_place(url: str) -> Place:
    """A folder at a URL. Of a data set of the Hub its commit is looked up now, and is what is read from.

    Raises:
        InputError: it holds a password, nothing opens such a URL, or the Hub does not know it.
    """
    import fsspec

    url = url.rstrip("/")
    scheme, _, rest = url.partition("://")
    if "@" in rest.split("/", 1)[0]:
        raise InputError("a URL must hold no user or password; credentials come from the environment")
    if "::" in url:
        raise InputError("chained URLs are not opened", file=url)
    if scheme == "hf":
        return _open_hub(url)
    try:
        # Its own instance without listings: what others write meanwhile must be seen.
        fs, path = fsspec.core.url_to_fs(url, use_listings_cache=False, skip_instance_cache=True)
    except (ImportError, ValueError) as error:
        hint = "; pip install 'gradeloom[s3]'" if scheme == "s3" else ""
        raise InputError(f"cannot be opened: {first_line(error)}{hint}", file=url) from error
    return Place(url, fs, path)


def _open_hub(url: str) -> Place:
    import huggingface_hub as hub

    match = HUB.fullmatch(url)
    if match is None:
        raise InputError("expected hf://datasets/OWNER/NAME or hf://datasets/OWNER/NAME@REVISION", file=url)
    with asking(url):
        commit = hub.HfApi().dataset_info(match["repo"], revision=match["revision"]).sha
        return Place(url, hub.HfFileSystem(skip_instance_cache=True), f"datasets/{match['repo']}@{commit}")


# --- open -----------------------------------------------------------------------------------


def local_copy(url: str) -> Path:
    """A folder here with the release at a URL: fetched, unless it is here already.

    The manifest is asked for every time, so that a URL whose release changes is never answered with an
    old one.

    Raises:
        InputError: there is no release, it is not what its manifest says, the store cannot be asked, or
            there is no room here.
    """
    place = open_place(url)
    data, manifest = _manifest(place)
    return _fetched(place, data, manifest)


def verify_url(url: str) -> list[str]:
    """`verify` of a release at a URL; all its bytes are read from there, again if they are here already.

    Raises:
        InputError: at the first thing that is wrong.
    """
    place = open_place(url)
    data, manifest = _manifest(place)
    files = manifest.files()
    compare(place, files)
    return [
        f"{place.url}: {len(files)} files read, sizes and SHA-256 as in the manifest",
        *verify(_fetched(place, data, manifest)),
    ]


def compare(place: Place, files: Sequence[ReleasedFile], read: Callable[[int], None] | None = None) -> None:
    """Read a release's files from where they lie, and compare each with what the manifest says.

    Args:
        place: the release.
        files: all but the manifest.
        read: called with the bytes of every file that was read.

    Raises:
        InputError: at the first that is missing, changed or not listed.
    """
    refuse_others(place, files)
    for file in files:
        if place.sha256(file.path) != file.sha256:
            raise InputError(
                "its bytes are not those that were released (SHA-256)",
                file=f"{place.url}/{file.path}",
                field="sha256",
            )
        if read is not None:
            read(file.bytes)


def refuse_others(place: Place, files: Sequence[ReleasedFile]) -> None:
    """What lies at a place must be these files, the manifest, and nothing else; only sizes are looked at.

    Raises:
        InputError: a file is missing, has another size, or is not listed.
    """
    present = place.files()
    for file in files:
        if file.path not in present:
            raise InputError("listed in the manifest, but missing", file=f"{place.url}/{file.path}")
        if present[file.path] != file.bytes:
            raise InputError(
                f"{present[file.path]} bytes, the manifest says {file.bytes}",
                file=f"{place.url}/{file.path}",
                field="bytes",
            )
    for extra in sorted(present.keys() - {file.path for file in files} - {MANIFEST}):
        raise InputError(
            "not listed in the manifest; a release is never added to", file=f"{place.url}/{extra}"
        )


def read_remote_manifest(place: Place) -> Manifest | None:
    """The manifest of the release at a place, or None when no release stands there.

    Raises:
        InputError: it is no manifest, or was edited; or the store cannot be asked.
    """
    data = place.read(MANIFEST)
    return None if data is None else _parsed(place, data)


def _manifest(place: Place) -> tuple[bytes, Manifest]:
    data = place.read(MANIFEST)
    if data is None:
        raise InputError(f"no release here: {MANIFEST} is missing", file=place.url)
    return data, _parsed(place, data)


def _parsed(place: Place, data: bytes) -> Manifest:
    file = f"{place.url}/{MANIFEST}"
    manifest = parse_manifest(data, file)
    require_unedited(manifest, file)
    for listed in manifest.files():
        _require_inside(listed.path, file)
    return manifest


def _require_inside(path: str, manifest: str) -> None:
    """A manifest from elsewhere must not name what lies outside of its release."""
    parts = path.split("/")
    if path == MANIFEST or "\\" in path or "\0" in path or any(part in ("", ".", "..") for part in parts):
        raise InputError(f"names {path!r}, which is no file of a release", file=manifest, field="files")


def _fetched(place: Place, data: bytes, manifest: Manifest) -> Path:
    root = home() / "releases"
    key = hashlib.sha256(data).hexdigest()
    target = root / key
    if target.is_dir():
        return target
    with suppress(OSError):
        root.mkdir(parents=True, exist_ok=True)  # what does not work is said by the lock
    with alone(root):
        if target.is_dir():
            return target
        partial = root / f".{key}.partial"
        for leftover in partial.glob("**/.*.tmp"):
            leftover.unlink(missing_ok=True)
        for file in manifest.files():
            _fetch(place, file, partial / file.path)
        write_bytes_whole(partial / MANIFEST, data)
        try:
            require_untouched(partial)
        except InputError:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        partial.rename(target)
        sync_folder(root)
    return target


def _fetch(place: Place, file: ReleasedFile, path: Path) -> None:
    if path.is_file() and path.stat().st_size == file.bytes:
        return  # written whole; its hash is checked with all others at the end

    def write(temporary: Path) -> None:
        found = hashlib.sha256()
        with temporary.open("wb") as f:
            for chunk in place.chunks(file.path):
                found.update(chunk)
                f.write(chunk)
        if found.hexdigest() != file.sha256:
            raise InputError(
                "its bytes are not those that were released (SHA-256)",
                file=f"{place.url}/{file.path}",
                field="sha256",
            )

    write_whole(path, write)


# --- a root at a URL ------------------------------------------------------------------------


def list_releases_at(url: str) -> list[Summary]:
    """Every release under a root at a URL, by name, then from the lowest version to the highest.

    Raises:
        InputError: the store cannot be asked.
    """
    root = open_place(url)
    found = []
    for name in root.folders():
        if NAME.fullmatch(name):
            versions = versions_at(root.below(name))
            latest = newest(versions)
            for version in versions:
                place = root.below(name).below(version)
                found.append(
                    summary(name, version, place.url, lambda at=place: _manifest(at)[1], version == latest)  # type: ignore[misc]
                )
    return found


def versions_at(name: Place) -> list[str]:
    """The versions of one name, ascending. A folder without a manifest is no release."""
    found = [
        version
        for version in name.folders()
        if VERSION.fullmatch(version) and name.below(version).read(MANIFEST) is not None
    ]
    return sorted(found, key=order)
