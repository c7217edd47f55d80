"""Near duplicates: texts most of whose shingles (runs of words) are equal."""

from __future__ import annotations

import re
from collections import Counter, defaultdict

_WORDS = re.compile(r"\w+")


class NearDuplicates:
    """Finds the earlier text whose shingles of ``words`` words have a Jaccard similarity of at
    least ``least`` with those of a given text. A shorter text is one shingle.

    The search is exact: an index from shingles to texts, linear in the texts that share a shingle.
    Source of the measure: Broder, On the resemblance and containment of documents (1997).
    """

    def __init__(self, *, words: int = 5, least: float = 0.7) -> None:
        self._words, self._least = words, least
        self._sizes: dict[str, int] = {}
        self._order: dict[str, int] = {}
        self._index: defaultdict[tuple[str, ...], list[str]] = defaultdict(list)

    def find(self, text: str) -> str | None:
        """The key of the most similar text, the earliest of several; None if none is similar
        enough.
        """
        shingles = self._shingles(text)
        shared = Counter(key for shingle in shingles for key in self._index.get(shingle, ()))
        best, similarity = None, 0.0
        for key, common in shared.items():
            found = common / (len(shingles) + self._sizes[key] - common)
            earlier = best is None or self._order[key] < self._order[best]
            if found >= self._least and (found > similarity or (found == similarity and earlier)):
                best, similarity = key, found
        return best

    def add(self, key: str, text: str) -> None:
        """Add ``text`` under ``key``. Raises ``ValueError`` for a key that is already in use."""
        if key in self._sizes:
            raise ValueError(f"another text was added as {key!r}")
        shingles = self._shingles(text)
        self._sizes[key], self._order[key] = len(shingles), len(self._order)
        for shingle in shingles:
            self._index[shingle].append(key)

    def _shingles(self, text: str) -> set[tuple[str, ...]]:
        words, n = _WORDS.findall(text.lower()), self._words
        return {tuple(words[i : i + n]) for i in range(max(1, len(words) - n + 1))}
