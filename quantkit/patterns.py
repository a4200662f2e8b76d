"""Regular expressions that users write: rules of recipes, ``-ot``, ``--tensors`` and their like.

They run in the ``regex`` package: it knows all that std::regex of llama-quantize knows (RE2, whose time is linear, has
neither lookahead nor back references), and unlike Python's re it can be stopped. A pattern that backtracks for
``TIME_LIMIT`` seconds, over all the names it is tried on, is an error that names it.
"""

from __future__ import annotations

import re
import time
import warnings
from typing import Any

from quantkit.errors import RecipeError

#: Seconds of CPU time. A real pattern takes microseconds a name.
TIME_LIMIT = 2.0

#: Classes of std::regex that ``regex`` does not know, or takes for something else.
_CLASSES = {"w": "word", "d": "digit", "s": "space"}
_CLASS = re.compile(r"\[:([wds]):\]", re.IGNORECASE)
#: Recursion, which neither std::regex nor re has, and which fills the memory within the time limit.
_RECURSION = re.compile(r"\(\?(?:R|&|P>|[+-]?\d)")


class Pattern:
    """A compiled regular expression; ``origin`` says where it stands, for messages. RecipeError for a broken one."""

    def __init__(self, text: str, origin: str, *, ignore_case: bool = False) -> None:
        import regex

        self.text, self.origin, self._spent = text, origin, 0.0
        try:
            if _RECURSION.search(text):
                raise regex.error("recursion is not supported")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)
                known = _CLASS.sub(lambda m: f"[:{_CLASSES[m[1].lower()]}:]", text)
                self._regex = regex.compile(known, regex.IGNORECASE if ignore_case else 0)
        except (regex.error, RecursionError, OverflowError) as e:
            raise RecipeError(f"{origin}: {text!r} is not a regular expression: {e}") from None

    def search(self, name: str) -> Any:
        """Return the first match within ``name``, or None. Raises RecipeError when the time is up."""
        began = time.thread_time()
        try:
            return self._regex.search(name, timeout=max(TIME_LIMIT - self._spent, 1e-3))
        except TimeoutError:
            raise RecipeError(
                f"{self.origin}: {self.text!r} takes too long: more than {TIME_LIMIT:g} s, the last on {name!r}; "
                "rewrite nested repeats such as (.+)+"
            ) from None
        finally:
            self._spent += time.thread_time() - began
