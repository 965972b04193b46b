from __future__ import annotations

from math import log2
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import ndcg_score

from gradeloom.schemas.errors import InputError
from gradeloom.tasks.collection import read_qrels
from gradeloom.tasks.evaluate.measures import measure
from gradeloom.tasks.evaluate.trec import read_run

# Ranked a, b, c, d, e; c has no judgement, f is not found.
RUN = {"q": {"e": 1.0, "d": 2.0, "c": 3.0, "b": 4.0, "a": 5.0}}
QRELS = {"q": {"a": 1, "b": 3, "d": 0, "e": 2, "f": 2}}


def one(name: str, **settings: float) -> float:
    return measure(RUN, QRELS, [name], **settings)[name]["q"]


def test_ndcg_with_linear_and_exponential_gain() -> None:
    dcg = 1 / log2(2) + 3 / log2(3)
    ideal = 3 / log2(2) + 2 / log2(3) + 2 / log2(4)
    assert one("nDCG@3") == pytest.approx(dcg / ideal)
    dcg, ideal = 1 / log2(2) + 7 / log2(3), 7 / log2(2) + 3 / log2(3) + 3 / log2(4)
    assert one("nDCG-exp@3") == pytest.approx(dcg / ideal)
    dcg = 1 / log2(2) + 3 / log2(3) + 2 / log2(6)
    ideal = 3 / log2(2) + 2 / log2(3) + 2 / log2(4) + 1 / log2(5)
    assert one("nDCG") == pytest.approx(dcg / ideal)


def test_a_gain_offset_moves_gains_down_to_zero_at_least_and_leaves_relevance_alone() -> None:
    # Gains a 0, b 2, d 0 (not -1), e 1, f 1.
    assert one("nDCG@3", gain_offset=1) == pytest.approx((2 / log2(3)) / (2 + 1 / log2(3) + 1 / log2(4)))
    assert one("nDCG-exp@3", gain_offset=1) == pytest.approx((3 / log2(3)) / (3 + 1 / log2(3) + 1 / log2(4)))
    for name in ("MRR@10", "R@3", "P@3", "AP", "unjudged@3"):
        assert one(name, gain_offset=1) == one(name)


@pytest.mark.parametrize(
    ("binary_at", "mrr", "recall", "precision", "ap"),
    [
        (1, 1, 2 / 4, 2 / 3, (1 / 1 + 2 / 2 + 3 / 5) / 4),
        (2, 1 / 2, 1 / 3, 1 / 3, (1 / 2 + 2 / 5) / 3),
        (2.5, 1 / 2, 1, 1 / 3, 1 / 2),
        (0, 1, 2 / 5, 2 / 3, (1 / 1 + 2 / 2 + 3 / 4 + 4 / 5) / 5),
        (4, 0, 0, 0, 0),
    ],
)
def test_binary_measures_by_hand(
    binary_at: float, mrr: float, recall: float, precision: float, ap: float
) -> None:
    names = ["MRR@10", "R@3", "P@3", "AP"]
    values = [one(name, binary_at=binary_at) for name in names]
    assert values == pytest.approx([mrr, recall, precision, ap])


def test_mrr_stops_at_k() -> None:
    assert one("MRR@1", binary_at=2) == 0
    assert one("MRR@2", binary_at=2) == 0.5
    assert one("MRR", binary_at=2) == 0.5


def test_unjudged_is_the_share_of_what_was_retrieved() -> None:
    assert one("unjudged@2") == 0
    assert one("unjudged@4") == pytest.approx(1 / 4)
    assert one("unjudged@10") == pytest.approx(1 / 5)  # five were retrieved


def test_queries_as_trec_eval_counts_them() -> None:
    qrels = {
        "absent": {"a": 1},
        "found": {"a": 1},
        "empty": {"a": 1},
        "none relevant": {"a": 0},
        "unjudged": {},
    }
    run = {
        "found": {"a": 1.0},
        "empty": {},
        "none relevant": {"a": 1.0},
        "extra": {"a": 1.0},
        "unjudged": {"a": 1.0},
    }
    names = ["nDCG@10", "nDCG-exp@10", "MRR@10", "R@10", "P@1", "AP"]
    for values in measure(run, qrels, names).values():
        assert list(values.items()) == [("absent", 0), ("found", 1), ("empty", 0), ("none relevant", 0)]
    unjudged = measure(run, qrels, ["unjudged@10"])["unjudged@10"]
    assert unjudged == {"absent": 0, "found": 0, "empty": 0, "none relevant": 0}
    assert measure({}, {}, ["nDCG@10"]) == {"nDCG@10": {}}


def test_measures_come_in_the_order_asked_for() -> None:
    names = ["AP", "nDCG@10", "unjudged@10", "nDCG@5", "MRR@10"]
    assert list(measure(RUN, QRELS, names)) == names


