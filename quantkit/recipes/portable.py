"""Regular expressions in the syntax of each dialect: conversion, and matching as its program does.

llama-quantize (b11434, tools/quantize/quantize.cpp) lower-cases a pattern, then both trees search with std::regex in
ECMAScript's grammar over bytes, case and all; Thireus' scripts search with bash's =~, POSIX extended. A pattern is read
token by token, by a grammar that all engines share; others (look-behind, inline flags, possessive repeats, named
groups, Unicode classes, back references) are ``NotPortable``.
"""

from __future__ import annotations

import re

from quantkit.errors import RecipeError
from quantkit.patterns import Pattern

#: Dialects by name, and the program that reads each.
READERS = {
    "ours": "quantkit",
    "llama.cpp": "llama-quantize of llama.cpp",
    "ik": "llama-quantize of ik_llama.cpp",
    "thireus": "the scripts of GGUF-Tool-Suite",
}
#: Limit of the length of a rewritten pattern.
_MAX_LENGTH = 4000
_CLASSES = {"d": "[:digit:]", "s": "[:space:]", "w": "[:alnum:]_"}
_TOKEN = re.compile(
    r"""(?P<set>\[\^?(?!\])(?:\[:\^?\w+:\]|\\.|[^\]\\\[]|\[(?![:.=]))+\])
    |(?P<open>\(\?:|\(\?=|\(\?!|\((?!\?))|(?P<close>\))
    |(?P<repeat>[*+?]|\{\d+(?:,\d*)?\})
    |(?P<escape>\\[dDsSwWbB])|(?P<quoted>\\[^\w\s])|(?P<hex>\\x[0-9a-fA-F]{2})
    |(?P<special>[.^$|])|(?P<literal>[^\\\[\](){}*+?])""",
    re.VERBOSE | re.DOTALL,
)


class NotPortable(Exception):
    """A pattern that another program reads differently or not at all; the message names the part."""


def _tokenize(text: str) -> list[tuple[str, str]]:
    tokens: list[tuple[str, str]] = []
    offset = depth = 0
    last = ""
    while offset < len(text):
        token = _TOKEN.match(text, offset)
        if token is None:
            raise NotPortable(f"{text[offset : offset + 4]!r} has another meaning there, or none")
        kind = token.lastgroup or ""
        if kind == "repeat" and last == "repeat" and token[0] == "?":
            kind = "lazy"
        elif kind == "repeat" and (last in ("", "open", "repeat", "lazy") or tokens[-1][1] in ("|", "^", "\\b", "\\B")):
            raise NotPortable(f"nothing precedes {token[0]!r} that could repeat")
        depth += (kind == "open") - (kind == "close")
        if depth < 0:
            raise NotPortable("unmatched )")
        tokens.append((kind, token[0]))
        offset, last = token.end(), kind
    if depth:
        raise NotPortable("unmatched (")
    return tokens


def rewrite(pattern: str, dialect: str) -> str:
    """Return quantkit's pattern in the syntax of ``dialect``, with the same matches in names without capitals.

    Raises NotPortable if it has no equivalent.
    """
    if not pattern.isascii():
        raise NotPortable("characters beyond ASCII")
    if dialect == "ours":
        return pattern
    output: list[str] = []
    starts: list[int] = []  # of the atom that a quantifier applies to
    open_groups: list[tuple[int, str]] = []
    for kind, token in _tokenize(pattern):
        start = len(output)
        if kind == "open":
            open_groups.append((start, token))
            output.append({"(?=": "(?!(?!", "(?:": "(" if dialect == "thireus" else "(?:"}.get(token, token))
            if dialect == "thireus" and token in ("(?=", "(?!"):
                raise NotPortable("a look-ahead, which POSIX expressions do not support")
        elif kind == "close":
            start, group = open_groups.pop()
            output.append("))" if group == "(?=" else ")")
        elif kind == "repeat":
            start = starts[-1]
            output[start:] = [_repeat("".join(output[start:]), token, dialect)]
        elif kind == "lazy":  # has the same matches
            start = starts[-1]
        else:
            output.append(_rewrite_token(kind, token, dialect))
        starts.append(start)
        if len(output[-1]) > 4 * _MAX_LENGTH:
            raise NotPortable("it becomes too long")
    return "".join(output)


