"""Lower transformer layers computed once per text: training and search that leave them alone run faster.

Every cell of the retriever benchmark freezes the embeddings and the lower layers, so their output for a
text is always the same. `cache_lower_layers` takes them out of a BERT-like sentence-transformers model
and puts a lookup in their place; the model's interface (token ids in, embeddings out) does not change, so
the product's own training and search run on it. Lower layers have no dropout in this form.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer
from torch import nn

Key = bytes


def _key(ids: NDArray[np.int64]) -> Key:
    return blake2b(ids.astype(np.int32).tobytes(), digest_size=16).digest()


class HiddenStates:
    """Token states of many texts in one file, found by the text's token ids."""

    def __init__(self, folder: Path, width: int):
        self._width = width
        self._where: dict[Key, tuple[int, int, int]] = {}  # key -> file, first row, rows
        self._files: list[NDArray[np.float32]] = []
        for index in sorted(folder.glob("*.json")):
            self._open(index)
        self.folder = folder

    def _open(self, index: Path) -> None:
        start = 0
        for key, rows in json.loads(index.read_text("utf-8")):
            self._where[bytes.fromhex(key)] = (len(self._files), start, rows)
            start += rows
        data = np.memmap(index.with_suffix(".f32"), np.float32, "r", shape=(start, self._width))
        self._files.append(data)

    def __contains__(self, key: Key) -> bool:
        return key in self._where

    def __getitem__(self, key: Key) -> NDArray[np.float32]:
        file, start, rows = self._where[key]
        return self._files[file][start : start + rows]

    def add(self, name: str, states: Iterable[tuple[Key, NDArray[np.float32]]]) -> None:
        """Writes a file of states; its index comes last, so that half a file is never read."""
        self.folder.mkdir(parents=True, exist_ok=True)
        entries: list[tuple[str, int]] = []
        with (self.folder / f"{name}.f32").open("wb") as out:
            for key, rows in states:
                out.write(np.ascontiguousarray(rows, np.float32).tobytes())
                entries.append((key.hex(), len(rows)))
        index = self.folder / f"{name}.json"
        index.with_suffix(".tmp").write_text(json.dumps(entries), "utf-8")
        index.with_suffix(".tmp").rename(index)
        self._open(index)


class _Lookup(nn.Module):
    """Stands where `embeddings` stood and returns what the lower layers would."""

    def __init__(self, cache: HiddenStates, lower: Callable[..., torch.Tensor], pad: int):
        super().__init__()
        self._cache = cache
        self._lower = lower  # a closure, not a module: no weights of it are trained or saved
        self._pad = pad

    def forward(self, input_ids: torch.Tensor, **_: Any) -> torch.Tensor:
        ids = input_ids.numpy()
        lengths = (ids != self._pad).sum(1)
        keys = [_key(row[:n]) for row, n in zip(ids, lengths, strict=True)]
        if not all(key in self._cache for key in keys):
            return self._lower(input_ids)
        out = torch.zeros(*ids.shape, self._cache._width)
        for i, key in enumerate(keys):
            states = self._cache[key]
            out[i, : len(states)] = torch.from_numpy(np.array(states))
        return out


def cache_lower_layers(model: SentenceTransformer, layers: int, folder: Path) -> None:
    """Takes the embeddings and the lower `layers` out of the model; their output comes from `folder`.

    Texts that are not in the folder are computed as before.
    """
    bert = model[0].model
    embeddings, lower = bert.embeddings.eval(), list(bert.encoder.layer[:layers].eval())
    pad = int(model.tokenizer.pad_token_id)

    @torch.no_grad()
    def compute(input_ids: torch.Tensor) -> torch.Tensor:
        states = embeddings(input_ids=input_ids)
        mask = bert._create_attention_masks(
            attention_mask=(input_ids != pad).long(),
            encoder_attention_mask=None,
            embedding_output=states,
            encoder_hidden_states=None,
            cache=None,
        )[0]
        for layer in lower:
            states = layer(states, mask)
        return states

    bert.embeddings = _Lookup(HiddenStates(folder, bert.config.hidden_size), compute, pad)
    bert.encoder.layer = bert.encoder.layer[layers:]


def fill(
    model: SentenceTransformer, name: str, texts: Sequence[str], tokens: int, batch_size: int = 32
) -> None:
    """Computes and stores the lower layers' output of texts cut after so many tokens, under a name."""
    lookup = model[0].model.embeddings
    cache: HiddenStates = lookup._cache
    if (cache.folder / f"{name}.json").exists():
        return
    encoded = model.tokenizer(list(texts), truncation=True, max_length=tokens)["input_ids"]
    todo = {}
    for ids in encoded:
        todo.setdefault(_key(np.asarray(ids)), ids)
    ordered = sorted((item for item in todo.items() if item[0] not in cache), key=lambda i: -len(i[1]))

    def states() -> Iterable[tuple[Key, NDArray[np.float32]]]:
        for at in range(0, len(ordered), batch_size):
            part = ordered[at : at + batch_size]
            width = max(len(ids) for _, ids in part)
            padded = torch.tensor([ids + [lookup._pad] * (width - len(ids)) for _, ids in part])
            hidden = lookup._lower(padded).numpy()
            for (key, ids), rows in zip(part, hidden, strict=True):
                yield key, rows[: len(ids)]

    cache.add(name, states())
