"""Record the expected results of `quantkit convert`: the reference's bytes and transformers' logits of every
checkpoint.

    PYTHON scripts/make_convert_goldens.py reference --llama DIR --checkpoints DIR --out DIR [NAME ...]
    PYTHON scripts/make_convert_goldens.py vocabularies --llama DIR --checkpoints DIR --out DIR [NAME ...]
    PYTHON scripts/make_convert_goldens.py {logits,embeddings} --checkpoints DIR [NAME ...]
    PYTHON scripts/make_convert_goldens.py sentences --checkpoints DIR
    PYTHON scripts/make_convert_goldens.py {towers,wide,drafts,adapters} --llama DIR --checkpoints DIR --out DIR [NAME]

``reference`` generates the checkpoints, runs convert_hf_to_gguf.py of llama.cpp b11434 on each (in forks of one
process: torch is imported once) and enters hashes in tests/data/convert-sha256.json. PYTHON has transformers 4.57.6,
the version whose defaults llama.cpp relies on. ``logits`` enters transformers' own float32 logits in
tests/data/convert-logits.npz; run it with 4.57.6 and with 5.18.0: each handles the checkpoints that it can run.
``embeddings`` enters the rows of an encoder's tokens in tests/data/convert-embeddings.npz; run it with 5.18.0.
``sentences`` enters the embeddings of sentences by all-MiniLM-L6-v2 in tests/data/sentence-embeddings.npy.
``vocabularies`` enters the hashes of --vocab-only for the real vocabularies of tests/lib/real_files.py in
tests/data/real-vocabularies.json, and prints the seconds. The reference runs the program beside qwen.tiktoken:
--remote-code names a folder that contains the folder qwen with tokenization_qwen.py and tokenizer_config.json
(Qwen/Qwen-7B of Hugging Face; the package tiktoken is needed).
``towers`` enters the hashes of --mmproj of every type, and of the text model in bf16, in tests/data/mmproj-sha256.json;
for a checkpoint that the reference cannot convert, the last line of the error. ``wide`` enters the hash of --mmproj in
f16 of towers of real width in tests/data/wide-sha256.json. ``drafts`` does the same for draft
models and tests/data/draft-sha256.json, ``adapters`` for models that are adapters and tests/data/adapter-sha256.json: a
folder takes the place of the repository of their base.

Vocabularies are too small for llama.cpp to recognize their hash: the description has the name of the pre-tokenizer
(``pre``, which quantkit gets by --pre).
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import json
import logging
import os
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests/lib")]

import checkpoints  # noqa: E402
import real_files  # noqa: E402
from gguf_digests import digests  # noqa: E402

SHA256 = ROOT / "tests" / "data" / "convert-sha256.json"
VOCABULARIES = ROOT / "tests" / "data" / "real-vocabularies.json"
TOWERS = ROOT / "tests" / "data" / "mmproj-sha256.json"
WIDE = ROOT / "tests" / "data" / "wide-sha256.json"
DRAFTS = ROOT / "tests" / "data" / "draft-sha256.json"
ADAPTERS = ROOT / "tests" / "data" / "adapter-sha256.json"
#: Types of mmproj files and of draft models.
TOWER_TYPES = ("f32", "f16", "bf16", "q8_0", "auto")
#: Names of split settings, and their options.
SPLITS = {
    "size": ("--split-max-size", "2M"),
    "tensors": ("--split-max-tensors", "10"),
    "tensors-after-metadata": ("--split-max-tensors", "10", "--no-tensor-first-split"),
}

Json = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "what",
        choices=(
            *("reference", "vocabularies", "logits", "embeddings", "sentences"),
            *("towers", "wide", "drafts", "adapters"),
        ),
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: all")
    parser.add_argument("--checkpoints", type=Path, required=True, help="directory for the generated checkpoints")
    parser.add_argument("--llama", type=Path, help="llama.cpp's tree")
    parser.add_argument("--out", type=Path, help="directory of the reference's files, NAME-OUTTYPE.gguf")
    parser.add_argument("--remote-code", type=Path, help="directory of NAME/, the files beside a vocabulary")
    args = parser.parse_intermixed_args()
    if os.environ.get("PYTHONHASHSEED") != "0":  # the order of named chat templates depends on it
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "PYTHONHASHSEED": "0"})
    make, names = {
        "reference": (make_reference, checkpoints.NAMES),
        "vocabularies": (make_vocabularies, real_files.VOCABULARIES),
        "logits": (make_logits, checkpoints.NAMES),
        "embeddings": (make_embeddings, ()),
        "sentences": (make_sentences, ("minilm",)),
        "towers": (make_towers, checkpoints.TOWERS),
        "wide": (make_wide, checkpoints.WIDE),
        "drafts": (make_drafts, checkpoints.DRAFTS),
        "adapters": (make_adapters, checkpoints.ADAPTERS),
    }[args.what]
    sys.exit(bool(make(args.names or list(names), args)))


# --- the reference's files -------------------------------------------------------------------------------------------


def load_reference(args: argparse.Namespace) -> Any:
    """Return the module convert_hf_to_gguf."""
    sys.path[:0] = [str(args.llama), str(args.llama / "gguf-py")]
    import convert_hf_to_gguf
    import torch
    import transformers

    if transformers.__version__ != "4.57.6":
        sys.exit(f"transformers is {transformers.__version__}; the reference's is 4.57.6")
    torch.set_num_threads(1)
    args.out.mkdir(parents=True, exist_ok=True)
    return convert_hf_to_gguf


def make_reference(names: list[str], args: argparse.Namespace) -> list[str]:
    """Convert checkpoints; return those that the reference cannot convert."""
    program, failures = load_reference(args), []
    for name in names:
        row = reference_of(program, checkpoints.describe(name), args)
        if row is None:
            failures.append(name)
            print("FAILED", name, (args.out / f"{name}.log").read_text()[-300:].replace("\n", " | "), flush=True)
            continue
        enter(SHA256, {name: row})
        print(name, {key: value["sha256"][:8] for key, value in row.items() if isinstance(value, dict)}, flush=True)
    return failures


def make_towers(names: list[str], args: argparse.Namespace) -> list[str]:
    """Convert the towers and the text models of checkpoints; return those whose towers the reference cannot."""
    program, failures = load_reference(args), []
    for name in names:
        row = towers_of(program, checkpoints.describe(name), args)
        failures += [name] if "error" in row["f32"] else []
        enter(TOWERS, {name: row})
        write_readme()
        for key in ("text", *TOWER_TYPES):
            print(name, key, row[key].get("error") or (row[key].get("file", ""), row[key]["bytes"]), flush=True)
    return failures


def make_wide(names: list[str], args: argparse.Namespace) -> list[str]:
    """Convert towers of real width to f16; return those that the reference cannot."""
    program, failures = load_reference(args), []
    for name in names:
        description, source = checkpoints.describe(name), args.checkpoints / name
        shutil.rmtree(source, ignore_errors=True)
        checkpoints.write_description(description, args.checkpoints)
        file = converted(program, description, source, args.out / name, ["--mmproj", "--outtype", "f16"])
        failures += [name] if "error" in file else []
        enter(WIDE, {name: {"f16": file}})
        print(name, file.get("error") or (file["file"], file["bytes"]), flush=True)
    return failures


def make_drafts(names: list[str], args: argparse.Namespace) -> list[str]:
    """Convert draft models beside their targets; return those that the reference cannot."""
    program, failures = load_reference(args), []
    for name in names:
        row = draft_of(program, checkpoints.describe(name), args)
        failures += [name] if "error" in row["f32"] else []
        enter(DRAFTS, {name: row})
        write_readme()
        for key in TOWER_TYPES:
            print(name, key, row[key].get("error") or (row[key].get("file", ""), row[key]["bytes"]), flush=True)
    return failures


def make_adapters(names: list[str], args: argparse.Namespace) -> list[str]:
    """Convert models that are adapters; return those that the reference cannot."""
    program, failures = load_reference(args), []
    for name in names:
        description = checkpoints.describe(name)
        with base_in(args.checkpoints):
            row = draft_of(program, description, args)
        failures += [name] if "error" in row["f32"] else []
        enter(ADAPTERS, {name: row})
        write_readme()
        for key in TOWER_TYPES:
            print(name, key, row[key].get("error") or (row[key].get("file", ""), row[key]["bytes"]), flush=True)
    return failures


@contextlib.contextmanager
def base_in(folder: Path) -> Iterator[None]:
    """Let repositories of the Hugging Face Hub be folders."""
    import huggingface_hub

    def path_of(repository: str, *_: Any, **__: Any) -> str:
        return str(folder / repository.rpartition("/")[2])

    def file_of(repository: str, name: str, **_: Any) -> str:
        return f"{path_of(repository)}/{name}"

    with (
        mock.patch.object(huggingface_hub, "snapshot_download", path_of),
        mock.patch.object(huggingface_hub, "hf_hub_download", file_of),
    ):
        yield


def draft_of(program: Any, description: checkpoints.Description, args: argparse.Namespace) -> Json:
    """Draw a draft model and its target, or an adapter and its base, convert it to every type."""
    source, options = args.checkpoints / description.name, list[str]()
    shutil.rmtree(source, ignore_errors=True)
    row: Json = {"checkpoint": checkpoints.digest(checkpoints.write_description(description, args.checkpoints))}
    row["class"] = description.config["architectures"][0]
    if description.target is not None:
        target = checkpoints.describe(description.target)
        row["target"] = description.target
        path = checkpoints.write_description(target, args.checkpoints)
        options = [] if description.name in checkpoints.ADAPTERS else ["--target-model-dir", str(path)]
        description = replace(description, vocab=target.vocab)
    for outtype in TOWER_TYPES:
        out = args.out / f"{description.name}-{outtype}"
        row[outtype] = converted(program, description, source, out, [*options, "--outtype", outtype])
    return row


def write_readme() -> None:
    """Write the table of classes and their checkpoints at the end of tests/data/checkpoints/README.md."""
    path = checkpoints.DESCRIPTIONS / "README.md"
    lines = [path.read_text(encoding="utf-8").partition(TABLES)[0] + TABLES]
    for title, digest_file in {
        "class of --mmproj": TOWERS,
        "class of a draft": DRAFTS,
        "class of an adapter": ADAPTERS,
    }.items():
        rows = json.loads(digest_file.read_text()) if digest_file.exists() else {}
        lines.append(f"| {title} | checkpoint | made by | error of the reference |\n|---|---|---|---|")
        for name, row in sorted(rows.items(), key=lambda item: (item[1]["class"], item[0])):
            version = checkpoints.describe(name).transformers
            maker = f"transformers {version}" if version else "stand-in"
            error = row["f32"].get("error", "").replace("|", "\\|")
            lines.append(f"| `{row['class']}` | `{name}` | {maker} | {error and f'`{error}`'} |")
        lines.append("")
    path.write_text("\n".join(lines), encoding="utf-8", newline="\n")


#: The heading of README.md's last section.
TABLES = "## Towers, draft models and adapters\n"


def towers_of(program: Any, description: checkpoints.Description, args: argparse.Namespace) -> Json:
    """Draw a checkpoint, convert its text model to bf16, its towers to every type."""
    from conversion.base import ModelBase, ModelType, get_model_architecture

    name, source = description.name, args.checkpoints / description.name
    shutil.rmtree(source, ignore_errors=True)
    row: Json = {"checkpoint": checkpoints.digest(checkpoints.write_description(description, args.checkpoints))}
    row["class"] = get_model_architecture(ModelBase.load_hparams(source, False), ModelType.MMPROJ)
    if description.vocab["kind"] in ("bpe", "wordpiece"):
        row["check"] = check_hash(source)
    row["text"] = converted(program, description, source, args.out / f"{name}-text", ["--outtype", "bf16"])
    for outtype in TOWER_TYPES:
        options = ["--mmproj", "--outtype", outtype]
        row[outtype] = converted(program, description, source, args.out / f"{name}-{outtype}", options)
    return row


#: Beginnings of lines in an error's log that are not its reason.
_NO_REASON = (" ", "SystemExit", "Traceback", "During handling")


def converted(program: Any, description: checkpoints.Description, source: Path, out: Path, options: list[str]) -> Json:
    """Return name and digests of the file that the reference writes into the folder ``out``, or the error's last
    line."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    options += [o for o in description.options if "--mmproj" not in options or o == "--mistral-format"]
    log = out / "log"
    arguments = [str(source), "--outfile", str(out), *options]
    if fork_converter(program, arguments, log.with_suffix(".none"), log, description.vocab):
        (file,) = out.glob("*.gguf")
        return {"file": file.name} | digests(file)
    lines = [line for line in log.read_text().splitlines() if line and not line.startswith(_NO_REASON)]
    return {"error": lines[-1].replace(str(source), source.name)}


