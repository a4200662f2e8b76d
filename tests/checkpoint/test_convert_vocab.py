"""Vocabularies that are not in a tokenizer.json, and pre-tokenizers that are not known by their hash."""

from __future__ import annotations

import base64
import json
import random
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from refusals import refuses
from tiny_checkpoints import moe_config, tokenizer, write_checkpoint

import checkpoints
from quantkit.checkpoint.vocab.pre_tokenizers import nearest
from quantkit.convert import ConvertOptions, convert, plan_convert
from quantkit.errors import FormatError
from quantkit.formats.gguf import open_gguf

VOCAB = ConvertOptions(vocab_only=True)
#: Of what convert_hf_to_gguf.py b11434 (mistral_common 1.13.1) makes of ``write_tekken``'s files.
TEKKEN = "10805ca87b8132e4d56b11c8fd30ce0fb55904d81ef39c8378f161e8ca1b1297"


def write_tekken(folder: Path, **options: Any) -> Path:
    """Write a Llama without weights whose tokens are in a tekken.json, 600 of them, 30 special."""
    folder.mkdir(parents=True)
    config = {
        **{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 600, "hidden_size": 64},
        **{"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 64},
    }
    (folder / "config.json").write_text(json.dumps(config))
    rng = random.Random(5)
    tokens = [bytes([i]) for i in range(256)]
    while len(tokens) < 600:  # more than there are ids
        new = rng.choice(tokens) + rng.choice(tokens)
        if len(new) < 9 and new not in tokens:
            tokens.append(new)
    vocab = [{"rank": i, "token_bytes": base64.b64encode(t).decode(), "token_str": None} for i, t in enumerate(tokens)]
    sizes = {"num_vocab_tokens": 600, "default_vocab_size": 600, "default_num_special_tokens": 30}
    data = {"config": {"pattern": r"\S+|\s+", "version": "v3", **sizes}, "vocab": vocab}
    (folder / "tekken.json").write_text(json.dumps({**data, **options}))
    return folder


def test_tekken_equals_the_references(tmp_path: Path) -> None:
    (path,) = convert(write_tekken(tmp_path / "Tiny-Tekken"), tmp_path / "x.gguf", None, VOCAB).paths
    assert sha256(path.read_bytes()).hexdigest() == TEKKEN


_A = base64.b64encode(b"a").decode()


@pytest.mark.parametrize(
    ("changes", "refusal"),
    [
        ({"config": None}, "QK-E114 tekken.json"),
        ({"config": {"default_vocab_size": 1 << 40, "default_num_special_tokens": 30}}, "QK-E114 default_vocab_size"),
        ({"config": {"default_vocab_size": 600, "default_num_special_tokens": 590}}, "QK-E114 tekken.json"),
        ({"vocab": []}, "QK-E114 tekken.json"),
        ({"vocab": [{"rank": i, "token_bytes": _A} for i in range(600)]}, "QK-E114 0"),
        ({"vocab": [{"rank": 0, "token_bytes": "?"}] * 600}, "QK-E114 Base64"),
        ({"vocab": [7] * 600}, "QK-E114 Base64"),
        ({"special_tokens": 7}, "QK-E114 special_tokens"),
        ({"special_tokens": [{"token_str": "x"}, {"token_str": "x"}]}, "QK-E114 30"),
        ({"special_tokens": [{"token_str": "x"}]}, "QK-E114 <s>"),
    ],
)
def test_damaged_tekken_files_are_refused(tmp_path: Path, changes: dict[str, Any], refusal: str) -> None:
    with refuses(FormatError, refusal, "tekken.json"):
        convert(write_tekken(tmp_path / "m", **changes), tmp_path / "x.gguf", None, VOCAB)


def write_pairs(folder: Path, class_name: str | None) -> Path:
    """Write a checkpoint with vocab.json and merges.txt instead of tokenizer.json."""
    write_checkpoint(folder, moe_config(model_type="none"))
    model = tokenizer()["model"]
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    (folder / "merges.txt").write_text("#version: 0.2\nt h\n\n")
    (folder / "added_tokens.json").write_text(json.dumps({"<|end|>": 95}))
    config = {"tokenizer_class": class_name, "eos_token": "<|end|>", "unk_token": "<|end|>", "bos_token": "<|end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("name", ["GPT2Tokenizer", "Qwen2Tokenizer"])
def test_vocab_json_and_merges(tmp_path: Path, name: str) -> None:
    folder = write_pairs(tmp_path / "m", name)
    changes = {"pad_token": "<|end|>"}
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | changes))
    convert(folder, tmp_path / "x.gguf", None, replace(VOCAB, pre="gpt-2"))
    with open_gguf(tmp_path / "x.gguf") as file:
        tokens = file.get("tokenizer.ggml.tokens")
        assert tokens[:3] == ["!", '"', "#"]
        assert tokens[94:] == ["th", "<|end|>"]
        assert file.get("tokenizer.ggml.merges") == ["t h"]
        assert file.get("tokenizer.ggml.token_type")[94:] == [1, 3]


