"""quantkit imatrix -m MODEL -f TEXT: results, interruptions, messages."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from refusals import check_refused, refuses

from quantkit.calibration import calibration
from quantkit.cli import cli
from quantkit.errors import FormatError, QualityGate, QuantkitError, RecipeError
from quantkit.evaluate import SaveLogits, kld, perplexity
from quantkit.formats.gguf import open_gguf, write_gguf
from quantkit.formats.imatrix import read_imatrix
from quantkit.imatrix import ImatrixOptions, Watcher, difference, filled_experts, imatrix, merge
from quantkit.imatrix.collect import ALL_EXPERTS_KEY, DROPPED_KEY
from quantkit.imatrix.files import MODEL_KEY
from quantkit.merge import merge_up_gate
from quantkit.model.engine import load
from quantkit.model.fusion import Fusion
from quantkit.quantize import QuantizeOptions, plan_quantize, quantize
from small_models import write_with_template
from zoo import write_zoo

N_CTX, N = 32, 8
TOKENS = np.random.default_rng(1).integers(0, 100, N_CTX * N).astype(np.int32)
RUN: dict[str, Any] = {"kv_type": "f32"}


def options(**changes: Any) -> ImatrixOptions:
    return ImatrixOptions(**({"n_ctx": N_CTX, "n_batch": 2 * N_CTX, "output_frequency": 2} | changes))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_zoo("qwen3moe-moe", tmp_path_factory.mktemp("zoo") / "model.gguf")


def run(model: Path, out: Path, tokens: np.ndarray = TOKENS, watcher: Watcher | None = None, **changes: Any):
    return imatrix(model, (), out, tokens=tokens, options=options(**changes), watcher=watcher, **RUN)


# ---------------------------------------------------------------- the same result in every mode


def test_threads_and_chunk_order_do_not_change_sums(model: Path, tmp_path: Path) -> None:
    expected = imatrix(
        model, (), tmp_path / "a.gguf", tokens=TOKENS, options=options(n_batch=N_CTX), threads=1, kv_type="f32"
    ).imatrix
    mixed = TOKENS.reshape(N, N_CTX)[::-1].reshape(-1)
    permuted = imatrix(
        model, (), tmp_path / "b.gguf", tokens=mixed, options=options(n_batch=N_CTX), threads=2, kv_type="f32"
    )
    assert expected is not None
    assert permuted.imatrix is not None
    for name, entry in expected.entries.items():
        assert np.array_equal(entry.sums, permuted.imatrix.entries[name].sums), name
        assert np.array_equal(entry.counts, permuted.imatrix.entries[name].counts), name
        assert np.array_equal(entry.in_sum, permuted.imatrix.entries[name].in_sum), name  # type: ignore[arg-type]


class StopAfter(Watcher):
    """Interrupts a run."""

    def __init__(self, chunk: int) -> None:
        self.chunk, self.first = chunk, 0

    def on_start(self, first: int, n_chunks: int, n_seq: int, notes: Any) -> None:
        self.first = first

    def on_chunk(self, chunk: int, n_chunks: int, ppl: Any) -> None:
        if chunk == self.chunk:
            raise KeyboardInterrupt


@pytest.mark.parametrize("often", [2, 3, 0])
def test_a_resumed_run_writes_the_same_file(often: int, model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.gguf"
    full = run(model, out, output_frequency=often)
    expected = out.read_bytes()
    out.unlink()
    with pytest.raises(KeyboardInterrupt):
        run(model, out, watcher=StopAfter(7), output_frequency=often)
    assert out.with_name("out.gguf.state").exists() == out.exists() == bool(often)
    watcher = StopAfter(0)
    resumed = run(model, out, watcher=watcher, resume=True, output_frequency=often)
    assert watcher.first == {2: 6, 3: 6, 0: 0}[often]
    assert out.read_bytes() == expected
    assert resumed.ppl == full.ppl
    assert [p.name for p in tmp_path.iterdir()] == ["out.gguf"]


def test_a_snapshot_of_another_run_is_not_resumed(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.gguf"
    with pytest.raises(KeyboardInterrupt):
        run(model, out, watcher=StopAfter(7))
    reversed_tokens = TOKENS[::-1].copy()
    with refuses(QuantkitError, "QK-E409 out.gguf.state --overwrite --resume"):
        run(model, out, reversed_tokens, resume=True)
    watcher = StopAfter(0)
    run(model, out, reversed_tokens, watcher=watcher, resume=True, overwrite=True)
    assert watcher.first == 0
    before = out.read_bytes()
    result = run(model, out, reversed_tokens, resume=True)
    assert (result.was_complete, result.n_chunks) == (True, N)
    with refuses(QuantkitError, "QK-E402 out.gguf --overwrite"):
        run(model, out, reversed_tokens, resume=True, n_ctx=2 * N_CTX, n_batch=4 * N_CTX)
    assert out.read_bytes() == before


def test_an_intermediate_file_equals_a_run_of_fewer_chunks(model: Path, tmp_path: Path) -> None:
    run(model, tmp_path / "out.gguf", save_frequency=4)
    fewer = run(model, tmp_path / "fewer.gguf", chunks=4)
    assert fewer.n_chunks == 4
    assert (tmp_path / "out.gguf.at_4").read_bytes() == (tmp_path / "fewer.gguf").read_bytes()


def test_two_texts_equal_two_merged_files(model: Path, tmp_path: Path) -> None:
    one, two = run(model, tmp_path / "1.gguf", chunks=3), run(model, tmp_path / "2.gguf", from_chunk=3)
    expected, both = run(model, tmp_path / "3.gguf").imatrix, merge([one.imatrix, two.imatrix]).imatrix  # type: ignore[list-item]
    added = imatrix(
        model,
        (),
        tmp_path / "4.gguf",
        tokens=TOKENS,
        options=options(from_chunk=3),
        in_files=[tmp_path / "1.gguf"],
        **RUN,
    ).imatrix
    assert expected is not None
    assert added is not None
    for name, entry in expected.entries.items():
        for merged_entry in (both.entries[name], added.entries[name]):
            assert np.array_equal(entry.counts, merged_entry.counts)
            np.testing.assert_allclose(entry.sums, merged_entry.sums, rtol=1e-4, atol=1e-6)
    assert (added.chunk_count, added.chunk_size) == (N, N_CTX)


# ---------------------------------------------------------------- values that are no numbers


def spoilt(source: Path, target: Path, tensor: str, row: int, value: float) -> Path:
    """Copy a model with one row of a weight made of ``value``."""
    with open_gguf(source) as file:
        data = {name: file.data(t).copy() for name, t in file.tensors.items()}
        t = file.tensors[tensor]
        data[tensor].view(np.float32).reshape(-1, t.shape[0])[row] = value
        write_gguf(
            target,
            list(file.fields.values()),
            [(t.name, t.shape, t.type, data[t.name].tobytes()) for t in file.tensors.values()],
        )
    return target


class Dropped(Watcher):
    def __init__(self) -> None:
        self.chunks: list[tuple[int, int]] = []

    def on_drop(self, chunk: int, why: str, back_to: int) -> None:
        self.chunks.append((chunk, back_to))


@pytest.mark.parametrize("ppl", [True, False])
def test_a_chunk_with_nan_is_skipped(ppl: bool, model: Path, tmp_path: Path) -> None:
    bad = spoilt(model, tmp_path / "bad.gguf", "token_embd.weight", 120, np.nan)
    tokens, watcher = TOKENS.copy(), Dropped()
    tokens[3 * N_CTX + 5] = tokens[6 * N_CTX + 9] = 120
    result = run(bad, tmp_path / "out.gguf", tokens, watcher=watcher, ppl=ppl)
    assert watcher.chunks == [(3, 2), (6, 5)]
    assert result.dropped == {
        3: "the input of blk.0.attn_q.weight at position 5",
        6: "the input of blk.0.attn_q.weight at position 9",
    }
    finite = np.delete(TOKENS.reshape(N, N_CTX), [3, 6], axis=0)
    clean = run(bad, tmp_path / "clean.gguf", finite.reshape(-1), ppl=ppl)
    assert result.imatrix is not None
    assert clean.imatrix is not None
    assert result.n_chunks == result.imatrix.chunk_count == clean.n_chunks == 6
    assert result.ppl == pytest.approx(clean.ppl)
    for name, entry in clean.imatrix.entries.items():
        np.testing.assert_allclose(result.imatrix.entries[name].sums, entry.sums, rtol=1e-5)
    lines = read_imatrix(tmp_path / "out.gguf").extra[DROPPED_KEY].value
    assert lines == [f"{chunk + 1}: {why}" for chunk, why in result.dropped.items()]


def test_a_model_of_only_nan_is_refused(model: Path, tmp_path: Path) -> None:
    bad = spoilt(model, tmp_path / "bad.gguf", "blk.1.attn_norm.weight", 0, np.inf)
    with refuses(QuantkitError, "QK-E108 blk.1.attn_q.weight 0"):
        run(bad, tmp_path / "out.gguf")
    assert not (tmp_path / "out.gguf").exists()


# ---------------------------------------------------------------- what else is recorded


def test_merged_experts_get_entries_for_all_names(model: Path, tmp_path: Path) -> None:
    merged = tmp_path / "merged.gguf"
    merge_up_gate(model, merged)
    separate = run(model, tmp_path / "a.gguf").imatrix
    assert separate is not None
    gate = separate.entries["blk.0.ffn_gate_exps.weight"]
    for names, kinds in ((None, 3), ("merged", 1), ("separate", 2), ("both", 3)):
        imatrix_of_names = run(merged, tmp_path / f"as-{names}.gguf", names=names).imatrix
        assert imatrix_of_names is not None
        entries = [
            n
            for n in imatrix_of_names.entries
            if n.startswith("blk.0.ffn_gate_") and "exps" in n or n.startswith("blk.0.ffn_up_exps")
        ]
        assert len(entries) == kinds
        for name in entries:
            assert np.array_equal(imatrix_of_names.entries[name].counts, gate.counts)
            np.testing.assert_allclose(imatrix_of_names.entries[name].sums, gate.sums, rtol=1e-5)


def test_all_experts_writes_a_separate_file(model: Path, tmp_path: Path) -> None:
    result = run(model, tmp_path / "out.gguf", all_experts=True)
    plain = run(model, tmp_path / "plain.gguf")
    assert (tmp_path / "out.gguf").read_bytes() == (tmp_path / "plain.gguf").read_bytes()
    assert result.all_experts == tmp_path / "out.all-experts.gguf"
    all_matrix = read_imatrix(result.all_experts)
    assert all_matrix.extra[ALL_EXPERTS_KEY].value is True
    assert plain.imatrix is not None
    assert all_matrix.entries.keys() == plain.imatrix.entries.keys()
    for name, entry in all_matrix.entries.items():
        assert (entry.counts == N * N_CTX).all()
        assert entry.sums.shape == plain.imatrix.entries[name].sums.shape


@pytest.mark.parametrize("name", ["llama4-moe", "cohere2-dense"])
def test_all_experts_with_weighted_inputs(name: str, tmp_path: Path) -> None:
    result = run(write_zoo(name, tmp_path / "model.gguf"), tmp_path / "out.gguf", all_experts=True)
    if name == "cohere2-dense":
        assert result.all_experts is None
        assert any("has no experts" in note for note in result.notes)
        return
    assert result.all_experts is not None
    entries = read_imatrix(result.all_experts).entries
    assert entries.keys() == read_imatrix(tmp_path / "out.gguf").entries.keys()
    gate = entries["blk.1.ffn_gate_exps.weight"]
    assert gate.sums.shape[0] == gate.counts.size > 1
    assert (gate.counts == N * N_CTX).all()
    assert not np.array_equal(gate.sums[0], gate.sums[1])  # every expert has its own weight


def test_empty_experts_are_reported_and_filled_in_the_file_only(model: Path, tmp_path: Path) -> None:
    settings = {"tokens": TOKENS[:N_CTX], "options": options(fill="mean")}
    result = imatrix(model, (), tmp_path / "out.gguf", **settings, **RUN)
    assert result.coverage is not None
    n_empty = {t.name: t.never for t in result.coverage.tensors if t.never}
    n_filled = filled_experts(read_imatrix(tmp_path / "out.gguf"))
    assert {name: len(experts) for name, experts in n_filled.items()} == n_empty
    with pytest.raises(QualityGate):
        result.coverage.check(1.0 if n_empty else 1.1)


def test_an_interrupted_command_names_resume(
    tiny_moe: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(self: object, chunk: int, *_: object) -> None:
        if chunk >= 5:
            raise KeyboardInterrupt

    monkeypatch.setattr("quantkit.cli.imatrix_collect._Report.on_chunk", interrupt)
    arguments = ["-m", tiny_moe, "-f", data / "tiny-moe-evaluation.txt", "-o", tmp_path / "o.gguf", "-c", 64, "-b", 64]
    result = quantkit(*arguments, "-ofreq", 2)
    assert result.exit_code == 130
    assert result.stderr.endswith("interrupted; continue with the same command and --resume\n")
    arguments[5] = tmp_path / "other.gguf"
    assert "--resume" not in quantkit(*arguments, "-ofreq", 0).stderr  # there is nothing to go on from


def test_invalid_models_and_texts_are_named(tiny_moe: Path, data: Path, tmp_path: Path) -> None:
    text, matrix = tmp_path / "text.txt", data / "tiny-moe-imatrix.gguf"
    text.write_bytes(b"good " * 99 + b"\xf7\xbf\xbf\xbf")
    for arguments, words in (
        (["-m", matrix, "-f", data / "tiny-moe-evaluation.txt"], f"{matrix}: this is an imatrix, not a model"),
        (["-m", tiny_moe, "-f", text], f"{text}: the text is not UTF-8"),
    ):
        result = quantkit(*arguments, "-o", tmp_path / "o.gguf")
        assert result.exit_code != 0
        assert words in result.output
        assert not (tmp_path / "o.gguf").exists()


def test_experts_merged_at_load_equal_a_merged_file(model: Path, tmp_path: Path) -> None:
    merge_up_gate(model, tmp_path / "merged.gguf")
    run(tmp_path / "merged.gguf", tmp_path / "1.gguf")
    imatrix(model, (), tmp_path / "2.gguf", tokens=TOKENS, options=options(), merge_up_gate=True, **RUN)
    both = [tmp_path / "1.gguf", tmp_path / "2.gguf"]
    digests = [read_imatrix(path).extra[MODEL_KEY].value for path in both]
    one, second = (path.read_bytes().replace(digest.encode(), b"") for path, digest in zip(both, digests, strict=True))
    assert one == second
    assert digests[0] != digests[1]  # of the files


def test_chunk_lengths_of_joined_files_must_agree(model: Path, tmp_path: Path) -> None:
    run(model, tmp_path / "1.gguf")
    for arguments, size in (([], N_CTX), (["-c", 2 * N_CTX], 2 * N_CTX)):
        quantkit("--in-file", tmp_path / "1.gguf", "-o", tmp_path / f"{size}.gguf", *arguments)
        matrix = read_imatrix(tmp_path / f"{size}.gguf")
        assert (matrix.chunk_size, matrix.chunk_count) == (size, N * N_CTX // size)


# ---------------------------------------------------------------- refused


@pytest.mark.parametrize(
    ("changes", "refusal"),
    [
        ({"options": options(), "fusion": Fusion()}, "QK-E201"),
        ({"options": options(n_batch=50)}, "QK-E203 50 32"),
        ({"options": options(fill="some")}, "QK-E203 some"),
        ({"options": options(from_chunk=9)}, "QK-E203 8"),
        ({"options": options(), "tokens": None}, "QK-E202 --chat"),
        ({"options": options(n_ctx=512)}, "QK-E203 512"),
    ],
)
def test_impossible_requests_are_refused(changes: dict[str, Any], refusal: str, model: Path, tmp_path: Path) -> None:
    with refuses(QuantkitError, refusal):
        imatrix(model, (), tmp_path / "out.gguf", **{"tokens": TOKENS, **RUN, **changes})
    assert not list(tmp_path.iterdir())


def test_nothing_but_similarity_may_be_fused(model: Path) -> None:
    with refuses(RecipeError, "QK-E214"):
        imatrix(model, (), None, tokens=TOKENS, options=options(), **RUN)
    result = imatrix(model, (), None, tokens=TOKENS, options=options(layer_similarity=True), fusion=Fusion(), **RUN)
    assert (result.imatrix, result.path) == (None, None)
    assert [s.layer for s in result.similarity] == [0, 1]
    assert all(-1 <= x <= 1 for s in result.similarity for x in s[1:])


# ---------------------------------------------------------------- conversations

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{% endfor %}"
    "{% if messages[0]['role'] == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
)


@pytest.fixture(scope="module")
def chat_model(tiny_moe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_with_template(tiny_moe, tmp_path_factory.mktemp("chat") / "model.gguf", TEMPLATE)


def test_conversations_go_through_the_template(chat_model: Path, tiny_moe: Path, data: Path, tmp_path: Path) -> None:
    pytest.importorskip("jinja2")
    words = (data / "tiny-moe-evaluation.txt").read_text()[:4000]
    chats = tmp_path / "chats.jsonl"
    lines: list[Any] = [
        {"messages": [{"role": "user", "content": words[:1500]}, {"role": "assistant", "content": words[1500:3000]}]},
        [{"role": "user", "content": "a"}],
        {"conversations": [{"from": "human", "value": words[3000:]}, {"from": "gpt", "value": "b"}]},
    ]
    chats.write_text("\n".join(map(json.dumps, lines)) + "\n")
    options = ImatrixOptions(n_ctx=64, overwrite=True)
    result = imatrix(chat_model, (), tmp_path / "chat.gguf", chat=[chats], options=options)
    with open_gguf(tiny_moe) as file:
        from quantkit.formats.tokenizer import Tokenizer

        tokenizer = Tokenizer.from_gguf(file)
    bos = tokenizer.piece(tokenizer.bos).decode() if tokenizer.bos is not None else ""
    texts = [
        f"{bos}<|user|>{words[:1500]}<|assistant|>{words[1500:3000]}",
        f"{bos}<|user|>a",
        f"{bos}<|user|>{words[3000:]}<|assistant|>b",
    ]
    ids = np.concatenate([tokenizer.encode(text, add_special=False, parse_special=True) for text in texts])
    expected = imatrix(chat_model, (), tmp_path / "ids.gguf", tokens=ids, options=options)
    assert result.imatrix is not None
    assert expected.imatrix is not None
    for name, entry in result.imatrix.entries.items():
        assert np.array_equal(entry.sums, expected.imatrix.entries[name].sums)
    assert "quantkit.calibration.sha256" in read_imatrix(tmp_path / "chat.gguf").extra


@pytest.mark.parametrize(
    ("line", "refusal"),
    [
        ("{", "QK-E111 2 JSON"),
        ('{"text": "a"}', "QK-E111 2"),
        ('[{"role": "user"}]', "QK-E111 2 1"),
        ('[{"role": "tool", "content": "x"}]', "QK-E116 tokenizer.chat_template TemplateError"),
    ],
)
def test_an_invalid_conversation_is_refused(line: str, refusal: str, chat_model: Path, tmp_path: Path) -> None:
    pytest.importorskip("jinja2")
    chats = tmp_path / "chats.jsonl"
    chats.write_text(f'[{{"role": "user", "content": "x"}}]\n{line}\n')
    with refuses(FormatError, refusal):
        imatrix(chat_model, (), tmp_path / "out.gguf", chat=[chats])


def test_a_model_without_a_template_is_refused(tiny_moe: Path, tmp_path: Path) -> None:
    chats = tmp_path / "chats.jsonl"
    chats.write_text('[{"role": "user", "content": "x"}]\n')
    with refuses(FormatError, "QK-E123 tokenizer.chat_template"):
        imatrix(tiny_moe, (), tmp_path / "out.gguf", chat=[chats])


def test_evaluating_on_calibration_text_gives_a_warning(
    calibrated: Path, tiny_moe: Path, data: Path, tmp_path: Path
) -> None:
    texts = [(data / f"tiny-moe-{name}.txt").read_bytes()[:20_000] for name in ("calibration", "evaluation")]
    with load(tiny_moe) as model:
        ids = [model.tokenizer.encode(text)[: 4 * 64] for text in texts]
    for hidden in (False, True):
        out = tmp_path / f"{hidden}.gguf"
        quantize(tiny_moe, out, "Q8_0", QuantizeOptions(imatrix=calibrated, hide_imatrix=hidden), threads=2)
        for text, tokens in zip(texts, ids, strict=True):
            base = tmp_path / f"{hidden}-{text is texts[0]}.bin"
            save = SaveLogits(base, "compact", top_k=8)
            results = [
                perplexity(out, text, n_ctx=64, chunks=1),
                perplexity(out, tokens=tokens, n_ctx=64, save_logits=save),
                kld(out, base),
            ]
            warned = [any("used for calibration" in note for note in result.notes) for result in results]
            assert warned == 3 * [text is texts[0] and not hidden]
    output = quantkit_("kld", "-m", tmp_path / "False.gguf", "--base", tmp_path / "False-True.bin")
    assert output.startswith("warning: about ")


def quantkit_(*arguments: object) -> str:
    """Return a command's stderr."""
    result = CliRunner().invoke(cli, [*map(str, arguments)])
    assert result.exit_code == 0, result.output
    return result.stderr


