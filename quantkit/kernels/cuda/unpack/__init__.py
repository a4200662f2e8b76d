"""Types that GPUs decode: those with a struct of their name in this folder."""

from __future__ import annotations

import re
from functools import cache

from quantkit.kernels.cuda.core.kernel import SOURCES
from quantkit.kernels.formats import FORMATS


@cache
def decoders() -> frozenset[str]:
    """Return the names of the types that have a CUDA twin; one of your own (``OWN_IDS``) may lack it."""
    structs = (re.findall(r"^struct (\w+) : traits::", f.read_text(), re.M) for f in (SOURCES / "unpack").glob("*.cuh"))
    return frozenset(name for names in structs for name in names if name in FORMATS)
