"""The flows as Prefect's own objects, for deployments: `flows/deployable.py:graded`, `:retriever`.

Apart from the flows themselves, because importing this imports Prefect.

An automation can start a training on a new release: it runs a deployment of `retriever` with the
parameter `release` set to the release's `name@version`, out of an event
(`{"__prefect_kind": "jinja", "template": "{{ event.… }}"}`). The same release and configuration once
more find the model there and train nothing. No release sends such an event yet.
"""

from __future__ import annotations

from typing import Any

from prefect import State, flow

from gradeloom.flows.graded import GradedResult, graded_named, run_graded
from gradeloom.flows.orchestrate import Outcome, inside_flow_run
from gradeloom.flows.progress import Progress
from gradeloom.flows.retriever import RetrieverResult, retriever_named, run_retriever, with_release
from gradeloom.schemas.config import GradedConfig
from gradeloom.schemas.retriever import RetrieverConfig


def _graded_run_name() -> str:
    from prefect.runtime import flow_run

    config: Any = flow_run.parameters["config"]
    return graded_named(GradedConfig.model_validate(config)).run


def _retriever_run_name() -> str:
    from prefect.runtime import flow_run

    config: Any = flow_run.parameters["config"]
    release = flow_run.parameters.get("release")
    name = retriever_named(RetrieverConfig.model_validate(config)).run
    return name if release is None else f"{name} on {release}"


@flow(name="graded", flow_run_name=_graded_run_name, persist_result=False, retries=0)
async def graded(config: GradedConfig) -> State[None]:
    """Queries in, a verified, versioned release of graded passages out.

    Args:
        config: the run's settings; roots and other paths are the worker's.
    """
    outcome: Outcome[GradedResult] = Outcome()
    await inside_flow_run(config, Progress(bars=False), run_graded, outcome)
    return outcome.state()


@flow(name="retriever", flow_run_name=_retriever_run_name, persist_result=False, retries=0)
async def retriever(config: RetrieverConfig, release: str | None = None) -> State[None]:
    """Graded data in, a trained retriever and what it is worth out.

    Args:
        config: the training's settings; roots and other paths are the worker's.
        release: `name@version`, in the place of the release that the settings name.
    """
    outcome: Outcome[RetrieverResult] = Outcome()

    async def compose(config: RetrieverConfig, **more: Any) -> RetrieverResult:
        return await run_retriever(config if release is None else with_release(config, release), **more)

    await inside_flow_run(config, Progress(bars=False), compose, outcome)
    return outcome.state()
