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


def shell(command: str, **more: str) -> subprocess.CompletedProcess[bytes]:
    environment = {**os.environ, "PYTHONPATH": ROOT, **more}
    return subprocess.run(["bash", "-c", command], capture_output=True, check=False, env=environment)


def test_a_closed_output_takes_no_file(model: Path, tmp_path: Path) -> None:
    """Descriptor 1 is free, so that without care the output would be it, and take what is printed."""
    quantkit = " ".join(QUANTKIT)
    done = shell(f"{quantkit} inspect '{model}' >&- && {quantkit} quantize '{model}' {tmp_path}/o.gguf Q8_0 >&- 2>&-")
    assert (done.returncode, done.stderr) == (0, b"")
    done = shell(f"{quantkit} quantize '{model}' {tmp_path}/p.gguf Q8_0")
    assert (tmp_path / "o.gguf").read_bytes() == (tmp_path / "p.gguf").read_bytes()


def test_a_closed_input_is_named(model: Path) -> None:
    done = shell(f"{' '.join(QUANTKIT)} perplexity -m '{model}' -f - <&-")
    assert done.returncode == 1
    assert b"standard input is closed" in done.stderr
    assert b"Traceback" not in done.stderr


def test_what_the_terminal_cannot_show_is_escaped(model: Path) -> None:
    for encoding in ("ascii", "latin-1"):
        inspect = f"{' '.join(QUANTKIT)} inspect '{model}'"
        done = shell(f"{inspect} && {' '.join(QUANTKIT)} types", PYTHONIOENCODING=encoding)
        assert (done.returncode, done.stderr) == (0, b"")
    assert rb"\u65e5.gguf" in done.stdout
    done = shell(
        f"{' '.join(QUANTKIT)} quantize '{model}' /tmp/none/o.gguf Q4_K_M --dry-run", PYTHONIOENCODING="latin-1"
    )
    assert done.returncode == 0
    assert b"Traceback" not in done.stderr
    assert b"\x1b" not in done.stdout + done.stderr


def test_a_folder_that_is_gone_is_named(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    done = shell(
        f"cd {gone} && rmdir {gone} && {sys.executable} -c 'from quantkit.__main__ import main; main()' inspect m.gguf"
    )
    assert done.returncode == 1
    assert b"the working directory was removed" in done.stderr
    assert len(done.stderr.splitlines()) == 1


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
def test_ctrl_c_is_no_error_of_another_kind(model: Path, module: str, error: str) -> None:
    command = [sys.executable, "-c", _SWALLOWED, module, error, "inspect", str(model)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": ROOT})
    assert (done.returncode, done.stderr.strip()) == (130, "interrupted")
