"""Every command in README and docs is run, in the order it stands, or is run by another test by name.

A command runs over the `fault` engine where its own would need a model that is not here; what is
added is said in `ADDED`, and a command that nobody runs is a failure.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from gradeloom.schemas.retriever import RetrieverConfig

ROOT = Path(__file__).parent.parent
DOCS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FAULT = "--set 'engine={kind: fault}' --set 'judge.engine={kind: fault, seed: 1}'"

S3, HUB = "tests/tasks/release/test_publish.py, on a server", "tests/tasks/release/test_hub.py, on a server"

ELSEWHERE = {
    "gradeloom release publish my-domain@0.1.0 --to s3://bucket/releases": S3,
    "gradeloom release publish my-domain@0.1.0 --to hf://datasets/me/my-domain": HUB,
    "gradeloom release show s3://bucket/releases/my-domain/0.1.0": S3,
    "gradeloom release verify hf://datasets/me/my-domain@v0.1.0": HUB,
    "gradeloom release list --root s3://bucket/releases": S3,
    "gradeloom release export my-domain@0.1.0 --root s3://bucket/releases --format beir "
    "--to my-domain-beir": S3,
    "gradeloom release audit sample graded-recorded --n 160 --to my-audit": "tests/flows/test_audit_cli.py",
    "gradeloom release audit import my-audit": "tests/flows/test_audit_cli.py runs this example as it stands",
    "make demo": "tests/engine/test_demo.py runs its run; a clone runs it whole before each release",
    "make test": "this is it",
    "gradeloom doctor": "tests/flows/test_doctor.py and test_cli.py: its exit code depends on the machine",
}

ADDED = {
    "gradeloom graded preview --config my-run.yaml --limit 3": FAULT,
    "gradeloom graded run --config my-run.yaml": f"--limit 40 --set run.target=20 {FAULT}",
    "gradeloom graded run --config graded-demo": f"--limit 6 --set filters=[] {FAULT}",
    "gradeloom judge calibrate --qrels samples:household/qrels/test.tsv "
    "--queries samples:household/queries.jsonl --corpus samples:household/corpus.jsonl --config judge-demo": (
        "--set 'judge.engine={kind: fault}'"
    ),
    "gradeloom retriever train --config retriever-demo": "--set training.max_steps=2",
    "gradeloom retriever probe --config retriever-demo --release my-domain": "--set training.max_steps=1",
}
"""Command -> what the test adds to it."""


def commands(doc: Path) -> list[str]:
    found = []
    for block in re.findall(r"^```sh\n(.*?)^```", doc.read_text(), flags=re.MULTILINE | re.DOTALL):
        lines = re.sub(r"\s*\\\n\s*", " ", block).splitlines()
        found += [re.sub(r"\s+#.*$", "", line).strip() for line in lines]
    return [line for line in found if line]


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the README's configuration, queries, and two releases by a stand-in."""
    folder = tmp_path_factory.mktemp("docs")
    readme = (ROOT / "README.md").read_text()
    (example,) = re.findall(r"^```yaml\n(.*?)^```", readme, flags=re.MULTILINE | re.DOTALL)
    (folder / "my-run.yaml").write_text(example)
    queries = [f'{{"_id": "{n}", "text": "what is the boiling point of substance {n}"}}\n' for n in range(60)]
    (folder / "queries.jsonl").write_text("".join(queries))
    run(folder, f"gradeloom graded run --config graded-demo --limit 6 {FAULT} --set filters=[]")
    mine = "gradeloom graded run --config my-run.yaml"
    run(folder, f"{mine} {ADDED[mine]}")
    return folder


def run(folder: Path, command: str) -> str:
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "GRADELOOM_HOME": str(folder / ".gradeloom"),
        "OMP_NUM_THREADS": "1",
    }
    environment.pop("PREFECT_API_URL", None)
    ran = subprocess.run(
        shlex.split(command), cwd=folder, env=environment, capture_output=True, text=True, timeout=120
    )
    assert ran.returncode == 0, f"{command}\n{ran.stdout}\n{ran.stderr}"
    return ran.stdout


@pytest.mark.parametrize("doc", DOCS, ids=lambda doc: doc.name)
def test_the_commands_work_in_the_order_they_stand(doc: Path, workplace: Path) -> None:
    for command in commands(doc):
        if command in ELSEWHERE:
            continue
        if command.startswith("gradeloom release export"):
            subprocess.run(["rm", "-rf", str(workplace / shlex.split(command)[-1])], check=True)
        run(workplace, f"{command} {ADDED.get(command, '')}")


def blocks(doc: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", doc.read_text(), flags=re.MULTILINE | re.DOTALL)


def test_the_code_for_sentence_transformers_says_what_it_is_said_to_say(workplace: Path) -> None:
    (code,) = blocks(ROOT / "docs" / "retriever.md", "python")
    train = "gradeloom retriever train --config retriever-demo"
    run(workplace, f"{train} {ADDED[train]}")
    (workplace / "example.py").write_text(code)
    (said,) = re.findall(r"print\(.*\)  # (.*)", code)
    assert run(workplace, "python example.py").splitlines()[-1] == said


def test_the_settings_for_retrievers_are_settings() -> None:
    (example,) = blocks(ROOT / "docs" / "retriever.md", "yaml")
    assert len(RetrieverConfig.model_validate({"name": "example", **yaml.safe_load(example)}).data) == 2


def test_there_are_commands_and_nothing_stale_is_added() -> None:
    found = [command for doc in DOCS for command in commands(doc)]
    assert len(found) > 10
    assert set(ELSEWHERE) | set(ADDED) <= set(found)


def test_links_and_paths_in_the_docs_exist() -> None:
    for doc in DOCS:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", doc.read_text()):
            assert (doc.parent / target).exists(), f"{doc.name}: {target}"
