"""The retriever flow, plainly and as Prefect's, with a tiny retriever on a tiny collection."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ir_measures
import numpy as np
import pyarrow.parquet as pq
import pytest
from made_stories import cut, kept
from tiny_retriever import make_place, tiny_config

from gradeloom.flows import evaluate as evaluating
from gradeloom.flows.concurrency import Thread, Unwanted
from gradeloom.flows.orchestrate import Orchestration
from gradeloom.flows.progress import Progress
from gradeloom.flows.retriever import RetrieverResult, run_retriever, with_release
from gradeloom.schemas.errors import InputError
from gradeloom.schemas.retriever import RetrieverConfig
from gradeloom.tasks.encoder import encoder_identity, load_encoder


def config(place: Path, **more: Any) -> RetrieverConfig:
    made = tiny_config()
    made["encoder"]["model"] = str(place / "encoder")
    for one in (made["dev"], *made["sets"], *made["data"]):
        one["path"] = str(place / "things")
    return RetrieverConfig.model_validate(made | {"root": str(place / "retrievers")} | more)


def run(config: RetrieverConfig, tasks: Orchestration | None = None) -> RetrieverResult:
    work = run_retriever(config, progress=Progress(quiet=True), tasks=tasks or Orchestration())
    return asyncio.run(work)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_place(tmp_path_factory.mktemp("retriever"))
    rows = [
        {"query_id": f"t{n}", "passage_id": f"t{n}-3", "twin": f"thing {n} at level 3"} for n in range(8, 16)
    ]
    (folder / "twins.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


class Counted(Orchestration):
    """Counts the shards that are done."""

    def __init__(self) -> None:
        self.shards: list[str] = []

    async def shard(self, stage: str, ordinal: int, work: Callable[[], Any]) -> Any:
        self.shards.append(stage)
        return await work()


@pytest.fixture(scope="module")
def trained(place: Path) -> tuple[RetrieverResult, list[str]]:
    tasks = Counted()
    return run(config(place, twins=str(place / "twins.jsonl")), tasks), tasks.shards


# --- what a training leaves ---------------------------------------------------------------------


def test_it_ends_with_a_model_and_what_it_is_worth(place: Path, trained: Any) -> None:
    result, shards = trained
    assert result.folder == place / "retrievers" / "tiny"
    assert result.steps == 4
    assert shards.count("train") == 1
    assert shards.count("evaluate") == 3
    assert result.evaluation.retrievers == ["before", "after", "bm25"]
    assert result.evaluation.baseline == "before"
    assert result.accounting["things"]["queries"] == 8
    model = config(place).encoder.model_copy(update={"model": str(result.model)})
    assert encoder_identity(model) != encoder_identity(config(place).encoder)


@pytest.mark.parametrize("row", ["before", "after"])
def test_the_values_are_those_of_the_models(place: Path, trained: Any, row: str) -> None:
    """Against a search and a measure made here, from the model's own vectors."""
    result, _ = trained
    folder = place / "encoder" if row == "before" else result.model
    encoder = load_encoder(config(place).encoder.model_copy(update={"model": str(folder)}))
    queries = {f"t{n}": f"what is thing {n}?" for n in range(8, 16)}
    corpus = {f"t{n}-{grade}": f"level {grade} about thing {n}" for n in range(16) for grade in range(4)}
    q, p = (np.asarray(encoder.model.encode(list(texts.values()))) for texts in (queries, corpus))
    run = {
        one: dict(zip(corpus, map(float, scores), strict=True))
        for one, scores in zip(queries, q @ p.T, strict=True)
    }
    qrels = {one: {f"{one}-{grade}": grade for grade in range(4)} for one in queries}
    expected = ir_measures.calc_aggregate([ir_measures.nDCG @ 10], qrels, run)[ir_measures.nDCG @ 10]
    found = result.evaluation.mean("things", row, "nDCG@10")
    assert found.queries == 8
    assert found.mean == pytest.approx(expected, abs=1e-6)


