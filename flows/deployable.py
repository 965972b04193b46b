"""The flows as Prefect's own objects, for deployments: `flows/deployable.py:graded`.

Apart from the flows themselves, because importing this imports Prefect.
"""

from __future__ import annotations

from typing import Any

from prefect import State, flow

from gradeloom.flows.graded import GradedResult, graded_named, run_graded
from gradeloom.flows.orchestrate import Outcome, inside_flow_run
from gradeloom.flows.progress import Progress
from gradeloom.schemas.config import GradedConfig


def _run_name() -> str:
    from prefect.runtime import flow_run

    config: Any = flow_run.parameters["config"]
    return graded_named(GradedConfig.model_validate(config)).run


@flow(name="graded", flow_run_name=_run_name, persist_result=False, retries=0)
async def graded(config: GradedConfig) -> State[None]:
    """Queries in, a verified, versioned release of graded passages out.

    Args:
        config: the run's settings; roots and other paths are the worker's.
    """
    outcome: Outcome[GradedResult] = Outcome()
    await inside_flow_run(config, Progress(bars=False), run_graded, outcome)
    return outcome.state()
