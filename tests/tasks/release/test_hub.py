"""Publishing to the Hub, and opening from it, against a server that speaks what the client asks for."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import pytest
from as_told import rows_loaded
from hub_server import TOKEN, Repository, serving
from made_stories import cut, kept

from gradeloom.schemas.errors import InputError
from gradeloom.tasks.release.catalog import find, read_manifest
from gradeloom.tasks.release.hub import publish
from gradeloom.tasks.release.publish import read_bundle
from gradeloom.tasks.release.remote import verify_url
from gradeloom.tasks.release.verify import verify

TO = "hf://datasets/org/made"


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Repository]:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setenv("GRADELOOM_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
    made = Repository("org/made")
    with serving(made) as endpoint:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", endpoint)
        monkeypatch.setattr(
            huggingface_hub.constants,
            "HUGGINGFACE_CO_URL_TEMPLATE",
            endpoint + "/{repo_id}/resolve/{revision}/{filename}",
        )
        monkeypatch.setenv("HF_ENDPOINT", endpoint)
        yield made
    assert made.unknown == []


@pytest.fixture
def release(standing: Path) -> Path:
    return standing / "made" / "0.1.0"


@pytest.fixture(scope="module")
def later(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cut(tmp_path_factory.mktemp("later"), [kept(7), kept(8)], version="0.2.0").path


@pytest.fixture(scope="module")
def rival(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another release of the same name and version."""
    return cut(tmp_path_factory.mktemp("rival"), [kept(9)]).path


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_one_commit_one_tag_byte_for_byte(release: Path, repository: Repository) -> None:
    done = publish(read_bundle(release), TO)
    assert len(repository.commits) == 2
    assert repository.tags == {"v0.1.0": repository.head.id}
    assert (done.state, done.url, done.commit) == ("published", f"{TO}@v0.1.0", repository.head.id)
    assert repository.head.files == {**files(release), ".gitattributes": b"*.parquet lfs\n"}
    assert repository.head.title == f"Release made 0.1.0 (digest {read_manifest(release).digest})"


def test_published_again_it_is_there_already(release: Path, repository: Repository) -> None:
    publish(read_bundle(release), TO)
    assert publish(read_bundle(release), TO).state == "already"
    assert len(repository.commits) == 2


def test_it_is_opened_by_tag_and_by_main(release: Path, later: Path, repository: Repository) -> None:
    publish(read_bundle(release), TO)
    publish(read_bundle(later), TO)
    assert verify(find("releases", f"{TO}@v0.1.0")) == verify(release)
    assert read_manifest(find("releases", TO)) == read_manifest(later)
    assert verify_url(f"{TO}@v0.1.0")[1:] == verify(release)


def test_what_the_next_version_lacks_is_deleted(release: Path, later: Path, repository: Repository) -> None:
    publish(read_bundle(release), TO)
    repository.put("by hand", **{"notes.md": b"mine"})
    publish(read_bundle(later), TO)
    assert repository.head.files == {**files(later), ".gitattributes": b"*.parquet lfs\n"}
    assert repository.at("v0.1.0").files == {**files(release), ".gitattributes": b"*.parquet lfs\n"}  # type: ignore[union-attr]


def test_a_missing_repository_is_made_private(release: Path, repository: Repository) -> None:
    repository.exists = False
    planned = publish(read_bundle(release), TO, dry_run=True)
    assert (planned.state, repository.exists) == ("planned", False)
    assert publish(read_bundle(release), TO).state == "published"
    assert (repository.exists, repository.private) == (True, True)


def test_a_dry_run_changes_nothing(release: Path, repository: Repository) -> None:
    assert publish(read_bundle(release), TO, dry_run=True).state == "planned"
    assert (len(repository.commits), repository.tags, repository.objects) == (1, {}, {})


def test_stopped_between_commit_and_tag_it_only_tags(release: Path, repository: Repository) -> None:
    repository.fail_tag = True
    with pytest.raises(InputError, match="refuses or cannot be reached"):
        publish(read_bundle(release), TO)
    assert (len(repository.commits), repository.tags) == (2, {})
    by_hand = repository.put("by hand", **{"notes.md": b"mine"})
    asked = len(repository.asked)
    done = publish(read_bundle(release), TO)
    assert (done.state, done.sent) == ("published", [])
    assert repository.head is by_hand
    assert repository.tags == {"v0.1.0": repository.commits[1].id}
    writes = [line for line in repository.asked[asked:] if line.startswith(("POST", "PUT"))]
    assert [line.split("/")[5] for line in writes] == ["tag"]