def make_vocabularies(names: list[str], args: argparse.Namespace) -> list[str]:
    """Convert real vocabularies; return those that the reference cannot convert."""
    program, failures = load_reference(args), []
    for name in names:
        shutil.rmtree(args.checkpoints / name, ignore_errors=True)
        source = real_files.write_vocabulary(name, args.checkpoints)
        if args.remote_code and (args.remote_code / name).is_dir():
            shutil.copytree(args.remote_code / name, source, dirs_exist_ok=True)
        out, log = (args.out / f"{source.name}.{kind}" for kind in ("gguf", "log"))
        out.unlink(missing_ok=True)
        began = time.perf_counter()
        arguments = [str(source), "--outfile", str(out), "--vocab-only"]
        fork_converter(program, arguments, out, log, None)
        seconds = time.perf_counter() - began
        if not out.exists():
            failures.append(name)
            print("FAILED", name, log.read_text()[-300:].replace("\n", " | "), flush=True)
            continue
        enter(VOCABULARIES, {name: {"sha256": hashlib.sha256(out.read_bytes()).hexdigest()}})
        print(f"{name}: {seconds:.1f} s", flush=True)
    return failures


def reference_of(program: Any, description: checkpoints.Description, args: argparse.Namespace) -> Json | None:
    """Generate a checkpoint and convert it with every setting; None where that fails."""
    name, source = description.name, args.checkpoints
    shutil.rmtree(source / name, ignore_errors=True)
    row: Json = {"checkpoint": checkpoints.digest(checkpoints.write_description(description, source))}
    if description.vocab["kind"] in ("bpe", "wordpiece"):
        row["check"] = check_hash(source / name / description.vocab.get("folder", ""))
    if description.formula:
        source /= "meant"
        checkpoints.write_description(checkpoints.decode_weights(description), source)
    for outtype in [t for t in description.outtypes if not (description.formula and t == "auto")]:
        out = args.out / f"{name}-{outtype}.gguf"
        run_reference(program, description, source / name, outtype, out, ())
        if not out.exists():
            return None
        row[outtype] = digests(out)
    for split, options in SPLITS.items() if "auto" in description.outtypes else ():
        out = args.out / f"{name}-by-{split}.gguf"
        run_reference(program, description, source / name, "bf16", out, options)
        parts = sorted(args.out.glob(f"{out.stem}-0*.gguf")) or [out]
        row[f"bf16 by {split}"] = [hashlib.sha256(part.read_bytes()).hexdigest() for part in parts]
    return row


