"""The cache of compiled kernels: what one process compiles is right in every other, and nobody else puts code there."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from quantkit.kernels import cache_folder as module
from quantkit.kernels.cache_folder import cache_folder
from quantkit.kernels.cpu.core.jit import config, kernel_folder, to_cache
from quantkit.kernels.cpu.core.specialize import rebind

posix = pytest.mark.skipif(os.name != "posix", reason="owners and modes")

# ---------------------------------------------------------------- names

#: Each line a process: types whose rows are looked up and decoded. Two begin alike, so what numba counts is the same.
ORDERS = ("Q4_0", "Q4_1", "IQ4_NL", "Q8_0 Q4_1", "BF16")
FILL = """
import sys
from quantkit.kernels.cpu.layer.elementwise import embed
from quantkit.types import BY_NAME
for name in sys.argv[1:]:
    embed(BY_NAME[name]).address
"""
LOOK_UP = """
import sys
from quantkit.kernels.cpu.layer.elementwise import embed
from quantkit.types import BY_NAME
from test_elementwise import test_embeddings_of_every_family as check
for name in sys.argv[1:]:
    check(BY_NAME[name])
    assert embed(BY_NAME[name]).from_cache, name
"""


def run(code: str, cache: Path, *arguments: str) -> None:
    paths = os.pathsep.join([os.getcwd(), str(Path(__file__).parent), str(Path(__file__).parents[1] / "lib")])
    environment = os.environ | {"QUANTKIT_CACHE": str(cache), "PYTHONPATH": paths}
    process = subprocess.run([sys.executable, "-c", code, *arguments], env=environment, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr[-2000:]


def named_code(data: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield name and code of every function that a little-endian ELF64 file shows to others."""
    (table_offset,) = struct.unpack_from("<Q", data, 40)
    size, count = struct.unpack_from("<HH", data, 58)
    sections = [struct.unpack_from("<IIQQQQIIQQ", data, table_offset + size * i) for i in range(count)]
    for _, kind, _, _, offset, length, link, *_ in sections:
        if kind != 2:  # SHT_SYMTAB
            continue
        for symbol in struct.iter_unpack("<IBBHQQ", data[offset : offset + length]):
            name, info, _, section, value, n = symbol
            if info >> 4 != 0 and info & 15 == 2 and section != 0:  # not local, a function, defined
                start = sections[link][4] + name
                code = sections[section][4] + value
                yield data[start : data.index(b"\0", start)].decode(), data[code : code + n]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads ELF files")
def test_kernel_names_do_not_depend_on_compilation_order(tmp_path: Path) -> None:
    for names in ORDERS:
        run(FILL, tmp_path, *names.split())
    run(LOOK_UP, tmp_path, "Q4_0", "Q4_1", "IQ4_NL", "Q8_0", "BF16")
    objects = [path.read_bytes() for path in tmp_path.rglob("*.nbc")]
    assert len(objects) >= 8
    code_by_name: dict[str, bytes] = {}
    for data in objects:
        functions = dict(named_code(data[data.index(b"\x7fELF") :]))
        # Names that only wrappers have: all else is the object's own.
        assert functions
        assert all(name.startswith(("cfunc.", "_ZN7cpython")) for name in functions)
        for name, code in functions.items():
            assert code_by_name.setdefault(name, code) == code, name


def scaled(x: float) -> float:
    return x * factor


factor: object = None


def test_a_kernel_name_includes_its_bindings() -> None:
    def name(value: object) -> str:
        return rebind(scaled, "x", factor=value).__qualname__

    deep = [rebind(scaled, "same", factor=f) for f in (1, 2)]
    values = [1, 1.0, "1", None, (1, 2), [1, 2], np.float32(1), np.arange(3), np.arange(3.0), *deep]
    assert len({name(value) for value in values}) == len(values)
    assert name(np.arange(3)) == name(np.arange(3))
    assert name(rebind(scaled, "same", factor=1)) == name(deep[0])
    with pytest.raises(ValueError, match="scaled: factr: no such global"):
        rebind(scaled, "x", factr=1)
    with pytest.raises(TypeError, match="cannot be bound"):
        rebind(scaled, "x", factor=object())


