from __future__ import annotations

import asyncio
import sqlite3
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import asked

from gradeloom.schemas.errors import InputError
from gradeloom.tasks.engine import store
from gradeloom.tasks.engine.store import Ledger, RequestCache
from gradeloom.tasks.engine.types import Asked, Completion

LOGPROBS = (("3", -0.1), (" 2", -2.5), ("\n", -9999.0))


@pytest.fixture
def ledger(tmp_path: Path):
    with Ledger(tmp_path / "run" / "ledger.sqlite") as ledger:
        yield ledger


async def test_what_was_recorded_comes_back_as_cached(ledger: Ledger) -> None:
    await ledger.record(asked("a"), Completion("stop", "text", 11, 3, LOGPROBS))
    assert ledger.get(asked("a")) == Completion("stop", "text", 11, 3, LOGPROBS, cached=True)


async def test_every_part_of_the_key_counts(ledger: Ledger) -> None:
    await ledger.record(Asked("generate", "f", "r", "3", 1, "source"), Completion("length", "te"))
    assert ledger.get(Asked("generate", "f", "r", "3", 1, "other source id")) is not None
    for other in (
        Asked("judge", "f", "r", "3", 1),
        Asked("generate", "g", "r", "3", 1),
        Asked("generate", "f", "s", "3", 1),
        Asked("generate", "f", "r", "", 1),
        Asked("generate", "f", "r", "3", 0),
    ):
        assert ledger.get(other) is None


completions = st.builds(
    Completion,
    outcome=st.sampled_from(["stop", "length", "prompt_too_long", "refused"]),
    text=st.text(),
    prompt_tokens=st.integers(0, 2**40),
    completion_tokens=st.integers(0, 2**40),
    logprobs=st.none() | st.lists(st.tuples(st.text(), st.floats(-9999, 0)), max_size=4).map(tuple),
    cached=st.just(True),
)


@settings(max_examples=20, deadline=None)
@given(st.lists(completions, max_size=30))
def test_everything_survives_closing_and_opening(recorded: list[Completion]) -> None:
    async def write(ledger: Ledger) -> None:
        await asyncio.gather(*(ledger.record(asked(str(i)), c) for i, c in enumerate(recorded)))

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ledger.sqlite"
        with Ledger(path) as ledger:
            asyncio.run(write(ledger))
        with Ledger(path) as ledger:
            assert [ledger.get(asked(str(i))) for i in range(len(recorded))] == recorded


async def test_the_first_recording_stands(ledger: Ledger) -> None:
    await ledger.record(asked("a"), Completion("stop", "first"))
    await ledger.record(asked("a"), Completion("stop", "second"))
    found = ledger.get(asked("a"))
    assert found is not None
    assert found.text == "first"


async def test_recording_returns_when_others_can_read_it(ledger: Ledger) -> None:
    await ledger.record(asked("a"), Completion("stop", "text"))
    with sqlite3.connect(ledger.path) as other:
        assert other.execute("SELECT row, text FROM outcomes").fetchall() == [("a", "text")]