def run_reference(
    program: Any,
    description: checkpoints.Description,
    source: Path,
    outtype: str,
    out: Path,
    extra_options: tuple[str, ...],
) -> None:
    """Run the converter in a fork, because its classes have state. It failed if ``out`` does not exist afterwards."""
    for old in out.parent.glob(f"{out.stem}*.gguf"):
        if old == out or old.stem.startswith(f"{out.stem}-0"):
            old.unlink()
    # torch 2.13 can neither shift meta tensors as that scheme does, nor read a value of one.
    eager = (description.quantized or {}).get("method") == "bitnet" or "JAISLMHeadModel" in description.config[
        "architectures"
    ]
    extra_options += ("--no-lazy",) if eager else ()
    options = ["--outfile", str(out), "--outtype", outtype, *description.options, *extra_options]
    fork_converter(program, [str(source), *options], out, out.parent / f"{description.name}.log", description.vocab)


def fork_converter(program: Any, arguments: list[str], out: Path, log: Path, vocab: Json | None) -> bool:
    """Run the converter in a fork, with the names of a vocabulary, or None for one that it recognizes.

    Return whether it succeeds.
    """
    if pid := os.fork():
        return os.waitpid(pid, 0)[1] == 0
    code = 1
    try:
        with log.open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        if vocab is not None:
            name_vocabulary(vocab)
        fix_baichuan()
        logging.getLogger("hf-to-gguf").setLevel(logging.INFO)
        logging.getLogger().handlers.clear()
        sys.argv = ["convert_hf_to_gguf.py", *arguments]
        program.main()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        if code:
            out.unlink(missing_ok=True)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def check_hash(path: Path) -> str:
    """Return the hash by which the reference identifies the vocabulary: of the ids of its check text."""
    import transformers
    from conversion.base import TextModel

    class Recorder:
        ids: list[int]

        def encode(self, text: str) -> list[int]:
            self.ids = transformers.AutoTokenizer.from_pretrained(path).encode(text)
            return self.ids

    recorder = Recorder()
    logging.getLogger("hf-to-gguf").setLevel(logging.ERROR)  # the hash is unknown, with a long warning
    with contextlib.suppress(NotImplementedError):
        TextModel.get_vocab_base_pre(None, recorder)
    return hashlib.sha256(str(recorder.ids).encode()).hexdigest()


