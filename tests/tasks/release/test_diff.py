from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from bare_release import bare
from hypothesis import given, settings
from hypothesis import strategies as st
from made_stories import GRADES, cut, dropped, kept

from gradeloom.schemas.errors import InputError
from gradeloom.schemas.manifest import ModelIdentity, StageAccount
from gradeloom.tasks.release.diff import Change, ReleaseDiff, TableDiff, changes, diff
from gradeloom.tasks.release.verify import require_untouched


def table(found: ReleaseDiff, name: str) -> TableDiff:
    (one,) = (t for t in found.tables if t.table == name)
    return one


def numbers(one: TableDiff) -> tuple[int, ...]:
    return one.a, one.b, one.added, one.removed, one.changed


@pytest.fixture(scope="module")
def graded(tmp_path_factory: pytest.TempPathFactory) -> ReleaseDiff:
    """Of three lists one stays as it is, one is regraded, one goes; one is new; one of two rejects goes."""
    root = tmp_path_factory.mktemp("graded")
    before = [kept(0), dropped(1, "generate", "unparsable"), kept(2), dropped(3, "filter", "too_short"),
              kept(4)]  # fmt: skip
    after = [kept(0), dropped(1, "generate", "unparsable"), kept(2, labels=(3, 1, 1, 0)),
             kept(3, texts=[f"a longer passage of level {grade}" for grade in GRADES])]  # fmt: skip
    cut(root, before)
    cut(root, after, version="0.2.0", policy="judged")
    return diff(root / "made" / "0.1.0", root / "made" / "0.2.0")


def test_rows_are_counted_by_key(graded: ReleaseDiff) -> None:
    assert {t.table: numbers(t) for t in graded.tables} == {
        "corpus": (12, 12, 4, 4, 0),
        "lists": (3, 3, 1, 1, 1),
        "qrels": (12, 12, 4, 4, 1),
        "queries": (3, 3, 1, 1, 0),
        "rejects": (2, 1, 0, 1, 0),
    }
    assert table(graded, "lists").changed_columns == {"grade": 1}
    assert table(graded, "qrels").changed_columns == {"score": 1}
    assert not any(t.columns or t.reordered for t in graded.tables)


def test_examples_show_what_is_not_the_same(graded: ReleaseDiff) -> None:
    added, removed, changed = table(graded, "lists").examples
    assert (added.what, added.key, added.old) == ("added", ["q3"], None)
    assert added.new is not None
    assert added.new["query"] == "what is thing 3?"
    assert (removed.what, removed.key, removed.new) == ("removed", ["q4"], None)
    assert (changed.what, changed.key) == ("changed", ["q2"])
    assert changed.old == {"grade": [3.0, 2.0, 1.0, 0.0]}
    assert changed.new == {"grade": [3.0, 1.0, 1.0, 0.0]}
    assert [e.what for e in table(graded, "corpus").examples] == ["added"] * 3 + ["removed"] * 3


def test_grades_are_followed_by_query_and_passage(graded: ReleaseDiff) -> None:
    """Two lists are in both: eight pairs, of which one went from 2 to 1."""
    moves = graded.grade_moves
    assert moves is not None
    assert moves.grades == [0, 1, 2, 3]
    assert moves.matrix == [[2, 0, 0, 0], [0, 2, 0, 0], [0, 1, 1, 0], [0, 0, 0, 2]]
    assert (moves.pairs, moves.moved) == (8, 1)


def test_accounting_and_documents_stand_side_by_side(graded: ReleaseDiff) -> None:
    dropped_at = {
        s.stage: (s.a.rejected, s.b.rejected)
        for s in graded.accounting
        if s.a is not None and s.b is not None
    }
    assert dropped_at == {
        "source": (0, 0),
        "generate": (1, 1),
        "filter": (1, 0),
        "label": (0, 0),
        "target": (0, 0),
    }
    assert graded.documents == ["README.md"]
    assert (graded.a.version, graded.b.version) == ("0.1.0", "0.2.0")


def test_a_version_alone_is_no_difference(tmp_path: Path) -> None:
    """The card and the recipe's digest hold the version; the rest is the same."""
    cut(tmp_path, recipe="0" * 16)
    cut(tmp_path, version="0.2.0", recipe="1" * 16)
    found = diff(tmp_path / "made" / "0.1.0", tmp_path / "made" / "0.2.0")
    assert found.documents == []
    assert found.config == found.prompts == found.models == found.steps == []
    assert all(figure.a == figure.b for figure in found.quality)
    assert found.grade_moves is not None
    assert found.grade_moves.moved == 0


