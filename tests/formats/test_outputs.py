"""No command destroys files, leaves partial outputs, or waits for a lock forever."""

from __future__ import annotations

import os
import re
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result
from fake_engine import FakeModel, install
from refusals import check_refused, refuses

from quantkit.cli import cli
from quantkit.errors import FormatError, ResourceError
from quantkit.formats.gguf import Field, split_path
from quantkit.formats.imatrix import Imatrix, ImatrixEntry, write_imatrix
from quantkit.formats.outputs import Output, atomic_write, check_apart, lock_path, part_path, read_whole
from quantkit.merge import merge_up_gate
from quantkit.quantize import quantize
from small_models import write_model

FIELDS = [Field.of("general.architecture", "qwen3moe"), Field.of("qwen3moe.block_count", 1)]
EXPERTS = {f"blk.0.ffn_{part}_exps.weight": ((32, 32, 2), "F32") for part in ("down", "gate", "up")}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of inputs: models, merged and not, an importance matrix, a text, rules, a plot's name, base logits."""
    folder = tmp_path_factory.mktemp("files")
    write_model(folder / "m.gguf", EXPERTS, FIELDS)
    merge_up_gate(folder / "m.gguf", folder / "merged.gguf", threads=1)
    ones = {name: ImatrixEntry(np.ones((2, 32), np.float32), np.array([9, 9])) for name in EXPERTS}
    write_imatrix(folder / "i.gguf", Imatrix(folder / "i.gguf", ones, ["t"], 1, 512))
    shutil.copy(folder / "i.gguf", folder / "i.svg")
    (folder / "rules").write_text("ffn_down = q8_0\n")
    (folder / "t.txt").write_text("".join(f"Line {i} of a text that says {i * i}.\n\n" for i in range(300)))
    (folder / "ids").write_bytes(np.arange(64, dtype="<i4").tobytes())
    (folder / "b").write_bytes(b"_logits_")
    # Beside arguments, a value of --json ends in .json.
    for name, copy in (("b", "b.json"), ("m.gguf", "m.json")):
        shutil.copy(folder / name, folder / copy)
    return folder


