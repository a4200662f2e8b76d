"""Kernels compiled for another CPU name: tests called without pytest, in a process of test_cpu_names.py.

numba reads the CPU's name at import, so each CPU needs a process; all of them share one cache. Besides the outcome of
tests, a process prints hashes of its encoded edge rows, which must be the same for every CPU. Its argument: few, most
or all types.
"""

from __future__ import annotations

import inspect
import itertools
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import test_check
import test_dequantize
import test_encode
import test_encode_corners
import test_engine_zoo
import test_kernels
import test_matmul
import test_observers
import test_simd
from type_params import DECODABLE, ENCODABLE, ONE_OF_EACH

from conftest import golden_bytes, names_of
from edge_rows import hashes
from quantkit.kernels.cpu.core.simd import FEATURES
from quantkit.model.fusion import Fusion
from quantkit.types import BY_NAME
from zoo import write_zoo

Test = Callable[..., None]

#: One type of each set of operations of encoders and decoders with code for some CPUs: f16, dot products, each kind of
#: lookup.
OPERATIONS = ("F16", "BF16", "Q4_0", "Q8_0", "Q3_K", "Q4_K", "MXFP4", "IQ4_NL", "IQ4_KS", "IQ3_KT")
SELECTION = sys.argv[1] if __name__ == "__main__" else "few"
TYPES = {"few": [BY_NAME[name] for name in OPERATIONS], "most": ONE_OF_EACH, "all": DECODABLE}[SELECTION]
PRODUCTS = ["Q4_K", "IQ4_XS", "F16", "IQ3_K", "IQ2_KT"]
MODELS = ["llama-dense"]
if SELECTION != "few":
    PRODUCTS += ["Q8_0", "Q5_1", "Q6_0", "IQ3_XXS"]
    MODELS += ["qwen3next-moe", "gpt-oss-moe"]

#: Tests, each with selected values of its parameters; all values of other parameters.
#: SIMD operations with code for some CPUs.
TESTS: list[tuple[Test, dict[str, Any]]] = [
    (test_simd.test_half_floats_in_vectors, {}),
    (test_simd.test_half_float_scalars, {}),
    (test_simd.test_select_and_masks, {}),
    (test_simd.test_reductions, {}),
    (test_simd.test_rounding, {}),
    (test_simd.test_lookup16, {}),
    (test_simd.test_lookup64, {}),
    (test_simd.test_lookups_of_32_bits, {}),
    (test_simd.test_tables_of_constants, {}),
    (test_simd.test_dot4_is_exact, {}),
    (test_simd.test_dot2_is_exact, {}),
    (test_simd.test_maddubs_adds_neighbours, {}),
    (test_simd.test_muladd_takes_vectors_and_scalars, {}),
    (test_simd.test_opaque_is_the_identity, {}),
    (test_check.test_first_nonfinite_row, {"n": [1, 64, 100], "bad": [np.inf]}),
    (test_check.test_every_checked_field_is_detected, {}),
    (test_kernels.test_golden_encoding, {"t": TYPES}),
    (test_kernels.test_golden_encoding_with_imatrix, {"t": TYPES}),
    (test_kernels.test_golden_decoding, {"t": TYPES}),
    (test_dequantize.test_golden_bytes, {"t": TYPES}),
    (test_encode.test_every_row_range_gives_the_same_bytes, {"t": TYPES, "encoder_name": ["mainline"], "blocks": [3]}),
    (test_encode.test_golden_blocks_do_not_depend_on_their_batch, {"t": TYPES, "encoder_name": ["mainline"]}),
    (test_encode_corners.test_golden_rounding_of_numbers, {}),
    (test_matmul.test_products, {"name": PRODUCTS}),
    (
        test_engine_zoo.test_logits_equal_llama_cpps,
        {"name": MODELS, "device": ["CPU"], "fusion": [Fusion()]},
    ),
    (test_observers.test_sums_of_columns_are_exact, {}),
    (test_observers.test_sums_by_expert_are_exact, {}),
]


def cases(test: Test, only: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the parameters of a test's cases."""
    marks = [mark for mark in getattr(test, "pytestmark", []) if mark.name == "parametrize"]
    lists = [[(names_of(mark), values) for values in mark.args[1]] for mark in marks]
    for combination in itertools.product(*lists):
        case: dict[str, Any] = {}
        for names, values in combination:
            values = getattr(values, "values", values)
            case |= dict(zip(names, values if len(names) > 1 else [values], strict=True))
        if all(case[name] in values for name, values in only.items()):
            yield case


def main() -> int:
    """Run all tests; return the number of failures."""
    failures = count = 0
    with tempfile.TemporaryDirectory() as folder:
        fixtures = {
            "golden": golden_bytes(),
            "zoo": lambda name: write_zoo(name, Path(folder) / f"{name}.gguf"),
        }
        for test, only in TESTS:
            arguments = {name: fixtures[name] for name in inspect.signature(test).parameters if name in fixtures}
            calls = list(cases(test, only))
            assert calls, f"{test.__name__} selects no case {only}"
            for case in calls:
                count += 1
                try:
                    test(**case, **arguments)
                except Exception:
                    failures += 1
                    print(f"{test.__name__} {case}\n{traceback.format_exc()}", file=sys.stderr)
    print(sorted(FEATURES & {"avx2", "avx512f"}), count)
    print(json.dumps(hashes(t for t in TYPES if t in ENCODABLE)), flush=True)
    return failures


if __name__ == "__main__":
    os._exit(min(main(), 1))  # exit immediately: teams of threads wait for work
