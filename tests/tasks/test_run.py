from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any, get_args, get_origin

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gradeloom.schemas.errors import InputError
from gradeloom.schemas.manifest import StageAccount
from gradeloom.schemas.rows import (
    STATUSES,
    DecisionRow,
    JudgedRow,
    LabelRow,
    ListRow,
    QueryRow,
    Row,
    arrow_schema,
    digest,
)
from gradeloom.tasks.run import (
    CRASH_POINTS,
    Accounting,
    RunDirectory,
    Stage,
    is_locked,
    write_rows,
    write_whole,
)

ROW_TYPES = (QueryRow, ListRow, DecisionRow, JudgedRow, LabelRow)


def decisions(*ids: str) -> list[DecisionRow]:
    return [DecisionRow(id=name, ordinal=n) for n, name in enumerate(ids)]


def stage(folder: Path) -> Stage[DecisionRow]:
    return RunDirectory(folder).stage("filter", "abc", DecisionRow)


def python(code: str, *arguments: object, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


# --- write_whole ----------------------------------------------------------------------------


def test_a_file_is_written_with_its_folders(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "file"
    write_whole(path, lambda temporary: temporary.write_text("whole") and None)
    assert path.read_text() == "whole"
    assert [p.name for p in path.parent.iterdir()] == ["file"]


@pytest.mark.parametrize(
    ("error", "raised"), [(OSError(28, "No space left on device"), InputError), (KeyError("x"), KeyError)]
)
def test_a_failed_write_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, error: Exception, raised: type[Exception]
) -> None:
    path = tmp_path / "file"
    path.write_text("old")

    def half(temporary: Path) -> None:
        temporary.write_text("ha")
        raise error

    with pytest.raises(raised):
        write_whole(path, half)
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_an_unwritable_place_is_an_input_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    target = tmp_path / "file" / "shards" / "000000.parquet"
    with pytest.raises(InputError) as error:
        write_rows(target, decisions("a"), DecisionRow)
    assert str(error.value) == f"{target}: cannot write: Not a directory"


WRITE_UNTIL_FULL = """
import sys
from pathlib import Path
from gradeloom.schemas.errors import InputError
from gradeloom.schemas.rows import DecisionRow
from gradeloom.tasks.run import RunDirectory
import hashlib

def rows(shard):
    noise = lambda n: hashlib.sha256(f"{shard} {n}".encode()).hexdigest()
    return [DecisionRow(id=noise(n), ordinal=n, status="failed", reason=noise(-n)) for n in range(2000)]

folder = Path(sys.argv[1])
with RunDirectory(folder / "run").locked() as run:
    stage = run.stage("filter", "abc", DecisionRow)
    paths = []
    for shard in range(100):
        ids = [row.id for row in rows(shard)]
        path = stage.path(shard, ids)
        try:
            stage.write(path, ids, rows(shard))
        except InputError as error:
            print(error)
            break
        paths.append(path)
    assert 2 < shard < 99, shard
    assert not path.exists()
    assert sorted(p for p in stage.folder.iterdir()) == paths
    for n, path in enumerate(paths):
        assert stage.read(path) == rows(n)

# Filled to the last byte, with the lock file empty: that the lock cannot be written is no traceback.
(folder / "run" / "lock").write_bytes(b"")
with (folder / "more").open("wb", buffering=0) as f:
    try:
        while f.write(bytes(4096)):
            pass
    except OSError:
        pass
try:
    with RunDirectory(folder / "run").locked():
        print("locked")
except InputError as error:
    print(error)
try:
    with RunDirectory(folder / "other").locked():
        print("locked")
except InputError as error:
    print(error)
"""


def test_a_full_disk_is_an_input_error_and_earlier_shards_stay(tmp_path: Path) -> None:
    script = 'mount -t tmpfs -o size=1m tmpfs $0 && exec "$1" -c "$2" $0'
    run = subprocess.run(
        ["unshare", "-m", "sh", "-c", script, str(tmp_path), sys.executable, WRITE_UNTIL_FULL],
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    full, again, other = run.stdout.splitlines()
    assert ".parquet: cannot write: " in full
    assert "No space left on device" in full
    assert again == f"{tmp_path}/run: cannot take the run: No space left on device"
    assert other.startswith(f"{tmp_path}/other: cannot ")
    assert other.endswith(": No space left on device")


CRASH = """
import sys
from pathlib import Path
from gradeloom.tasks.run import write_whole
for n in (1, 2, 3):
    write_whole(Path(sys.argv[1]) / f"file{n}", lambda temporary: temporary.write_text("whole") and None)
"""


@pytest.mark.parametrize(
    ("point", "there"),
    [
        ("after-temporary-file:1", set()),
        ("after-temporary-file:2", {"file1"}),
        ("after-rename:1", {"file1"}),
        ("after-rename:3", {"file1", "file2", "file3"}),
    ],
)
def test_killed_at_a_crash_point_what_is_there_is_whole(tmp_path: Path, point: str, there: set[str]) -> None:
    process = python(CRASH, tmp_path, GRADELOOM_CRASH=point)
    _, errors = process.communicate()
    assert process.returncode == -signal.SIGKILL, errors
    written = {p.name for p in tmp_path.iterdir() if not p.name.startswith(".")}
    assert written == there
    assert all((tmp_path / name).read_text() == "whole" for name in written)
    # The next process takes away what the killed one left.
    with RunDirectory(tmp_path).locked():
        assert {p.name for p in tmp_path.iterdir()} == there | {"lock"}


def test_crash_points_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert len(set(CRASH_POINTS)) == 5
    monkeypatch.setenv("GRADELOOM_CRASH", "after-rename:1000000")
    write_whole(tmp_path / "file", lambda temporary: temporary.write_text("whole") and None)
    assert (tmp_path / "file").read_text() == "whole"


# --- shards ---------------------------------------------------------------------------------


def test_a_shard_is_read_as_written(tmp_path: Path) -> None:
    shards = stage(tmp_path)
    rows = [
        DecisionRow(id="a", ordinal=0),
        DecisionRow(id="b", ordinal=1, status="rejected", reason="too_long", detail="300 words", grade=2),
    ]
    path = shards.path(3, ["a", "b"])
    assert shards.read(path) is None
    shards.write(path, ["a", "b"], rows)
    assert shards.read(path) == rows
    assert path.name.startswith("000003-")
    assert path.parent == tmp_path / "shards" / "filter-abc"


def test_a_shard_s_name_is_its_input(tmp_path: Path) -> None:
    shards = stage(tmp_path)
    names = {
        shards.path(*where)
        for where in [(0, ["a", "b"]), (1, ["a", "b"]), (0, ["ab"]), (0, ["b", "a"]), (0, ["b"], "a")]
    }
    # ("b" after shard "a") and ("a", "b" after nothing) differ, too.
    assert len(names) == 5
    assert shards.path(0, ["a", "b"]) == stage(tmp_path).path(0, ["a", "b"])


@pytest.mark.parametrize("ids", [["b", "a"], ["a"], ["a", "b", "c"], ["a", "a"]])
def test_every_input_id_stands_in_a_shard_once_and_in_order(tmp_path: Path, ids: list[str]) -> None:
    shards = stage(tmp_path)
    with pytest.raises(AssertionError, match="rows do not match their input"):
        shards.write(shards.path(0, ids), ids, decisions("a", "b"))
    assert not shards.folder.exists()


@pytest.mark.parametrize(
    "row",
    [
        DecisionRow(id="a", ordinal=0, status="kept", reason="too_long"),
        DecisionRow(id="a", ordinal=0, status="rejected"),
        DecisionRow(id="a", ordinal=0, status="unused"),
    ],
)
def test_a_reason_stands_with_what_is_not_kept_only(tmp_path: Path, row: DecisionRow) -> None:
    shards = stage(tmp_path)
    with pytest.raises(AssertionError, match="needs a reason"):
        shards.write(shards.path(0, ["a"]), ["a"], [row])
    assert not shards.folder.exists()


@pytest.mark.parametrize("damage", ["empty", "cut", "noise", "other"])
def test_a_damaged_shard_is_an_input_error(tmp_path: Path, damage: str) -> None:
    shards = stage(tmp_path)
    ids = [f"row {n}" for n in range(100)]
    path = shards.path(0, ids)
    shards.write(path, ids, decisions(*ids))
    whole = path.read_bytes()
    if damage == "other":
        pq.write_table(pa.table({"id": ["a"], "x": [1]}), path)
    else:
        path.write_bytes({"empty": b"", "cut": whole[:-9], "noise": b"\xff" * len(whole)}[damage])
    with pytest.raises(InputError, match=r"damaged shard \(.*\); delete it and start the run again") as error:
        shards.read(path)
    assert str(path) in str(error.value)


def test_a_flipped_bit_is_found_or_harmless(tmp_path: Path) -> None:
    shards = stage(tmp_path)
    ids = [f"row {n}" for n in range(100)]
    path = shards.path(0, ids)
    rows = decisions(*ids)
    shards.write(path, ids, rows)
    whole = path.read_bytes()
    outcomes: Counter[str] = Counter()
    for place in range(0, len(whole), 7):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ (1 << place % 8)]) + whole[place + 1 :])
        try:
            outcomes["same" if shards.read(path) == rows else "other rows"] += 1
        except InputError:
            outcomes["found"] += 1
    assert outcomes["other rows"] == 0
    assert outcomes["found"] > outcomes["same"] > 0


