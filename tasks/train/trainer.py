"""sentence-transformers' trainer with whole checkpoints, a fixed order of data, and no card on the way."""

from __future__ import annotations

import math
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load_model, save_model
from sentence_transformers import SentenceTransformerTrainer
from sentence_transformers.sentence_transformer.model_card import SentenceTransformerModelCardCallback
from sentence_transformers.sentence_transformer.training_args import SentenceTransformerTrainingArguments
from transformers import TrainerCallback, TrainerControl, TrainerState
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import PrinterCallback, ProgressCallback

from gradeloom.schemas.errors import InputError
from gradeloom.tasks.run import sync_folder

CHECKPOINT = re.compile(r"checkpoint-(\d+)")
WEIGHTS = "weights.safetensors"
PARTIAL = "partial"
"""Where things are written before they are moved to their place, under the folder of checkpoints."""

Progress = Callable[[int, int, float | None], None]


class _NoCard(SentenceTransformerModelCardCallback):
    """Collects nothing for a card: the usual one shows samples of the training data."""

    def on_init_end(self, *args: Any, **kwargs: Any) -> None:
        pass


class ListTrainer(SentenceTransformerTrainer):
    """Trains on lists; see the module's docstring.

    transformers saves a checkpoint file by file into its final folder, and a process that is killed
    meanwhile leaves a part of one that looks like the latest. Here it is written in `partial/` and
    renamed when every process has written its share, so that what is called `checkpoint-N` is whole.
    """

    model_card_callback_class = _NoCard

    def __init__(self, *, keep: int, progress: Progress | None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.keep = keep
        for noisy in (PrinterCallback, ProgressCallback):
            self.remove_callback(noisy)
        self.add_callback(_Steps(self, progress))

    @property
    def partial(self) -> Path:
        return Path(str(self.args.output_dir))

    @property
    def checkpoints(self) -> Path:
        return self.partial.parent

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        # All weights by name, adapters and what they adapt alike: a checkpoint is there to go on from.
        folder = Path(output_dir or self.partial)
        folder.mkdir(parents=True, exist_ok=True)
        save_model(self.accelerator.unwrap_model(self.model), str(folder / WEIGHTS))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        load_model(self.model if model is None else model, str(Path(resume_from_checkpoint) / WEIGHTS))

    def load(self, checkpoint: Path) -> None:
        """Take over the weights and the history of a checkpoint."""
        self._load_from_checkpoint(str(checkpoint))
        self.state = TrainerState.load_from_json(str(checkpoint / TRAINER_STATE_NAME))

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        self.accelerator.wait_for_everyone()
        if self.is_world_process_zero():
            name = f"checkpoint-{self.state.global_step}"
            put_in_place(self.partial / name, self.checkpoints / name)
            for _, old in whole_checkpoints(self.checkpoints)[: -self.keep]:
                doomed = self.partial / old.name
                old.rename(doomed)  # first, so that a part of one never looks like one
                shutil.rmtree(doomed)
        self.accelerator.wait_for_everyone()


class _Steps(TrainerCallback):
    """Tells of steps, keeps the order of data, and stops a training that has diverged."""

    def __init__(self, trainer: ListTrainer, progress: Progress | None) -> None:
        self.trainer, self.progress = trainer, progress
        self.loss: float | None = None

    def on_epoch_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        # accelerate's samplers, nested after a resume, do not hand the epoch down in every case.
        loader: Any = self.trainer._train_dataloader
        sampler = loader.batch_sampler
        while hasattr(sampler, "batch_sampler"):
            sampler = sampler.batch_sampler
        sampler.set_epoch(state.global_step // len(loader))

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if control.should_save or control.should_evaluate:
            control.should_log = True  # so that no part of a mean is lost with a process
        if not control.should_log:
            self._tell(state)

    def on_log(
        self, args: Any, state: TrainerState, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        if logs is None or "loss" not in logs:
            return
        self.loss = float(logs["loss"])
        if not math.isfinite(self.loss) and not args.fp16:  # fp16's scaler passes over such steps
            raise InputError(
                f"the loss is {self.loss} at step {state.global_step}; a lower learning rate or more warm-up "
                "may help",
                field="training.learning_rate",
            )
        self._tell(state)

    def _tell(self, state: TrainerState) -> None:
        if self.progress is not None and state.is_world_process_zero:
            self.progress(state.global_step, state.max_steps, self.loss)


def training_arguments(**kwargs: Any) -> SentenceTransformerTrainingArguments:
    """Arguments that report to nobody; several GPUs are used by several processes or not at all.

    Raises:
        InputError: the device cannot do what is asked of it.
    """
    try:
        args = SentenceTransformerTrainingArguments(
            report_to="none", disable_tqdm=True, logging_nan_inf_filter=False, **kwargs
        )
    except (ValueError, RuntimeError) as error:  # precision that the device has not
        raise InputError(str(error).splitlines()[0], field="training.precision") from error
    if args.n_gpu > 1:
        args._n_gpu = 1  # else transformers splits batches over all of them in threads of one process
    return args


def whole_checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """The checkpoints in a folder with their steps, the oldest first."""
    if not folder.is_dir():
        return []
    found = [(CHECKPOINT.fullmatch(path.name), path) for path in folder.iterdir()]
    return sorted((int(match[1]), path) for match, path in found if match and path.is_dir())


def put_in_place(made: Path, place: Path) -> None:
    """Move a folder that is written to its place, whole even after a power cut.

    Raises:
        InputError: no space, no permission.
    """
    try:
        for folder, _, names in os.walk(made):
            for name in names:
                with (Path(folder) / name).open("rb") as file:
                    os.fsync(file.fileno())
            sync_folder(Path(folder))
        if place.exists():  # of a training that was started again before this point
            shutil.rmtree(place)
        made.rename(place)
        sync_folder(place.parent)
    except OSError as error:
        raise InputError(f"cannot write: {error.strerror or error}", file=place) from error
