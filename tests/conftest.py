"""Shared fixtures, and the rule that where GRADELOOM_REQUIRE_ALL=1 a skip is a failure."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from gradeloom.schemas.retriever import CollectionConfig

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


REAL_SETS: dict[str, tuple[str, str, str, str]] = {
    "DL19": ("trec_dl2019_passage_text", "queries.jsonl", "passages.jsonl.gz", "qrels.txt"),
    "DL20": ("trec_dl2020_passage_text", "queries.jsonl", "passages.jsonl.gz", "qrels.txt"),
    "LLMJudge dev": ("llmjudge2024_dev_text", "queries.jsonl", "passages.jsonl.gz", "qrels.txt"),
    "Chorus": ("chorus_ecommerce_graded", "queries.jsonl", "products.jsonl.gz", "qrels_0to3.txt"),
    "MedQuAD": ("medquad_liveqa_graded", "queries.jsonl", "passages_all.jsonl.gz", "qrels_all_1to4.txt"),
    "Cranfield": ("cranfield", "queries.jsonl", "corpus.jsonl.gz", "qrels.graded_1to4_best4.txt"),
    "CSFCube": ("csfcube_cc-by-nc", "queries.jsonl", "docs.jsonl.gz", "qrels_0to3.txt"),
    "SciFact": ("scifact", "queries.test.jsonl", "corpus.jsonl.gz", "qrels.test.txt"),
}


@pytest.fixture(scope="session")
def real_set(realdata: Path) -> Callable[[str], CollectionConfig]:
    """Where one of the real collections lies, by its name."""

    def place(name: str) -> CollectionConfig:
        folder, *files = REAL_SETS[name]
        queries, corpus, qrels = (str(realdata / folder / file) for file in files)
        return CollectionConfig(queries=queries, corpus=corpus, qrels=qrels)

    return place


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A real headless Chromium as selenium's WebDriver; `get_log("browser")` is its console."""
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("no chromium and chromedriver (Debian: chromium, chromium-driver)")
    from selenium.webdriver import Chrome, ChromeOptions, ChromeService

    options = ChromeOptions()
    options.binary_location = chromium
    for argument in (
        "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-dev-shm-usage",
        "--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync",
        f"--user-data-dir={tmp_path_factory.mktemp('chromium')}",
    ):  # fmt: skip
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    started = Chrome(options=options, service=ChromeService(driver))
    yield started
    started.quit()
