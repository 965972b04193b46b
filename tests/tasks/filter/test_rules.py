from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradeloom.schemas.config import (
    DEFAULT_FILTERS,
    LengthFilter,
    NearDuplicatesFilter,
    QueryCopiedFilter,
    RefusalFilter,
    SiblingsFilter,
)
from gradeloom.schemas.rows import DecisionRow, ListRow, Passage
from gradeloom.tasks.filter.refusals import find_meta_talk, find_refusal
from gradeloom.tasks.filter.rules import (
    copied_share,
    filter_list,
    length,
    query_copied,
    refusal,
    siblings,
    structure,
)
from gradeloom.tasks.filter.text import words

GRADES = (3, 2, 1, 0)
GOOD = {
    3: "Green tea is best brewed at about eighty degrees, because boiling water scorches the leaves.",
    2: "Leaves differ, and so do kettles; many people let the water stand for a while before pouring.",
    1: "Tea came to Europe in the seventeenth century and was at first sold in small shops as a cure.",
    0: "The bridge was closed for repairs last winter, and buses took a longer way round the harbour.",
}


def a_list(passages: dict[int, str] | None = None, query: str = "how hot should green tea be") -> ListRow:
    texts = GOOD | (passages or {})
    return ListRow(
        id="r", ordinal=7, query_id="q", query=query,
        passages=[Passage(grade=grade, text=text) for grade, text in texts.items()],
    )  # fmt: skip


def test_a_good_list_is_kept() -> None:
    assert filter_list(DEFAULT_FILTERS, a_list(), grades=GRADES) == DecisionRow(id="r", ordinal=7)


# --- structure ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("grades", "offending"),
    [((3, 2, 0), 1), ((3, 2, 1, 0, 4), 4), ((3, 2, 2, 1, 0), 2), ((), 3)],
)
def test_every_level_once(grades: tuple[int, ...], offending: int) -> None:
    row = ListRow(id="r", ordinal=0, query_id="q", query="why",
                  passages=[Passage(grade=g, text="some words") for g in grades])  # fmt: skip
    verdict = structure(row, GRADES)
    assert verdict is not None
    assert (verdict.reason, verdict.grade) == ("missing_level", offending)


def test_the_config_s_levels_count() -> None:
    row = ListRow(id="r", ordinal=0, query_id="q", query="why",
                  passages=[Passage(grade=1, text="yes"), Passage(grade=0, text="no")])  # fmt: skip
    assert structure(row, (1, 0)) is None
    assert structure(row, (2, 1, 0)) is not None


@pytest.mark.parametrize("text", ["", " \n", "...", "–"])
def test_a_passage_without_a_word_is_empty(text: str) -> None:
    verdict = structure(a_list({1: text}), GRADES)
    assert verdict is not None
    assert (verdict.reason, verdict.grade) == ("empty_passage", 1)


# --- length ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("one two", "too_short"),
        ("one two three", None),
        ("one - two, don't!", None),
        ("one two three four five", None),
        ("one two three four five six", "too_long"),
        ("你好", "too_short"),
        ("你好吗？", None),
        ("今天天气很好", "too_long"),
    ],
)
def test_length_in_words_or_characters(text: str, reason: str | None) -> None:
    row = ListRow(id="r", ordinal=0, query_id="q", query="why", passages=[Passage(grade=2, text=text)])
    verdict = length(LengthFilter(min_words=3, max_words=5), row)
    assert (verdict and (verdict.reason, verdict.grade)) == (reason and (reason, 2))


# --- refusals and meta-talk -----------------------------------------------------------------

