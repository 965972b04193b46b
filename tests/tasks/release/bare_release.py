"""Releases of any kind with any tables, without what cutting one takes: for comparing them. Not a test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from gradeloom.schemas.manifest import Content, Manifest, ReleasedFile, StageAccount
from gradeloom.tasks.release.verify import sha256


def bare(folder: Path, tables: dict[str, pa.Table | bytes], *, card: str = "", **content: Any) -> Path:
    """Write tables, a card and a manifest in line with them.

    Args:
        folder: made anew.
        tables: name -> rows, in row groups of two; or bytes that are said to hold one row.
        card: the text of README.md.
        content: fields of the manifest's content, instead of those here.
    """
    folder.mkdir(parents=True)
    (folder / "README.md").write_text(card)
    rows: dict[str, int | None] = {"README.md": None}
    for name, table in tables.items():
        (folder / name).mkdir()
        path = folder / name / "train-00000.parquet"
        if isinstance(table, bytes):
            path.write_bytes(table)
        else:
            pq.write_table(table, path, row_group_size=2)
        rows[f"{name}/{path.name}"] = 1 if isinstance(table, bytes) else table.num_rows
    files = [
        ReleasedFile(path=path, sha256=sha256(folder / path), rows=n, bytes=(folder / path).stat().st_size)
        for path, n in rows.items()
    ]
    known: dict[str, Any] = {
        "kind": "graded", "name": "bare", "version": "0.1.0", "recipe": "r", "config": {}, "prompts": {},
        "models": [], "steps": {}, "accounting": [StageAccount(stage="source", rows=0)], "quality": {},
    }  # fmt: skip
    whole = Content(**(known | content), files=files)
    manifest = Manifest(digest=whole.digest(), content=whole, observed={})
    (folder / "manifest.json").write_bytes(orjson.dumps(manifest.model_dump()))
    return folder