def name_vocabulary(vocab: Json) -> None:
    """Set the name of the pre-tokenizer in the reference, and the tokenizers whose classes are remote code."""
    import transformers
    from conversion.base import TextModel

    TextModel.get_vocab_base_pre = lambda self, tokenizer: vocab.get("pre")
    if vocab["kind"] == "tiktoken":
        transformers.AutoTokenizer.from_pretrained = lambda path, **_: Ranks(Path(path), vocab)


def fix_baichuan() -> None:
    """Let the map name Baichuan's tensors, as intended: its class recurses endlessly instead."""
    from conversion.baichuan import BaichuanModel
    from conversion.base import TextModel

    modify_packed = BaichuanModel.modify_tensors

    def mended(self: Any, x: Any, name: str, layer: int | None) -> Any:
        modify = modify_packed if name.endswith(".W_pack.weight") else TextModel.modify_tensors
        return modify(self, x, name, layer)

    BaichuanModel.modify_tensors = mended


class Ranks:
    """The attributes of the tokenizers of Kimi, Hunyuan and Qwen that the converter reads."""

    def __init__(self, path: Path, vocab: Json) -> None:
        import base64

        lines = (path / vocab["file"]).read_bytes().splitlines()
        self.mergeable_ranks = {base64.b64decode(a): int(b) for a, b in (line.split() for line in lines)}
        config = path / "tokenizer_config.json"
        settings = json.loads(config.read_text()) if config.exists() else {}
        first = len(self.mergeable_ranks)
        names = {i: f"<|reserved_token_{i}|>" for i in range(first, first + vocab.get("reserved", 0))}
        names |= dict(enumerate(vocab.get("names", ()), first))
        names |= {int(i): token["content"] for i, token in settings.get("added_tokens_decoder", {}).items()}
        self.special_tokens = {text: i for i, text in sorted(names.items())}
        self.vocab_size = first + len(self.special_tokens)
        self.eos_id = self.special_tokens.get(settings.get("eos_token", ""))
        self.model = self
        self.get_vocab = lambda: self.special_tokens
        self._mergeable_ranks = self.mergeable_ranks


