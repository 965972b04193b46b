"""`gradeloom retriever`: what it prints where, its exit codes, and how wrong input is said."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml
from made_stories import cut, kept
from tiny_retriever import make_place, tiny_config

from gradeloom.flows import cli
from gradeloom.flows.configure import read_config
from gradeloom.schemas.retriever import EvaluateConfig, MineConfig, RetrieverConfig
from gradeloom.tasks.run import is_locked


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_place(tmp_path_factory.mktemp("retriever-cli"))


@pytest.fixture
def place(made: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder of these tests: `encoder`, `things`, `tiny.yaml`."""
    monkeypatch.chdir(made)
    monkeypatch.setenv("GRADELOOM_HOME", str(made / "home"))
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    return made


def run(*arguments: str) -> int:
    return cli.run(["retriever", *arguments])


def write(place: Path, name: str, config: dict[str, Any]) -> str:
    (place / name).write_text(yaml.safe_dump(config))
    return name


# --- start-up -----------------------------------------------------------------------------------


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "from gradeloom.flows import cli\n"
        "for arguments in ([], ['train'], ['evaluate'], ['mine'], ['probe']):\n"
        "    assert cli.run(['retriever', *arguments, '--help']) == 0\n"
        "heavy = {'torch', 'transformers', 'pydantic', 'prefect', 'datasets', 'pyarrow', 'numpy', 'yaml'}\n"
        "print('loaded:', sorted(heavy & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "loaded: []", done.stderr


# --- train --------------------------------------------------------------------------------------


