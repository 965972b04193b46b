from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradeloom.schemas.errors import InputError
from gradeloom.schemas.manifest import Content
from gradeloom.tasks.release.tables import TABLES
from gradeloom.tasks.release.verify import round_half_up, verify

Rows = list[dict[str, Any]]


def edit_manifest(folder: Path, change: Callable[[dict[str, Any]], None], *, sign: bool = True) -> None:
    """Change the manifest's content; `sign` brings its digest in line, as a forger would."""
    path = folder / "manifest.json"
    manifest = json.loads(path.read_bytes())
    change(manifest["content"])
    if sign:
        manifest["digest"] = Content.model_validate(manifest["content"]).digest()
    path.write_text(json.dumps(manifest))


def rewrite(folder: Path, table: str, change: Callable[[Rows], Any], schema: pa.Schema | None = None) -> None:
    """Change the rows of a table and bring hash, size and row count in the manifest in line."""
    name = f"{table}/train-00000.parquet"
    path = folder / name
    rows = pq.read_table(path).to_pylist()
    change(rows)
    pq.write_table(pa.Table.from_pylist(rows, schema=schema or TABLES[table]), path)

    def declare(content: dict[str, Any]) -> None:
        (file,) = (file for file in content["files"] if file["path"] == name)
        data = path.read_bytes()
        file |= {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data), "rows": len(rows)}

    edit_manifest(folder, declare)


def test_a_whole_release_is_said_to_be_checked(standing: Path) -> None:
    manifest, files, tables, rows, accounting = verify(standing / "made" / "0.1.0")
    assert manifest.startswith("manifest: digest ")
    assert files == "files: 6, sizes and SHA-256 as in the manifest"
    assert tables.endswith("(corpus 12, lists 3, qrels 12, queries 3, rejects 2)")
    assert rows.startswith("rows: keys unique, references resolve")
    assert accounting == "accounting: 6 rows in, 3 released, 2 in rejects, 1 unused"


# --- files ----------------------------------------------------------------------------------


def flip_a_byte(folder: Path) -> None:
    path = folder / "corpus" / "train-00000.parquet"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def edit_the_card(folder: Path) -> None:
    with (folder / "README.md").open("a") as f:
        f.write("Checked by people.\n")


def delete_a_file(folder: Path) -> None:
    (folder / "qrels" / "train-00000.parquet").unlink()


def add_a_file(folder: Path) -> None:
    (folder / "corpus" / "train-00001.parquet").write_bytes(
        (folder / "corpus" / "train-00000.parquet").read_bytes()
    )


def lower_a_figure(folder: Path) -> None:
    edit_manifest(folder, lambda content: content["quality"].update(lists=2), sign=False)


def raise_the_format(folder: Path) -> None:
    edit_manifest(folder, lambda content: content.update(format=2), sign=False)


def delete_the_manifest(folder: Path) -> None:
    (folder / "manifest.json").unlink()


def cut_the_manifest(folder: Path) -> None:
    path = folder / "manifest.json"
    path.write_bytes(path.read_bytes()[:-10])


def forget_the_recipe(folder: Path) -> None:
    edit_manifest(folder, lambda content: content.pop("recipe"), sign=False)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (flip_a_byte, r"corpus/train-00000\.parquet, field 'sha256': its bytes are not those"),
        (edit_the_card, r"README\.md, field 'bytes': \d+ bytes, the manifest says \d+"),
        (delete_a_file, r"qrels/train-00000\.parquet: listed in the manifest, but missing"),
        (add_a_file, r"corpus/train-00001\.parquet: not listed in the manifest"),
        (lower_a_figure, r"manifest\.json, field 'digest': .*was edited"),
        (raise_the_format, r"manifest\.json, field 'format': release format 2; .*reads format 1"),
        (delete_the_manifest, r"0\.1\.0: no release here"),
        (cut_the_manifest, r"manifest\.json: not valid JSON"),
        (
            forget_the_recipe,
            r"manifest\.json, field 'content\.recipe': not a release manifest: Field required",
        ),
    ],
)
def test_a_damaged_file_is_named(copied: Path, damage: Callable[[Path], None], words: str) -> None:
    damage(copied)
    with pytest.raises(InputError, match=words):
        verify(copied)


