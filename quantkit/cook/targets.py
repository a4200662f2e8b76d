"""Targets of a cook: presets, and goals that a search meets.

Q4_K_M          a preset, or a tensor type, with its rules
12.3G           the recipe of least divergence of at most this size (G: 1000^3 bytes, GiB: 1024^3)
4.2bpw          the recipe of least divergence of at most this many bits per weight
kld=0.01        the smallest one of at most this divergence from the model, in nats per token
fit=24G,64G     the recipe of least divergence that fits the memory of each GPU, then of the host
Q2_K+feedback   with error feedback, by the covariances of imatrix --covariance; also for goals
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

_SYNTAX = (
    "write a preset (Q4_K_M), a size (12.3G), bits per weight (4.2bpw), a divergence (kld=0.01) or memory of GPUs and "
    "host (fit=24G,64G)"
)
#: Modifiers, which follow a +.
_MODIFIERS = ("feedback", "calibrate")
#: Maximum length of a target in characters.
_MAX_LENGTH = 100
_NUMBER = r"(?:\d+(?:\.\d*)?|\.\d+)(?:e-?\d+)?"
#: Bounds of goals, against typing errors.
_BPW, _KLD = (0.5, 32.0), (1e-8, 20.0)


@dataclass(frozen=True, slots=True)
class Goal:
    """Goal of a search: ``kind`` is "size" (bytes), "bpw" (bits per weight), "kld" (nats per token) or "fit" (bytes).

    ``devices``: of "fit", the bytes of each GPU, then of the host; their sum is ``value``.
    """

    kind: str
    value: float
    devices: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Target:
    """A file to produce: by a ``preset``, or by a ``goal`` to search for. ``text``: its canonical form."""

    text: str
    preset: str | None = None
    goal: Goal | None = None
    feedback: bool = False
    calibrate: bool = False

    @property
    def file_suffix(self) -> str:
        """The label in file names: Q4_K_M, 12.3G, kld0.01-feedback."""
        return self.text.replace("=", "").replace("+", "-").replace(",", "-")


def parse_target(text: str) -> Target:
    """Return the target that ``text`` names. Raises RecipeError."""
    if len(text) > _MAX_LENGTH:
        raise RecipeError(f"target {text[:_MAX_LENGTH]!r}..: {_SYNTAX}", "QK-E203")
    base, *modifiers = (part.strip() for part in text.strip().split("+"))
    for modifier in modifiers:
        if modifier not in _MODIFIERS:
            raise RecipeError(
                f"target {text!r}: unknown modifier +{modifier}{_suggest(modifier, _MODIFIERS)}", "QK-E203"
            )
    if len(modifiers) > 1:
        raise RecipeError(f"target {text!r}: omit one of {' and '.join(f'+{m}' for m in _MODIFIERS)}", "QK-E201")
    feedback, calibrate = (modifier in modifiers for modifier in _MODIFIERS)
    suffix = "".join(f"+{modifier}" for modifier in modifiers)
    goal = _goal(base, text)
    if goal is not None:
        return Target(base.replace(" ", "") + suffix, None, goal, feedback, calibrate)
    preset = _preset(base, text)
    return Target(preset + suffix, preset, None, feedback, calibrate)


def _goal(base: str, text: str) -> Goal | None:
    """Return the goal in a target without its +words; None if it is not a goal."""
    if match := re.fullmatch(rf"kld\s*(?:=|<=)\s*({_NUMBER})", base, re.IGNORECASE):
        return Goal("kld", _within(float(match[1]), _KLD, text, "nats per token"))
    if match := re.fullmatch(rf"({_NUMBER})\s*bpw", base, re.IGNORECASE):
        return Goal("bpw", _within(float(match[1]), _BPW, text, "bits per weight"))
    if match := re.fullmatch(r"fit\s*=\s*([^/]+)", base, re.IGNORECASE):
        devices = tuple(_bytes(part.strip(), text) for part in match[1].split(","))
        return Goal("fit", float(sum(devices)), devices)
    if re.fullmatch(rf"{_NUMBER}\s*[KMGT]i?B?", base, re.IGNORECASE):
        return Goal("size", float(_bytes(base, text)))
    if re.fullmatch(_NUMBER, base):
        raise RecipeError(f"target {text!r}: a number without a unit: write {base}G or {base}bpw", "QK-E203")
    return None


def _bytes(size: str, text: str) -> int:
    try:
        nbytes = parse_size(size)
    except ValueError as e:
        raise RecipeError(f"target {text!r}: {e}", "QK-E203") from None
    if not nbytes:
        raise RecipeError(f"target {text!r}: no file is that small", "QK-E203")
    return nbytes


def _within(value: float, bounds: tuple[float, float], text: str, unit: str) -> float:
    if not (math.isfinite(value) and bounds[0] <= value <= bounds[1]):
        raise RecipeError(f"target {text!r}: must be {bounds[0]:g} to {bounds[1]:g} {unit}", "QK-E203")
    return value


def _preset(base: str, text: str) -> str:
    try:
        preset = preset_by_name(base)
    except TypeNotSupported:
        remedy = _suggest(base.upper(), [p.name for p in PRESETS]) or f"; {_SYNTAX}"
        raise RecipeError(f"target {text!r}: no preset {base!r}{remedy}", "QK-E301") from None
    if preset.base is None:
        raise RecipeError(f"target {text!r}: {preset.name} quantizes nothing; {_SYNTAX}", "QK-E203")
    return preset.name


def _suggest(word: str, words: list[str] | tuple[str, ...]) -> str:
    matches = get_close_matches(word, words, 1)
    return f"; did you mean {matches[0]}?" if matches else ""
