"""Trainings that are killed, refused, done again, adapted, frozen and run by two processes.

Run as a script, this file is the process that gets killed:

    test_retriever.py PLACE NAME...     each training in a fork of its own
    test_retriever.py PLACE NAME        under torch.distributed.run
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tiny_encoder import make_tiny_encoder

from gradeloom.schemas.errors import InputError
from gradeloom.schemas.retriever import (
    EncoderConfig,
    LoraConfig,
    LossTerm,
    RetrieverConfig,
    TrainingConfig,
    TrainingSource,
)
from gradeloom.tasks.collection import Collection
from gradeloom.tasks.encoder import load_encoder
from gradeloom.tasks.train import retriever, trainer
from gradeloom.tasks.train.graded_qrels import TrainingLists, mix
from gradeloom.tasks.train.losses import GradedListLoss
from gradeloom.tasks.train.retriever import Trained, train_retriever

Seen = list[list[list[int]]]
"""Per step the queries, as tokens."""
LISTS = 12
BASE = TrainingConfig(batch_size=4, epochs=3, learning_rate=0.003, save_steps=2)
"""Nine steps, three to an epoch."""
SETTINGS = {
    "step": BASE,
    "boundary": BASE.model_copy(update={"save_steps": 3}),
    "half": BASE,
    "renamed": BASE,
    "last": BASE.model_copy(update={"epochs": 1.0, "max_steps": 5}),
    "lora": BASE.model_copy(update={"lora": LoraConfig(rank=2, alpha=4)}),
    "pair": BASE.model_copy(update={"batch_size": 2}),
}
"""Of every training that runs in another process."""


def lists(count: int = LISTS, *, word: str = "thing") -> TrainingLists:
    queries = {f"q{n}": f"what is {word} {n}?" for n in range(count)}
    passages = {f"q{n}-{g}": f"level {g} about {word} {n}" for n in range(count) for g in range(4)}
    qrels = {query: {f"{query}-{g}": float(g) for g in range(4 - n % 2)} for n, query in enumerate(queries)}
    source = TrainingSource(name="made", path="made")
    return mix([(source, Collection("made", queries, passages, qrels, {}, {}))], passages=None, seed=0)


def configured(encoder: Path, settings: TrainingConfig, *loss: LossTerm) -> RetrieverConfig:
    return RetrieverConfig(
        name="tiny",
        encoder=EncoderConfig(model=str(encoder), query_tokens=16, passage_tokens=24, device="cpu"),
        data=(TrainingSource(name="made", path="made"),),
        loss=loss or (LossTerm(),),
        training=settings,
    )


def trained(
    place: Path,
    name: str,
    settings: TrainingConfig | None = None,
    *,
    encoder: str = "encoder",
    progress: Callable[[int, int, float | None], None] | None = None,
) -> tuple[Trained, Seen]:
    """Train in `place/name`: what came out, and what every step that was taken has seen."""
    config = configured(place / encoder, settings or SETTINGS[name])
    seen: Seen = []
    forward = GradedListLoss.forward

    def recorded(self: GradedListLoss, features: Any, labels: Any) -> Any:
        columns = list(features)
        ids, mask = columns[0]["input_ids"], columns[0]["attention_mask"].bool()
        seen.append([row[there].tolist() for row, there in zip(ids, mask, strict=True)])
        return forward(self, columns, labels)

    GradedListLoss.forward = recorded  # type: ignore[method-assign]
    try:
        result = train_retriever(
            load_encoder(config.encoder), lists(), config, folder=place / name, progress=progress
        )
    finally:
        GradedListLoss.forward = forward  # type: ignore[method-assign]
    return result, seen


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def assert_same_weights(one: Path, other: Path) -> None:
    first, second = weights(one), weights(other)
    assert first.keys() == second.keys()
    differing = [name for name, tensor in first.items() if not torch.equal(tensor, second[name])]
    assert differing == []


# --- the process that is killed -------------------------------------------------------------


def die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_at(step: int) -> Callable[[int, int, float | None], None]:
    return lambda now, steps, loss: die() if now == step else None


def die_writing(step: int) -> None:
    """Half of the weights of checkpoint-`step` are written, and then no more."""
    save = trainer.save_model

    def half(model: Any, path: str) -> None:
        save(model, path)
        if f"checkpoint-{step}" in path:
            os.truncate(path, Path(path).stat().st_size // 2)
            die()

    trainer.save_model = half


def die_before(what: str) -> None:
    """All is written, but not in its place yet."""
    put = retriever.put_in_place

    def put_in_place(made: Path, place: Path) -> None:
        if place.name == what:
            die()
        put(made, place)

    retriever.put_in_place = trainer.put_in_place = put_in_place


def killed(place: Path, name: str) -> None:
    progress = None
    if name in ("step", "lora"):
        progress = die_at(5)
    elif name == "boundary":
        progress = die_at(7)
    elif name == "half":
        die_writing(6)
    elif name == "renamed":
        die_before("checkpoint-6")
    else:
        die_before("model")
    trained(place, name, progress=progress)


def main(place: Path, names: list[str]) -> None:
    if "WORLD_SIZE" in os.environ:
        result, _ = trained(place, names[0], encoder="plain")
        assert result.steps == 9
        return
    torch.set_num_threads(1)
    children = {}
    for name in names:
        if (child := os.fork()) == 0:
            try:
                killed(place, name)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        children[name] = child
    ends = {name: os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for name, child in children.items()}
    print(json.dumps(ends))


def process(*arguments: str) -> str:
    env = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=env, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


# --- killed, and called again ---------------------------------------------------------------

CHECKPOINTS = {
    "step": [2, 4],
    "boundary": [3, 6],
    "half": [2, 4],
    "renamed": [2, 4],
    "last": [4, 5],
    "lora": [2, 4],
}
"""What is whole when the process is killed."""


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """As in the processes that are killed: another number of threads adds up in another order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trainings")
    make_tiny_encoder(folder / "encoder")
    return folder


