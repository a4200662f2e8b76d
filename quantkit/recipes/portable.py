"""Regular expressions as each tool reads them: rewritten from one to the other, and matched as there.

llama-quantize (b11434, tools/quantize/quantize.cpp) lower-cases a pattern, then both trees search with std::regex in
ECMAScript's grammar over bytes, case and all; Thireus' scripts search with bash's =~, POSIX extended. A pattern is read
token by token, by a grammar that all engines read alike; what is outside of it (look-behind, inline flags, possessive
repeats, named groups, Unicode classes, back references) is ``NotPortable``.
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
#: What a pattern may grow to.
_LONGEST = 4000
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
    """A pattern that another program reads differently, or not at all; the message says what of it."""


def _tokens(text: str) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    at, depth, last = 0, 0, ""
    while at < len(text):
        token = _TOKEN.match(text, at)
        if token is None:
            raise NotPortable(f"{text[at : at + 4]!r} means something else there, or nothing")
        kind = token.lastgroup or ""
        if kind == "repeat" and last == "repeat" and token[0] == "?":
            kind = "lazy"
        elif kind == "repeat" and (last in ("", "open", "repeat", "lazy") or found[-1][1] in ("|", "^", "\\b", "\\B")):
            raise NotPortable(f"{token[0]!r} repeats nothing, or a repeat")
        depth += (kind == "open") - (kind == "close")
        if depth < 0:
            raise NotPortable("a ) closes nothing")
        found.append((kind, token[0]))
        at, last = token.end(), kind
    if depth:
        raise NotPortable("a ( is not closed")
    return found


def rewritten(pattern: str, dialect: str) -> str:
    """Return a pattern of ours as one of ``dialect``, which finds the same in names without capitals.

    Raises NotPortable if it cannot be said there.
    """
    if not pattern.isascii():
        raise NotPortable("characters beyond ASCII")
    if dialect == "ours":
        return pattern
    made: list[str] = []
    starts: list[int] = []  # where what a repeat repeats begins
    begun: list[tuple[int, str]] = []
    for kind, token in _tokens(pattern):
        begin = len(made)
        if kind == "open":
            begun.append((begin, token))
            made.append({"(?=": "(?!(?!", "(?:": "(" if dialect == "thireus" else "(?:"}.get(token, token))
            if dialect == "thireus" and token in ("(?=", "(?!"):
                raise NotPortable("a look-ahead, which POSIX expressions have not")
        elif kind == "close":
            begin, opened = begun.pop()
            made.append("))" if opened == "(?=" else ")")
        elif kind == "repeat":
            begin = starts[-1]
            made[begin:] = [_repeated("".join(made[begin:]), token, dialect)]
        elif kind == "lazy":  # it finds the same names
            begin = starts[-1]
        else:
            made.append(_plain(kind, token, dialect))
        starts.append(begin)
        if len(made[-1]) > 4 * _LONGEST:
            raise NotPortable("it becomes too long")
    return "".join(made)


def _repeated(atom: str, token: str, dialect: str) -> str:
    """Return an atom and its repeat; for ik, whose rules end at commas, without one."""
    if dialect != "ik" or "," not in token:
        return atom + token
    least, _, most = token[1:-1].partition(",")
    if not most:
        return f"{atom}{{{least}}}{atom}*"
    more = int(most) - int(least)
    if more < 0 or more * len(atom) > _LONGEST:
        raise NotPortable(f"{token} has a comma")
    return f"{atom}{{{least}}}" + f"({atom}" * more + ")?" * more


def _plain(kind: str, token: str, dialect: str) -> str:
    if kind == "escape":
        name = token[1]
        if dialect == "ik" or name == "b" or (dialect == "llama.cpp" and name.islower()):
            return token
        if name == "B":
            return token if dialect == "thireus" else r"(?!\b)"
        return f"[{'^' if name.isupper() else ''}{_CLASSES[name.lower()]}]"
    if kind == "set":
        return _set(token, dialect)
    lower = token.lower()
    if lower in ("=", ",") or lower.isspace():
        return f"\\x{ord(lower):02x}" if dialect != "thireus" else "."
    if kind == "quoted" and token[1] in "=, #":
        return f"\\x{ord(token[1]):02x}" if dialect != "thireus" else "."
    if kind == "hex" and dialect == "thireus":
        raise NotPortable(f"{token}, which POSIX expressions have not")
    return lower


def _set(token: str, dialect: str) -> str:
    """Return a set in lower case, as the other cases are found without capitals in names."""
    text = re.sub(r"\\([dsw])", lambda m: _CLASSES[m[1]], token)
    if odd := re.search(r"\\[A-Za-z]|[=,\s]", re.sub(r"\[:\^?\w+:\]", "", text)):
        raise NotPortable(f"{odd[0]!r} in {token}")
    if dialect == "thireus" and "\\" in text:
        raise NotPortable(f"an escape in {token}, which POSIX expressions read as two characters")
    return text.lower()


class Theirs:
    """A pattern as the program of a dialect matches it. Raises NotPortable for one it refuses, or reads otherwise."""

    def __init__(self, pattern: str, dialect: str, origin: str) -> None:
        if not pattern.isascii():
            raise NotPortable("characters beyond ASCII")
        tokens = _tokens(pattern)
        if "=" in pattern:
            raise NotPortable("a =, where the type would begin")
        if dialect == "ik" and "," in pattern:
            raise NotPortable("a comma, where the next rule would begin")
        if dialect == "llama.cpp" and re.search(r"\s", pattern):
            raise NotPortable("a space, where the next rule would begin")
        if dialect == "thireus":
            posix = {"lazy", "hex"}
            if odd := [t for k, t in tokens if k in posix or t in ("(?:", "(?=", "(?!", r"\d", r"\D")]:
                raise NotPortable(f"{odd[0]}, which POSIX expressions have not")
        text = pattern.lower() if dialect == "llama.cpp" else pattern
        self.pattern = Pattern(f"(?a){text}", origin)

    def matches(self, name: str) -> bool:
        """Tell whether the program would find the pattern in ``name``; it sees bytes."""
        return self.pattern.search(name.encode("utf-8", "surrogateescape").decode("latin-1")) is not None


def check_reads(pattern: str, dialect: str, origin: str) -> Theirs:
    """Return the pattern as it is read there; RecipeError if it is not."""
    try:
        return Theirs(pattern, dialect, origin)
    except NotPortable as e:
        raise RecipeError(f"{origin}: {READERS[dialect]} does not read {pattern!r}: {e}") from None
