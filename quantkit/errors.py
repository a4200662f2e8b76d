"""Errors shown to users, and the exit codes of a command that ends with them.

::

    QuantkitError            1   something the user can act on: what, where, how to fix it
    ├── FormatError          1   a file is not what it claims to be
    ├── TypeNotSupported     1   no such type, or no encoder or decoder for it
    ├── RecipeError          2   a rule, preset or option that cannot be followed
    ├── ResourceError        1   disk, memory, an optional package or a device is missing
    │   └── ClusterError     1   no node of a cluster can go on; what is done is kept
    └── QualityGate          3   the result exists but misses a required quality

click.UsageError keeps exit code 2. Any other exception that escapes is a bug. The command line (cli/) prints these;
the library itself does not need click.
"""

from __future__ import annotations


class QuantkitError(Exception):
    """Base of all errors shown without a traceback. ``exit_code`` is that of the command."""

    exit_code = 1

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class FormatError(QuantkitError):
    """A file is broken, hostile or not of the expected kind."""


class TypeNotSupported(QuantkitError):
    """A tensor type that does not exist here, or cannot be encoded or decoded."""


class RecipeError(QuantkitError):
    """A rule, preset or combination of options that cannot be followed."""

    exit_code = 2


class ResourceError(QuantkitError):
    """Disk space, memory, an optional package or a device is missing."""


class ClusterError(ResourceError):
    """The nodes of a cluster are gone, or none can be used; a run that ends so keeps what is done."""


class QualityGate(QuantkitError):
    """The work is done, but its result misses a required quality."""

    exit_code = 3
