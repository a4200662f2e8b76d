"""What is cooked: a target is a preset, or a goal that a search meets.

Q4_K_M          a preset, or a tensor type, with its rules
12.3G           the best recipe of at most this size (G: 1000^3 bytes, GiB: 1024^3)
4.2bpw          the best of at most so many bits per weight
kld=0.01        the smallest that diverges no more from the model, in nats a token
Q2_K+feedback   with error feedback, by the covariances of imatrix --covariance; as well for goals
Q2_K+calibrate  with error feedback layer by layer, quantize --calibrate
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from difflib import get_close_matches

from quantkit.errors import RecipeError, TypeNotSupported
from quantkit.pipeline.presets import PRESETS, preset_by_name
from quantkit.units import parse_size

_FORMS = "write a preset (Q4_K_M), a size (12.3G), bits per weight (4.2bpw) or a divergence (kld=0.01)"
#: What may follow a +.
_MANNERS = ("feedback", "calibrate")
_NUMBER = r"(?:\d+(?:\.\d*)?|\.\d+)(?:e-?\d+)?"
#: The least and the most a goal may be, so that a slip of the pen is none.
_BPW, _KLD = (0.5, 32.0), (1e-8, 20.0)


@dataclass(frozen=True, slots=True)
class Goal:
    """What a search is to meet: ``kind`` is "size" (bytes), "bpw" or "kld"."""

    kind: str
    value: float


@dataclass(frozen=True, slots=True)
class Target:
    """What one file is to be: a ``preset``, or a ``goal`` to search for. ``text`` is as it was written, tidied."""

    text: str
    preset: str | None = None
    goal: Goal | None = None
    feedback: bool = False
    calibrate: bool = False

    @property
    def file_part(self) -> str:
        """What tells its file from those of other targets: Q4_K_M, 12.3G, kld0.01-feedback."""
        return self.text.replace("=", "").replace("+", "-")


def parse_target(text: str) -> Target:
    """Return the target that ``text`` stands for. Raises RecipeError."""
    what, *manners = (part.strip() for part in text.strip().split("+"))
    for manner in manners:
        if manner not in _MANNERS:
            raise RecipeError(f"target {text!r}: +{manner} is not known{_near(manner, _MANNERS)}")
    if len(manners) > 1:
        raise RecipeError(f"target {text!r}: give one of {' and '.join(f'+{m}' for m in _MANNERS)}")
    feedback, calibrate = (manner in manners for manner in _MANNERS)
    after = "".join(f"+{manner}" for manner in manners)
    goal = _goal(what, text)
    if goal is not None:
        return Target(what.replace(" ", "") + after, None, goal, feedback, calibrate)
    preset = _preset(what, text)
    return Target(preset + after, preset, None, feedback, calibrate)


def _goal(what: str, text: str) -> Goal | None:
    """Return the goal that the first part of a target is, or None if it has not the form of one."""
    if match := re.fullmatch(rf"kld\s*(?:=|<=)\s*({_NUMBER})", what, re.IGNORECASE):
        return Goal("kld", _within(float(match[1]), _KLD, text, "nats a token"))
    if match := re.fullmatch(rf"({_NUMBER})\s*bpw", what, re.IGNORECASE):
        return Goal("bpw", _within(float(match[1]), _BPW, text, "bits per weight"))
    if re.fullmatch(rf"{_NUMBER}\s*[KMGT]i?B?", what, re.IGNORECASE):
        try:
            size = parse_size(what)
        except ValueError as e:
            raise RecipeError(f"target {text!r}: {e}") from None
        if not size:
            raise RecipeError(f"target {text!r}: no file is that small")
        return Goal("size", float(size))
    if re.fullmatch(_NUMBER, what):
        raise RecipeError(f"target {text!r}: a number of what? Write {what}G or {what}bpw")
    return None


def _within(value: float, bounds: tuple[float, float], text: str, unit: str) -> float:
    if not (math.isfinite(value) and bounds[0] <= value <= bounds[1]):
        raise RecipeError(f"target {text!r}: from {bounds[0]:g} to {bounds[1]:g} {unit}")
    return value


def _preset(what: str, text: str) -> str:
    try:
        found = preset_by_name(what)
    except TypeNotSupported:
        near = _near(what.upper(), [p.name for p in PRESETS])
        raise RecipeError(f"target {text!r}: there is no preset {what!r}{near}; {_FORMS}") from None
    if found.base is None:
        raise RecipeError(f"target {text!r}: {found.name} quantizes nothing; {_FORMS}")
    return found.name


def _near(word: str, words: list[str] | tuple[str, ...]) -> str:
    found = get_close_matches(word, words, 1)
    return f"; did you mean {found[0]}?" if found else ""
