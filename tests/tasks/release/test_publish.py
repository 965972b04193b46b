"""Publishing to object stores: in memory, and by the S3 protocol with kills and rivals."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any
from uuid import uuid4

import fsspec
import pytest
from as_told import rows_loaded
from made_stories import cut, kept
from s3_server import BUCKET, CREDENTIALS, Store, serving

from gradeloom.schemas.errors import InputError
from gradeloom.schemas.manifest import Manifest
from gradeloom.tasks.release.catalog import find, list_releases, read_manifest
from gradeloom.tasks.release.publish import Bundle, publish, read_bundle
from gradeloom.tasks.release.remote import verify_url
from gradeloom.tasks.release.verify import verify


@pytest.fixture
def memory() -> str:
    """A root in a store of its own."""
    return f"memory://{uuid4().hex}/releases"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GRADELOOM_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another release of the same name and version."""
    return cut(tmp_path_factory.mktemp("other"), [kept(7), kept(8)]).path


@pytest.fixture
def release(standing: Path) -> Path:
    return standing / "made" / "0.1.0"


# --- in memory ------------------------------------------------------------------------------


def test_what_is_published_is_the_release_byte_for_byte(release: Path, memory: str) -> None:
    done = publish(read_bundle(release), memory)
    assert (done.state, done.url) == ("published", f"{memory}/made/0.1.0")
    store = fsspec.filesystem("memory")
    files = [path.relative_to(release) for path in release.rglob("*") if path.is_file()]
    assert sorted(done.sent) == sorted(str(path) for path in files if path.name != "manifest.json")
    for path in files:
        assert store.cat_file(f"{memory}/made/0.1.0/{path}") == (release / path).read_bytes()
    assert verify_url(done.url)[1:] == verify(release)


def test_published_again_it_is_there_already(release: Path, memory: str) -> None:
    publish(read_bundle(release), memory)
    assert publish(read_bundle(release), memory).state == "already"


def test_progress_ends_with_all_bytes(release: Path, memory: str) -> None:
    bundle, seen = read_bundle(release), [0]
    publish(bundle, memory, report=lambda done, total: seen.append(done))
    assert seen == sorted(seen)
    assert seen[-1] == bundle.bytes == sum(file.bytes for file in bundle.manifest.content.files)


def test_files_beside_the_content_are_published_too(copied: Path, memory: str) -> None:
    page = b"<html>report</html>"
    _list_beside(copied, "report.html", page)
    manifest = read_manifest(copied)
    done = publish(Bundle(copied, manifest, manifest.files()), memory)
    assert "report.html" in done.sent
    assert fsspec.filesystem("memory").cat_file(f"{memory}/made/0.1.0/report.html") == page


def _list_beside(folder: Path, name: str, data: bytes) -> None:
    manifest = json.loads((folder / "manifest.json").read_bytes())
    listed = {"path": name, "sha256": sha256(data).hexdigest(), "bytes": len(data)}
    manifest["observed"]["files"] = [listed]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    (folder / name).write_bytes(data)


def test_another_release_of_that_version_is_refused_and_told_the_next(
    release: Path, other: Path, memory: str
) -> None:
    publish(read_bundle(release), memory)
    with pytest.raises(InputError, match=r"exists with other content .* next free version is 0\.2\.0"):
        publish(read_bundle(other), memory)
    assert verify_url(f"{memory}/made/0.1.0")


def test_a_claim_keeps_others_out_and_lets_its_owner_go_on(release: Path, other: Path, memory: str) -> None:
    publish(read_bundle(release), memory)
    store = fsspec.filesystem("memory")
    store.rm_file(f"{memory}/made/0.1.0/manifest.json")  # as if killed before it
    store.rm_file(f"{memory}/made/0.1.0/README.md")
    with pytest.raises(InputError, match=r"is claimed by a release with other content .* is 0\.2\.0"):
        publish(read_bundle(other), memory)
    done = publish(read_bundle(release), memory)
    assert (done.state, done.sent) == ("published", ["README.md"])


def test_a_half_sent_file_of_the_right_size_is_sent_again(release: Path, memory: str) -> None:
    publish(read_bundle(release), memory)
    store = fsspec.filesystem("memory")
    store.rm_file(f"{memory}/made/0.1.0/manifest.json")
    size = (release / "README.md").stat().st_size
    store.pipe_file(f"{memory}/made/0.1.0/README.md", b"x" * size)
    assert publish(read_bundle(release), memory).sent == ["README.md"]
    assert verify_url(f"{memory}/made/0.1.0")