@pytest.fixture
def folder(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(files, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(command: str, **names: object) -> Result:
    """Run a command line, words in capitals replaced by ``names``."""
    return CliRunner().invoke(cli, [str(names.get(word, word)) for word in command.split()])


def contents(folder: Path) -> dict[str, bytes | None]:
    return {path.name: path.read_bytes() if path.is_file() else None for path in folder.iterdir()}


# ---------------------------------------------------------------- an output is no input, and no other output

#: The last =NAME is the same file as the NAME before it, by another name.
CLASHES = (
    "perplexity -m m.gguf -p a --overwrite --json =m.gguf",
    "perplexity -m m.gguf -f t.txt --overwrite --json =t.txt",
    "perplexity -m m.gguf --tokens @ids --overwrite --save-all-logits =ids",
    "perplexity -m m.gguf -p a --save-all-logits o --json =o",
    "perplexity -m m.gguf -p a --save-all-logits o --json =o.part",
    "kld -m m.gguf --base b.json --overwrite --json =b.json",
    "kld m.json --base b --overwrite --json =m.json",
    "kld m.gguf --base-model m.json -p a --overwrite --json =m.json",
    "kld m.gguf --base-model m.gguf -f b.json --overwrite --json =b.json",
    "kld m.gguf --base-model m.gguf --chat b.json --overwrite --json =b.json",
    "logits -m m.gguf -p a --overwrite -o =m.gguf",
    "logits -m m.gguf -f t.txt --overwrite -o =t.txt",
    "logits -m m.gguf -p a -o o --json =o",
    "quantize --overwrite m.gguf =m.gguf Q8_0",
    "quantize --overwrite --imatrix i.gguf m.gguf =i.gguf Q8_0",
    "quantize --overwrite -r rules m.gguf =rules Q8_0",
    "quantize --overwrite --tensor-type-file rules m.gguf =rules Q8_0",
    "merge-up-gate --overwrite m.gguf =m.gguf",
    "merge-up-gate --overwrite --imatrix i.gguf --imatrix-out =m.gguf m.gguf o",
    "merge-up-gate --overwrite --imatrix i.gguf --imatrix-out =i.gguf m.gguf o",
    "merge-up-gate --imatrix i.gguf m.gguf o --imatrix-out =o",
    "split-up-gate --overwrite merged.gguf =merged.gguf",
    "split-up-gate --imatrix i.gguf merged.gguf o --imatrix-out =o",
    "imatrix -m m.gguf -p a --overwrite -o =m.gguf",
    "imatrix -m m.gguf -f t.txt --overwrite -o =t.txt",
    "imatrix -m m.gguf --chat t.txt --overwrite -o =t.txt",
    "imatrix -m m.gguf --tokens @ids --overwrite -o =ids",
    "imatrix -m m.gguf -md b -p a --overwrite -o =b",
    "imatrix -m m.gguf -p a --in-file i.gguf --overwrite -o =i.gguf",
    "imatrix -m m.gguf -p a -lsim --overwrite --plot =i.svg -f i.svg",
    "imatrix -m m.gguf -p a -o o --covariance =o",
    "imatrix -m m.gguf -p a -o o --covariance =o.state",
    "imatrix --in-file i.gguf --overwrite -o =i.gguf",
    "imatrix merge i.gguf i.svg --overwrite -o =i.svg",
    "imatrix convert --overwrite i.gguf =i.gguf",
    "imatrix convert --overwrite -m m.gguf i.gguf =m.gguf",
    "imatrix show i.svg --overwrite --plot =i.svg",
)
ALIASES = ("same", "link", "hard link", "way round", "url", "local url", "url of another place")


def alias(name: str, kind: str, folder: Path) -> Path | str:
    """Return another name for a file that need not exist."""
    if "url" in kind:
        (folder / "sub").mkdir(exist_ok=True)
        url = {"url": "file://", "local url": "LOCAL://", "url of another place": "file://localhost"}[kind]
        return f"{url}{folder}/{'sub/../' * ('place' in kind)}{name}"
    link = folder / f"alias{Path(name).suffix}"
    if kind == "link":
        link.symlink_to(name)
    elif kind == "hard link" and (folder / name).exists():
        link.hardlink_to(folder / name)
    elif kind == "way round":
        (folder / "sub").mkdir()
        link = folder / "sub" / ".." / name
    else:
        link = Path(name)
    return link


@pytest.mark.parametrize(("position", "command"), list(enumerate(CLASHES)), ids=CLASHES)
def test_no_command_overwrites_its_inputs(position: int, command: str, folder: Path) -> None:
    name = command.partition("=")[2].split()[0]
    for kind in (ALIASES[position % 4], ALIASES[4 + position % 3]):
        link = alias(name, kind, folder)
        before = contents(folder)
        result = run(command.replace(f"={name}", str(link)))
        assert result.exit_code == 1, result.output
        assert re.search("is the input .*itself|are the same file", result.stderr), result.output
        assert contents(folder) == before


@pytest.mark.parametrize("kind", ["url", "local url", "url of another place"])
def test_a_local_url_is_a_path(folder: Path, kind: str) -> None:
    """As the input, or as the output; for the lock; and for a file in its way, before any work."""
    m, out = alias("m.gguf", kind, folder), alias("o.gguf", kind, folder)
    before = contents(folder)
    for arguments in ((m, "m.gguf"), ("m.gguf", m), (m, m)):
        with refuses(ResourceError, "QK-E403 m.gguf"):
            quantize(*arguments, "Q8_0", overwrite=True)
        result = run("quantize --overwrite A B Q8_0", A=arguments[0], B=arguments[1])
        assert (result.exit_code, contents(folder)) == (1, before)
    quantize(m, "direct.gguf", "Q8_0")
    assert run("quantize M OUT Q8_0", M=m, OUT=out).exit_code == 0
    assert (folder / "o.gguf").read_bytes() == (folder / "direct.gguf").read_bytes()
    with Output("o.gguf", overwrite=True), refuses(ResourceError, "QK-E404 o.gguf"), Output(out):
        pass
    check_refused(run("quantize m.gguf OUT Q8_0", OUT=out).stderr, "QK-E402 o.gguf")
    for command in ("imatrix merge i.gguf -o OUT", "imatrix show I --plot p.svg", "perplexity -m M -p a --json OUT"):
        result = run(command, OUT=out, I=alias("i.gguf", kind, folder), M=m)
        assert result.exit_code == (0 if "show" in command else 1), result.output


@pytest.mark.parametrize("kind", ALIASES)
@pytest.mark.parametrize("name", ["m.gguf", "new"])
def test_files_are_compared_by_identity(folder: Path, kind: str, name: str) -> None:
    link = alias(name, kind, folder)
    with refuses(ResourceError, "QK-E403"):
        check_apart([name, None, link])
    with refuses(ResourceError, "QK-E403"):
        check_apart([link], [None, name])
    for path_of in (part_path, lock_path):
        with refuses(ResourceError, "QK-E403"):
            check_apart(["x"], [path_of(Path("x"))])
    check_apart(["x", "y"], [name, link])


def test_all_shards_of_an_input_are_inputs(folder: Path) -> None:
    for no in range(3):
        split_path("s", no, 3).touch()
    with refuses(ResourceError, "QK-E403 s-00003-of-00003.gguf"):
        check_apart([split_path("s", 2, 3)], [split_path("s", 0, 3)])
    check_apart(["x"], ["x-00001-of-9999999999.gguf"])  # a name, not a reason to count that far


def test_a_calibration_does_not_replace_its_inputs(folder: Path) -> None:
    assert run("calibration --size 4k --heldout 0 -o c t.txt").exit_code == 0
    before = contents(folder / "c")
    result = run("calibration --size 2k --heldout 0 --overwrite -o c c/calibration.txt")
    check_refused(result.stderr, "QK-E403 c/calibration.txt")
    assert contents(folder / "c") == before


# ---------------------------------------------------------------- where an output cannot be

OUTPUTS = (
    "perplexity -m m.gguf -p a --json OUT",
    "perplexity -m m.gguf -p a --save-all-logits OUT",
    "kld -m m.gguf --base b --json OUT",
    "kld m.gguf --base-model m.gguf -p a --json OUT",
    "logits -m m.gguf -p a -o OUT",
    "logits -m m.gguf -p a -o o --json OUT",
    "quantize m.gguf OUT Q8_0",
    "merge-up-gate m.gguf OUT",
    "merge-up-gate --imatrix i.gguf --imatrix-out OUT m.gguf o",
    "split-up-gate merged.gguf OUT",
    "imatrix -m m.gguf -p a -o OUT",
    "imatrix -m m.gguf -p a -o o -lsim --plot OUT",
    "imatrix --in-file i.gguf -o OUT",
    "imatrix merge i.gguf -o OUT",
    "imatrix convert i.gguf OUT",
    "imatrix show i.gguf --plot OUT",
)


@contextmanager
def in_the_way(obstacle: str, path: Path) -> Iterator[str]:
    """Put something where an output is to be; yield the words that name it."""
    if obstacle == "a file":
        path.write_text("dear")
        yield "exists; choose another name, or use --overwrite"
    elif obstacle == "another run":
        with Output(path):
            yield "another run is writing it; wait for it or stop it"
    elif obstacle == "a loop":
        path.symlink_to(path.name)
        yield "Too many levels of symbolic links"
    elif obstacle == "a pipe":
        os.mkfifo(path)
        yield "is not a regular file"
    elif obstacle == "a folder":
        path.mkdir()
        yield "is a directory"


@pytest.mark.parametrize("obstacle", ["a file", "another run", "a loop", "a pipe", "a folder", "nothing"])
@pytest.mark.parametrize("command", OUTPUTS)
def test_every_output_is_checked_before_any_work(
    command: str, obstacle: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = folder / ("out.json" if command.startswith("kld") else "out.svg")
    if command == "logits -m m.gguf -p a -o OUT" and obstacle == "another run":  # looked at when the model is there
        install(monkeypatch, FakeModel(Path("m.gguf"), 100))
    if obstacle == "nothing":
        result = run(command, OUT=folder / "none" / out.name)
        check_refused(result.stderr, f"QK-E401 {out.name}")
    else:
        with in_the_way(obstacle, out) as words:
            before = {path.name: path.lstat().st_ino for path in folder.iterdir()}
            result = run(command, OUT=out)
            assert words in result.stderr, result.output
            assert {path.name: path.lstat().st_ino for path in folder.iterdir()} == before
    assert result.exit_code == 1
    assert not isinstance(result.exception, OSError)


@pytest.mark.parametrize("command", ["quantize m.gguf OUT COPY --dry-run", "merge-up-gate m.gguf OUT --dry-run"])
def test_a_dry_run_refuses_like_the_run(command: str, folder: Path) -> None:
    assert "would refuse" not in run(command, OUT="o").stdout
    (folder / "o").write_text("dear")
    result = run(command, OUT="o")
    assert result.exit_code == 0
    assert "the run itself would refuse: o exists; choose another name, or use --overwrite" in result.stdout
    assert "would refuse" not in run(f"{command} --overwrite", OUT="o").stdout


@pytest.mark.parametrize(
    ("option", "name"), [("--save-frequency 4", "out.gguf.at_4"), ("--all-experts", "out.all-experts.gguf")]
)
def test_further_outputs_of_a_collection_are_checked(folder: Path, option: str, name: str) -> None:
    (folder / name).write_text("dear")
    result = run(f"imatrix -m m.gguf -p a -o out.gguf {option}")
    check_refused(result.stderr, "QK-E402 --overwrite", name)
    result = run(f"imatrix -m m.gguf -f {name} -o out.gguf --overwrite {option}")
    check_refused(result.stderr, "QK-E403", name)
    assert (folder / name).read_text() == "dear"


@pytest.mark.parametrize(
    "command",
    [
        "quantize M o COPY",
        "quantize --dry-run M o Q8_0",
        "merge-up-gate M o",
        "split-up-gate M o",
        "perplexity -m M -p a",
        "logits -m M -p a -o o",
        "bench -m M",
        "sweep-bench -m M",
        "imatrix -m M -p a -o o",
        "imatrix -m M -p a -o o --covariance c",
        "imatrix show -m M i.gguf",
        "imatrix diff -m M i.gguf i.gguf",
        "imatrix merge -m M i.gguf -o o",
    ],
)
def test_a_model_without_tensors_is_refused(command: str, folder: Path) -> None:
    write_model(folder / "empty", {}, FIELDS)
    before = contents(folder)
    result = run(command, M="empty")
    assert result.exit_code in (1, 2)
    check_refused(result.stderr, "QK-E105")
    assert contents(folder) == before


# ---------------------------------------------------------------- whole or not at all


@contextmanager
def small_disk(nbytes: int) -> Iterator[None]:
    """Let no file grow beyond ``nbytes``, as a full disk would not."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize(
    "command",
    [
        "perplexity -m m.gguf --tokens @ids -c 32 --json OUT",
        "perplexity -m m.gguf --tokens @ids -c 32 --save-all-logits OUT",
        "perplexity -m m.gguf --tokens @ids -c 32 --logits-format compact --save-all-logits OUT",
        "logits -m m.gguf --tokens @ids -o OUT",
        "quantize m.gguf OUT COPY",
        "merge-up-gate m.gguf OUT",
        "imatrix --in-file i.gguf -o OUT",
        "imatrix convert i.gguf OUT --to dat",
        "imatrix show i.gguf --plot OUT",
        "calibration --size 4k --heldout 0 -o . t.txt",
    ],
)
def test_a_full_disk_leaves_no_file_and_is_named(command: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, FakeModel(Path("m.gguf"), 100))
    before = contents(folder)
    with small_disk(300):
        result = run(command, OUT="out.svg")
    assert result.exit_code == 1, result.output
    name = r"(calibration|evaluation)\.txt|manifest\.json" if "calibration" in command else r"out\.svg"
    assert re.search(f"({name}).*: File too large; .*: free some space, or write", result.stderr), result.output
    assert contents(folder) == before


def test_a_failed_write_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_text("old")
    part_path(path).symlink_to(tmp_path / "victim")
    (tmp_path / "victim").write_text("dear")
    with pytest.raises(ZeroDivisionError), atomic_write(path) as part:
        part.write_text(str(1 / 0))
    assert contents(tmp_path) == {"x": b"old", "victim": b"dear"}


def test_an_output_is_locked_by_one_run(tmp_path: Path) -> None:
    path = tmp_path / "x"
    lock_path(path).write_text("a lock file of somebody else's, such as poetry.lock")
    with Output(path) as output:
        with refuses(ResourceError, "QK-E404"), Output(path, overwrite=True):
            pass
        for text in ("once", "twice"):
            with atomic_write(output.path) as part:
                part.write_text(text)
            assert path.read_text() == text
    assert lock_path(path).exists()
    lock_path(path).unlink()
    with refuses(ResourceError, "QK-E402 --overwrite"), Output(path):
        pass
    with Output(path, overwrite=True):
        assert lock_path(path).exists()
    assert [p.name for p in tmp_path.iterdir()] == ["x"]


# ---------------------------------------------------------------- inputs that never end, names that lie


@pytest.mark.parametrize(
    "command",
    [
        "quantize -r /dev/zero m.gguf o Q8_0",
        "quantize --tensor-type-file /dev/zero m.gguf o Q8_0",
        "quantize --imatrix /dev/zero m.gguf o Q8_0",
        "quantize /dev/zero o Q8_0",
        "perplexity -m m.gguf -f /dev/zero",
        "perplexity -m m.gguf --tokens @/dev/zero",
        "kld -m m.gguf --base /dev/zero",
        "imatrix convert /dev/zero o",
        "imatrix -m m.gguf --tokens @/dev/zero",
        "calibration -o c /dev/zero",
        "inspect /dev/zero",
        "compare /dev/zero m.gguf",
    ],
)
def test_a_device_as_input_is_refused(command: str, folder: Path) -> None:
    result = run(command)
    assert result.exit_code in (1, 2)
    assert "/dev/zero: " in result.stderr, result.output


@pytest.mark.parametrize(
    "command",
    [
        "quantize -r pipe m.gguf o Q8_0",
        "quantize --tensor-type-file pipe m.gguf o Q8_0",
        "quantize --imatrix pipe m.gguf o Q8_0",
        "perplexity -m m.gguf -f pipe",
        "perplexity -m m.gguf --tokens @pipe",
        "kld -m m.gguf --base pipe",
        "search -m m.gguf -s pipe --target-size 1M",
        "report o.html --data pipe",
        "calibration -o c pipe",
        "recipe lint pipe -m m.gguf",
        "cook pipe.toml --dry-run",
    ],
)
def test_a_pipe_without_a_writer_is_refused(command: str, folder: Path) -> None:
    os.mkfifo("pipe")
    os.symlink("pipe", "pipe.toml")
    result = run(command)
    assert result.exit_code in (1, 2)
    assert "pipe" in result.stderr, result.output
    assert not isinstance(result.exception, OSError)


def test_a_pipe_is_read_up_to_a_limit(tmp_path: Path) -> None:
    for size, fits in ((1000, True), (1001, False)):
        read_fd, write_fd = os.pipe()
        os.write(write_fd, b"x" * size)
        os.close(write_fd)
        if fits:
            assert len(read_whole(f"/dev/fd/{read_fd}", 1000)) == size
        else:
            with refuses(FormatError, "QK-E120 1000"):
                read_whole(f"/dev/fd/{read_fd}", 1000)
        os.close(read_fd)


@pytest.mark.parametrize(
    "command",
    [
        "bench -m M",
        "perplexity -m M -p a",
        "perplexity -m none/M -p a",
        "quantize M o Q8_0",
        "merge-up-gate M o",
        "inspect M",
        "imatrix show M",
        "imatrix convert i.gguf M",
        "imatrix -m M -p a",
        "quantize m.gguf M COPY",
        "merge-up-gate m.gguf M",
        "perplexity -m m.gguf --tokens @ids -c 32 --save-all-logits M",
        "logits -m m.gguf --tokens @ids -o M",
    ],
)
def test_names_are_escaped(command: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, FakeModel(Path("m.gguf"), 100))
    name = folder / "a\x1b[31m\nError: b.gguf"
    if " m.gguf" not in command and "i.gguf" not in command:
        name.write_bytes(b"nothing")
    result = run(command, M=name)
    assert "\x1b" not in result.output
    assert "\nError: b" not in result.output
