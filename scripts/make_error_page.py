"""Write docs/reference/errors.md, the page of error codes, from quantkit.errors.CODES."""

from __future__ import annotations

from pathlib import Path

from quantkit.errors import CODES

PAGE = Path(__file__).parent.parent / "docs/reference/errors.md"
_AREAS = {
    "1": ("Files", "exit code 1"),
    "2": ("Options, rules and arguments", "exit code 2"),
    "3": ("What this version supports", "exit code 1"),
    "4": ("Disk, memory, packages, devices", "exit code 1"),
    "5": ("Quality", "exit code 3"),
}


def error_page() -> str:
    """Return the page as Markdown: a table for each hundred of codes."""
    lines = [
        "# Error codes",
        "",
        "Every error of the command line ends with a code in brackets; in Python it is `QuantkitError.code`. The",
        "message names the file, tensor, rule or option; the code stays the same when a message is reworded. Errors in",
        "the use of the command line itself (a misspelt option) have exit code 2 and no code.",
    ]
    for digit, (area, exit_code) in _AREAS.items():
        lines += ["", f"## {area} ({exit_code})", "", "| code | cause | remedy |", "|---|---|---|"]
        lines += [f"| {name} | {c.cause} | {c.remedy} |" for name, c in CODES.items() if name[len("QK-E")] == digit]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(error_page(), encoding="utf-8")
