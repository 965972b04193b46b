from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradeloom.tasks.filter.text import (
    common_subsequence,
    jaccard,
    ngram_hashes,
    normalised,
    rouge_l,
    shingles,
    words,
)

few_words = st.lists(st.sampled_from("abcd"), max_size=12)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Don't PANIC: it’s 3.5 km -- really", "dont panic its 3 5 km really"),
        ("well-known\tfacts\u00a0(2)", "well known facts 2"),
        ("Straße STRASSE ﬁne ＡＢＣ", "strasse strasse fine abc"),
        ("e\u0301tude étude so\u00adft", "étude étude soft"),
        ("使用Python编程。", "使 用 python 编 程"),
        ("カタカナ ﾊﾝｶｸ", "カ タ カ ナ ハ ン カ ク"),
        ("ที่นี่ดี", "ที่ นี่ ดี"),
        ("हिन्दी में लिखा", "हिन्दी में लिखा"),
        ("한국어 문장", "한국어 문장"),
        ("naïve Ελλάδα ΕΛΛΆΔΑ", "naïve ελλάδα ελλάδα"),
        ("...!?", ""),
    ],
)
def test_words(text: str, expected: str) -> None:
    assert words(text) == expected.split()


def test_texts_without_words_stand_for_themselves() -> None:
    assert normalised(" 🙂\n 🙂 ") == "🙂 🙂"
    assert normalised("🙂") != normalised("🙃")


@given(st.text())
def test_normalising_twice_changes_nothing(text: str) -> None:
    assert normalised(normalised(text)) == normalised(text)


@given(st.text(), st.text())
def test_words_of_two_texts_are_the_words_of_their_sum(a: str, b: str) -> None:
    assert words(f"{a} . {b}") == words(a) + words(b)


def test_shingles() -> None:
    assert shingles(["a", "b", "a", "b"], 2) == {("a", "b"), ("b", "a")}
    assert shingles(["a", "b"], 3) == set()


def test_jaccard() -> None:
    assert jaccard({"a", "b", "c"}, {"b", "c", "d"}) == 0.5
    assert jaccard(set(), set()) == 0.0


def longest(a: Sequence[str], b: Sequence[str]) -> int:
    """By the textbook recurrence."""
    table = [[0] * (len(b) + 1) for _ in range(len(a) + 1)]
    for i, left in enumerate(a):
        for j, right in enumerate(b):
            table[i + 1][j + 1] = table[i][j] + 1 if left == right else max(table[i][j + 1], table[i + 1][j])
    return table[-1][-1]


@given(few_words, few_words)
def test_rouge_l_against_the_recurrence(a: list[str], b: list[str]) -> None:
    lcs = longest(a, b)
    assert common_subsequence(a, b) == lcs
    if lcs:
        precision, recall = Fraction(lcs, len(b)), Fraction(lcs, len(a))
        assert rouge_l(a, b) == pytest.approx(float(2 * precision * recall / (precision + recall)), abs=1e-12)
    else:
        assert rouge_l(a, b) == 0


def test_rouge_l_by_hand() -> None:
    # The example of Lin 2004, section 3.1.
    assert rouge_l(["police", "killed", "the", "gunman"], ["the", "gunman", "kill", "police"]) == 0.5
    assert rouge_l(["police", "killed", "the", "gunman"], ["police", "kill", "the", "gunman"]) == 0.75


@given(few_words, st.integers(1, 4))
def test_equal_ngrams_have_equal_hashes_and_others_do_not(tokens: list[str], size: int) -> None:
    hashes = ngram_hashes(tokens, size)
    runs = [tuple(tokens[i : i + size]) for i in range(len(tokens) - size + 1)]
    assert len(hashes) == len(runs)
    assert len(set(hashes.tolist())) == len(set(runs))
    for i, run in enumerate(runs):
        assert hashes[i] == ngram_hashes(run, size)[0]


def test_permuted_ngrams_do_not_collide() -> None:
    rng = np.random.default_rng(0)
    tokens = [f"w{n}" for n in range(13)]
    orders = {tuple(rng.permutation(13).tolist()) for _ in range(5_000)}
    hashes = {int(ngram_hashes([tokens[n] for n in order], 13)[0]) for order in orders}
    assert len(hashes) == len(orders)


def test_hashes_are_the_same_in_every_process() -> None:
    code = (
        "from gradeloom.tasks.filter.text import ngram_hashes;"
        "print(ngram_hashes('to be or not to be'.split(), 2).tolist())"
    )
    seen = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert seen == {f"{ngram_hashes(['to', 'be', 'or', 'not', 'to', 'be'], 2).tolist()}\n"}
