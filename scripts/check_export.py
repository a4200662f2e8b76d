"""Check that transformers loads the checkpoints of `quantkit export`, and that they are the same models.

    PYTHON scripts/check_export.py write --out DIR [--mmproj] [NAME ...]
    TRANSFORMERS scripts/check_export.py compare --out DIR [--mmproj] [NAME ...]

``write``, run with quantkit's PYTHON, generates every checkpoint (tests/lib/checkpoints.py), converts it to float32 and
exports that: DIR/drawn/NAME and DIR/exported/NAME, with the ids of ``TEXTS`` by quantkit's own tokenizer. ``compare``,
run with 4.57.6 and with 5.18.0 of transformers, checks the checkpoints that each can run: it loads both, and prints the
NMSE of the logits of a prompt, weights that differ, and whether the tokenizer gives the same ids. It exits with 1 if a
model computes something else.

With --mmproj both are the whole models of checkpoints with encoders: every weight must be there and equal. One that
the BF16 mmproj file has in F16 must be the original rounded to F16. Settings that differ, except those of
``_SETTINGS``, are printed.
"""

from __future__ import annotations

import argparse
import inspect
import json
import shutil
import sys
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests/lib")]

from loadable import STEP_SIZES, describe_loadable  # noqa: E402

import checkpoints  # noqa: E402
from quantkit.checkpoint.vocab.pre_tokenizers import TEXT  # noqa: E402

#: Models whose logits differ by less are the same.
BOUND = 1e-10
TEXTS = (
    "Hello World! It's 12345 tests, don't?\n\n  def f(x):\n\treturn x+1  \n",
    "na\u00efve caf\u00e9, \u65e5\u672c\u8a9e \u4f60\u597d \U0001f999 \u0433\u043e\u0434 3.14159 == {'a': [1, 2]}",
    "   spaces   and\ttabs\r\n\r\nWE'RE SHOUTING; we'll see...",
    TEXT,
)
#: Classes that exist in transformers as remote code only.
_REMOTE = ("bailing-moe-v2",)
#: transformers' class of this name is a different one: without experts.
_NOT_RUN = ("nomic-bert-moe",)
#: Originals that transformers does not load, because they are generated with part of a tower, without a head, or in the
#: format of remote code: only the exported checkpoint is run.
_ALONE = (
    *("exaone4.5", "granite-moe-swa", "llama-model", "llava", "minimax-m3", "paddleocr", "qwen2-vl"),
    # Chameleon's norms of heads: a file has only that of the first. Hunyuan-VL is generated with an output head of its
    # own, and tied.
    *("qwen3-omni-moe", "step3p5", "chameleon", "hunyuan-vl"),
)
#: Draft models need the hidden states of another model; only loading is checked.
_LOADED = ("gemma4-assistant",)
#: Checkpoint -> changes to the original's config.json that match its file: as llama.cpp computes it, or as its
#: converter reads it.
_OVERRIDES: dict[str, dict[str, Any]] = {
    "afmoe": {"mup_enabled": True},
    "falcon-h1": {"mamba_norm_before_gate": False},
    "gemma3n": {"tie_word_embeddings": True},
    "gemma-embedding": {"layer_types": ["sliding_attention"] * 3},
    "glm": {"rms_norm_eps": 1e-5},
    "granite-hybrid-dense": {"position_embedding_type": "nope"},
    "hy-v4": {"model_type": "hy_v4", "norm_topk_prob": False, "pad_token_id": None},
    "kimi-linear": {"pad_token_id": None},
    "minicpm3": {"rope_scaling": {"factor": 1.0}, "scale_emb": 12, "dim_model_base": 256, "scale_depth": 1.4},
}
#: Tensors that only one of the two has: parts that files of text models omit.
_OPTIONAL_KEYS = (
    *("mtp.", "model.visual.", "vision_tower.", "model.vision", "multi_modal_", "model.multi_modal_", "lm_head."),
    *("model.projector.", "pooler.", "cls.predictions.", "model.vqmodel."),
)
#: Classes of llama.cpp's converter, and their names in transformers.
_CLASS_NAMES = {
    "DeepseekOCR2ForCausalLM": "DeepseekOcr2ForConditionalGeneration",
    "KimiK25ForConditionalGeneration": "Kimi_K25ForConditionalGeneration",
    "LightOnOCRForConditionalGeneration": "LightOnOcrForConditionalGeneration",
}
#: transformers' class of this name has other names of tensors, or no encoders.
_OTHER_LAYOUT = ("DeepseekV4ForCausalLM", "Qwen3ASRForConditionalGeneration")
#: Parts of names of weights that no file has: unused heads, and batch norms, which have other statistics.
_OTHER_WEIGHTS = ("vision_tower.head.", "vision_tower.vision_model.head.", ".batch_norm.")
#: Tensors that the mmproj file has in F16.
F16_TENSORS = "f16-tensors.json"
#: Settings that no file has.
_SETTINGS = ("architectures", "torch_dtype", "dtype", "transformers_version", "quantkit_version", "initializer_range")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("write", "compare"))
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: all")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--mmproj", action="store_true", help="whole models, with their encoders")
    args = parser.parse_intermixed_args()
    described = checkpoints.TOWERS if args.mmproj else checkpoints.NAMES
    names = args.names or [name for name in described if checkpoints.describe(name).quantized is None]
    if args.mmproj:
        n_failed = (write_whole if args.what == "write" else compare_whole)(names, args.out)
    else:
        n_failed = (write if args.what == "write" else compare)(names, args.out)
    if n_failed:
        sys.exit(f"{len(n_failed)} differ: {' '.join(n_failed)}")


