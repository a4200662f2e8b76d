"""Record the expected results of `quantkit convert-lora`: the bytes of llama.cpp's converter for every adapter.

    PYTHON scripts/make_lora_goldens.py --llama DIR --work DIR [NAME ...]

generates the adapters of tests/lib/adapters.py, runs convert_lora_to_gguf.py of llama.cpp b11434 on each (in forks of
one process) and enters hashes in tests/data/lora-sha256.json. PYTHON has transformers 4.57.6, as for
make_convert_goldens.py. For adapters whose scale varies (rsLoRA, patterns) the reference's scale is not PEFT's: their
hashes only record this.

    PYTHON scripts/make_lora_goldens.py --peft --work DIR [NAME ...]

merges each into its checkpoint with PEFT and compares the result with the tests' expectation. Of adapters with more
than factors (DoRA, modules_to_save) it enters some rows of every changed tensor in tests/data/lora-peft.npz.
"""

from __future__ import annotations

import argparse
import os
import runpy
import shutil
import sys
import traceback
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests/lib"), str(ROOT / "scripts")]

import adapters  # noqa: E402
import checkpoints  # noqa: E402
from gguf_digests import digests  # noqa: E402
from make_convert_goldens import enter  # noqa: E402

SHA256 = ROOT / "tests" / "data" / "lora-sha256.json"
SAMPLES = SHA256.with_name("lora-peft.npz")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: all")
    parser.add_argument("--llama", type=Path, help="llama.cpp's tree")
    parser.add_argument("--work", type=Path, required=True, help="directory for adapters and the reference's files")
    parser.add_argument("--peft", action="store_true", help="compare with PEFT")
    args = parser.parse_intermixed_args()
    n_failed = 0
    for name in args.names or [*adapters.ADAPTERS, *(adapters.MERGED if args.peft else ())]:
        adapter = {**adapters.ADAPTERS, **adapters.MERGED}[name]
        if not adapter.outtypes and not args.peft:  # the reference fails on it
            continue
        n_failed += not (compare_with_peft(adapter, args.work) if args.peft else reference_of(adapter, args))
    sys.exit(n_failed)


def reference_of(adapter: adapters.Adapter, args: argparse.Namespace) -> bool:
    """Convert an adapter with every setting and enter the hashes; return False if that fails."""
    import torch  # noqa: F401 - before the forks
    import transformers

    if transformers.__version__ != "4.57.6":
        sys.exit(f"transformers is {transformers.__version__}; the reference's is 4.57.6")
    source = adapters.write_adapter(adapter, args.work / "adapters")
    base = adapters.write_base(adapter, args.work / "bases")
    row: dict[str, Any] = {"adapter": adapters.digest(adapter)}
    for outtype in adapter.outtypes:
        out = args.work / "out" / f"{adapter.name}-{outtype}.gguf"
        run_reference(args.llama, source, base, outtype, out)
        if not out.exists():
            print("FAILED", adapter.name, out.with_suffix(".log").read_text()[-300:].replace("\n", " | "), flush=True)
            return False
        row[outtype] = digests(out)
    enter(SHA256, {adapter.name: row})
    print(adapter.name, {key: value["sha256"][:8] for key, value in row.items() if key != "adapter"}, flush=True)
    return True


def run_reference(llama: Path, source: Path, base: Path, outtype: str, out: Path) -> None:
    """Run the converter in a fork. It failed if ``out`` does not exist afterwards."""
    out.parent.mkdir(parents=True, exist_ok=True)
    out.unlink(missing_ok=True)
    if pid := os.fork():
        os.waitpid(pid, 0)
        return
    try:
        with out.with_suffix(".log").open("w") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        sys.path[:0] = [str(llama), str(llama / "gguf-py")]
        sys.argv = ["convert_lora_to_gguf.py", str(source), "--base", str(base), "--outtype", outtype]
        sys.argv += ["--outfile", str(out)]
        runpy.run_path(str(llama / "convert_lora_to_gguf.py"), run_name="__main__")
    except BaseException:
        traceback.print_exc()
        out.unlink(missing_ok=True)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def compare_with_peft(adapter: adapters.Adapter, work: Path) -> bool:
    """Merge with PEFT; return whether every weight equals the tests' one up to float32 rounding."""
    import torch
    import transformers
    from peft import PeftModel

    torch.set_num_threads(1)
    about = checkpoints.describe(adapter.base)
    kind = getattr(transformers, about.model or about.config["architectures"][0], None)
    if kind is None:
        print(adapter.name, "has a class that this version of transformers does not know", flush=True)
        return True
    base = checkpoints.write_checkpoint(adapter.base, work / "checkpoints")
    source = adapters.write_adapter(adapter, work / "adapters", str(base))
    model = kind.from_pretrained(base, dtype=torch.float32, local_files_only=True)
    before = {name: x.clone() for name, x in model.state_dict().items()}
    merged = PeftModel.from_pretrained(model, source).merge_and_unload().state_dict()
    changed = {name for name, x in before.items() if not torch.equal(x, merged[name])}
    if adapter.name in adapters.MERGED:
        samples = dict(np.load(SAMPLES)) if SAMPLES.exists() else {}
        samples = {key: x for key, x in samples.items() if not key.startswith(f"{adapter.name}/")}
        for weight in sorted(changed):
            samples[f"{adapter.name}/{weight}"] = adapters.sample(merged[weight].numpy())
        np.savez_compressed(SAMPLES, **samples)
        print(adapter.name, f"{len(changed)} changed", flush=True)
        return True
    expected = {
        f"{module.replace(*adapter.renamed) if adapter.renamed[0] else module}.weight": module
        for module, _ in adapters.modules(adapter)
    }
    worst = 0.0
    for name, module in expected.items():
        weights = before[name].double().numpy() + adapters.delta(adapter, module)
        worst = max(worst, float(np.abs(merged[name].double().numpy() - weights).max()))
    print(adapter.name, f"{len(changed)} changed, {len(expected)} expected, error {worst:.2g}", flush=True)
    shutil.rmtree(base)
    return changed == set(expected) and worst < 1e-5


if __name__ == "__main__":
    main()
