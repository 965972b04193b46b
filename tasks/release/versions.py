"""Semantic versions of releases: how much two differ, and which version the later one should be."""

from __future__ import annotations

from typing import Literal

from gradeloom.tasks.release.catalog import order, require_version
from gradeloom.tasks.release.diff import ReleaseDiff

Step = Literal["major", "minor", "patch", "none"]


def step(diff: ReleaseDiff) -> Step:
    """How much a release differs from the one before it.

    `major`: a column was removed, or changed its type; whoever reads the release must change.
    `minor`: other rows, rows in another order, or a column more. `patch`: the same rows with another
    card, or other settings or figures in the manifest. `none`: nothing but the version is different.
    """
    columns = {change.what for table in diff.tables for change in table.columns}
    if columns & {"removed", "changed"}:
        return "major"
    if columns or any(t.added or t.removed or t.changed or t.reordered for t in diff.tables):
        return "minor"
    told = any([diff.config, diff.prompts, diff.models, diff.steps, diff.documents])
    figures = any(f.a != f.b for f in diff.quality) or any(s.a != s.b for s in diff.accounting)
    return "patch" if told or figures else "none"


def proposed_version(parent: str, diff: ReleaseDiff) -> str | None:
    """The version that should follow `parent`, from which `diff` leads; None when nothing is different.

    Versions 0.x.y follow the same rule. What follows a candidate is counted from the version that it
    is a candidate for.

    Raises:
        InputError: `parent` is no version.
    """
    require_version(parent)
    major, minor, patch, *_ = order(parent)
    return {
        "major": f"{major + 1}.0.0",
        "minor": f"{major}.{minor + 1}.0",
        "patch": f"{major}.{minor}.{patch + 1}",
        "none": None,
    }[step(diff)]