def values(annotation: Any) -> st.SearchStrategy[Any]:
    """Anything a field may hold: 64-bit whole numbers, all finite floats, text Parquet can hold."""
    if annotation is int:
        return st.integers(-(2**63), 2**63 - 1)
    if annotation is float:
        return st.floats(allow_nan=False)
    if annotation is str:
        return st.text()
    if annotation is bool:
        return st.booleans()
    if get_origin(annotation) is list:
        return st.lists(values(get_args(annotation)[0]), max_size=3)
    if isinstance(annotation, type):
        return rows_of(annotation)
    if type(None) in get_args(annotation):
        return st.none() | values(get_args(annotation)[0])
    return st.sampled_from(get_args(annotation))


def rows_of(row_type: Any) -> st.SearchStrategy[Any]:
    fields = {name: values(field.annotation) for name, field in row_type.model_fields.items()}
    return st.builds(row_type, **fields)


@pytest.mark.parametrize("row_type", ROW_TYPES)
@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_rows_go_through_parquet_unchanged(tmp_path: Path, row_type: type[Row], data: st.DataObject) -> None:
    rows = data.draw(st.lists(rows_of(row_type), max_size=3))
    path = tmp_path / "rows.parquet"
    write_rows(path, rows, row_type)
    assert Stage(tmp_path, "any", "abc", row_type).read(path) == rows
    assert pq.read_schema(path).equals(arrow_schema(row_type))