# ---------------------------------------------------------------- folders


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with a home and a temporary directory of their own; nothing configured."""
    for name in ("home", "tmp"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(module.tempfile, "tempdir", str(tmp_path / "tmp"))
    for name in ("QUANTKIT_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    module._safe_folder.cache_clear()
    yield tmp_path
    module._safe_folder.cache_clear()
    module._of_this_process.cache_clear()


def test_the_folder_is_the_configured_one_or_the_users(places: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache_folder("kernels", "1") == places / "home/.cache/quantkit/kernels/1"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_folder("kernels", "2").is_relative_to(places / "home/.cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(places / "xdg"))
    assert cache_folder("kernels", "1", "cpu") == places / "xdg/quantkit/kernels/1/cpu"
    monkeypatch.setenv("QUANTKIT_CACHE", str(places / "mine"))
    assert cache_folder("cuda", "1") == places / "mine/cuda/1"
    if os.name == "posix":
        assert all((places / "mine" / name).stat().st_mode & 0o777 == 0o700 for name in (".", "cuda", "cuda/1"))


@posix
def test_a_folder_writable_by_others_is_not_used(places: Path, monkeypatch, capfd) -> None:
    base, private = places / "shared", places / f"tmp/quantkit-{os.getuid()}/kernels/1"
    base.mkdir()
    monkeypatch.setenv("QUANTKIT_CACHE", str(base))
    base.chmod(0o777)
    assert cache_folder("kernels", "1") == private
    assert f"{base}/kernels/1 is not used for compiled kernels: other users may write" in capfd.readouterr().err
    module._safe_folder.cache_clear()
    private.chmod(0o770)  # and neither is the private one once others could fill it
    own_folder = cache_folder("kernels", "1")
    assert own_folder.parent.parent.parent == places / "tmp"
    assert own_folder.parent.parent.name.startswith("quantkit-")
    assert own_folder.parent.parent.stat().st_mode & 0o777 == 0o700
    module._safe_folder.cache_clear()
    base.chmod(0o700)
    assert cache_folder("kernels", "1") == base / "kernels/1"


@posix
def test_planted_folders_and_links_are_not_used(places: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planted = places / "evil"
    (planted / "kernels/1").mkdir(parents=True)
    (places / f"tmp/quantkit-{os.getuid()}").mkdir(mode=0o700)
    (places / f"tmp/quantkit-{os.getuid()}/kernels").symlink_to(planted / "kernels")
    (places / "home/.cache").write_text("no folder can be made here")
    assert "evil" not in str(cache_folder("kernels", "1").resolve())
    module._safe_folder.cache_clear()
    (places / "home/.cache").unlink()
    monkeypatch.setattr(module.os, "getuid", lambda: 12345)  # all files belong to another user
    assert not cache_folder("kernels", "1").is_relative_to(places / "home")


@posix
def test_permissions_of_an_older_version_are_fixed(places: Path) -> None:
    kernels = places / "home/.cache/quantkit/kernels"
    kernels.mkdir(parents=True)
    for folder in (kernels, kernels.parent):
        folder.chmod(0o775)
    assert cache_folder("kernels", "1") == kernels / "1"
    assert [f.stat().st_mode & 0o777 for f in (kernels, kernels.parent)] == [0o755, 0o755]


def test_folders_of_old_sources_are_removed(places: Path) -> None:
    old, recent = (cache_folder("kernels", name) for name in ("old", "recent"))
    os.utime(old, (1e9, 1e9))
    cache_folder("kernels", "new")
    assert sorted(f.name for f in recent.parent.iterdir()) == ["new", "recent"]


def test_threads_share_the_kernel_folder() -> None:
    """The setting is numba's, for all threads: one that is done does not take it from another."""

    def make(seconds: float) -> tuple[str, str]:
        first = config.CACHE_DIR
        time.sleep(seconds)
        return first, config.CACHE_DIR

    before = config.CACHE_DIR
    with ThreadPoolExecutor(3) as pool:
        results = list(pool.map(lambda seconds: to_cache(make, seconds), (0.05, 0.02, 0.01)))
    assert results == [(str(kernel_folder()),) * 2] * 3
    assert before == config.CACHE_DIR
