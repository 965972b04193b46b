"""The sample of an audit, its sheets, and the stored result."""

from __future__ import annotations

import csv
import json
import shutil
from collections import Counter
from pathlib import Path

import orjson
import pytest
from made_stories import cut, kept

from gradeloom.schemas.audit import AuditFigures, AuditKey, AuditLabel
from gradeloom.schemas.errors import InputError
from gradeloom.tasks.release.audit import (
    ReleasedPassage,
    Sample,
    audited_release,
    draw_sample,
    group_of,
    read_audits,
    read_key,
    released_passages,
    store_audit,
)
from gradeloom.tasks.release.sheets import read_sheets, sheets_in, write_sheets

NO_FIGURES = AuditFigures(
    labelled=[], raters=[], judge=None, grade_precision=[], absolute_error=[], judge_agreement=[]
)
HOSTILE = "</script><script>document.title='broken'</script><b>not bold</b>"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twenty lists; the judge of `made_stories` says 2 to what was written as a 3."""
    root = tmp_path_factory.mktemp("audited")
    texts = [f"=HYPERLINK(1) {HOSTILE}", 'two\r\nlines, "quoted"; and more', "-1", "plain"]
    cut(root, [kept(n, query=f"+ query {n}" if n == 0 else None, texts=texts if n == 0 else None)
               for n in range(20)])  # fmt: skip
    return root


@pytest.fixture(scope="module")
def release(root: Path) -> Path:
    return root / "made" / "0.1.0"


@pytest.fixture(scope="module")
def sample(release: Path) -> Sample:
    return draw_sample(release, n=80, raters=2, seed=0)


@pytest.fixture
def sheets(sample: Sample, tmp_path: Path) -> Path:
    write_sheets(sample, tmp_path / "sheets")
    return tmp_path / "sheets"


# --- the sample ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("judged", "expected", "abstained", "apart"),
    [
        (2, 2.0, False, False),
        (2, 2.49, False, False),
        (2, 2.5, False, True),  # nearly a 3
        (1, 1.9, False, True),
        (2, 2.0, True, True),
        (2, None, False, False),
        (None, None, False, False),  # nobody asked a judge
    ],
)
def test_disagreement(judged: int | None, expected: float | None, abstained: bool, apart: bool) -> None:
    passage = ReleasedPassage("q", "query", "p", "text", 2.0, 2, judged, expected, abstained)
    assert passage.disagreement is apart


def test_groups_are_grades_parted_by_disagreement_and_drawn_from_evenly(release: Path) -> None:
    key = draw_sample(release, n=10, raters=1, seed=0).key
    # The judge disagrees with every 3 and with nothing else, so that no grade is parted.
    assert [(g.grade, g.disagreement, g.passages, g.sampled) for g in key.groups] == [
        (3, None, 20, 3), (2, None, 20, 3), (1, None, 20, 2), (0, None, 20, 2)
    ]  # fmt: skip
    assert [g.probability for g in key.groups] == [0.15, 0.15, 0.1, 0.1]
    drawn = Counter(item.group for item in key.items)
    assert [drawn[place] for place in range(4)] == [3, 3, 2, 2]


def test_the_judge_parts_a_grade_where_both_sides_are_large_enough(
    release: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def passages(folder: Path) -> list[ReleasedPassage]:
        return [
            ReleasedPassage(f"q{n}", "query", f"p{n}", "text", 1.0, 1, 1 if n < 30 else 2, None, False)
            for n in range(40)
        ]

    monkeypatch.setattr("gradeloom.tasks.release.audit.released_passages", passages)
    key = draw_sample(release, n=24, raters=1, seed=0).key
    assert [(g.grade, g.disagreement, g.passages, g.sampled) for g in key.groups] == [
        (1, False, 30, 14), (1, True, 10, 10)  # ten are all there are
    ]  # fmt: skip
    assert {group_of(key, passage) for passage in passages(release)[30:]} == {1}


def test_the_seed_decides(release: Path) -> None:
    one, again, other = (draw_sample(release, n=12, raters=2, seed=seed).key for seed in (1, 1, 2))
    assert one == again
    assert {item.passage_id for item in one.items} != {item.passage_id for item in other.items}


def test_every_passage_is_drawn_as_often_as_its_probability_says(release: Path) -> None:
    drawn = Counter(
        item.query_id
        for seed in range(60)
        for item in draw_sample(release, n=8, raters=1, seed=seed).key.items
    )
    assert sum(drawn.values()) == 480
    assert len(drawn) == 20
    assert max(drawn.values()) < 45  # 24 each on average; 45 is four standard deviations off


def test_too_many_and_too_few(release: Path) -> None:
    with pytest.raises(InputError, match="the release holds 80 passages, 81 were asked for"):
        draw_sample(release, n=81, raters=2, seed=0)
    with pytest.raises(InputError, match="7 passages are too few: expected at least 8, two of each of the 4"):
        draw_sample(release, n=7, raters=2, seed=0)


def test_a_changed_release_is_not_sampled(release: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(release, tmp_path / "copy"))
    (copy / "README.md").write_text("changed")
    with pytest.raises(InputError, match="bytes"):
        draw_sample(copy, n=8, raters=2, seed=0)


# --- the sheets ---------------------------------------------------------------------------------


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8-sig", newline="") as f:
        return list(csv.DictReader(f))


def test_sheets_hold_the_sample_in_an_order_of_their_own_and_no_grade(sample: Sample, sheets: Path) -> None:
    assert sorted(path.name for path in sheets.iterdir()) == [
        "key.json", "rater-1.csv", "rater-1.html", "rater-2.csv", "rater-2.html"
    ]  # fmt: skip
    one, other = (rows_of(sheets / f"rater-{rater}.csv") for rater in (1, 2))
    assert list(one[0]) == ["item", "query", "passage", "grade"]
    assert [row["item"] for row in one] != [row["item"] for row in other]
    assert (
        {row["item"] for row in one} == {row["item"] for row in other} == {i.item for i in sample.key.items}
    )
    assert {row["grade"] for row in one + other} == {""}
    texts = {item.item: p.text for item, p in zip(sample.key.items, sample.passages, strict=True)}
    assert all(row["passage"].removeprefix("'") == texts[row["item"]] for row in one)


def test_neither_sheet_tells_where_a_passage_comes_from(sample: Sample, sheets: Path) -> None:
    for rater in (1, 2):
        for kind in ("csv", "html"):
            written = (sheets / f"rater-{rater}.{kind}").read_text(encoding="utf-8-sig")
            assert sample.key.digest not in written
            assert "intended" not in written
            assert not any(item.passage_id in written for item in sample.key.items)


def test_no_cell_is_a_formula(sheets: Path) -> None:
    cells = [cell for row in rows_of(sheets / "rater-1.csv") for cell in row.values()]
    assert not [cell for cell in cells if cell.startswith(("=", "+", "-", "@", "\t", "\r"))]
    assert {"'+ query 0", "'-1", f"'=HYPERLINK(1) {HOSTILE}"} <= set(cells)


def test_text_in_the_page_stays_text(sheets: Path) -> None:
    page = (sheets / "rater-1.html").read_text()
    assert page.count("</script>") == 2  # the data's end and the program's
    assert HOSTILE not in page
    assert "http" not in page.replace("http-equiv", "")  # nothing is fetched


def test_sheets_never_replace_others(sample: Sample, sheets: Path) -> None:
    with pytest.raises(InputError, match="exists already; expected a new or empty folder"):
        write_sheets(sample, sheets)


def test_a_place_that_cannot_be_written_keeps_nothing(sample: Sample, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be written"):
        write_sheets(sample, tmp_path / "file" / "sheets")


# --- reading them -------------------------------------------------------------------------------


def filled(sheets: Path, *grades: str) -> tuple[AuditKey, Path]:
    """The first sheet with these grades in its first rows."""
    path = sheets / "rater-1.csv"
    rows = rows_of(path)
    for row, grade in zip(rows, grades, strict=False):
        row["grade"] = grade
    with path.open("w", encoding="utf-8", newline="") as f:
        writer = csv.DictWriter(f, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)
    return read_key(sheets), path


def test_grades_are_read_in_the_order_of_the_key(sample: Sample, sheets: Path) -> None:
    key, path = filled(sheets, "3", " 2 ", "", "0")
    items = [row["item"] for row in rows_of(path)]
    labels = read_sheets(key, sheets_in(sheets, key))
    assert [label.item for label in labels] == [item.item for item in sample.key.items]
    given = {label.item: label.grades for label in labels}
    assert [given[item] for item in items[:5]] == [
        [3, None],
        [2, None],
        [None, None],
        [0, None],
        [None, None],
    ]


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
@pytest.mark.parametrize("bom", [True, False])
@pytest.mark.parametrize("quoting", [csv.QUOTE_MINIMAL, csv.QUOTE_ALL])
def test_sheets_as_spreadsheets_write_them(sheets: Path, delimiter: str, bom: bool, quoting: int) -> None:
    key, path = filled(sheets, "1", "2")
    expected = read_sheets(key, [path])
    rows = rows_of(path)
    with path.open("w", encoding="utf-8-sig" if bom else "utf-8", newline="") as f:
        writer = csv.writer(f, delimiter=delimiter, quoting=quoting)  # type: ignore[arg-type]
        writer.writerow(["Grade", "query", "passage", "Item "])
        writer.writerows([row["grade"], row["query"], row["passage"], row["item"]] for row in rows)
        f.write("\r\n")
        writer.writerow(["", "", "", ""])
    assert read_sheets(key, [path]) == expected


@pytest.mark.parametrize("grade", ["4", "-1", "2.5", "2,0", "yes", "=1+1", "３"])
def test_a_wrong_grade_is_named_by_file_row_and_field(sheets: Path, grade: str) -> None:
    key, path = filled(sheets, "1", grade)
    with pytest.raises(InputError) as raised:
        read_sheets(key, [path])
    message = f"{path}, row 3, field 'grade': expected 0, 1, 2 or 3 or nothing, found {grade!r}"
    assert str(raised.value) == message


def test_rows_count_as_a_spreadsheet_counts_them(sheets: Path) -> None:
    """A passage of two lines is one row."""
    key, path = filled(sheets)
    rows = rows_of(path)
    two_lines = next(row for row in rows if "\n" in row["passage"])
    lines = [two_lines | {"grade": "1"}, {**next(r for r in rows if r is not two_lines), "grade": "9"}]
    with path.open("w", encoding="utf-8", newline="") as f:
        writer = csv.DictWriter(f, rows[0].keys())
        writer.writeheader()
        writer.writerows(lines)
    with pytest.raises(InputError, match=r"rater-1\.csv, row 3, field 'grade'"):
        read_sheets(key, [path])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "row 1, field 'item': expected one column of this name"),
        ("item,score\r\n", "row 1, field 'grade': expected one column of this name"),
        ("item,grade,grade\r\n", "row 1, field 'grade': expected one column of this name"),
        ("item,grade\r\np123,1\r\n", "row 2, field 'item': 'p123' is no item of this sample"),
        ("item,grade\r\n{item},1\r\n{item},1\r\n", "row 3, field 'item': '{item}' stands in row 2, too"),
        ("item,grade\r\n{item}\r\n", "row 2: 1 cells, expected those of the header"),
        ("item,grade\r\n{item},\r\n", "no row has a grade; expected 0, 1, 2 or 3 in the column 'grade'"),
    ],
)
def test_what_is_no_sheet_of_the_sample(sheets: Path, text: str, message: str) -> None:
    key = read_key(sheets)
    path = sheets / "rater-1.csv"
    path.write_text(text.replace("{item}", key.items[0].item), newline="")
    with pytest.raises(InputError) as raised:
        read_sheets(key, [path])
    assert message.replace("{item}", key.items[0].item) in str(raised.value)


def test_other_encodings_and_missing_files(sheets: Path) -> None:
    key = read_key(sheets)
    path = sheets / "rater-1.csv"
    path.write_bytes("item,grade,café\r\n".encode("latin-1"))
    with pytest.raises(InputError, match="is not UTF-8; save it as 'CSV UTF-8'"):
        read_sheets(key, [path])
    path.unlink()
    with pytest.raises(InputError, match="cannot be read: No such file"):
        read_sheets(key, [path])
    with pytest.raises(InputError, match=r"rater-1\.csv: the sheet of a rater is missing"):
        sheets_in(sheets, key)


def test_a_key_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"key\.json: cannot be read"):
        read_key(tmp_path)
    (tmp_path / "key.json").write_text("{")
    with pytest.raises(InputError, match="not valid JSON"):
        read_key(tmp_path)
    (tmp_path / "key.json").write_text("{}")
    with pytest.raises(InputError, match="field 'name': Field required"):
        read_key(tmp_path)


@pytest.mark.parametrize("field", ["name", "version"])
def test_a_key_leads_out_of_no_folder(sheets: Path, field: str) -> None:
    data = json.loads((sheets / "key.json").read_text()) | {field: "../../elsewhere"}
    (sheets / "key.json").write_text(json.dumps(data))
    with pytest.raises(InputError, match=f"field '{field}': .*expected a release's name and version"):
        read_key(sheets)


# --- keeping the result -------------------------------------------------------------------------


def labels(key: AuditKey, labelled: int) -> list[AuditLabel]:
    return [
        AuditLabel(**i.model_dump(exclude={"group"}), grades=[1 if n < labelled else None])
        for n, i in enumerate(key.items)
    ]  # fmt: skip


def test_an_audit_lies_beside_its_release_and_is_read_back(root: Path, release: Path, tmp_path: Path) -> None:
    home = Path(shutil.copytree(root, tmp_path / "releases"))
    before = sorted(str(path) for path in (home / "made" / "0.1.0").rglob("*"))
    few, many = (draw_sample(release, n=20, raters=1, seed=seed).key for seed in (1, 2))
    kept_few, path = store_audit(home, few, labels(few, 3), NO_FIGURES)
    kept_many, _ = store_audit(home, many, labels(many, 9), NO_FIGURES)
    assert path == home / "made" / ".audits" / f"0.1.0-{few.sample()}.json"
    assert read_audits(home, "made", "0.1.0") == [kept_many, kept_few]
    written = path.read_bytes()
    store_audit(home, few, labels(few, 3), NO_FIGURES)
    assert path.read_bytes() == written
    again, same_place = store_audit(home, few, labels(few, 20), NO_FIGURES)  # more labels of that sample
    assert same_place == path
    assert read_audits(home, "made", "0.1.0") == [again, kept_many]
    assert sorted(str(path) for path in (home / "made" / "0.1.0").rglob("*")) == before


def test_labels_count_for_their_release_only(root: Path, release: Path, tmp_path: Path) -> None:
    home = Path(shutil.copytree(root, tmp_path / "releases"))
    key = draw_sample(release, n=20, raters=1, seed=0).key
    assert audited_release(home, key) == home / "made" / "0.1.0"
    store_audit(home, key, labels(key, 3), NO_FIGURES)
    shutil.rmtree(home / "made" / "0.1.0")
    with pytest.raises(InputError, match=r"the release made@0\.1\.0 that was sampled is not here; --root"):
        audited_release(home, key)
    cut(home, [kept(0)])  # another one of that name and version
    with pytest.raises(InputError, match="labels count for the release they were given to"):
        audited_release(home, key)
    assert read_audits(home, "made", "0.1.0") == []


def test_versions_are_told_apart(root: Path, tmp_path: Path) -> None:
    home = tmp_path / "releases"
    for version in ("0.1.0", "0.1.0-rc.1"):
        cut(home, [kept(n) for n in range(3)], version=version)
        key = draw_sample(home / "made" / version, n=8, raters=1, seed=0).key
        store_audit(home, key, labels(key, 3), NO_FIGURES)
    for version in ("0.1.0", "0.1.0-rc.1"):
        assert [audit.version for audit in read_audits(home, "made", version)] == [version]


def test_a_damaged_audit_is_said(root: Path, release: Path, tmp_path: Path) -> None:
    home = Path(shutil.copytree(root, tmp_path / "releases"))
    key = draw_sample(release, n=20, raters=1, seed=0).key
    _, path = store_audit(home, key, labels(key, 3), NO_FIGURES)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(InputError, match="not valid JSON"):
        read_audits(home, "made", "0.1.0")
    data = json.loads(orjson.dumps({"format": 1}))
    path.write_text(json.dumps(data))
    with pytest.raises(InputError, match="field 'name': Field required"):
        read_audits(home, "made", "0.1.0")


def test_every_passage_belongs_to_a_group(sample: Sample, release: Path) -> None:
    held = Counter(group_of(sample.key, passage) for passage in released_passages(release))
    assert [held[place] for place in range(len(sample.key.groups))] == [g.passages for g in sample.key.groups]
