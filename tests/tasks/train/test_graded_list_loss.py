"""The losses as sentence-transformers' trainer calls them."""

from __future__ import annotations

import math
from itertools import product
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer
from sentence_transformers.sentence_transformer.modules import StaticEmbedding
from sentence_transformers.sentence_transformer.training_args import SentenceTransformerTrainingArguments
from tiny_encoder import make_tiny_encoder
from torch import Tensor
from two_processes import (
    CHUNKS,
    LABELS,
    QUERIES,
    SHARED_LABELS,
    TERMS,
    features,
    gradients,
    one_of_two,
    passages,
    shared,
)

from gradeloom.schemas.errors import InputError
from gradeloom.schemas.retriever import LossTerm
from gradeloom.tasks.train.in_batch import taking_part, text_digests
from gradeloom.tasks.train.losses import GradedListLoss, aligned, gaussian_wasserstein


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


def test_dot_products_have_temperature_1(tmp_path: Path) -> None:
    model = SentenceTransformer(str(make_tiny_encoder(tmp_path, normalize=False)), device="cpu").eval()
    q = torch.tensor(model.encode(QUERIES))
    p = torch.tensor(model.encode([text for i in range(4) for text in passages(i)]))
    expected = aligned(q @ p.T, LABELS, 1.0, LossTerm().label_temperature).item()
    assert GradedListLoss(model)(features(model), LABELS).item() == pytest.approx(expected, abs=1e-5)


def test_other_similarities_are_refused(model: SentenceTransformer) -> None:
    model.similarity_fn_name = "euclidean"
    with pytest.raises(InputError, match="scores by euclidean; expected cosine or dot product"):
        GradedListLoss(model)


def test_static_embeddings(tmp_path: Path, model: SentenceTransformer) -> None:
    """Their batches are no matrix: compared all the same, but not cut into chunks."""
    static = StaticEmbedding(model.tokenizer.backend_tokenizer, embedding_dim=8)
    bags = SentenceTransformer(modules=[static], device="cpu")
    loss = GradedListLoss(bags, TERMS)(features(bags), LABELS)
    loss.backward()
    assert gradients(bags).isfinite().all()
    with pytest.raises(InputError, match="cannot be cut into chunks"):
        GradedListLoss(bags, TERMS, chunk=2)


def test_mixed_precision_does_not_reach_the_scores(model: SentenceTransformer) -> None:
    loss = GradedListLoss(model, TERMS)
    columns = [[model(feature)["sentence_embedding"].detach()] for feature in features(model)]
    said = (LABELS, torch.arange(20).reshape(4, 5))
    plain = loss.calculate_loss(columns, said).item()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert loss.calculate_loss(columns, said).item() == plain


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


def test_a_text_is_not_another_querys_passage_to_its_own_query(model: SentenceTransformer) -> None:
    """Query 0's best passage once more, in query 1's list, where it is irrelevant: as if it were absent to
    query 0, and a passage like any other to the rest, to whom it counts once."""
    columns = features(model)
    columns[4] = model.preprocess([passages(i)[3] if i != 1 else passages(0)[0] for i in range(4)])
    q = torch.tensor(model.encode(QUERIES))
    texts = [text for i in range(4) for text in passages(i)]
    texts[7] = texts[0]
    p = torch.tensor(model.encode(texts))
    mask = torch.ones(4, 16, dtype=torch.bool)
    mask[0, 7] = False  # known
    mask[2:, 7] = False  # once is enough: column 0
    mask[1, 0] = False  # known
    expected = aligned(q @ p.T, LABELS, 0.05, LossTerm().label_temperature, mask).item()
    assert GradedListLoss(model)(columns, LABELS).item() == pytest.approx(expected, abs=1e-5)