def test_equal_scores_rank_the_greater_id_first_and_close_ones_by_score() -> None:
    assert measure({"q": {"a": 1.0, "b": 1.0}}, {"q": {"b": 1}}, ["MRR@10"])["MRR@10"]["q"] == 1
    close = {"q": {"a": 1 + 1e-12, "b": 1.0}}  # the same 32-bit number
    assert measure(close, {"q": {"b": 1}}, ["MRR@10"])["MRR@10"]["q"] == 0.5


@pytest.mark.parametrize(
    "name", ["ndcg@10", "nDCG@0", "nDCG@-1", "nDCG@ten", "P", "R", "unjudged", "MAP", "", "ERR@10"]
)
def test_an_unknown_measure_names_those_there_are(name: str) -> None:
    with pytest.raises(InputError, match="nDCG@k, nDCG-exp@k, MRR@k, R@k, P@k, AP, unjudged@k"):
        measure(RUN, QRELS, [name])


@pytest.mark.parametrize(
    ("run", "qrels"),
    [
        ({"q": {"a\0b": 1.0}}, {"q": {"a": 1}}),
        ({"q": {"a": 1.0}}, {"q": {"a\0b": 1}}),
        ({"q\0": {"a": 1.0}}, {"q\0": {"a": 1}}),
    ],
)
def test_an_id_that_trec_eval_would_cut_short_is_refused(
    run: dict[str, dict[str, float]], qrels: dict[str, dict[str, float]]
) -> None:
    with pytest.raises(InputError, match=r"expected no NUL character"):
        measure(run, qrels, ["AP"])


def test_real_valued_grades_have_no_ndcg_but_all_else() -> None:
    qrels = {"q": {"a": 0.4, "b": 2.6, "d": 1.5}}
    for name in ("nDCG@10", "nDCG-exp@10"):
        with pytest.raises(InputError, match=r"query 'q': nDCG wants whole gains, got 0.4 "):
            measure(RUN, qrels, [name])
    values = measure(RUN, qrels, ["MRR@10", "P@2", "unjudged@5"], binary_at=1.5)
    assert {name: of["q"] for name, of in values.items()} == pytest.approx(
        {"MRR@10": 0.5, "P@2": 0.5, "unjudged@5": 0.4}
    )
    halves = {"q": {"a": 0.5, "b": 2.5}}
    assert measure(RUN, halves, ["nDCG@1"], gain_offset=-0.5)["nDCG@1"]["q"] == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("name", "grade"), [("nDCG@10", 2.0**40), ("nDCG-exp@10", 21), ("nDCG@10", float("nan"))]
)
def test_gains_out_of_reach_are_refused(name: str, grade: float) -> None:
    with pytest.raises(InputError, match="query 'q'"):
        measure(RUN, {"q": {"a": grade}}, [name])


@given(st.data(), st.lists(st.integers(0, 4), min_size=2, max_size=12), st.integers(1, 12))
def test_ndcg_equals_scikit_learns(data: st.DataObject, grades: list[int], k: int) -> None:
    order = data.draw(st.permutations(range(len(grades))))
    run = {"q": {f"p{n}": float(score) for n, score in enumerate(order)}}
    qrels = {"q": {f"p{n}": float(grade) for n, grade in enumerate(grades)}}
    values = measure(run, qrels, [f"nDCG@{k}", f"nDCG-exp@{k}"])
    assert values[f"nDCG@{k}"]["q"] == pytest.approx(ndcg_score([grades], [order], k=k))
    gains = np.exp2([grades]) - 1
    assert values[f"nDCG-exp@{k}"]["q"] == pytest.approx(ndcg_score(gains, [order], k=k))


TREC_EVAL = {
    "map": "AP", "map_cut": "AP@", "recip_rank": "MRR", "P": "P@", "recall": "R@", "ndcg": "nDCG",
    "ndcg_cut": "nDCG@", "unj": "unjudged@",
}  # fmt: skip
"""trec_eval's name (before `_k`) -> ours."""


@pytest.mark.realdata
def test_trec_evals_own_expected_output_is_reproduced(realdata: Path) -> None:
    folder = realdata / "trec_eval_test"
    run, qrels = read_run(folder / "results.test"), read_qrels(folder / "qrels.test")
    expected: dict[str, dict[str, float]] = {}
    for line in (folder / "out.test.aq").read_text().splitlines():
        name, query, value = line.split()
        kind, _, k = name.rpartition("_") if name.rpartition("_")[2].isdigit() else (name, "", "")
        if kind in TREC_EVAL:
            expected.setdefault(TREC_EVAL[kind] + k, {})[query] = float(value)
        elif name == "num_q":
            assert len(qrels) == float(value) == 3
    assert len(expected) == 3 + 4 * 9 + 3  # AP, MRR, nDCG; four kinds at nine k; unjudged at three
    values = measure(run, qrels, list(expected))
    for name, per_query in values.items():
        per_query = per_query | {"all": float(np.mean(list(per_query.values())))}
        assert per_query == pytest.approx(expected[name], abs=5.1e-5), name
