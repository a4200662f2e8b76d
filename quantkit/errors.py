"""The errors a user can meet, and the exit codes they end a command with.

::

    QuantkitError            1   something a user can act on: what, where, how to fix it
    ├── FormatError          1   a file is not what it claims to be
    ├── TypeNotSupported     1   no such type, or no encoder or decoder for it
    ├── RecipeError          2   a rule, preset or option that makes no sense
    ├── ResourceError        1   disk, memory, an optional package or a device is missing
    └── QualityGate          3   the result exists but misses what was demanded of it

click.UsageError (exit code 2) stays what it is. Anything else that escapes is a bug of ours. The command line shows
them (cli/); the library needs no click.
"""

from __future__ import annotations


class QuantkitError(Exception):
    """Base of all errors shown to users without a traceback. ``exit_code`` is what a command ends with."""

    exit_code = 1

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class FormatError(QuantkitError):
    """A file is broken, hostile or of another kind."""


class TypeNotSupported(QuantkitError):
    """A tensor type that does not exist here, or cannot be encoded or decoded."""


class RecipeError(QuantkitError):
    """A rule, preset or combination of options that cannot be followed."""

    exit_code = 2


class ResourceError(QuantkitError):
    """Disk space, memory, an optional package or a device is missing."""


class QualityGate(QuantkitError):
    """The work was done, but its result misses a demanded quality."""

    exit_code = 3