def enter(path: Path, rows: Json) -> None:
    """Enter rows in a JSON file, sorted, a line per row and setting."""
    with Path(__file__).open() as lock:  # several runs may write at the same time
        fcntl.flock(lock, fcntl.LOCK_EX)
        _enter(path, rows)


def _enter(path: Path, rows: Json) -> None:
    table = json.loads(path.read_text()) if path.exists() else {}
    table |= rows
    lines = []
    for name, row in sorted(table.items()):
        inner = ",\n".join(f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in row.items())
        lines.append(f" {json.dumps(name)}: {{\n{inner}\n }}")
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8", newline="\n")


# --- transformers' logits --------------------------------------------------------------------------------------------


def make_logits(names: list[str], args: argparse.Namespace) -> list[str]:
    """Run checkpoints in float32; return those that fail."""
    import torch
    import transformers

    torch.set_num_threads(1)
    version = int(transformers.__version__.split(".")[0])
    rows: dict[str, np.ndarray] = {}
    failures = []
    for name in names:
        description = checkpoints.describe(name)
        if description.transformers != version:
            continue
        try:
            with AS_LLAMA_CPP_HAS_IT.get(
                description.model or description.config["architectures"][0], contextlib.nullcontext
            )():
                rows[name] = logits(checkpoints.write_description(description, args.checkpoints), description)
            print(name, rows[name].shape, float(rows[name].std()), flush=True)
        except Exception as error:
            failures.append(name)
            print("FAILED", name, type(error).__name__, error, flush=True)
            traceback.print_exc()
    target = ROOT / "tests" / "data" / "convert-logits.npz"
    with np.load(target) as old:
        rows = dict(old) | rows
    with target.open("wb") as file:
        np.savez_compressed(file, **{name: rows[name] for name in sorted(rows)})  # type: ignore[arg-type]
    return failures


