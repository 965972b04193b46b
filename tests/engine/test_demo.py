"""The demo's run, on the real model: every stage, a release that verifies, and what the judge sees."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from gradeloom.flows.configure import load_config
from gradeloom.flows.graded import GradedResult, run_graded
from gradeloom.flows.orchestrate import Orchestration
from gradeloom.flows.progress import Progress
from gradeloom.schemas.config import VllmEngine
from gradeloom.tasks.engine.vllm import VllmBackend
from gradeloom.tasks.release.verify import verify

GRADELOOM = Path(sys.executable).parent / "gradeloom"


@pytest.mark.asyncio(loop_scope="session")
async def test_a_release_out_of_a_real_model(server: VllmBackend, tmp_path: Path) -> None:
    """Through the shared server, without the filters that so small a model mostly fails."""
    engine = {"kind": "openai", "model": "gradeloom", "endpoints": [server.endpoint], "window": 16,
              "tokenizer": server.config.model, "max_model_len": 1024}  # fmt: skip
    sets = [f"engine={json.dumps(engine)}", "filters=[{kind: structure}]", "generation.max_tokens=400",
            f"run.root={tmp_path}/runs", f"release.root={tmp_path}/releases", "cache.enabled=false",
            "run.max_failed=0.9", "generation.attempts=3"]  # fmt: skip
    config = load_config("graded-demo", sets, 8)
    result = await run_graded(config, progress=Progress(quiet=True), tasks=Orchestration())

    assert result.release is not None, result.stopped
    assert verify(result.release)
    check_accounting(result, rows=8)
    for name in ("queries", "corpus", "qrels", "lists", "rejects"):
        assert list((result.release / name).glob("*.parquet"))
    for released in pq.read_table(result.release / "lists").to_pylist():
        assert len(released["passages"]) == 4
        assert released["intended"] == [3, 2, 1, 0] == released["grade"]
        # One unconstrained token: some probability always falls outside the grades (METHODS 1a).
        assert all(0 < mass < 1 for mass in released["mass"])
        assert all(0 <= expected <= 3 for expected in released["expected"])
    assert result.usage["tokens"] > 1000
    assert result.usage["requests_cached"] == 0


def check_accounting(result: GradedResult, rows: int) -> None:
    assert result.accounting[0].rows == rows
    for account in result.accounting:
        account.assert_adds_up()
    for before, after in zip(result.accounting, result.accounting[1:], strict=False):
        assert after.rows == before.kept


def test_the_demo_through_a_server_of_its_own(vllm_settings: VllmEngine, tmp_path: Path) -> None:
    """As a person starts it: the command, a managed server, then the same again from what is there."""
    command = [
        str(GRADELOOM), "graded", "run", "--config", "graded-demo", "--limit", "2", "--json",
        "--set", f"engine.python={vllm_settings.python}", "--set", f"engine.model={vllm_settings.model}",
        "--set", "filters=[{kind: structure}]", "--set", "generation.attempts=5", "--set", "run.max_failed=1",
    ]  # fmt: skip
    environment = {**os.environ, "GRADELOOM_HOME": str(tmp_path / "home")}
    environment.pop("PREFECT_API_URL", None)

    first = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert first.returncode == 0, first.stderr
    assert "starting vLLM" in first.stderr
    result = json.loads(first.stdout)
    assert result["release"] == "releases/graded-demo/0.1.0"
    assert result["usage"]["tokens_per_second"] > 0

    second = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert second.returncode == 0, second.stderr
    assert "starting vLLM" not in second.stderr
    assert json.loads(second.stdout)["already"] is True
    assert json.loads(second.stdout)["digest"] == result["digest"]
