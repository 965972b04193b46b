"""What a training does on its way: steps, evaluations, checkpoints, and what stops it."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig as PeftLora
from peft import get_peft_model
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.evaluation import SentenceEvaluator
from sentence_transformers.sentence_transformer.modules import BoW
from tiny_encoder import make_tiny_encoder
from transformers import AutoModel

from gradeloom.schemas.errors import InputError
from gradeloom.schemas.retriever import (
    EncoderConfig,
    LoraConfig,
    RetrieverConfig,
    TrainingConfig,
    TrainingSource,
)
from gradeloom.tasks.collection import Collection
from gradeloom.tasks.encoder import load_encoder
from gradeloom.tasks.run import RunDirectory
from gradeloom.tasks.train.adapt import merge_adapters, prepare_model
from gradeloom.tasks.train.graded_qrels import TrainingLists, mix
from gradeloom.tasks.train.retriever import Trained, total_steps, train_retriever

SETTINGS = TrainingConfig(batch_size=4, max_steps=5, learning_rate=0.01, save_steps=2, eval_steps=2)
LISTS = 8


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_encoder(tmp_path_factory.mktemp("training") / "encoder")


def lists() -> TrainingLists:
    queries = {f"q{n}": f"what is thing {n}?" for n in range(LISTS)}
    passages = {f"q{n}-{g}": f"level {g} about thing {n}" for n in range(LISTS) for g in range(3)}
    qrels = {query: {f"{query}-{g}": float(g) for g in range(3)} for query in queries}
    source = TrainingSource(name="made", path="made")
    return mix([(source, Collection("made", queries, passages, qrels, {}, {}))], passages=None, seed=0)


def train(start: Path, folder: Path, settings: TrainingConfig = SETTINGS, **more: Any) -> Trained:
    encoder = EncoderConfig(model=str(start), query_tokens=16, passage_tokens=24, device="cpu")
    source = TrainingSource(name="made", path="made")
    config = RetrieverConfig(name="tiny", encoder=encoder, data=(source,), training=settings)
    return train_retriever(load_encoder(encoder), lists(), config, folder=folder, **more)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


# --- steps ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lists", "processes", "epochs", "expected"),
    [(300, 1, 1, 19), (300, 1, 3, 57), (300, 1, 0.5, 10), (300, 2, 1, 9), (5, 1, 1, 1), (32, 2, 2, 2)],
)
def test_steps_by_hand(lists: int, processes: int, epochs: float, expected: int) -> None:
    """300 lists are 18 batches of 16 and one of 12; two processes have 9 pairs of full batches."""
    assert total_steps(lists, TrainingConfig(batch_size=16, epochs=epochs), processes) == expected
    assert total_steps(lists, TrainingConfig(batch_size=16, epochs=epochs, max_steps=7), processes) == 7


def test_fewer_lists_than_a_step_needs_on_all_processes_are_refused() -> None:
    with pytest.raises(InputError, match="31 lists to train on; expected at least 32"):
        total_steps(31, TrainingConfig(batch_size=16), 2)
    with pytest.raises(InputError, match="expected at least 1"):
        total_steps(0, TrainingConfig())


# --- on the way -----------------------------------------------------------------------------


class Told(SentenceEvaluator):
    """Says what it was called with, and draws random numbers as an evaluation may."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.primary_metric = "dev_norm"
        self.calls: list[tuple[int, int]] = []

    def __call__(  # type: ignore[override]
        self, model: Any, output_path: str | None = None, epoch: float = -1, steps: int = -1
    ) -> dict[str, float]:
        limits = model[0].query_length, model[0].document_length
        assert limits == (16, 24)
        self.calls.append((steps, model.max_seq_length))
        torch.rand(steps + 1)
        return {"dev_norm": sum(float(tensor.detach().square().sum()) for tensor in model.parameters())}