def test_killed_between_commit_and_tag_it_only_tags(
    release: Path, repository: Repository, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "gradeloom.flows.cli", "release", "publish", str(release), "--to", TO]
    process = subprocess.Popen(
        command, env=os.environ | {"HF_HUB_DISABLE_XET": "1"}, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    while process.poll() is None and len(repository.commits) < 2:
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert (len(repository.commits), repository.tags) == (2, {})
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert len(repository.commits) == 2
    assert repository.tags == {"v0.1.0": repository.head.id}
    assert TOKEN not in done.stdout + done.stderr
    assert rows_loaded(done.stdout, {}, tmp_path) == 3


def test_another_release_of_that_version_is_refused(
    release: Path, rival: Path, repository: Repository
) -> None:
    publish(read_bundle(release), TO)
    with pytest.raises(InputError, match=r"other content .* the next free version is 0\.2\.0"):
        publish(read_bundle(rival), TO)
    repository.tags.clear()  # its commit alone holds the version, too
    with pytest.raises(InputError, match=r"other content .* the next free version is 0\.2\.0"):
        publish(read_bundle(rival), TO)
    assert len(repository.commits) == 2


def test_of_two_at_once_the_second_looks_again(release: Path, rival: Path, repository: Repository) -> None:
    bundle = read_bundle(release)

    def same_one_first() -> None:
        repository.commits.append(type(repository.head)(
            f"Release made 0.1.0 (digest {bundle.digest})", {**repository.head.files, **files(release)},
            repository.head.id,
        ))  # fmt: skip

    repository.before_commit = same_one_first
    assert publish(bundle, TO).state == "published"
    assert (len(repository.commits), list(repository.tags)) == (2, ["v0.1.0"])


def test_of_two_releases_at_once_the_second_is_refused(
    release: Path, rival: Path, repository: Repository
) -> None:
    other = read_bundle(rival)

    def rival_first() -> None:
        repository.commits.append(type(repository.head)(
            f"Release made 0.1.0 (digest {other.digest})", {**repository.head.files, **files(rival)},
            repository.head.id,
        ))  # fmt: skip

    repository.before_commit = rival_first
    with pytest.raises(InputError, match=r"the next free version is 0\.2\.0"):
        publish(read_bundle(release), TO)
    assert (len(repository.commits), repository.tags) == (2, {})


def test_a_commit_by_hand_in_between_does_no_harm(release: Path, repository: Repository) -> None:
    repository.before_commit = lambda: repository.put("by hand", **{"README.md": b"hello"}) and None
    assert publish(read_bundle(release), TO).state == "published"
    assert repository.head.files == {**files(release), ".gitattributes": b"*.parquet lfs\n"}


def test_what_is_no_earlier_release_is_left_alone(release: Path, later: Path, repository: Repository) -> None:
    publish(read_bundle(later), TO)
    with pytest.raises(InputError, match=r"holds the newer version 0\.2\.0"):
        publish(read_bundle(release), TO)
    repository.commits[1:] = []
    repository.tags.clear()
    repository.put("data", **{"train.csv": b"a,b"})
    with pytest.raises(InputError, match="holds something that is no release; 'made' needs a repository of"):
        publish(read_bundle(release), TO)
    assert repository.head.files["train.csv"] == b"a,b"


def test_bytes_that_changed_on_the_way_are_found_and_not_tagged(
    release: Path, repository: Repository
) -> None:
    repository.fail_tag = True
    with pytest.raises(InputError):
        publish(read_bundle(release), TO)
    data = repository.head.files["README.md"]
    name = repository.head.id
    repository.head.files["README.md"] = data.replace(b"made", b"mode", 1)
    assert repository.head.id != name
    with pytest.raises(InputError, match=r"README\.md, field 'sha256'"):
        publish(read_bundle(release), TO)
    assert repository.tags == {}


def test_no_token_no_publishing(
    release: Path, repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(InputError, match="needs a token that may write, in the environment as HF_TOKEN"):
        publish(read_bundle(release), TO)


@pytest.mark.parametrize("to", ["hf://org/made", "hf://datasets/made", f"{TO}@main", "hf://datasets/a/b/c"])
def test_targets_that_are_no_data_set(release: Path, repository: Repository, to: str) -> None:
    with pytest.raises(InputError, match="expected hf://datasets/OWNER/NAME"):
        publish(read_bundle(release), to)


def test_a_candidate_is_not_published(tmp_path: Path, repository: Repository) -> None:
    folder = cut(tmp_path, version="0.1.0-rc.1").path
    with pytest.raises(InputError, match="a candidate is not published"):
        publish(read_bundle(folder), TO)


def test_what_is_not_there_says_so(repository: Repository) -> None:
    with pytest.raises(InputError, match=r"org/made: no release here: manifest\.json is missing"):
        find("releases", TO)
    with pytest.raises(InputError, match="v9"):
        find("releases", f"{TO}@v9")
