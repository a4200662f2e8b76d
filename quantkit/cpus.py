"""CPUs and memory available to this process, and the L2 cache."""

from __future__ import annotations

import os
from pathlib import Path


def available_cpus() -> int:
    """Return the number of CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def l2_bytes() -> int:
    """Return the size of a CPU's L2 cache; 1 MiB if unknown."""
    try:
        size = os.sysconf("SC_LEVEL2_CACHE_SIZE")
    except (ValueError, OSError):  # only in glibc
        size = 0
    return size if size > 0 else 1 << 20


def available_memory() -> int:
    """Return the memory that this machine can spare, in bytes."""
    try:
        # Free memory alone would not include the reclaimable page cache.
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):
        return int(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