REFUSED = [
    "I'm sorry, but I can't provide a passage on this topic.",
    "I’m sorry, but that is not something to write about.",
    "Sorry, I cannot help with that.",
    "As an AI, I do not have opinions about tea.",
    "As an AI language model, my knowledge is limited.",
    "I cannot help you with this request.",
    "I cannot assist with creating such content.",
    "Well, I am unable to write the passage you asked for.",
    "I apologize, but this goes too far.",
    "I am just a language model.",
    "I cannot fulfill this request.",
    "The answer is unknown; I do not have access to real-time data.",
]
HUMAN = [
    "I cannot help but notice how hot the kettle is.",
    "I can't help it, I love tea.",
    "I am sorry to hear that your kettle is broken.",
    "As an AI researcher she wrote about tea robots.",
    "She says I'm sorry, but never means it.",
    "As an aid to digestion, tea is old.",
    "I cannot write well before breakfast.",
    "The firm sells an AI model that brews tea.",
    "Sorry sights met the travellers at the coast.",
]
META = [
    "Level 3: green tea is brewed at eighty degrees.",
    "This is a level 2 passage about tea.",
    "Here is a passage about green tea.",
    "Here's the requested passage.",
    "This passage is not relevant to tea.",
    "The passage does not answer how hot the tea should be.",
    "It answers the query about tea in full.",
    "Perfectly relevant: brew at eighty degrees.",
    "As requested, a text about tea.",
    "Sure! Here you go: brew at eighty degrees.",
    "level_2: brew at eighty degrees.",
    '{"passages": {"3": "brew at eighty degrees"}}',
    "The relevance score of this one would be low.",
    "It has some relevance to the question.",
    "Marginally relevant text about kettles.",
]
NO_META = [
    "The village lies at sea level 3 metres from the shore.",
    "Rivers at level 30 flood the fields.",
    "The pass is at level 2,500 on this scale.",
    "The database query returned nothing.",
    "The question of who was first is open.",
    "Her work is highly relevant for tea growers.",
    "Of particular relevance to growers is the rain.",
    "Here is the definition of a monsoon.",
    "This passage from the sea to the lake is narrow.",
    "Passengers may board early as requested seats allow.",
    "Of course, no tea is complete without a few leaves.",
    "Related: kettles, cups, spoons.",
    "The user fills the kettle and waits.",
    "The levels 1 to 9 are all too loud.",
]


@pytest.mark.parametrize("text", REFUSED)
def test_refusals(text: str) -> None:
    verdict = refusal(a_list({2: text}), GRADES)
    assert verdict is not None
    assert (verdict.reason, verdict.grade) == ("refusal", 2)


@pytest.mark.parametrize("text", META)
def test_meta_talk(text: str) -> None:
    verdict = refusal(a_list({0: text}), GRADES)
    assert verdict is not None
    assert (verdict.reason, verdict.grade) == ("meta_talk", 0)


@pytest.mark.parametrize("text", HUMAN + NO_META)
def test_what_people_write_passes(text: str) -> None:
    assert refusal(a_list({2: text}), GRADES) is None


def test_a_query_about_queries_may_be_answered() -> None:
    text = "The optimizer looks at the query and picks an index."
    assert find_meta_talk(text, "how does an index speed up a query", GRADES) is None
    assert find_meta_talk(text, "how does tea grow", GRADES) == "the query"


def test_a_query_about_levels_may_be_answered() -> None:
    text = "A level 2 charger needs a circuit of its own."
    assert find_meta_talk(text, "what is a level 2 charger", GRADES) is None
    assert find_meta_talk(text, "how to charge a car", GRADES) == "level 2"
    assert find_meta_talk(text, "how to charge a car", (1, 0)) is None


@pytest.mark.realdata
def test_real_passages_are_no_refusals(realdata: Path) -> None:
    with gzip.open(realdata / "trec_dl2019_passage_text" / "passages.jsonl.gz", "rt") as lines:
        texts = [json.loads(line)["text"] for line in lines]
    assert len(texts) == 9139
    assert [text for text in texts if find_refusal(text)] == []
    # "Level 2" of a game, "at level 1" of another.
    assert sum(find_meta_talk(text, "", GRADES) is not None for text in texts) <= 3


# --- copied queries -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("passage", "share"),
    [
        ("What is MoCA?", 1.0),
        ("What is MoCA? What is MoCA? What is MoCA?", 1.0),
        ("What is the MoCA?", 0.75),
        ("He asked: what is MoCA? Nobody in the room knew", 0.3),
        ("nothing of it", 0.0),
        ("", 0.0),
    ],
)
def test_copied_share(passage: str, share: float) -> None:
    assert copied_share(words("what is moca"), words(passage)) == pytest.approx(share)


