"""tables.npz: what it holds, and that scripts/make_tables.py writes it, the same bytes every time."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from quantkit.kernels import tables

SCRIPT = Path(__file__).parent.parent / "scripts/make_tables.py"

MAGNITUDES = {
    "iq1s_grid": (-1, 0, 1),
    "iq2xxs_grid": (8, 25, 43),
    "iq2xs_grid": (8, 25, 43),
    "iq2s_grid": (8, 25, 43),
    "iq3xxs_grid": (4, 12, 20, 28, 36, 44, 52, 62),
    "iq3s_grid": (1, 3, 5, 7, 9, 11, 13, 15),
}


def documented() -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return name -> (dtype, shape) as the table in tables.py's docstring says."""
    rows = (line.split() for line in (tables.__doc__ or "").splitlines() if " int8 " in line or " uint8 " in line)
    found = {}
    for name, dtype, *rest in rows:
        shape = " ".join(rest).split("]")[0].strip("[")
        found[name] = (dtype, tuple(int(n) for n in shape.split(",")))
    return found


def test_the_file_holds_what_the_docstring_says():
    with np.load(tables.PATH) as npz:
        assert {name: (npz[name].dtype.name, npz[name].shape) for name in npz.files} == documented()


def test_the_script_writes_the_same_bytes_again(tmp_path):
    for name in ("one.npz", "two.npz"):
        subprocess.run([sys.executable, SCRIPT, tmp_path / name], check=True, capture_output=True)
    assert (tmp_path / "one.npz").read_bytes() == (tmp_path / "two.npz").read_bytes() == tables.PATH.read_bytes()


def test_the_arrays_equal_those_of_gguf():
    for name, values in runpy.run_path(str(SCRIPT))["tables"]().items():
        np.testing.assert_array_equal(tables.table(name), values, strict=True)


@pytest.mark.parametrize("name", MAGNITUDES)
def test_grids_hold_distinct_entries_of_the_documented_magnitudes(name):
    grid = tables.table(name)
    assert set(np.unique(grid).tolist()) == set(MAGNITUDES[name])
    assert len(np.unique(grid, axis=0)) == len(grid)


def test_the_eighth_sign_makes_an_even_number_of_minuses():
    signs = tables.table("ksigns")
    np.testing.assert_array_equal(signs & 127, np.arange(128))
    assert not (np.bitwise_count(signs) % 2).any()


def test_tables_are_read_only():
    with pytest.raises(ValueError, match="read-only"):
        tables.table("ksigns")[0] = 1


def test_an_unknown_table_is_an_error():
    with pytest.raises(KeyError, match="iq9"):
        tables.table("iq9")
