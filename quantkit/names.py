"""Names that come from files: the class of a tensor, and any text on one line of a screen."""

from __future__ import annotations


def tensor_class(name: str) -> str:
    """Return the class of a tensor: its name without layer and suffix (ffn_down_exps)."""
    parts = [p for p in name.split(".") if not p.isdecimal() and p != "blk"]
    return ".".join(parts[:-1]) if len(parts) > 1 and parts[-1] in ("weight", "bias") else ".".join(parts)


def printable(text: object) -> str:
    """Return a text or path on one line, control characters and invalid UTF-8 escaped: it may come from any file."""
    text = str(text)
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)


def shorten(text: str, width: int) -> str:
    """Return ``text`` cut to ``width`` characters, ending in "…" if anything is missing."""
    return text if len(text) <= width else text[: width - 1] + "…"