def test_dev_is_measured_before_the_first_step_on_the_way_and_at_the_end(
    start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    told, steps = Told(), []
    result = train(start, tmp_path / "t", evaluator=told, progress=lambda *step: steps.append(step))
    assert [step for step, _ in told.calls] == [0, 2, 4, 5]
    assert [row["step"] for row in result.curve] == [0, 2, 4, 5]
    norms = [row["dev_norm"] for row in result.curve]
    assert len(set(norms)) == 4
    untouched = sum(float(tensor.square().sum()) for tensor in weights(start).values())
    assert norms[0] == pytest.approx(untouched, rel=1e-5)
    trained = sum(float(tensor.square().sum()) for tensor in weights(result.folder).values())
    assert norms[-1] == pytest.approx(trained, rel=1e-5)
    assert "dev\\_norm went from" in (result.folder / "README.md").read_text()
    assert [(step, total) for step, total, _ in steps] == [(step, 5) for step in range(1, 6)]
    assert all(loss is not None and math.isfinite(loss) for _, _, loss in steps)
    assert [path.name for path in tmp_path.iterdir()] == ["t"]  # nothing is left where it was called
    loaded = SentenceTransformer(str(result.folder), device="cpu")
    assert loaded.max_seq_length == 128  # limits of the training are not the model's


class Stop(Exception):
    pass


def stop_at(last: int) -> Callable[..., None]:
    def progress(step: int, total: int, loss: float | None) -> None:
        if step == last:
            raise Stop

    return progress


def test_a_stopped_training_with_a_dev_set_goes_on_with_the_same_curve(start: Path, tmp_path: Path) -> None:
    straight = train(start, tmp_path / "straight", evaluator=Told())
    with pytest.raises(Stop):
        train(start, tmp_path / "stopped", evaluator=Told(), progress=stop_at(3))
    assert (tmp_path / "stopped" / "checkpoints" / "checkpoint-2").is_dir()
    told = Told()
    resumed = train(start, tmp_path / "stopped", evaluator=told)
    assert [step for step, _ in told.calls] == [4, 5]
    assert resumed.curve == straight.curve
    one, other = weights(straight.folder), weights(resumed.folder)
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_so_many_checkpoints_are_kept(start: Path, tmp_path: Path) -> None:
    settings = SETTINGS.model_copy(update={"save_steps": 1, "keep_checkpoints": 3})
    with pytest.raises(Stop):
        train(start, tmp_path / "t", settings, progress=stop_at(5))
    names = {path.name for path in (tmp_path / "t" / "checkpoints").glob("checkpoint-*")}
    assert names == {"checkpoint-2", "checkpoint-3", "checkpoint-4"}


def test_cached_gradients_train_the_same_weights(start: Path, tmp_path: Path) -> None:
    """Dropout off: a chunk draws other numbers than a batch."""
    config = make_tiny_encoder(tmp_path / "plain") / "config.json"
    text = config.read_text().replace('dropout_prob": 0.1', 'dropout_prob": 0.0')
    config.write_text(text)
    settings = SETTINGS.model_copy(update={"max_steps": 2})
    whole = train(tmp_path / "plain", tmp_path / "whole", settings)
    cached = train(tmp_path / "plain", tmp_path / "cached", settings.model_copy(update={"chunk": 3}))
    one, other = weights(whole.folder), weights(cached.folder)
    for name in one:
        if not name.endswith("key.bias"):  # its gradient is rounding alone, which Adam makes a whole step of
            assert torch.allclose(one[name], other[name], rtol=0, atol=1e-4), name


# --- what stops it --------------------------------------------------------------------------


def test_a_folder_in_use_is_refused(start: Path, tmp_path: Path) -> None:
    with RunDirectory(tmp_path).locked(), pytest.raises(InputError, match="another process"):
        train(start, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"lock"}


def test_a_loss_that_is_no_number_stops_the_training(start: Path, tmp_path: Path) -> None:
    encoder = load_encoder(EncoderConfig(model=str(start), device="cpu"))
    with torch.no_grad():
        next(encoder.model.parameters()).fill_(math.inf)
    source = TrainingSource(name="made", path="made")
    config = RetrieverConfig(name="tiny", data=(source,), training=SETTINGS)
    with pytest.raises(InputError, match=r"learning_rate.*the loss is nan at step 1"):
        train_retriever(encoder, lists(), config, folder=tmp_path)
    assert not (tmp_path / "model").exists()


def test_in_16_bits_the_weights_stay_in_32(start: Path, tmp_path: Path) -> None:
    half = train(start, tmp_path, SETTINGS.model_copy(update={"precision": "bf16", "max_steps": 2}))
    before, after = weights(start), weights(half.folder)
    assert {tensor.dtype for tensor in after.values()} == {torch.float32}
    assert not torch.equal(
        before["embeddings.word_embeddings.weight"], after["embeddings.word_embeddings.weight"]
    )


def test_a_model_without_layers_takes_neither_freezing_nor_adapters() -> None:
    model = SentenceTransformer(modules=[BoW(["thing", "level"])], device="cpu")
    with pytest.raises(InputError, match="cannot be told apart"):
        prepare_model(model, TrainingConfig(freeze_layers=1))
    with pytest.raises(InputError, match="no transformer"):
        prepare_model(model, TrainingConfig(lora=LoraConfig()))
    with pytest.raises(InputError, match="nothing of this model is left"):
        prepare_model(model, TrainingConfig())


def test_adapters_that_fit_nothing_are_told(start: Path) -> None:
    model = SentenceTransformer(str(start), device="cpu")
    with pytest.raises(InputError, match=r"lora\.target_modules.*takes no such adapters"):
        prepare_model(model, TrainingConfig(lora=LoraConfig(target_modules=("no_such_module",))))


# --- part of the weights --------------------------------------------------------------------


def test_frozen_layers_get_no_adapters_that_learn(start: Path) -> None:
    model = SentenceTransformer(str(start), device="cpu")
    prepare_model(model, TrainingConfig(lora=LoraConfig(rank=2), freeze_layers=1))
    learning = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert learning
    assert all("layer.1." in name and "lora_" in name for name in learning)


def test_adapters_that_a_model_came_with_become_weights(start: Path, tmp_path: Path) -> None:
    adapted = shutil.copytree(start, tmp_path / "adapted")
    for name in ("config.json", "model.safetensors"):
        (adapted / name).unlink()
    torch.manual_seed(0)
    lora = PeftLora(r=2, lora_alpha=8, target_modules=["query", "value"], init_lora_weights=False)
    get_peft_model(AutoModel.from_pretrained(start), lora).save_pretrained(adapted)
    model = SentenceTransformer(str(adapted), device="cpu")
    text = ["what is thing 3?"]
    before = model.encode(text, convert_to_tensor=True)
    plain = SentenceTransformer(str(start), device="cpu").encode(text, convert_to_tensor=True)
    assert not torch.allclose(before, plain, atol=1e-2)

    merge_adapters(model)
    assert torch.allclose(model.encode(text, convert_to_tensor=True), before, atol=1e-5)
    assert all(parameter.requires_grad for parameter in model.parameters())
    model.save_pretrained(str(tmp_path / "merged"), create_model_card=False)
    assert weights(tmp_path / "merged").keys() == weights(start).keys()
    again = SentenceTransformer(str(tmp_path / "merged"), device="cpu")
    assert torch.allclose(again.encode(text, convert_to_tensor=True), before, atol=1e-5)