def test_who_takes_part() -> None:
    """Query 1's second passage is query 0's first; query 2 is query 0 again; query 1's first is absent; query
    3 has one of its own and one of query 2's."""
    nan = math.nan
    labels = torch.tensor([[1.0, 0.0], [nan, 1.0], [1.0, 0.0], [1.0, 0.0]])
    texts = torch.tensor([[10, 1, 2], [20, 9, 1], [10, 3, 4], [30, 9, 4]])
    assert taking_part(labels, texts).int().tolist() == [
        [1, 1, 0, 0, 0, 0, 1, 0],  # not its own first once more, nor what belongs to the same query
        [0, 1, 0, 1, 1, 1, 1, 0],  # not query 0's copy of its own passage; text 4 once
        [0, 0, 0, 0, 1, 1, 1, 0],  # text 1 is known to the same query
        [1, 1, 0, 0, 1, 0, 1, 1],  # text 1 once; text 9 stands for itself, its absent copy for nothing
    ]


def test_texts_are_compared_by_their_tokens() -> None:
    """However they are padded or packed; what is more than text is not compared."""
    right = {
        "input_ids": torch.tensor([[5, 6, 0], [5, 7, 8]]),
        "attention_mask": torch.tensor([[1, 1, 0], [1, 1, 1]]),
    }
    left = {
        "input_ids": torch.tensor([[9, 9, 5, 6], [9, 5, 7, 8]]),
        "attention_mask": torch.tensor([[0, 0, 1, 1], [0, 1, 1, 1]]),
    }
    packed = {"input_ids": torch.tensor([[5, 6, 5, 7, 8]]), "cu_seq_lens_q": torch.tensor([0, 2, 5])}
    bags = {"input_ids": torch.tensor([5, 6, 5, 7, 8]), "offsets": torch.tensor([0, 2])}
    found = [text_digests(feature).tolist() for feature in (right, left, packed, bags)]
    assert found == [found[0]] * 4
    assert found[0][0] != found[0][1]
    images = {**left, "pixel_values": torch.zeros(2, 3, 4, 4)}
    numbers = [number for column in range(2) for number in text_digests(images, column).tolist()]
    assert len(set(numbers + found[0])) == 6


# --- as others use it ---------------------------------------------------------------------------


def test_it_trains_in_sentence_transformers_own_trainer(model: SentenceTransformer, tmp_path: Path) -> None:
    """Lists of different length, and a card that says what it was trained with."""
    columns = {f"passage_{k}": [passages(i)[k] for i in range(4)] for k in range(4)}
    labels = [[3.0, 2.0, 1.0, 0.0]] * 3 + [[3.0, 1.0, math.nan, math.nan]]
    before = weights(model)
    SentenceTransformerTrainer(
        model=model,
        args=SentenceTransformerTrainingArguments(
            output_dir=str(tmp_path), max_steps=2, per_device_train_batch_size=4, learning_rate=1e-3,
            use_cpu=True, report_to="none", save_strategy="no", disable_tqdm=True,
        ),
        train_dataset=Dataset.from_dict({"query": QUERIES, **columns, "label": labels}),
        loss=GradedListLoss(model, TERMS, chunk=3),
    ).train()  # fmt: skip
    assert (weights(model) - before).abs().max() > 1e-4
    assert weights(model).isfinite().all()
    model.save_pretrained(str(tmp_path / "model"))
    card = (tmp_path / "model" / "README.md").read_text("utf-8")
    for said in ("GradedListLoss", '"kind": "infonce"', '"chunk": 3', "esfandiarpoor-etal-2025", "gao2021"):
        assert said in card


def weights(model: SentenceTransformer) -> Tensor:
    """All weights in one vector."""
    return torch.cat([parameter.detach().flatten().clone() for parameter in model.parameters()])


# --- several devices ----------------------------------------------------------------------------


def test_two_processes_are_one(model: SentenceTransformer, folder: Path, tmp_path: Path) -> None:
    """Plain and cached; the second process's list has an absent passage and a text of the first's."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("pooler" not in name)
    model.zero_grad()
    value = GradedListLoss(model, TERMS)(shared(model), SHARED_LABELS)
    value.backward()
    torch.multiprocessing.spawn(one_of_two, (str(folder), str(tmp_path)), nprocs=2)
    for rank, chunk in product(range(2), CHUNKS):
        found, averaged = torch.load(tmp_path / f"{rank}-{chunk}.pt")
        assert found == pytest.approx(value.item(), abs=1e-5)
        assert (averaged - gradients(model)).abs().max() < 1e-5
    assert gradients(model).abs().max() > 1e-3
