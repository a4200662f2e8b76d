"""The start of a command: what it imports."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from quantkit.quantize import quantize

#: What takes longer to import than the help takes to print.
SLOW = ("numpy", "numba", "gguf", "regex", "fsspec", "concurrent.futures")


def test_the_help_imports_nothing_slow() -> None:
    code = (
        "import sys; from click.testing import CliRunner; from quantkit.cli import cli; "
        f"modules = {{*sys.modules}}; assert not CliRunner().invoke(cli, ['--help']).exit_code; "
        f"sys.exit(' '.join({{*sys.modules}} - modules & {{*{SLOW!r}}} | modules & {{*{SLOW!r}}}))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.stderr.split() == []


def test_the_fit_of_a_quantized_file_imports_no_kernels_and_no_families(tiny_moe: Path, tmp_path: Path) -> None:
    quantize(tiny_moe, model := tmp_path / "q.gguf", "Q8_0")
    code = (
        "import sys; from quantkit.fit import fit; fit(sys.argv[1]); "
        "sys.exit(' '.join({*sys.modules} & {'numba', 'quantkit.checkpoint.models', 'quantkit.quantize'}))"
    )
    result = subprocess.run([sys.executable, "-c", code, str(model)], capture_output=True, text=True, check=False)
    assert result.stderr.split() == []