def test_everything_lies_where_it_is_said(trained: Any) -> None:
    result, _ = trained
    folder = result.folder / "evaluation"
    assert {file.name for file in folder.iterdir()} >= {
        "results.json",
        "per_query.parquet",
        "plot.png",
        "runs",
    }
    assert {file.name for file in (folder / "runs").iterdir()} == {
        "things.before.trec", "things.after.trec", "things.bm25.trec",
    }  # fmt: skip
    table = pq.read_table(folder / "per_query.parquet")
    assert table.num_rows == 3 * 2 * 8
    assert [name for name, _ in result.plots()] == ["plot", "curve"]
    described = json.loads((result.folder / "run.json").read_bytes())
    assert described["config"]["training"]["max_steps"] == 4
    assert set(described["data"]) == {"things"}


def test_the_curve_is_of_the_dev_set(trained: Any) -> None:
    result, _ = trained
    assert [point["step"] for point in result.curve][-1] == 4
    assert len(result.curve) >= 2


def test_the_source_bias_is_measured_before_and_after(trained: Any) -> None:
    result, _ = trained
    assert set(result.bias) == {"before", "after", "change"}


def test_the_card_names_data_and_results(trained: Any) -> None:
    result, _ = trained
    card = (result.model / "README.md").read_text()
    assert "things" in card
    assert f"{result.evaluation.mean('things', 'after', 'nDCG@10').mean:.3f}" in card


# --- once more ----------------------------------------------------------------------------------


def test_the_same_again_trains_and_searches_nothing(place: Path, trained: Any, monkeypatch: Any) -> None:
    first, _ = trained

    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("searched again")

    monkeypatch.setattr(evaluating.Cells, "_compute", never)
    weights = {file: file.stat().st_mtime_ns for file in first.model.rglob("*.safetensors")}
    assert weights
    again = run(config(place, twins=str(place / "twins.jsonl")))
    assert again.as_json()["evaluation"] == first.as_json()["evaluation"]
    assert (again.steps, again.curve, again.bias) == (first.steps, first.curve, first.bias)
    assert {file: file.stat().st_mtime_ns for file in weights} == weights


def test_another_set_later_is_only_searched(place: Path, trained: Any) -> None:
    first, _ = trained
    made = config(place)
    more = made.sets[0].model_copy(update={"name": "train", "split": "train"})
    tasks = Counted()
    again = run(made.model_copy(update={"sets": (*made.sets, more)}), tasks)
    assert tasks.shards.count("evaluate") == 3
    assert again.evaluation is not None
    assert again.evaluation.sets == ["things", "train"]
    assert again.model == first.model


