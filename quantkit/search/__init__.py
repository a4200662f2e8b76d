"""Which bits go where: the allocation of types to groups that has the least predicted divergence at a size.

    search  the allocation for a size, a number of bits per weight or a divergence, as a recipe
    front   the least divergence at every size, with the presets beside it
"""

from __future__ import annotations

from quantkit.search.check import Check
from quantkit.search.find import Allocation, SearchResult, search
from quantkit.search.options import SearchOptions

__all__ = ["Allocation", "Check", "SearchOptions", "SearchResult", "search"]
