"""Prefect and its absence, on a real local server and through Prefect's own client."""

from __future__ import annotations

import asyncio
import http.server
import json
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gradeloom.flows import server
from gradeloom.flows.configure import load_config
from gradeloom.flows.orchestrate import Named, Orchestration, api_url, plain, run_flow
from gradeloom.flows.progress import Progress
from gradeloom.schemas.errors import InputError

SECRET = "sk-thisisaverysecretkey1234567890"
CONFIG = "source: {path: queries.jsonl}\nengine: {kind: fault}\nrelease: {name: little, version: 2.3.4}\n"


@pytest.fixture(scope="session")
def config_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("config")
    (folder / "queries.jsonl").write_text('{"_id": "1", "text": "why"}\n')
    (folder / "little.yaml").write_text(CONFIG)
    return folder / "little.yaml"


def fake_run(config_file: Path, env: dict[str, str], *modes: str) -> tuple[list[dict[str, Any]], str]:
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("fake_run.py"), config_file, *modes],
        env=env, cwd=config_file.parent, capture_output=True, text=True, timeout=150,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()], done.stderr


class Recorded:
    """What the server knows of the flow runs."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.runs: list[Any] = []
        self.tasks: dict[Any, list[Any]] = {}
        self.artifacts: dict[Any, dict[str, Any]] = {}
        self.logs: dict[Any, list[str]] = {}

    async def read(self) -> Recorded:
        from prefect.client.orchestration import PrefectClient
        from prefect.client.schemas.filters import (
            ArtifactFilter,
            ArtifactFilterFlowRunId,
            FlowRunFilter,
            FlowRunFilterId,
            LogFilter,
            LogFilterFlowRunId,
        )
        from prefect.client.schemas.sorting import FlowRunSort

        async with PrefectClient(api=self.url) as client:
            everyones = await client.read_flow_runs(sort=FlowRunSort.START_TIME_ASC)
            self.runs = [run for run in everyones if run.name == RUN]
            for run in self.runs:
                only = FlowRunFilter(id=FlowRunFilterId(any_=[run.id]))
                self.tasks[run.id] = await self._task_runs(client, only)
                mine = ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[run.id]))
                found = await client.read_artifacts(artifact_filter=mine)
                self.artifacts[run.id] = {str(artifact.key): artifact for artifact in found}
                logs = await client.read_logs(LogFilter(flow_run_id=LogFilterFlowRunId(any_=[run.id])))
                self.logs[run.id] = [log.message for log in logs]
        return self

    @staticmethod
    async def _task_runs(client: Any, only: Any) -> list[Any]:
        """Task runs arrive as events, a moment later."""
        deadline = time.monotonic() + 20
        while True:
            found = await client.read_task_runs(flow_run_filter=only)
            if (
                len(found) == 2 and all(t.state_type and t.state_type.name == "COMPLETED" for t in found)
            ) or (time.monotonic() > deadline):
                return list(found)
            await asyncio.sleep(0.2)


RUN = "little 2.3.4"
"""Other tests use the server of the session, too, and under other names."""

NAMED = Named("graded", "", RUN)

MODES = ("well", "stopped", "wrong", "defect")


@pytest.fixture(scope="session")
def recorded(
    local_prefect: Any, environment: Callable[..., dict[str, str]], config_file: Path
) -> tuple[Recorded, list[dict[str, Any]], str]:
    """Four runs and one that is terminated, on the server that the state file names."""
    env = environment(local_prefect.home, GENERATOR_API_KEY=SECRET)
    said, stderr = fake_run(config_file, env, *MODES)
    terminated, _ = fake_run(config_file, env, "terminated")
    return asyncio.run(Recorded(local_prefect.api_url).read()), said + terminated, stderr


def test_each_run_is_a_flow_run_with_its_end_and_reason(recorded: Any) -> None:
    server, said, _ = recorded
    assert [run.name for run in server.runs] == [RUN] * 5
    states = [(run.state.type.name, run.state.message) for run in server.runs]
    assert states[0] == ("COMPLETED", "released: None")
    assert states[1] == ("FAILED", "only 3 of 4 kept")
    assert states[2] == ("FAILED", "InputError: queries.tsv, row 2: the second row is empty")
    assert states[3][0] == "FAILED"
    assert "ZeroDivisionError: in a shard" in states[3][1]
    assert states[4][0] == "CRASHED"
    assert [s.get("raised") for s in said] == [
        None, None, "InputError: queries.tsv, row 2: the second row is empty",
        "ZeroDivisionError: in a shard", "CancelledError",
    ]  # fmt: skip
    assert [s.get("exit_code") for s in said[:2]] == [0, 3]
    assert said[0]["url"].endswith(f"/flow-run/{server.runs[0].id}")


def test_shards_are_task_runs_named_by_stage_and_ordinal(recorded: Any) -> None:
    server, _, _ = recorded
    for run in server.runs:
        tasks = server.tasks[run.id]
        assert sorted(t.name for t in tasks) == ["generate 0", "generate 1"]
        assert {t.task_inputs == {} for t in tasks} == {True}


def test_parameters_are_the_config(recorded: Any) -> None:
    server, _, _ = recorded
    config = server.runs[0].parameters["config"]
    assert config["release"]["name"] == "little"
    assert config["engine"]["kind"] == "fault"


def test_artifacts_show_progress_and_accounting(recorded: Any) -> None:
    server, _, _ = recorded
    artifacts = server.artifacts[server.runs[0].id]
    assert set(artifacts) == {
        "progress-generate", "graded-accounting", "graded-report", "hostile", "release-link",
    }  # fmt: skip
    assert float(artifacts["progress-generate"].data) == 100
    assert artifacts["progress-generate"].description == "generate: 4 of 4 rows 50% kept"
    (row,) = json.loads(artifacts["graded-accounting"].data)
    assert row == {"stage": "generate", "rows": 4, "kept": 3, "rejected": 1, "failed": 0, "unused": 0,
                   "reasons": r"1 too\_long"}  # fmt: skip
    assert "| accept rate | 75.0% |" in artifacts["graded-report"].data
    stopped = server.artifacts[server.runs[1].id]["graded-report"].data
    assert "| no release, because | only 3 of 4 kept |" in stopped


def test_text_in_artifacts_is_escaped(recorded: Any) -> None:
    server, _, _ = recorded
    artifact = server.artifacts[server.runs[0].id]["hostile"]
    escaped = (
        r"\<script\>alert(1)\</script\> \[x\](http:\/\/evil.example) \\x1b\[31m\`\*\_"
    )  # fmt: skip
    assert json.loads(artifact.data) == [{"text": escaped, "n": 3}]
    assert artifact.description == escaped


def test_messages_are_in_the_log_of_the_run_and_once_on_stderr(recorded: Any) -> None:
    server, _, stderr = recorded
    for run in server.runs[:3]:
        assert "two shards are done" in server.logs[run.id]
    assert "queries.tsv, row 2: the second row is empty" in server.logs[server.runs[2].id]
    assert stderr.count("two shards are done") == len(MODES)
    assert "Finished in state" not in stderr
    assert "Traceback" not in stderr


def test_no_secret_reaches_the_servers_files(recorded: Any, local_prefect: Any) -> None:
    files = [file for file in local_prefect.home.rglob("*") if file.is_file()]
    assert any(file.name == "prefect.db" for file in files)
    assert [file for file in files if SECRET.encode() in file.read_bytes()] == []
    with sqlite3.connect(local_prefect.home / "prefect" / "prefect.db") as db:
        assert db.execute("SELECT COUNT(*) FROM flow_run WHERE name = ?", (RUN,)).fetchone() == (5,)


def test_the_deployable_flow_has_the_config_as_its_form(
    environment: Callable[..., dict[str, str]], tmp_path: Path
) -> None:
    code = (
        "import json; from gradeloom.flows.deployable import graded; "
        "print(json.dumps([graded.name, graded.parameters.model_dump()]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(tmp_path), capture_output=True, text=True, timeout=100
    )
    name, schema = json.loads(done.stdout)
    assert name == "graded"
    assert schema["required"] == ["config"]
    assert {"source", "engine", "judge", "release"} <= set(
        schema["definitions"]["GradedConfig"]["properties"]
    )


# --- without an API ---------------------------------------------------------------------------


def test_without_an_api_nothing_of_prefect_is_imported_or_started(
    environment: Callable[..., dict[str, str]], config_file: Path, tmp_path: Path
) -> None:
    said, _ = fake_run(config_file, environment(tmp_path), "well", "stopped", "wrong", "terminated")
    assert [s.get("exit_code") for s in said] == [0, 3, None, None]
    assert said[2]["raised"] == "InputError: queries.tsv, row 2: the second row is empty"
    assert said[3]["raised"] == "CancelledError"
    assert {(s["prefect"], s["children"], s.get("url")) for s in said} == {(False, 0, None)}
    assert list(tmp_path.iterdir()) == []


async def test_absence_awaits_work_and_drops_artifacts() -> None:
    tasks = Orchestration()

    async def work() -> int:
        return 5

    assert await tasks.shard("generate", 0, work) == 5
    await tasks.table("k", [{"a": 1}])
    await tasks.markdown("k", "x")
    await tasks.progress("k", 0.5)
    await tasks.link("k", "http://x", "x")
    assert (tasks.flow_run, tasks.flow_run_url) == (None, None)


def test_the_api_is_the_environments_else_the_local_server(
    local_prefect: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    monkeypatch.setenv("GRADELOOM_HOME", str(tmp_path))
    assert api_url() is None
    monkeypatch.setenv("GRADELOOM_HOME", str(local_prefect.home))
    assert api_url() == local_prefect.api_url
    monkeypatch.setenv("PREFECT_API_URL", "http://prefect.example/api")
    assert api_url() == "http://prefect.example/api"


def test_an_api_that_does_not_answer_is_said(
    config_file: Path, tmp_path: Path, free_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PREFECT_HOME", "NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, str(tmp_path) if name == "PREFECT_HOME" else "127.0.0.1")
    monkeypatch.setenv("PREFECT_API_URL", f"http://me:secret@127.0.0.1:{free_port}/api")

    async def never(**_: Any) -> Any:
        raise AssertionError

    config = load_config(str(config_file))
    with pytest.raises(InputError) as caught:
        asyncio.run(run_flow(config, named=NAMED, progress=Progress(quiet=True), compose=never))
    assert str(caught.value).startswith(f"no Prefect API answers at http://127.0.0.1:{free_port}/api (")


class _Page(http.server.BaseHTTPRequestHandler):
    """A web server that is no Prefect: every address is a page."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(b"<html>hello</html>")

    def log_message(self, *_: Any) -> None: ...


