"""The losses as sentence-transformers' trainer calls them."""

from __future__ import annotations

import math
import socket
from pathlib import Path

import pytest
import torch
from sentence_transformers import SentenceTransformer
from tiny_encoder import make_tiny_encoder
from torch import Tensor
from two_processes import LABELS, QUERIES, TERMS, features, gradients, one_of_two, passages

from gradeloom.schemas.retriever import LossTerm
from gradeloom.tasks.train.losses import GradedListLoss, gaussian_wasserstein, taking_part


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_encoder(tmp_path_factory.mktemp("encoder"))


@pytest.fixture
def model(folder: Path) -> SentenceTransformer:
    return SentenceTransformer(str(folder), device="cpu").train(False)


def backward(
    model: SentenceTransformer, loss: GradedListLoss, labels: Tensor = LABELS
) -> tuple[float, Tensor]:
    model.zero_grad()
    value = loss(features(model), labels)
    value.backward()
    return value.item(), gradients(model)


def test_it_is_the_function_of_the_cosines(model: SentenceTransformer) -> None:
    q = torch.tensor(model.encode(QUERIES))
    p = torch.tensor(model.encode([text for i in range(4) for text in passages(i)]))
    expected = gaussian_wasserstein(q @ p.T, LABELS, 0.05, LossTerm().label_temperature).item()
    loss = GradedListLoss(model, [LossTerm(kind="gaussian")])
    assert loss(features(model), LABELS).item() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_cached_gradients_are_the_gradients(model: SentenceTransformer, chunk: int) -> None:
    plain, expected = backward(model, GradedListLoss(model, TERMS))
    value, found = backward(model, GradedListLoss(model, TERMS, chunk=chunk))
    assert value == pytest.approx(plain, abs=1e-5)
    assert (found - expected).abs().max() < 1e-5
    assert expected.abs().max() > 1e-3


def test_dropout_is_the_same_in_both_passes(model: SentenceTransformer) -> None:
    """With one chunk, the cached loss draws the same dropout as the plain one."""
    model.train()
    torch.manual_seed(1)
    plain, expected = backward(model, GradedListLoss(model, TERMS))
    torch.manual_seed(1)
    value, found = backward(model, GradedListLoss(model, TERMS, chunk=100))
    assert value == pytest.approx(plain, abs=1e-5)
    assert (found - expected).abs().max() < 1e-5


def test_labels_must_be_a_list_a_query(model: SentenceTransformer) -> None:
    with pytest.raises(ValueError, match=r"labels of shape \(4,\) for 4 passage columns"):
        GradedListLoss(model)(features(model), torch.ones(4))


def test_an_absent_passage_does_not_matter(model: SentenceTransformer) -> None:
    labels = LABELS.clone()
    labels[1, 2] = math.nan
    loss = GradedListLoss(model, TERMS)
    columns = features(model)
    other = features(model)
    texts = [passages(i)[2] if i != 1 else "something else" for i in range(4)]
    other[3] = model.preprocess(texts)
    assert loss(columns, labels).item() == pytest.approx(loss(other, labels).item(), abs=1e-6)


def test_who_takes_part() -> None:
    """Query 1's second passage is query 0's first; query 2 is query 0 again; query 1's first is absent."""
    labels = torch.tensor([[1.0, 0.0], [math.nan, 1.0], [1.0, 0.0]])
    texts = torch.tensor([[10, 1, 2], [20, 9, 1], [10, 3, 4]])
    assert taking_part(labels, texts).int().tolist() == [
        [1, 1, 0, 0, 0, 0],  # not its own first once more, nor what belongs to the same query
        [0, 1, 0, 1, 1, 1],  # not query 0's copy of its own passage
        [0, 0, 0, 1, 1, 1],
    ]


# --- several devices ----------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [None, 2])
def test_two_processes_are_one(
    model: SentenceTransformer, folder: Path, tmp_path: Path, chunk: int | None
) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("pooler" not in name)
    value, expected = backward(model, GradedListLoss(model, TERMS))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(
        one_of_two, (port, str(folder), chunk, str(tmp_path)), nprocs=2, start_method="spawn"
    )
    for rank in range(2):
        found, averaged = torch.load(tmp_path / f"{rank}.pt")
        assert found == pytest.approx(value, abs=1e-5)
        assert (averaged - expected).abs().max() < 1e-5
