from __future__ import annotations

import hashlib
import math
from pathlib import Path
from typing import Any

import orjson
import pytest
from scripted import a_request

from gradeloom.schemas.config import ReplayEngine
from gradeloom.schemas.errors import InputError
from gradeloom.tasks.engine.replay import ReplayBackend
from gradeloom.tasks.engine.types import Asked, Completion, Request

LIST = {"query_id": "q1", "query": "what", "passages": {"3": "three", "2": "twö", "0": "zero"}}
JUDGED = {"query_id": "q1", "level": 2, "grade": 1, "p": [0.0, 0.75, 0.25, 0.0]}


def recorded(tmp_path: Path, adapter: Any, *rows: Any) -> ReplayBackend:
    path = tmp_path / "recorded.jsonl"
    path.write_bytes(b"\n".join(row if isinstance(row, bytes) else orjson.dumps(row) for row in rows))
    return ReplayBackend(ReplayEngine(path=str(path), adapter=adapter))


def with_schema(*names: str) -> Request:
    request = a_request()
    properties = {name: {"type": "string"} for name in names}
    return Request(request.messages, request.sampling, {"type": "object", "properties": properties})


def generate(part: str = "", attempt: int = 0, source_id: str = "q1") -> Asked:
    return Asked("generate", "f", "row", part, attempt, source_id)


async def test_a_list_in_the_order_that_the_schema_asks_for(tmp_path: Path) -> None:
    backend = recorded(tmp_path, "graded_lists", LIST)
    await backend.start()
    found = await backend.send(generate(), with_schema("level_0", "level_3", "level_2"))
    assert found == Completion("stop", '{"level_0":"zero","level_3":"three","level_2":"twö"}')
    await backend.stop()


async def test_a_list_without_a_schema_is_as_recorded(tmp_path: Path) -> None:
    found = await recorded(tmp_path, "graded_lists", LIST).send(generate(), a_request())
    assert found.text == '{"level_3":"three","level_2":"twö","level_0":"zero"}'


async def test_one_level_a_request(tmp_path: Path) -> None:
    found = await recorded(tmp_path, "graded_lists", LIST).send(generate("2"), with_schema("passage"))
    assert found.text == '{"passage":"twö"}'


async def test_a_judgement_with_its_log_probabilities(tmp_path: Path) -> None:
    found = await recorded(tmp_path, "judgements", JUDGED).send(
        Asked("judge", "f", "row", "2", 0, "q1"), a_request()
    )
    assert (found.outcome, found.text) == ("stop", "1")
    assert found.logprobs == (("1", math.log(0.75)), ("2", math.log(0.25)), ("0", -9999.0), ("3", -9999.0))


@pytest.mark.parametrize(
    ("asked", "request_"),
    [
        (generate(attempt=1), a_request()),
        (generate(source_id="q2"), a_request()),
        (generate("1"), with_schema("passage")),
        (generate(), with_schema("level_3", "level_1")),
        (generate(), with_schema("thought", "level_3")),
        (Asked("judge", "f", "row", "", 0, "q1"), a_request()),
    ],
)
async def test_what_is_not_recorded_is_never_guessed(tmp_path: Path, asked: Asked, request_: Request) -> None:
    backend = recorded(tmp_path, "graded_lists", LIST)
    assert await backend.send(asked, request_) == Completion("not_recorded")


def test_the_identity_is_the_files_digest(tmp_path: Path) -> None:
    backend = recorded(tmp_path, "judgements", JUDGED)
    sha256 = hashlib.sha256((tmp_path / "recorded.jsonl").read_bytes()).hexdigest()
    assert backend.identity == f"replay:{sha256[:32]}"


@pytest.mark.parametrize(
    ("adapter", "row", "message"),
    [
        ("graded_lists", b"{", "row 2: not JSON"),
        ("graded_lists", [1], "row 2: expected a JSON object"),
        ("graded_lists", {"passages": {"1": "x"}}, "row 2, field 'query_id': expected a non-empty string"),
        ("graded_lists", {**LIST, "query_id": 7}, "row 2, field 'query_id': expected a non-empty string"),
        ("graded_lists", {"query_id": "q2"}, "row 2, field 'passages': expected an object"),
        ("graded_lists", {**LIST, "passages": {"x": "y"}}, "row 2, field 'passages': expected grades"),
        ("graded_lists", {**LIST, "passages": {"1": None}}, "row 2, field 'passages': expected grades"),
        ("graded_lists", LIST, "row 2: is recorded twice: generate, q1"),
        ("judgements", {**JUDGED, "p": [2.0]}, "row 2, field 'p': expected probabilities"),
        ("judgements", {**JUDGED, "p": "x"}, "row 2, field 'p': expected probabilities"),
        ("judgements", {**JUDGED, "grade": "1"}, "row 2, field 'grade': expected a grade"),
        ("judgements", {**JUDGED, "level": True}, "row 2, field 'level': expected a grade"),
    ],
)
def test_a_bad_row_is_named(tmp_path: Path, adapter: Any, row: Any, message: str) -> None:
    good = LIST if adapter == "graded_lists" else JUDGED
    with pytest.raises(InputError, match=f"recorded.jsonl, {message}"):
        recorded(tmp_path, adapter, good, row)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"none\.jsonl: cannot read the recorded file: No such file"):
        ReplayBackend(ReplayEngine(path=str(tmp_path / "none.jsonl"), adapter="judgements"))


@pytest.mark.realdata
async def test_all_recorded_lists_and_judgements_are_there(realdata: Path) -> None:
    lists_file = realdata / "recorded" / "graded_lists.jsonl"
    lists = ReplayBackend(ReplayEngine(path=str(lists_file), adapter="graded_lists"))
    judged_file = realdata / "recorded" / "judgements.jsonl"
    judgements = ReplayBackend(ReplayEngine(path=str(judged_file), adapter="judgements"))
    rows = [orjson.loads(line) for line in lists_file.read_bytes().splitlines()]
    assert len(rows) == 300
    for row in rows:
        query_id = row["query_id"]
        whole = await lists.send(
            generate(source_id=query_id), with_schema("level_0", "level_1", "level_2", "level_3")
        )
        texts = orjson.loads(whole.text)
        assert list(texts) == ["level_0", "level_1", "level_2", "level_3"]
        assert {name[-1]: text for name, text in texts.items()} == row["passages"]
        for grade, text in row["passages"].items():
            one = await lists.send(generate(grade, source_id=query_id), with_schema("passage"))
            assert orjson.loads(one.text) == {"passage": text}
            judged = await judgements.send(Asked("judge", "f", "row", grade, 0, query_id), a_request())
            assert judged.outcome == "stop"
            assert judged.logprobs is not None
            assert sum(math.exp(p) for _, p in judged.logprobs) == pytest.approx(1.0, abs=0.011)
