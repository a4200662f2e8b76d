"""CPUs available to this process, and their L2 cache."""

from __future__ import annotations

import os


def available_cpus() -> int:
    """Return the number of CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def l2_bytes() -> int:
    """Return the size of a CPU's L2 cache; 1 MiB if unknown."""
    try:
        size = os.sysconf("SC_LEVEL2_CACHE_SIZE")
    except (ValueError, OSError):  # glibc's alone
        size = 0
    return size if size > 0 else 1 << 20