def write(names: list[str], out: Path) -> list[str]:
    """Export checkpoints; return the refused ones."""
    from quantkit.convert import ConvertOptions, convert
    from quantkit.errors import QuantkitError
    from quantkit.export import export
    from quantkit.formats.gguf import open_gguf
    from quantkit.formats.tokenizer import Tokenizer

    refused = []
    for name in names:
        checkpoint = checkpoints.write_checkpoint(name, out / "drawn")
        model, exported = out / f"{name}.gguf", out / "exported" / name
        options = ConvertOptions(**checkpoints.describe(name).convert_keywords(), outtype="f32")
        shutil.rmtree(exported, ignore_errors=True)
        exported.parent.mkdir(exist_ok=True)
        try:
            convert(checkpoint, model, None, options, overwrite=True)
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
    """Load checkpoints and their exports; return those that differ."""
    import torch
    import transformers

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    failures = []
    for name in names:
        description = checkpoints.describe(name)
        exported = out / "exported" / name
        if not exported.exists() or not is_supported(description, exported):
            continue
        try:
            nmse, notes = compare_checkpoint(out / "drawn" / name, exported, description)
            ok = nmse <= BOUND
            print("same" if ok else "DIFFERENT", name, f"{nmse:.1e}", *notes, sep="  ", flush=True)
        except Exception as error:
            ok = False
            print("FAILED", name, type(error).__name__, str(error)[:300], sep="  ", flush=True)
            traceback.print_exc()
        failures += [] if ok else [name]
    return failures


def write_whole(names: list[str], out: Path) -> list[str]:
    """Export checkpoints with their encoders; return none, as a class without a row is no failure."""
    from quantkit.checkpoint.models import step
    from quantkit.convert import ConvertOptions, convert, convert_mmproj
    from quantkit.errors import QuantkitError
    from quantkit.export import plan_export, run_export
    from quantkit.options.export import ExportOptions

    step._STEP_SIZES = STEP_SIZES
    for name in names:
        checkpoint = checkpoints.write_description(describe_loadable(name), out / "drawn")
        exported, options = out / "exported" / name, checkpoints.describe(name).convert_keywords()
        shutil.rmtree(exported, ignore_errors=True)
        exported.parent.mkdir(exist_ok=True)
        try:
            (text,) = convert(checkpoint, out / "text.gguf", None, ConvertOptions(**options, outtype="bf16")).paths
            (mmproj,) = convert_mmproj(checkpoint, out / "mmproj.gguf", "bf16").paths
            export_plan = plan_export(text, exported, ExportOptions(mmproj=mmproj))
            run_export(export_plan)
            origins = export_plan.opened.origins
            narrow = [key for key, parts in origins.items() if any(part.dtype == "F16" for part in parts)]
            (exported / F16_TENSORS).write_text(json.dumps(narrow))
        except QuantkitError as e:
            print("REFUSED", name, e, flush=True)
        for file in ("text.gguf", "mmproj.gguf"):
            (out / file).unlink(missing_ok=True)
    return []


