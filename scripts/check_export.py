"""Does transformers load what `quantkit export` writes, and is it the same model?

    PYTHON scripts/check_export.py write --out DIR [NAME ...]
    TRANSFORMERS scripts/check_export.py compare --out DIR [NAME ...]

``write``, run with quantkit's PYTHON, draws every checkpoint (tests/checkpoints.py), converts it to float32 and exports
that: DIR/drawn/NAME and DIR/exported/NAME, with the ids that quantkit's own tokenizer gives of ``TEXTS``. ``compare``,
run with 4.57.6 and with 5.18.0 of transformers, takes the checkpoints that each can run: it loads both, and prints the
NMSE of the logits of a prompt, weights that differ, and whether the tokenizer gives the same ids. It ends with 1 if a
model computes something else.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import checkpoints  # noqa: E402
from quantkit.checkpoint.vocab.pre_hashes import TEXT  # noqa: E402

#: Models are the same below this.
BOUND = 1e-10
TEXTS = (
    "Hello World! It's 12345 tests, don't?\n\n  def f(x):\n\treturn x+1  \n",
    "na\u00efve caf\u00e9, \u65e5\u672c\u8a9e \u4f60\u597d \U0001f999 \u0433\u043e\u0434 3.14159 == {'a': [1, 2]}",
    "   spaces   and\ttabs\r\n\r\nWE'RE SHOUTING; we'll see...",
    TEXT,
)
#: Of classes that transformers has as remote code only.
_REMOTE = ("bailing-moe-v2",)
#: Their files say less than their config.json: of hybrids, that layers of attention have no rope.
_LOST = ("granite-hybrid-dense",)
#: What one of the two has and the other has not: parts that no file of a text model holds.
_APART = ("mtp.", "model.visual.", "vision_tower.", "model.vision", "multi_modal_", "model.multi_modal_", "lm_head.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("write", "compare"))
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: all")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_intermixed_args()
    names = args.names or [name for name in checkpoints.NAMES if checkpoints.describe(name).quantized is None]
    failed = (write if args.what == "write" else compare)(names, args.out)
    if failed:
        sys.exit(f"{len(failed)} are not the same: {' '.join(failed)}")


def write(names: list[str], out: Path) -> list[str]:
    """Export checkpoints; return those that are refused."""
    from quantkit.convert import ConvertOptions, convert
    from quantkit.errors import QuantkitError
    from quantkit.export import export
    from quantkit.formats.gguf import open_gguf
    from quantkit.formats.tokenizer import Tokenizer

    refused = []
    for name in names:
        drawn = checkpoints.write_checkpoint(name, out / "drawn")
        model, exported = out / f"{name}.gguf", out / "exported" / name
        options = ConvertOptions(pre=checkpoints.describe(name).vocab.get("pre"), outtype="f32")
        shutil.rmtree(exported, ignore_errors=True)
        exported.parent.mkdir(exist_ok=True)
        try:
            convert(drawn, model, None, options, overwrite=True)
            export(model, exported)
            with open_gguf(model) as file:
                tokenizer = Tokenizer.from_gguf(file)
                ids = [tokenizer.encode(text) for text in TEXTS]
            (exported / "ids.json").write_text(json.dumps([[int(i) for i in row] for row in ids]))
        except QuantkitError as e:
            print("REFUSED", name, e, flush=True)
            refused.append(name)
        finally:
            model.unlink(missing_ok=True)
    return refused


def compare(names: list[str], out: Path) -> list[str]:
    """Load checkpoints and what was exported of them; return those that differ."""
    import torch
    import transformers

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    version = int(transformers.__version__.split(".")[0])
    failed = []
    for name in names:
        what = checkpoints.describe(name)
        exported = out / "exported" / name
        if what.transformers != version or not exported.exists() or name in _REMOTE:
            continue
        try:
            nmse, notes = compared(out / "drawn" / name, exported, what)
            ok = nmse <= BOUND or name in _LOST
            print("same" if ok else "DIFFERENT", name, f"{nmse:.1e}", *notes, sep="  ", flush=True)
        except Exception as error:
            ok = False
            print("FAILED", name, type(error).__name__, str(error)[:300], sep="  ", flush=True)
            traceback.print_exc()
        failed += [] if ok else [name]
    return failed


def compared(drawn: Path, exported: Path, what: checkpoints.Description) -> tuple[float, list[str]]:
    """Return the NMSE of what was exported against the original, and what is worth saying."""
    import torch

    theirs, ours = loaded(drawn, what.model), loaded(exported)
    with torch.no_grad():
        logits = [model(torch.tensor([checkpoints.PROMPT]), use_cache=False).logits for model in (theirs, ours)]
    if not torch.isfinite(logits[0]).all():
        raise ValueError("not finite")
    a, b = theirs.state_dict(), ours.state_dict()
    shared = {key.split("language_model.")[-1].removeprefix("model."): x for key, x in a.items()}
    mine = {key.split("language_model.")[-1].removeprefix("model."): x for key, x in b.items()}
    differ = [key for key in shared if key in mine and not torch.equal(shared[key], mine[key])]
    differ = [key for key in differ if not key.startswith(("visual.", "vision", "multi_modal_"))]
    notes = [f"{len(differ)} weights differ: {differ[:3]}"] if differ else []
    return float(((logits[0] - logits[1]) ** 2).sum() / (logits[0] ** 2).sum()), notes + tokenizer_notes(exported)


def loaded(path: Path, named: str | None = None) -> Any:
    """Return a model in float32; every weight of it must be there."""
    import torch
    import transformers

    cls = getattr(transformers, named or json.loads((path / "config.json").read_text())["architectures"][0])
    model, info = cls.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager", output_loading_info=True, local_files_only=True
    )
    layers = getattr(model.config, "num_hidden_layers", None)
    for key in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        bad = [each for each in map(str, info[key]) if not each.startswith((*_APART, f"model.layers.{layers}."))]
        if bad:
            raise ValueError(f"{key}: {bad[:5]}")
    return model.eval()


def tokenizer_notes(exported: Path) -> list[str]:
    """Return what is not as quantkit's own tokenizer has it."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(exported)
    found = [tokenizer(text).input_ids for text in TEXTS]
    expected = json.loads((exported / "ids.json").read_text())
    return [
        f"ids of text {i}: {a[:12]}, not {b[:12]}"
        for i, (a, b) in enumerate(zip(found, expected, strict=True))
        if a != b
    ]


if __name__ == "__main__":
    main()