@pytest.fixture(scope="module")
def ends(place: Path) -> dict[str, int]:
    """All trainings that get killed, killed."""
    found: dict[str, int] = json.loads(process(__file__, str(place), *CHECKPOINTS))
    return found


@pytest.fixture(scope="module")
def whole(place: Path) -> tuple[Trained, Seen]:
    """The training that was never stopped."""
    return trained(place, "whole", BASE)


def test_an_uninterrupted_training_sees_every_query_once_an_epoch_and_learns(
    place: Path, whole: tuple[Trained, Seen]
) -> None:
    result, seen = whole
    assert result.steps == 9
    epochs = [sorted(query for step in seen[start : start + 3] for query in step) for start in (0, 3, 6)]
    assert epochs[0] == epochs[1] == epochs[2]
    assert len({tuple(query) for query in epochs[0]}) == LISTS
    assert seen[:3] != seen[3:6]
    assert [row["step"] for row in result.curve] == list(range(1, 10))
    losses = [row["loss"] for row in result.curve]
    assert sum(losses[6:]) < sum(losses[:3])
    assert not (place / "whole" / "checkpoints").exists()


@pytest.mark.parametrize("name", ["step", "boundary", "half", "renamed"])
def test_a_killed_training_goes_on_as_if_it_had_not_been(
    place: Path, ends: dict[str, int], whole: tuple[Trained, Seen], name: str
) -> None:
    assert ends[name] == -signal.SIGKILL
    checkpoints = place / name / "checkpoints"
    assert [step for step, _ in trainer.whole_checkpoints(checkpoints)] == CHECKPOINTS[name]
    if name in ("half", "renamed"):
        assert (checkpoints / "partial" / "checkpoint-6" / trainer.WEIGHTS).is_file()
    result, seen = trained(place, name)
    assert result.steps == whole[0].steps
    assert seen == whole[1][CHECKPOINTS[name][-1] :]
    assert_same_weights(result.folder, whole[0].folder)
    assert result.curve == whole[0].curve


def test_one_killed_before_its_model_stood_there_takes_no_further_step(
    place: Path, ends: dict[str, int]
) -> None:
    assert ends["last"] == -signal.SIGKILL
    assert [step for step, _ in trainer.whole_checkpoints(place / "last" / "checkpoints")] == [4, 5]
    result, seen = trained(place, "last")
    assert seen == []
    straight, _ = trained(place, "last-straight", SETTINGS["last"])
    assert result.steps == straight.steps == 5
    assert_same_weights(result.folder, straight.folder)
    assert result.curve == straight.curve


# --- another training, and the same again ---------------------------------------------------