def corpus_of(folder: Path, data: Path) -> Path:
    """Make a corpus of the calibration text, with a held-out part large enough for some chunks."""
    calibration([data / "tiny-moe-calibration.txt"], folder, size=60_000, heldout=0.2)
    return folder


def test_calibrating_on_held_out_text_gives_a_warning(tiny_moe: Path, data: Path, tmp_path: Path) -> None:
    corpus = corpus_of(tmp_path / "corpus", data)
    held_out = corpus / "evaluation.txt"
    settings = {"options": ImatrixOptions(n_ctx=64, chunks=2, ppl=False)}
    right = imatrix(tiny_moe, [corpus / "calibration.txt"], tmp_path / "right.gguf", **settings)
    wrong = imatrix(tiny_moe, [corpus / "calibration.txt", held_out], tmp_path / "wrong.gguf", **settings)
    copy = tmp_path / "copy.txt"
    copy.write_bytes(b"Another beginning.\n" + held_out.read_bytes())
    moved = imatrix(tiny_moe, [copy], tmp_path / "moved.gguf", **settings)
    message = f"was computed on {held_out}, which is held out for evaluation"
    assert not any("held out" in note for result in (right, moved) for note in result.notes)
    assert any(note.startswith("warning: ") and message in note for note in wrong.notes)

    def warned(imatrix: Path) -> list[str]:
        plan = plan_quantize(tiny_moe, tmp_path / "q.gguf", "Q4_K", QuantizeOptions(imatrix=imatrix))
        return [note for note in plan.notes if "held out" in note]

    assert not warned(tmp_path / "right.gguf")
    assert [message in note for note in warned(tmp_path / "wrong.gguf")] == [True]
    # The origin of the copy is unknown until an importance matrix of the corpus is given.
    assert not warned(tmp_path / "moved.gguf")
    merge_result = quantkit("merge", tmp_path / "right.gguf", tmp_path / "moved.gguf", "-o", tmp_path / "joined.gguf")
    assert "warning: the merged importance matrix was computed on about 100 % of" in merge_result.stderr
    assert [f"about 100 % of {held_out}" in note for note in warned(tmp_path / "joined.gguf")] == [True]
    dry = quantkit_(
        "quantize", "--dry-run", "--imatrix", tmp_path / "wrong.gguf", tiny_moe, tmp_path / "q.gguf", "Q4_K"
    )
    text = quantkit("show", tmp_path / "wrong.gguf").output
    assert "held out  " in text
    assert f"texts     sha256 {hashlib.sha256((corpus / 'calibration.txt').read_bytes()).hexdigest()[:16]}" in text
    assert f"warning: {tmp_path / 'wrong.gguf'} was computed on" in text
    assert f"\nwarning: {tmp_path / 'wrong.gguf'} was computed on {held_out}" in f"\n{dry}"


