"""Glossary links: the first occurrence of a term in the prose of a page leads to its entry."""

from __future__ import annotations

import posixpath
import re

from scripts.docs.links import CODE, FENCE, LINK

GLOSSARY = "glossary.md"

# Anchor in the glossary → words of the text, as a regular expression.
TERMS = {
    "accumulation-scale": "Λ|accumulation scale",
    "anchored-law": "anchored",
    "attention-sink": "attention sinks?",
    "certificate": "certificates?",
    "condensation": "condensation|condensed|condenses?",
    "context-parallelism": "context[- ]parallel(?:ism)?",
    "criticality": "criticality",
    "gap-count": r"gap counts?|gap counting|N\(t\)",
    "packing": "packed documents|packing",
    "rem-random-energy-model": "random energy model",
    "retrieving-head": "retrieving heads?|head that retrieves",
    "softcap": "softcaps?",
    "token-collapse": "token collapse|rank collapse",
    "visible-keys-n": "visible keys",
    "w_max": "w_max|largest weight",
    "yarn": "YaRN",
}

# Excluded: code, links, headings and directives, tags and comments, bare addresses.
_SKIPPED = rf"{FENCE}|{CODE}|{LINK}|\[[^\]]*\]\[[^\]]*\]|^(?:#|:::)[^\n]*|<[^>]*>|https?://\S+"
_WORDS = "|".join(f"(?P<t{place}>{words})" for place, words in enumerate(TERMS.values()))
_TOKEN = re.compile(rf"{_SKIPPED}|(?<![\w/.‖])(?:{_WORDS})(?![\w(]|\.\w)", re.MULTILINE | re.DOTALL | re.IGNORECASE)


def link_terms(markdown: str, page: str) -> str:
    """The text of a page with links to the glossary; `page` is its path inside the site's sources.

    >>> link_terms("Λ grows, and `Λ` in code stays. Λ again.", "guide.md")
    '[Λ](glossary.md#accumulation-scale) grows, and `Λ` in code stays. Λ again.'
    """
    target = posixpath.relpath(GLOSSARY, posixpath.dirname(page) or ".")
    used = {anchor for anchor in TERMS if f"{GLOSSARY}#{anchor})" in markdown}

    def replace(token: re.Match[str]) -> str:
        for place, anchor in enumerate(TERMS):
            if token[f"t{place}"] is not None and anchor not in used:
                used.add(anchor)
                return f"[{token[0]}]({target}#{anchor})"
        return token[0]

    return _TOKEN.sub(replace, markdown)
