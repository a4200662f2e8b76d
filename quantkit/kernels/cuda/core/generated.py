"""Headers that are generated: the registry of types, tables and settings for CUDA sources.

    unpack/traits.cuh    namespace traits: the records of kernels/formats.py, one struct per type
    unpack/tables.cuh    codebooks and grids, from kernels/tables.py
    matmul/units.cuh     Q8_UNIT, bytes of 256 activations
    encode/trellis_settings.cuh    namespace trellis_settings: kernels/trellis_settings.py, one struct per type

Codebooks are 16 int8 levels in four words; longer ones, templates, are parts of 16: kvalues_iq5nl<0>. iq2kl_pairs: an
entry of iq2kl_grid is a byte, two nibbles that select levels of kvalues_iq3nl. In other grids an entry is one word. For
8 values, these are 8 nibbles that select bytes: iq1s 0, 1, 2 for -1, 0, 1; iq2 0, 1, 2 for 8, 25, 43, in the order of
values that signs are spread in (i_quants.cuh): 0 4 1 5 2 6 3 7 of iq2xxs and iq2xs, 3 7 2 6 1 5 0 4 of iq2s, whose
entries are one bit to the left. Of 4 values, these are 4 bytes: iq3xxs the magnitudes, iq3s the magnitudes less one.
They are templates so that a module holds only those it reads: iq1s_grid<0>.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import numpy.typing as npt

from quantkit.kernels.formats import FOLDED_TO_F16, FORMATS, Format
from quantkit.kernels.tables import table
from quantkit.kernels.trellis_settings import TRELLIS_SETTINGS, ListSearch, Shape, TreeSearch, TrellisSettings
from quantkit.types import BY_NAME

#: Bytes of 256 activations in an int8 format: their levels, d of each 32, sums of each 16 (matmul/activations.cuh).
Q8_UNIT = 256 + 4 * 8 + 4 * 16
#: The value of each nibble of an entry, if the order differs.
_ORDERS = {name: [0, 4, 1, 5, 2, 6, 3, 7] for name in ("iq2xxs_grid", "iq2xs_grid")}
_ORDERS["iq2s_grid"] = [3, 7, 2, 6, 1, 5, 0, 4]
_CODEBOOKS = ("kvalues_iq4nl", "kvalues_fp4", "kvalues_iq2nl", "kvalues_iq3nl", "kvalues_iq5nl", "kvalues_iq6nl")


@cache
def headers() -> dict[str, str]:
    """Return the text of every header, by its name in include directives."""
    traits = [f"const int FOLDED_TO_F16 = {FOLDED_TO_F16};", *map(_traits, FORMATS.values())]
    tables = ['#include "core/device.cuh"', *_codebooks(), *_grids()]
    trellis = [_trellis(name, settings) for name, settings in TRELLIS_SETTINGS.items()]
    units = [f"const int Q8_UNIT = {Q8_UNIT};"]
    return {
        f"{name}.cuh": "\n".join([f"#ifndef {guard}", f"#define {guard}", *lines, "#endif\n"])
        for name, guard, lines in (
            ("unpack/traits", "GENERATED_TRAITS", traits),
            ("unpack/tables", "GENERATED_TABLES", tables),
            ("matmul/units", "GENERATED_UNITS", units),
            (
                "encode/trellis_settings",
                "GENERATED_TRELLIS_SETTINGS",
                trellis,
            ),
        )
    }


def _traits(spec: Format) -> str:
    t = spec.type
    sizes = {
        "BLOCK": t.block, "BYTES": t.block_bytes, "HEADER": t.row_header, "ALIGN": spec.align,
        "ROW_SCALE": {"": 0, "f16": 2, "f32": 4}[t.row_scale],  # its bytes
        "FOLDED_SCALE_BYTES": spec.folded_scale_bytes, "GRID": spec.grid, "BLOCKS_PER_LANE": spec.blocks_per_lane,
    }  # fmt: skip
    numbers = ", ".join(f"{name} = {value}" for name, value in sizes.items())
    flags = f"MINS = {int(spec.mins)}, HALVES = {int(spec.span == 16)}, BY_WORDS = {int(spec.activations == 'q8_k64')}"
    gain = f"ROW_SCALE_GAIN = {spec.row_scale_gain}f"
    fields = f"static const int {numbers}; static const bool {flags}; static constexpr float {gain};"
    return f"namespace traits {{ struct {t.name} {{ {fields} }}; }}"


def _trellis(name: str, settings: TrellisSettings) -> str:
    integers = {
        "POINTS": settings.points,
        "SIZE": settings.size,
        "SIGNS": settings.signs,
        "CODEBOOKS": settings.codebooks,
        "BYTES": BY_NAME[name].block_bytes,
        "LIGHT_SEARCHES": settings.light_searches,
        "HEAVY_SEARCHES": settings.heavy_searches,
        "DEEP_SEARCHES": settings.deep_searches,
        "ROW_SCALES": settings.row_scales,
    }
    flags = {
        "RETRIES": settings.retry is not None,
        "FINISHES": settings.final is not None,
        "HAS_WIDE_LEVELS": settings.levels == "wide",
        "DEEP_IF_UNEQUAL": settings.deep_if_unequal,
    }
    doubles = {
        "PATIENT_DEEP_ENERGY": settings.patient_deep_energy,
        "DEEP_ERROR": settings.deep_error,
        "SCAN_ERROR": settings.scan_error,
        "SHORT_ROW_FACTOR": settings.short_row_factor,
        "ROW_SCALE_GAIN": settings.row_scale_gain,
    }
    searches = {"First": settings.first, "Deep": settings.deep, "Retry": settings.retry, "Final": settings.final}
    lines = [
        f"static const int {', '.join(f'{key} = {value}' for key, value in integers.items())};",
        f"static const bool {', '.join(f'{key} = {int(value)}' for key, value in flags.items())};",
        f"static constexpr double {', '.join(f'{key} = {value}' for key, value in doubles.items())};",
        f"static constexpr float LARGEST_LEVEL = {float(settings.largest_level)}f;",
        *(f"typedef {_search(search)} {key};" for key, search in searches.items() if search is not None),
    ]
    return f"namespace trellis_settings {{ struct {name} {{ {' '.join(lines)} }}; }}"


def _search(search: TreeSearch | ListSearch) -> str:
    """Return the type of a search (encode/trellis_search.cuh)."""
    if isinstance(search, ListSearch):
        return f"ListSearch<{search.lines}, {int(search.two_scales)}, {search.codebooks}>"
    flags = f"{int(search.coarse_centers)}, {int(search.coarse_points)}"
    return f"TreeSearch<{_shape(search.families)}, {_shape(search.cells)}, {flags}>"


def _shape(shape: Shape) -> str:
    return f"Shape<{', '.join(map(str, shape))}>" if shape else "void"


def _codebooks() -> list[str]:
    """A codebook of fewer than 16 levels is repeated."""
    structs = []
    for name, levels in [*((name, table(name)) for name in _CODEBOOKS), ("iq2kl_pairs", pairs_of_iq2kl())]:
        parts = np.resize(levels, (max(1, len(levels) // 16), 16)).view("<u4")
        if len(parts) == 1:
            structs.append(_codebook(name, parts[0]))
        else:
            structs += [f"template <int> struct {name};"]
            structs += [f"template <> {_codebook(f'{name}<{i}>', words)}" for i, words in enumerate(parts)]
    return structs


def _codebook(name: str, words: npt.NDArray[np.uint32]) -> str:
    values = ", ".join(f"{n} = {w:#010x}u" for n, w in zip("ABCD", words, strict=True))
    return f"struct {name} {{ static const uint32_t {values}; }};"


def pairs_of_iq2kl() -> npt.NDArray[np.uint8]:
    """Return the entries of iq2kl_grid as bytes: nibbles, the low one first, that are indices of kvalues_iq3nl."""
    index = np.searchsorted(table("kvalues_iq3nl"), table("iq2kl_grid")).astype(np.uint8)
    return index[:, 0] | (index[:, 1] << np.uint8(4))


def _grids() -> list[str]:
    return [
        f"template <int> static __device__ const uint32_t {name}[{len(words)}] = {{{', '.join(map(hex, words))}}};"
        for name, words in packed_grids().items()
    ]


def packed_grids() -> dict[str, npt.NDArray[np.uint32]]:
    """Return the grids as words: 8 values of three as nibbles 0, 1, 2, some shuffled; 4 as bytes, iq3s less one."""
    grids = {}
    for name in ("iq1s_grid", "iq2xxs_grid", "iq2xs_grid", "iq2s_grid"):
        _, rank = np.unique(table(name), return_inverse=True)
        ranks = rank.reshape(-1, 8)[:, _ORDERS.get(name, range(8))].astype(np.uint32)
        grids[name] = np.bitwise_or.reduce(ranks << np.arange(0, 32, 4, dtype=np.uint32), axis=1)
    grids["iq2s_grid"] <<= np.uint32(1)
    grids["iq3xxs_grid"] = table("iq3xxs_grid").view("<u4")[:, 0]
    grids["iq3s_grid"] = (table("iq3s_grid") - np.uint8(1)).view("<u4")[:, 0]
    return grids