# --- rows -----------------------------------------------------------------------------------


def set_field(table: str, row: int, field: str, value: Any) -> Callable[[Path], None]:
    return lambda folder: rewrite(folder, table, lambda rows: rows[row].update({field: value}))


def copy_row(table: str, row: int) -> Callable[[Path], None]:
    return lambda folder: rewrite(folder, table, lambda rows: rows.append(rows[row]))


def drop_row(table: str, row: int) -> Callable[[Path], None]:
    return lambda folder: rewrite(folder, table, lambda rows: rows.pop(row))


def set_element(field: str, place: int, value: Any) -> Callable[[Path], None]:
    """Of the second list."""
    return lambda folder: rewrite(folder, "lists", lambda rows: rows[1][field].__setitem__(place, value))


def shorten(field: str) -> Callable[[Path], None]:
    return lambda folder: rewrite(folder, "lists", lambda rows: rows[1][field].pop())


def repeat_a_passage(folder: Path) -> None:
    rewrite(folder, "lists", lambda rows: rows[1]["passage_ids"].__setitem__(1, rows[1]["passage_ids"][0]))


def as_int32(folder: Path) -> None:
    schema = TABLES["qrels"].set(2, pa.field("score", pa.int32(), nullable=False))
    rewrite(folder, "qrels", lambda rows: None, schema)


def without_titles(folder: Path) -> None:
    schema = TABLES["corpus"].remove(1)
    rewrite(folder, "corpus", lambda rows: [row.pop("title") for row in rows], schema)


def declare_more_rows(folder: Path) -> None:
    def change(content: dict[str, Any]) -> None:
        content["files"][2]["rows"] += 1

    edit_manifest(folder, change)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (as_int32, r"qrels/.*, field 'score': has the type .*int32.*, expected .*int64"),
        (without_titles, r"corpus/.*: columns \['_id', 'text'\], expected \['_id', 'title', 'text'\]"),
        (declare_more_rows, r"lists/.*, field 'rows': 3 rows, the manifest says 4"),
        (copy_row("queries", 1), r"queries/.*, row 4, field '_id': 'q2' stands here a second time"),
        (copy_row("corpus", 0), r"corpus/.*, row 13, field '_id': '\w{16}' stands here a second time"),
        (copy_row("qrels", 0), r"qrels/.*, row 13, field 'query-id, corpus-id': 'q0, \w{16}' stands here a"),
        (copy_row("lists", 0), r"lists/.*, row 4, field 'query_id': 'q0' stands here a second time"),
        (repeat_a_passage, r"lists/.*, row 2, field 'passage_ids': one passage stands twice"),
        (set_field("qrels", 2, "query-id", "q9"), r"qrels/.*, row 3, field 'query-id': 'q9' stands in no"),
        (set_field("qrels", 2, "corpus-id", "c9"), r"qrels/.*, row 3, field 'corpus-id': 'c9' stands in no"),
        (set_field("lists", 0, "query_id", "q9"), r"lists/.*, row 1, field 'query_id': 'q9' stands in no"),
        (set_element("passage_ids", 1, "c9"), r"lists/.*, row 2, field 'passage_ids': 'c9' stands in no"),
        (set_field("queries", 1, "text", "?"), r"lists/.*, row 2, field 'query': 'q2' has another"),
        (set_field("corpus", 5, "text", "?"), r"lists/.*, row 2, field 'passages': '\w{16}' has another"),
        (drop_row("lists", 1), r"queries/.*, row 2, field '_id': 'q2' has no list"),
        (drop_row("qrels", 6), r"lists/.*, row 2, field 'passage_ids': \(q2, \w{16}\) has no row in qrels"),
        (set_field("qrels", 6, "score", 3), r"qrels/.*, row 7, field 'score': 3, but the grade .* to 1"),
        (set_element("grade", 0, 2.5), r"lists/.*, row 2, field 'grade': 2\.5 is not among .* 0, 1, 2, 3"),
        (set_element("intended", 0, 4), r"lists/.*, row 2, field 'intended': 4 is not among the levels"),
        (set_element("judged", 0, -1), r"lists/.*, row 2, field 'judged': -1 is not among the levels"),
        (shorten("mass"), r"lists/.*, row 2, field 'mass': 3 values for 4 passages"),
    ],
)  # fmt: skip
def test_a_row_that_does_not_fit_is_named(copied: Path, damage: Callable[[Path], None], words: str) -> None:
    damage(copied)
    with pytest.raises(InputError, match=words):
        verify(copied)