def test_a_damaged_claim_says_so(release: Path, memory: str) -> None:
    fsspec.filesystem("memory").pipe_file(f"{memory}/made/0.1.0.claim", b"")
    with pytest.raises(InputError, match=r"0\.1\.0\.claim: is no claim of ours; delete it"):
        publish(read_bundle(release), memory)


def test_a_file_of_somebody_else_is_in_the_way(release: Path, memory: str) -> None:
    fsspec.filesystem("memory").pipe_file(f"{memory}/made/0.1.0/lists/extra.parquet", b"x")
    with pytest.raises(InputError, match=r"lists/extra\.parquet: not listed in the manifest"):
        publish(read_bundle(release), memory)
    assert not fsspec.filesystem("memory").exists(f"{memory}/made/0.1.0/manifest.json")


def test_a_dry_run_changes_nothing(release: Path, memory: str) -> None:
    bundle = read_bundle(release)
    done = publish(bundle, memory, dry_run=True)
    assert (done.state, done.sent_bytes) == ("planned", bundle.bytes)
    assert not fsspec.filesystem("memory").find(memory)


def test_a_store_that_overwrites_is_refused_unless_one_alone_writes(
    release: Path, memory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fsspec.implementations.memory import MemoryFileSystem

    open_ = MemoryFileSystem._open
    monkeypatch.setattr(
        MemoryFileSystem,
        "_open",
        lambda self, path, mode="rb", **more: open_(self, path, mode.replace("x", "w"), **more),
    )
    with pytest.raises(InputError, match=r"only if it is not there.*--single-writer"):
        publish(read_bundle(release), memory)
    assert not fsspec.filesystem("memory").find(memory)
    assert publish(read_bundle(release), memory, single_writer=True).state == "published"
    assert publish(read_bundle(release), memory, single_writer=True).state == "already"


def test_a_changed_release_is_not_published(copied: Path, memory: str) -> None:
    (copied / "README.md").write_text("other words")
    with pytest.raises(InputError, match=r"README\.md"):
        publish(read_bundle(copied), memory)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("nope://bucket/x", "nope://bucket/x/made: cannot be opened: Protocol not known: nope"),
        ("s3://key:secret@bucket/x", "no user or password"),
        ("memory://a::file:///b", "chained URLs"),
    ],
)
def test_urls_that_cannot_be_written_to(release: Path, url: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        publish(read_bundle(release), url)
    assert message in str(caught.value)
    assert "secret" not in str(caught.value)


# --- a folder -------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_a_folder_is_published_to_by_renaming(
    release: Path, other: Path, tmp_path: Path, scheme: str
) -> None:
    root = f"{scheme}{tmp_path}/there"
    assert publish(read_bundle(release), root, dry_run=True).state == "planned"
    assert not (tmp_path / "there").exists()
    assert publish(read_bundle(release), root).state == "published"
    assert verify(tmp_path / "there" / "made" / "0.1.0") == verify(release)
    assert publish(read_bundle(release), root).state == "already"
    with pytest.raises(InputError, match=r"next free version is 0\.2\.0"):
        publish(read_bundle(other), root)
    assert find(root, "made") == tmp_path / "there" / "made" / "0.1.0"


# --- opening --------------------------------------------------------------------------------


def test_a_url_is_opened_as_a_checked_local_copy(release: Path, memory: str, home: Path) -> None:
    url = publish(read_bundle(release), memory).url
    folder = find("releases", url)
    assert folder.parent == home / "releases"
    assert verify(folder) == verify(release)
    assert read_manifest(folder) == read_manifest(release)
    changed = (folder / "README.md").stat().st_mtime_ns
    assert find(memory, "made") == find(memory, "made@0.1.0") == folder  # here already
    assert (folder / "README.md").stat().st_mtime_ns == changed
    (one,) = list_releases(memory)
    assert (one.name, one.version, one.path, one.latest) == ("made", "0.1.0", url, True)
    assert one.digest == read_manifest(release).digest


