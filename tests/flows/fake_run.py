"""A small composition run as the command runs one, in a process of its own. Not a test.

    python fake_run.py CONFIG MODE [MODE ...]

Prints one JSON line per mode: what `run_flow` returned or raised, and whether Prefect was imported.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from typing import Any

import psutil

from gradeloom.flows import orchestrate, server
from gradeloom.flows.configure import load_config
from gradeloom.flows.graded import GradedResult, graded_named
from gradeloom.flows.progress import Progress
from gradeloom.schemas.config import GradedConfig
from gradeloom.schemas.errors import InputError
from gradeloom.schemas.manifest import StageAccount

HOSTILE = "<script>alert(1)</script> [x](http://evil.example) \x1b[31m`*_"


def composition(mode: str) -> orchestrate.Composition[GradedConfig, GradedResult]:
    async def compose(
        config: GradedConfig, *, progress: Progress, tasks: orchestrate.Orchestration
    ) -> GradedResult:
        progress.stage("generate", 4)

        async def two_rows() -> list[int]:
            await asyncio.sleep(0.01)
            progress.advance("generate", 2, kept=1)
            return [1, 2]

        shards = await asyncio.gather(*(tasks.shard("generate", i, two_rows) for i in range(2)))
        assert shards == [[1, 2], [1, 2]]
        progress.say("two shards are done")
        if mode == "wrong":
            raise InputError("the second row is empty", file="queries.tsv", row=2)
        if mode == "defect":
            raise ZeroDivisionError("in a shard")
        if mode == "terminated":
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(30)
        if mode == "lost":
            found = server.running()
            assert found is not None
            server.stop(found)
            await tasks.shard("generate", 2, two_rows)
        await tasks.table("hostile", [{"text": HOSTILE, "n": 3}], HOSTILE)
        await tasks.link("release-link", "http://127.0.0.1:1/x", "the release")
        accounting = StageAccount(stage="generate", rows=4, kept=3, rejected=1, reasons={"too_long": 1})
        return GradedResult(
            release=None, already=False, version="0.1.0", digest="d" * 64, accounting=[accounting],
            accept_rate=0.75, usage={"tokens": 12}, stopped="only 3 of 4 kept" if mode == "stopped" else None,
        )  # fmt: skip

    return compose


def main(config_file: str, *modes: str) -> None:
    config = load_config(config_file)
    for mode in modes:
        said: dict[str, Any] = {"mode": mode}
        with Progress(bars=False) as progress:
            try:
                run = orchestrate.run_flow(
                    config, named=graded_named(config), progress=progress, compose=composition(mode)
                )
                ran = asyncio.run(run)
                said |= {"exit_code": ran.result.exit_code, "url": ran.flow_run_url}
            except (InputError, ZeroDivisionError) as error:
                said |= {"raised": f"{type(error).__name__}: {error}"}
            except asyncio.CancelledError:
                said |= {"raised": "CancelledError"}
        said["prefect"] = "prefect" in sys.modules
        said["children"] = len(psutil.Process().children())
        print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
