"""The card of a trained model: what it names, and what it does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
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
from gradeloom.tasks.encoder import Encoder, load_encoder
from gradeloom.tasks.train.card import add_results_to_card, escaped, write_card
from gradeloom.tasks.train.curve import Curve

FACTS = {
    "data": {
        "made": {"release": "graded-recorded", "version": "1.2.0", "digest": "0123abcd" * 8},
        "real | <b>": {"files": {"/somewhere/of/mine/qrels.tsv": "f" * 64}},
    },
    "accounting": {"made": {"queries": 300, "used": 1200}, "real | <b>": {"queries": 7, "used": 21}},
    "lists": 307, "width": 4, "data_digest": "d" * 32, "start": "e" * 32, "processes": 2,
}  # fmt: skip
CURVE = Curve(
    steps=20,
    measure="dev_nDCG@10",
    rows=[
        {"step": 0, "loss": None, "dev_nDCG@10": 0.5},
        {"step": 10, "loss": 0.25, "dev_nDCG@10": 0.625},
        {"step": 20, "loss": 0.125, "dev_nDCG@10": 0.6},
    ],
    losses=[(10, 0.25), (20, 0.125)],
)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Encoder:
    folder = make_tiny_encoder(tmp_path_factory.mktemp("card") / "secret-place")
    return load_encoder(EncoderConfig(model=str(folder), query_tokens=16, passage_tokens=24, device="cpu"))


def configured(model: Encoder, **more: Any) -> RetrieverConfig:
    source = TrainingSource(name="made", path="/somewhere/of/mine")
    return RetrieverConfig(name="tiny", data=(source,), **{"encoder": model.config} | more)


def card(model: Encoder, folder: Path, facts: dict[str, Any] = FACTS, **more: Any) -> str:
    write_card(folder, model, configured(model, **more), CURVE, facts)
    return (folder / "README.md").read_text()


def row(text: str, start: str) -> list[str]:
    """The cells of the table row that starts so."""
    (line,) = [line for line in text.splitlines() if line.startswith(f"| {start} ")]
    return [cell.strip() for cell in line.strip("|").split(" | ")]


def test_it_names_release_version_and_manifest_digest(encoder: Encoder, tmp_path: Path) -> None:
    text = card(encoder, tmp_path)
    assert row(text, "made") == ["made", "release graded-recorded 1.2.0", "0123abcd" * 8, "300", "1200"]
    assert "307 lists of up to 4 passages" in text
    assert "d" * 32 in text


def test_it_names_the_loss_with_the_temperatures_that_counted(encoder: Encoder, tmp_path: Path) -> None:
    terms = (
        LossTerm(kind="gaussian", label_temperature=0.3),
        LossTerm(kind="infonce", weight=0.5, temperature=0.02, positives="top"),
        LossTerm(kind="ordinal", target_mass=0.8),
    )
    text = card(encoder, tmp_path, loss=terms)
    assert (
        "- **gaussian**, weight 1: temperature 0.05, label temperature 0.3, other queries' passages have "
        "grade 0"
    ) in text
    assert "- **infonce**, weight 0.5: temperature 0.02, positives are each list's highest grade" in text
    assert "- **ordinal**, weight 1: temperature 0.05, target mass of the highest grade 0.8, power 2" in text


def test_a_dot_product_has_temperature_1(tmp_path: Path) -> None:
    folder = make_tiny_encoder(tmp_path / "dot", normalize=False)
    dot = load_encoder(EncoderConfig(model=str(folder), device="cpu"))
    assert "- **aligned**, weight 1: temperature 1, label" in card(dot, tmp_path)


def test_it_names_the_settings_and_the_dev_curve(encoder: Encoder, tmp_path: Path) -> None:
    training = TrainingConfig(batch_size=7, learning_rate=3e-5, max_steps=20, lora=LoraConfig(rank=3))
    text = card(encoder, tmp_path, training=training)
    settings = {name: row(text, name)[1] for name in ("steps", "processes", "learning\\_rate", "lora rank")
                if not name.startswith("learning")}  # fmt: skip
    assert settings == {"steps": "20", "processes": "2", "lora rank": "3"}
    assert row(text, "learning_rate")[1] == "3e-05"
    assert row(text, "batch_size")[1] == "7"
    assert "| epochs |" not in text  # max_steps counted
    assert "went from 0.5000 (step 0) to 0.6000 (step 20)" in text
    assert "is 0.6250 at step 10" in text
    assert row(text, "10") == ["10", "0.2500", "0.6250"]


def test_its_header_is_what_the_hub_reads(encoder: Encoder, tmp_path: Path) -> None:
    _, header, _ = card(encoder, tmp_path).split("---\n", 2)
    found = yaml.safe_load(header)
    assert found["library_name"] == "sentence-transformers"
    assert found["pipeline_tag"] == "sentence-similarity"
    assert {"gradeloom", "loss:aligned"} <= set(found["tags"])
    assert "widget" not in found
    assert "base_model" not in found  # a folder is no name on the hub
    _, header, _ = card(encoder, tmp_path, encoder=EncoderConfig()).split("---\n", 2)
    assert yaml.safe_load(header)["base_model"] == "sentence-transformers/all-MiniLM-L6-v2"


def test_no_path_of_a_machine_and_no_markup_of_others_is_in_it(encoder: Encoder, tmp_path: Path) -> None:
    text = card(encoder, tmp_path)
    assert "secret-place" not in text
    assert "/somewhere" not in text
    assert str(tmp_path) not in text
    assert "qrels.tsv" in text
    assert "<b>" not in text
    assert "| real \\| &lt;b&gt; |" in text


def test_a_table_has_no_gaps(encoder: Encoder, tmp_path: Path) -> None:
    lines = card(encoder, tmp_path).splitlines()
    tables = [n for n, line in enumerate(lines) if line.startswith("|---")]
    assert len(tables) == 3
    for n in tables:
        assert lines[n - 1].startswith("| ")
        assert lines[n + 1].startswith("| ")
        assert lines[n - 1].count(" |") == lines[n].count("|") - 1


def test_with_nothing_known_of_the_data_it_is_a_card_all_the_same(encoder: Encoder, tmp_path: Path) -> None:
    write_card(tmp_path, encoder, configured(encoder), Curve(3, None, [], []), {})
    text = (tmp_path / "README.md").read_text()
    assert text.startswith("---\n")
    assert "dev set" not in text
    assert encoder.model.model_card_data.model_name != "tiny"  # the model's own data is not touched


# --- results --------------------------------------------------------------------------------


def test_results_take_the_place_of_earlier_ones(encoder: Encoder, tmp_path: Path) -> None:
    before = card(encoder, tmp_path)
    assert "Not evaluated yet." in before
    add_results_to_card(tmp_path, "| set | nDCG@10 |\n|---|---|\n| dl19 | .7 |\n")
    first = (tmp_path / "README.md").read_text()
    assert first == before.replace("Not evaluated yet.", "| set | nDCG@10 |\n|---|---|\n| dl19 | .7 |")
    add_results_to_card(tmp_path, "nothing <!-- end of results --> new")
    add_results_to_card(tmp_path, "other")
    assert (tmp_path / "README.md").read_text() == before.replace("Not evaluated yet.", "other")


def test_no_card_is_an_error_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="expected the folder of a trained model"):
        add_results_to_card(tmp_path, "x")
    (tmp_path / "README.md").write_text("# a card of somebody else's\n")
    with pytest.raises(InputError, match="between which results go"):
        add_results_to_card(tmp_path, "x")


def test_escaping_by_hand() -> None:
    assert escaped("a\n# <b> [x](y) `c` | d") == "a \\# &lt;b&gt; \\[x\\](y) \\`c\\` \\| d"
    assert escaped(("query", "value")) == "query, value"
