"""The real vLLM server on the CPU: started once for all tests here (a minute), stopped at the end."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from gradeloom.schemas.config import VllmEngine
from gradeloom.tasks.engine.models import bundled_folder
from gradeloom.tasks.engine.vllm import VllmBackend

ROOT = Path(__file__).parent.parent.parent
HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what lies here; what kills the shared server comes after what uses it."""
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.engine)
    items.sort(key=lambda item: item.path == HERE / "test_kills.py")


@pytest.fixture(scope="session")
def vllm_settings() -> VllmEngine:
    """Settings of a server that is there; skips where a part is missing."""
    python = ROOT / ".venv-vllm" / "bin" / "python"
    if not python.exists():
        pytest.skip("no .venv-vllm: `make setup` makes it")
    model = (
        bundled_folder() if bundled_folder().is_dir() else ROOT / ".gradeloom/models" / bundled_folder().name
    )
    if not model.is_dir():
        pytest.skip("the bundled model is not prepared: `make model` does it")
    return VllmEngine(
        model=str(model.resolve()),
        python=str(python),
        window=16,
        max_model_len=1024,
        args=("--max-num-batched-tokens=1024",),  # soon exceeded: see test_seeded_burst
    )


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def server(
    vllm_settings: VllmEngine, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[VllmBackend]:
    """The shared server. Tests that use it run on the session's event loop."""
    backend = VllmBackend(vllm_settings, folder=tmp_path_factory.mktemp("vllm"))
    try:
        await backend.start()
        yield backend
    finally:
        await backend.stop()
