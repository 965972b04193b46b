"""A tiny retriever and a tiny collection, for tests of the retriever's flows and commands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml
from tiny_encoder import make_tiny_encoder

QUERIES = 16


def make_place(folder: Path) -> Path:
    """`encoder/`, a BEIR folder `things/` with qrels train and test, and `tiny.yaml` that trains on it.

    Queries t0..t7 are for training, t8..t15 for testing; each has passages of grades 3 to 0.
    """
    make_tiny_encoder(folder / "encoder")
    things = folder / "things"
    (things / "qrels").mkdir(parents=True)
    corpus, queries = [], []
    qrels: dict[str, list[str]] = {"train": [], "test": []}
    for n in range(QUERIES):
        queries.append({"_id": f"t{n}", "text": f"what is thing {n}?"})
        for grade in range(4):
            corpus.append({"_id": f"t{n}-{grade}", "title": "", "text": f"level {grade} about thing {n}"})
            qrels["train" if n < QUERIES // 2 else "test"].append(f"t{n}\tt{n}-{grade}\t{grade}")
    for name, rows in (("corpus", corpus), ("queries", queries)):
        (things / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for split, lines in qrels.items():
        text = "\n".join(["query-id\tcorpus-id\tscore", *lines]) + "\n"
        (things / "qrels" / f"{split}.tsv").write_text(text)
    (folder / "tiny.yaml").write_text(yaml.safe_dump(tiny_config()))
    return folder


def tiny_config() -> dict[str, Any]:
    """Four steps of two queries each, an evaluation every two."""
    test = {"path": "things", "split": "test"}
    return {
        "name": "tiny",
        "encoder": {"model": "encoder", "query_tokens": 16, "passage_tokens": 16, "device": "cpu"},
        "data": [{"name": "things", "path": "things", "split": "train"}],
        "training": {
            "batch_size": 2,
            "max_steps": 4,
            "learning_rate": 0.01,
            "eval_steps": 2,
            "save_steps": 2,
        },
        "dev": {"name": "dev", **test},
        "sets": [{"name": "things", **test}],
        "measures": {"measures": ["nDCG@10", "MRR@10"], "permutations": 200},
    }
