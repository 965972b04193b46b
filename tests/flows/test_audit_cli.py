"""`gradeloom release audit`: the worked example of docs/audit.md, what is printed where, and wrong input."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from made_stories import cut, kept
from stand_in_raters import fill

from gradeloom.flows import cli
from gradeloom.tasks.release.audit import read_audits

DOCS = Path(__file__).parent.parent.parent / "docs" / "audit.md"


def run(*arguments: str) -> int:
    return cli.run(["release", "audit", *arguments])


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `releases` in it, of twenty lists."""
    place = tmp_path_factory.mktemp("audit-cli")
    cut(place / "releases", [kept(n) for n in range(20)])
    return place


@pytest.fixture
def place(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(made / "releases", tmp_path / "releases")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "from gradeloom.flows import cli\n"
        "for arguments in ([], ['sample'], ['import']):\n"
        "    assert cli.run(['release', 'audit', *arguments, '--help']) == 0\n"
        "heavy = {'torch', 'pydantic', 'prefect', 'datasets', 'pyarrow', 'rich', 'yaml', 'numpy', 'scipy'}\n"
        "print('loaded:', sorted(heavy & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "loaded: []", done.stderr


def test_from_sample_to_audit(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("sample", "made", "--n", "40", "--to", "sheets") == 0
    out = capsys.readouterr().out
    assert "made@0.1.0, 40 passages, raters: 2" in out
    assert out.splitlines()[-1].strip() == "gradeloom release audit import sheets"
    fill(place / "sheets")
    assert run("import", "sheets") == 0
    out = capsys.readouterr().out
    (audit,) = read_audits("releases", "made", "0.1.0")
    assert f"audit: releases/made/.audits/0.1.0-{audit.sample}.json" in out
    assert "rater 2: 40 of 40 passages labelled" in out
    assert [figure.grade for figure in audit.figures.grade_precision] == [3, 2, 1, 0, None]
    stored = (place / "releases" / "made" / ".audits" / f"0.1.0-{audit.sample}.json").read_bytes()
    assert run("import", "sheets", "--json") == 0
    said = json.loads(capsys.readouterr().out)
    assert said["figures"] == audit.figures.model_dump()
    assert "labels" not in said  # they stand in the file
    assert Path(said["path"]).read_bytes() == stored
    assert cli.run(["release", "verify", "made"]) == 0  # the release is as it was


def test_sample_as_json(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("sample", "made@0.1.0", "--n", "8", "--raters", "1", "--to", "sheets", "--json") == 0
    said = json.loads(capsys.readouterr().out)
    assert said["sheets"] == ["sheets/rater-1.csv", "sheets/rater-1.html"]
    assert sum(group["sampled"] for group in said["groups"]) == 8
    assert "items" not in said


def test_one_sheet_alone_is_an_audit_of_one_rater(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("sample", "made", "--n", "40", "--to", "sheets") == 0
    fill(place / "sheets")
    (place / "sheets" / "rater-2.csv").rename(place / "of somebody.csv")
    assert run("import", "sheets") == 2
    assert "rater-2.csv: the sheet of a rater is missing" in capsys.readouterr().err
    assert run("import", "sheets", "of somebody.csv") == 0
    (audit,) = read_audits("releases", "made", "0.1.0")
    assert audit.figures.labelled == [40]
    assert audit.figures.raters == []


def test_wrong_input_is_one_line_and_leaves_nothing(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("sample", "made", "--n", "40", "--to", "sheets") == 0
    capsys.readouterr()
    for arguments, words in (
        (("sample", "made", "--to", "sheets"), "the release holds 80 passages, 200 were asked for"),
        (("sample", "made", "--n", "40", "--to", "sheets"), "sheets: exists already"),
        (("sample", "other", "--to", "elsewhere"), "no release 'other'"),
        (("import", "sheets"), "sheets: no row has a grade; expected 0, 1, 2 or 3"),
        (("import", "nowhere"), "nowhere/key.json: cannot be read"),
        (("import", "sheets", "--root", "elsewhere"), "elsewhere/made/0.1.0: the release made@0.1.0"),
    ):
        assert run(*arguments) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert words in err
        assert len(err.splitlines()) == 1
    assert not (place / "elsewhere").exists()
    assert not (place / "releases" / "made" / ".audits").exists()


def test_too_few_labels_are_said(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("sample", "made", "--n", "8", "--raters", "1", "--to", "sheets") == 0
    key = json.loads((place / "sheets" / "key.json").read_text())
    (place / "sheets" / "rater-1.csv").write_text(f"item;grade\n{key['items'][0]['item']};2\n")
    assert run("import", "sheets") == 0
    out = capsys.readouterr().out
    assert "rater 1: 1 of 8 passages labelled" in out
    assert "unknown: a group that was sampled has labels of fewer than two queries" in out
    assert "unknown to unknown" in out


@pytest.mark.realdata
def test_the_worked_example_prints_what_the_docs_say(
    realdata: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    recorded = realdata / "recorded"
    sources = [f"source.path={recorded}/graded_lists.jsonl", f"engine.path={recorded}/graded_lists.jsonl",
               f"judge.engine.path={recorded}/judgements.jsonl"]  # fmt: skip
    sets = [part for source in sources for part in ("--set", source)]
    assert cli.run(["graded", "run", "--config", "graded-recorded", "--quiet", *sets]) == 0
    capsys.readouterr()
    printed = re.findall(r"^```text\n(.*?)^```", DOCS.read_text(), flags=re.MULTILINE | re.DOTALL)
    said = []
    assert run("sample", "graded-recorded", "--n", "160", "--to", "my-audit") == 0
    said.append(capsys.readouterr().out)
    fill(Path("my-audit"))
    assert run("import", "my-audit") == 0
    said.append(capsys.readouterr().out)
    assert [tidy(text) for text in said] == [tidy(text) for text in printed]


def tidy(text: str) -> list[str]:
    """Lines without the blanks at their ends; digests depend on what the code's versions are."""
    text = re.sub(r"\b[0-9a-f]{64}\b|(?<=0\.1\.0-)[0-9a-f]{12}\b", "DIGEST", text)
    return [line.rstrip() for line in text.strip().splitlines()]
