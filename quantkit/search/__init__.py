"""Allocation of types to groups of tensors, of the least predicted divergence at a size: ``quantkit search``.

search        the allocation for a size, a number of bits per weight or a divergence, as a recipe
search_front  the allocations of least divergence at many sizes, and llama-quantize's presets
"""

from __future__ import annotations

from quantkit.options.search import SearchOptions
from quantkit.search.allocation import Allocation, Check, DeviceFit
from quantkit.search.find import SearchResult, search
from quantkit.search.sweep import Front, PresetPoint, search_front

__all__ = [
    "Allocation",
    "Check",
    "DeviceFit",
    "Front",
    "PresetPoint",
    "SearchOptions",
    "SearchResult",
    "search",
    "search_front",
]
