"""The retriever benchmark takes layers out of models: what is left must say the same, and learn the same."""

from __future__ import annotations

from pathlib import Path

import torch
from cached_layers import cache_lower_layers, fill
from sentence_transformers import SentenceTransformer
from tiny_encoder import make_tiny_encoder

TEXTS = ["what is thing 1?", "level 3 about thing 1", "a passage", "the query of the passage and the thing"]


def embeddings(model: SentenceTransformer) -> torch.Tensor:
    return model(model.preprocess(TEXTS))["sentence_embedding"]


def test_a_model_with_cached_layers_says_and_learns_what_the_whole_one_does(tmp_path: Path) -> None:
    make_tiny_encoder(tmp_path / "encoder")
    whole, cut = (SentenceTransformer(str(tmp_path / "encoder"), device="cpu").eval() for _ in range(2))
    cache_lower_layers(cut, 1, tmp_path / "states")
    computed = embeddings(cut).detach()  # nothing is stored yet
    fill(cut, "texts", TEXTS[:3], tokens=64)
    cache_lower = cut[0].model.embeddings
    assert len(cache_lower._cache._where) == 3
    expected = embeddings(whole)
    assert torch.allclose(computed, expected, atol=1e-6)
    fill(cut, "rest", TEXTS, tokens=64)  # the fourth alone is new
    found = embeddings(cut)
    assert torch.allclose(found, expected, atol=1e-6)
    (found @ found.T).sum().backward()
    (expected @ expected.T).sum().backward()
    upper = dict(whole[0].model.encoder.layer[1].named_parameters())
    for name, parameter in cut[0].model.encoder.layer[0].named_parameters():
        assert torch.allclose(parameter.grad, upper[name].grad, atol=1e-5), name


def test_half_a_file_of_states_is_not_read(tmp_path: Path) -> None:
    make_tiny_encoder(tmp_path / "encoder")
    model = SentenceTransformer(str(tmp_path / "encoder"), device="cpu").eval()
    expected = embeddings(model)
    (tmp_path / "states").mkdir()
    (tmp_path / "states" / "texts.f32").write_bytes(b"half")
    cache_lower_layers(model, 1, tmp_path / "states")
    assert torch.allclose(embeddings(model), expected, atol=1e-6)
    fill(model, "texts", TEXTS, tokens=64)
    assert torch.allclose(embeddings(model), expected, atol=1e-6)