def make_embeddings(names: list[str], args: argparse.Namespace) -> list[str]:
    """Enter the rows [tokens, n_embd] of encoders in float32, by default of all of scripts/encoder_rows.py."""
    import torch
    from encoder_rows import ROWS

    torch.set_num_threads(1)
    target = ROOT / "tests" / "data" / "convert-embeddings.npz"
    rows = dict(np.load(target)) if target.exists() else {}
    for name in names or ROWS:
        description = checkpoints.describe(name)
        path = checkpoints.write_description(description, args.checkpoints)
        with torch.no_grad():
            rows[name] = ROWS[name](description, path, torch.tensor([checkpoints.PROMPT])).float().numpy()
        print(name, rows[name].shape, float(rows[name].std()), flush=True)
        if not np.isfinite(rows[name]).all():
            raise ValueError(f"{name}: not finite")
    with target.open("wb") as file:
        np.savez_compressed(file, **{name: rows[name] for name in sorted(rows)})
    return []


def make_sentences(names: list[str], args: argparse.Namespace) -> list[str]:
    """Enter transformers' embeddings [sentences, n_embd] of all-MiniLM-L6-v2 in float32, of length 1."""
    import torch
    from encoder_rows import sentence_embeddings

    torch.set_num_threads(1)
    folder = real_files.MINILM.path("/config.json").parent
    rows = sentence_embeddings(folder, real_files.sentences())
    np.save(ROOT / "tests" / "data" / "sentence-embeddings.npy", rows)
    print(rows.shape, flush=True)
    return []


def logits(path: Path, description: checkpoints.Description) -> np.ndarray:
    """Return transformers' logits [4, vocabulary] after the last four tokens of the prompt."""
    import torch
    import transformers
    from stand_ins import STAND_INS

    class_name = description.config["architectures"][0]
    if class_name in STAND_INS:
        model = STAND_INS[class_name](description)
    elif class_name in _SEEING:
        model = as_multimodal(description)
    else:
        cls = getattr(transformers, description.model or description.config["architectures"][0])
        model, info = cls.from_pretrained(
            path, dtype=torch.float32, attn_implementation="eager", output_loading_info=True, local_files_only=True
        )
        after = f"model.layers.{description.config.get('num_hidden_layers')}."  # prediction layers
        for key in ("missing_keys", "unexpected_keys", "mismatched_keys"):
            bad = [name for name in map(str, info[key]) if not name.startswith(("mtp.", after, "lm_head."))]
            if bad:
                raise ValueError(f"{key}: {bad[:5]}")
    shares = bool(description.config.get("num_kv_shared_layers"))  # layers share a cache, or have none
    with torch.no_grad():
        out = model.eval()(torch.tensor([checkpoints.PROMPT]), use_cache=shares).logits
    result: np.ndarray = out[0, -4:].to(torch.float32).numpy()
    if not np.isfinite(result).all():
        raise ValueError("not finite")
    return result


