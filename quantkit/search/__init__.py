"""Which bits go where: the allocation of types to groups that has the least predicted divergence at a size.

search  the allocation for a size, a number of bits per weight or a divergence, as a recipe
front   the least divergence at every size, with the presets beside it
"""

from __future__ import annotations

from quantkit.search.allocation import Allocation
from quantkit.search.check import Check
from quantkit.search.find import SearchResult, search
from quantkit.search.options import SearchOptions
from quantkit.search.sweep import Front, PresetPoint, search_front

__all__ = ["Allocation", "Check", "Front", "PresetPoint", "SearchOptions", "SearchResult", "search", "search_front"]
