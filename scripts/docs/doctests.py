"""A griffe extension: examples in docstrings become code blocks.

Docstrings of this package show examples as bare `>>>` lines, which Markdown takes for quotations.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    Extension = object
else:
    try:
        from griffe import Extension
    except ImportError:  # pytest collects this module, and only `make docs` installs griffe
        Extension = object

# From the first prompt to the next blank line; the fence gets the indentation of the prompt.
_DOCTEST = re.compile(r"^(?P<indent> *)>>> .*(?:\n(?!\s*$).*)*", re.MULTILINE)


def fence(text: str) -> str:
    """A docstring with its examples in fences.

    >>> fence("Add.\\n\\n>>> 1 + 1\\n2\\n\\nMore.").split("\\n")
    ['Add.', '', '```pycon', '>>> 1 + 1', '2', '```', '', 'More.']
    """
    return _DOCTEST.sub(lambda found: f"{found['indent']}```pycon\n{found[0]}\n{found['indent']}```", text)


class Doctests(Extension):
    """Rewrites every docstring that mkdocstrings reads."""

    def on_object(self, *, obj: Any, **others: Any) -> None:
        """Called by griffe for every module, class, function and attribute."""
        if obj.docstring is not None:
            obj.docstring.value = fence(obj.docstring.value)