def test_an_unknown_class_is_refused(tmp_path: Path) -> None:
    folder = write_pairs(tmp_path / "m", "MyTokenizer")
    with refuses(FormatError, "QK-E114 GPT2"):
        convert(folder, tmp_path / "x.gguf", None, replace(VOCAB, pre="gpt-2"))


def test_an_unknown_hash_suggests_pre_tokenizers(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m")
    with refuses(FormatError, "QK-E115 --pre gpt-2") as e:
        convert(folder, tmp_path / "x.gguf", None, VOCAB)
    assert "tokenizer.json" in e.value.message
    changed_tokenizer = tokenizer() | {"pre_tokenizer": {"type": "Digits", "individual_digits": True}}
    (folder / "tokenizer.json").write_text(json.dumps(changed_tokenizer))
    with refuses(FormatError, "QK-E115 --pre"):
        convert(folder, tmp_path / "x.gguf", None, VOCAB)


def test_the_suggested_pre_tokenizer_splits_alike() -> None:
    from itertools import accumulate

    from quantkit.checkpoint.vocab.pre_tokenizers import TEXT
    from quantkit.formats.tokenizer.pre import PRE
    from quantkit.formats.tokenizer.split import Splitter

    for name in ("gpt-2", "qwen2", "llama-bpe", "deepseek-v3", "tekken"):
        ends = set(accumulate(map(len, Splitter(PRE[name].patterns).words(TEXT))))
        share, names = nearest(ends, PRE[name].ignore_merges)
        assert share == 1
        assert name in names
        assert PRE[names[0]].ignore_merges == PRE[name].ignore_merges


WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "##s", "a", "##", "b"]
BERT = {
    **{"architectures": ["BertModel"], "model_type": "bert", "hidden_size": 64, "num_hidden_layers": 1},
    **{"num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 12},
}
WORDPIECE = replace(VOCAB, pre="jina-v2-en")


def write_bert(folder: Path, vocab: str, *, config: dict[str, Any] | None = None, **settings: Any) -> Path:
    """Write a BERT without weights and with a vocab.txt; ``settings``: of tokenizer_config.json."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(BERT | (config or {})))
    (folder / "vocab.txt").write_bytes(vocab.encode())
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertTokenizer"} | settings))
    return folder


def pieces_of(folder: Path, out: Path, options: ConvertOptions = WORDPIECE) -> tuple[list[str], list[int], Any]:
    """Return tokens, types and a function of the other keys."""
    convert(folder, out, None, options, overwrite=True)
    with open_gguf(out) as file:
        keys = {
            key.removeprefix("tokenizer.ggml."): file.get(key) for key in file.fields if key.startswith("tokenizer")
        }
    assert keys["model"] == "bert"
    return keys["tokens"], keys["token_type"], keys.get


def test_wordpiece_words_get_a_space_prefix(tmp_path: Path) -> None:
    """Numbers without a token are filled up; a control token stays what it is, an added one for users does not."""
    added = {"9": {"content": "b", "special": False, "normalized": False}}
    folder = write_bert(tmp_path / "m", "\r\n".join(WORDS), added_tokens_decoder=added)
    tokens, types, key = pieces_of(folder, tmp_path / "x.gguf")
    assert tokens == [*WORDS[:5], "▁the", "s", "▁a", "", "▁b", "▁[PAD10]", "▁[PAD11]"]
    assert types == [3] * 5 + [1] * 4 + [4, 5, 5]
    assert (key("pre"), key("token_type_count")) == ("jina-v2-en", 2)
    assert key("seperator_token_id") is None  # there is no tokenizer.json, in which it would be looked for


def test_the_last_of_duplicate_words_is_used(tmp_path: Path) -> None:
    tokens, types, _ = pieces_of(write_bert(tmp_path / "m", "\n".join([*WORDS, "a", ""])), tmp_path / "x.gguf")
    assert (tokens[7], types[7]) == ("▁[PAD7]", 5)
    assert (tokens[10], types[10]) == ("▁a", 1)


def test_missing_special_tokens_are_appended(tmp_path: Path) -> None:
    """In the order in which transformers adds them; a vocabulary that they do not fit is refused."""
    words = [word for word in WORDS if word not in ("[UNK]", "[MASK]")]
    tokens, types, _ = pieces_of(write_bert(tmp_path / "m", "\n".join(words)), tmp_path / "x.gguf")
    assert tokens[8:] == ["[UNK]", "[MASK]", "▁[PAD10]", "▁[PAD11]"]
    assert types[8:] == [3, 3, 5, 5]
    with refuses(FormatError, "QK-E114 9 vocab_size"):
        convert(
            write_bert(tmp_path / "n", "\n".join(words), config={"vocab_size": 9}), tmp_path / "y.gguf", None, WORDPIECE
        )


def test_an_unknown_wordpiece_hash_suggests_pre_tokenizers(tmp_path: Path) -> None:
    with refuses(FormatError, "QK-E115 vocab.txt --pre jina-v2-en"):
        convert(write_bert(tmp_path / "m", "\n".join(WORDS)), tmp_path / "x.gguf", None, VOCAB)


def test_a_binary_vocab_txt_is_refused(tmp_path: Path) -> None:
    folder = write_bert(tmp_path / "m", "")
    (folder / "vocab.txt").write_bytes(b"a\n\xff\n")
    with refuses(FormatError, "QK-E121 vocab.txt UTF-8"):
        convert(folder, tmp_path / "x.gguf", None, WORDPIECE)


def test_a_tokenizer_without_an_unknown_token_is_refused(tmp_path: Path) -> None:
    """The package tokenizers stops at a text of such characters."""
    folder = checkpoints.write_checkpoint("bert", tmp_path)
    values = json.loads((folder / "tokenizer.json").read_text())
    values["model"]["unk_token"] = "<none>"
    (folder / "tokenizer.json").write_text(json.dumps(values))
    with refuses(FormatError, "QK-E116 tokenizer.json [UNK]"):
        convert(folder, tmp_path / "x.gguf", None, VOCAB)


WORDPIECE_NAMES = [name for name in checkpoints.NAMES if checkpoints.describe(name).vocab["kind"] == "wordpiece"]


#: What a tokenizer.json may say of lengths; transformers, which hashes, truncates and pads as its caller says.
LENGTHS = {
    "truncation": {"direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 0},
    "padding": {
        **{"strategy": {"Fixed": 1024}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0},
        **{"pad_type_id": 0, "pad_token": "[PAD]"},
    },
}


@pytest.mark.parametrize("lengths", [{}, LENGTHS], ids=["plain", "truncated and padded"])
@pytest.mark.parametrize("name", WORDPIECE_NAMES)
def test_the_wordpiece_hash_is_the_references(name: str, lengths: dict[str, Any], tmp_path: Path) -> None:
    expected = json.loads((Path(__file__).parents[1] / "data" / "convert-sha256.json").read_text())[name]["check"]
    folder = checkpoints.write_checkpoint(name, tmp_path)
    if (path := folder / "tokenizer.json").is_file():
        path.write_text(json.dumps(json.loads(path.read_text()) | lengths))
    with refuses(FormatError, "QK-E115", expected):
        convert(folder, tmp_path / "x.gguf", None, VOCAB)


def test_added_tokens_are_encoded_in_one_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call compiles the search for all of them: one at a time, 6,415 tokens of Gemma 3 took 20 seconds."""
    import tokenizers

    from quantkit.foreign.tokenizer import Tokenizer

    calls: list[int] = []
    read = tokenizers.Tokenizer.from_str

    class Counting:
        """A tokenizer that counts calls."""

        def __init__(self, text: str) -> None:
            self.inner = read(text)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

        def add_tokens(self, tokens: list[Any]) -> int:
            calls.append(len(tokens))
            return int(self.inner.add_tokens(tokens))

        @staticmethod
        def from_str(text: str) -> Any:
            return Counting(text)

    monkeypatch.setattr(tokenizers, "Tokenizer", Counting)
    data = (write_checkpoint(tmp_path / "m") / "tokenizer.json").read_bytes()
    added = [(f"<|{i}|>", {"special": True, "normalized": False}) for i in range(40)]
    tokenizer = Tokenizer(data)
    tokenizer.adapt(added, None, None, None)
    assert calls == [40]
    assert len(tokenizer.ids("".join(content for content, _ in added), False)) == 40


def write_bytes(name: str, folder: Path) -> Path:
    """Write a checkpoint whose vocabulary is replaced by byte-level BPE that splits as GPT-2's."""
    path = checkpoints.write_checkpoint(name, folder)
    (path / "tokenizer.model").unlink(missing_ok=True)
    for file, data in checkpoints.vocab_files({"kind": "bpe", "special": ["<|end|>"], "split": False}).items():
        (path / file).write_bytes(data)
    return path


@pytest.mark.parametrize("name", ["jamba", "deci", "deci-7b", "xverse"])
def test_byte_level_bpe_is_written_as_gpt2(name: str, tmp_path: Path) -> None:
    """Whatever the class: not as pieces, of which none would ever match."""
    folder, out = write_bytes(name, tmp_path), tmp_path / "x.gguf"
    convert(folder, out, None, replace(VOCAB, pre="gpt-2"))
    with open_gguf(out) as file:
        assert (file.get("tokenizer.ggml.model"), file.get("tokenizer.ggml.pre")) == ("gpt2", "gpt-2")
        assert len(file.get("tokenizer.ggml.merges")) == 320
        assert "tokenizer.ggml.scores" not in file.fields
    with refuses(FormatError, "QK-E115 tokenizer.json --pre tokenizer.ggml.pre"):
        plan_convert(folder, tmp_path / "y.gguf", None, VOCAB)


def test_a_pre_tokenizer_with_other_splits_is_refused(tmp_path: Path) -> None:
    folder, wrong = write_bytes("deci", tmp_path), replace(VOCAB, pre="llama-bpe")
    with refuses(FormatError, "QK-E115 --pre gpt-2 --allow-other-ids"):
        convert(folder, tmp_path / "x.gguf", None, wrong)
    assert not (tmp_path / "x.gguf").exists()
    plans = [
        plan_convert(folder, tmp_path / "x.gguf", None, options)
        for options in (replace(wrong, allow_other_ids=True), replace(VOCAB, pre="gpt-2"))
    ]
    assert [sum("instead of" in note for note in plan.notes) for plan in plans] == [1, 0]


@pytest.mark.parametrize(("name", "kind"), [("llama", "Unigram"), ("nomic-bert", "BPE")])
def test_a_model_of_another_type_is_refused(name: str, kind: str, tmp_path: Path) -> None:
    folder = checkpoints.write_checkpoint(name, tmp_path)
    (folder / "tokenizer.model").unlink(missing_ok=True)
    pieces: Any = [["a", 0.0]] if kind == "Unigram" else {"a": 0}
    values = {"model": {"type": kind, "vocab": pieces, "merges": []}, "added_tokens": []}
    (folder / "tokenizer.json").write_text(json.dumps(values))
    with refuses(FormatError, "QK-E114", kind):
        convert(folder, tmp_path / "x.gguf", None, replace(VOCAB, pre="gpt-2"))


def test_extra_special_tokens_by_name_are_special(tmp_path: Path) -> None:
    """As transformers 4.57.6 writes those of models that also see."""
    folder = write_checkpoint(tmp_path / "m")
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "X", "extra_special_tokens": {"image_token": "th"}})
    )
    convert(folder, tmp_path / "x.gguf", None, replace(VOCAB, pre="gpt-2"))
    with open_gguf(tmp_path / "x.gguf") as file:
        types = dict(zip(file.get("tokenizer.ggml.tokens"), file.get("tokenizer.ggml.token_type"), strict=True))
    assert (types["th"], types["!"]) == (3, 1)