def test_fetching_goes_on_where_it_stopped(
    release: Path, memory: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = publish(read_bundle(release), memory).url
    from gradeloom.tasks.release import remote

    fetch, fetched = remote._fetch, []

    def third_fails(place: Any, file: Any, path: Path) -> None:
        if len(fetched) == 3:
            raise KeyboardInterrupt
        fetched.append(file.path)
        fetch(place, file, path)

    monkeypatch.setattr(remote, "_fetch", third_fails)
    with pytest.raises(KeyboardInterrupt):
        find("releases", url)
    monkeypatch.setattr(remote, "_fetch", fetch)
    for path in fetched:
        fsspec.filesystem("memory").rm_file(f"{url}/{path}")  # not asked for again
    assert verify(find("releases", url)) == verify(release)
    assert [path.name for path in (home / "releases").iterdir() if path.name != ".lock"] == [
        sha256((release / "manifest.json").read_bytes()).hexdigest()
    ]


def test_a_flipped_byte_in_the_store_is_found(release: Path, memory: str) -> None:
    url = publish(read_bundle(release), memory).url
    assert find("releases", url)
    name = "lists/train-00000.parquet"
    name = next(file for file in read_bundle(release).files if file.path.startswith("lists/")).path
    data = bytearray((release / name).read_bytes())
    data[len(data) // 2] ^= 1
    fsspec.filesystem("memory").pipe_file(f"{url}/{name}", bytes(data))
    with pytest.raises(InputError, match=rf"{url}/{name}, field 'sha256': its bytes are not those"):
        verify_url(url)


def test_a_flipped_byte_is_not_let_in(release: Path, memory: str, home: Path) -> None:
    url = publish(read_bundle(release), memory).url
    size = (release / "README.md").stat().st_size
    fsspec.filesystem("memory").pipe_file(f"{url}/README.md", b"x" * size)
    with pytest.raises(InputError, match=r"README\.md, field 'sha256'"):
        find("releases", url)
    assert not [path for path in (home / "releases").iterdir() if len(path.name) == 64]


@pytest.mark.parametrize("path", ["../outside", "/etc/passwd", "lists/../../x", "a\\b", "manifest.json", ""])
def test_a_manifest_must_not_reach_outside(copied: Path, memory: str, path: str, home: Path) -> None:
    manifest = json.loads((copied / "manifest.json").read_bytes())
    manifest["content"]["files"][0]["path"] = path
    content = Manifest.model_validate(manifest).content
    manifest["digest"] = content.digest()
    fsspec.filesystem("memory").pipe_file(f"{memory}/made/0.1.0/manifest.json", json.dumps(manifest).encode())
    with pytest.raises(InputError, match="which is no file of a release"):
        find("releases", f"{memory}/made/0.1.0")
    assert not home.exists()


def test_what_is_not_there_says_so(memory: str) -> None:
    with pytest.raises(InputError, match=r"made: no release here: manifest\.json is missing"):
        find("releases", f"{memory}/made")
    with pytest.raises(InputError, match="no released version of made"):
        find(memory, "made")
    with pytest.raises(InputError, match=r"no version '0\.1\.0' of made; there are: none"):
        find(memory, "made@0.1.0")
    assert list_releases(memory) == []


# --- S3 -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    with serving(tmp_path_factory.mktemp("s3")) as store:
        yield store


@pytest.fixture
def s3(s3_server: Store, monkeypatch: pytest.MonkeyPatch) -> Store:
    s3_server.clear()
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    return s3_server


ROOT = f"s3://{BUCKET}/releases"
KEY = "releases/made/0.1.0"


def seen(store: Store) -> str | None:
    """What a reader sees: nothing, or a release whose every byte is right (its digest).

    Reads by boto3, and knows nothing of how it was published.
    """
    if f"{KEY}/manifest.json" not in store.keys(KEY + "/"):
        return None
    manifest = json.loads(store.get(f"{KEY}/manifest.json"))
    listed = manifest["content"]["files"]
    for file in listed:
        data = store.get(f"{KEY}/{file['path']}")
        assert sha256(data).hexdigest() == file["sha256"], f"half a release: {file['path']}"
    return str(manifest["digest"])


def start(folder: Path, store: Store, home: Path, *options: str) -> subprocess.Popen[str]:
    """`gradeloom release publish` in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "gradeloom.flows.cli", "release", "publish", str(folder), "--to", ROOT,
         *options],
        env=os.environ | store.environment | {"GRADELOOM_HOME": str(home)},
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


def test_to_s3_and_back(release: Path, s3: Store) -> None:
    assert publish(read_bundle(release), ROOT).state == "published"
    assert seen(s3) == read_manifest(release).digest
    assert s3.keys() == sorted(
        [f"{KEY}.claim", *(f"{KEY}/{p.relative_to(release)}" for p in release.rglob("*") if p.is_file())]
    )
    puts = [line.split()[1] for line in s3.requests() if line.startswith("PUT")]
    assert puts[-1].endswith(f"{KEY}/manifest.json")
    assert verify_url(f"{ROOT}/made/0.1.0")[1:] == verify(release)
    assert verify(find(ROOT, "made")) == verify(release)
    assert [(one.version, one.latest) for one in list_releases(ROOT)] == [("0.1.0", True)]
    assert publish(read_bundle(release), ROOT).state == "already"


def test_a_retriever_reads_a_release_in_s3(release: Path, s3: Store) -> None:
    from gradeloom.schemas.retriever import CollectionConfig
    from gradeloom.tasks.collection import read_collection

    url = publish(read_bundle(release), ROOT).url
    here = read_collection(CollectionConfig(release=str(release)))
    assert read_collection(CollectionConfig(release=url)) == here
    assert read_collection(CollectionConfig(release="made"), releases=ROOT) == here


def test_a_bucket_that_is_not_there(release: Path, s3: Store) -> None:
    with pytest.raises(InputError, match=r"s3://no-such-bucket/.*bucket does not exist"):
        publish(read_bundle(release), "s3://no-such-bucket/releases")


def test_the_command_says_how_to_load_it(release: Path, s3: Store, home: Path) -> None:
    code, out, err = ended(start(release, s3, home))
    assert code == 0, err
    assert "bytes" in err
    assert rows_loaded(out, s3.environment, home) == 3
    assert CREDENTIALS["AWS_SECRET_ACCESS_KEY"] not in out + err
    code, out, err = ended(start(release, s3, home, "--json", "--quiet"))
    assert (code, err) == (0, "")
    assert json.loads(out) == {
        "url": f"{ROOT}/made/0.1.0", "name": "made", "version": "0.1.0", "state": "already",
        "digest": read_manifest(release).digest, "sent": [], "sent_bytes": 0, "commit": None,
    }  # fmt: skip


def kill_at(n: int, release: Path, store: Store, home: Path, wait: float) -> None:
    """Publish, and kill -9 when the server has got its n-th request and `wait` seconds are over."""
    before = len(store.requests())
    process = start(release, store, home)
    while process.poll() is None and len(store.requests()) - before < n:
        time.sleep(0.001)
    time.sleep(wait)
    process.send_signal(signal.SIGKILL)
    process.communicate()


@contextmanager
def watching(store: Store) -> Iterator[set[str | None]]:
    """A reader that looks all the time; what it has seen. That it saw half a release is raised at the end."""
    stop, states, problems = threading.Event(), set[str | None](), list[AssertionError]()

    def look() -> None:
        while not stop.wait(0.02):
            try:
                states.add(seen(store))
            except AssertionError as problem:
                problems.append(problem)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield states
    finally:
        stop.set()
        thread.join()
    assert not problems, problems


def kills(release: Path, store: Store, home: Path, moments: int, seed: int) -> Counter[str]:
    """Publish with kills at random moments; every time readers see nothing or all, and it can be ended.

    Returns:
        What stood when it was killed: `nothing`, `claim`, `files` or `release`, counted.
    """
    digest, draw, stood = read_manifest(release).digest, random.Random(seed), Counter[str]()
    before = len(store.requests())
    publish(read_bundle(release), ROOT)
    total = len(store.requests()) - before
    for _ in range(moments):
        store.clear()
        with watching(store) as states:
            kill_at(draw.randint(1, total), release, store, home, draw.random() * 0.02)
            keys = store.keys()
            stood["release" if seen(store) else ("nothing", "claim", "files")[min(len(keys), 2)]] += 1
            assert publish(read_bundle(release), ROOT).state in ("published", "already")
        assert states <= {None, digest}
        assert seen(store) == digest
        assert verify_url(f"{ROOT}/made/0.1.0")
    return stood


def test_killed_at_some_moments_it_is_never_half(release: Path, s3: Store, home: Path) -> None:
    assert kills(release, s3, home, 2, seed=4).total() == 2


@pytest.mark.long
def test_killed_at_twenty_random_moments_it_is_never_half(release: Path, s3: Store, home: Path) -> None:
    stood = kills(release, s3, home, 20, seed=20)
    print(f"killed 20 times; what stood then: {dict(stood)}")
    assert stood["files"] >= 5, "most kills must fall between the claim and the manifest"


def test_two_publishers_of_one_release_both_succeed(release: Path, s3: Store, home: Path) -> None:
    with watching(s3) as states:
        both = [start(release, s3, home) for _ in range(2)]
        results = [ended(process) for process in both]
    assert states <= {None, read_manifest(release).digest}
    assert [code for code, _, _ in results] == [0, 0], results
    assert seen(s3) == read_manifest(release).digest


def test_of_two_publishers_of_two_releases_one_is_refused(
    release: Path, other: Path, s3: Store, home: Path
) -> None:
    with watching(s3):
        both = [start(folder, s3, home) for folder in (release, other)]
        results = [ended(process) for process in both]
    assert sorted(code for code, _, _ in results) == [0, 2], results
    winner, loser = (0, 1) if results[0][0] == 0 else (1, 0)
    assert "the next free version is 0.2.0" in results[loser][2]
    assert seen(s3) == read_manifest((release, other)[winner]).digest
    assert verify_url(f"{ROOT}/made/0.1.0")
