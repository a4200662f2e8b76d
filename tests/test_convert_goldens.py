"""Every checkpoint is converted to the bytes of convert_hf_to_gguf.py, and runs as in transformers."""

from __future__ import annotations

import hashlib
import json
import shutil
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import checkpoints
from gguf_digests import differences, digests
from libllama import nmse
from quantkit.convert import ConvertOptions, convert
from quantkit.errors import TypeNotSupported
from quantkit.formats.gguf import open_gguf
from quantkit.model.arch import arch_by_name
from quantkit.model.engine import load
from quantkit.model.placement import Placement

DATA = Path(__file__).parent / "data"
EXPECTED: dict[str, Any] = json.loads((DATA / "convert-sha256.json").read_text())
LOGITS = np.load(DATA / "convert-logits.npz")
BOUND = 1e-5
#: Converted, but not run by the engine yet: their logits wait for it.
NOT_RUN = {"arcee", "command-r", "gemma", "gemma4", "granitehybrid", "olmo", "phi2", "qwen3vl"}
NOT_RUN |= {"starcoder"}
SPLITS = {
    "bf16 by size": {"split_max_size": "2M"},
    "bf16 by tensors": {"split_max_tensors": 10},
    "bf16 by tensors-after-metadata": {"split_max_tensors": 10, "no_tensor_first_split": True},
}


def options_of(what: checkpoints.Description) -> ConvertOptions:
    """Return the options that a checkpoint was converted with by the reference."""
    given: dict[str, Any] = {"pre": what.vocab.get("pre")}
    words = list(what.options)
    while words:
        name = words.pop(0).removeprefix("--").replace("-", "_")
        given[name] = words.pop(0) if words and not words[0].startswith("--") else True
    return ConvertOptions(**given)


@pytest.fixture
def drawn(tmp_path: Path, request: pytest.FixtureRequest) -> Any:
    yield checkpoints.write_checkpoint(request.param, tmp_path / "drawn")
    shutil.rmtree(tmp_path)  # pytest would keep gigabytes of them


#: Its experts stay the blocks they are (test_checkpoint_quantized.py); the reference, which cannot read it, has floats.
BLOCKS = "kimi-k2-ct-mxfp4"
FLOATS = [name for name in EXPECTED if name != BLOCKS]


@pytest.mark.parametrize(("name", "drawn"), [(name, name) for name in FLOATS], indirect=["drawn"], ids=FLOATS)
def test_the_bytes_are_the_references(name: str, drawn: Path, tmp_path: Path) -> None:
    what, out = checkpoints.describe(name), tmp_path / "out.gguf"
    options, wrong = options_of(what), {}
    for way, expected in EXPECTED[name].items():
        if isinstance(expected, dict):
            convert(drawn, out, None, replace(options, outtype=way), overwrite=True)
            with open_gguf(out) as file:
                if found := differences(expected, digests(out), list(file.tensors)):
                    wrong[way] = found
        elif isinstance(expected, list):
            paths = convert(drawn, tmp_path / "split.gguf", None, replace(options, outtype="bf16", **SPLITS[way])).paths
            if [hashlib.sha256(path.read_bytes()).hexdigest() for path in paths] != expected:
                wrong[way] = (
                    f"{len(paths)} parts, not {len(expected)}" if len(paths) != len(expected) else "parts differ"
                )
            for path in paths:
                path.unlink()
    assert {way: text for way, text in wrong.items() if not only_exponentials(text)} == {}


@pytest.mark.parametrize("drawn", [BLOCKS], indirect=True)
def test_beside_blocks_that_are_kept_all_is_the_references(drawn: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.gguf"
    convert(drawn, out, None, replace(options_of(checkpoints.describe(BLOCKS)), outtype="f32"))
    expected = EXPECTED[BLOCKS]["f32"]["tensors"]
    sums = {expected[i : i + 8] for i in range(0, len(expected), 8)}
    with open_gguf(out) as file:
        data = {t.name: file.data(t).tobytes() for t in file.tensors.values()}
        kept = {t.name for t in file.tensors.values() if t.type.name == "MXFP4"}
    assert len(data) == len(expected) // 8
    other = {name for name, raw in data.items() if f"{zlib.crc32(raw + bytes(-len(raw) % 32)):08x}" not in sums}
    assert other == kept
    assert kept == {f"blk.{i}.ffn_{kind}_exps.weight" for i in (1, 2) for kind in ("down", "gate", "up")}


def only_exponentials(text: str) -> bool:
    """Whether two files differ in tensors alone that are made by exp, whose last bit depends on torch's machine."""
    return all(part.endswith(".ssm_a differs") for part in text.split("; "))


@pytest.mark.parametrize(("name", "drawn"), [(name, name) for name in LOGITS], indirect=["drawn"], ids=list(LOGITS))
def test_the_logits_are_those_of_transformers(name: str, drawn: Path, tmp_path: Path) -> None:
    options = replace(options_of(checkpoints.describe(name)), outtype="f32")
    (path,) = convert(drawn, tmp_path / "f32.gguf", None, options).paths
    with open_gguf(path) as file:
        arch = str(file.get("general.architecture"))
    if arch in NOT_RUN:
        with pytest.raises(TypeNotSupported):
            arch_by_name(arch)
        return
    placement = Placement(gpu_layers=99, rules=((".*", "REFERENCE"),), accelerators=("REFERENCE",))
    with load(path, n_ctx=512, kv_type="f32", placement=placement) as model:
        logits = model.forward(np.array(checkpoints.PROMPT, np.int32))[-4:]
    assert nmse(logits, LOGITS[name]) <= BOUND
