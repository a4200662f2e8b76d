"""Refusals: the code of an error and the values that it names, independent of its wording.

A refusal is written as a code, followed by values without spaces: ``"QK-E106 q_proj.bias 512"``. "|" separates
alternative codes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from quantkit.errors import QuantkitError

Kind = type[QuantkitError] | tuple[type[QuantkitError], ...]


def names(text: str, value: object) -> bool:
    """Return whether a text contains a value, not as part of a longer word or number."""
    return re.search(rf"(?<!\w){re.escape(str(value))}(?!\w)", text) is not None


def check_values(text: str, *values: object) -> None:
    """Fail unless a text contains all values."""
    missing = [str(value) for value in values if not names(text, value)]
    assert not missing, f"does not contain {missing}: {text}"


@contextmanager
def refuses(kind: Kind, refusal: str, *values: object) -> Iterator[pytest.ExceptionInfo[QuantkitError]]:
    """Expect an error with a class, a code and values; values with spaces are separate arguments."""
    code, *short = refusal.split()
    with pytest.raises(kind) as raised:
        yield raised
    error = raised.value
    assert error.code in code.split("|"), f"{error.code}: {error.message}"
    check_values(error.message, *short, *values)


def check_refused(printed: str, refusal: str, *values: object) -> None:
    """Fail unless the output of a command ends with an error with a code and values."""
    code, *short = refusal.split()
    text = " ".join(printed.split())
    assert text.endswith(f"[{code}]"), text
    check_values(text, *short, *values)