def test_a_finished_training_is_only_read(place: Path, whole: tuple[Trained, Seen]) -> None:
    folder = place / "whole"
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.name != "lock"}
    result, seen = trained(place, "whole", BASE.model_copy(update={"save_steps": 5, "keep_checkpoints": 1}))
    assert seen == []
    assert result == whole[0]
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.name != "lock"} == before


@pytest.mark.parametrize(
    ("differing", "told"),
    [
        ("loss", r"loss\.0\.label_temperature\b.*\b0\.4 there.*\b1\.0 here"),
        ("data", r"\bdata\b.*\b\w{8}… there.*\b\w{8}… here"),
        ("training", r"training\.seed\b.*\b0 there.*\b1 here"),
        ("encoder", r"\b(encoder\.weights|start)\b.*\b\w{8}… there.*\b\w{8}… here"),
    ],
)
def test_another_training_in_the_folder_is_refused_and_told_apart(
    place: Path, whole: tuple[Trained, Seen], differing: str, told: str
) -> None:
    start, data, config = place / "encoder", lists(), configured(place / "encoder", BASE)
    if differing == "loss":
        config = configured(start, BASE, LossTerm(label_temperature=1.0))
    elif differing == "data":
        data = lists(word="level")
    elif differing == "training":
        config = configured(start, BASE.model_copy(update={"seed": 1}))
    else:
        config = configured(make_tiny_encoder(place / "other", seed=5), BASE)
    with pytest.raises(InputError, match=told):
        train_retriever(load_encoder(config.encoder), data, config, folder=place / "whole")


# --- part of the weights --------------------------------------------------------------------


def test_adapters_are_trained_resumed_and_merged(place: Path, ends: dict[str, int]) -> None:
    assert ends["lora"] == -signal.SIGKILL
    assert [step for step, _ in trainer.whole_checkpoints(place / "lora" / "checkpoints")] == [2, 4]
    resumed, seen = trained(place, "lora")
    assert len(seen) == 5
    config = configured(place / "encoder", SETTINGS["lora"])
    encoder = load_encoder(config.encoder)
    straight = train_retriever(encoder, lists(), config, folder=place / "lora-straight")
    assert_same_weights(resumed.folder, straight.folder)

    start, end = weights(place / "encoder"), weights(straight.folder)
    assert start.keys() == end.keys()
    changed = {name for name in start if not torch.equal(start[name], end[name])}
    assert changed == {
        name
        for name in start
        if name.startswith("encoder.") and name.endswith("weight") and "Norm" not in name
    }
    texts = ["what is thing 3?", "level 2 about thing 3", "about"]
    loaded = load_encoder(config.encoder.model_copy(update={"model": str(straight.folder)}))
    vectors = loaded.encode_passages(texts)
    np.testing.assert_allclose(vectors, encoder.encode_passages(texts), atol=1e-6)
    assert np.abs(vectors - load_encoder(config.encoder).encode_passages(texts)).max() > 1e-3


def test_frozen_layers_stay_and_the_others_change(place: Path) -> None:
    settings = BASE.model_copy(update={"freeze_layers": 1, "max_steps": 2})
    result, _ = trained(place, "frozen", settings)
    start, end = weights(place / "encoder"), weights(result.folder)
    assert start.keys() == end.keys()
    changed = {name for name in start if not torch.equal(start[name], end[name])}
    assert changed == {name for name in start if name.startswith("encoder.layer.1.")}


def test_more_layers_than_there_are_cannot_be_frozen(place: Path) -> None:
    with pytest.raises(InputError, match=r"freeze_layers.*has 2 layers"):
        trained(place, "frozen-3", BASE.model_copy(update={"freeze_layers": 3}))


# --- two processes --------------------------------------------------------------------------


def test_two_processes_train_what_one_trains_with_the_batch_of_both(place: Path) -> None:
    config = make_tiny_encoder(place / "plain") / "config.json"
    values = json.loads(config.read_text())
    config.write_text(json.dumps(values | {"hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0}))
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    process(*launcher, __file__, str(place), "pair")
    one, _ = trained(place, "single", BASE, encoder="plain")
    two = weights(place / "pair" / "model")
    start = weights(place / "plain")
    for name, tensor in weights(one.folder).items():
        if name.endswith("key.bias"):
            continue  # softmax cancels it: its gradient is rounding alone, which Adam makes a whole step of
        assert torch.allclose(tensor, two[name], rtol=0, atol=1e-4), name
        assert name.startswith("pooler") or (tensor - start[name]).abs().max() > 1e-3, name


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
