from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import peft
import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import StaticEmbedding
from tiny_encoder import make_tiny_encoder
from tokenizers import Tokenizer
from transformers import AutoModel, AutoTokenizer

from gradeloom.schemas.errors import InputError
from gradeloom.schemas.retriever import EncoderConfig
from gradeloom.tasks.encoder import cut_after, encoder_identity, encoder_of, load_encoder

TEXTS = ["what is a cat", "a passage about dogs, and about nothing else.", "x"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_encoder(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def own(folder: Path, tmp_path: Path) -> Path:
    """A copy of the model to change."""
    shutil.copytree(folder, tmp_path / "own")
    return tmp_path / "own"


def config(model: Path, **settings: Any) -> EncoderConfig:
    return EncoderConfig(model=str(model), device="cpu", **settings)


def mean_pooled(folder: Path, text: str, tokens: int = 128) -> np.ndarray[Any, Any]:
    """What a transformers model gives, by transformers alone."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder)
    with torch.no_grad():
        states = model(**tokenizer(text, return_tensors="pt", truncation=True, max_length=tokens))
    return states.last_hidden_state[0].mean(0).numpy()


# --- vectors ----------------------------------------------------------------------------------


def test_vectors_of_a_cosine_model_have_unit_length(folder: Path) -> None:
    encoder = load_encoder(config(folder))
    assert (encoder.similarity, encoder.normalised) == ("cosine", True)
    for vectors in (encoder.encode_queries(TEXTS), encoder.encode_passages(TEXTS)):
        assert vectors.dtype == np.float32
        for text, vector in zip(TEXTS, vectors, strict=True):
            raw = mean_pooled(folder, text)
            np.testing.assert_allclose(vector, raw / np.linalg.norm(raw), atol=1e-5)


def test_vectors_of_a_dot_product_model_keep_their_length(tmp_path: Path) -> None:
    folder = make_tiny_encoder(tmp_path, normalize=False)
    encoder = load_encoder(config(folder))
    assert (encoder.similarity, encoder.normalised) == ("dot", False)
    expected = [mean_pooled(folder, text) for text in TEXTS]
    np.testing.assert_allclose(encoder.encode_passages(TEXTS), expected, atol=1e-5)


def test_a_cosine_model_without_a_normalising_module_is_normalised(tmp_path: Path) -> None:
    model = SentenceTransformer(str(make_tiny_encoder(tmp_path, normalize=False)), device="cpu")
    model.similarity_fn_name = "cosine"
    encoder = encoder_of(model)
    assert (encoder.similarity, encoder.normalised) == ("cosine", True)
    np.testing.assert_allclose(np.linalg.norm(encoder.encode_queries(TEXTS), axis=1), 1, atol=1e-6)


def test_order_and_batch_size_do_not_matter(folder: Path) -> None:
    texts = [f"{'thing ' * (n * 7 % 11)}{n}" for n in range(70)]
    told: list[tuple[int, int]] = []
    few = load_encoder(config(folder, batch_size=2)).encode_passages(
        texts, progress=lambda done, total: told.append((done, total))
    )
    many = load_encoder(config(folder, batch_size=100)).encode_passages(texts[::-1])[::-1]
    np.testing.assert_allclose(few, many, atol=1e-5)
    assert told == [(64, 70), (70, 70)]


def test_no_texts_give_no_vectors(folder: Path) -> None:
    assert load_encoder(config(folder)).encode_queries([]).shape == (0, 32)


def test_queries_and_passages_are_cut_after_their_own_tokens(folder: Path) -> None:
    long = "a b c d e f g h i j k l"  # a token each, and two around them
    encoder = load_encoder(config(folder, query_tokens=6, passage_tokens=9))
    np.testing.assert_allclose(encoder.encode_queries([long]), encoder.encode_queries([long[:7]]), atol=1e-6)
    np.testing.assert_allclose(
        encoder.encode_passages([long]), encoder.encode_passages([long[:13]]), atol=1e-6
    )
    assert np.abs(encoder.encode_queries([long]) - encoder.encode_passages([long])).max() > 1e-3
    assert encoder.model.max_seq_length == 128  # as before


def test_texts_are_cut_where_the_model_has_no_more_positions(folder: Path) -> None:
    encoder = load_encoder(config(folder, passage_tokens=100_000))
    long = encoder.encode_passages(["a " * 500])
    np.testing.assert_allclose(long, encoder.encode_passages(["a " * 126]), atol=1e-6)
    with cut_after(encoder.model, 1000):
        assert encoder.model.max_seq_length == 128


def test_prompts_are_put_before_texts(folder: Path) -> None:
    encoder = load_encoder(config(folder, query_prompt="query: ", passage_prompt="passage: "))
    plain = load_encoder(config(folder))
    with_query = plain.encode_passages([f"query: {text}" for text in TEXTS])
    with_passage = plain.encode_passages([f"passage: {text}" for text in TEXTS])
    np.testing.assert_allclose(encoder.encode_queries(TEXTS), with_query, atol=1e-5)
    np.testing.assert_allclose(encoder.encode_passages(TEXTS), with_passage, atol=1e-5)


def test_a_models_own_prompts_are_used_unless_others_are_given(own: Path) -> None:
    model = SentenceTransformer(str(own), device="cpu", prompts={"query": "query: ", "passage": "about: "})
    model.save(str(own))
    encoder = load_encoder(config(own))
    assert (encoder.query_prompt, encoder.passage_prompt) == ("query: ", "about: ")
    plain = encoder_of(SentenceTransformer(str(own), device="cpu", prompts={"query": "", "passage": ""}))
    np.testing.assert_allclose(encoder.encode_queries(["x"]), plain.encode_queries(["query: x"]), atol=1e-5)
    assert load_encoder(config(own, query_prompt="q ")).query_prompt == "q "


class Letters(torch.nn.Module):
    """A first module of one's own: the counts of the letters a, b and c."""

    def tokenize(self, texts: Sequence[str], **_: Any) -> dict[str, torch.Tensor]:
        return {"counts": torch.tensor([[float(text.count(c)) for c in "abc"] for text in texts])}

    def forward(self, features: dict[str, torch.Tensor], **_: Any) -> dict[str, torch.Tensor]:
        return features | {"sentence_embedding": features["counts"]}

    def save(self, *_: Any, **__: Any) -> None: ...


def test_a_first_module_of_ones_own(folder: Path) -> None:
    model = SentenceTransformer(modules=[Letters()], device="cpu", similarity_fn_name="dot")
    encoder = encoder_of(model, EncoderConfig(passage_tokens=4))
    assert encoder.encode_passages(["abcabca", "", "b"]).tolist() == [[3, 2, 2], [0, 0, 0], [0, 1, 0]]
    static = StaticEmbedding(Tokenizer.from_file(str(folder / "tokenizer.json")), embedding_dim=5)
    encoder = encoder_of(SentenceTransformer(modules=[static], device="cpu"), EncoderConfig(passage_tokens=4))
    np.testing.assert_allclose(np.linalg.norm(encoder.encode_passages(TEXTS), axis=1), 1, atol=1e-6)


def test_numbers_that_are_not_finite_are_refused(folder: Path) -> None:
    encoder = load_encoder(config(folder))
    next(encoder.model.parameters()).data.fill_(torch.nan)
    with pytest.raises(InputError, match="not finite"):
        encoder.encode_queries(["x"])


# --- loading ----------------------------------------------------------------------------------


@pytest.fixture
def connections(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What anyone tried to reach."""
    tried: list[Any] = []

    def refuse(*address: Any, **_: Any) -> None:
        tried.append(address)
        raise OSError("no network in this test")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    return tried


def test_the_bundled_model_is_all_minilm_and_needs_no_network(connections: list[Any]) -> None:
    encoder = load_encoder(EncoderConfig(device="cpu"))
    assert (encoder.similarity, encoder.normalised) == ("cosine", True)
    query = encoder.encode_queries(["how many people live in London?"])
    passages = encoder.encode_passages(
        ["London has 9 million inhabitants.", "London is known for its museums.", "Cats sleep a lot."]
    )
    assert passages.shape == (3, 384)
    assert np.argsort(-(passages @ query[0])).tolist() == [0, 1, 2]
    assert connections == []


def test_adapters_are_loaded_with_what_they_adapt(folder: Path, own: Path, connections: list[Any]) -> None:
    adapted = as_adapters(folder, own)
    encoder = load_encoder(config(own))
    with torch.no_grad():
        tokens = AutoTokenizer.from_pretrained(folder)("a cat", return_tensors="pt")
        raw = adapted(**tokens).last_hidden_state[0].mean(0).numpy()
    np.testing.assert_allclose(encoder.encode_queries(["a cat"])[0], raw / np.linalg.norm(raw), atol=1e-5)
    plain = load_encoder(config(folder)).encode_queries(["a cat"])
    assert np.abs(encoder.encode_queries(["a cat"]) - plain).max() > 1e-3
    assert connections == []


def as_adapters(base: Path, folder: Path) -> Any:
    """Turn a model's copy into what sentence-transformers saves of one with adapters."""
    torch.manual_seed(0)
    lora = peft.LoraConfig(r=2, target_modules=["query", "value"], init_lora_weights=False)
    adapted = peft.get_peft_model(AutoModel.from_pretrained(base), lora).eval()
    for name in ("config.json", "model.safetensors"):
        (folder / name).unlink()
    adapted.save_pretrained(folder)
    return adapted


def test_a_transformers_folder_gets_mean_pooling(own: Path) -> None:
    shutil.rmtree(own / "1_Pooling")
    (own / "modules.json").unlink()
    (own / "config_sentence_transformers.json").unlink()
    encoder = load_encoder(config(own))
    raw = mean_pooled(own, "a cat")
    np.testing.assert_allclose(encoder.encode_queries(["a cat"])[0], raw / np.linalg.norm(raw), atol=1e-5)


def test_a_hub_model_is_fetched_first_and_loaded_from_there(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = tmp_path / "0123abc"
    shutil.copytree(folder, snapshot)
    asked: list[tuple[str, str | None]] = []

    def download(name: str, *, revision: str | None, **_: Any) -> str:
        asked.append((name, revision))
        return str(snapshot)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    wanted = EncoderConfig(model="someone/tiny", revision="v1", device="cpu")
    assert load_encoder(wanted).encode_queries(["x"]).shape == (1, 32)
    assert encoder_identity(wanted) == "hub:someone/tiny@0123abc"
    assert set(asked) == {("someone/tiny", "v1")}
    (snapshot / "model.safetensors").unlink()
    with pytest.raises(InputError, match="someone/tiny has no weights"):
        load_encoder(wanted)


@pytest.mark.parametrize("use", [load_encoder, encoder_identity])
@pytest.mark.parametrize(
    ("model", "what"),
    [
        ("no-such-folder", "'no-such-folder' is neither `bundled`, nor a folder that is there, nor"),
        ("./no/such", "'./no/such' is neither"),
        ("/no/such/folder", "'/no/such/folder' is neither"),
        ("no/such", "'no/such' is no folder here, and cannot be had from the model hub: "),
        ("EMPTY", "holds no model: no modules.json and no config.json"),
    ],
)
def test_a_model_that_is_not_there_is_one_clear_line(
    use: Callable[[EncoderConfig], Any], model: str, what: str, tmp_path: Path, connections: list[Any]
) -> None:
    with pytest.raises(InputError) as caught:
        use(EncoderConfig(model=str(tmp_path) if model == "EMPTY" else model))
    assert what in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("model.safetensors", "rubbish"),
        ("model.safetensors", None),
        ("modules.json", "{"),
        ("config.json", "[]"),
        ("tokenizer.json", "{}"),
        ("1_Pooling/config.json", "{}"),
    ],
)
def test_a_damaged_model_is_one_clear_line(own: Path, file: str, content: str | None) -> None:
    (own / file).unlink() if content is None else (own / file).write_text(content)
    with pytest.raises(InputError, match="cannot be loaded: ") as caught:
        load_encoder(config(own))
    assert "\n" not in str(caught.value)


def test_settings_that_do_not_fit(folder: Path, own: Path) -> None:
    with pytest.raises(InputError, match="a revision goes with a hub name"):
        load_encoder(config(folder, revision="v1"))
    with pytest.raises(InputError, match=r"encoder.device': no device 'warp' here"):
        load_encoder(EncoderConfig(model=str(folder), device="warp"))
    settings = json.loads((own / "config_sentence_transformers.json").read_text())
    (own / "config_sentence_transformers.json").write_text(
        json.dumps(settings | {"similarity_fn_name": "euclidean"})
    )
    with pytest.raises(InputError, match="scores by euclidean; expected"):
        load_encoder(config(own))


# --- identity ---------------------------------------------------------------------------------


def test_identity_is_of_what_decides_an_embedding(folder: Path, own: Path) -> None:
    before = encoder_identity(config(folder))
    assert before.startswith("sha256:")
    assert len(before) == len("sha256:") + 32
    for name in ("README.md", "results.json", "training_args.bin", "plot.png"):
        (own / name).write_text("x")
    (own / "checkpoint-1").mkdir()
    (own / "checkpoint-1" / "model.safetensors").write_text("x")
    settings = config(own, batch_size=7, query_tokens=9)
    assert encoder_identity(settings) == before
    seen = {before}
    for name in ("model.safetensors", "tokenizer.json", "config.json", "1_Pooling/config.json"):
        content = (own / name).read_bytes()
        (own / name).write_bytes(content[:-1] + b" " + content[-1:])
        seen.add(encoder_identity(config(own)))
    assert len(seen) == 5


def test_identity_of_adapters_is_also_that_of_what_they_adapt(own: Path, tmp_path: Path) -> None:
    base = make_tiny_encoder(tmp_path / "base")
    as_adapters(base, own)
    before = encoder_identity(config(own))
    moved = Path(shutil.move(base, tmp_path / "moved"))
    adapters = own / "adapter_config.json"
    adapters.write_text(adapters.read_text().replace(str(base), str(moved)))
    assert encoder_identity(config(own)) == before
    make_tiny_encoder(moved, seed=1)
    assert encoder_identity(config(own)) != before
    shutil.rmtree(moved)
    with pytest.raises(InputError, match="is neither"):
        encoder_identity(config(own))
