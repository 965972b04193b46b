from __future__ import annotations

import json
from pathlib import Path

import pytest
from made_stories import cut, kept

from gradeloom.schemas.errors import InputError
from gradeloom.tasks.release.catalog import find, list_releases, next_version, show


def stand(root: Path, name: str, *versions: str) -> None:
    """Releases of which only the manifest is there."""
    for version in versions:
        folder = root / name / version
        folder.mkdir(parents=True)
        content = {
            "kind": "graded", "name": name, "version": version, "recipe": "r", "config": {}, "prompts": {},
            "models": [], "steps": {}, "accounting": [], "quality": {},
            "files": [
                {"path": "README.md", "sha256": "0", "bytes": 5},
                {"path": "lists/train-00000.parquet", "sha256": "0", "bytes": 7, "rows": 2},
                {"path": "lists/train-00001.parquet", "sha256": "0", "bytes": 7, "rows": 1},
            ],
        }  # fmt: skip
        manifest = {"digest": f"digest of {version}", "content": content, "observed": {"released_at": "now"}}
        (folder / "manifest.json").write_text(json.dumps(manifest))


def test_releases_are_listed_by_name_and_semantic_version(tmp_path: Path) -> None:
    stand(tmp_path, "b", "0.10.0", "0.9.0", "0.10.1-rc.10", "0.10.1-rc.2")
    stand(tmp_path, "a", "1.0.0")
    (tmp_path / "a" / ".staging-1.1.0-7").mkdir()
    (tmp_path / "a" / "2.0.0").mkdir()  # no manifest: no release
    (tmp_path / "a" / "notes").mkdir()
    listed = list_releases(tmp_path)
    assert [(s.name, s.version, s.latest) for s in listed] == [
        ("a", "1.0.0", True),
        ("b", "0.9.0", False),
        ("b", "0.10.0", True),
        ("b", "0.10.1-rc.2", False),
        ("b", "0.10.1-rc.10", False),
    ]
    first = listed[0]
    assert (first.kind, first.rows, first.digest) == ("graded", {"lists": 3}, "digest of 1.0.0")
    assert (first.released_at, first.problem, first.path) == ("now", None, tmp_path / "a" / "1.0.0")


def test_no_root_holds_no_releases(tmp_path: Path) -> None:
    assert list_releases(tmp_path / "nowhere") == []


def test_an_unreadable_manifest_is_listed_with_its_problem(tmp_path: Path) -> None:
    stand(tmp_path, "a", "0.1.0", "0.2.0")
    (tmp_path / "a" / "0.2.0" / "manifest.json").write_text("{")
    good, bad = list_releases(tmp_path)
    assert good.problem is None
    assert bad.problem is not None
    assert "0.2.0/manifest.json: not valid JSON" in bad.problem


def test_a_release_is_found_by_name_by_version_and_by_path(tmp_path: Path) -> None:
    stand(tmp_path, "a", "0.1.0", "0.2.0", "0.3.0-rc.1")
    assert find(tmp_path, "a") == tmp_path / "a" / "0.2.0"
    assert find(tmp_path, "a@0.1.0") == tmp_path / "a" / "0.1.0"
    assert find(tmp_path, "a@0.3.0-rc.1") == tmp_path / "a" / "0.3.0-rc.1"
    assert find("elsewhere", str(tmp_path / "a" / "0.1.0")) == tmp_path / "a" / "0.1.0"


@pytest.mark.parametrize(
    ("which", "words"),
    [
        ("b", r"no release 'b' under .*; there are: a, only-rc"),
        ("../a", r"no release '\.\./a' under"),
        ("a@9.9.9", r"no version '9\.9\.9' of a; there are: 0\.1\.0"),
        ("a@../../etc", r"no version '\.\./\.\./etc' of a"),
        ("only-rc", r"no released version of only-rc under .*; name a candidate: 0\.1\.0-rc\.1"),
    ],
)
def test_what_is_not_there_is_said_with_what_is(tmp_path: Path, which: str, words: str) -> None:
    stand(tmp_path, "a", "0.1.0")
    stand(tmp_path, "only-rc", "0.1.0-rc.1")
    with pytest.raises(InputError, match=words):
        find(tmp_path, which)


def test_the_next_version_is_the_next_free_minor(tmp_path: Path) -> None:
    stand(tmp_path, "a", "0.1.0", "0.2.0", "0.9.0")
    assert next_version(tmp_path, "a", "0.1.0") == "0.3.0"
    assert next_version(tmp_path, "a", "0.9.4") == "0.10.0"
    assert next_version(tmp_path, "a", "1.2.3-rc.4") == "1.3.0"
    assert next_version(tmp_path, "new", "0.0.0") == "0.1.0"
    with pytest.raises(InputError, match=r"'1\.2' is not a version"):
        next_version(tmp_path, "a", "1.2")


def test_show_tells_sizes_and_accept_rate(standing: Path, tmp_path: Path) -> None:
    shown = show(standing / "made" / "0.1.0")
    assert shown["rows"] == {"corpus": 12, "lists": 3, "qrels": 12, "queries": 3, "rejects": 2}
    assert shown["accept_rate"] == 3 / 5  # the sixth row was not needed
    assert shown["quality"]["label_policy"] == "intended"
    assert json.loads(json.dumps(shown)) == shown
    assert show(cut(tmp_path, [kept(0)]).path)["accept_rate"] == 1.0
