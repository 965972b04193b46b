"""The model card: README.md of a trained retriever.

It names what the model was trained on, by release and manifest digest, and how. It holds no text of the
data and no path of a machine. sentence-transformers' own card shows samples of the training data, and asks
a hub about base model and data sets; this one does neither.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

from sentence_transformers.base.model_card import generate_model_card
from sentence_transformers.sentence_transformer.model_card import SentenceTransformerModelCardData

from gradeloom.schemas.config import content_view
from gradeloom.schemas.errors import InputError
from gradeloom.schemas.retriever import LossTerm, RetrieverConfig
from gradeloom.tasks.encoder import Encoder
from gradeloom.tasks.engine.models import BUNDLED, HUB_NAME
from gradeloom.tasks.run import write_bytes_whole
from gradeloom.tasks.train.curve import Curve
from gradeloom.tasks.train.losses import SYCL

CARD = "README.md"
BEGIN, END = "<!-- results -->", "<!-- end of results -->"
_HUB_NAME_OF_BUNDLED = "sentence-transformers/all-MiniLM-L6-v2"
_HTML = {"&": "&amp;", "<": "&lt;", ">": "&gt;"}


@dataclass
class RetrieverCardData(SentenceTransformerModelCardData):
    """sentence-transformers' card data with a template of our own and what that one asks for."""

    ours: dict[str, Any] = field(default_factory=dict)

    def get_model_specific_metadata(self) -> dict[str, Any]:
        """What the template sees beside the usual; called by sentence-transformers."""
        return super().get_model_specific_metadata() | self.ours


def write_card(
    folder: Path, encoder: Encoder, config: RetrieverConfig, curve: Curve, facts: Mapping[str, Any]
) -> None:
    """Write README.md into the folder of a trained model.

    Args:
        folder: of the model.
        encoder: the trained model.
        config: what it was trained by.
        curve: how that went.
        facts: `data`: source -> identity of its collection; `accounting`: source -> counts; `lists`, `width`
            and `data_digest` of the training data; `start`: digest of the weights at the start;
            `processes`. What is missing is not told.
    """
    data = RetrieverCardData(
        model_name=config.name, local_files_only=True, generate_widget_examples=False,
        ours=_ours(encoder, config, curve, facts),
    )  # fmt: skip
    base = _base(config.encoder.model)
    data.base_model, data.base_model_revision = base, config.encoder.revision if base else None
    data.template_path = Path(str(files("gradeloom.data").joinpath("cards/retriever.md.j2")))
    data.ir_model = True
    data.add_tags(["generated_from_trainer", "graded-relevance", "gradeloom"])
    data.add_tags([f"loss:{kind}" for kind in dict.fromkeys(term.kind for term in config.loss)])
    data.citations = {"The training method": SYCL}
    data.first_save = False  # it would guess the base model from the path
    data.register_model(encoder.model)
    before = encoder.model.model_card_data
    encoder.model.model_card_data = data
    try:
        text = generate_model_card(encoder.model)
    finally:
        encoder.model.model_card_data = before
    text = re.sub(r"\n{3,}", "\n\n", text)
    write_bytes_whole(folder / CARD, text.encode())


def add_results_to_card(folder: str | Path, markdown: str) -> None:
    """Put evaluation results into the card; what was put there before gives way.

    Args:
        folder: of the trained model.
        markdown: the section's content; whoever makes it escapes what is in it.

    Raises:
        InputError: no card there, or one without the place for results.
    """
    file = Path(folder) / CARD
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError("no model card here; expected the folder of a trained model", file=file) from error
    head, begin, rest = text.partition(BEGIN)
    # The last mark ends the section, so that one inside the results does no harm.
    _, end, tail = rest.rpartition(END)
    if not begin or not end:
        raise InputError(f"expected the lines `{BEGIN}` and `{END}`, between which results go", file=file)
    whole = f"{head}{BEGIN}\n{markdown.strip()}\n{END}{tail}"
    write_bytes_whole(file, whole.encode())