def test_the_recorded_hash_is_the_files(tiny_moe: Path, data: Path, tmp_path: Path) -> None:
    text = corpus_of(tmp_path / "corpus", data) / "calibration.txt"
    options = ImatrixOptions(n_ctx=64, chunks=1, ppl=False)
    matrix = imatrix(tiny_moe, [text], tmp_path / "i.gguf", options=options).imatrix
    assert matrix is not None
    assert matrix.extra["quantkit.calibration.sha256"].value == [hashlib.sha256(text.read_bytes()).hexdigest()]


# ---------------------------------------------------------------- the command


def quantkit(*arguments: object) -> Any:
    return CliRunner().invoke(cli, ["imatrix", *map(str, arguments)])


@pytest.mark.parametrize("place", ["-", "FILE"])
def test_json_is_a_record_of_the_collection(place: str, tiny_moe: Path, data: Path, tmp_path: Path) -> None:
    text, out, record = data / "tiny-moe-evaluation.txt", tmp_path / "out.dat", tmp_path / "record.json"
    arguments = ["-m", tiny_moe, "-f", text, "-o", out, "-c", 128, "--chunks", 2, "--covariance", tmp_path / "c.gguf"]
    result = quantkit(*arguments, "--json", *([record] if place == "FILE" else []))
    assert result.exit_code == 0, result.output
    values = json.loads(record.read_text() if place == "FILE" else result.stdout)
    assert (values["file"], values["bytes"]) == (str(out), out.stat().st_size)
    assert values["sha256"] == hashlib.sha256(out.read_bytes()).hexdigest()
    assert (values["n_ctx"], values["n_chunks"], values["n_tokens"]) == (128, 2, 256)
    assert values["datasets"] == [str(text)]
    assert values["ppl"]["value"] > 1
    assert values["coverage"] == 1
    assert values["seconds"] > 0
    assert values["covariance"]["n_inputs"] > 0
    assert ("Final estimate" in result.stdout) == (place == "FILE")


