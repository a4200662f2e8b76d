"""A command whose standard descriptors are closed, whose folder is gone, or that Ctrl-C ends anywhere."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from small_models import llama_tensors, write_model

QUANTKIT = [sys.executable, "-m", "quantkit"]
ROOT = str(Path(__file__).parents[2])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tensors = {**llama_tensors(), "blk.0.bad\x1b[31m\nname.weight": ((256, 4), "F16")}
    return write_model(tmp_path_factory.mktemp("m") / "é日.gguf", tensors)


def shell(command: str, **variables: str) -> subprocess.CompletedProcess[bytes]:
    environment = {**os.environ, "PYTHONPATH": ROOT, **variables}
    return subprocess.run(["bash", "-c", command], capture_output=True, check=False, env=environment)


def test_a_closed_stdout_does_not_corrupt_files(model: Path, tmp_path: Path) -> None:
    """Descriptor 1 is free, so that without care the output would be it, and take what is printed."""
    quantkit = " ".join(QUANTKIT)
    process = shell(
        f"{quantkit} inspect '{model}' >&- && {quantkit} quantize '{model}' {tmp_path}/o.gguf Q8_0 >&- 2>&-"
    )
    assert (process.returncode, process.stderr) == (0, b"")
    process = shell(f"{quantkit} quantize '{model}' {tmp_path}/p.gguf Q8_0")
    assert (tmp_path / "o.gguf").read_bytes() == (tmp_path / "p.gguf").read_bytes()


def test_a_closed_input_is_named(model: Path) -> None:
    process = shell(f"{' '.join(QUANTKIT)} perplexity -m '{model}' -f - <&-")
    assert process.returncode == 1
    assert b"standard input is closed" in process.stderr
    assert b"Traceback" not in process.stderr


def test_unprintable_characters_are_escaped(model: Path) -> None:
    for encoding in ("ascii", "latin-1"):
        inspect = f"{' '.join(QUANTKIT)} inspect '{model}'"
        process = shell(f"{inspect} && {' '.join(QUANTKIT)} types", PYTHONIOENCODING=encoding)
        assert (process.returncode, process.stderr) == (0, b"")
    assert rb"\u65e5.gguf" in process.stdout
    process = shell(
        f"{' '.join(QUANTKIT)} quantize '{model}' /tmp/none/o.gguf Q4_K_M --dry-run", PYTHONIOENCODING="latin-1"
    )
    assert process.returncode == 0
    assert b"Traceback" not in process.stderr
    assert b"\x1b" not in process.stdout + process.stderr


def test_a_removed_working_directory_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    program = f"{sys.executable} -c 'from quantkit.__main__ import main; main()'"
    process = shell(f"cd {folder} && rmdir {folder} && {program} inspect m.gguf")
    assert process.returncode == 1
    assert b"the working directory was removed" in process.stderr
    assert len(process.stderr.splitlines()) == 1


#: Ctrl-C that a package makes an error of its own of, as numpy's import does, and numba's compiler.
_SWALLOWED = """
import os, signal, sys, time

class Swallow:
    def find_spec(self, name, path=None, target=None):
        if name == sys.argv[1]:
            try:
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(5)
            except KeyboardInterrupt:
                raise eval(sys.argv[2])("not what happened")

sys.meta_path.insert(0, Swallow())
from quantkit.__main__ import main
sys.argv[1:] = sys.argv[3:]
main()
"""


@pytest.mark.parametrize(("module", "error"), [("quantkit.inspect", "ImportError"), ("numpy", "RuntimeError")])
def test_ctrl_c_exits_as_interrupted(model: Path, module: str, error: str) -> None:
    command = [sys.executable, "-c", _SWALLOWED, module, error, "inspect", str(model)]
    process = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": ROOT}
    )
    assert (process.returncode, process.stderr.strip()) == (130, "interrupted")
