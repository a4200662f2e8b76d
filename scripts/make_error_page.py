"""Write docs/reference/errors.md, the page of codes, from quantkit.errors.CODES and WARNINGS."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from quantkit.errors import CODES, WARNINGS, ErrorCode

PAGE = Path(__file__).parent.parent / "docs/reference/errors.md"
_AREAS = {
    "QK-E1": ("Errors: files", "Exit code 1."),
    "QK-E2": ("Errors: options, rules and arguments", "Exit code 2."),
    "QK-E3": ("Errors: what this version supports", "Exit code 1."),
    "QK-E4": ("Errors: disk, memory, packages, devices", "Exit code 1."),
    "QK-E5": ("Errors: quality", "Exit code 3."),
    "QK-W0": (
        "Warnings: rules and options for types",
        "Printed by `quantize`, `convert` and `recipe lint`; the exit code stays the same, except that `recipe lint` "
        "counts some as errors.",
    ),
}
_HEAD = """\
# Error and warning codes

Every error of the command line ends with a code in brackets; in Python it is `QuantkitError.code`. The
message names the file, tensor, rule or option; the code stays the same when a message is reworded. Errors in
the use of the command line itself (a misspelt option) have exit code 2 and no code. A warning begins with its code.
"""


def _row(name: str, code: ErrorCode) -> str:
    cells = (cell.replace("|", "\\|") for cell in (f"`{name}`", code.cause, code.remedy))
    return f"| {' | '.join(cells)} |"


def error_page() -> str:
    """Return the page as Markdown: a table for each range of a hundred codes."""
    codes: Mapping[str, ErrorCode] = CODES | WARNINGS
    lines = [_HEAD]
    for prefix, (title, text) in _AREAS.items():
        lines += [f"## {title}", "", text, "", "| code | cause | remedy |", "|---|---|---|"]
        lines += [*(_row(name, code) for name, code in codes.items() if name.startswith(prefix)), ""]
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(error_page(), encoding="utf-8")
