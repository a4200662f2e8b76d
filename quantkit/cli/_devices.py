"""Devices and their memory, as a table and for programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quantkit.cli._table import table
from quantkit.fit import Device
from quantkit.units import format_size


def device_table(devices: Sequence[Device]) -> str:
    """Return a row for each device."""
    rows = [
        (
            d.name,
            *(format_size(n) if n else "" for n in (d.weights, d.cache, d.compute, d.companions)),
            format_size(d.nbytes),
            "" if d.limit is None else format_size(d.limit),
            "" if d.fits else "too much",
        )
        for d in devices
    ]
    return table(["device", "weights", "cache", "compute ~", "mmproj, draft", "total", "limit", ""], rows)


def device_dicts(devices: Sequence[Device]) -> list[dict[str, Any]]:
    """Return the bytes of each device, for programs."""
    return [
        {
            "name": d.name,
            "weights": d.weights,
            "cache": d.cache,
            "compute": d.compute,
            "mmproj_and_draft": d.companions,
            "bytes": d.nbytes,
            "limit": d.limit,
            "fits": d.fits,
        }
        for d in devices
    ]
