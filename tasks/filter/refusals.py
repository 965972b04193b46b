"""Phrases by which a language model gives itself away instead of writing a passage.

Written against some 30,000 web passages (TREC DL 2019 and 2020, MedQuAD, LLMJudge) that must pass:
a phrase that people also write is only caught where its neighbours show who speaks.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache

_CANNOT = r"(?:cannot|can not|can't|could not|couldn't|(?:am |'m )(?:not able|unable) to|will not|won't)"
_SORRY = r"(?:i am|i'm) (?:really |very |so |truly )?sorry"
_MODEL = r"(?:ai|artificial intelligence|(?:large )?language model|machine learning model)"
_TEXT = r"(?:passage|text|document|paragraph|snippet)"
_VERY = r"(?:(?:not|only|completely|entirely|directly|somewhat|partially|marginally|highly|perfectly) )"

# Lower case. Openings stand at the beginning of a passage, phrases at the beginning of any word.
_REFUSAL_OPENINGS = (
    # Further in, people are sorry too.
    rf"(?:{_SORRY}|sorry|(?:i|my) apologi[sz]e|my apologies|apologies),? (?:but|for|i {_CANNOT})\b",
)
_REFUSAL_PHRASES = (
    rf"{_SORRY},? (?:but )?(?:as an? {_MODEL}|i ?{_CANNOT})\b",
    # Not "I cannot help but notice", "I can't help it".
    rf"i ?{_CANNOT} (?:help|assist)(?: (?:you|with)\b|\s*(?:[.!;,]|$))",
    rf"i ?{_CANNOT} (?:fulfil+|comply with|answer|respond to|create|generate|produce|write|provide)"
    r" (?:this|that|your|the|an?|any)(?: [\w-]+){0,2}?"
    r" (?:requests?|prompts?|query|queries|questions?|passages?|content)\b",
    r"as an? (?:ai|artificial intelligence) (?:language model|model|assistant|chatbot)\b",
    r"as an? (?:large )?language model\b",
    r"as an ai(?: \w+)?, i\b",
    r"as an ai\s*(?:[.,;]|$)",
    rf"(?:i am|i'm) (?:just |only |merely )?an? {_MODEL}(?: (?:model|assistant|chatbot))?"
    r"\s*(?:[.,;]|$| and | created | trained )",
    r"i do(?: not|n't) have access to (?:real-time|current|the internet)\b",
    r"i do(?: not|n't) have personal (?:opinions|experiences|beliefs)\b",
)
_META_OPENINGS = (
    rf"{_VERY}?(?:relevant|irrelevant|unrelated|related {_TEXT})(?: {_TEXT})?\s*[:\-–—]",
    r"as (?:you )?requested\b",
    r"(?:sure|certainly|of course|absolutely)[,!.] (?:here|i can|i will|i'll|let me)\b",
)
_META_PHRASES = (
    rf"(?:this|the|my) {_TEXT} (?:is|was|should be|would be|seems) {_VERY}*"
    r"(?:(?:ir)?relevant|unrelated|off-topic|on-topic)\b",
    rf"(?:this|the|my) {_TEXT} (?:does not|doesn't|partially|partly|fully|directly|perfectly|only)"
    r" (?:(?:directly|fully) )?(?:answers?|address(?:es)?|responds?)\b",
    r"perfectly relevant\b",
    r"(?:ir)?relevan(?:t|ce) (?:to|for|of) (?:the|this|your|a)"
    r" (?:given |search |user )?(?:query|queries|question)\b",
    rf"(?:not|highly|partially|somewhat|marginally) relevant {_TEXT}\b",
    r"relevance[ -](?:level|grade|score|label|scale|rating)s?\b",
    r"(?:level|grade|degree)s? of relevance\b",
    # The keys of a schema, and JSON that was not taken apart.
    r"(?:grade|level|passage|text)_\d\b",
    r"(?:min|max)_words\b",
    r"""(?:passages?|grades?|levels?|query|text|\d)["']\s*:\s*["'\[{]""",
    r"as (?:you )?requested\s*[,:]",
    r"here(?: is|'s| are) (?:the|an?|your|my|some)(?: [\w-]+){0,3}?"
    r" (?:passages?|paragraphs?|responses? to (?:the|your)|snippets?)\b",
    r"the user(?:'s)? (?:query|question|search|is asking|asked|wants to know)\b",
)
# Meta-talk, unless the row's own query is about such things.
_QUERY_PHRASES = (r"(?:the|this) (?:given |search |user )?quer(?:y|ies)\b", r"your query\b")
_ABOUT_QUERIES = re.compile(r"\b(?:quer(?:y|ies)|sql|databases?|search engines?)\b", re.IGNORECASE)
_LEVEL = (
    r"\blevel(?<!\bsea level)(?<!\bground level)(?<!\bwater level)(?<!\beye level)[ -]?(?:{})\b(?![.,]?\d)"
)
_ABOUT_LEVELS = re.compile(r"\blevels?\b", re.IGNORECASE)


def _at_start(openings: Iterable[str]) -> re.Pattern[str]:
    return re.compile(rf"\W*(?:{'|'.join(openings)})")


def _at_word(phrases: Iterable[str]) -> re.Pattern[str]:
    # One alternation behind one \b is several times faster than a search for each phrase.
    return re.compile(rf"\b(?:{'|'.join(phrases)})")


_REFUSAL = _at_start(_REFUSAL_OPENINGS), _at_word(_REFUSAL_PHRASES)
_META_TALK = _at_start(_META_OPENINGS), _at_word(_META_PHRASES)
_QUERY_TALK = _at_word(_QUERY_PHRASES)


@lru_cache(maxsize=32)
def _level_talk(grades: tuple[int, ...]) -> re.Pattern[str]:
    return re.compile(_LEVEL.format("|".join(map(str, grades))))


def find_refusal(text: str) -> str | None:
    """The words by which a passage turns out to be a refusal, or None."""
    text = _plain(text)
    opening, phrase = _REFUSAL
    return _said(opening.match(text) or phrase.search(text))


def find_meta_talk(text: str, query: str, grades: Sequence[int]) -> str | None:
    """The words by which a passage speaks of its own making, or None.

    Args:
        text: the passage.
        query: the row's query. "The query" is allowed where it is about queries or databases, and
            "level 2" where it is about levels.
        grades: "level 3" is meta-talk when 3 is one of these.
    """
    text = _plain(text)
    opening, phrase = _META_TALK
    found = opening.match(text) or phrase.search(text)
    if not found and not _ABOUT_QUERIES.search(query):
        found = _QUERY_TALK.search(text)
    if not found and not _ABOUT_LEVELS.search(query):
        found = _level_talk(tuple(grades)).search(text)
    return _said(found)


def _plain(text: str) -> str:
    """Lower case, white space folded, apostrophes straightened, so that the patterns can be simple."""
    return " ".join(text.lower().replace("\u2019", "'").replace("\u02bc", "'").split())


def _said(found: re.Match[str] | None) -> str | None:
    return found.group().strip() if found else None
