"""`gradeloom ui`: found while it runs, refused a taken port, and nothing of it left afterwards."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from gradeloom.flows import server


def test_it_answers_on_loopback_with_the_ui(local_prefect: Any) -> None:
    assert server.answers(local_prefect.api_url)
    with urllib.request.urlopen(local_prefect.url, timeout=30) as page:
        assert b"<html" in page.read().lower()
    listening = [c for c in psutil.Process(local_prefect.pid).net_connections() if c.status == "LISTEN"]
    assert {c.laddr.ip for c in listening} == {"127.0.0.1"}


def test_a_second_start_says_where_the_first_is(local_prefect: Any, gradeloom: Any) -> None:
    for flags in ([], ["--background"]):
        done = gradeloom("ui", *flags, home=local_prefect.home)
        assert (done.returncode, done.stdout) == (0, f"Prefect UI: already running: {local_prefect.url}\n")


def test_the_servers_files_stay_in_the_home(local_prefect: Any) -> None:
    here = {path.name for path in (local_prefect.home / "prefect").iterdir()}
    assert {"prefect.db", "server.json", "server.log"} <= here
    environ = psutil.Process(local_prefect.pid).environ()
    assert environ["PREFECT_HOME"] == str(local_prefect.home / "prefect")
    assert environ["PREFECT_SERVER_ANALYTICS_ENABLED"] == "false"
    assert environ["DO_NOT_TRACK"] == "1"


def test_the_server_is_given_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GENERATOR_API_KEY", "abc")
    monkeypatch.setenv("HF_TOKEN", "abc")
    monkeypatch.setenv("PREFECT_API_URL", "http://elsewhere/api")
    given = server._server_environment(4200)
    assert not {"GENERATOR_API_KEY", "HF_TOKEN", "PREFECT_API_URL"} & set(given)
    assert given["PATH"]


def test_a_taken_port_is_said(tmp_path: Path, gradeloom: Any) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = gradeloom("ui", "--port", str(port), home=tmp_path)
    assert done.returncode == 2
    assert f"gradeloom: error: port {port} of 127.0.0.1 cannot be used (" in done.stderr
    assert done.stdout == ""


def test_a_server_that_does_not_come_up_shows_its_last_lines(
    tmp_path: Path, gradeloom: Any, free_port: int
) -> None:
    (tmp_path / "prefect").mkdir()
    (tmp_path / "prefect/prefect.db").write_text("no database")
    done = gradeloom("ui", "--background", "--port", "0", home=tmp_path)
    assert done.returncode == 2  # click's own words: 0 is no port
    done = gradeloom("ui", "--background", "--port", str(free_port), home=tmp_path)
    assert done.returncode == 1
    assert "gradeloom: error: the Prefect server stopped; its last lines:" in done.stderr
    assert "file is not a database" in done.stderr
    assert not (tmp_path / "prefect/server.json").exists()


def test_a_stale_state_file_is_no_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADELOOM_HOME", str(tmp_path))
    state = tmp_path / "prefect/server.json"
    state.parent.mkdir()
    ended = subprocess.Popen(["true"])
    ended.wait()
    for text in ("", "{}", "[1]", json.dumps({"pid": ended.pid, "created": 1.0, "port": 4200})):
        state.write_text(text)
        assert server.running() is None
        assert server.running_api_url() is None
    me = psutil.Process()
    state.write_text(json.dumps({"pid": me.pid, "created": me.create_time() - 60, "port": 4200}))
    assert server.running() is None


def test_in_the_foreground_it_ends_with_ctrl_c(
    tmp_path: Path, free_port: int, environment: Callable[..., dict[str, str]]
) -> None:
    command = [sys.executable, "-m", "gradeloom.flows.cli", "ui", "--port", str(free_port)]
    with subprocess.Popen(
        command, env=environment(tmp_path), cwd=tmp_path, stdout=subprocess.PIPE, text=True
    ) as ui:  # fmt: skip
        assert ui.stdout is not None
        line = ui.stdout.readline()
        assert line == f"Prefect UI: running, Ctrl-C stops it: http://127.0.0.1:{free_port}\n"
        family = psutil.Process(ui.pid).children(recursive=True)
        assert family
        ui.send_signal(signal.SIGINT)
        assert ui.wait(timeout=30) == 0
    assert [p for p in family if p.is_running()] == []
    assert not (tmp_path / "prefect/server.json").exists()