@pytest.mark.parametrize(
    "change",
    [
        {"training": {"batch_size": 2, "max_steps": 5}},
        {"loss": [{"kind": "infonce"}]},
        {"data": [{"name": "things", "path": "things", "split": "test"}]},
        {"encoder": {"model": "encoder", "query_tokens": 8}},
        {"dev": {"name": "train", "path": "things", "split": "train", "binary_at": 3}},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_folder_holds_one_training(place: Path, trained: Any, change: dict[str, Any]) -> None:
    made = config(place).model_dump() | change
    made["encoder"]["model"] = str(place / "encoder")
    made["data"][0]["path"] = made["dev"]["path"] = str(place / "things")
    with pytest.raises(InputError, match="holds a training with other settings, data, dev set or start"):
        run(RetrieverConfig.model_validate(made))


# --- a release that asks to be trained on --------------------------------------------------------


def releases(*names: str | None) -> RetrieverConfig:
    data = [{"name": f"s{i}"} | ({"release": n} if n else {"path": "x"}) for i, n in enumerate(names)]
    return RetrieverConfig.model_validate({"name": "r", "data": data})


def test_a_new_release_takes_the_place_of_the_old_one() -> None:
    found = with_release(releases("mine@0.1.0", None, "other"), "mine@0.2.0")
    assert [source.release for source in found.data] == ["mine@0.2.0", None, "other"]
    assert found.name == "r-0.2.0"
    found = with_release(releases(None, "other"), "mine@0.2.0")
    assert [source.release for source in found.data] == [None, "mine@0.2.0"]
    assert found.name == "r-mine-0.2.0"


@pytest.mark.parametrize(
    ("names", "release", "said"),
    [
        (("a", "b"), "mine@0.2.0", "expected one source of data that is a release of 'mine'"),
        (("mine", "mine@0.1.0"), "mine@0.2.0", "found 2"),
        ((None,), "mine@0.2.0", "found 0"),
        (("mine",), "mine", "expected NAME@VERSION, got 'mine'"),
        (("mine",), "mine@../x", "expected NAME@VERSION"),
    ],
)
def test_which_release_gives_way_must_be_clear(
    names: tuple[str | None, ...], release: str, said: str
) -> None:
    with pytest.raises(InputError, match=said):
        with_release(releases(*names), release)


# --- work in a thread ---------------------------------------------------------------------------


async def test_cancelled_work_stops_at_its_next_sign_of_life() -> None:
    thread, seen = Thread(), []

    def work() -> None:
        try:
            while True:
                thread.alive()
                time.sleep(0.01)
        except Unwanted:
            seen.append("stopped")
            raise

    task = asyncio.create_task(thread.run(work))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert seen == ["stopped"]


async def test_what_work_raises_comes_out() -> None:
    with pytest.raises(ZeroDivisionError):
        await Thread().run(lambda: 1 / 0)
    assert await Thread().run(lambda: 3) == 3


# --- with Prefect -------------------------------------------------------------------------------

DEPLOYED = """
import asyncio, json, sys
from gradeloom.flows.deployable import retriever
from gradeloom.schemas.retriever import RetrieverConfig
config = RetrieverConfig.model_validate_json(sys.argv[1])
for release in sys.argv[2:]:
    state = asyncio.run(retriever(config, release=release, return_state=True))
    print(json.dumps([state.type.name, state.message, str(state.state_details.flow_run_id)]), flush=True)
"""


def test_a_new_release_is_trained_on_as_a_flow_run(
    place: Path, local_prefect: Any, environment: Callable[..., dict[str, str]]
) -> None:
    cut(place / "releases", [kept(n) for n in range(4)])
    made = config(
        place, name="fromrelease", data=[{"name": "lists", "release": "made"}],
        releases=str(place / "releases"), dev=None,
    )  # fmt: skip
    env = environment(local_prefect.home, PREFECT_API_URL=local_prefect.api_url)
    done = subprocess.run(
        [sys.executable, "-c", DEPLOYED, made.model_dump_json(), "made@0.1.0", "made@0.9.0"],
        env=env, cwd=place, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (kind, message, flow_run), (failed, why, _) = map(json.loads, done.stdout.splitlines())
    model = place / "retrievers" / "fromrelease-0.1.0"
    assert kind == "COMPLETED", message
    assert message.startswith(f"trained: {model}")
    assert failed == "FAILED"
    assert "no version '0.9.0' of made" in why
    name, artifacts = asyncio.run(recorded(local_prefect.api_url, flow_run))
    assert name == "fromrelease on made@0.1.0"
    assert {
        "retriever-results",
        "retriever-plot",
        "retriever-model",
        "retriever-data",
        "retriever-report",
    } <= set(artifacts)
    rows = json.loads(artifacts["retriever-results"].data)
    assert [row["retriever"] for row in rows] == ["before", "after", "bm25"]
    assert artifacts["retriever-plot"].data.startswith("data:image/png;base64,")
    assert (model / "training").resolve().as_uri() in artifacts["retriever-model"].data


async def recorded(url: str, flow_run: str) -> tuple[str, dict[str, Any]]:
    """The name of a flow run, and its artifacts by key."""
    from uuid import UUID

    from prefect.client.orchestration import PrefectClient
    from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId

    async with PrefectClient(api=url) as client:
        run = await client.read_flow_run(UUID(flow_run))
        mine = ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[run.id]))
        found = await client.read_artifacts(artifact_filter=mine)
    return run.name, {str(artifact.key): artifact for artifact in found}


def test_the_deployable_flow_has_the_config_as_its_form(
    environment: Callable[..., dict[str, str]], tmp_path: Path
) -> None:
    code = (
        "import json; from gradeloom.flows.deployable import retriever; "
        "print(json.dumps([retriever.name, retriever.parameters.model_dump()]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(tmp_path), capture_output=True, text=True, timeout=100
    )
    name, schema = json.loads(done.stdout)
    assert name == "retriever"
    assert schema["required"] == ["config"]
    assert set(schema["properties"]) == {"config", "release"}
    assert {"encoder", "data", "loss"} <= set(schema["definitions"]["RetrieverConfig"]["properties"])