@contextlib.contextmanager
def patch_phimoe() -> Iterator[None]:
    """Patch transformers' PhiMoE to match llama.cpp: RMS norms, and the softmax of the two best scores.

    Its own norms subtract the mean, and sparsemixer gives either expert nearly 1.
    """
    import torch
    from transformers.models.phimoe import modeling_phimoe

    class Norm(torch.nn.LayerNorm):  # type: ignore[misc]
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.rms_norm(x, self.normalized_shape, self.weight, self.eps) + self.bias

    def softmax_of_two(scores: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
        best = scores.topk(2, dim=-1)
        return best.values.softmax(dim=-1), best.indices

    with (
        mock.patch.object(torch.nn, "LayerNorm", Norm),
        mock.patch.object(modeling_phimoe, "sparsemixer", softmax_of_two),
    ):
        yield


@contextlib.contextmanager
def patch_gemma3n() -> Iterator[None]:
    """Patch transformers' Gemma 3n to match llama.cpp: a gate's standard deviation is that of a sample, over n - 1, and
    gelu is rounded to f16 before and after.

    The first matters in narrow models (NMSE 1e-2 at 128 columns), hardly in the 8192 columns of the real ones. The
    second causes an NMSE of 8e-6 after 22 layers, which have no residual sum.
    """
    import torch

    std, gelu = torch.std, torch.nn.functional.gelu

    def by_table(x: torch.Tensor, approximate: str) -> torch.Tensor:
        return gelu(x.half().float(), approximate=approximate).half().float()

    with (
        mock.patch.object(torch, "std", lambda x, dim, keepdim, unbiased: std(x, dim, keepdim=keepdim)),
        mock.patch.object(torch.nn.functional, "gelu", by_table),
    ):
        yield


@contextlib.contextmanager
def patch_minimax_m1() -> Iterator[None]:
    """Patch transformers' MiniMax to M1, whose heads rotate only ``rotary_dim`` columns."""
    import torch
    from transformers.models.minimax import modeling_minimax

    rotate = modeling_minimax.apply_rotary_pos_emb

    def of_a_part(
        q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, *arguments: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        n = cos.shape[-1]
        turned = rotate(q[..., :n], k[..., :n], cos, *arguments)
        q, k = (torch.cat([part, x[..., n:]], -1) for part, x in zip(turned, (q, k), strict=True))
        return q, k

    with mock.patch.object(modeling_minimax, "apply_rotary_pos_emb", of_a_part):
        yield


AS_LLAMA_CPP_HAS_IT = {
    "PhimoeForCausalLM": patch_phimoe,
    "Gemma3nForCausalLM": patch_gemma3n,
    "MiniMaxM1ForCausalLM": patch_minimax_m1,
}


#: Text models that transformers has only inside vision-language models: class and types, prefix of the names, differing
#: keys of config.json, and the smallest vision tower.
_SEEING: dict[str, tuple[str, str, str, str, Json, Json]] = {
    "MiniMaxM3SparseForCausalLM": (
        *("MiniMaxM3SparseForConditionalGeneration", "minimax_m3_vl", "minimax_m3_vl_text", "language_model."),
        {
            "shared_intermediate_size": 32,
            "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        },
        {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32},
    ),
    "Step3p5ForCausalLM": (
        *("Step3p7ForConditionalGeneration", "step3p7", "step3p5", ""),
        {},
        {"width": 32, "layers": 1, "heads": 2},
    ),
}


def as_multimodal(description: checkpoints.Description) -> Any:
    """Return a text model as part of a vision-language model, whose other parts are randomly initialized."""
    import torch
    import transformers
    from safetensors.torch import save_file
    from stand_ins import state_of

    name, kind, text, prefix, own_keys, vision = _SEEING[description.config["architectures"][0]]
    config = {
        "architectures": [name],
        "model_type": kind,
        "text_config": description.config | own_keys | {"model_type": text},
    }
    config["vision_config"] = vision | {"image_size": 28, "patch_size": 14}
    state = state_of(description, {"^": prefix})
    with tempfile.TemporaryDirectory() as folder:
        save_file(state, Path(folder, "model.safetensors"), metadata={"format": "pt"})
        Path(folder, "config.json").write_text(json.dumps(config))
        model, info = getattr(transformers, name).from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True, local_files_only=True
        )
    for key in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        bad = [key for key in map(str, info[key]) if "vision" not in key and "multi_modal" not in key]
        if bad:
            raise ValueError(f"{key}: {bad[:5]}")
    return model


if __name__ == "__main__":
    main()