def test_the_query_again_is_rejected() -> None:
    query = "how long does it take to get a new passport"
    row = a_list({1: "How long does it take to get a new passport today?"}, query=query)
    verdict = query_copied(QueryCopiedFilter(), row)
    assert verdict is not None
    assert (verdict.reason, verdict.grade) == ("query_copied", 1)
    quoting = a_list({1: f'People ask "{query}?" and expect weeks, but many get one within ten days or so.'})
    assert query_copied(QueryCopiedFilter(), quoting) is None


# --- siblings -------------------------------------------------------------------------------


def test_the_lower_of_two_siblings_is_named() -> None:
    row = a_list({2: GOOD[3].replace("eighty", "ninety")})
    verdict = siblings(SiblingsFilter(), row)
    assert verdict is not None
    assert (verdict.reason, verdict.grade) == ("siblings_alike", 2)
    # 15 words, one of which differs.
    assert verdict.detail == "passages of grades 3 and 2: rouge_l 0.933"


def test_siblings_by_jaccard() -> None:
    row = a_list({3: "a b c d", 0: "d c b a"})
    by_words = siblings(SiblingsFilter(measure="jaccard"), row)
    assert by_words is not None
    assert (by_words.grade, by_words.detail) == (0, "passages of grades 3 and 0: jaccard 1.000")
    # The longest common subsequence is one word: 2 * 1 / 8.
    assert siblings(SiblingsFilter(measure="rouge_l"), row) is None


def test_a_similarity_equal_to_the_threshold_passes() -> None:
    row = a_list({3: "a b c d", 0: "a b x y"})
    assert siblings(SiblingsFilter(threshold=0.5), row) is None
    assert siblings(SiblingsFilter(threshold=0.49), row) is not None


# --- together -------------------------------------------------------------------------------


def test_the_first_filter_that_fails_decides() -> None:
    row = a_list({2: "As an AI, no.", 1: "As an AI, no."})
    orders = [
        ((SiblingsFilter(), RefusalFilter(), LengthFilter()), "siblings_alike", 1),
        ((RefusalFilter(), SiblingsFilter(), LengthFilter()), "refusal", 2),
        ((LengthFilter(), SiblingsFilter(), RefusalFilter()), "too_short", 2),
    ]
    for filters, reason, grade in orders:
        decision = filter_list(filters, row, grades=GRADES)
        assert (decision.status, decision.reason, decision.grade) == ("rejected", reason, grade)
        assert (decision.id, decision.ordinal) == ("r", 7)


def test_near_duplicates_are_left_to_their_stage() -> None:
    assert filter_list((NearDuplicatesFilter(),), a_list(), grades=GRADES).status == "kept"


texts = st.one_of(st.text(max_size=60), st.sampled_from([*REFUSED, *META, *HUMAN, *GOOD.values()]))


@given(st.lists(st.tuples(st.integers(0, 3), texts), max_size=5), texts)
def test_any_list_gets_exactly_one_decision(passages: list[tuple[int, str]], query: str) -> None:
    row = ListRow(id="r", ordinal=7, query_id="q", query=query,
                  passages=[Passage(grade=grade, text=text) for grade, text in passages])  # fmt: skip
    decision = filter_list(DEFAULT_FILTERS, row, grades=GRADES)
    assert (decision.status == "kept") == (decision.reason is None)
    if decision.status == "kept":
        assert structure(row, GRADES) is None
        assert Counter(p.grade for p in row.passages) == Counter(GRADES)


@pytest.mark.realdata
def test_recorded_lists_pass_the_default_filters(realdata: Path) -> None:
    reasons: Counter[str | None] = Counter()
    with (realdata / "recorded" / "graded_lists.jsonl").open() as lines:
        for n, line in enumerate(lines):
            recorded = json.loads(line)
            row = ListRow(
                id=recorded["query_id"], ordinal=n, query_id=recorded["query_id"], query=recorded["query"],
                passages=[Passage(grade=int(g), text=text) for g, text in recorded["passages"].items()],
            )  # fmt: skip
            reasons[filter_list(DEFAULT_FILTERS, row, grades=GRADES).reason] += 1
    assert reasons == {None: 300}
