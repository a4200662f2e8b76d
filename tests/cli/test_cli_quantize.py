"""The command line of quantize: what it takes, prints and returns."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result
from refusals import check_refused

from quantkit.cli import cli
from quantkit.formats.gguf import open_gguf
from small_models import llama_tensors, tensor_bytes, write_model


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("llama") / "llama.gguf", llama_tensors())


def run(*args: object) -> Result:
    return CliRunner().invoke(cli, ["quantize", *map(str, args)])


def test_arguments_in_the_order_of_llama_quantize(llama: Path, tmp_path: Path) -> None:
    out = tmp_path / "o.gguf"
    result = run(llama, out, "q8_0", 2)
    assert result.exit_code == 0, result.output
    assert "on 2 threads" in result.stdout
    assert f"wrote {out}" in result.stdout
    assert result.stderr.count("[") == 19
    assert "blk.0.ffn_up.weight" in result.stderr


def test_negative_threads_means_all(llama: Path, tmp_path: Path) -> None:
    assert run(llama, tmp_path / "o.gguf", "q8_0", -1).exit_code == 0
    assert run(llama, tmp_path / "p.gguf", "q8_0", "--prune-layers", -1).exit_code == 2


def test_the_default_output_is_beside_the_input(llama: Path) -> None:
    result = run(llama, "7")
    assert result.exit_code == 0, result.output
    output = llama.with_name("ggml-model-Q8_0.gguf")
    assert tensor_bytes(output)["output.weight"][0] == "Q8_0"
    output.unlink()
    for number, name in (("15", "Q4_K"), ("14", "Q4_K_S"), ("145", "IQ4_KS")):
        assert f"ggml-model-{name}.gguf: " in run("--dry-run", llama, number).stdout


def test_stdout_is_only_json(llama: Path, tmp_path: Path) -> None:
    result = run("--json", llama, tmp_path / "o.gguf", "Q8_0")
    summary = json.loads(result.stdout)
    assert summary["bits_per_weight"] == pytest.approx(8.5, abs=0.1)
    assert len(summary["tensors"]) == 19
    assert {c["class"] for c in summary["classes"]} >= {"attn_q", "ffn_down", "output"}


def test_rules_of_ik(llama: Path, tmp_path: Path) -> None:
    def types(*args: object) -> dict[str, str]:
        result = run("--dry-run", "--json", *args[:-1], llama, tmp_path / "o.gguf", args[-1])
        plan = json.loads(result.stdout)
        assert plan["rules"] == ("mainline" if args == ("Q4_0",) else "ik")
        return {t["name"]: t["type"] for t in plan["tensors"]}

    assert types("Q4_0")["output.weight"] == types("--rules", "ik", "Q4_0")["output.weight"] == "Q6_K"
    actual = types("IQ4_KS")
    assert (actual["output.weight"], actual["blk.0.attn_q.weight"]) == ("Q6_K", "IQ4_KS")
    assert types("--pure", "IQ4_KS")["output.weight"] == "IQ4_KS"
    refused = run("--rules", "mainline", llama, tmp_path / "o.gguf", "IQ4_KS")
    assert refused.exit_code == 1
    check_refused(refused.stderr, "QK-E301 IQ4_KS ik_llama.cpp llama.cpp --rules")
    assert run("--rules", "other", llama, tmp_path / "o.gguf", "Q4_0").exit_code == 2


def test_a_dry_run_writes_nothing(llama: Path, tmp_path: Path) -> None:
    result = run("--dry-run", llama, tmp_path / "o.gguf", "Q4_K_M")
    assert result.exit_code == 0
    assert "F16 -> Q6_K" in result.stdout
    assert list(tmp_path.iterdir()) == []
    plan = json.loads(run("--dry-run", "--json", llama, tmp_path / "o.gguf", "Q4_K_M").stdout)
    assert sum(t["bytes"] for t in plan["tensors"]) < plan["files"][0]["bytes"]


def test_encoder_ik_is_selected(llama: Path, tmp_path: Path) -> None:
    plain, out = tmp_path / "plain.gguf", tmp_path / "o.gguf"
    assert run(llama, plain, "IQ4_XS").exit_code == 0
    tensors = json.loads(run("--dry-run", "--json", "--encoder", "ik", llama, out, "IQ4_XS").stdout)["tensors"]
    encoders = {t["name"]: (t["encoder"], t["reason"].endswith("; encoded as in ik_llama.cpp")) for t in tensors}
    assert encoders["blk.0.ffn_up.weight"] == ("ik", True)
    assert encoders["output_norm.weight"] == (None, False)
    assert run("--encoder", "ik", llama, out, "IQ4_XS").exit_code == 0
    data, mainlines = tensor_bytes(out), tensor_bytes(plain)
    assert {name: t for name, (t, _) in data.items()} == {name: t for name, (t, _) in mainlines.items()}
    assert {name for name in data if data[name] != mainlines[name]} == {
        n for n, (encoder, _) in encoders.items() if encoder
    }
    with open_gguf(out) as file:
        assert "--encoder ik" in file.get("quantkit.quantize.recipe").splitlines()
    idle = run("--dry-run", "--encoder", "ik", llama, out, "Q8_0", "--overwrite")
    assert "note: --encoder ik is ignored" in idle.stderr


def test_error_is_measured_on_request(llama: Path, tmp_path: Path) -> None:
    result = run("--measure-error", llama, tmp_path / "o.gguf", "Q8_0")
    assert "rel. error" in result.stdout
    assert "0.5" in result.stdout


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (["IN"], 2, "expected IN.gguf [OUT.gguf] TYPE [THREADS]"),
        (["IN", "OUT", "Q4_K_X"], 1, "did you mean"),
        (["IN", "Q4_K_X"], 1, "did you mean"),
        (["IN", "OUT", "Q8_0", "many"], 2, "THREADS must be a number"),
        (["IN", "OUT", "Q8_0", "2", "3"], 2, "expected IN.gguf"),
        (["none.gguf", "OUT", "Q8_0"], 1, "none.gguf"),
        (["--prune-layers", "x", "IN", "OUT", "Q8_0"], 2, "neither a layer number nor a range"),
        (["--prune-layers", "9", "IN", "OUT", "Q8_0"], 2, "no layer 9"),
        (["--prune-layers", "1-99999999999", "IN", "OUT", "Q8_0"], 2, "not a range of layers"),
        (["--prune-layers", "1-0", "IN", "OUT", "Q8_0"], 2, "not a range of layers"),
        (["--keep-split", "--split-max-size", "1M", "IN", "OUT", "Q8_0"], 2, "mutually exclusive"),
        (["--max-buffer-size", "0", "IN", "OUT", "Q8_0"], 2, "--max-buffer-size"),
        (["--max-buffer-size", "8", "--max-ram", "1G", "IN", "OUT", "Q8_0"], 2, "give one of them"),
        (["-j", "3", "IN", "OUT", "Q8_0", "2"], 2, "THREADS is 2 and --threads 3"),
        (["--override-kv", "split.count=int:3", "IN", "OUT", "Q8_0"], 2, "--split-max-size"),
        (["--max-ram", "lots", "IN", "OUT", "Q8_0"], 2, "is not a size"),
        (["--custom-q", "attn_[=q8_0", "IN", "OUT", "Q8_0"], 2, "regular expression"),
        (["--override-kv", "a", "IN", "OUT", "Q8_0"], 2, "KEY=TYPE:VALUE"),
        (["--output-tensor-type", "q9", "IN", "OUT", "Q8_0"], 1, "'q9'"),
        (["--ffn-gate-inp-type", "nope", "IN", "OUT", "Q8_0"], 1, "nope"),
        (["--encoder", "best", "IN", "OUT", "Q8_0"], 2, "'best' is not one of 'llama.cpp', 'ik'"),
        (["--fallback", "maybe", "IN", "OUT", "Q8_0"], 1, "maybe"),
        (
            ["--output-tensor-type", "i32", "IN", "OUT", "Q8_0"],
            1,
            "--output-tensor-type: I32 is not a type for weights",
        ),
        (["--attn-q-type", "q8_K", "IN", "OUT", "Q8_0"], 1, "--attn-q-type: Q8_K is not a type for weights"),
        (
            ["--extra-output-tensor", "q4_0", "--repack", "IN", "OUT"],
            2,
            "--extra-output-tensor does not apply",
        ),
    ],
)
def test_invalid_input_is_an_error_of_one_line(
    llama: Path, tmp_path: Path, args: list[str], code: int, message: str
) -> None:
    paths = {"IN": str(llama), "OUT": str(tmp_path / "o.gguf")}
    result = run(*(paths.get(a, a) for a in args))
    assert result.exit_code == code, result.output
    assert message in result.stderr
    assert "Traceback" not in result.output
    assert list(tmp_path.iterdir()) == []


def test_buffer_sizes_of_llama_quantize_are_accepted(llama: Path, tmp_path: Path) -> None:
    small = run("--max-buffer-size", 1, llama, tmp_path / "a.gguf", "Q8_0", 3)
    assert small.exit_code == 0, small.output
    assert "note: --max-buffer-size 1: 3 threads need at least 3.02 MiB" in small.stderr
    large = run("--max-buffer-size", 64, llama, tmp_path / "b.gguf", "Q8_0", 3)
    assert "note" not in large.stderr
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()


@pytest.mark.parametrize("fallback", ["ERROR", "Error"])
def test_fallback_is_case_insensitive(tmp_path: Path, fallback: str) -> None:
    source = write_model(tmp_path / "s.gguf", {"blk.0.ffn_up.weight": ((320, 8), "F16")})
    result = run("--fallback", fallback, source, tmp_path / "o.gguf", "Q4_K_S")
    assert result.exit_code == 1
    check_refused(result.stderr, "QK-E303 --fallback")
    assert run("--fallback", "NEXT", source, tmp_path / "o.gguf", "Q4_K_S").exit_code == 0


@pytest.fixture
def odd(tmp_path: Path) -> Path:
    """Return a model with rows that no K-quant divides, beside others that it does."""
    shapes = {f"blk.{i}.ffn_{kind}.weight": (n, 8) for i in range(3) for kind, n in (("up", 288), ("down", 512))}
    return write_model(tmp_path / "odd.gguf", {name: (shape, "F16") for name, shape in shapes.items()})


@pytest.mark.parametrize("options", [(), ("--dry-run",)], ids=["run", "dry"])
def test_the_summary_has_one_line_of_fallbacks(odd: Path, tmp_path: Path, options: tuple[str, ...]) -> None:
    result = run(*options, "--pure", odd, tmp_path / "o.gguf", "Q3_K")
    (line,) = (" ".join(line.split()) for line in result.stdout.splitlines() if line.startswith("fallback"))
    assert "3 of 6 matrices: 3 Q3_K to Q4_0" in line
    assert "rows of 288 are not a multiple of blocks of 256" in line
    before, after = 3 * 288 * 8 * 110 / 256, 3 * 288 * 8 * 18 / 32
    assert f"{(after - before):.0f} B more" in line or f"{(after - before) / 1024:.2f} KiB more" in line


def test_fallbacks_are_in_json(odd: Path, tmp_path: Path) -> None:
    for options in ((), ("--dry-run",)):
        output = json.loads(run("--json", *options, "--pure", odd, tmp_path / f"{len(options)}.gguf", "Q3_K").stdout)
        (fallback,) = output["fallbacks"]
        assert (fallback["chosen"], fallback["type"], fallback["tensors"]) == ("Q3_K", "Q4_0", 3)
        assert fallback["bytes"] == 3 * 288 * 8 * 18 // 32
        assert fallback["chosen_bytes"] == 3 * round(288 * 8 * 110 / 256)
    assert json.loads(run("--json", odd, tmp_path / "none.gguf", "Q8_0").stdout)["fallbacks"] == []


def test_shards_of_an_earlier_run_are_mentioned(llama: Path, tmp_path: Path) -> None:
    first = run("--split-max-size", 300_000, llama, tmp_path / "o.gguf", "Q8_0")
    assert "beside the output" not in first.stderr
    old = sorted(p.name for p in tmp_path.iterdir())
    rerun = run("--overwrite", "--split-max-size", 300_000, llama, tmp_path / "o.gguf", "Q8_0")
    assert "beside the output" not in rerun.stderr
    (tmp_path / "o-2.gguf").touch()
    second = run("--split-max-size", 150_000, llama, tmp_path / "o.gguf", "Q8_0")
    assert f"beside the output, but not part of it: {old[0]} .. {old[-1]} ({len(old)} files), possibly" in second.stderr
    one = run(llama, tmp_path / "o.gguf", "Q8_0")
    assert f"not part of it: {old[0]} .. " in one.stderr
    assert {p.name for p in tmp_path.iterdir()} > {*old, "o.gguf"}


#: Ctrl-C at the moment at which a module is imported.
_INTERRUPTED = """
import sys

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == moment:
            raise KeyboardInterrupt