def test_an_orphaned_passage_is_named(copied: Path) -> None:
    orphan = {"_id": "c9", "title": "", "text": "nobody's"}
    rewrite(copied, "corpus", lambda rows: rows.append(orphan))
    with pytest.raises(InputError, match=r"corpus/.*, row 13, field '_id': 'c9' stands in no list"):
        verify(copied)


def test_a_judgement_that_belongs_to_another_query_is_named(copied: Path) -> None:
    def add_a_real_passage_of_another_query(rows: Rows) -> None:
        rows.append({"query-id": "q0", "corpus-id": rows[4]["corpus-id"], "score": 0})

    rewrite(copied, "qrels", add_a_real_passage_of_another_query)
    with pytest.raises(InputError, match=r"qrels/.*, row 13, field 'corpus-id': \(q0, \w{16}\) stands in no"):
        verify(copied)


# --- accounting -----------------------------------------------------------------------------


def account(place: int, **counts: Any) -> Callable[[Path], None]:
    return lambda folder: edit_manifest(folder, lambda content: content["accounting"][place].update(counts))


def no_accounting(folder: Path) -> None:
    edit_manifest(folder, lambda content: content.update(accounting=[]))


def release_a_row_less(folder: Path) -> None:
    for table, gone in (("queries", 1), ("lists", 1), ("corpus", 4), ("qrels", 4)):
        rewrite(folder, table, lambda rows, gone=gone: rows.__delitem__(slice(-gone, None)))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (no_accounting, "no stage is accounted for"),
        (account(2, kept=3), "stage filter: 5 rows in, 4 accounted for"),
        (account(2, reasons={}), "stage filter: reasons do not add up"),
        (account(2, rows=6, kept=5), "stage filter: 6 rows in, the stage before kept 5"),
        (release_a_row_less, "the last stage kept 3 rows, queries holds 2"),
        (drop_row("rejects", 1), "rejects: 0 rejected rows of stage filter, the accounting says 1"),
        (set_field("rejects", 1, "stage", "label"), "rejects: 0 rejected rows of stage filter"),
        (set_field("rejects", 0, "status", "unused"), r"rejects/.*, row 1, field 'status': 'unused'"),
    ],
)  # fmt: skip
def test_rows_that_do_not_add_up_are_named(copied: Path, damage: Callable[[Path], None], words: str) -> None:
    damage(copied)
    with pytest.raises(InputError, match=words):
        verify(copied)


def test_a_manifest_without_levels_is_named(copied: Path) -> None:
    edit_manifest(copied, lambda content: content.update(config={}))
    with pytest.raises(InputError, match=r"manifest\.json, field 'content\.config\.levels': expected a list"):
        verify(copied)


@given(st.integers(0, 9), st.floats(0, 1, exclude_max=True))
def test_halves_round_up(whole: int, fraction: float) -> None:
    assert round_half_up(whole + fraction) == whole + int(whole + fraction >= whole + 0.5)
