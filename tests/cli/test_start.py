"""The start of a command: what it imports."""

from __future__ import annotations

import subprocess
import sys

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
