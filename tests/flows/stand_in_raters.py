"""Two raters for tests and for the worked example in docs/audit.md: a seeded program, not people."""

from __future__ import annotations

import csv
import random
from pathlib import Path

import orjson

# What a passage of a released grade really is, in per cent: 3, 2, 1, 0.
TRUTH = {3: (90, 10, 0, 0), 2: (15, 55, 30, 0), 1: (0, 15, 60, 25), 0: (0, 0, 5, 95)}


def fill(folder: Path, *, raters: int = 2, careful: int = 85) -> None:
    """Fill in the CSV sheets of a sample. A rater sees the truth `careful` times of 100, else one off."""
    key = orjson.loads((folder / "key.json").read_bytes())
    released = {item["item"]: key["groups"][item["group"]]["grade"] for item in key["items"]}
    passages = {item["item"]: item["passage_id"] for item in key["items"]}
    for rater in range(1, raters + 1):
        path = folder / f"rater-{rater}.csv"
        with path.open(encoding="utf-8-sig", newline="") as f:
            rows = list(csv.DictReader(f))
        for row in rows:
            passage = passages[row["item"]]
            truth = random.Random(passage).choices((3, 2, 1, 0), TRUTH[released[row["item"]]])[0]
            own = random.Random(f"{rater} {passage}")
            seen = truth if own.random() * 100 < careful else truth + own.choice((-1, 1))
            row["grade"] = str(min(max(seen, 0), 3))
        with path.open("w", encoding="utf-8-sig", newline="") as f:
            writer = csv.DictWriter(f, rows[0].keys())
            writer.writeheader()
            writer.writerows(rows)
