"""`gradeloom judge calibrate`: by a file of labels, and by asking a judge that may be killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image
from sklearn.metrics import cohen_kappa_score
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from gradeloom.flows import cli
from gradeloom.flows.configure import read_config
from gradeloom.schemas.calibration import Calibration, JudgeRunConfig
from gradeloom.schemas.config import VllmEngine
from gradeloom.tasks.evaluate.isotonic import read_isotonic

QUERIES, PASSAGES = 6, 5


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Six queries with five graded passages each, whose texts tell the stand-in judge their grade."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GRADELOOM_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    queries, corpus, qrels, labels = [], [], [], []
    for q in range(QUERIES):
        queries.append({"_id": f"q{q}", "text": f"who was king {q}"})
        for p in range(PASSAGES):
            grade = (q + p) % 4
            corpus.append({"_id": f"d{q}{p}", "text": f"King {q} of part {p} reigned. Ref tier-{grade}."})
            qrels.append(f"q{q} 0 d{q}{p} {grade}\n")
            labels.append(f"q{q} 0 d{q}{p} {max(0, grade - (p == 0))}\n")
    for name, rows in (("queries", queries), ("corpus", corpus)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "qrels.txt").write_text("".join(qrels))
    (tmp_path / "gpt-x.1.txt").write_text("".join(labels))
    write_judge(tmp_path)
    return tmp_path


def write_judge(place: Path, engine: dict[str, Any] | None = None, **settings: Any) -> None:
    fault = {"kind": "fault", "seed": 1, "log": str(place / "requests.jsonl"), "window": 4}
    judge = {"engine": engine or fault}
    config = {"name": "stand-in", "judge": judge, "cache": {"root": "cache"}, "shard_pairs": 7, **settings}
    (place / "judge.yaml").write_text(yaml.safe_dump(config))


ASKING = ("--queries", "queries.jsonl", "--corpus", "corpus.jsonl", "--config", "judge.yaml")


def calibrate(*arguments: str, code: int = 0) -> None:
    assert cli.run(["judge", "calibrate", "--qrels", "qrels.txt", *arguments]) == code


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    calibrate(*arguments, "--json", "--quiet")
    (line,) = capsys.readouterr().out.splitlines()
    found: dict[str, Any] = json.loads(line)
    return found


def requests(place: Path) -> Counter[str]:
    log = (place / "requests.jsonl").read_bytes().splitlines()
    return Counter(json.loads(line)["digest"] for line in log)


# --- a file of labels -----------------------------------------------------------------------


def test_a_label_file_as_a_page(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "runs").mkdir()
    for name, sign in (("good", 1), ("bad", -1)):
        lines = [
            f"q{q} Q0 d{q}{p} 1 {sign * ((q + p) % 4)} {name}\n" for q in range(6) for p in range(5)
        ]  # fmt: skip
        (place / "runs" / f"{name}.trec").write_text("".join(lines))
    calibrate("--labels", "gpt-x.1.txt", "--domain", "kings", "--run", "runs", "--out", "deep/out.json",
              "--plot", "out.png")  # fmt: skip
    page = capsys.readouterr().out
    assert "judge: gpt-x.1\n" in page
    assert "domain: kings" in page
    assert "30 graded by people, 30 of them by the judge (6 queries); 0 abstentions" in page
    assert "Kendall's tau: 1.000 (6 queries)" in page
    text = (place / "deep" / "out.json").read_text()
    assert str(place) not in text
    stored = Calibration.model_validate_json(text)
    grades = [(q + p) % 4 for q in range(6) for p in range(5)]
    judged = [max(0, (q + p) % 4 - (p == 0)) for q in range(6) for p in range(5)]
    kappa = cohen_kappa_score(grades, judged)
    assert stored.agreement.kappa.value == pytest.approx(kappa, abs=1e-6)
    assert f"kappa, all grades  {kappa:.3f}" in page
    assert stored.ranking is not None
    assert [s.run.name for s in stored.ranking.systems] == ["bad.trec", "good.trec"]
    with Image.open(place / "out.png") as picture:
        assert picture.width > 400


def test_the_same_files_give_the_same_bytes(place: Path) -> None:
    for name in ("one.json", "two.json"):
        calibrate("--labels", "gpt-x.1.txt", "--out", name)
    assert (place / "one.json").read_bytes() == (place / "two.json").read_bytes()


def test_a_limit_takes_the_first_queries(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = said(capsys, "--labels", "gpt-x.1.txt", "--limit", "2")
    assert (found["pairs"]["human"], found["pairs"]["missing_human"]) == (10, 0)
    assert found["human"]["limit"] == 2


def test_a_mapping_is_fitted_on_one_set_and_used_on_another(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = np.random.default_rng(0)
    for prefix in "ab":
        rows = [(f"{prefix}{i % 9}", i, int(rng.integers(0, 4))) for i in range(200)]
        (place / f"{prefix}.txt").write_text("".join(f"{q} 0 {i} {g}\n" for q, i, g in rows))
        values = [f"{q} 0 {i} {0.4 * g + 0.2 * rng.random():.3f}\n" for q, i, g in rows]
        (place / f"{prefix}-labels.txt").write_text("".join(values))
    base = ["judge", "calibrate", "--qrels"]
    fit = ["a.txt", "--labels", "a-labels.txt", "--fit-isotonic", "mapping.json", "--domain", "as"]
    assert cli.run([*base, *fit]) == 0
    assert "--isotonic mapping.json" in capsys.readouterr().out
    assert read_isotonic(place / "mapping.json").domain == "as"
    use = ["b.txt", "--labels", "b-labels.txt", "--isotonic", "mapping.json", "--plot", "b.png", "--out"]
    assert cli.run([*base, *use, "b.json"]) == 0
    assert "mapped (isotonic)" in capsys.readouterr().out
    stored = Calibration.model_validate_json((place / "b.json").read_bytes())
    assert stored.isotonic is not None
    assert stored.isotonic.agreement.kappa.value == 1.0  # the values of different grades do not overlap
    assert (stored.agreement.kappa.value or 0) < 0.5
    assert cli.run([*base, *fit[:3], "--isotonic", "mapping.json", "--out", "again.json"]) == 2
    assert "fitted on these very judgements" in capsys.readouterr().err
    assert not (place / "again.json").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give --labels, or a judge to ask"),
        (["--labels", "gpt-x.1.txt", "--config", "judge.yaml"], "not both"),
        (["--labels", "gpt-x.1.txt", "--set", "seed=1"], "not both"),
        (["--queries", "queries.jsonl", "--config", "judge.yaml"], "--corpus is missing"),
        ([*ASKING, "--judge", "me"], "--judge"),
        (["--labels", "none.txt"], "none.txt: there is no such file"),
        (["--labels", "bad.txt"], "bad.txt, row 2, field 'score': a number was expected as grade"),
        (["--labels", "other.txt"], "no pair of query and passage in common"),
        (["--labels", "gpt-x.1.txt", "--binary-at", "7"], "expected a grade from 1 to 3, got 7"),
        (["--labels", "gpt-x.1.txt", "--run", "bad.txt"], "bad.txt, row 1: expected `query Q0"),
        (["--labels", "gpt-x.1.txt", "--run", "empty"], "no run files"),
        (["--labels", "gpt-x.1.txt", "--run", "a.trec", "--run", "empty/../a.trec"], "two runs are called"),
        (["--labels", "gpt-x.1.txt", "--out", "qrels.txt"], "qrels.txt: is named twice"),
        (["--labels", "gpt-x.1.txt", "--out", "x", "--plot", "x"], "x: is named twice"),
        (["--labels", "gpt-x.1.txt", "--isotonic", "none.json"], "none.json: cannot be read"),
        (["--labels", "gpt-x.1.txt", "--fit-isotonic", "m.json"], "there are none"),
        ([*ASKING, "--set", "judge.pairwise=true"], "judge.pairwise"),
        ([*ASKING, "--set", "judge.engine=null"], "needs an engine of its own"),
        ([*ASKING, "--set", "judge.nonsense=1"], "unknown setting"),
        (["--queries", "other.jsonl", *ASKING[2:]], "no judged pair has its query and passage"),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str], message: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (place / "bad.txt").write_text("q0 0 d00 1\nq0 0 d01 high\n")
    (place / "other.txt").write_text("z 0 z 1\n")
    (place / "other.jsonl").write_text('{"_id": "z", "text": "who"}\n')
    (place / "a.trec").write_text("q0 Q0 d00 1 1.0 a\n")
    (place / "empty").mkdir()
    before = (place / "qrels.txt").read_bytes()
    calibrate(*arguments, "--quiet", code=2)
    streams = capsys.readouterr()
    (line,) = streams.err.splitlines()
    assert message in line
    assert streams.out == ""
    assert (place / "qrels.txt").read_bytes() == before


def test_bundled_samples_are_named_as_in_a_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sample = "samples:household/{}/test.tsv"
    arguments = [
        "--qrels",
        sample.format("qrels"),
        "--labels",
        sample.format("labels"),
        "--judge",
        "imagined",
    ]
    assert cli.run(["judge", "calibrate", *arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["judge"]["name"] == "imagined"
    assert (found["pairs"]["human"], found["pairs"]["abstained"]) == (24, 1)


def test_the_packaged_judge_is_the_bundled_model() -> None:
    config = read_config(JudgeRunConfig, "judge-demo")
    assert isinstance(config.judge.engine, VllmEngine)
    assert config.judge.engine.model == "bundled"


# --- a judge that is asked ------------------------------------------------------------------


def test_asking_a_judge_and_paying_once(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    calibrate(*ASKING, "--out", "out.json", "--fit-isotonic", "mapping.json", "--plot", "out.png")
    streams = capsys.readouterr()
    assert "requests: 30 sent, 0 answered before" in streams.out
    assert "judge: 30/30 pairs" in streams.err
    assert set(requests(place).values()) == {1}
    stored = Calibration.model_validate_json((place / "out.json").read_bytes())
    assert stored.judge.kind == "model"
    assert stored.judge.model.kind == "fault"
    assert stored.judge.settings["min_mass"] == 0.5
    assert stored.pairs.both + stored.pairs.abstained == stored.pairs.human == 30
    assert stored.agreement.expected is not None
    assert (stored.agreement.kappa.value or 0) > 0.7
    again = said(capsys, *ASKING)
    assert (again["usage"]["requests_sent"], again["usage"]["requests_cached"]) == (0, 30)
    assert again["agreement"] == stored.agreement.model_dump(mode="json")
    assert cli.run(["runs", "list"]) == 0
    assert "stand-in" in capsys.readouterr().out


def test_a_limit_asks_about_the_first_queries_only(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = said(capsys, *ASKING, "--limit", "2")
    assert (found["pairs"]["human"], found["usage"]["requests_sent"]) == (10, 10)
    found = said(capsys, *ASKING)
    assert (found["pairs"]["human"], found["usage"]["requests_sent"]) == (30, 20)


def test_a_mapping_is_of_one_judge_and_refused_before_it_is_asked(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = (place / "qrels.txt").read_text().splitlines(keepends=True)
    (place / "others.txt").write_text("".join(lines[:15]))
    (place / "qrels.txt").write_text("".join(lines[15:]))
    fit = [
        "judge",
        "calibrate",
        "--qrels",
        "others.txt",
        *ASKING,
        "--fit-isotonic",
        "mapping.json",
        "--quiet",
    ]
    assert cli.run(fit) == 0
    capsys.readouterr()
    found = said(capsys, *ASKING, "--isotonic", "mapping.json")
    assert found["isotonic"]["agreement"]["expected"]["pairs"] == found["pairs"]["both"]
    calibrate(*ASKING, "--isotonic", "mapping.json", "--set", "judge.min_mass=0.4", "--quiet", code=2)
    assert "fitted for another judge or other settings: 'stand-in'" in capsys.readouterr().err
    before = requests(place)
    (place / "qrels.txt").write_text(lines[0] + "".join(lines[15:]))
    write_judge(place, {"kind": "fault", "seed": 9, "log": str(place / "requests.jsonl")})
    calibrate(*ASKING, "--isotonic", "mapping.json", "--quiet", code=2)
    assert "fitted on 1 of these pairs (in others.txt)" in capsys.readouterr().err
    assert requests(place) == before


@pytest.mark.parametrize(
    "crash", ["after-response:11", pytest.param("before-commit:6", marks=pytest.mark.long)]
)
def test_a_killed_calibration_goes_on_and_pays_nothing_twice(
    crash: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["judge", "calibrate", "--qrels", "qrels.txt", *ASKING, "--quiet", "--out", "out.json"]
    killed = subprocess.run(
        [sys.executable, "-m", "gradeloom.flows.cli", *arguments, "--set", "cache.enabled=false"],
        env={**os.environ, "GRADELOOM_CRASH": crash}, capture_output=True, timeout=120,
    )  # fmt: skip
    assert killed.returncode == -signal.SIGKILL
    assert not (place / "out.json").exists()
    before = requests(place)
    assert 4 < sum(before.values()) < 30
    found = said(capsys, *ASKING, "--set", "cache.enabled=false")
    after = requests(place)
    assert len(after) == 30
    assert sum(n - 1 for n in after.values()) <= 4  # no more than the window was in flight
    assert found["usage"]["requests_cached"] == 30 - found["usage"]["requests_sent"] > 0
    write_judge(place, name="whole", cache={"enabled": False})
    whole = said(capsys, *ASKING)
    assert found["agreement"] == whole["agreement"]
    assert found["judge"]["fingerprint"] == whole["judge"]["fingerprint"]


def test_two_at_once_are_one_too_many(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from gradeloom.tasks.run import RunDirectory

    with RunDirectory(place / "runs" / "stand-in").locked():
        calibrate(*ASKING, code=2)
    assert "another process" in capsys.readouterr().err


def test_a_judge_that_cannot_be_reached_stops_with_3(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine = {"kind": "openai", "model": "m", "endpoints": ["http://127.0.0.1:9/v1"], "transport_retries": 0}
    write_judge(place, engine)
    calibrate(*ASKING, "--quiet", "--out", "out.json", code=3)
    assert "run the same command again" in capsys.readouterr().err
    assert not (place / "out.json").exists()


def recorded(place: Path, rows: list[dict[str, Any]]) -> None:
    (place / "recorded.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_judge(place, {"kind": "replay", "path": "recorded.jsonl", "adapter": "judgements"})


def test_what_has_no_grade_is_counted_and_never_a_0(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of four recorded passages one is judged, one abstained from; one is not recorded, one has no text."""
    (place / "qrels.txt").write_text("q0 0 d00 3\nq0 0 d01 2\nq0 0 d02 1\nq0 0 gone 0\n")
    recorded(place, [
        {"query_id": "q0", "level": 3, "grade": 3, "p": [0, 0, 0.1, 0.9]},
        {"query_id": "q0", "level": 2, "grade": 0, "p": [0.3, 0.1, 0, 0]},
    ])  # fmt: skip
    found = said(capsys, *ASKING)
    assert found["pairs"] == {
        "queries": 1, "human": 4, "both": 1, "abstained": 1,
        "unanswered": {"no_text": 1, "not_recorded": 1}, "missing_judge": 0, "missing_human": 0,
    }  # fmt: skip
    assert found["agreement"]["matrix"] == [[0] * 4, [0] * 4, [0] * 4, [0, 0, 0, 1]]
    assert found["agreement"]["abstained"] == [0, 0, 1, 0]
    assert found["agreement"]["kappa"]["value"] is None
    calibrate(*ASKING)
    page = " ".join(capsys.readouterr().out.split())
    assert "1 abstentions; without an answer: 1 no_text, 1 not_recorded" in page


