"""How fast near-duplicates are found, and that memory does not grow with rows.

    python bench/near_duplicates.py [--quick] [--sizes 5000 20000] [--shard 500]

Every size runs in a process of its own. Texts are random words of a skewed vocabulary; one list in
ten repeats an earlier passage with up to three words changed, so that there are candidates to verify.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path

from gradeloom.schemas.config import NearDuplicatesFilter
from gradeloom.schemas.rows import ListRow, Passage
from gradeloom.tasks.filter.near_duplicates import NearDuplicateIndex

WORDS = 60
GRADES = (3, 2, 1, 0)


def lists(count: int, seed: int = 0) -> Iterator[ListRow]:
    """Random lists; one in ten has a passage of the last thousand lists, up to three words changed."""
    rng = random.Random(seed)
    vocabulary = [f"word{n}" for n in range(20_000)]
    weights = list(accumulate(1 / (n + 10) for n in range(len(vocabulary))))
    recent: list[list[str]] = []
    for n in range(count):
        texts = [rng.choices(vocabulary, cum_weights=weights, k=WORDS) for _ in GRADES]
        if recent and rng.random() < 0.1:
            texts[0] = list(rng.choice(recent))
            for _ in range(rng.randint(0, 3)):
                texts[0][rng.randrange(WORDS)] = rng.choice(vocabulary)
        recent = [*recent[-999:], texts[0]]
        passages = [Passage(grade=g, text=" ".join(t)) for g, t in zip(GRADES, texts, strict=True)]
        yield ListRow(id=str(n), ordinal=n, query_id=f"q{n}", query=f"query {n}", passages=passages)


def shards(rows: Iterator[ListRow], size: int) -> Iterator[list[ListRow]]:
    shard: list[ListRow] = []
    for row in rows:
        shard.append(row)
        if len(shard) == size:
            yield shard
            shard = []
    if shard:
        yield shard


def measure(count: int, shard: int) -> dict[str, float]:
    """One size, in this process: seconds are those spent in `decide` alone."""
    seconds, dropped = 0.0, 0
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "index.sqlite"
        with NearDuplicateIndex(path, NearDuplicatesFilter()) as index:
            for n, rows in enumerate(shards(lists(count), shard)):
                started = time.perf_counter()
                decisions = index.decide(f"{n:06d}", rows)
                seconds += time.perf_counter() - started
                dropped += sum(decision.status == "rejected" for decision in decisions)
        size = path.stat().st_size
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {
        "lists": count,
        "dropped": dropped,
        "seconds": round(seconds, 1),
        "lists/s": round(count / seconds),
        "peak MB": round(peak),
        "index MB": round(size / 1e6),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="two small sizes, seconds")
    parser.add_argument("--sizes", type=int, nargs="+", default=[5_000, 20_000], metavar="LISTS")
    parser.add_argument("--shard", type=int, default=500, metavar="LISTS")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.one:
        print(json.dumps(measure(options.one, options.shard)))
        return
    sizes = [500, 2_000] if options.quick else options.sizes
    for n, size in enumerate(sizes):
        command = [sys.executable, __file__, "--one", str(size), "--shard", str(options.shard)]
        row = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        if n == 0:
            print("  ".join(f"{name:>9}" for name in row))
        print("  ".join(f"{value:>9}" for value in row.values()), flush=True)


if __name__ == "__main__":
    main()