def test_an_arrow_schema_says_what_may_be_missing() -> None:
    schema = arrow_schema(ListRow)
    assert schema.names[:6] == ["id", "ordinal", "status", "reason", "detail", "grade"]
    assert schema.field("ordinal") == pa.field("ordinal", pa.int64(), nullable=False)
    assert schema.field("reason") == pa.field("reason", pa.string(), nullable=True)
    passage = pa.struct(
        [pa.field("grade", pa.int64(), nullable=False), pa.field("text", pa.string(), nullable=False)]
    )
    assert schema.field("passages").type == pa.list_(pa.field("element", passage, nullable=False))
    probabilities = arrow_schema(JudgedRow).field("judgements").type.value_type.field("probabilities").type
    assert probabilities == pa.list_(pa.field("element", pa.float64(), nullable=True))


# --- the lock -------------------------------------------------------------------------------

HOLD = """
import sys, time
from pathlib import Path
from gradeloom.tasks.run import RunDirectory
with RunDirectory(Path(sys.argv[1])).locked():
    print("held", flush=True)
    time.sleep(600)
"""


def test_a_second_process_is_refused_until_the_first_is_dead(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    assert is_locked(run.path) is None
    holder = python(HOLD, run.path)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        assert is_locked(run.path) == holder.pid
        with pytest.raises(InputError) as error, run.locked():
            pass
        assert str(error.value).startswith(
            f"{run.path}: another process (pid {holder.pid}) works on this run"
        )
        assert is_locked(run.path) == holder.pid  # the refused one changed nothing
        holder.kill()
        holder.wait()
        assert is_locked(run.path) is None
        with run.locked():
            assert is_locked(run.path) == os.getpid()
            with pytest.raises(InputError, match=f"pid {os.getpid()}"), RunDirectory(run.path).locked():
                pass
        assert is_locked(run.path) is None
    finally:
        holder.kill()
        holder.communicate()


def test_a_run_directory_under_a_file_is_an_input_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot make the run directory"):
        RunDirectory(tmp_path / "file" / "run").locked().__enter__()


def test_run_json_is_for_people(tmp_path: Path) -> None:
    RunDirectory(tmp_path).describe({"b": 1, "a": "é"})
    assert (tmp_path / "run.json").read_text() == '{\n  "a": "é",\n  "b": 1\n}'


# --- accounting -----------------------------------------------------------------------------


@st.composite
def accounted_rows(draw: st.DrawFn) -> DecisionRow:
    status = draw(st.sampled_from(STATUSES))
    reason = None if status == "kept" else draw(st.sampled_from(["a", "b", "c"]))
    return DecisionRow(id="x", ordinal=0, status=status, reason=reason)


@given(st.lists(st.tuples(st.sampled_from(["one", "two"]), st.lists(accounted_rows(), max_size=6))))
def test_accounts_add_up(additions: list[tuple[str, list[DecisionRow]]]) -> None:
    accounting = Accounting()
    for name, rows in additions:
        accounting.add(name, rows)
    accounts = accounting.stages()
    assert [account.stage for account in accounts] == list(dict.fromkeys(name for name, _ in additions))
    for account in accounts:
        rows = [row for name, several in additions if name == account.stage for row in several]
        assert account.rows == len(rows) == sum(getattr(account, status) for status in STATUSES)
        for status in STATUSES:
            assert getattr(account, status) == sum(row.status == status for row in rows)
        assert account.reasons == Counter(row.reason for row in rows if row.reason is not None)
        assert list(account.reasons) == sorted(account.reasons)


@pytest.mark.parametrize(
    "wrong",
    [
        StageAccount(stage="filter", rows=3, kept=2),
        StageAccount(stage="filter", rows=3, kept=2, rejected=1),
        StageAccount(stage="filter", rows=3, kept=2, rejected=1, reasons={"a": 2}),
    ],
)
def test_an_account_that_does_not_add_up_is_a_defect(wrong: StageAccount) -> None:
    with pytest.raises(AssertionError):
        wrong.assert_adds_up()


# --- digests --------------------------------------------------------------------------------

parts = st.lists(st.text(alphabet="ab", max_size=3), max_size=4)


@given(parts, parts)
def test_digests_are_equal_only_for_equal_parts(a: list[str], b: list[str]) -> None:
    assert (digest(*a) == digest(*b)) == (a == b)


def test_digests_by_hand() -> None:
    # sha256 of nothing, and of the byte 01 after its length in eight bytes.
    assert digest() == "e3b0c44298fc1c14"
    assert digest(b"\x01", length=64) == subprocess.run(
        ["sha256sum"], input=bytes([0, 0, 0, 0, 0, 0, 0, 1, 1]), capture_output=True, check=True
    ).stdout.decode().split()[0]  # fmt: skip
    assert digest("é") == digest("é".encode())
    assert len(digest("a", length=12)) == 12
