"""Rows traced back: what was asked is compared with what a fault server logged, byte for byte."""

from __future__ import annotations

import asyncio
import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import orjson
import pytest
import yaml
from runs_for_tests import NAME, Place, asked, fault_place, replay_place

from gradeloom.flows import cli
from gradeloom.flows.graded import run_graded
from gradeloom.flows.lineage import Lineage, lineage
from gradeloom.flows.orchestrate import Orchestration
from gradeloom.flows.preview import Exchange
from gradeloom.flows.progress import Progress
from gradeloom.schemas.config import FaultEngine
from gradeloom.schemas.errors import InputError
from gradeloom.schemas.manifest import Content
from gradeloom.tasks.engine.http import HttpBackend
from gradeloom.tasks.engine.types import Request
from gradeloom.tasks.generate.graded import answer_schema
from gradeloom.tasks.release.tables import read_rows

GRADES = (3, 2, 1, 0)


async def run_here(place: Place, *sets: str) -> Place:
    with Progress(quiet=True) as progress:
        result = await run_graded(place.config(*sets), progress=progress, tasks=Orchestration())
    assert result.stopped is None
    return place


@pytest.fixture(scope="module")
def replayed(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """Five recorded lists; the judge takes all of the third for irrelevant. Only to be read."""
    place = replay_place(tmp_path_factory.mktemp("replayed") / "place", 5, label={"policy": "judged"})
    return asyncio.run(run_here(place))


@pytest.fixture
def copied(replayed: Place, tmp_path: Path) -> Place:
    """A copy of it, whose release names the copy of its run."""
    place = replayed.copy(tmp_path / "place")
    edit(place, lambda manifest: manifest["observed"].update(run=str(place.run)))
    return place


def edit(place: Place, change: Any) -> None:
    """Change a manifest and bring its digest in line."""
    path = place.release / "manifest.json"
    manifest = orjson.loads(path.read_bytes())
    change(manifest)
    manifest["digest"] = Content.model_validate(manifest["content"]).digest()
    path.write_bytes(orjson.dumps(manifest))


def released(place: Place, table: str) -> dict[str, dict[str, Any]]:
    return {row["query_id"]: row for _, row in read_rows(place.release, table)}


def user_message(exchange: Exchange) -> str:
    return exchange.messages[-1]["content"]


# --- a row, whole -----------------------------------------------------------------------------


async def test_a_list_is_traced_to_its_source_row(replayed: Place) -> None:
    found = await lineage(replayed.release, "q3")
    assert (found.release, found.table, found.passage, found.missing) == (f"{NAME}@0.1.0", "lists", None, [])
    assert found.row == released(replayed, "lists")["q3"]
    assert [(d.stage, d.status) for d in found.decisions] == [
        (stage, "kept") for stage in ("source", "generate", "filter", "near_duplicates", "judge", "label")
    ]
    assert found.decisions[-1].said == {"labels": [3.0, 2.0, 1.0, 0.0]}
    assert found.source is not None
    assert (found.source["ordinal"], found.source["query"]) == (3, "who was king 3?")

    (written,) = found.generation
    assert written.outcome == "stop"
    assert json.loads(written.text) == dict(
        zip((f"level_{grade}" for grade in GRADES), found.row["passages"], strict=True)
    )
    assert "who was king 3?" in user_message(written)
    assert written.sampling is not None
    assert written.sampling.temperature == 0.9

    assert [(e.part, e.attempt) for e in found.judging] == [(str(grade), 0) for grade in GRADES]
    for exchange, passage in zip(found.judging, found.row["passages"], strict=True):
        assert passage in user_message(exchange)
        assert exchange.text == exchange.part
        assert exchange.logprobs is not None
        assert exchange.logprobs[0][0] == exchange.part


async def test_of_a_passage_only_its_own_requests_are_shown(replayed: Place) -> None:
    row = released(replayed, "lists")["q1"]
    found = await lineage(replayed.release, row["passage_ids"][2])
    assert found.passage == 1
    assert found.row["query_id"] == "q1"
    (judged,) = found.judging
    assert row["passages"][2] in user_message(judged)
    assert len(found.generation) == 1


async def test_a_reject_has_a_lineage_to_where_it_was_dropped(replayed: Place) -> None:
    reject = released(replayed, "rejects")["q2"]
    found = await lineage(replayed.release, "q2")
    assert found.table == "rejects"
    last = found.decisions[-1]
    assert (last.stage, last.status, last.reason, last.detail) == tuple(
        reject[name] for name in ("stage", "status", "reason", "detail")
    )
    assert last.stage == "label"
    assert len(found.judging) == 4
    assert (await lineage(replayed.release, reject["passage_ids"][0])).passage == 3


async def test_what_is_no_row_is_said(replayed: Place) -> None:
    with pytest.raises(InputError, match="'q9' is neither a query nor a passage of its lists and rejects"):
        await lineage(replayed.release, "q9")


# --- as sent ----------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["together", "per_level"])
async def test_requests_are_shown_as_the_server_got_them(mode: str, tmp_path: Path) -> None:
    """The log of the server holds a keyed digest of every body; a body made of what is shown has it.

    Attempts that did not parse, and rows that failed in all of them, are among them.
    """
    place = fault_place(
        tmp_path / "place", 8, engine={"truncate": 0.2, "bad_json": 0.2}, generation={"mode": mode},
        judge={"pairwise": True}, run={"max_failed": 1.0},
    )  # fmt: skip
    await run_here(place)
    logged = {one.digest for one in asked(place) if one.answered}
    shown: set[str] = set()
    attempts = 0
    for row in [*released(place, "lists"), *released(place, "rejects")]:
        found = await lineage(place.release, row)
        assert found.missing == []
        for exchange in [*found.generation, *found.judging]:
            assert exchange.outcome in ("stop", "length")
            shown.add(logged_as(place, exchange, found))
            attempts = max(attempts, exchange.attempt)
    assert shown == logged
    assert attempts > 0


def logged_as(place: Place, exchange: Exchange, found: Lineage) -> str:
    """The digest under which a fault server logs this request."""
    engine = place.config().engine
    assert isinstance(engine, FaultEngine)
    assert exchange.sampling is not None
    schema = None
    if exchange.stage == "generate":
        order = next(d.said["level_order"] for d in found.decisions if d.stage == "generate")
        schema = answer_schema(["passage"] if exchange.part else [f"level_{grade}" for grade in order])
    backend = HttpBackend(["unix:/nowhere"], model="fault", identity="", request_timeout=1)
    body = orjson.dumps(backend._body(Request(exchange.messages, exchange.sampling, schema)))
    key = engine.seed.to_bytes(8, "big", signed=True)
    return hashlib.blake2b(body, digest_size=16, key=key).hexdigest()


async def test_a_later_release_of_the_run_does_not_hide_the_earlier_one(copied: Place) -> None:
    """`run.json` now describes the later one; the fingerprints stand in each manifest."""
    await run_here(copied, "judge.min_mass=0.9", "label.policy=intended", "release.version=0.2.0")
    later = copied.releases / NAME / "0.2.0"
    before, after = await lineage(copied.release, "q2"), await lineage(later, "q2")
    assert (before.table, after.table) == ("rejects", "lists")
    (old, new) = ({d.stage: (d.fingerprint, d.status) for d in found.decisions} for found in (before, after))
    assert [stage for stage in old if old[stage][0] != new[stage][0]] == ["judge", "label"]
    assert (old["label"][1], new["label"][1]) == ("rejected", "kept")
    assert before.generation == after.generation
    assert (before.missing, after.missing) == ([], [])


# --- what is missing ----------------------------------------------------------------------------


async def test_without_its_run_a_release_tells_what_it_knows(copied: Place) -> None:
    shutil.rmtree(copied.run)
    found = await lineage(copied.release, "q3")
    assert found.row["judged"] == [3, 2, 1, 0]
    assert (found.run, found.decisions, found.judging, found.generation, found.source) == (
        None, [], [], [], None,
    )  # fmt: skip
    (missing,) = found.missing
    assert missing.startswith(f"the run: there is nothing at {copied.run}; it was pruned, or lies elsewhere")


async def test_a_run_elsewhere_is_found_by_its_root(copied: Place, tmp_path: Path) -> None:
    (tmp_path / "moved").mkdir()
    copied.run.rename(tmp_path / "moved" / NAME)
    found = await lineage(copied.release, "q3", runs=str(tmp_path / "moved"))
    assert found.missing == []
    assert found.run == str(tmp_path / "moved" / NAME)


async def test_pruned_shards_and_a_lost_ledger_are_said(copied: Place) -> None:
    (copied.run / "ledger.sqlite").unlink()
    found = await lineage(copied.release, "q3")
    assert found.missing == [
        "completions of stage generate: the run's ledger is not there",
        "completions of stage judge: the run's ledger is not there",
    ]
    assert "who was king 3?" in user_message(found.generation[0])
    shutil.rmtree(copied.run / "shards")
    (missing,) = (await lineage(copied.release, "q3")).missing
    assert missing.startswith("the run: the row is in no shard of this release in ")


async def test_a_release_that_does_not_name_its_shards_is_said(copied: Place) -> None:
    edit(copied, lambda manifest: manifest["observed"].pop("stages"))
    (missing,) = (await lineage(copied.release, "q3")).missing
    assert (
        missing == "the run: the release does not say which shards are its own; an earlier gradeloom cut it"
    )


async def test_fingerprints_are_no_paths(copied: Place) -> None:
    edit(copied, lambda manifest: manifest["observed"]["stages"].update(source="x/../../../.."))
    (missing,) = (await lineage(copied.release, "q3")).missing
    assert missing.startswith("the run: the release does not say")


async def test_a_prompt_that_has_changed_since_is_not_shown_as_sent(tmp_path: Path) -> None:
    """What came back is; and the judge's prompt, which has not changed, is shown."""
    prompt = tmp_path / "mine.yaml"
    mine = {"name": "mine", "version": 1, "user": "Write for: {{ query }}"}
    prompt.write_text(yaml.safe_dump(mine))
    place = await run_here(replay_place(tmp_path / "place", 3), f"generation.prompt={prompt}")
    (sent,) = (await lineage(place.release, "q0")).generation
    assert user_message(sent) == "Write for: who was king 0?"

    prompt.write_text(yaml.safe_dump(mine | {"user": "Do write for: {{ query }}"}))
    found = await lineage(place.release, "q0")
    (unknown,) = found.generation
    assert (unknown.messages, unknown.sampling, unknown.text) == ((), None, sent.text)
    assert found.missing[0].startswith("messages of stage generate: the prompt 'mine' has changed since (")
    assert all(exchange.messages for exchange in found.judging)

    prompt.unlink()
    found = await lineage(place.release, "q0")
    assert "mine.yaml: cannot read the prompt" in found.missing[0]


async def test_examples_that_have_changed_since_are_said(tmp_path: Path) -> None:
    examples = tmp_path / "examples.jsonl"
    row = {"query": "who was queen?", "passages": {str(grade): f"Queen {grade} was." for grade in GRADES}}
    examples.write_text(json.dumps(row))
    place = await run_here(replay_place(tmp_path / "place", 3), f"generation.examples={examples}")
    (sent,) = (await lineage(place.release, "q0")).generation
    assert "Queen 2 was." in "".join(message["content"] for message in sent.messages)

    examples.write_text(json.dumps(row | {"query": "who was queen then?"}))
    found = await lineage(place.release, "q0")
    assert found.missing == [
        "messages of stage generate: the examples have changed since; they cannot be shown as sent"
    ]
    assert found.generation[0].text == sent.text


async def test_a_step_that_has_changed_since_is_said(copied: Place) -> None:
    edit(copied, lambda manifest: manifest["content"]["steps"].update(judge="0"))
    found = await lineage(copied.release, "q0")
    assert found.missing == [
        "messages of stage judge: the step has changed since; they cannot be shown as sent"
    ]
    assert [(e.part, e.messages) for e in found.judging] == [(str(grade), ()) for grade in range(4)]


# --- wrong input --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: m["content"].update(kind="pairs"), "of kind 'pairs'; lineage is told of graded releases"),
        (lambda m: m["content"]["config"].pop("run"), r"content\.config': is not the configuration of a"),
        (
            lambda m: m["content"]["config"].update(generation=3),
            r"content\.config': is not the configuration",
        ),
    ],
)
async def test_a_manifest_of_something_else_is_named(copied: Place, change: Any, words: str) -> None:
    edit(copied, change)
    with pytest.raises(InputError, match=words):
        await lineage(copied.release, "q0")