# --- any kind of table ------------------------------------------------------------------------


def pair(tmp_path: Path, a: dict[str, pa.Table], b: dict[str, pa.Table], **of_b: Any) -> ReleaseDiff:
    return diff(bare(tmp_path / "a", a), bare(tmp_path / "b", b, version="0.2.0", **of_b))


def test_columns_that_came_went_and_changed(tmp_path: Path) -> None:
    a = pa.table({"_id": ["x", "y"], "text": ["old", "old"], "n": [1, 2], "gone": [True, True]})
    b = pa.table({"_id": ["x", "y"], "text": ["old", "new"], "n": [1.0, 2.5], "new": ["", ""]})
    one = table(pair(tmp_path, {"queries": a}, {"queries": b}), "queries")
    assert one.columns == [
        Change("n", "changed", "int64", "double"),
        Change("gone", "removed", "bool", None),
        Change("new", "added", None, "string"),
    ]
    assert numbers(one) == (2, 2, 0, 0, 1)
    assert one.changed_columns == {"text": 1}
    assert one.examples[0].old == {"text": "old"}


def test_a_column_that_may_now_be_null_is_another_column(tmp_path: Path) -> None:
    strict = pa.schema([pa.field("_id", pa.string(), nullable=False)])
    a, b = pa.table({"_id": ["x"]}, schema=strict), pa.table({"_id": ["x"]})
    (change,) = table(pair(tmp_path, {"queries": a}, {"queries": b}), "queries").columns
    assert (change.old, change.new) == ("string not null", "string")


def test_a_table_of_which_no_key_is_known_is_compared_by_whole_rows(tmp_path: Path) -> None:
    a = pa.table({"prompt": ["p", "p", "q"], "chosen": ["c", "c", "d"]})
    b = pa.table({"prompt": ["p", "q"], "chosen": ["c", "e"]})
    found = pair(tmp_path, {"preference": a}, {"preference": b})
    assert numbers(table(found, "preference")) == (3, 2, 1, 2, 0)
    assert found.grade_moves is None


def test_tables_that_one_release_alone_has(tmp_path: Path) -> None:
    rows = pa.table({"_id": ["x", "y"]})
    found = pair(tmp_path, {"queries": rows, "reviews": rows}, {"queries": rows, "sft": rows})
    assert numbers(table(found, "reviews")) == (2, 0, 0, 2, 0)
    assert numbers(table(found, "sft")) == (0, 2, 2, 0, 0)
    assert [c.what for t in found.tables for c in t.columns] == ["removed", "added"]


def test_the_same_rows_in_another_order(tmp_path: Path) -> None:
    a, b = pa.table({"_id": ["x", "y", "z"]}), pa.table({"_id": ["z", "x", "y"]})
    one = table(pair(tmp_path, {"queries": a}, {"queries": b}), "queries")
    assert numbers(one) == (3, 3, 0, 0, 0)
    assert one.reordered


def test_rows_of_one_key_are_told_apart_by_their_order(tmp_path: Path) -> None:
    """Rejected source rows that have no id stand under an empty one."""
    a = pa.table({"query_id": ["", "", "q"], "reason": ["empty_query", "bad_row", "too_long"]})
    b = pa.table({"query_id": ["", "", "", "q"], "reason": ["empty_query", "bad_row", "bad_row", "too_long"]})
    one = table(pair(tmp_path, {"rejects": a}, {"rejects": b}), "rejects")
    assert numbers(one) == (3, 4, 1, 0, 0)


keyed = st.dictionaries(
    st.text(max_size=3), st.tuples(st.integers(0, 2), st.none() | st.text(max_size=2)), max_size=8
)


@settings(max_examples=25, deadline=None)
@given(keyed, keyed)
def test_counts_are_those_of_sets(
    a: dict[str, tuple[int, str | None]], b: dict[str, tuple[int, str | None]]
) -> None:
    schema = pa.schema({"_id": pa.string(), "n": pa.int64(), "text": pa.string()})

    def rows(of: dict[str, tuple[int, str | None]]) -> pa.Table:
        return pa.Table.from_pylist(
            [{"_id": k, "n": n, "text": t} for k, (n, t) in of.items()], schema=schema
        )

    with tempfile.TemporaryDirectory() as folder:
        one = table(pair(Path(folder), {"queries": rows(a)}, {"queries": rows(b)}), "queries")
    both = a.keys() & b.keys()
    changed = [key for key in both if a[key] != b[key]]
    assert numbers(one) == (len(a), len(b), len(b.keys() - a.keys()), len(a.keys() - b.keys()), len(changed))
    unlike = Counter(
        name for key in changed for i, name in enumerate(("n", "text")) if a[key][i] != b[key][i]
    )
    assert one.changed_columns == dict(unlike)
    assert len(one.examples) == sum(min(3, n) for n in (one.added, one.removed, one.changed))
    assert one.reordered == (a == b and list(a) != list(b))