moment = sys.argv.pop(1)
sys.meta_path.insert(0, Interrupt())
from quantkit.__main__ import main
main()
"""


@pytest.mark.parametrize("moment", ["click", "quantkit.cli.quantize", "numpy", "quantkit.formats.imatrix"])
def test_ctrl_c_during_imports_prints_one_line(llama: Path, tmp_path: Path, moment: str) -> None:
    command = [sys.executable, "-c", _INTERRUPTED, moment, "quantize", llama, tmp_path / "o.gguf", "Q8_0"]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (process.returncode, process.stderr.strip()) == (130, "interrupted")


def test_unmatched_rules_are_reported_first(llama: Path, tmp_path: Path) -> None:
    result = run("--custom-q", "ffn_up_shexp=q8_0", "--dry-run", llama, tmp_path / "o.gguf", "Q4_0")
    assert "note: QK-W" in result.stderr
    assert "ffn_up_shexp" in result.stderr


def test_a_recipe_selects_types(llama: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "my.recipe"
    recipe.write_text("# attention\nattn_[qk] = q8_0\n\nblk\\.1\\. = q5_0  # the rest of layer 1\n")
    result = run("--recipe", recipe, llama, tmp_path / "o.gguf", "Q4_0")
    assert result.exit_code == 0, result.output
    types = {name: t for name, (t, _) in tensor_bytes(tmp_path / "o.gguf").items()}
    assert types["blk.1.attn_q.weight"] == "Q8_0"
    assert types["blk.1.ffn_up.weight"] == "Q5_0"
    assert types["blk.0.ffn_up.weight"] == "Q4_0"


def test_a_killed_run_is_resumed(llama: Path, tmp_path: Path) -> None:
    """A real process, really killed, at several moments."""
    reference = tmp_path / "whole.gguf"
    assert run(llama, reference, "Q4_0").exit_code == 0
    out, command = tmp_path / "o.gguf", [sys.executable, "-m", "quantkit", "quantize"]
    for delay in (0.3, 0.6, 0.9):
        with subprocess.Popen(
            [*command, "--resume", llama, out, "Q4_0"], stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL
        ) as process:
            time.sleep(delay)
            os.kill(process.pid, signal.SIGKILL)
    rerun = subprocess.run([*command, "--resume", "--overwrite", llama, out, "Q4_0"], capture_output=True, check=False)
    assert rerun.returncode == 0, rerun.stderr
    assert out.read_bytes() == reference.read_bytes()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
def test_a_full_disk_at_stdout_is_an_error_of_one_line() -> None:
    with open("/dev/full", "wb") as full:
        process = subprocess.run(
            [sys.executable, "-m", "quantkit", "types"], stdout=full, stderr=subprocess.PIPE, check=False
        )
    assert process.returncode == 1
    assert process.stderr == b"Error: No space left on device\n"


def test_control_characters_in_names_are_escaped(tmp_path: Path) -> None:
    source = write_model(tmp_path / "x.gguf", {**llama_tensors(), "blk.0.\x1b[31m\n.weight": ((256, 8), "F16")})
    result = run("--dry-run", source, tmp_path / "o.gguf", "Q4_0")
    assert result.exit_code == 0, result.output
    assert "blk.0.\\x1b[31m\\n.weight" in result.stdout
    assert "\x1b" not in result.output


def test_partial_requant_writes_only_missing_shards(llama: Path, tmp_path: Path) -> None:
    assert run(llama, tmp_path / "s.gguf", "COPY", "--split-max-size", "300K").exit_code == 0
    source, out = next(tmp_path.glob("s-00001-*")), tmp_path / "o.gguf"
    command = ("--keep-split", "--partial-requant", source, out, "Q8_0")
    assert run(*command).exit_code == 0
    shards = sorted(tmp_path.glob("o-*.gguf"))
    assert len(shards) > 3
    before = [path.read_bytes() for path in shards]
    mtime = shards[0].stat().st_mtime_ns
    shards[1].unlink()
    shards[2].unlink()
    result = run(*command)
    assert f"--partial-requant: {len(shards) - 2} of {len(shards)} files" in result.stderr
    assert [path.read_bytes() for path in shards] == before
    assert shards[0].stat().st_mtime_ns == mtime
    assert run(*command).exit_code == 0
    plan = json.loads(run("--json", *command).stdout)
    assert plan["files"] == plan["tensors"] == []
    assert not list(tmp_path.glob("*.part"))
    # Different metadata do not cause a file to be written again; different tensors are an error.
    assert run("--no-provenance", *command).exit_code == 0
    shards[3].write_bytes(shards[2].read_bytes())
    refused = run(*command)
    assert refused.exit_code == 1
    check_refused(refused.stderr, "QK-E402", shards[3])
    assert "give one of them" in run("--overwrite", *command).stderr


def test_a_second_output(llama: Path, tmp_path: Path) -> None:
    """As in ik_llama.cpp it lies behind the first one; an embedding serves if there is no output.weight."""
    out = tmp_path / "o.gguf"
    assert run("--rules", "ik", "--extra-output-tensor", "q4_0_r8", llama, out, "Q8_0").exit_code == 0
    data = tensor_bytes(out)
    assert list(data)[2:4] == ["output.weight", "output_extra.weight"]
    assert data["output_extra.weight"][0] == "Q4_0_R8"
    plain = tmp_path / "plain.gguf"
    assert run("--output-tensor-type", "q4_0_r8", llama, plain, "Q8_0").exit_code == 0
    assert tensor_bytes(plain)["output.weight"] == data["output_extra.weight"]
    assert data["output.weight"][0] == "Q8_0"
    rerun = run("--extra-output-tensor", "q4_0", "--allow-requantize", out, tmp_path / "p.gguf", "Q8_0")
    assert rerun.exit_code == 2
    check_refused(rerun.stderr, "QK-E201 output_extra.weight")
    larger = run("--extra-output-tensor", "f32", llama, tmp_path / "p.gguf", "Q8_0")
    assert "is ignored: F32 is not smaller than output.weight, which is F16" in " ".join(larger.stderr.split())
    assert "output_extra.weight" not in tensor_bytes(tmp_path / "p.gguf")
    tensors = {name: t for name, t in llama_tensors().items() if name != "output.weight"}
    tied = write_model(tmp_path / "tied.gguf", tensors)
    for type_name in ("COPY", "Q8_0"):
        result = run("--overwrite", "--extra-output-tensor", "q4_0", tied, out, type_name)
        assert result.exit_code == 0, result.output
        assert tensor_bytes(out)["output_extra.weight"][0] == "Q4_0"
        assert "llama.cpp: does not load" in result.stdout


def test_per_layer_embeddings_have_an_option(tmp_path: Path) -> None:
    per_layer = "per_layer_token_embd.weight"
    model = write_model(tmp_path / "m.gguf", {**llama_tensors(), per_layer: ((256, 64), "F16")})

    def types(*args: object) -> list[str]:
        result = run("--dry-run", "--json", "--per-layer-token-embedding-type", "q4_0_r8", *args, model, "Q8_0")
        by_name = {t["name"]: t["type"] for t in json.loads(result.stdout)["tensors"]}
        return [by_name[per_layer], by_name["token_embd.weight"]]

    for rules in ("ik", "mainline"):
        assert types("--rules", rules) == ["Q4_0", "Q8_0"]
        assert types("--rules", rules, "--token-embedding-type", "q5_0") == ["Q4_0", "Q5_0"]
        assert types("--rules", rules, "--custom-q", "per_layer=q5_1") == ["Q4_0", "Q8_0"]


def test_symmetric_q4_0(llama: Path, tmp_path: Path) -> None:
    plain, out = tmp_path / "plain.gguf", tmp_path / "o.gguf"
    assert run(llama, plain, "Q4_0").exit_code == run("--symmetric-q40", llama, out, "Q4_0").exit_code == 0
    output = json.loads(run("--dry-run", "--json", "--overwrite", "--symmetric-q40", llama, out, "Q4_0").stdout)
    encoders = {t["name"]: (t["encoder"], t["reason"].endswith("levels -7 .. 7")) for t in output["tensors"]}
    assert (encoders["blk.0.ffn_up.weight"], encoders["output.weight"]) == (("symmetric", True), ("mainline", False))
    data, usual = tensor_bytes(out), tensor_bytes(plain)
    assert {n for n in data if data[n] != usual[n]} == {n for n, (_, symmetric) in encoders.items() if symmetric}
    idle = run("--dry-run", "--symmetric-q40", llama, tmp_path / "p.gguf", "Q8_0")
    assert "note: --symmetric-q40 is ignored" in idle.stderr
    assert "note: --slow-iq2ks has no effect" in run("--dry-run", "--slow-iq2ks", llama, "Q8_0").stderr


def options_of(program: Path, env: dict[str, str] | None = None) -> set[str]:
    """Return the options that a llama-quantize lists in its help."""
    process = subprocess.run([program, "--help"], capture_output=True, text=True, check=False, env=env)
    return set(re.findall(r"(?<![\w-])--[a-z][\w-]+", process.stdout))


#: ik_llama.cpp 8337e4cd3 has these, but the wheel's program is a little older.
NEW_OPTIONS = {"--per-layer-token-embedding-type", "--extra-output-tensor", "--symmetric-q40", "--slow-iq2ks"}


@pytest.mark.peer
def test_every_option_of_the_peers_is_handled(llama_bin: Path, ik_bin: Path) -> None:
    libraries = f"{ik_bin.parents[1]}/ik_llama_cpp_python.libs:{ik_bin.parent}/lib"
    peer_options = options_of(llama_bin / "llama-quantize")
    peer_options |= options_of(ik_bin / "llama-quantize", {"LD_LIBRARY_PATH": libraries})
    assert len(peer_options) > 25
    command = cli.get_command(click.Context(cli), "quantize")
    assert command is not None
    options = {name for p in command.params for name in p.opts} | {"--help"}
    assert peer_options | NEW_OPTIONS <= options


def test_tensors_skipped_by_repack_are_noted(llama: Path, tmp_path: Path) -> None:
    def notes(*args: object) -> str:
        result = run("--dry-run", *args, tmp_path / "o.gguf")
        assert result.exit_code == 0, result.output
        return " ".join(result.stderr.split())

    text = notes("--repack", llama)
    assert (
        "--repack is ignored: no tensor has a type and a number of rows that can be interleaved "
        "note: 15 tensors remain F16" in text
    )
    assert "which loses 3 bits of each value" in text
    text = notes("--repack", "--repack-pattern", r"blk\.\d{1,2}\.attn_[q,k]\.,output_norm", llama)
    assert "4 tensors remain F16" in text
    assert "matches" in text
    assert "F16" not in notes("--repack", "--repack-pattern", "token_embd,nothing", llama)
    assert notes("--unrepack", llama).startswith("note: --unrepack is ignored")
    text = " ".join(run("--dry-run", llama, tmp_path / "o.gguf", "BF16_R16").stderr.split())
    assert "AVX512-BF16 only" in text
    assert "BF16_R16 truncates values" in text
    assert run(llama, tmp_path / "bf16.gguf", "BF16").stderr.count("note: ") == 0
    text = notes("--repack", tmp_path / "bf16.gguf")
    assert "AVX512-BF16 only" in text
    assert "cuts" not in text


def test_repack_accepts_no_type_and_refuses_a_wrong_one(llama: Path, tmp_path: Path) -> None:
    assert "ggml-model-REPACK.gguf: " in run("--dry-run", "--repack", llama).stdout
    assert "ggml-model-Q4_K_R4.gguf: " in run("--dry-run", "--repack", llama, "Q4_K_R4").stdout
    assert json.loads(run("--dry-run", "--json", "--unrepack", llama).stdout)["rules"] == ""
    refused = run("--repack", llama, tmp_path / "o.gguf", "Q4_K_X")
    assert refused.exit_code == 1
    check_refused(refused.stderr, "QK-E301 Q4_K_X Q4_K_S")


def test_rules_and_encoders_are_case_insensitive(llama: Path) -> None:
    plan = json.loads(run("--dry-run", "--json", "--rules", "IK", "--encoder", "Ik", llama, "Q4_K_M").stdout)
    assert (plan["rules"], {t["encoder"] for t in plan["tensors"]}) == ("ik", {"ik", None})


def test_a_file_in_the_place_of_the_type_is_an_error_of_usage(llama: Path, tmp_path: Path) -> None:
    refused = run(llama, tmp_path / "out.gguf")
    assert refused.exit_code == 2
    assert "out.gguf" in refused.stderr
    assert "[QK-E301]" not in refused.stderr
    assert not (tmp_path / "out.gguf").exists()
