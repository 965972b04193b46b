from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import Any

import pytest
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator
from tiny_encoder import make_tiny_encoder

from gradeloom.schemas.errors import InputError
from gradeloom.schemas.retriever import EncoderConfig
from gradeloom.tasks.evaluate.graded_evaluator import GradedRetrievalEvaluator

QUERIES = {f"q{n}": f"what is the level of thing {n}" for n in range(6)}
CORPUS = {f"p{n:02}": f"the {n * n} of query {chr(97 + n % 26)} and passage {n} about" for n in range(40)}
BINARY = {f"q{n}": {f"p{(n * 7 + k * 5) % 40:02}": 1.0 for k in range(4)} for n in range(6)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_encoder(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def model(folder: Path) -> SentenceTransformer:
    return SentenceTransformer(str(folder), device="cpu")


def ranking(model: SentenceTransformer, query: str) -> list[str]:
    """The corpus, best first."""
    scores = model.encode_query([QUERIES[query]]) @ model.encode_document(list(CORPUS.values())).T
    return [p for _, p in sorted(zip(scores[0].tolist(), CORPUS, strict=True), reverse=True)]


@pytest.mark.parametrize("normalize", [True, False])
def test_binary_grades_as_sentence_transformers(tmp_path: Path, normalize: bool) -> None:
    model = SentenceTransformer(str(make_tiny_encoder(tmp_path, normalize=normalize)), device="cpu")
    theirs = InformationRetrievalEvaluator(
        QUERIES, CORPUS, {query: set(found) for query, found in BINARY.items()}, name="x", write_csv=False
    )(model)
    ours = GradedRetrievalEvaluator(QUERIES, CORPUS, BINARY, "x", measures=["nDCG@10", "MRR@10", "R@10"])(
        model
    )
    kind = "cosine" if normalize else "dot"
    assert 0.05 < ours["x_nDCG@10"] < 0.95
    assert ours == {
        "x_nDCG@10": pytest.approx(theirs[f"x_{kind}_ndcg@10"], abs=1e-6),
        "x_MRR@10": pytest.approx(theirs[f"x_{kind}_mrr@10"], abs=1e-6),
        "x_R@10": pytest.approx(theirs[f"x_{kind}_recall@10"], abs=1e-6),
    }


def test_grades_matter(model: SentenceTransformer) -> None:
    """The two best passages, with grades 1 and 3: less than the best order; with 3 and 1: the best."""
    first, second, third = ranking(model, "q0")[:3]
    log3 = 1 / math.log2(3)

    def ndcg(grades: dict[str, float], **options: float) -> float:
        evaluator = GradedRetrievalEvaluator(QUERIES, CORPUS, {"q0": grades}, **options)  # type: ignore[arg-type]
        return evaluator(model)["nDCG@10"]

    assert ndcg({first: 3, second: 1}) == pytest.approx(1)
    assert ndcg({first: 1, second: 3}) == pytest.approx((1 + 3 * log3) / (3 + log3))
    # Less one, grade 1 is no gain, and the other's place is the second.
    assert ndcg({first: 1, second: 3, third: 1}, gain_offset=1) == pytest.approx(log3)


def test_binary_at(model: SentenceTransformer) -> None:
    first, second, third = ranking(model, "q0")[:3]
    qrels = {"q0": {first: 1.0, second: 2.0, third: 3.0}}
    found = {
        at: GradedRetrievalEvaluator(QUERIES, CORPUS, qrels, measures=["MRR@10"], binary_at=at)(model)
        for at in (1, 2, 3)
    }
    assert found == {at: {"MRR@10": pytest.approx(1 / at)} for at in (1, 2, 3)}


def test_pool_exclude_and_depth(model: SentenceTransformer) -> None:
    order = ranking(model, "q0")
    qrels = {"q0": {order[0]: 0.0, order[1]: 0.0, order[20]: 1.0}}

    def mrr(**options: object) -> float:
        return GradedRetrievalEvaluator(QUERIES, CORPUS, qrels, measures=["MRR"], **options)(model)["MRR"]  # type: ignore[arg-type]

    assert mrr() == pytest.approx(1 / 21)
    assert mrr(pool=True) == pytest.approx(1 / 3)
    assert mrr(exclude={"q0": {order[0]: 1.0, order[5]: 1.0}}) == pytest.approx(1 / 19)
    assert (mrr(depth=21), mrr(depth=20)) == (pytest.approx(1 / 21), 0)


def test_prompts_and_limits_are_the_configured(model: SentenceTransformer) -> None:
    """As if the texts began with the prompts, and ended after so many words ([CLS] and [SEP] count)."""
    queries = {query: " ".join(f"{text[-1]}fgh") for query, text in QUERIES.items()}
    corpus = {passage: " ".join(f"{n:02}{n * n:04}") for n, passage in enumerate(CORPUS)}

    def found(queries: dict[str, str], corpus: dict[str, str], **config: Any) -> dict[str, float]:
        return GradedRetrievalEvaluator(
            queries, corpus, BINARY, measures=["AP"], config=EncoderConfig(**config)
        )(model)

    plain = found(queries, corpus)
    asked, told = (
        {name: f"{prompt} {text}" for name, text in texts.items()}
        for prompt, texts in (("what", queries), ("the", corpus))
    )
    prompted = found(queries, corpus, query_prompt="what ", passage_prompt="the ")
    assert prompted == pytest.approx(found(asked, told))
    assert prompted != pytest.approx(plain)
    short = {query: text[:3] for query, text in queries.items()}
    shorter = {passage: text[:5] for passage, text in corpus.items()}
    cut = found(queries, corpus, query_tokens=4, passage_tokens=5)
    assert cut == pytest.approx(found(short, shorter))
    assert cut != pytest.approx(plain)


def test_texts_are_cut_where_the_model_cuts_them(model: SentenceTransformer) -> None:
    """Without a configuration, as sentence-transformers' evaluator does; queries beyond 64 tokens, too."""
    queries = {query: " ".join(["the"] * 70) + f" {text}" for query, text in QUERIES.items()}
    relevant = {query: set(found) for query, found in BINARY.items()}
    for limit in (128, 77):
        model.max_seq_length = limit
        theirs = InformationRetrievalEvaluator(queries, CORPUS, relevant, write_csv=False)(model)
        ours = GradedRetrievalEvaluator(queries, CORPUS, BINARY)(model)
        assert ours["nDCG@10"] == pytest.approx(theirs["cosine_ndcg@10"], abs=1e-6)
        short = GradedRetrievalEvaluator(queries, CORPUS, BINARY, config=EncoderConfig())(model)
        assert short["nDCG@10"] != pytest.approx(ours["nDCG@10"])


def test_only_judged_queries_that_are_there_count(model: SentenceTransformer) -> None:
    first = ranking(model, "q0")[0]
    evaluator = GradedRetrievalEvaluator(QUERIES, CORPUS, {"q0": {first: 1}, "q1": {}, "gone": {first: 1}})
    assert evaluator(model) == {"nDCG@10": 1}


def test_what_cannot_be_measured_is_told_at_once() -> None:
    with pytest.raises(InputError, match=r"field 'qrels': expected judgements of at least one"):
        GradedRetrievalEvaluator(QUERIES, CORPUS, {"gone": {"p00": 1}, "q1": {}})
    with pytest.raises(InputError, match="unknown measure 'NDCG@10'"):
        GradedRetrievalEvaluator(QUERIES, CORPUS, BINARY, measures=["NDCG@10"])


def test_csv(model: SentenceTransformer, tmp_path: Path) -> None:
    out = tmp_path / "deep" / "eval"
    evaluator = GradedRetrievalEvaluator(QUERIES, CORPUS, BINARY, "dev", measures=["nDCG@10", "AP"])
    found = evaluator(model, str(out), epoch=0.5, steps=20)  # type: ignore[arg-type]
    evaluator(model, str(out), epoch=1, steps=-1)
    assert [path.name for path in out.iterdir()] == ["graded_retrieval_evaluation_dev_results.csv"]
    with (out / "graded_retrieval_evaluation_dev_results.csv").open(newline="") as file:
        lines = list(csv.reader(file))
    values = [str(found["dev_nDCG@10"]), str(found["dev_AP"])]
    assert lines == [["epoch", "steps", "nDCG@10", "AP"], ["0.5", "20", *values], ["1", "-1", *values]]


def test_csv_without_a_name(model: SentenceTransformer, tmp_path: Path) -> None:
    GradedRetrievalEvaluator(QUERIES, CORPUS, BINARY)(model, str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["graded_retrieval_evaluation_results.csv"]


def test_no_csv_unless_wanted(model: SentenceTransformer, tmp_path: Path) -> None:
    GradedRetrievalEvaluator(QUERIES, CORPUS, BINARY, "dev", write_csv=False)(model, str(tmp_path))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("name", "primary"), [("dev", "dev_AP"), ("", "AP")])
def test_primary_metric(model: SentenceTransformer, name: str, primary: str) -> None:
    evaluator = GradedRetrievalEvaluator(QUERIES, CORPUS, BINARY, name, measures=["AP", "nDCG@10"])
    assert evaluator.primary_metric == primary
    found = evaluator(model)
    assert evaluator.primary_metric == primary
    assert next(iter(found)) == primary
    assert evaluator.greater_is_better


@pytest.mark.parametrize("training", [True, False])
def test_the_model_is_as_before(model: SentenceTransformer, training: bool) -> None:
    model.max_seq_length = 77
    model.train(training)
    GradedRetrievalEvaluator(QUERIES, CORPUS, BINARY)(model)
    assert model.max_seq_length == 77
    assert {module.training for module in model.modules()} == {training}


def test_the_model_is_as_before_when_it_fails(model: SentenceTransformer) -> None:
    model.max_seq_length = 77
    model.train()
    for weights in model.parameters():
        weights.data.fill_(math.nan)
    with pytest.raises(InputError, match="not finite"):
        GradedRetrievalEvaluator(QUERIES, CORPUS, BINARY)(model)
    assert model.max_seq_length == 77
    assert model.training


def test_dropout_is_off(folder: Path) -> None:
    """In training mode the same texts would get other vectors each time."""
    model = SentenceTransformer(str(folder), device="cpu").train()
    evaluator = GradedRetrievalEvaluator(QUERIES, CORPUS, BINARY, measures=["AP"])
    in_training = evaluator(model)
    assert evaluator(model) == in_training == evaluator(model.eval())


def test_the_card_has_the_metrics(model: SentenceTransformer) -> None:
    evaluator = GradedRetrievalEvaluator(
        QUERIES, CORPUS, BINARY, "dev", measures=["nDCG@10", "AP"], binary_at=2, pool=True
    )
    found = evaluator(model, epoch=1, steps=30)
    data = model.model_card_data
    assert data.eval_results_dict[evaluator] == found
    assert data.training_logs == [{"Epoch": 1, "Step": 30, "dev_nDCG@10": found["dev_nDCG@10"]}]
    assert evaluator.description == "Graded Retrieval"
    assert evaluator.get_config_dict() == {
        "measures": ["nDCG@10", "AP"], "binary_at": 2, "gain_offset": 0, "pool": True,
    }  # fmt: skip
