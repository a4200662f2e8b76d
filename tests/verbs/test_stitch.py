"""Stitched models: tensors of several files, byte for byte, and shards of maps with their digests."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner
from refusals import refuses

from quantkit.cli import cli
from quantkit.errors import FormatError, QuantkitError, RecipeError, ResourceError
from quantkit.formats.gguf import open_gguf
from quantkit.quantize import QuantizeOptions, quantize
from quantkit.split import join, split
from quantkit.stitch import plan_stitch, stitch
from small_models import llama_fields, llama_tensors, write_model

DATA = Path(__file__).parents[1] / "data"
SOURCE, IMATRIX = DATA / "tiny-moe-bf16.gguf", DATA / "tiny-moe-imatrix.gguf"
#: As GGUF-Tool-Suite writes it.
RECIPE = r"""
## Quant mix recipe created using Thireus' GGUF Tool Suite - https://gguf.thireus.com/

## Model head & embeddings — qbits: 32 8
^output_norm\.weight$=f32
^token_embd\.weight$=iq3_k
^output\.weight$=q8_0
^blk\.([0-3])\.attn_(k|q|v|output)\.weight$=q8_0
^blk\.([0-3])\.ffn_gate_inp\.weight$=f32

# ffn_down_exps (down-extraction) — qbits: 4 3
^blk\.(0|3)\.ffn_down_exps\.weight$=iq3_k
^blk\.([1-2])\.ffn_down_exps\.weight$=q4_0
^blk\.([0-3])\.ffn_(gate|up)_exps\.weight$=iq3_k
"""


@pytest.fixture(scope="module")
def quants(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("quants")
    files = {name: folder / f"{name}.gguf" for name in ("Q4_0", "Q8_0", "IQ3_K")}
    for name, path in files.items():
        quantize(SOURCE, path, name, QuantizeOptions(pure=True, imatrix=IMATRIX, rules="ik"))
    (folder / "mix.recipe").write_text(RECIPE)
    return files


def tensors_of(path: Path) -> dict[str, tuple[str, bytes]]:
    with open_gguf(path) as file:
        return {t.name: (t.type.name, file.data(t).tobytes()) for t in file.tensors.values()}


def write_map(folder: Path, source: Path, name: str = "m", map_name: str = "tensors.q8_0.map") -> Path:
    """Split a file into a shard per tensor, and write the map of GGUF-Tool-Suite."""
    folder.mkdir(exist_ok=True)
    split(source, folder / f"{name}.gguf", max_tensors=1, no_tensor_first_split=True)
    lines = []
    with open_gguf(folder / f"{name}-00001-of-00052.gguf") as file:
        for t in file.tensors.values():
            path = file.paths[t.shard]
            digest, shape = hashlib.sha256(path.read_bytes()).hexdigest(), tuple(t.shape)
            dtype, n = t.type.name.lower(), t.nbytes
            lines.append(f"{path.name}:{digest}:{t.name}:shape={shape}:dtype={dtype}:elements=0:bytes={n}\n")
    (path := folder / map_name).write_text("".join(lines))
    return path


def test_tensors_are_those_of_their_files(quants: dict[str, Path], tmp_path: Path) -> None:
    base, q8 = (tensors_of(quants[name]) for name in ("Q4_0", "Q8_0"))
    stitch(quants["Q4_0"], tmp_path / "s.gguf", {r"blk\.0\.attn_k\.weight": quants["Q4_0"], "attn": quants["Q8_0"]})
    expected = {n: q8[n] if "attn" in n and n != "blk.0.attn_k.weight" else t for n, t in base.items()}
    assert tensors_of(tmp_path / "s.gguf") == expected
    assert list(tensors_of(tmp_path / "s.gguf")) == list(base)
    with open_gguf(tmp_path / "s.gguf") as file, open_gguf(quants["Q8_0"]) as source:
        assert file.get("quantkit.stitch.rules") == [r"blk\.0\.attn_k\.weight=Q4_0.gguf", "attn=Q8_0.gguf"]
        assert file.get("quantkit.stitch.0.quantize.recipe") == source.get("quantkit.quantize.recipe")


def test_the_shards_of_a_map_are_checked(quants: dict[str, Path], tmp_path: Path) -> None:
    path = write_map(tmp_path, quants["Q8_0"])
    stitch(quants["Q4_0"], tmp_path / "s.gguf", {"ffn_down": path})
    base, q8 = (tensors_of(quants[name]) for name in ("Q4_0", "Q8_0"))
    assert tensors_of(tmp_path / "s.gguf") == {n: q8[n] if "ffn_down" in n else t for n, t in base.items()}
    shard = next(line.split(":")[0] for line in path.read_text().splitlines() if "blk.2.ffn_down" in line)
    content = bytearray((tmp_path / shard).read_bytes())
    content[-1] ^= 1
    (tmp_path / shard).write_bytes(content)
    with refuses(FormatError, "QK-E100", shard):
        stitch(quants["Q4_0"], tmp_path / "t.gguf", {"ffn_down": path})
    stitch(quants["Q4_0"], tmp_path / "t.gguf", {"ffn_up": path})


def test_refusals(quants: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "bad.map").write_text("x\n")
    (tmp_path / "empty.map").write_text("")
    cases: list[tuple[dict[str, str | Path], type[QuantkitError], str]] = [
        ({}, RecipeError, "QK-E214"),
        ({"nope": quants["Q8_0"]}, RecipeError, "QK-E206 nope"),
        ({"attn": IMATRIX}, RecipeError, "QK-E206 attn"),
        ({"(": quants["Q8_0"]}, RecipeError, "QK-E205"),
        ({"attn": tmp_path / "bad.map"}, FormatError, "QK-E111 1"),
        ({"attn": tmp_path / "empty.map"}, FormatError, "QK-E111"),
        ({"attn": tmp_path / "nope.gguf"}, FormatError, "QK-E401 nope.gguf"),
    ]
    for take, kind, refusal in cases:
        with refuses(kind, refusal):
            stitch(quants["Q4_0"], tmp_path / "s.gguf", take)
    with refuses(ResourceError, "QK-E403"):
        stitch(quants["Q4_0"], quants["Q8_0"], {"attn": quants["Q8_0"]}, overwrite=True)
    assert not (tmp_path / "s.gguf").exists()


def test_the_command(quants: dict[str, Path], tmp_path: Path) -> None:
    arguments = ["stitch", str(quants["Q4_0"]), str(tmp_path / "s.gguf"), "--take", f"attn_(k|v)={quants['Q8_0']}"]
    result = CliRunner().invoke(cli, [*arguments, "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["written"] is True
    assert tensors_of(tmp_path / "s.gguf")["blk.1.attn_v.weight"][0] == "Q8_0"


def test_a_recipe_selects_as_it_quantizes(quants: dict[str, Path], tmp_path: Path) -> None:
    recipe, expected, out = quants["Q8_0"].with_name("mix.recipe"), tmp_path / "direct.gguf", tmp_path / "s.gguf"
    quantize(SOURCE, expected, "Q8_0", QuantizeOptions(pure=True, imatrix=IMATRIX, recipe=(recipe,)))
    plan = plan_stitch(quants["Q8_0"], out, recipe=recipe, files=[quants["Q4_0"], quants["IQ3_K"]])
    assert not [note for note in plan.notes if note.startswith(("warning", "QK-W"))]
    stitch(quants["Q8_0"], out, recipe=recipe, files=[quants["Q4_0"], quants["IQ3_K"]])
    assert tensors_of(out) == tensors_of(expected)
    with open_gguf(out) as file:
        assert r"^blk\.([1-2])\.ffn_down_exps\.weight$ = Q4_0" in file.get("quantkit.stitch.recipe")
    # Of two files with the type the first counts, and --take before the recipe.
    stitch(quants["Q8_0"], out, {"output": quants["Q4_0"]}, recipe=recipe, files=[*quants.values()], overwrite=True)
    types = {name: t for name, (t, _) in tensors_of(out).items()}
    assert (types["output.weight"], types["blk.0.attn_output.weight"], types["blk.0.attn_q.weight"]) == (
        *("Q4_0", "Q4_0", "Q8_0"),
    )


def test_rows_that_do_not_fit_have_the_type_that_replaces_it(tmp_path: Path) -> None:
    write_model(tmp_path / "odd.gguf", llama_tensors(1, ff=96), llama_fields(1, ff=96))
    paths = [tmp_path / f"{name}.gguf" for name in ("Q8_0", "Q3_K")]
    for path in paths:
        quantize(tmp_path / "odd.gguf", path, path.stem, QuantizeOptions(pure=True))
    (tmp_path / "r").write_text("ffn_down = q3_K")
    stitch(paths[0], tmp_path / "s.gguf", recipe=tmp_path / "r", files=paths[1:])
    tensors, base, low = map(tensors_of, (tmp_path / "s.gguf", *paths))
    assert low["blk.0.ffn_down.weight"][0] == "Q4_0"
    assert tensors == base | {"blk.0.ffn_down.weight": low["blk.0.ffn_down.weight"]}


def test_a_recipe_selects_from_maps(quants: dict[str, Path], tmp_path: Path) -> None:
    """Only shards that are taken lie beside their map; embeddings have another type than the map."""
    mixed = tmp_path / "mixed.gguf"
    options = QuantizeOptions(pure=True, imatrix=IMATRIX, token_embedding_type="Q6_K")
    quantize(SOURCE, mixed, "IQ3_K", options)
    q8 = write_map(tmp_path / "q8", quants["Q8_0"], "tiny-THIREUS-Q8_0-SPECIAL_TENSOR", "tensors.map")
    iq3 = write_map(tmp_path / "iq3", mixed, "tiny-THIREUS-IQ3_K-SPECIAL_TENSOR", "tensors.iq3_k.map")
    q4 = write_map(tmp_path / "q4", quants["Q4_0"], "tiny-THIREUS-Q4_0-SPECIAL_TENSOR", "tensors.map")
    recipe, out = quants["Q8_0"].with_name("mix.recipe"), tmp_path / "s.gguf"
    stitch(q8, out, recipe=recipe, files=[iq3, q4])
    tensors, base, low, middle = map(tensors_of, (out, quants["Q8_0"], mixed, quants["Q4_0"]))
    is_low = {name for name in base if "gate_exps" in name or "up_exps" in name or name == "token_embd.weight"}
    is_low |= {"blk.0.ffn_down_exps.weight", "blk.3.ffn_down_exps.weight"}
    is_middle = {"blk.1.ffn_down_exps.weight", "blk.2.ffn_down_exps.weight"}
    assert tensors == {n: low[n] if n in is_low else middle[n] if n in is_middle else t for n, t in base.items()}
    assert list(tensors) == list(base)
    shards = {line.split(":")[2]: line.split(":")[0] for line in q4.read_text().splitlines()}
    for name in set(shards) - is_middle:
        (q4.parent / shards[name]).unlink()
    stitch(q8, tmp_path / "t.gguf", recipe=recipe, files=[iq3, q4])
    assert tensors_of(tmp_path / "t.gguf") == tensors
    absent = q4.parent / shards["blk.2.ffn_down_exps.weight"]
    absent.rename(tmp_path / absent.name)
    with refuses(FormatError, "QK-E104", absent.name):
        stitch(q8, tmp_path / "u.gguf", recipe=recipe, files=[iq3, q4])
    # GGUF-Tool-Suite downloads the shards into one folder, under the name of the first type.
    for name in is_low | is_middle:
        folder = tmp_path / "iq3" if name in is_low else tmp_path / "q4"
        shard = tmp_path / absent.name if name == "blk.2.ffn_down_exps.weight" else folder / shards[name]
        kind = "IQ3_K" if name in is_low else "Q4_0"
        shutil.copy(str(shard).replace("-Q4_0-", f"-{kind}-"), tmp_path / "q8" / shards[name].replace("Q4_0", "Q8_0"))
    join(tmp_path / "q8" / "tiny-THIREUS-Q8_0-SPECIAL_TENSOR-00001-of-00052.gguf", tmp_path / "j.gguf")
    assert tensors_of(tmp_path / "j.gguf") == tensors
    (tmp_path / "q8" / "tiny-THIREUS-Q8_0-SPECIAL_TENSOR-00001-of-00052.gguf").unlink()
    with refuses(FormatError, "QK-E104", "SPECIAL_TENSOR-00001-of-00052.gguf"):
        stitch(q8, tmp_path / "u.gguf", recipe=recipe, files=[iq3, q4])


def test_refusals_of_a_recipe(quants: dict[str, Path], tmp_path: Path) -> None:
    recipe, out = quants["Q8_0"].with_name("mix.recipe"), tmp_path / "s.gguf"
    with refuses(RecipeError, "QK-E217 blk.0.ffn_down_exps.weight IQ3_K"):
        stitch(quants["Q8_0"], out, recipe=recipe, files=[quants["Q4_0"]])
    with refuses(RecipeError, "QK-E202"):
        stitch(quants["Q8_0"], out, {"attn": quants["Q4_0"]}, files=[quants["Q4_0"]])
    with refuses(RecipeError, "QK-E207"):
        stitch(quants["Q8_0"], out, recipe=recipe, files=[IMATRIX])
    with refuses(ResourceError, "QK-E401"):
        stitch(out, quants["Q8_0"], recipe=recipe, files=[quants["Q4_0"]])
    with refuses(ResourceError, "QK-E403"):
        stitch(quants["Q8_0"], quants["IQ3_K"], recipe=recipe, files=[*quants.values()], overwrite=True)
    assert not out.exists()
    # Another model: the norms differ.
    with open_gguf(SOURCE) as file:
        offset = file.tensors["output_norm.weight"].offset
    content = bytearray(SOURCE.read_bytes())
    content[offset] ^= 1
    (tmp_path / "other.gguf").write_bytes(content)
    plan = plan_stitch(SOURCE, out, {"attn": tmp_path / "other.gguf"})
    assert any(note.startswith("warning") and "output_norm.weight" in note for note in plan.notes)