def test_json_takes_no_command_for_its_file(data: Path) -> None:
    result = quantkit("--json", "show", data / "tiny-moe-imatrix.gguf")
    assert result.exit_code == 2
    assert "--json" in result.stderr


def test_the_command_lists_available_files(tiny_moe: Path, data: Path, tmp_path: Path) -> None:
    text, out = data / "tiny-moe-evaluation.txt", tmp_path / "out.gguf"
    arguments = ["-m", tiny_moe, "-f", text, "-o", out, "-c", 128, "--chunks", 5, "-t", 1, "-no-fug", "-no-fmoe"]
    result = quantkit(*arguments, "-lsim", "--plot", tmp_path / "plot.svg", "--require-coverage", "99%")
    assert result.exit_code == 0, result.output
    assert result.stderr.startswith("fusion is off (up and gate of dense layers")
    assert result.stdout.count("],") == 0
    for words in ("[1]", "[5]", "Final estimate: PPL =", "By class", "ffn_down_exps", "By layer", "Similarity of"):
        assert words in result.stdout
    assert (tmp_path / "plot.svg").read_text().startswith("<?xml")
    check_refused(quantkit(*arguments).output, "QK-E402 out.gguf --overwrite")
    resumed_result = quantkit(*arguments, "--resume")
    assert (resumed_result.exit_code, resumed_result.output) == (
        0,
        f"{out} is complete; nothing to resume after 5 chunks\n",
    )
    assert quantkit(*arguments, "--overwrite", "--no-ppl", "--require-coverage", "1").exit_code in (0, 3)
    typed = ["-m", tiny_moe, "-p", text.read_text()[:1500], "-o", tmp_path / "typed.gguf", "-c", 64]
    peers_names = ["--n-gpu-layers", 0, "--cache-type-k", "f32", "--override-tensor", "exps=CPU"]
    assert quantkit(*typed, *peers_names).exit_code == 0
    assert read_imatrix(tmp_path / "typed.gguf").datasets == ["prompt"]
    statistics = quantkit("--show-statistics", "--in-file", out)
    assert "Statistics of weights" in statistics.output
    merge_result = quantkit("--in-file", f"{out},{out}", "-o", tmp_path / "joined.dat")
    assert merge_result.exit_code == 0
    assert read_imatrix(tmp_path / "joined.dat").format == "dat"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-m", "MODEL"], "give a model (-m) and a text"),
        (["-m", "MODEL", "-f", "MODEL", "--plot", "a.svg"], "add --layer-similarity"),
        (["-m", "MODEL", "-f", "MODEL", "--chunks", "0"], "a number above 0"),
        (["-m", "MODEL", "show", "x"], "-m is an option of quantkit imatrix"),
        (["--show-statistics"], "--show-statistics needs an --in-file"),
    ],
)
def test_invalid_command_lines_are_refused(arguments: list[str], words: str, tiny_moe: Path) -> None:
    result = quantkit(*(tiny_moe if a == "MODEL" else a for a in arguments))
    assert result.exit_code == 2
    assert words in result.output.replace("\n", " ")


