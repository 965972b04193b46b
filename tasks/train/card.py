"""A trained retriever's card: what it was trained on, how, and what it is worth.

sentence-transformers' own card shows samples of the training data, which are not ours to publish with a
model; this one names the data by release, version and manifest digest instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson
from huggingface_hub import ModelCardData

from gradeloom.schemas.config import content_view
from gradeloom.schemas.errors import InputError
from gradeloom.schemas.retriever import RetrieverConfig
from gradeloom.tasks.run import write_whole
from gradeloom.tasks.train.curve import Curve

RESULTS = "## Results"


def write_card(folder: Path, config: RetrieverConfig, facts: Mapping[str, Any], curve: Curve) -> None:
    """Write README.md.

    Args:
        folder: of the model.
        config: of the training.
        facts: `data`: the identity of every source; `accounting`: what was dropped of it.
        curve: what the dev set said.
    """
    header = ModelCardData(
        library_name="sentence-transformers",
        pipeline_tag="sentence-similarity",
        tags=["sentence-transformers", "feature-extraction", "dense", "gradeloom"],
    )
    encoder = Path(config.encoder.model).name if Path(config.encoder.model).exists() else config.encoder.model
    best = curve.best
    sections = [
        f"---\n{header.to_yaml()}\n---",
        f"# {config.name}",
        "A retriever trained list-wise on graded passages by gradeloom.",
        f"Start: `{_plain(encoder)}`. Queries are cut after {config.encoder.query_tokens} tokens, passages "
        f"after {config.encoder.passage_tokens}.",
        "## Data",
        "\n".join(_sources(facts)),
        "## Loss",
        "\n".join(f"- {_plain(', '.join(_settings(term)))}" for term in config.loss),
        "## Training",
        "\n".join(f"- {name}: {_plain(value)}" for name, value in content_view(config.training).items()),
        f"- steps: {curve.steps}",
    ]
    if best is not None and curve.measure is not None:
        value = f"{curve.measure} {best[curve.measure]:.4f}"
        sections.append(f"Best on the dev set: {value} at step {best['step']}.")
    _write(folder / "README.md", "\n\n".join(sections) + "\n")


def add_results_to_card(folder: Path, markdown: str) -> None:
    """Put a section of results at the end of a model's card, in the place of an earlier one.

    Raises:
        InputError: the folder has no card.
    """
    path = folder / "README.md"
    try:
        card = path.read_text("utf-8")
    except OSError as error:
        raise InputError(f"the model's card cannot be read: {error.strerror}", file=path) from error
    before = card.split(f"\n{RESULTS}\n")[0].rstrip()
    text = f"{before}\n\n{RESULTS}\n\n{markdown.strip()}\n"
    if text != card:
        _write(path, text)


def _sources(facts: Mapping[str, Any]) -> list[str]:
    lines = []
    for name, identity in facts.get("data", {}).items():
        told = []
        if "release" in identity:
            told.append(f"release `{_plain(identity['release'])}` version {_plain(identity['version'])}")
            told.append(f"manifest digest `{_plain(identity['digest'])}`")
        told += [f"`{_plain(file)}` sha256 `{sha}`" for file, sha in identity.get("files", {}).items()]
        counts = facts.get("accounting", {}).get(name, {})
        told += [f"{number} {_plain(what.replace('_', ' '))}" for what, number in counts.items()]
        lines.append(f"- {_plain(name)}: {', '.join(told)}")
    return lines or ["- not said"]


def _settings(term: Any) -> list[str]:
    view = content_view(term)
    kind = view.pop("kind")
    return [kind, *(f"{name} {value}" for name, value in view.items() if value is not None)]


def _plain(value: Any) -> str:
    """As text that is neither markup nor a second line."""
    text = value if isinstance(value, str) else orjson.dumps(value).decode()
    return text.replace("&", "&amp;").replace("<", "&lt;").replace("`", "'").replace("\n", " ")


def _write(path: Path, text: str) -> None:
    write_whole(path, lambda temporary: _write_text(temporary, text))


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, "utf-8")