async def test_a_ledger_that_is_none_is_named(copied: Place) -> None:
    for file in copied.run.glob("ledger.sqlite*"):
        file.unlink()
    (copied.run / "ledger.sqlite").write_text("nothing of the sort " * 100)
    with pytest.raises(InputError, match=r"ledger\.sqlite: cannot be used: file is not a database"):
        await lineage(copied.release, "q0")


# --- the commands ---------------------------------------------------------------------------------


def test_lineage_as_people_and_programs_read_it(replayed: Place, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["release", "lineage", NAME, "q2", "--root", str(replayed.releases)]
    assert cli.run(arguments) == 0
    out = capsys.readouterr().out
    parts = ["=== rejects: q2: who was king 2?", "=== decisions",
             "=== asked of the judge", "Query: who was king 2?", "completion (stop", "first token: '0' 0.85",
             "=== asked of the generator", "sampling: temperature 0.9, top-p 0.95, seed ", "=== source row",
             "row 3 of the source"]  # fmt: skip
    places = [out.index(part) for part in parts]
    assert places == sorted(places)
    assert out.count("label: rejected, ") == 2  # of the row, and among the decisions
    assert "=== not shown" not in out

    assert cli.run([*arguments, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["table"] == "rejects"
    assert [message["role"] for message in said["generation"][0]["messages"]] == ["system", "user"]
    assert said["generation"][0]["sampling"]["max_tokens"] == 1024
    assert cli.run([*arguments[:3], "q9", *arguments[4:]]) == 2
    assert capsys.readouterr().err.count("\n") == 1


async def test_text_of_models_is_shown_and_not_obeyed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = replay_place(tmp_path / "place", 3)
    path = place.root / "lists.jsonl"
    path.write_bytes(path.read_bytes().replace(b"king03 ", b"king03\\u001b[31m[bold]x[/bold]\\u0007 "))
    await run_here(place)
    from gradeloom.flows import show_lineage

    show_lineage.lineage(await lineage(place.release, "q0"))
    out = capsys.readouterr().out
    assert r"king03\x1b[31m[bold]x[/bold]\x07" in out
    assert "\x1b" not in out


async def test_diff_as_people_and_programs_read_it(copied: Place, capsys: pytest.CaptureFixture[str]) -> None:
    """The third list is kept where the judge has no say: a reject less, a list more."""
    await run_here(copied, "label.policy=intended", "release.version=0.2.0")
    arguments = ["release", "diff", f"{NAME}@0.1.0", NAME, "--root", str(copied.releases)]
    capsys.readouterr()
    assert cli.run(arguments) == 0
    out = capsys.readouterr().out
    for line in ("minor: other rows; the version to follow 0.1.0: 0.2.0",
                 "lists         4       5      1        0        0",
                 "rejects       1       0      0        1        0",
                 "grades of the 16 pairs of query and passage that both have: 0 moved",
                 "A: 2     0     0     4     0",
                 "  label.policy: judged -> intended",
                 "prompts: the same",
                 "  lists: added q2: who was king 2?"):  # fmt: skip
        assert line in out
    assert cli.run([*arguments, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["proposed"] == {"step": "minor", "version": "0.2.0"}
    assert said["config"] == [{"path": "label.policy", "what": "changed", "old": "judged", "new": "intended"}]
    (lists,) = (table for table in said["tables"] if table["table"] == "lists")
    assert lists["examples"][0]["new"]["grade"] == [3.0, 2.0, 1.0, 0.0]
    assert {s["stage"]: s["b"]["kept"] for s in said["accounting"]}["label"] == 5