def compare_whole(names: list[str], out: Path) -> list[str]:
    """Load whole models; return those that differ from their originals, or do not load."""
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    failures = []
    for name in names:
        exported = out / "exported" / name
        if not exported.exists():
            continue
        config = json.loads((exported / "config.json").read_text())
        class_name = _CLASS_NAMES.get(config["architectures"][0], config["architectures"][0])
        if not hasattr(transformers, class_name) or class_name in _OTHER_LAYOUT:
            print("no class", name, class_name, sep="  ", flush=True)
            continue
        try:
            cls = getattr(transformers, class_name)
            model, info = cls.from_pretrained(exported, dtype=torch.bfloat16, output_loading_info=True)
            bad = {key: sorted(map(str, keys))[:3] for key, keys in info.items() if keys and key != "error_msgs"}
            notes = []
            try:
                original = cls.from_pretrained(out / "drawn" / name, dtype=torch.bfloat16)
                notes = whole_differences(original, model, json.loads((exported / F16_TENSORS).read_text()))
            except Exception as error:  # an original in the format of remote code
                notes = [f"alone: {type(error).__name__} {str(error)[:120]}"]
            ok = not bad and not any(note.startswith("weights") for note in notes)
            print("same" if ok else "DIFFERENT", name, class_name, bad or "", *notes, sep="  ", flush=True)
        except Exception as error:
            ok = False
            print("FAILED", name, class_name, type(error).__name__, str(error)[:300], sep="  ", flush=True)
        failures += [] if ok else [name]
    return failures


def whole_differences(original: Any, exported: Any, narrow: list[str]) -> list[str]:
    """Return notes on weights and settings that differ.

    ``narrow``: tensors that the mmproj file has in F16, which are equal if the original rounded to F16 is.
    """
    import torch

    a, b = original.state_dict(), exported.state_dict()
    differ = [key for key in a if key not in b or not torch.equal(a[key], b[key])]
    differ = [key for key in differ if not any(part in key for part in _OTHER_WEIGHTS)]
    rounded = [
        key
        for key in differ
        if key in b
        and any(key.endswith(name.split(".", 1)[1]) for name in narrow)
        and torch.equal(a[key].half().to(a[key].dtype), b[key])
    ]
    notes = [f"rounded to F16: {rounded[:3]}"] if rounded else []
    differ = [key for key in differ if key not in rounded]
    notes += [f"weights differ: {differ[:3]}"] if differ else []
    for part in ("vision_config", "audio_config", "text_config", ""):
        configs = [getattr(model.config, part, None) if part else model.config for model in (original, exported)]
        before, after = ({} if config is None else config.to_dict() for config in configs)
        keys = [
            key
            for key in before
            if not key.startswith("_") and not isinstance(before[key], dict) and before[key] != after.get(key)
        ]
        notes += [f"{part}.{key}: {before[key]}, not {after.get(key)}" for key in keys if key not in _SETTINGS]
    return notes


def is_supported(description: checkpoints.Description, exported: Path) -> bool:
    """Return whether this version of transformers has the class of the original and of the export."""
    import transformers

    version = int(transformers.__version__.split(".")[0])
    if description.transformers is not None:
        return description.transformers == version and description.name not in _REMOTE
    names = json.loads((exported / "config.json").read_text())["architectures"]
    names += [] if description.name in _ALONE else [description.model or description.config["architectures"][0]]
    return all(hasattr(transformers, name) for name in names) and description.name not in _NOT_RUN


