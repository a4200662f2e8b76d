"""-dev, -ts, -sm and -mg place layers as llama.cpp's options do."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner
from refusals import refuses

from quantkit.cli import cli
from quantkit.errors import RecipeError
from quantkit.model.placement import ALL_LAYERS, placement_of


@pytest.mark.parametrize(
    ("shares", "n_layer", "expected"),
    [
        ((), 3, "0011"),
        ((1, 1), 3, "0011"),
        ((3, 1), 3, "0001"),
        ((1, 0), 3, "0000"),
        ((0, 1), 3, "1111"),
        ((30, 10), 7, "00000011"),
    ],
)
def test_layer_shares_of_devices(shares: tuple[float, ...], n_layer: int, expected: str) -> None:
    placement = placement_of("cuda", ALL_LAYERS, (), ("CUDA0", "CUDA1"), shares)
    assert "".join(placement.layer_device(i, n_layer)[-1] for i in range(n_layer + 1)) == expected


@pytest.mark.parametrize("shares", [(1,), (1, 2, 3), (-1, 2), (0, 0)])
def test_invalid_shares_are_refused(shares: tuple[float, ...]) -> None:
    with refuses(RecipeError, "QK-E203 -ts CUDA0 CUDA1"):
        placement_of("cuda", None, (), ("CUDA0", "CUDA1"), shares)


@pytest.mark.parametrize(
    ("options", "devices", "expected"),
    [
        (("-dev", "CUDA1"), "0 1", "CUDA1"),
        (("-dev", "1,0"), "0 1", "CUDA1 CUDA0"),
        (("-dev", "none", "-ngl", "9"), "0 1", ""),
        (("-sm", "none", "-mg", "1", "-ngl", "99"), "0 1", "CUDA1"),
        (("-sm", "none", "-dev", "CUDA1"), "0 1", "CUDA1"),
        (("-ts", "1,1"), "0 1", "CUDA0 CUDA1"),
        (("-sm", "row", "-ngl", "99"), "0 1", "CUDA0 CUDA1"),
        (("-sm", "none", "-mg", "1"), "0 1", ""),
        (("-ts", "1,1", "-dev", "CUDA0"), "", ""),
    ],
)
def test_options_select_devices(
    options: tuple[str, ...], devices: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from quantkit.cli import _evaluation, logits
    from quantkit.model import placement

    monkeypatch.setattr(placement, "cuda_devices", lambda: tuple(f"CUDA{i}" for i in devices.split()))
    placements = []
    monkeypatch.setattr(logits, "load_options", lambda run: placements.append(_evaluation.placement_from(run)))
    CliRunner().invoke(cli, ["logits", "-m", __file__, "--tokens", "1", "-o", str(tmp_path / "x.npy"), *options])
    assert len(placements) == 1
    assert " ".join(placements[0].accelerators if placements[0].gpu_layers else ()) == expected
