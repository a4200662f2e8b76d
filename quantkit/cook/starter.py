"""The file that ``quantkit cook init`` writes: every key with its default, a comment on each, for a model."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path

from quantkit.convert import ConvertOptions
from quantkit.cook.config import model_name
from quantkit.cook.source import Model, read_source
from quantkit.errors import QuantkitError, ResourceError
from quantkit.names import printable
from quantkit.units import format_count, format_size

#: Names of texts that people leave beside a model.
_CALIBRATION = ("calibration.txt", "calibration_data.txt", "calibration_datav3.txt", "calib.txt", "imatrix.txt")
_EVALUATION = ("evaluation.txt", "heldout.txt", "wiki.test.raw", "eval.txt")
#: Where comments behind values begin.
_COLUMN = 36
#: Two presets, and a search between them.
_TARGETS = ("Q4_K_M", "IQ4_XS", "3.5bpw")


def starter(
    model: Path | None,
    folder: Path,
    pre: str | None = None,
    *,
    texts: Sequence[Path] = (),
    evaluation: Path | None = None,
) -> tuple[str, tuple[str, ...]]:
    """Return the text of a file in ``folder``, with defaults for a model, and notes.

    Without a model, its keys are to be filled in; one that cannot be opened yet is noted. ``pre``: its pre-tokenizer.
    Without ``texts`` to calibrate on, those beside the model count, by their usual names.
    """
    known, notes = None, tuple[str, ...]()
    try:
        known = None if model is None else read_source(model, folder / "model.gguf", ConvertOptions(pre=pre))
    except ResourceError:
        raise
    except QuantkitError as e:
        notes = (e.message,)
    beside = [] if model is None else [model if model.is_dir() else model.parent]
    if not texts and (found := _found(beside, _CALIBRATION)) is not None:
        texts, evaluation = [found], evaluation or _found(beside, _EVALUATION)
    name = "model" if model is None else model_name(model)
    shown = "path/to/model-bf16.gguf" if model is None else _path(model, folder)
    filled = {
        "about": "" if known is None else f"# {_about(known)}\n",
        "model": _quoted(shown),
        "name": _quoted(name),
        "output": _quoted(f"{name}-cooked"),
        "work": _quoted(f"{name}-cooked/work"),
        "targets": ", ".join(map(_quoted, _TARGETS)),
        "text": ", ".join(_quoted(_path(text, folder)) for text in texts) or '"path/to/texts"',
        "evaluation": '# evaluation = "heldout.txt"'
        if evaluation is None
        else f"evaluation = {_quoted(_path(evaluation, folder))}",
        "pre": f"pre = {_quoted(pre)}" if pre else '# pre = "gpt-2"',
        "ctx": 512 if known is None else known.ctx,
    }
    return "\n".join(map(_aligned, _TEXT.format(**filled).split("\n"))), notes


def _about(model: Model) -> str:
    experts = f", {model.n_experts} experts" if model.n_experts else ""
    active = f" ({format_count(model.active)} a token)" if experts else ""
    weights = f"{format_count(model.weights)} weights{active}"
    return printable(f"{model.architecture}, {model.n_layers} layers{experts}, {weights}, {format_size(model.nbytes)}")


def _found(folders: list[Path], names: tuple[str, ...]) -> Path | None:
    return next((folder / name for folder in folders for name in names if (folder / name).is_file()), None)


def _path(path: Path, folder: Path) -> str:
    """Return a path as the file is to have it: relative to its folder where that is no detour."""
    relative = os.path.relpath(os.path.abspath(path), os.path.abspath(folder))
    return os.path.abspath(path) if relative.startswith("..") else relative


def _quoted(text: str) -> str:
    """Return a string of TOML, whose escapes JSON's are."""
    return json.dumps(text, ensure_ascii=False)


def _aligned(line: str) -> str:
    """Return a line whose comment, behind its value, begins where those of others do."""
    match = re.fullmatch(r"((?:# )?\w+ = .*?\S)\s{2,}(# .*)", line)
    return line if match is None else f"{match[1]:<{_COLUMN - 1}} {match[2]}"


