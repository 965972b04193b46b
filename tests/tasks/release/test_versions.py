from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from bare_release import bare

from gradeloom.schemas.errors import InputError
from gradeloom.tasks.release.diff import ReleaseDiff, diff
from gradeloom.tasks.release.versions import proposed_version, step

ROWS = pa.table({"_id": ["x", "y"], "text": ["one", "two"]})


def to(tmp_path: Path, table: pa.Table = ROWS, **content: Any) -> ReleaseDiff:
    a = bare(tmp_path / "a", {"queries": ROWS})
    return diff(a, bare(tmp_path / "b", {"queries": table}, version="9.9.9", **content))


@pytest.mark.parametrize(
    ("table", "content", "expected"),
    [
        (ROWS.drop_columns(["text"]), {}, "major"),
        (ROWS.set_column(1, "text", pa.array([1, 2])), {}, "major"),
        (ROWS.slice(1), {}, "minor"),
        (ROWS.set_column(1, "text", pa.array(["one", "three"])), {}, "minor"),
        (ROWS.append_column("more", pa.array([1, 2])), {}, "minor"),
        (ROWS.take([1, 0]), {}, "minor"),
        (ROWS, {"card": "told in another way"}, "patch"),
        (ROWS, {"prompts": {"judge": "aa"}}, "patch"),
        (ROWS, {"quality": {"kappa": 0.5}}, "patch"),
        (ROWS, {"recipe": "s"}, "none"),
    ],
)  # fmt: skip
def test_how_much_releases_differ(
    table: pa.Table, content: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    assert step(to(tmp_path, table, **content)) == expected


@pytest.mark.parametrize(
    ("parent", "versions"),
    [
        ("0.1.0", ("1.0.0", "0.2.0", "0.1.1")),
        ("0.10.3", ("1.0.0", "0.11.0", "0.10.4")),
        ("2.4.7", ("3.0.0", "2.5.0", "2.4.8")),
        ("1.0.0-rc.2", ("2.0.0", "1.1.0", "1.0.1")),
    ],
)
def test_the_version_that_follows(parent: str, versions: tuple[str, ...], tmp_path: Path) -> None:
    found = (
        to(tmp_path / "major", ROWS.drop_columns(["text"])),
        to(tmp_path / "minor", ROWS.slice(1)),
        to(tmp_path / "patch", card="told in another way"),
    )
    assert tuple(proposed_version(parent, one) for one in found) == versions
    assert proposed_version(parent, to(tmp_path / "none")) is None


def test_a_parent_that_is_no_version_is_said(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="'latest' is not a version; expected MAJOR"):
        proposed_version("latest", to(tmp_path))
