"""Colours of heat maps, the same in both themes, and the ink that is readable on them."""

from __future__ import annotations

from collections.abc import Sequence

Rgb = tuple[int, int, int]

#: Viridis from dark to light, sRGB: readable for the colour-blind by lightness.
VIRIDIS: tuple[Rgb, ...] = (
    (68, 1, 84),
    (72, 40, 120),
    (62, 73, 137),
    (49, 104, 142),
    (38, 130, 142),
    (31, 158, 137),
    (53, 183, 121),
    (110, 206, 88),
    (181, 222, 43),
    (253, 231, 37),
)
#: From too few tokens (orange) through just enough (grey) to plenty (blue).
SUFFICIENCY: tuple[Rgb, ...] = ((166, 54, 3), (253, 174, 107), (240, 240, 240), (158, 202, 225), (107, 174, 214))


def ramp_colour(fraction: float, ramp: Sequence[Rgb] = VIRIDIS) -> str:
    """Return the colour of a ramp at ``fraction`` of its length, as #rrggbb."""
    position = min(max(fraction, 0.0), 1.0) * (len(ramp) - 1)
    i = min(int(position), len(ramp) - 2)
    mixed = (round(a + (position - i) * (b - a)) for a, b in zip(ramp[i], ramp[i + 1], strict=True))
    return "#" + "".join(f"{c:02x}" for c in mixed)


def text_colour(colour: str) -> str:
    """Return white or black, the one of higher contrast on a colour (WCAG 2)."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    light = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "#000000" if (light + 0.05) / 0.05 > 1.05 / (light + 0.05) else "#ffffff"
