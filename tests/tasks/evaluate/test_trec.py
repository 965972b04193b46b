from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradeloom.schemas.errors import InputError
from gradeloom.tasks.evaluate.trec import ranked, read_run, write_run

IDS = st.text(st.characters(exclude_categories=["Z", "C"]), min_size=1, max_size=5)
SCORES = st.one_of(
    st.floats(allow_nan=False, allow_infinity=False),
    st.floats(width=32, allow_nan=False, allow_infinity=False),
    st.sampled_from([0.0, 1.0]),
)


def test_a_line_has_six_columns_and_ranks_count_from_one(tmp_path: Path) -> None:
    write_run(tmp_path / "a.trec", {"q1": {"a": 1.5, "b": 2.0, "c": 1.5}, "q2": {}}, "mine")
    assert (tmp_path / "a.trec").read_text() == (
        "q1 Q0 b 1 2.0 mine\n"
        "q1 Q0 c 2 1.5 mine\n"  # of equal scores the greater id first, as trec_eval ranks them
        "q1 Q0 a 3 1.5 mine\n"
    )  # fmt: skip


@given(st.dictionaries(IDS, st.dictionaries(IDS, SCORES, min_size=1), min_size=1))
def test_what_is_written_is_read_again_number_for_number(run: dict[str, dict[str, float]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        write_run(Path(folder) / "run", run, "tag")
        again = read_run(Path(folder) / "run")
    assert again == run
    assert {q: list(ranking) for q, ranking in again.items()} == {q: ranked(s) for q, s in run.items()}


def test_a_32_bit_score_survives(tmp_path: Path) -> None:
    score = np.float32(0.1)
    write_run(tmp_path / "run", {"q": {"a": score}}, "t")
    assert np.float32(read_run(tmp_path / "run")["q"]["a"]) == score


def test_tabs_blank_lines_and_any_rank_are_read(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("\nq\tQ0\ta\t7\t  1.25\tSTANDARD\n\nq 0 b 7 3e0 x\n")
    assert list(read_run(tmp_path / "run")["q"].items()) == [("b", 3.0), ("a", 1.25)]


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("q Q0 a 1 2.0", "row 2: expected `query Q0 passage rank score tag`, got 5 columns"),
        ("q Q0 a 1 2.0 my tag", "row 2: .* got 7 columns"),
        ("q Q0 a 1 high t", "row 2: the score is 'high', not a finite number"),
        ("q Q0 a 1 nan t", "row 2: the score is 'nan'"),
        ("q Q0 a 1 -inf t", "row 2: the score is '-inf'"),
        ("q Q0 b 1 1.0 t", "row 2: passage 'b' stands twice in the ranking of query 'q'"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, what: str) -> None:
    (tmp_path / "run").write_text(f"q Q0 b 1 1.0 t\n{line}\n")
    with pytest.raises(InputError, match=f"run, {what}"):
        read_run(tmp_path / "run")


def test_a_file_that_is_not_there_or_no_text(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="none: cannot be read: No such file"):
        read_run(tmp_path / "none")
    (tmp_path / "binary").write_bytes(b"q Q0 \xff 1 1 t\n")
    with pytest.raises(InputError, match="is not UTF-8 text"):
        read_run(tmp_path / "binary")


@pytest.mark.parametrize(
    ("run", "tag", "what"),
    [
        ({"q": {"a b": 1.0}}, "t", "passage id 'a b' cannot stand"),
        ({"q": {"": 1.0}}, "t", "passage id '' cannot stand"),
        ({"q\n1 Q0 x 1 9 t": {"a": 1.0}}, "t", "query id 'q.n1 Q0 x 1 9 t' cannot stand"),
        ({"q": {"a": 1.0}}, "two words", "tag 'two words' cannot stand"),
        ({"q": {"a": float("nan")}}, "t", "query 'q', passage 'a': the score is nan"),
    ],
)
def test_what_the_format_cannot_hold_is_refused_and_the_file_left_alone(
    tmp_path: Path, run: dict[str, dict[str, float]], tag: str, what: str
) -> None:
    path = tmp_path / "run"
    path.write_text("before")
    with pytest.raises(InputError, match=what):
        write_run(path, run, tag)
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]
