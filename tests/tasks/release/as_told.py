"""Do what a message says: load a published release by the line that the command prints."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def rows_loaded(printed: str, environment: dict[str, str], home: Path) -> int:
    """Rows that the `datasets.load_dataset(…)` line of an output loads, in a process of its own."""
    (line,) = (line.strip() for line in printed.splitlines() if "load_dataset(" in line)
    done = subprocess.run(
        [sys.executable, "-c", f"import datasets\nprint(len({line}))"],
        env=os.environ | environment | {"HF_HOME": str(home / "hf"), "HF_HUB_DISABLE_XET": "1"},
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return int(done.stdout)
