"""tables.npz: what it holds, and that scripts/make_tables.py writes it, the same bytes every time."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from quantkit.kernels import tables
from quantkit.kernels.cuda.core.generated import headers

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts/make_tables.py"
HEADER = headers()["unpack/tables.cuh"]

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
    tables_by_name = {}
    for name, dtype, *words in rows:
        shape = " ".join(words).split("]")[0].strip("[")
        tables_by_name[name] = (dtype, tuple(int(n) for n in shape.split(",")))
    return tables_by_name


def test_the_file_matches_the_docstring():
    with np.load(tables.PATH) as npz:
        arrays = {**npz, **tables.IK}
    assert {name: (values.dtype.name, values.shape) for name, values in arrays.items()} == documented()


def test_the_script_writes_the_same_bytes_again(tmp_path):
    for name in ("one", "two"):
        command = [sys.executable, SCRIPT, tmp_path / f"{name}.npz"]
        subprocess.run(command, check=True, capture_output=True)
    assert (tmp_path / "one.npz").read_bytes() == (tmp_path / "two.npz").read_bytes() == tables.PATH.read_bytes()


def words_of(name: str) -> npt.NDArray[np.uint32]:
    """Return the words of a table of tables.cuh."""
    match = re.search(rf"\b{name}(?:\[\d+\] =)? ?\{{(.*?)\}};", HEADER)
    assert match is not None
    return np.array([int(w, 16) for w in re.findall(r"0x[0-9a-f]+", match[1])], np.uint32)


@pytest.mark.parametrize(
    ("name", "levels"),
    [("iq1s_grid", (-1, 0, 1)), *((name, (8, 25, 43)) for name in ("iq2xxs_grid", "iq2xs_grid", "iq2s_grid"))],
)
def test_the_header_has_grids_of_8_values_as_nibbles(name, levels):
    words = words_of(name) >> np.uint32(name == "iq2s_grid")
    nibbles = words[:, None] >> np.arange(0, 32, 4, dtype=np.uint32) & 15
    values = np.array(levels)[nibbles]
    if name in ("iq2xxs_grid", "iq2xs_grid"):
        values = values[:, [0, 2, 4, 6, 1, 3, 5, 7]]
    if name == "iq2s_grid":
        values = values[:, [6, 4, 2, 0, 7, 5, 3, 1]]
    np.testing.assert_array_equal(values, tables.table(name))


def test_the_header_has_codebooks_and_grids_of_4_values_as_bytes():
    np.testing.assert_array_equal(words_of("kvalues_iq2nl").view(np.int8), np.tile(tables.table("kvalues_iq2nl"), 4))
    np.testing.assert_array_equal(words_of("kvalues_iq3nl").view(np.int8), np.tile(tables.table("kvalues_iq3nl"), 2))
    for name in ("kvalues_iq5nl", "kvalues_iq6nl"):
        parts = [words_of(f"{name}<{i}>") for i in range(len(tables.table(name)) // 16)]
        np.testing.assert_array_equal(np.concatenate(parts).view(np.int8), tables.table(name), strict=True)
    for name in ("kvalues_iq4nl", "kvalues_fp4"):
        np.testing.assert_array_equal(words_of(name).view(np.int8), tables.table(name), strict=True)
    np.testing.assert_array_equal(words_of("iq3xxs_grid").view(np.uint8).reshape(-1, 4), tables.table("iq3xxs_grid"))
    np.testing.assert_array_equal(words_of("iq3s_grid").view(np.uint8).reshape(-1, 4) + 1, tables.table("iq3s_grid"))


def test_the_header_has_pairs_of_iq2kl_as_iq3_indices():
    pairs = np.concatenate([words_of(f"iq2kl_pairs<{i}>") for i in range(2)]).view(np.uint8)
    nibbles = np.stack([pairs & 15, pairs >> 4], axis=1)
    np.testing.assert_array_equal(tables.table("kvalues_iq3nl")[nibbles], tables.table("iq2kl_grid"), strict=True)


def test_the_header_is_small():
    assert len(HEADER) < 100_000


def test_the_arrays_equal_ggufs():
    for name, values in runpy.run_path(str(SCRIPT))["tables"]().items():
        np.testing.assert_array_equal(tables.table(name), values, strict=True)


@pytest.mark.parametrize("name", MAGNITUDES)
def test_grids_have_distinct_entries_of_the_documented_magnitudes(name):
    grid = tables.table(name)
    assert set(np.unique(grid).tolist()) == set(MAGNITUDES[name])
    assert len(np.unique(grid, axis=0)) == len(grid)


def test_the_eighth_sign_makes_the_parity_even():
    signs = tables.table("ksigns")
    np.testing.assert_array_equal(signs & 127, np.arange(128))
    assert not (np.bitwise_count(signs) % 2).any()


def test_tables_are_read_only():
    with pytest.raises(ValueError, match="read-only"):
        tables.table("ksigns")[0] = 1


def test_an_unknown_table_is_an_error():
    with pytest.raises(KeyError, match="iq9"):
        tables.table("iq9")
