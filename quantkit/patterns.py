"""Regular expressions that users write: rules of recipes, ``-ot``, ``--tensors`` and their like.

They run in the ``regex`` package, which supports the whole syntax of llama-quantize's std::regex (RE2, whose time is
linear, has neither lookahead nor back references) and, unlike Python's re, can be interrupted. The time of backtracking
over all names is limited for all patterns together; the error names the pattern that was running. Counted repeats are
expanded when a pattern is compiled: if they may multiply, a child process compiles it first.
"""

from __future__ import annotations

import math
import re
import time
import warnings
from typing import Any

from quantkit.errors import FormatError, RecipeError
from quantkit.foreign.child import Child, Limits
from quantkit.names import printable, shorten
from quantkit.process import no_collection

#: Seconds of CPU time for all slow patterns together. A real pattern takes microseconds per name, and a millisecond to
#: compile.
TIME_LIMIT = 2.0
#: Maximum length of a pattern.
MAX_CHARACTERS = 1 << 16

#: Seconds of a search, and of compiling, that are not counted.
_SEARCH, _COMPILE = 2e-4, 2e-2
#: Share of the elapsed time that is credited back, so that a long-lived process regains its limit.
_RECOVERY = 0.01
#: Length times repeat counts up to which a pattern is compiled without a trial in a child process.
_CHILD_CHARACTERS = 1 << 20

#: Classes of std::regex that ``regex`` lacks, or interprets differently.
_CLASSES = {"w": "word", "d": "digit", "s": "space"}
_CLASS = re.compile(r"\[:([wds]):\]", re.IGNORECASE)
#: Recursion, which std::regex and re lack, and which can fill the memory within the time limit.
_RECURSION = re.compile(r"\(\?(?:R|&|P>|[+-]?\d)")
_COUNT = re.compile(r"\{(\d*)(?:,(\d*))?\}")


class _Clock:
    """The excess CPU time of this process's patterns."""

    def __init__(self) -> None:
        self._spent, self._charged_at = 0.0, time.monotonic()

    @property
    def seconds_left(self) -> float:
        """Seconds until ``TIME_LIMIT``."""
        return TIME_LIMIT - self._spent

    def charge(self, seconds: float) -> None:
        """Add the excess CPU time of a search or a compilation."""
        if seconds > 0:
            now = time.monotonic()
            self._spent = max(0.0, self._spent - _RECOVERY * (now - self._charged_at)) + seconds
            self._charged_at = now

    def reset(self) -> None:
        """Reset the clock."""
        self._spent = 0.0


_CLOCK = _Clock()


class Pattern:
    """A compiled regular expression; ``origin`` is its place, for messages. Raises RecipeError if it is invalid."""

    def __init__(self, text: str, origin: str, *, ignore_case: bool = False) -> None:
        import regex

        self.text, self.origin = text, origin
        if len(text) > MAX_CHARACTERS:
            raise RecipeError(
                f"{origin}: the regular expression has {len(text)} characters, more than {MAX_CHARACTERS}",
                "QK-E205",
            )
        began = time.thread_time()
        try:
            if _RECURSION.search(text):
                raise regex.error("recursion is not supported")
            translated, flags = (
                _CLASS.sub(lambda m: f"[:{_CLASSES[m[1].lower()]}:]", text),
                regex.IGNORECASE * ignore_case,
            )
            if len(text) * _copies(text) > _CHILD_CHARACTERS:
                self._try(translated, flags)
            # otherwise garbage collection would count as the pattern's time
            with warnings.catch_warnings(), no_collection():
                warnings.simplefilter("ignore", FutureWarning)
                self._regex = regex.compile(translated, flags)
        except (regex.error, RecursionError, OverflowError) as e:
            raise RecipeError(f"{origin}: {self._quoted} is not a regular expression: {e}", "QK-E205") from None
        _CLOCK.charge(time.thread_time() - began - _COMPILE)
        if _CLOCK.seconds_left <= 0:
            raise self._too_slow("during compilation")

    @property
    def _quoted(self) -> str:
        return shorten(repr(self.text), 200)

    def _try(self, text: str, flags: int) -> None:
        """Compile it in a child process with a memory limit."""
        limits = Limits(seconds=math.ceil(TIME_LIMIT), memory=1 << 28)
        with Child("quantkit.foreign.grammars:Grammars", self._quoted, limits=limits) as child:
            try:
                child.call("regex", text, flags)
            except FormatError as e:
                raise RecipeError(f"{self.origin}: {printable(e.message)}; use smaller repeats", "QK-E205") from None

    def search(self, name: str) -> Any:
        """Return the first match within ``name``, or None. Raises RecipeError when the common time limit is reached."""
        began = time.thread_time()
        try:
            return self._regex.search(name, timeout=max(_CLOCK.seconds_left, 1e-3))
        except TimeoutError:
            pass
        finally:
            _CLOCK.charge(time.thread_time() - began - _SEARCH)
        raise self._too_slow(f"the last on {shorten(repr(name), 200)}")

    def _too_slow(self, occasion: str) -> RecipeError:
        _CLOCK.reset()  # for callers that continue without the pattern
        return RecipeError(
            f"{self.origin}: {self._quoted} takes too long: more than {TIME_LIMIT:g} s together with the patterns "
            f"before it, {occasion}; rewrite nested repeats such as (.+)+",
            "QK-E205",
        )


def _copies(text: str) -> float:
    """Return an upper bound of the copies of any part of a pattern: the product of all counted repeats."""
    return math.prod(max(1.0, float(count[:9] or 1)) for pair in _COUNT.findall(text) for count in pair)
