"""A batch for the list loss, and one of two processes that share it; a module, so that it can be spawned."""

from __future__ import annotations

import gc
from datetime import timedelta
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from torch import Tensor

from gradeloom.schemas.retriever import LossTerm
from gradeloom.tasks.train.losses import GradedListLoss

QUERIES = ["what is thing 1?", "what is thing 2?", "about thing 3", "level thing 4"]
LABELS = torch.tensor([[3.0, 2, 1, 0]] * 4)
SHARED_LABELS = torch.tensor([[3.0, 2, 1, 0]] * 3 + [[3.0, 2, 1, torch.nan]])
CHUNKS = (None, 1)
TERMS = (LossTerm(kind="gaussian"), LossTerm(kind="infonce", weight=0.5))


def passages(query: int) -> list[str]:
    return [f"level {grade} about thing {query}" for grade in (3, 2, 1, 0)]


def features(model: SentenceTransformer, rows: range = range(4)) -> list[dict[str, Any]]:
    columns = [[QUERIES[i] for i in rows], *([passages(i)[k] for i in rows] for k in range(4))]
    return [model.preprocess(column) for column in columns]


def shared(model: SentenceTransformer, rows: range = range(4)) -> list[dict[str, Any]]:
    """With query 0's first passage once more as query 3's second."""
    columns = features(model, rows)
    columns[2] = model.preprocess([passages(i)[1] if i != 3 else passages(0)[0] for i in rows])
    return columns


def gradients(model: SentenceTransformer) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def one_of_two(rank: int, folder: str, out: str) -> None:
    """Writes loss and averaged gradients of every kind of chunks."""
    torch.set_num_threads(1)
    # They meet by a file: a port that was free a moment ago may be somebody else's now.
    meeting = f"file://{out}/meeting"
    torch.distributed.init_process_group(
        "gloo", init_method=meeting, rank=rank, world_size=2, timeout=timedelta(seconds=120)
    )
    try:
        _share(rank, folder, out)
    finally:
        gc.collect()  # what DDP holds goes before its group: the other way round it can wait for ever
        torch.distributed.destroy_process_group()


def _share(rank: int, folder: str, out: str) -> None:
    model = SentenceTransformer(folder, device="cpu").train(False)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("pooler" not in name)
    rows = range(rank * 2, rank * 2 + 2)
    for chunk in CHUNKS:
        loss = GradedListLoss(model, TERMS, chunk=chunk, gather=True)
        loss.model = torch.nn.parallel.DistributedDataParallel(model)
        model.zero_grad()
        value = loss(shared(model, rows), SHARED_LABELS[rows.start : rows.stop])
        value.backward()
        torch.save((value.item(), gradients(model)), f"{out}/{rank}-{chunk}.pt")