def _repeat(atom: str, token: str, dialect: str) -> str:
    """Return an atom with its repeat, for ik, whose rules end at commas, without a comma."""
    if dialect != "ik" or "," not in token:
        return atom + token
    least, _, most = token[1:-1].partition(",")
    if not most:
        return f"{atom}{{{least}}}{atom}*"
    extra = int(most) - int(least)
    if extra < 0 or extra * len(atom) > _MAX_LENGTH:
        raise NotPortable(f"{token} has a comma")
    return f"{atom}{{{least}}}" + f"({atom}" * extra + ")?" * extra


def _rewrite_token(kind: str, token: str, dialect: str) -> str:
    if kind == "escape":
        name = token[1]
        if dialect == "ik" or name == "b" or (dialect == "llama.cpp" and name.islower()):
            return token
        if name == "B":
            return token if dialect == "thireus" else r"(?!\b)"
        return f"[{'^' if name.isupper() else ''}{_CLASSES[name.lower()]}]"
    if kind == "set":
        return _rewrite_set(token, dialect)
    lower = token.lower()
    if lower in ("=", ",") or lower.isspace():
        return f"\\x{ord(lower):02x}" if dialect != "thireus" else "."
    if kind == "quoted" and token[1] in "=, #":
        return f"\\x{ord(token[1]):02x}" if dialect != "thireus" else "."
    if kind == "hex" and dialect == "thireus":
        raise NotPortable(f"{token}, which POSIX expressions do not support")
    return lower


def _rewrite_set(token: str, dialect: str) -> str:
    """Return a set in lower case, which matches lower-case names."""
    text = re.sub(r"\\([dsw])", lambda m: _CLASSES[m[1]], token)
    if invalid := re.search(r"\\[A-Za-z]|[=,\s]", re.sub(r"\[:\^?\w+:\]", "", text)):
        raise NotPortable(f"{invalid[0]!r} in {token}")
    if dialect == "thireus" and "\\" in text:
        raise NotPortable(f"an escape in {token}, which POSIX expressions read as two characters")
    return text.lower()


class DialectPattern:
    """A pattern, matched as by the program of a dialect. Raises NotPortable if the program reads it differently or not
    at all."""

    def __init__(self, pattern: str, dialect: str, origin: str) -> None:
        if not pattern.isascii():
            raise NotPortable("characters beyond ASCII")
        tokens = _tokenize(pattern)
        if "=" in pattern:
            raise NotPortable("a =, which starts the type")
        if dialect == "ik" and "," in pattern:
            raise NotPortable("a comma, which starts the next rule")
        if dialect == "llama.cpp" and re.search(r"\s", pattern):
            raise NotPortable("a space, which starts the next rule")
        if dialect == "thireus":
            posix = {"lazy", "hex"}
            if invalid := [t for k, t in tokens if k in posix or t in ("(?:", "(?=", "(?!", r"\d", r"\D")]:
                raise NotPortable(f"{invalid[0]}, which POSIX expressions do not support")
        text = pattern.lower() if dialect == "llama.cpp" else pattern
        self.pattern = Pattern(f"(?a){text}", origin)

    def matches(self, name: str) -> bool:
        """Return whether the program, which compares bytes, finds the pattern in ``name``."""
        return self.pattern.search(name.encode("utf-8", "surrogateescape").decode("latin-1")) is not None


def compile_pattern(pattern: str, dialect: str, origin: str) -> DialectPattern:
    """Return a pattern of a dialect. Raises RecipeError if its program does not read it."""
    try:
        return DialectPattern(pattern, dialect, origin)
    except NotPortable as e:
        raise RecipeError(f"{origin}: {READERS[dialect]} cannot read {pattern!r}: {e}", "QK-E205") from None