def test_a_web_page_is_no_prefect_api(
    config_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Page) as page:
        threading.Thread(target=page.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{page.server_port}/api"
        monkeypatch.setenv("PREFECT_HOME", str(tmp_path))
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        monkeypatch.setenv("PREFECT_API_URL", url)

        async def never(**_: Any) -> Any:
            raise AssertionError

        config = load_config(str(config_file))
        with pytest.raises(InputError, match=f"no Prefect API answers at {url}"):
            asyncio.run(run_flow(config, named=NAMED, progress=Progress(quiet=True), compose=never))
        assert not server.answers(url)
        page.shutdown()


def test_plain_text_stays_readable() -> None:
    assert plain("two words,\nthen 3 more.") == "two words, then 3 more."
    assert plain("a|b") == r"a\|b"


@pytest.mark.long
def test_a_server_that_vanishes_does_not_stop_the_run(
    gradeloom: Any, environment: Callable[..., dict[str, str]], config_file: Path, tmp_path: Path,
    free_port: int,
) -> None:  # fmt: skip
    assert gradeloom("ui", "--background", "--port", str(free_port), home=tmp_path).returncode == 0
    said, stderr = fake_run(config_file, environment(tmp_path), "lost")
    assert said[0]["exit_code"] == 0
    assert "The Prefect API stopped answering" in stderr