# --- manifests --------------------------------------------------------------------------------


def test_changes_are_named_by_dotted_paths() -> None:
    old = {"filters": [{"kind": "length", "max_words": 250}, {"kind": "refusal"}], "judge": None, "seed": 0}
    new = {"filters": [{"kind": "length", "max_words": 60}], "judge": {"prompt": "judge"}, "seed": 0}
    assert changes(old, new) == [
        Change("filters.0.max_words", "changed", 250, 60),
        Change("filters.1.kind", "removed", "refusal", None),
        Change("judge", "removed", None, None),
        Change("judge.prompt", "added", None, "judge"),
    ]


plain = st.recursive(
    st.none() | st.integers(0, 3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=8,
)


@given(plain, plain)
def test_equal_values_and_only_they_have_no_changes(old: Any, new: Any) -> None:
    """A list and a mapping of its indexes do not mix: keys here are letters."""
    assert (changes(old, new) == []) == (old == new)


def test_what_the_manifests_say_is_compared(tmp_path: Path) -> None:
    rows = {"queries": pa.table({"_id": ["x"]})}

    def content(version: str, judge: str, **more: Any) -> dict[str, Any]:
        named = {"name": "bare", "version": version, "parent": None, "licence": "mit"}
        return {
            "version": version,
            "config": {"release": named, "label": {"policy": judge}},
            "models": [ModelIdentity(role="judge", kind="vllm", model="m", identity=judge)],
            **more,
        }

    account = StageAccount(stage="judge", rows=3, kept=2, rejected=1, reasons={"tie": 1})
    found = diff(
        bare(tmp_path / "a", rows, card="of bare 0.1.0", **content(
            "0.1.0", "one", prompts={"judge": "aa"}, steps={"label": "1"},
            quality={"kappa": 0.5, "matrix": [[1]], "words": {"3": {"mean": 60}}, "independent": True},
        )),
        bare(tmp_path / "b", rows, card="of bare 0.2.0", **content(
            "0.2.0", "two", prompts={"judge": "bb"}, steps={"label": "2"}, accounting=[account],
            quality={"kappa": 0.25, "matrix": [[2]], "words": {"3": {"mean": 61}}, "independent": False},
        )),
    )  # fmt: skip
    assert found.config == [Change("label.policy", "changed", "one", "two")]
    assert found.models == [Change("judge.identity", "changed", "one", "two")]
    assert found.prompts == [Change("judge", "changed", "aa", "bb")]
    assert found.steps == [Change("label", "changed", "1", "2")]
    assert {f.name: (f.a, f.b, f.difference) for f in found.quality} == {
        "kappa": (0.5, 0.25, -0.25),
        "matrix": ([[1]], [[2]], None),
        "words.3.mean": (60, 61, 1),
        "independent": (True, False, None),
    }
    assert [(s.stage, s.a is None, s.b is None) for s in found.accounting] == [
        ("source", False, True),
        ("judge", True, False),
    ]
    assert found.documents == []


def test_releases_of_two_kinds_do_not_compare(tmp_path: Path) -> None:
    a, b = bare(tmp_path / "a", {}), bare(tmp_path / "b", {}, kind="pairs")
    with pytest.raises(
        InputError, match=r"b: of kind 'pairs', and .*a of kind 'graded'; only releases of one"
    ):
        diff(a, b)


def test_a_release_that_was_changed_is_not_compared(tmp_path: Path) -> None:
    """A file that went would be told as rows that went."""
    a = bare(tmp_path / "a", {"queries": pa.table({"_id": ["x"]})})
    b = bare(tmp_path / "b", {"queries": pa.table({"_id": ["x"]})})
    require_untouched(b)
    (b / "queries" / "train-00000.parquet").unlink()
    with pytest.raises(InputError, match=r"train-00000\.parquet: listed in the manifest, but missing"):
        diff(a, b)


def test_a_table_that_is_no_parquet_is_named(tmp_path: Path) -> None:
    a = bare(tmp_path / "a", {})
    forged = bare(tmp_path / "c", {"queries": b"PAR1 of no table PAR1"})
    with pytest.raises(InputError, match=r"c/queries/train-00000\.parquet: cannot be read as Parquet"):
        diff(a, forged)
