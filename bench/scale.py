"""How fast the graded flow is beside an engine that answers at once, and how its memory grows with rows.

    python bench/scale.py            # 10,000 and 100,000 rows: half an hour on two cores
    python bench/scale.py --quick    # 500 and 2,000

Each size is a run of its own, `gradeloom graded run` in a process of its own, with the default filters
and judge, ledger and cache; five requests a row. Peak memory is the kernel's high-water mark of
resident memory, of the gradeloom process and of the stand-in server apart.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml

SIZES, QUICK = (10_000, 100_000), (500, 2_000)
WORDS = ("how", "what", "when", "why", "which", "river", "stone", "bread", "engine", "winter", "letter")


@dataclass(frozen=True)
class Measured:
    rows: int
    released: int
    requests: int
    seconds: float
    asking_seconds: float
    peak_mb: float
    server_peak_mb: float
    disk_mb: float


def measure(rows: int, folder: Path) -> Measured:
    """One run of so many rows."""
    config = write_config(rows, folder)
    command = [
        sys.executable,
        "-m",
        "gradeloom.flows.cli",
        "graded",
        "run",
        "--config",
        str(config),
        "--json",
    ]
    began = time.monotonic()
    with (folder / "said.json").open("w") as said, (folder / "progress.txt").open("w") as progress:
        process = subprocess.Popen(command, stdout=said, stderr=progress)
        peak, server_peak = watch(process)
    seconds = time.monotonic() - began
    if process.returncode != 0:
        raise SystemExit((folder / "progress.txt").read_text())
    result: dict[str, Any] = json.loads((folder / "said.json").read_text())
    return Measured(
        rows=rows,
        released=result["accounting"][-1]["kept"],
        requests=result["usage"]["requests_sent"],
        seconds=seconds,
        asking_seconds=result["usage"]["busy_seconds"],
        peak_mb=peak,
        server_peak_mb=server_peak,
        disk_mb=sum(p.stat().st_size for p in folder.rglob("*") if p.is_file()) / 2**20,
    )


def write_config(rows: int, folder: Path) -> Path:
    draw = random.Random(0)
    with (folder / "queries.tsv").open("w") as queries:
        for n in range(rows):
            queries.write(f"{n}\t{' '.join(draw.choices(WORDS, k=6))} {n}\n")
    config = {
        "source": {"path": str(folder / "queries.tsv"), "format": "tsv"},
        "engine": {"kind": "fault", "seed": 1, "window": 64},
        "label": {"policy": "agreed"},
        "run": {"root": str(folder / "runs")},
        "release": {"name": "scale", "root": str(folder / "releases")},
        "cache": {"root": str(folder / "cache")},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return folder / "config.yaml"


def watch(process: subprocess.Popen[bytes]) -> tuple[float, float]:
    """Peak megabytes of a process and of its server, until it ends."""
    peak = server_peak = 0.0
    while process.poll() is None:
        peak = max(peak, high_water_mb(process.pid))
        server_peak = max(server_peak, *map(high_water_mb, servers(process.pid)), 0.0)
        time.sleep(0.1)
    return peak, server_peak


def servers(pid: int) -> list[int]:
    """The fault server below a process; not one that is about to become it, still as large as its parent."""
    found = []
    try:
        for child in psutil.Process(pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                if "gradeloom.tasks.engine.fault_server" in child.cmdline()[:4]:
                    found.append(child.pid)
    except psutil.NoSuchProcess:
        pass
    return found


def high_water_mb(pid: int) -> float:
    """Peak resident memory of a process so far; 0 when it is gone."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    kilobytes = [line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")]
    return int(kilobytes[0]) / 1024 if kilobytes else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--rows", type=int, action="append", help="A size; may be given again.")
    parser.add_argument("--quick", action="store_true", help=f"Sizes {QUICK} instead of {SIZES}.")
    parser.add_argument("--folder", type=Path, help="Where runs and releases go meanwhile.")
    arguments = parser.parse_args()
    print(
        f"{'rows':>8} {'released':>9} {'requests':>9} {'seconds':>8} {'rows/s':>7} {'requests/s':>10} "
        f"{'peak MB':>8} {'server MB':>9} {'disk MB':>8}"
    )
    peaks = []
    for rows in arguments.rows or (QUICK if arguments.quick else SIZES):
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            m = measure(rows, Path(folder))
        peaks.append(m.peak_mb)
        print(
            f"{m.rows:>8,} {m.released:>9,} {m.requests:>9,} {m.seconds:>8.1f} {m.rows / m.seconds:>7.0f} "
            f"{m.requests / m.asking_seconds:>10.0f} {m.peak_mb:>8.0f} {m.server_peak_mb:>9.0f} "
            f"{m.disk_mb:>8.0f}",
            flush=True,
        )
    print(f"peak memory, largest minus smallest: {max(peaks) - min(peaks):.0f} MB")


if __name__ == "__main__":
    main()
