"""Compare compute buffers of `quantkit fit` with those of llama.cpp and ik_llama.cpp, of models of the tests whose rows
are four times as long.

    benchmarks/fit_memory.py [--runtime llama.cpp|ik]

Weights and caches are compared by tests/verbs/test_fit.py. Only memory is read, so other work does not matter.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from processes import work_folder
from results import parse_options, record_output

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests/lib"), str(ROOT / "tests/verbs")]

from scaled_zoo import write_scaled_zoo  # noqa: E402

from conftest import ik_libraries, llama_programs  # noqa: E402
from quantkit.fit import FitOptions, fit  # noqa: E402
from runtime_memory import runtime_memory  # noqa: E402

#: Models of the tests, and the runtimes that load them with the layers of the tests.
BOTH = (
    *("llama-dense", "qwen2-dense", "qwen3-dense", "qwen3moe-moe", "gpt-oss-moe", "deepseek2-moe", "ernie4_5-moe-moe"),
    *("mistral3-dense", "llama4-moe", "glm4-dense", "hunyuan-moe-moe", "minimax-m2-moe", "smollm3-dense", "dots1-moe"),
)
LLAMA_CPP = (
    "qwen3next-moe",
    "gemma3-dense",
    "lfm2-dense",
    "phi3-dense",
    "granitemoe-moe",
    "gemma2-dense",
    "exaone4-dense",
)
SETTINGS: tuple[dict[str, Any], ...] = ({"ctx": 32768}, {"ctx": 4096, "flash_attn": False})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runtime", choices=("llama.cpp", "ik"), action="append", help="  [default: both]")
    options = parse_options(parser)
    print("| runtime | model | context | flash attention | quantkit, MiB | runtime, MiB | difference, % |")
    print("|---|---|---|---|---|---|---|")
    programs, libraries = llama_programs(), ik_libraries()
    with work_folder(None) as folder:
        for runtime in options.runtime or ("llama.cpp", "ik"):
            place = libraries if runtime == "ik" else programs
            if place is None:
                sys.exit(f"{runtime} is not here: run scripts/test --install and scripts/peers")
            for name in (*BOTH, *(LLAMA_CPP if runtime == "llama.cpp" else ())):
                path = folder / f"{name}.gguf"
                if not path.exists():
                    write_scaled_zoo(name, path, factor=4, n_vocab=16384)
                for setting in SETTINGS:
                    settings = FitOptions(types=(), runtime=runtime, **setting)
                    result = fit(path, settings)
                    estimate = result.devices[0].compute / (1 << 20)
                    reference = runtime_memory(result, settings, place)["compute"][0]
                    on = "on" if settings.flash_attn else "off"
                    print(
                        f"| {runtime} | {name} | {settings.ctx} | {on} | {estimate:.2f} | {reference:.2f} "
                        f"| {100 * (estimate / reference - 1):.2f} |"
                    )


if __name__ == "__main__":
    record_output(main)