def _ours(
    encoder: Encoder, config: RetrieverConfig, curve: Curve, facts: Mapping[str, Any]
) -> dict[str, Any]:
    sources, counts = _sources(facts)
    settings: dict[str, Any] = {"steps": curve.steps, "processes": facts.get("processes", 1)}
    settings |= {name: value for name, value in content_view(config.training).items() if name != "lora"}
    if config.training.lora is not None:
        settings |= {f"lora {name}": value for name, value in content_view(config.training.lora).items()}
    if settings["max_steps"] is not None:
        del settings["epochs"]  # did not count
    return {
        "title": escaped(config.name),
        "start": _start(config.encoder.model, facts.get("start")),
        "limits": {"query": config.encoder.query_tokens, "passage": config.encoder.passage_tokens},
        "prompts": bool(encoder.query_prompt or encoder.passage_prompt),
        "sources": sources,
        "releases": any(source["release"] for source in sources),
        "counts": [escaped(name) for name in counts],
        "lists": facts.get("lists", "?"),
        "width": facts.get("width", "?"),
        "data_digest": facts.get("data_digest", "?"),
        "loss": [_term(term, encoder.normalised) for term in config.loss],
        "settings": [(name, escaped(value)) for name, value in settings.items() if value is not None],
        **_dev(curve),
    }


def _sources(facts: Mapping[str, Any]) -> tuple[list[dict[str, Any]], list[str]]:
    """The sources of data, and what is counted of each."""
    identities: Mapping[str, Any] = facts.get("data") or {}
    accounting: Mapping[str, Mapping[str, int]] = facts.get("accounting") or {}
    counts = list(dict.fromkeys(name for of_one in accounting.values() for name in of_one))
    sources = []
    for name in dict.fromkeys([*identities, *accounting]):
        identity = identities.get(name) or {}
        if "release" in identity:
            what = f"release {identity['release']} {identity.get('version', '')}"
            digests = [str(identity.get("digest", ""))]
        else:
            of_files: Mapping[str, str] = identity.get("files") or {}
            what = ", ".join(Path(file).name for file in of_files) or "not told"
            digests = [str(digest)[:16] for digest in of_files.values()]
        numbers = [accounting.get(name, {}).get(count, "") for count in counts]
        sources.append(
            {"name": escaped(name), "what": escaped(what.strip()), "digest": escaped(", ".join(digests)),
             "counts": numbers, "release": "release" in identity}
        )  # fmt: skip
    return sources, counts


def _base(model: str) -> str | None:
    """The hub's name of what was started from, if there is one."""
    if model == BUNDLED:
        return _HUB_NAME_OF_BUNDLED
    is_name = HUB_NAME.fullmatch(model) and "/" in model and not Path(model).expanduser().is_dir()
    return model if is_name else None


def _start(model: str, digest: str | None) -> str:
    base = _base(model)
    words = f"[{base}](https://huggingface.co/{base})" if base else "a local model"
    return words + (f" (weights {digest})" if digest else "")


def _term(term: LossTerm, normalised: bool) -> dict[str, str]:
    """A term of the loss with its settings as they were used, in words."""
    parts = [f"temperature {term.temperature_for(normalised):g}"]
    if term.kind == "infonce":
        parts.append(
            f"positives from grade {term.positive_grade:g}" if term.positives == "grade"
            else "positives are each list's highest grade"
        )  # fmt: skip
    elif term.target_mass is not None:
        parts.append(f"target mass of the highest grade {term.target_mass:g}")
    else:
        parts.append(f"label temperature {term.label_temperature:g}")
    if term.kind == "ordinal":
        parts.append(f"power {term.power:g}")
    parts.append(
        "other queries' passages take no part" if term.own_list else "other queries' passages have grade 0"
    )
    return {"kind": term.kind, "weight": f"{term.weight:g}", "words": ", ".join(parts)}


def _dev(curve: Curve) -> dict[str, Any]:
    """The learning curve of the measure that counts."""
    best = curve.best
    if best is None or curve.measure is None:
        return {"best": None, "rows": []}
    rows = [row for row in curve.rows if row.get(curve.measure) is not None]
    first, last = rows[0], rows[-1]
    told = {
        "measure": escaped(curve.measure), "value": _number(best[curve.measure]), "step": best["step"],
        "first": _number(first[curve.measure]), "first_step": first["step"],
        "last": _number(last[curve.measure]), "last_step": last["step"],
    }  # fmt: skip
    table = [
        {"step": row["step"], "loss": _number(row["loss"]), "value": _number(row[curve.measure])}
        for row in rows
    ]
    return {"best": told, "rows": table}


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def escaped(value: Any) -> str:
    """Any value as one line of plain text in Markdown: no HTML, no links, no cells, no headings."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        value = ", ".join(map(str, value))
    line = re.sub(r"\s+", " ", str(value))
    line = re.sub(r"[\\`*_{}\[\]#|~$!]", r"\\\g<0>", line)
    return re.sub(r"[&<>]", lambda match: _HTML[match.group()], line)
