"""Quantize a checkpoint to GGUF with auto-round: run by the Python of an environment that has it.

    python3 -m venv AR; AR/bin/pip install auto-round gguf
    AR/bin/python benchmarks/baseline_auto_round.py CHECKPOINT CALIBRATION OUT.gguf --format gguf:q4_k_m [--pre gpt-2]

It tunes on windows of the calibration text, each as long as one of quantkit's chunks. `--pre` names the pre-tokenizer,
which auto-round's converter recognizes only for published models; weights do not depend on it.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import time
from importlib.util import find_spec
from pathlib import Path

from results import parse_options, record_output


def add_new_architectures() -> None:
    """Add to gguf the architectures of auto-round's converter, which is ahead of gguf on PyPI."""
    import gguf

    spec = find_spec("auto_round")
    folder = Path(str(spec.origin)).parent / "export" / "export_to_gguf" / "conversion" if spec else Path()
    text = "".join(path.read_text() for path in sorted(folder.glob("*.py")))
    for place, (kind, name) in enumerate(
        sorted(set(re.findall(r"gguf\.(MODEL_ARCH|MODEL_TENSOR)\.([A-Z0-9_]+)", text)))
    ):
        if not hasattr(getattr(gguf, kind), name):
            setattr(getattr(gguf, kind), name, 1_000_000 + place)


def tune(args: argparse.Namespace, folder: Path) -> int:
    """Write a GGUF file to a folder; return the number of calibration windows."""
    add_new_architectures()
    import torch
    from auto_round import AutoRound  # type: ignore[import-not-found]
    from auto_round.export.export_to_gguf.llama_cpp_conversion import (  # type: ignore[import-not-found]
        get_conversion,
    )
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if args.pre:
        get_conversion()  # auto-round imports its copy of llama.cpp's converter by this name
        sys.modules["conversion.base"].TextModel.get_vocab_base_pre = lambda _self, _tokenizer: args.pre
    tokenizer = AutoTokenizer.from_pretrained(args.checkpoint)
    ids = tokenizer(args.calibration.read_text())["input_ids"]
    windows = [ids[i : i + args.ctx] for i in range(0, len(ids) - args.ctx + 1, args.ctx)][: args.chunks]
    data = [{"input_ids": x, "attention_mask": torch.ones_like(x)} for x in torch.tensor(windows).split(1)]
    model = AutoModelForCausalLM.from_pretrained(args.checkpoint, dtype=torch.float32)
    tuned = AutoRound(
        model, tokenizer, scheme=args.format, dataset=data, seqlen=args.ctx, nsamples=len(windows),
        iters=args.iters, device_map="cpu", seed=1,
    )  # fmt: skip
    tuned.quantize_and_save(str(folder), format=args.format)
    return len(windows)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("checkpoint", type=Path)
    p.add_argument("calibration", type=Path)
    p.add_argument("output", type=Path)
    p.add_argument("--format", default="gguf:q4_k_m")
    p.add_argument("--pre", help="the pre-tokenizer of the file")
    p.add_argument("--ctx", type=int, default=256)
    p.add_argument("--chunks", type=int, metavar="N")
    p.add_argument("--iters", type=int, default=200, help="tuning steps per layer; 0: none")
    args = parse_options(p)
    folder = args.output.with_suffix(".auto-round")
    folder.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    windows = tune(args, folder)
    output = max(folder.rglob("*.gguf"), key=lambda path: path.stat().st_mtime)
    shutil.move(output, args.output)
    shutil.rmtree(folder)
    print(f"{args.output}: {args.output.stat().st_size} bytes, {windows} windows of {args.ctx} tokens, "
          f"{time.perf_counter() - began:.0f} s")  # fmt: skip


if __name__ == "__main__":
    record_output(main)
