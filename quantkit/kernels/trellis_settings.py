"""Search settings of the trellis types, one record per type, shared by CPU and CUDA, whose bytes are the same.

cpu/encode/trellis.py describes the steps. *Values* are the 32 that share a scale, their *energy* sum(w x x).
"""

from __future__ import annotations

from dataclasses import dataclass

#: Number of lanes of which the best family (or cell) survives, of which the second best survives, and so on.
Shape = tuple[int, ...]


@dataclass(frozen=True)
class TreeSearch:
    """A search down the tree of a codebook (cpu/encode/trellis_codebook.py).

    families, cells: numbers that remain; without families all cells are ranked. coarse_centers, coarse_points: they are
    ranked in 8 bits, else in 16. Where centers are, weights of magnitudes have 8 bits for points, too.
    """

    families: Shape
    cells: Shape
    coarse_centers: bool = True
    coarse_points: bool = False


@dataclass(frozen=True)
class ListSearch:
    """A search of the first ``lines`` that are listed near values (cpu/encode/trellis_lists.py).

    two_scales: half of the survivors are the best for a scale 1/8 above, half for one below. codebooks: at once.
    """

    lines: int = 12
    two_scales: bool = False
    codebooks: int = 1


@dataclass(frozen=True)
class TrellisSettings:
    """The search of a type."""

    #: Points of a codebook; values of a point.
    points: int
    size: int
    #: The levels of scales: "codebook" (IQ4_NL's), "unsigned" (0 .. 15) or "wide" (-64 .. 63); the largest.
    levels: str
    largest_level: int
    #: Searches: for all values; for values with unequal weights or most of the error; a repetition with the better
    #: codebook; for the final scale.
    first: TreeSearch | ListSearch
    deep: TreeSearch
    retry: ListSearch | None = None
    final: TreeSearch | ListSearch | None = None
    #: Whether points are magnitudes, so that scales have no sign; the number of codebooks.
    magnitudes: bool = False
    codebooks: int = 1
    #: Number of scales around the guess that are searched for values of little energy.
    light_searches: int = 1
    #: Multiple of the mean energy from which values get a deep search, in rows dominated by few values.
    patient_deep_energy: float = 1e30
    #: Whether values with unequal weights get a deep search.
    deep_if_unequal: bool = True
    #: Number of scales around the guess in a deep search.
    deep_searches: int = 3
    #: Shares of an uneven row's error from which values get a deep search, and from which all points are ranked for a
    #: group; the factor of both in rows of 256 values.
    deep_error: float = 0.05
    scan_error: float = 0.05
    short_row_factor: float = 1.0
    #: Number of scales tried for an uneven row.
    row_scales: int = 4
    #: Factor of a row's scale over the least-squares scale, with which values are too small on average.
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

    @property
    def heavy_searches(self) -> int:
        """The number of scales for which values of high energy are searched."""
        return max(self.light_searches, 2)


TRELLIS_SETTINGS = {
    "IQ1_KT": TrellisSettings(
        points=8192,
        size=8,
        levels="codebook",
        largest_level=127,
        first=TreeSearch((16, 4), (16, 8), coarse_points=True),
        deep=TreeSearch((), (16, 16, 16)),
        row_scale_gain=1.07,
    ),
    "IQ2_KT": TrellisSettings(
        points=65536,
        size=8,
        levels="codebook",
        largest_level=127,
        first=TreeSearch((16, 4), (16, 4), coarse_points=True),
        deep=TreeSearch((16, 16), (16, 16, 16)),
        scan_error=0.1,
    ),
    "IQ3_KT": TrellisSettings(
        points=65536,
        size=8,
        levels="unsigned",
        largest_level=15,
        magnitudes=True,
        first=TreeSearch((16, 8), (16, 16, 8)),
        deep=TreeSearch((16, 16), (16, 16, 16, 16), coarse_centers=False),
        patient_deep_energy=1.0,
        final=TreeSearch((16, 16), (16, 16)),
        light_searches=3,
        deep_searches=4,
        deep_error=0.03,
        scan_error=0.02,
        short_row_factor=1 / 3,
        row_scales=8,
    ),
    "IQ4_KT": TrellisSettings(
        points=32768,
        size=4,
        levels="wide",
        largest_level=64,
        codebooks=2,
        first=ListSearch(two_scales=True, codebooks=2),
        deep=TreeSearch((16, 16), (16, 16, 16)),
        retry=ListSearch(two_scales=True),
        final=ListSearch(lines=24),
        deep_if_unequal=False,
        deep_searches=4,
        deep_error=0.03,
        scan_error=0.02,
        short_row_factor=1 / 3,
        row_scales=8,
    ),
}