def compare_checkpoint(
    checkpoint: Path, exported: Path, description: checkpoints.Description
) -> tuple[float, list[str]]:
    """Return the NMSE of the export against the original, and notes."""
    import torch

    if description.name in _LOADED:
        load_model(exported)
        return 0.0, ["load_model", *tokenizer_notes(exported)]
    if description.name in _ALONE:
        logits = compute(load_model(exported), torch.tensor([checkpoints.PROMPT]))
        return 0.0 if torch.isfinite(logits).all() else float("nan"), ["alone", *tokenizer_notes(exported)]
    exported_model = load_model(exported)
    class_name = type(exported_model).__name__ if type(exported_model).__name__.endswith("Model") else description.model
    original_model = load_model(
        with_config(checkpoint, _OVERRIDES[description.name]) if description.name in _OVERRIDES else checkpoint,
        class_name,
    )
    with torch.no_grad():
        logits = [compute(model, torch.tensor([checkpoints.PROMPT])) for model in (original_model, exported_model)]
    if not torch.isfinite(logits[0]).all():
        raise ValueError("not finite")
    a, b = original_model.state_dict(), exported_model.state_dict()
    shared = {key.split("language_model.")[-1].removeprefix("model."): x for key, x in a.items()}
    tensors_by_name = {key.split("language_model.")[-1].removeprefix("model."): x for key, x in b.items()}
    differ = [key for key in shared if key in tensors_by_name and not torch.equal(shared[key], tensors_by_name[key])]
    differ = [key for key in differ if not key.startswith(("visual.", "vision", "multi_modal_"))]
    notes = [f"{len(differ)} weights differ: {differ[:3]}"] if differ else []
    return float(((logits[0] - logits[1]) ** 2).sum() / (logits[0] ** 2).sum()), notes + tokenizer_notes(exported)


def compute(model: Any, prompt: Any) -> Any:
    """Return logits, or an encoder's output for each token."""
    parameters = inspect.signature(model.forward).parameters
    keywords = {"use_cache": False} if "use_cache" in parameters else {}
    if "decoder_input_ids" in parameters:
        keywords["decoder_input_ids"] = prompt
    output = model(prompt, **keywords)
    return output.logits if hasattr(output, "logits") else output.last_hidden_state


def with_config(checkpoint: Path, changes: dict[str, Any]) -> Path:
    """Return a copy of a checkpoint with changes to config.json."""
    folder = checkpoint.with_name(f"{checkpoint.name}.said")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for path in checkpoint.iterdir():
        (folder / path.name).symlink_to(path.absolute())
    config = json.loads((checkpoint / "config.json").read_text())
    changed = {key: {**config[key], **value} if isinstance(value, dict) else value for key, value in changes.items()}
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(config | changed))
    return folder


def load_model(path: Path, class_name: str | None = None) -> Any:
    """Return a model in float32; every weight of it must be there."""
    import torch
    import transformers

    cls = getattr(transformers, class_name or json.loads((path / "config.json").read_text())["architectures"][0])
    model, info = cls.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager", output_loading_info=True, local_files_only=True
    )
    layers = getattr(model.config, "num_hidden_layers", None)
    for key in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        bad = [
            item for item in map(str, info[key]) if not item.startswith((*_OPTIONAL_KEYS, f"model.layers.{layers}."))
        ]
        if bad:
            raise ValueError(f"{key}: {bad[:5]}")
    return model.eval()


def tokenizer_notes(exported: Path) -> list[str]:
    """Return the differences from quantkit's own tokenizer."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(exported)
    id_lists = [tokenizer(text).input_ids for text in TEXTS]
    expected = json.loads((exported / "ids.json").read_text())
    return [
        f"ids of text {i}: {a[:12]}, not {b[:12]}"
        for i, (a, b) in enumerate(zip(id_lists, expected, strict=True))
        if a != b
    ]


if __name__ == "__main__":
    main()
