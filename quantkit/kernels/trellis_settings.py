"""Search settings of the trellis types, one record a type, shared by CPU and CUDA, whose bytes are the same.

cpu/encode/trellis.py says what the steps are. *Values* are 32 with a scale of their own, their *energy* sum(w x x).
"""

from __future__ import annotations

from dataclasses import dataclass

#: Of how many lanes the best family, or cell, remains, the second best, and so on.
Shape = tuple[int, ...]


@dataclass(frozen=True)
class TreeSearch:
    """A search down the tree of a codebook (cpu/encode/trellis_codebook.py).

    families, cells: how many remain; without families all cells are ranked. coarse_centers, coarse_points: they are
    ranked in 8 bits. short_weights: points are ranked in 16 bits, but weights have 8. scales: for how many scales
    points are ranked, one or two.
    """

    families: Shape
    cells: Shape
    coarse_centers: bool = True
    coarse_points: bool = False
    short_weights: bool = False
    scales: int = 1


@dataclass(frozen=True)
class ListSearch:
    """A search of the first lines that are listed near values (cpu/encode/trellis_lists.py).

    two_scales: half of the survivors are the best for a scale 1/8 above, half for one below. codebooks: at once.
    """

    lines: int
    two_scales: bool = False
    codebooks: int = 1
    scales: int = 1


@dataclass(frozen=True)
class TrellisSettings:
    """The search of a type."""

    #: Points of a codebook; values of a point; whether they are magnitudes, scales having no sign then; codebooks.
    points: int
    size: int
    #: The levels that scales have: "codebook" (IQ4_NL's), "unsigned" (0 .. 15) or "wide" (-64 .. 63); the largest.
    levels: str
    largest_level: int
    #: Searches: of all values; of those of much energy; of the better codebook, once more; for the scale chosen.
    first: TreeSearch | ListSearch
    deep: TreeSearch
    retry: ListSearch | None = None
    final: TreeSearch | ListSearch | None = None
    magnitudes: bool = False
    codebooks: int = 1
    #: For how many scales around the guess: values of little energy, of much, of most, of unequal weights.
    light_searches: int = 1
    heavy_searches: int = 2
    deep_searches: int = 3
    unequal_searches: int = 2
    #: Times the mean energy: what is much; what is most; that with patience (a row of few values that matter).
    heavy_energy: float = 2.0
    deep_energy: float = 4.0
    patient_deep_energy: float = 4.0
    #: With patience all values count as heavy; without, unequal weights make a search deep.
    heavy_if_patient: bool = True
    deep_if_unequal: bool = True
    #: Of a row's error, from which values are searched for deeply, and from which all points are ranked for a group;
    #: what both are multiplied by in rows of 256 values.
    deep_error: float = 0.05
    scan_error: float = 0.05
    short_row_factor: float = 1.0
    #: All points are ranked for signs and codebooks whose error exceeds the least by at most this share.
    scan_slack: float = 0.3
    #: The share of energy from which a row is uneven; scales of the row that are tried then; fits of a scale.
    uneven_share: float = 0.1
    row_scales: int = 4
    fits: int = 1
    #: By how much a row's scale exceeds that of least squares, with which values come out too small on average.
    row_scale_gain: float = 1.0

    @property
    def signs(self) -> int:
        """The number of signs of scales."""
        return 1 if self.magnitudes else 2

    @property
    def combinations(self) -> int:
        """Signs times codebooks."""
        return self.signs * self.codebooks

    @property
    def groups(self) -> int:
        """Points of 32 values."""
        return 32 // self.size

    @property
    def slots(self) -> int:
        """Searches whose survivors are kept of 32 values, and one more."""
        return self.deep_searches + 1


TRELLIS_SETTINGS = {
    "IQ1_KT": TrellisSettings(
        points=8192,
        size=8,
        levels="codebook",
        largest_level=127,
        first=TreeSearch((16, 4), (16, 8), coarse_points=True),
        deep=TreeSearch((), (16, 16, 16), coarse_centers=False),
        deep_energy=8.0,
        patient_deep_energy=8.0,
        row_scale_gain=1.07,
    ),
    "IQ2_KT": TrellisSettings(
        points=65536,
        size=8,
        levels="codebook",
        largest_level=127,
        first=TreeSearch((16, 4), (16, 4), coarse_points=True),
        deep=TreeSearch((16, 16), (16, 16, 16), coarse_centers=False),
        heavy_energy=1.6,
        deep_energy=6.0,
        patient_deep_energy=6.0,
        scan_error=0.1,
    ),
    "IQ3_KT": TrellisSettings(
        points=65536,
        size=8,
        levels="unsigned",
        largest_level=15,
        magnitudes=True,
        first=TreeSearch((16, 8), (16, 16, 8), short_weights=True, scales=2),
        deep=TreeSearch((16, 16), (16, 16, 16), coarse_centers=False),
        final=TreeSearch((16, 16), (16, 16), short_weights=True),
        light_searches=2,
        deep_searches=4,
        unequal_searches=4,
        deep_energy=1.6,
        patient_deep_energy=1.0,
        heavy_if_patient=False,
        deep_error=0.03,
        scan_error=0.02,
        short_row_factor=1 / 3,
        scan_slack=1.0,
        uneven_share=0.075,
        row_scales=8,
        fits=2,
    ),
    "IQ4_KT": TrellisSettings(
        points=32768,
        size=4,
        levels="wide",
        largest_level=64,
        codebooks=2,
        first=ListSearch(12, two_scales=True, codebooks=2),
        deep=TreeSearch((16, 16), (16, 16, 16)),
        retry=ListSearch(12, two_scales=True),
        final=ListSearch(24),
        deep_searches=4,
        unequal_searches=4,
        heavy_energy=1.4,
        deep_energy=9.0,
        patient_deep_energy=9.0,
        deep_if_unequal=False,
        deep_error=0.03,
        scan_error=0.02,
        short_row_factor=1 / 3,
        scan_slack=1.0,
        row_scales=8,
    ),
}
