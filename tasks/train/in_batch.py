"""Which passages of a batch take part for which query: all but those that would count wrongly."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b
from typing import Any

import torch
from sentence_transformers.base.losses.gradcache import _get_batch_size
from sentence_transformers.util import get_rank
from torch import Tensor


def own_lists(queries: int, passages: int, device: torch.device | None = None) -> Tensor:
    """Which of N passages are a query's own: (B, N), true on the diagonal blocks of K = N / B."""
    return torch.eye(queries, dtype=torch.bool, device=device).repeat_interleave(passages // queries, dim=1)


def taking_part(labels: Tensor, texts: Tensor) -> Tensor:
    """Which passages of a batch take part for which query: (B, B * K).

    A query's own passages, and of the others, which are irrelevant to it as far as is known, those that are

    - present,
    - not in the list of the same query standing twice, nor the text of a passage in any list of this query,
    - not the text of an earlier one, so that every text counts once.

    Args:
        labels: (B, K), NaN for an absent passage.
        texts: (B, 1 + K) digests of the query's text and of its passages'.
    """
    queries, width = labels.shape
    there = ~labels.isnan().flatten()
    own = own_lists(queries, queries * width, labels.device)
    of_query = (texts[:, :1] == texts[:, 0]).repeat_interleave(width, dim=1)
    # Texts by number, the absent ones being one more, that nothing is compared with.
    number = torch.unique(texts[:, 1:].flatten(), return_inverse=True)[1]
    number = number.masked_fill(~there, queries * width)
    place = torch.arange(len(number), device=number.device)
    first = place.new_full((len(number) + 1,), len(number))
    first = first.scatter_reduce(0, number, place, "amin")
    knows = torch.zeros(queries, len(number) + 1, dtype=torch.long, device=number.device)
    known = knows.scatter_add(1, number.expand(queries, -1), of_query.long())[:, number] > 0
    return there & (own | ~(known | of_query) & (first[number] == place))


def text_digests(feature: dict[str, Any], column: int = 0) -> Tensor:
    """A number for every text of a batch, the same for the same tokens however they are padded: (B,) int64.

    What is not text alone, images say, is not compared: every number is another one.

    Args:
        feature: what the model gets for one column: padded, in one row (flash attention), or as a bag of
            tokens (static embeddings).
        column: which of the batch's; keeps what is not compared apart.
    """
    tensors = [value for value in feature.values() if isinstance(value, Tensor)]
    if "input_ids" not in feature or any(value.is_floating_point() for value in tensors):
        size = len(feature["offsets"]) if "offsets" in feature else _get_batch_size(feature)
        rows = [f"{get_rank()} {column} {row}".encode() for row in range(size)]
        return torch.tensor([_number(row) for row in rows], device=tensors[0].device)
    ids = feature["input_ids"].cpu()
    if "cu_seq_lens_q" in feature:
        texts: Iterable[Tensor] = ids.flatten().tensor_split(feature["cu_seq_lens_q"].cpu().long()[1:-1])
    elif "offsets" in feature:
        texts = ids.tensor_split(feature["offsets"].cpu()[1:])
    elif "attention_mask" in feature:
        there = feature["attention_mask"].cpu().bool()
        texts = (row[inside] for row, inside in zip(ids, there, strict=True))
    else:
        texts = ids
    numbers = [_number(text.long().numpy().tobytes()) for text in texts]
    return torch.tensor(numbers, device=feature["input_ids"].device)


def _number(content: bytes) -> int:
    return int.from_bytes(blake2b(content, digest_size=8).digest(), "little", signed=True)