def test_a_training_ends_with_everything_a_person_wants_to_know(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("train", "--config", "tiny.yaml") == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert lines[0].startswith("model: retrievers/tiny/training")
    assert lines[1] == "steps: 4"
    rows = [line.split() for line in lines if line.startswith("things  ")]
    assert [row[1] for row in rows if row[1] in ("before", "after", "bm25")][:3] == [
        "before",
        "after",
        "bm25",
    ]
    assert "results: retrievers/tiny/evaluation" in lines
    assert "plot: retrievers/tiny/evaluation/plot.png" in lines
    assert lines[-2] == "next:"
    assert lines[-1].startswith(
        "  gradeloom retriever evaluate --config retriever-evaluate --retriever trained="
    )
    assert "train: 4/4 steps" in err
    assert "searching: before on things (64 passages)" in err


def test_json_is_one_object_and_nothing_else(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("train", "--config", "tiny.yaml", "--quiet", "--json") == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert (out.count("\n"), err) == (1, "")
    assert (found["folder"], found["steps"]) == ("retrievers/tiny", 4)
    assert {mean["retriever"] for mean in found["evaluation"]["means"]} == {"before", "after", "bm25"}


def test_a_stopped_training_exits_130_and_goes_on_later(
    place: Path, environment: Callable[..., dict[str, str]]
) -> None:
    command = [sys.executable, "-m", "gradeloom.flows.cli", "retriever", "train", "--config", "tiny.yaml"]
    long = ["name=stopped", "training.max_steps=100000", "training.save_steps=5", "dev=null"]
    sets = [part for change in long for part in ("--set", change)]
    checkpoints = place / "retrievers" / "stopped" / "training" / "checkpoints"
    with subprocess.Popen(
        [*command, *sets], env=environment(place / "home"), cwd=place, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        while process.poll() is None and not list(checkpoints.glob("checkpoint-*")):
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert out == ""
    assert err.splitlines()[-1] == "gradeloom: interrupted; run the same command again to go on"
    assert "Traceback" not in err
    assert list(checkpoints.glob("checkpoint-*"))
    assert is_locked(place / "retrievers" / "stopped") is None


@pytest.mark.long
def test_several_processes_train_by_the_same_command(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    arguments = ("train", "--config", "tiny.yaml", "--set", "name=several", "--processes", "2", "--json")
    assert run(*arguments) == 0
    out, err = capfd.readouterr()
    found = json.loads(out)
    assert found["steps"] == 4
    assert "train: 4/4 steps" in err
    assert err.count("train: 0/4 steps") == 1  # one of them speaks
    assert "Warning" not in err
    assert run(*arguments[:-3], "--json") == 0  # one process reads what two have trained
    assert json.loads(capfd.readouterr().out)["evaluation"] == found["evaluation"]


@pytest.mark.parametrize(
    ("sets", "said"),
    [
        (["encoder.model=nowhere"], "'nowhere'"),
        (["encoder.model=things"], "holds no model"),
        (["data.0.path=nowhere"], "field 'data.0.path': no such file or folder: 'nowhere'"),
        (["twins=nowhere.jsonl"], "field 'twins': no such file or folder: 'nowhere.jsonl'"),
        (["data.0.releese=x"], "field 'data.0.releese': unknown setting, did you mean `data.0.release`?"),
        (["learning_rate=1"], "unknown setting, did you mean `training.learning_rate`?"),
        (["loss=[{kind: wasserstein}]"], "field 'loss.0.kind'"),
        (["sets.0.qrels=empty.txt"], "empty.txt"),
        (["sets.0.qrels=others.txt"], "no query of this set has a judgement"),
        (["measures.measures=[NDCG]"], "unknown measure 'NDCG'"),
        (["measures.baseline=bm52"], "there is no row 'bm52'; expected one of: before, after, bm25"),
        (["data=[{name: x, release: none}]"], "no release 'none' under releases"),
        (["twins_set=nowhere", "twins=twins.jsonl"], "nowhere"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_wrong_input_is_one_line(
    place: Path, capsys: pytest.CaptureFixture[str], sets: list[str], said: str
) -> None:
    (place / "empty.txt").write_text("")
    (place / "others.txt").write_text("x1 0 t1-3 3\n")
    (place / "twins.jsonl").write_text(
        '{"query_id": "t9", "passage_id": "t9-3", "twin": "thing 9, level 3"}\n'
    )
    changes = [part for change in ["name=wrong", *sets] for part in ("--set", change)]
    assert run("train", "--config", "tiny.yaml", "--quiet", *changes) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("gradeloom: error: ")
    assert err.count("\n") == 1
    assert said in err


def test_no_such_configuration_lists_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("train", "--config", "retriever-dmeo") == 2
    assert "retriever-demo, retriever-evaluate, retriever-mine, retriever-recorded" in capsys.readouterr().err


# --- evaluate -----------------------------------------------------------------------------------


def evaluation(place: Path, **more: Any) -> str:
    config = {"sets": tiny_config()["sets"], "measures": tiny_config()["measures"]}
    return write(place, "evaluate.yaml", config | more)


def test_several_retrievers_are_compared(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = evaluation(place, name="several")
    assert run("evaluate", "--config", file, "--retriever", "one=encoder", "--retriever", "two=encoder",
               "--set", "measures.baseline=bm25") == 0  # fmt: skip
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert lines[-2:] == ["results: evaluations/several", "runs: evaluations/several/runs"]
    assert {file.name for file in (place / "evaluations/several/runs").iterdir()} == {
        "things.one.trec", "things.two.trec", "things.bm25.trec",
    }  # fmt: skip
    assert "searching: one on things" in err
    assert run("evaluate", "--config", file, "--retriever", "one=encoder", "--json") == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert "searching" not in err  # both rows were there
    assert found["baseline"] == "one"
    means = {mean["retriever"]: mean["mean"] for mean in found["means"] if mean["measure"] == "nDCG@10"}
    assert set(means) == {"one", "bm25"}


def test_sets_can_be_given_without_a_file(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        run("evaluate", "--set", "sets=[{name: things, path: things}]", "--set", "name=bare", "--json") == 0
    )
    assert [mean["retriever"] for mean in json.loads(capsys.readouterr().out)["means"]][:1] == ["bm25"]
    assert run("evaluate") == 2
    assert capsys.readouterr().err == "gradeloom: error: --set, field 'sets': is missing and has no default\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--retriever", "encoder"], "--retriever'?: expected NAME=MODEL, got 'encoder'"),
        (["--retriever", "bm25=encoder"], "there is a retriever 'bm25' already"),
        (["--retriever", "A b=encoder"], "'A b'"),
        (["--retriever", "one=nowhere"], "'nowhere'"),
        (["--set", "measures.bm25=false"], "nothing to evaluate"),
    ],
)
def test_wrong_retrievers_are_one_line(
    place: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    import re

    assert run("evaluate", "--config", evaluation(place), "--quiet", *arguments) == 2
    err = capsys.readouterr().err
    assert re.search(said, err)
    assert err.count("\n") == 1


# --- mine ---------------------------------------------------------------------------------------


def mining(place: Path, **more: Any) -> str:
    config = {
        "collection": {"path": "things", "split": "train"},
        "depth": 20,
        "count": 2,
        "exclude": "judged",
    }
    return write(place, "mine.yaml", config | more)


def test_negatives_are_judgements_that_can_be_trained_on(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("mine", "--config", mining(place, out="negatives.parquet"), "--json", "--quiet") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["out"] == "negatives.parquet"
    table = pq.read_table(place / "negatives.parquet")
    assert table.column_names == ["query-id", "corpus-id", "score"]
    rows = table.to_pylist()
    assert len(rows) == found["accounting"]["negatives"] == 16
    assert {row["score"] for row in rows} == {0.0}
    assert all(not row["corpus-id"].startswith(f"{row['query-id']}-") for row in rows)
    # Beside the collection, in the place of its judgements.
    source = {"name": "negatives", "path": "things", "qrels": "negatives.parquet"}
    config = tiny_config() | {"name": "mined", "sets": [], "dev": None}
    config["data"] = [*config["data"], source]
    config["training"]["max_steps"] = 1
    assert run("train", "--config", write(place, "mined.yaml", config), "--json", "--quiet") == 0
    data = json.loads(capsys.readouterr().out)["data"]
    assert data["negatives"]["judgements"] == 16


def test_a_model_mines_too(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    by = {"kind": "encoder", "model": "encoder", "query_tokens": 16, "passage_tokens": 16}
    assert run("mine", "--config", mining(place, by=by, out="dense.parquet", count=3)) == 0
    out, _ = capsys.readouterr()
    assert "judgements: dense.parquet" in out.splitlines()
    assert pq.read_table(place / "dense.parquet").num_rows == 24


def test_a_margin_knows_positives_wherever_they_rank(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    deep = mining(place, depth=3, max_score=0.5, positive_grade=3, out="margin.parquet")
    run("mine", "--config", deep, "--json", "--quiet")
    counts = json.loads(capsys.readouterr().out)["accounting"]
    assert counts["candidates"] >= 8 * 3
    assert "no positive in the run" not in counts
    # BM25 sees four passages of one query alike but for their level, so nothing lies below half of one.
    assert counts["margin"] > 0


def test_a_judge_reads_every_pick_first(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    judge = {"engine": {"kind": "fault", "seed": 1}, "min_mass": 0.0}
    assert run("mine", "--config", mining(place, judge=judge, out="judged.parquet"), "--json", "--quiet") == 0
    counts = json.loads(capsys.readouterr().out)["accounting"]
    left_out = sum(n for name, n in counts.items() if name.startswith("left out: "))
    assert counts["chosen"] == 16
    assert 0 < left_out < 16
    assert counts["negatives"] == 16 - left_out == pq.read_table(place / "judged.parquet").num_rows
    assert not (place / ".judged.parquet.run").exists()


def test_nothing_left_is_exit_3_and_no_file(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("mine", "--config", mining(place, skip=19, depth=1, out="none.parquet"), "--quiet") == 3
    assert "no file was written" in capsys.readouterr().out
    assert not (place / "none.parquet").exists()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"judge": {}}, "field 'judge.engine': a judge of mined passages needs an engine"),
        ({"out": "negatives.tsv"}, "field 'out': expected a file name that ends in .parquet"),
        ({"collection": {"path": "things", "split": "nope"}}, "nope"),
        ({"by": {"kind": "dense"}}, "unknown kind 'dense'"),
    ],
)
def test_wrong_mining_is_one_line(
    place: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any], said: str
) -> None:
    assert run("mine", "--config", mining(place, **change), "--quiet") == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1


# --- probe --------------------------------------------------------------------------------------


def test_a_probe_answers_in_a_sentence(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cut(place / "releases", [kept(n) for n in range(8)])
    config = tiny_config() | {"data": [{"name": "made", "release": "made"}], "dev": None}
    config["training"] |= {"max_steps": 1}
    file = write(place, "probe.yaml", config)
    assert run("probe", "--config", file, "--release", "made", "--quiet") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[1:5]] == [
        ["(start)", "0"], ["made@0.1.0", "2"], ["made@0.1.0", "4"], ["made@0.1.0", "8"],
    ]  # fmt: skip
    text = " ".join(lines)
    assert "8 queries of made@0.1.0 against 4 queries of made@0.1.0" in text
    assert "Each number is one training" in text
    assert lines[-1] == "results: retrievers/tiny-probe/made@0.1.0"
    assert run("probe", "--config", file, "--release", "nothing") == 2
    assert capsys.readouterr().err.startswith("gradeloom: error: no release 'nothing'")


# --- what comes with gradeloom --------------------------------------------------------------------


def test_the_demo_trains_on_the_bundled_model_and_tests_on_other_queries(place: Path) -> None:
    config = read_config(RetrieverConfig, "retriever-demo")
    assert config.encoder.model == "bundled"
    folder = Path(str(config.data[0].path))
    splits = [
        {line.split("\t")[0] for line in (folder / "qrels" / f"{split}.tsv").read_text().splitlines()[1:]}
        for split in ("train", "test")
    ]
    assert [len(split) for split in splits] == [12, 6]
    assert not splits[0] & splits[1]


@pytest.mark.realdata
def test_the_configurations_with_real_data_are_whole(
    realdata: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "checkout").mkdir()
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "data").symlink_to(realdata)
    monkeypatch.chdir(tmp_path / "checkout")
    sets = read_config(EvaluateConfig, "retriever-evaluate").sets
    assert [one.name for one in sets] == [
        "dl19", "dl20", "chorus", "medquad", "cranfield", "csfcube", "scifact",
    ]  # fmt: skip
    assert read_config(RetrieverConfig, "retriever-recorded").twins_set == "dl19"


def test_the_mining_example_is_whole(place: Path) -> None:
    assert read_config(MineConfig, "retriever-mine").count == 2


@pytest.mark.parametrize("name", ["../elsewhere", "a/b", "A", ""])
def test_a_name_is_a_folder_name(place: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    assert run("train", "--config", "tiny.yaml", "--quiet", "--set", f"name='{name}'") == 2
    assert "gradeloom: error: --set, field 'name': " in capsys.readouterr().err
