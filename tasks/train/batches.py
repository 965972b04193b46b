"""Batches of lists: which lists stand in one, and how their texts become tensors."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from datasets import Dataset
from sentence_transformers.base.modules import Router
from sentence_transformers.base.sampler import DefaultBatchSampler
from sentence_transformers.sentence_transformer.data_collator import SentenceTransformerDataCollator

from gradeloom.tasks.encoder import Encoder, cut_after

QUERY, LABEL = "query", "label"
"""Columns of the training data; all others are passages."""


class DistinctQueries(DefaultBatchSampler):
    """Batches in a seeded order, none with a query twice as long as there are others to take its place.

    The order is a function of (seed, epoch, data, queries per step) alone. Of a query with several lists
    the surplus waits for the next batch, before lists not yet drawn; only what is left when nothing else
    is may share a batch.

    Args:
        dataset: with a column `query`.
        batch_size: queries per batch.
        drop_last: leave out a last batch that is not full.
        valid_label_columns, generator: not used.
        seed: of the order.
        devices: so many batches in a row make one step, and are distinct together.
    """

    def __init__(
        self,
        dataset: Dataset,
        batch_size: int,
        drop_last: bool,
        valid_label_columns: list[str] | None = None,
        generator: torch.Generator | None = None,
        seed: int = 0,
        devices: int = 1,
    ) -> None:
        super().__init__(dataset, batch_size, drop_last, valid_label_columns, generator, seed)
        known: dict[str, int] = {}
        self.queries = [known.setdefault(text, len(known)) for text in dataset[QUERY]]
        self.devices = devices

    def __len__(self) -> int:
        full, rest = divmod(len(self.queries), self.batch_size)
        return full + (rest > 0 and not self.drop_last)

    def __iter__(self) -> Iterator[list[int]]:
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        order = torch.randperm(len(self.queries), generator=generator).tolist()
        for step in distinct_groups(order, self.queries, self.batch_size * self.devices):
            for start in range(0, len(step), self.batch_size):
                batch = step[start : start + self.batch_size]
                if len(batch) == self.batch_size or not self.drop_last:
                    yield batch


def distinct_groups(order: Sequence[int], keys: Sequence[int], size: int) -> Iterator[list[int]]:
    """Cut an order into groups of `size` (the last may be smaller) with no key twice, where possible.

    Args:
        order: indices.
        keys: of every index.
        size: of a group.
    """
    waiting: OrderedDict[int, deque[int]] = OrderedDict()
    drawn = iter(order)
    left = len(order)
    while left:
        group: list[int] = []
        taken: set[int] = set()
        for key in list(waiting)[:size]:
            group.append(waiting[key].popleft())
            taken.add(key)
            if not waiting[key]:
                del waiting[key]
        while len(group) < size and (index := next(drawn, None)) is not None:
            if keys[index] in taken:
                waiting.setdefault(keys[index], deque()).append(index)
            else:
                group.append(index)
                taken.add(keys[index])
        while len(group) < size and waiting:  # nothing else is left: a query may stand twice
            key, queue = next(iter(waiting.items()))
            group.append(queue.popleft())
            if not queue:
                del waiting[key]
        left -= len(group)
        yield group


class ListCollator(SentenceTransformerDataCollator):
    """Tokenizes queries as queries and passages as passages: the prompts and the limits of `text_limits`.

    An absent passage is an empty text: it is padded to the longest of its column and costs no more.
    """

    def __init__(self, encoder: Encoder, passages: int) -> None:
        columns = [f"passage_{k}" for k in range(passages)]
        super().__init__(
            preprocess_fn=encoder.model.preprocess,
            valid_label_columns=[LABEL],
            router_mapping={QUERY: "query"} | dict.fromkeys(columns, "document"),
            prompts={QUERY: encoder.query_prompt} | dict.fromkeys(columns, encoder.passage_prompt),
        )
        self._routed = any(isinstance(module, Router) for module in encoder.model.modules())

    def __call__(self, features: list[dict[str, Any]]) -> dict[str, Any]:
        batch = super().__call__(features)
        if self._routed:
            return batch
        return {key: value for key, value in batch.items() if not key.endswith("_task")}


@contextmanager
def text_limits(encoder: Encoder) -> Iterator[None]:
    """Queries and passages are cut where the encoder's configuration says, in training and evaluation alike.

    Also sets the model's prompts, which stay: a trained model is used as it was trained.
    """
    model, config = encoder.model, encoder.config
    model.prompts = {
        **model.prompts,
        "query": encoder.query_prompt,
        "document": encoder.passage_prompt,
    }
    longest = max(config.query_tokens, config.passage_tokens)
    with cut_after(model, longest):
        # Of their own for the two sides; a first module without them knows one limit alone.
        modules: list[Any] = [module for module in model.modules() if hasattr(module, "query_length")]
        before = [(module.query_length, module.document_length) for module in modules]
        limit = model.max_seq_length or longest
        for module in modules:
            module.query_length = min(config.query_tokens, limit)
            module.document_length = min(config.passage_tokens, limit)
        try:
            yield
        finally:
            for module, (query, document) in zip(modules, before, strict=True):
                module.query_length, module.document_length = query, document
