"""One of several training processes: `python -m torch.distributed.run … -m gradeloom.flows.rank JOB FOLDER`.

Started by `gradeloom retriever train --processes N`; JOB is the configuration as JSON.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from gradeloom.flows.options import say
from gradeloom.flows.progress import Progress, following
from gradeloom.flows.retriever import read_material, train_here
from gradeloom.schemas.errors import GradeloomError
from gradeloom.schemas.retriever import RetrieverConfig
from gradeloom.tasks.encoder import load_encoder


def main(job: str, folder: str) -> int:
    """Train as one of the processes; the first one speaks."""
    first = os.environ.get("RANK", "0") == "0"
    config = RetrieverConfig.model_validate_json(Path(job).read_bytes())
    try:
        with Progress(bars=False, quiet=not first) as progress:
            report = following(progress, "train", "steps")
            train_here(config, read_material(config), Path(folder), load_encoder(config.encoder), report)
    except GradeloomError as error:
        if first:
            say(f"gradeloom: error: {error}")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
