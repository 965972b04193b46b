"""A batch for the list loss, and one of two processes that share it; a module, so that it can be spawned."""

from __future__ import annotations

from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from torch import Tensor

from gradeloom.schemas.retriever import LossTerm
from gradeloom.tasks.train.losses import GradedListLoss

QUERIES = ["what is thing 1?", "what is thing 2?", "about thing 3", "level thing 4"]
LABELS = torch.tensor([[3.0, 2, 1, 0]] * 4)
TERMS = (LossTerm(kind="gaussian"), LossTerm(kind="infonce", weight=0.5))


def passages(query: int) -> list[str]:
    return [f"level {grade} about thing {query}" for grade in (3, 2, 1, 0)]


def features(model: SentenceTransformer, rows: range = range(4)) -> list[dict[str, Any]]:
    columns = [[QUERIES[i] for i in rows], *([passages(i)[k] for i in rows] for k in range(4))]
    return [model.preprocess(column) for column in columns]


def gradients(model: SentenceTransformer) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def one_of_two(rank: int, port: int, folder: str, chunk: int | None, out: str) -> None:
    torch.distributed.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2
    )
    model = SentenceTransformer(folder, device="cpu").train(False)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("pooler" not in name)
    loss = GradedListLoss(model, TERMS, chunk=chunk, gather=True)
    loss.model = torch.nn.parallel.DistributedDataParallel(model)
    rows = range(rank * 2, rank * 2 + 2)
    value = loss(features(model, rows), LABELS[:2])
    value.backward()
    torch.save((value.item(), gradients(model)), f"{out}/{rank}.pt")
    torch.distributed.destroy_process_group()