@pytest.fixture(scope="module")
def calibrated(tiny_moe: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("tiny") / "imatrix.gguf"
    text = data / "tiny-moe-calibration.txt"
    imatrix(tiny_moe, [text], out, options=ImatrixOptions(n_ctx=256, ppl=False, fill="none"))
    return out


#: ik_llama.cpp's and llama.cpp's own files differ by 0.0236 in the worst expert.
@pytest.mark.parametrize(
    ("reference", "limit"), [("imatrix.gguf", 1e-2), ("imatrix.dat", 1e-2), ("imatrix-ik.dat", 3e-2)]
)
def test_tiny_moe_equals_both_runtimes(reference: str, limit: float, calibrated: Path, data: Path) -> None:
    actual, expected = read_imatrix(calibrated), read_imatrix(data / f"tiny-moe-{reference}")
    assert actual.entries.keys() == expected.entries.keys()
    assert actual.chunk_count == expected.chunk_count == 343
    differences = difference(expected, actual, min_tokens=1000)
    assert not differences.beyond(limit)
    assert all(t.n_skipped == 0 and (t.counts is None or t.counts < 1e-3) for t in differences.tensors)


#: An encoder's search jumps: adding up in float32 as llama-imatrix does, and not exactly, alone changes 0.9 % of the
#: blocks of Q4_K_M. llama-imatrix's own files with and without flash attention give 98.7 % and 98.8 %.
@pytest.mark.parametrize(("preset", "least"), [("Q4_K_M", 0.985), ("Q3_K_M", 0.99)])
def test_a_model_quantized_with_it_is_the_same(
    preset: str, least: float, calibrated: Path, tiny_moe: Path, data: Path, tmp_path: Path
) -> None:
    actual, expected = tmp_path / "ours.gguf", tmp_path / "theirs.gguf"
    for path, matrix in ((actual, calibrated), (expected, data / "tiny-moe-imatrix.gguf")):
        quantize(tiny_moe, path, preset, QuantizeOptions(imatrix=matrix), threads=2)
    n_equal = total = 0
    with open_gguf(actual) as a, open_gguf(expected) as b:
        for name, t in a.tensors.items():
            assert b.tensors[name].type is t.type
            if t.type.block > 1:
                blocks = [f.data(name).reshape(-1, t.type.row_bytes(t.type.block)) for f in (a, b)]
                n_equal += int((blocks[0] == blocks[1]).all(axis=1).sum())
                total += len(blocks[0])
    assert total > 10_000
    assert n_equal / total >= least
