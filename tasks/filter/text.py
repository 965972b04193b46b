"""What the filters understand by a word, and how alike two texts are.

Text is folded before it is compared: Unicode NFKC, case folded, apostrophes and invisible format
characters dropped, every other run of punctuation, symbols and white space taken as one gap.
Scripts that put no spaces between words (Han, kana, Thai, Lao, Khmer, Burmese, Tibetan, Javanese,
Balinese and their kin) are cut into characters: a letter with the vowel and tone marks on it is one
"word". So a length in words is a length in characters there, and a shingle of three words is a
shingle of three characters.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray
from rapidfuzz.distance import LCSseq

Hashes = NDArray[np.uint64]

_UNSPACED = (
    "\u0e00-\u0eff"  # Thai, Lao
    "\u0f00-\u109f"  # Tibetan, Myanmar
    "\u1780-\u17ff\u1950-\u19ff\u1a20-\u1aaf\u1b00-\u1b7f"  # Khmer, Tai scripts, Balinese
    "\u3005-\u3007\u3021-\u312f\u31a0-\u31bf\u31f0-\u31ff"  # kana, bopomofo
    "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"  # Han
    "\ua9e0-\ua9ff\uaa60-\uaadf\ua980-\ua9df"  # Myanmar, Tai Viet, Javanese
    "\U00016fe0-\U00018cff\U0001aff0-\U0001b16f\U00020000-\U0003ffff"  # Tangut, Khitan, Nüshu, kana, Han
)
_HAS_UNSPACED = re.compile(f"[{_UNSPACED}]")


class _Folding(dict[int, str | None]):
    """A `str.translate` table that is filled as characters are met.

    Separators become a space; apostrophes and format characters vanish; a letter of an unspaced
    script gets a gap before it, marks stay with the letter they follow.
    """

    def __missing__(self, code: int) -> str | None:
        self[code] = folded = self._fold(chr(code))
        return folded

    @staticmethod
    def _fold(character: str) -> str | None:
        if character in "'\u2019\u02bc\uff07":
            return None
        category = unicodedata.category(character)
        if category == "Cf":
            return None
        if category == "Cc" or category[0] in "PSZ":
            return " "
        if category[0] != "M" and _HAS_UNSPACED.match(character):
            return f" {character}"
        return character


_FOLDING = _Folding()
_AFTER_UNSPACED = re.compile(f"(?<=[{_UNSPACED}])(?=[^\\s{_UNSPACED}])")


def words(text: str) -> list[str]:
    """The folded words of a text, in order.

    >>> words("Don't PANIC: it's 3.5 km -- really")
    ['dont', 'panic', 'its', '3', '5', 'km', 'really']
    >>> words("使用Python编程")
    ['使', '用', 'python', '编', '程']
    """
    if text.isascii():
        return text.lower().translate(_FOLDING).split()
    folded = _compose(_compose(text).casefold()).translate(_FOLDING)
    if not _HAS_UNSPACED.search(folded):
        return folded.split()
    return _AFTER_UNSPACED.sub(_gap_unless_mark, folded).split()


def _compose(text: str) -> str:
    return unicodedata.normalize("NFKC", text)


def _gap_unless_mark(place: re.Match[str]) -> str:
    return "" if unicodedata.category(place.string[place.end()])[0] == "M" else " "


def normalised(text: str) -> str:
    """The folded words joined by single spaces: two texts that differ in looks alone are equal.

    A text without a single word (emoji, say) stands for itself, white space folded.
    """
    return " ".join(words(text)) or " ".join(text.split())


def shingles(tokens: Sequence[str], size: int) -> set[tuple[str, ...]]:
    """All runs of `size` words; empty when there are fewer words."""
    return set(zip(*(tokens[i:] for i in range(size)), strict=False))


def jaccard(a: set[tuple[str, ...]] | set[str], b: set[tuple[str, ...]] | set[str]) -> float:
    """|a & b| / |a | b|, 0 for two empty sets."""
    common = len(a & b)
    union = len(a) + len(b) - common
    return common / union if union else 0.0


def common_subsequence(a: Sequence[str], b: Sequence[str]) -> int:
    """Length in words of the longest common subsequence."""
    numbers: dict[str, int] = {}
    # Numbered first: rapidfuzz compares sequence elements by hash, and Python's of strings is seeded.
    left, right = ([numbers.setdefault(word, len(numbers)) for word in side] for side in (a, b))
    return int(LCSseq.similarity(left, right))


def rouge_l(a: Sequence[str], b: Sequence[str]) -> float:
    """ROUGE-L F1 over words (Lin 2004, eq. 2-4 with beta = 1): 2 LCS / (|a| + |b|)."""
    total = len(a) + len(b)
    return 2 * common_subsequence(a, b) / total if total else 0.0


@lru_cache(maxsize=1 << 16)
def _word_hash(word: str) -> int:
    return int.from_bytes(blake2b(word.encode(), digest_size=8).digest(), "little")


def ngram_hashes(tokens: Sequence[str], size: int) -> Hashes:
    """A 64-bit hash of every run of `size` words, shape (max(0, len(tokens) - size + 1),).

    The same on every machine and in every process. Two different runs share a hash with a chance
    of about 2^-58.
    """
    if len(tokens) < size:
        return np.empty(0, np.uint64)
    hashed = np.fromiter(map(_word_hash, tokens), np.uint64, len(tokens))
    runs = np.lib.stride_tricks.sliding_window_view(hashed, size)
    return mix((runs * _powers(size)).sum(axis=1, dtype=np.uint64))


@lru_cache(maxsize=8)
def _powers(size: int) -> Hashes:
    # An odd multiplier that is 5 mod 8: its powers differ in all but a few low bits.
    return np.array([pow(0xD1342543DE82EF95, i, 1 << 64) for i in range(size)], np.uint64)


def mix(values: Hashes) -> Hashes:
    """The finaliser of SplitMix64 (Steele et al. 2014): every input bit moves every output bit."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
