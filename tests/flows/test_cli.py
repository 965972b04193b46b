"""The command: what it prints where, its exit codes, and how it ends when it is stopped."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from gradeloom.flows import cli, show
from gradeloom.schemas.errors import EngineUnavailable, RunIncomplete

HOSTILE = "\x1b[31m[bold]marked[/bold]\x07"
WORDS = "of old there lived a king who had no daughter and one son".split()  # noqa: SIM905


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Four recorded lists and judgements; the judge contradicts the third, the fourth has a short text."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GRADELOOM_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    lists, judgements = [], []
    for n in range(4):
        texts = {str(grade): " ".join(f"{word}{n}{grade}" for word in WORDS) for grade in range(4)}
        if n == 0:
            texts["3"] += f" {HOSTILE}"
        if n == 3:
            texts["1"] = "too short"
        lists.append({"query_id": f"q{n}", "query": f"who was king {n}?", "passages": texts})
        for level in range(4):
            judged = 3 - level if n == 2 else level
            p = [0.85 if grade == judged else 0.05 for grade in range(4)]
            judgements.append({"query_id": f"q{n}", "level": level, "grade": judged, "p": p})
    for name, rows in (("lists", lists), ("judgements", judgements)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {
        "source": {"path": "lists.jsonl"},
        "engine": {"kind": "replay", "path": "lists.jsonl", "adapter": "graded_lists"},
        "judge": {"engine": {"kind": "replay", "path": "judgements.jsonl", "adapter": "judgements"}},
        "label": {"policy": "agreed"},
        "generation": {"attempts": 1},
        "run": {"shard_rows": 2},
        "release": {"name": "kings"},
    }
    (tmp_path / "kings.yaml").write_text(yaml.safe_dump(config))
    return tmp_path


def run(*arguments: str) -> int:
    return cli.run(list(arguments))


# --- start-up ---------------------------------------------------------------------------------


def test_help_imports_nothing_heavy(gradeloom: Any, tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from gradeloom.flows import cli\n"
        "for arguments in ([], ['graded'], ['graded', 'run'], ['release', 'export'], ['doctor']):\n"
        "    assert cli.run([*arguments, '--help']) == 0\n"
        "heavy = {'torch', 'pydantic', 'prefect', 'datasets', 'pyarrow', 'rich', 'yaml', 'asyncio'}\n"
        "print('loaded:', sorted(heavy & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "loaded: []", done.stderr


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--version") == 0
    assert capsys.readouterr().out.startswith("gradeloom, version ")


# --- graded run -------------------------------------------------------------------------------


def test_a_run_ends_with_everything_a_person_wants_to_know(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("graded", "run", "--config", "kings.yaml") == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert lines[:2] == ["release: releases/kings/0.1.0", "accept rate: 50.0%"]
    table = {line.split()[0]: line.split()[1:] for line in lines if line.startswith(("filter", "label"))}
    assert table["filter"] == ["4", "3", "1", "0", "0", "1", "too_short"]
    assert table["label"][:5] == ["3", "2", "1", "0", "0"]
    assert "query: who was king 0?" in lines
    grades = [line for line in lines if line.startswith("  grade ")]
    assert grades == [f"  grade {g} (judge says {g}, mass 1.00)" for g in (3, 2, 1, 0)]
    assert lines[-4:] == [
        "next:",
        "  gradeloom release show kings@0.1.0",
        "  gradeloom release verify kings@0.1.0",
        "  gradeloom release export kings@0.1.0 --format beir --to kings-beir",
    ]
    assert any(
        line.startswith("this run in the Prefect UI: not recorded; start `gradeloom ui`") for line in lines
    )
    assert "\x1b" not in out
    assert "\x07" not in out
    assert "[bold]marked[/bold]" in out
    assert "generate: 4/4 rows" in err


def test_the_same_again_is_already_released(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("graded", "run", "--config", "kings.yaml", "--quiet") == 0
    assert capsys.readouterr().err == ""
    assert run("graded", "run", "--config", "kings.yaml") == 0
    assert capsys.readouterr().out.splitlines()[0] == "already released: releases/kings/0.1.0"
    assert run("graded", "run", "--config", "kings.yaml", "--limit", "2") == 2
    assert "release versions never change" in capsys.readouterr().err


def test_json_is_one_object_and_nothing_else(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("graded", "run", "--config", "kings.yaml", "--json") == 0
    out = capsys.readouterr().out
    result = json.loads(out)
    assert out.count("\n") == 1
    assert (result["release"], result["exit_code"], result["accept_rate"]) == ("releases/kings/0.1.0", 0, 0.5)
    assert result["accounting"][0] == {
        "stage": "source", "rows": 4, "kept": 4, "rejected": 0, "failed": 0, "unused": 0, "reasons": {},
    }  # fmt: skip
    assert result["sample"]["passages"][0]["text"].endswith(HOSTILE)  # data is kept as it is


def test_a_run_without_a_release_exits_3_with_the_reason(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nothing = ["--set", "filters.1.min_words=90"]
    assert run("graded", "run", "--config", "kings.yaml", *nothing) == 3
    out, err = capsys.readouterr()
    assert err.splitlines()[-1].startswith("gradeloom: no release: nothing was kept: ")
    assert "; for example query q0: too_short (" in err.splitlines()[-1]
    assert "no release was cut" in out
    assert run("graded", "run", "--config", "kings.yaml", "--json", *nothing) == 3
    result = json.loads(capsys.readouterr().out)
    assert (result["release"], result["exit_code"]) == (None, 3)


def test_a_preview_shows_prompts_completions_and_verdicts(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("graded", "preview", "--config", "kings.yaml", "--limit", "4") == 0
    out = capsys.readouterr().out
    assert "=== q3: who was king 3?" in out
    assert "--- rejected at filter: too_short" in out
    assert "grade 3 (judge says 3" in out
    assert "all 4 queries at this pace" in out
    assert "\x1b" not in out
    assert not (place / "runs").exists()
    assert run("graded", "preview", "--config", "kings.yaml", "--json") == 0
    assert len(json.loads(capsys.readouterr().out)["rows"]) == 3


# --- releases, runs, cache ----------------------------------------------------------------------


@pytest.fixture
def released(place: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    assert run("graded", "run", "--config", "kings.yaml", "--quiet") == 0
    capsys.readouterr()
    return place


def test_releases_are_listed_shown_verified_and_exported(
    released: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("release", "list") == 0
    assert "kings@0.1.0  graded" in capsys.readouterr().out
    assert run("release", "show", "kings") == 0
    assert "accept rate: 50.0%" in capsys.readouterr().out
    assert run("release", "verify", "kings@0.1.0") == 0
    assert capsys.readouterr().out.splitlines()[-1] == "verified: releases/kings/0.1.0"
    assert run("release", "export", "kings", "--format", "beir", "--to", "out") == 0
    assert capsys.readouterr().out == "exported (beir): out\n"
    assert len((released / "out/corpus.jsonl").read_text().splitlines()) == 8


@pytest.mark.parametrize(
    ("arguments", "keys"),
    [
        (("release", "list"), {"releases"}),
        (("release", "show", "kings"), {"name", "accounting", "digest", "rows"}),
        (("release", "verify", "kings"), {"path", "verified", "checked"}),
        (("release", "export", "kings", "--format", "beir", "--to", "out"), {"path", "format", "to"}),
        (("runs", "list"), {"runs"}),
        (("runs", "prune", "kings", "--yes"), {"pruned", "bytes"}),
        (("cache", "stats"), {"path", "entries", "bytes"}),
        (("cache", "prune", "--older-than", "1"), {"path", "removed"}),
    ],
)
def test_every_result_has_a_json_form(
    released: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], keys: set[str]
) -> None:
    assert run(*arguments, "--json") == 0
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    assert keys <= set(json.loads(out))


def test_a_damaged_release_exits_2_with_one_line(released: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (released / "releases/kings/0.1.0/README.md").write_text("forged")
    assert run("release", "verify", "kings") == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("gradeloom: error: releases/kings/0.1.0/README.md")
    assert err.count("\n") == 1


def test_runs_are_listed_and_pruned_only_when_told(
    released: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run("runs", "list") == 0
    assert "kings  idle" in capsys.readouterr().out
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    assert run("runs", "prune", "kings") == 2
    assert capsys.readouterr().err == "gradeloom: error: nobody is there to ask; say --yes\n"
    assert run("runs", "prune", "kings", "--yes") == 0
    assert capsys.readouterr().out.startswith("pruned: kings\n")
    assert not (released / "runs/kings").exists()
    assert (released / "releases/kings/0.1.0").is_dir()


def test_no_cache_is_said_and_none_is_made(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("cache", "stats") == 2
    assert "no request cache here" in capsys.readouterr().err
    assert not (place / "home").exists()


# --- errors and exit codes ------------------------------------------------------------------------


def test_wrong_usage_exits_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("graded", "run") == 2
    assert "Missing option '--config'" in capsys.readouterr().err
    assert run("grade") == 2


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (RunIncomplete("too many failed"), 3, "gradeloom: error: too many failed\n"),
        (EngineUnavailable("gone \x1b[2J"), 3, "gradeloom: error: gone \\x1b[2J\n"),
        (KeyboardInterrupt(), 130, "\ngradeloom: interrupted; run the same command again to go on\n"),
    ],
)
def test_an_error_is_one_line_and_its_exit_code(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int,
    line: str,
) -> None:  # fmt: skip
    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr("gradeloom.tasks.release.catalog.list_releases", fail)
    assert run("release", "list") == code
    assert capsys.readouterr() == ("", line)


def test_a_defect_is_a_traceback_and_asks_to_be_reported(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gradeloom.tasks.release.catalog.list_releases", lambda root: 1 / 0)
    assert run("release", "list") == 1
    err = capsys.readouterr().err
    assert (
        "ZeroDivisionError: division by zero\ngradeloom: this is a defect of gradeloom, please report" in err
    )


def test_a_closed_pipe_is_no_defect(place: Path, gradeloom: Any) -> None:
    command = f"{sys.executable} -m gradeloom.flows.cli release list | true"
    done = subprocess.run(["bash", "-c", command], cwd=place, capture_output=True, text=True, timeout=60)
    assert "Traceback" not in done.stderr
    assert "BrokenPipe" not in done.stderr


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_run_exits_130_and_goes_on_later(
    place: Path, environment: Callable[..., dict[str, str]], capsys: pytest.CaptureFixture[str],
    sign: signal.Signals,
) -> None:  # fmt: skip
    slow = "engine={kind: fault, latency: 60, log: requests.jsonl}"
    command = [sys.executable, "-m", "gradeloom.flows.cli", "graded", "run", "--config", "kings.yaml"]
    with subprocess.Popen(
        [*command, "--set", slow, "--set", "judge=null", "--set", "label.policy=intended"],
        env=environment(place / "home"), cwd=place, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        log = place / "requests.jsonl"
        while process.poll() is None and not (log.exists() and log.stat().st_size):
            time.sleep(0.05)
        process.send_signal(sign)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert out == ""
    assert err.splitlines()[-1] == "gradeloom: interrupted; run the same command again to go on"
    assert "Traceback" not in err
    assert run("runs", "list") == 0
    assert "idle" in capsys.readouterr().out


# --- what is shown ------------------------------------------------------------------------------


def test_sizes() -> None:
    assert [show.size(n) for n in (0, 999, 1000, 1_234_567, 5e12)] == [
        "0 B", "999 B", "1.0 kB", "1.2 MB", "5.0 TB",
    ]  # fmt: skip


def test_json_is_ascii() -> None:
    assert show.as_json({"text": "é\x1b", "path": Path("a")}) == '{"text": "\\u00e9\\u001b", "path": "a"}'


@pytest.mark.parametrize(
    "command", [("release", "list"), ("runs", "list"), ("cache", "stats")], ids=lambda command: command[0]
)
def test_a_place_that_cannot_be_is_no_defect(
    command: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(*command, "--root", "a" * 5000) == 2
    said = capsys.readouterr().err
    assert said.endswith("a: File name too long\n")
    assert said.count("\n") == 1


def test_a_folder_that_is_no_release_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("release", "verify", str(tmp_path)) == 2
    assert "no release here: manifest.json is missing" in capsys.readouterr().err


def test_times_and_grades_are_shown_to_people(released: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("release", "show", "kings") == 0
    shown = capsys.readouterr().out
    assert "judged 3" in shown
    assert "{" not in shown.split("quality:")[1].split("observed:")[0]
    show.facts({"oldest": 1796073759.25, "entries": 1200})
    said = capsys.readouterr().out
    assert "oldest: 2026-1" in said
    assert "entries: 1,200" in said