async def test_rows_are_committed_in_batches(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    commit = store._Writer._commit

    def counted(self: store._Writer, rows: list[tuple[object, ...]]) -> Exception | None:
        sizes.append(len(rows))
        return commit(self, rows)

    monkeypatch.setattr(store._Writer, "_commit", counted)
    await asyncio.gather(*(ledger.record(asked(str(i)), Completion("stop")) for i in range(1000)))
    assert sum(sizes) == 1000
    assert max(sizes) <= 256
    assert len(sizes) < 100


@pytest.mark.parametrize("outcome", ["not_recorded", "unreachable"])
async def test_what_is_no_outcome_of_a_model_is_not_recorded(ledger: Ledger, outcome: str) -> None:
    with pytest.raises(AssertionError):
        await ledger.record(asked("a"), Completion(outcome))  # type: ignore[arg-type]


async def test_a_cancelled_wait_is_committed_and_hurts_nobody(ledger: Ledger) -> None:
    first = asyncio.create_task(ledger.record(asked("a"), Completion("stop", "a")))
    second = asyncio.create_task(ledger.record(asked("b"), Completion("stop", "b")))
    await asyncio.sleep(0)
    first.cancel()
    await second
    assert ledger.get(asked("a")) is not None
    assert ledger.get(asked("b")) is not None


async def test_a_row_that_cannot_be_written_fails_its_waiter_only(ledger: Ledger) -> None:
    with pytest.raises(UnicodeEncodeError):
        await asyncio.wait_for(ledger.record(asked("a"), Completion("stop", "\ud800")), 10)
    await asyncio.wait_for(ledger.record(asked("b"), Completion("stop", "b")), 10)
    assert ledger.get(asked("b")) is not None


async def test_spent_counts_what_was_sent_for_the_given_stages(ledger: Ledger) -> None:
    def record(stage: str, row: str, prompt: int, completion: int, cached: bool = False):
        who = Asked(stage, f"print of {stage}", row)
        return ledger.record(who, Completion("stop", "", prompt, completion, cached=cached))

    await asyncio.gather(
        record("generate", "a", 100, 10),
        record("generate", "b", 200, 20, cached=True),
        record("judge", "a", 1000, 1),
        record("other", "a", 5000, 5),
    )
    assert ledger.spent(["print of generate"]) == 110
    assert ledger.spent(["print of generate", "print of judge"]) == 1111
    assert ledger.spent([]) == 0


# --- request cache ----------------------------------------------------------------------------


async def test_the_cache_is_shared_by_runs(tmp_path: Path) -> None:
    with RequestCache(tmp_path) as one, RequestCache(tmp_path) as other:
        assert other.get("d1") is None
        await one.put("d1", Completion("stop", "text", 11, 3, LOGPROBS))
        assert other.get("d1") == Completion("stop", "text", 11, 3, LOGPROBS, cached=True)
        await other.put("d2", Completion("stop", "two"))
    assert (tmp_path / "requests.sqlite").exists()


async def test_the_cache_holds_nothing_that_was_cut_off(tmp_path: Path) -> None:
    with RequestCache(tmp_path) as cache, pytest.raises(AssertionError):
        await cache.put("d1", Completion("length", "te"))


async def test_stats_and_prune_by_age(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    day = 86400.0
    now = 100 * day
    monkeypatch.setattr(store.time, "time", lambda: now)
    with RequestCache(tmp_path) as cache:
        assert (cache.stats().entries, cache.stats().oldest) == (0, None)
        for age in (10, 5, 1):
            now = (100 - age) * day
            await cache.put(f"{age} days", Completion("stop", "x" * 100_000))
        now = 100 * day
        before = cache.stats()
        assert (before.entries, before.oldest, before.newest) == (3, 90 * day, 99 * day)
        assert cache.prune(older_than_days=7) == 1
        assert cache.get("10 days") is None
        assert cache.get("5 days") is not None
        after = cache.stats()
        assert (after.entries, after.oldest) == (2, 95 * day)
        assert after.bytes < before.bytes
        await cache.put("new", Completion("stop"))
        assert cache.stats().entries == 3


# --- what can go wrong ------------------------------------------------------------------------


def test_a_file_that_is_no_database_is_named(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    path.write_bytes(b"something else entirely " * 100)
    with pytest.raises(InputError, match=r"ledger.sqlite.*not a database"):
        Ledger(path)


def test_another_format_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA user_version = 7")
    with pytest.raises(InputError, match=r"ledger.sqlite: was written in format 7"):
        Ledger(path)


def test_an_unwritable_place_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="file/run: cannot make the folder"):
        Ledger(tmp_path / "file" / "run" / "ledger.sqlite")


FILL = """
    import asyncio, subprocess, sys
    from pathlib import Path
    from gradeloom.schemas.errors import InputError
    from gradeloom.tasks.engine.store import Ledger
    from gradeloom.tasks.engine.types import Asked, Completion

    folder = Path(sys.argv[1])
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], check=True)

    async def fill(ledger):
        await ledger.record(Asked("s", "f", "before"), Completion("stop", "small"))
        big = [ledger.record(Asked("s", "f", str(i)), Completion("stop", "x" * 50_000)) for i in range(60)]
        return await asyncio.wait_for(asyncio.gather(*big, return_exceptions=True), 60)

    with Ledger(folder / "ledger.sqlite") as ledger:
        results = asyncio.run(fill(ledger))
        errors = [r for r in results if r is not None]
        assert len(results) == 60 and errors, results
        assert all(isinstance(e, InputError) for e in errors), errors
        assert ledger.get(Asked("s", "f", "before")).text == "small"
    with Ledger(folder / "ledger.sqlite") as ledger:
        assert ledger.get(Asked("s", "f", "before")).text == "small"
        kept = [ledger.get(Asked("s", "f", str(i))) for i in range(60)]
        assert [k is not None for k in kept] == [r is None for r in results]
    print(errors[0])
"""


def test_a_full_disk_reaches_every_waiter_and_loses_nothing(tmp_path: Path) -> None:
    script = tmp_path / "fill.py"
    script.write_text(textwrap.dedent(FILL))
    folder = tmp_path / "small"
    folder.mkdir()
    command = ["unshare", "-m", sys.executable, str(script), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("ledger.sqlite: cannot be used: database or disk is full")
