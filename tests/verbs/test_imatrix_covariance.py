"""quantkit imatrix --covariance: the same file in one pass or many, resumed or not; what cannot be is refused early."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from refusals import check_refused, refuses
from test_imatrix_collect import N_CTX, RUN, TOKENS, options, quantkit, spoilt

from quantkit.errors import QuantkitError, ResourceError
from quantkit.formats.gguf import open_gguf
from quantkit.imatrix.covariance import CovarianceProgress, covariance
from quantkit.imatrix.covariance_file import Target
from zoo import write_zoo

#: The module; quantkit.imatrix, as a name, is the function.
covariances = sys.modules["quantkit.imatrix.covariance"]


#: Memory for all sums at once, and for a part of them at a time.
ALL, SMALL = 1 << 30, 30_000_000


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_zoo("qwen3moe-moe", tmp_path_factory.mktemp("zoo") / "model.gguf")


@pytest.fixture(scope="module")
def expected_bytes(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], bytes]:
    """Return a function that gives the file of an uninterrupted run, by its memory; chunk 4 is left out."""

    @cache
    def make(max_ram: int) -> bytes:
        out, run = tmp_path_factory.mktemp("whole") / "out.gguf", {"max_ram": max_ram, **RUN}
        covariance(model, (), out, tokens=TOKENS, options=options(), without=(4,), **run)
        return out.read_bytes()

    return make


def test_covariances_in_many_passes_equal_one_pass(model: Path, tmp_path: Path) -> None:
    one = covariance(model, (), tmp_path / "1.gguf", tokens=TOKENS, options=options(), max_ram=ALL, **RUN)
    passes = covariance(model, (), tmp_path / "2.gguf", tokens=TOKENS, options=options(), max_ram=SMALL, **RUN)
    assert one.n_passes == 1
    assert passes.n_passes > 3
    with open_gguf(tmp_path / "1.gguf") as a, open_gguf(tmp_path / "2.gguf") as b:
        assert a.tensors.keys() == b.tensors.keys()
        assert any(name.endswith(".cov_router") for name in a.tensors)
        for name in a.tensors:
            np.testing.assert_allclose(
                a.data(name).view(np.float32), b.data(name).view(np.float32), rtol=1e-5, atol=1e-5
            )
    with refuses(ResourceError, "QK-E407 --max-ram"):
        covariance(model, (), tmp_path / "3.gguf", tokens=TOKENS, options=options(), max_ram=1000, **RUN)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1.gguf", "2.gguf"]


@pytest.mark.parametrize(
    ("max_ram", "often", "stops"),
    [
        (ALL, 2, [(1, 5), (1, 7)]),
        (ALL, 0, [(1, 7)]),
        (SMALL, 2, [(3, 5)]),
        (SMALL, 2, [(2, 1)]),
    ],
)
def test_resumed_covariances_write_the_same_file(
    max_ram: int,
    often: int,
    stops: list[tuple[int, int]],
    model: Path,
    expected_bytes: Callable[[int], bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(covariances, "_SAVE_SHARE", 1e9)  # save whenever it is due, however long it takes
    out, settings = tmp_path / "out.gguf", options(output_frequency=often)
    run: dict[str, Any] = {"tokens": TOKENS, "max_ram": max_ram, **RUN}
    for i, stop_at in enumerate(stops):

        def stop(now: CovarianceProgress, stop_at: tuple[int, int] = stop_at) -> None:
            if (now.number, now.chunk) >= stop_at:
                raise KeyboardInterrupt

        limits = {"without": (4,)} if i == 0 else {}
        with pytest.raises(KeyboardInterrupt):
            covariance(model, (), out, options=replace(settings, resume=i > 0), progress=stop, **limits, **run)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.gguf.part", "out.gguf.state"]
    with refuses(QuantkitError, "QK-E408 --resume --overwrite"):
        covariance(model, (), out, options=settings, **run)
    events: list[CovarianceProgress] = []
    result = covariance(model, (), out, options=replace(settings, resume=True), progress=events.append, **run)
    assert out.read_bytes() == expected_bytes(max_ram)
    assert [path.name for path in tmp_path.iterdir()] == ["out.gguf"]
    # Chunks of a pass are done in twos, and there are 7; what was interrupted was not saved any more.
    number, chunk = stops[-1]
    assert result.resumed == (number - 1, (chunk - 1) // 2 * 2 if often else 0)
    assert (events[0].number, events[0].n_passes) == (number, result.n_passes)
    assert events[0].chunk == min(7, result.resumed[1] + 2)


def test_covariances_resume_with_another_limit_but_not_text(
    model: Path, expected_bytes: Callable[[int], bytes], tmp_path: Path
) -> None:
    out, run = tmp_path / "out.gguf", {"max_ram": SMALL, **RUN}

    def stop(now: CovarianceProgress) -> None:
        if now.number == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        covariance(model, (), out, tokens=TOKENS, options=options(), without=(4,), progress=stop, **run)
    with refuses(QuantkitError, "QK-E409 out.gguf.state --overwrite --resume"):
        covariance(model, (), out, tokens=TOKENS[::-1].copy(), options=options(resume=True), **run)
    with refuses(QuantkitError, "QK-E409 out.gguf.state"):
        covariance(model, (), out, tokens=TOKENS, options=options(resume=True), without=(1,), **run)
    result = covariance(model, (), out, tokens=TOKENS, options=options(resume=True), max_ram=ALL, **RUN)
    assert result.resumed == (2, 0)
    assert result.n_passes == 3
    assert out.read_bytes() == expected_bytes(SMALL)


def test_impossible_covariances_are_refused_before_the_imatrix(model: Path, tmp_path: Path) -> None:
    out, cov = tmp_path / "i.gguf", tmp_path / "cov.gguf"
    arguments = ["-m", model, "--tokens", ",".join(map(str, TOKENS)), "-c", N_CTX, "-o", out, "-t", 1]
    for changes, words in (
        (["--covariance", cov, "--max-ram", "100"], "--max-ram leaves"),
        (["--covariance", out], "are the same file"),
        (["--covariance", tmp_path / "no" / "cov.gguf"], "its folder does not exist"),
    ):
        result = quantkit(*arguments, *changes)
        assert result.exit_code != 0
        assert words in result.output
        assert not list(tmp_path.iterdir())


def test_the_command_resumes_covariances_after_a_complete_imatrix(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, cov = tmp_path / "i.gguf", tmp_path / "cov.gguf"
    bad = spoilt(model, tmp_path / "bad.gguf", "token_embd.weight", 120, np.nan)
    tokens = TOKENS.copy()
    tokens[3 * N_CTX + 5] = 120
    ids = ",".join(map(str, tokens))
    arguments = ["-m", bad, "--tokens", ids, "-c", N_CTX, "-t", 1, "-o", out, "--covariance", cov]
    assert quantkit(*arguments).exit_code == 0
    expected = [path.read_bytes() for path in (out, cov)]
    out.unlink()
    cov.unlink()

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Target, "finish", interrupt)
        assert quantkit(*arguments).exit_code == 130 or not cov.exists()
    assert out.exists()
    check_refused(quantkit(*arguments).output, "QK-E408 --resume")
    result = quantkit(*arguments, "--resume", "--require-coverage", "10%")
    assert result.exit_code == 0, result.output
    assert "is complete; continuing with the covariances" in result.output
    assert f"{cov} is complete; nothing to resume" in quantkit(*arguments, "--resume").output
    assert [path.read_bytes() for path in (out, cov)] == expected
    assert not list(tmp_path.glob("*.state"))
