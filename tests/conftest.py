"""Shared fixtures, and the rule that where GRADELOOM_REQUIRE_ALL=1 a skip is a failure."""

from __future__ import annotations

import os
import signal
from collections.abc import Generator
from pathlib import Path

import pytest

# A shell that starts its jobs in the background has them ignore SIGINT, and so would every process that
# tests start and then stop as Ctrl-C does.
signal.signal(signal.SIGINT, signal.default_int_handler)

REQUIRE_ALL = os.environ.get("GRADELOOM_REQUIRE_ALL") == "1"


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None]:
    outcome = yield
    report = outcome.get_result()  # type: ignore[attr-defined]
    if REQUIRE_ALL and report.skipped and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"skipped where nothing may be missing: {report.longrepr}"


@pytest.fixture(scope="session")
def realdata() -> Path:
    """The folder of real data; tests that ask for it are marked `realdata`."""
    folder = Path(os.environ.get("GRADELOOM_DATA", Path(__file__).parent.parent.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"no real data at {folder}; set GRADELOOM_DATA")
    return folder.resolve()