def test_a_recording_that_cannot_tell_two_passages_apart_is_refused(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded(place, [{"query_id": "q0", "level": 3, "grade": 3, "p": [0, 0, 0, 1]}])
    calibrate(*ASKING, "--quiet", code=2)
    assert "people gave 2 passages of query 'q0' the grade 0" in capsys.readouterr().err


def test_an_over_long_prompt_is_counted_and_the_rest_goes_on(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One passage of two thousand words among thirty, and a model with room for a thousand."""
    long = {"_id": "d00", "text": "king " * 2000}
    corpus = (place / "corpus.jsonl").read_text().splitlines()
    (place / "corpus.jsonl").write_text("\n".join([json.dumps(long), *corpus[1:]]) + "\n")
    engine = {"kind": "fault", "max_model_len": 1000, "tokenizer": str(write_tokenizer(place / "words"))}
    write_judge(place, engine)
    found = said(capsys, *ASKING)
    assert found["pairs"]["unanswered"] == {"judge_prompt_too_long": 1}
    assert found["pairs"]["both"] + found["pairs"]["abstained"] == 29


def write_tokenizer(folder: Path) -> Path:
    """A tokenizer whose tokens are the words between white space."""
    words = Tokenizer(WordLevel({word: n for n, word in enumerate(["[UNK]", *"0123"])}, unk_token="[UNK]"))
    words.pre_tokenizer = WhitespaceSplit()
    folder.mkdir()
    words.save(str(folder / "tokenizer.json"))
    template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return folder


# --- a recorded judge of recorded lists ---------------------------------------------------------


@pytest.mark.realdata
def test_a_recorded_judge_against_the_grades_that_were_asked_for(
    realdata: Path, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The 300 recorded lists, their intended grades in the place of people's."""
    lists = [json.loads(line) for line in (realdata / "recorded" / "graded_lists.jsonl").open()]
    rows = [json.loads(line) for line in (realdata / "recorded" / "judgements.jsonl").open()]
    write = {
        "queries.jsonl": [{"_id": r["query_id"], "text": r["query"]} for r in lists],
        "corpus.jsonl": [
            {"_id": f"{r['query_id']}-{g}", "text": t} for r in lists for g, t in r["passages"].items()
        ],
    }
    for name, of in write.items():
        (place / name).write_text("".join(json.dumps(row) + "\n" for row in of))
    (place / "qrels.txt").write_text(
        "".join(f"{r['query_id']} 0 {r['query_id']}-{g} {g}\n" for r in lists for g in r["passages"])
    )
    path = str(realdata / "recorded" / "judgements.jsonl")
    write_judge(place, {"kind": "replay", "path": path, "adapter": "judgements"}, shard_pairs=500)
    found = said(capsys, *ASKING)
    assert found["pairs"]["both"] == len(rows) == 1200
    intended = np.array([row["level"] for row in rows])
    p = np.array([row["p"] for row in rows])
    judged, expected = p.argmax(axis=1), p @ np.arange(4) / p.sum(axis=1)
    shown = found["agreement"]
    assert shown["kappa"]["value"] == pytest.approx(cohen_kappa_score(intended, judged), abs=1e-6)
    quadratic = cohen_kappa_score(intended, judged, weights="quadratic")
    assert shown["quadratic_kappa"]["value"] == pytest.approx(quadratic, abs=1e-6)
    assert shown["expected"]["pearson"] == pytest.approx(np.corrcoef(intended, expected)[0, 1], abs=1e-6)
    assert shown["expected"]["rmse"] == pytest.approx(((expected - intended) ** 2).mean() ** 0.5, abs=1e-6)