_TEXT = """\
# What `quantkit cook` is to make. `quantkit cook FILE --dry-run` shows the plan; without --dry-run it runs.
# Whatever stands is not made again: change a key, run it again, and only what depends on that key is redone.
# A line with # before its key shows the default. Paths begin in the folder of this file.
{about}
model = {model}          # a directory of Hugging Face, or a GGUF file of BF16, F16 or F32

# What to make. A preset (`quantkit types --presets`), or a goal, for which the best types are searched:
# a size ("12.3G"), bits per weight ("4.2bpw"), a divergence from the model ("kld=0.01").
# "+feedback" behind any of them: less divergence at the same size, for more time (docs/error-feedback.md).
targets = [{targets}]

# name = {name}              # files are called NAME-TARGET.gguf
# output = {output}    # where they go
# work = {work}   # where everything in between goes: imatrix, logits, recipes
# runtime = "llama.cpp"         # types that a search may use; "ik_llama.cpp" has more
# merge_up_gate = false         # up and gate experts as one tensor: faster, for runtimes that know it
# threads = 0                   # 0: all CPUs
# max_ram = "16G"               # memory for weights; the rest is read as it is needed
# cache = "~/.cache/tensors"    # encoded tensors, kept for other recipes of this model
# cache_size = "50G"

[convert]
# A checkpoint becomes a GGUF file first.
# outtype = "auto"              # bf16, f16, f32
{pre}                 # the pre-tokenizer, where its hash is not known
# merge_lora = ["adapter:0.5"]
# no_nextn = false              # leave out layers that predict more tokens

[calibration]
# Text of the kind that the model is for. Without `evaluation`, files and folders: a corpus is made of them, and a part
# of it is held out. With it, files, which are taken as they are.
text = [{text}]
{evaluation}
# chat = ["chats.jsonl"]        # conversations, rendered by the model's template (needs jinja2)
# include = ["*.py", "*.md"]    # of folders, only these files
# size = "1M"                   # of the corpus
# heldout = "10%"               # of it
# seed = 0

[imatrix]
# run = true                    # false: quantize without
# file = "imatrix.gguf"         # one that is there already
# ctx = {ctx}
# chunks = "all"                # fewer are faster: 100 do for dense models, experts want all there is
# process_output = false        # also for the output matrix
# covariance = "cov.gguf"       # for +feedback, if it is there already

[check]
# Every file is compared with the model on held-out text that nothing was chosen by.
# run = true
# ctx = {ctx}
# chunks = 64
# logits = "auto"               # format of the model's own predictions: llama.cpp, or compact where that is large

[sensitivity]
# What each group of tensors costs in each type; needed for goals. The longest step: time goes with chunks and types.
# types = ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "Q8_0"]    # by default those that fit the goals
# groups = "class-layer"        # or "class", "tensor"
# ctx = {ctx}
# chunks = 16
# full_runs = "auto"            # types of a group that run to the end; the others follow from their errors.
#                               # "auto": 2 of more than 4 types; a number, or "all", which takes longest
# proxies_only = false          # true: estimates only, without a pass over text for each group and type
# feedback = false              # true: also as +feedback encodes, where a goal has it: hours on large models

[search]
# types = ["Q3_K", "Q4_K"]      # by default all that were measured
# same = ["up,gate"]            # classes that get one type, layer by layer
# allow = ["attn_v=Q6_K,Q8_0"]  # only these types
# at_least = ["output=Q6_K"]    # no type of fewer bits
# at_most = ["_exps=Q4_K"]      # no type of more bits
# candidates = 3                # so many recipes are measured for each goal, and the best is taken
# time_limit = 60               # seconds of the solver for each

[quantize]
# For all targets; goals take only the last two.
# recipe = ["my.recipe"]
# tensor_type = ["attn_v=Q8_0"]
# ffn_gate_inp_type = "Q8_0"    # the router
# output_tensor_type = "Q6_K"
# token_embedding_type = "Q4_K"
# rules = "ik"                  # whose mixtures apply to presets that both have
# encoder = "ik"                # whose search encodes what both trees have
# split_max_size = "48G"        # begin a new file beyond this size

[report]
# A page with charts that needs no network, and a card for model hubs.
# run = true
# card = true

# A target with settings of its own:
# [[target]]
# target = "IQ2_M+feedback"
# name = "IQ2_M-better"         # the end of the file's name
# tensor_type = ["attn_v=Q6_K"]
# max_kld = 0.2                 # fail if it diverges more
"""
