"""Qwen3-TTS: its language model, its speaker encoder, its predictor of codes and its decoder of waveforms.

Facts of llama.cpp b11434, conversion/qwen3tts.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from quantkit.checkpoint import vector_math
from quantkit.checkpoint.config import Config, Json
from quantkit.checkpoint.encoder_rules import ForceType, NameInFile, StackNumbered, part_tensors, read_part
from quantkit.checkpoint.expressions import (
    F32,
    TYPE_F16,
    TYPE_F32,
    ByValue,
    Expression,
    Shaped,
    Stored,
    as_f32,
    concatenate,
    from_f32,
    read_f32,
    row_of,
    stack,
)
from quantkit.checkpoint.key_rows import Always, Computed
from quantkit.checkpoint.linear import ACTIVATIONS, Linear
from quantkit.checkpoint.mmproj import Key, Mmproj, MmprojConfig, constant, projector
from quantkit.checkpoint.row import Architecture
from quantkit.checkpoint.rules import Drop, Rename
from quantkit.checkpoint.tensors import Context, OneWayRule, Tensor
from quantkit.checkpoint.vocab.bpe import bpe_tokens
from quantkit.checkpoint.vocab.sentencepiece import Piece, sentencepiece_tokens, set_pieces
from quantkit.checkpoint.vocab.special import special_tokens
from quantkit.checkpoint.vocab.tokenizer import CONTROL, Vocabulary
from quantkit.errors import FormatError
from quantkit.formats.gguf.rules import short
from quantkit.formats.ranges import U8
from quantkit.formats.safetensors import StoredTensor
from quantkit.types import TensorType

#: The folder of the decoder of waveforms.
_TOKENIZER = "speech_tokenizer"
#: The codebooks after the first.
_CODEBOOKS = 15


# --- The language model ----------------------------------------------------------------------------------------------


def _use_talker(config: Config) -> None:
    """Take the hyperparameters of talker_config, with the vocabulary of texts."""
    talker = {key: value for key, value in config.table("talker_config").items() if key != "architectures"}
    config.use_text({**talker, "vocab_size": talker.get("text_vocab_size")})


def _code_count(config: Config) -> int:
    """Return the number of codes, which follow the texts' tokens."""
    return config.with_values(config.table("talker_config")).number("vocab_size")


def _end_of_speech(config: Config) -> int:
    return config.number("vocab_size") + config.number("codec_eos_token_id")


def _suppressed_tokens(config: Config) -> list[int]:
    """Return the tokens that are never generated: the last 1024, except the end."""
    size, end = config.number("vocab_size") + _code_count(config), _end_of_speech(config)
    return [token for token in range(size - 1024, size) if token != end]


def _code_names(config: Config) -> list[str]:
    """Return the texts of codes: their numbers, or the names of their settings in talker_config."""
    count, numbers = _code_count(config), dict[str, object]()
    for key, value in config.table("talker_config").items():
        if not key.endswith("_id"):
            continue
        name = key.removesuffix("_id")
        if isinstance(value, dict):
            numbers |= {f"{name}_{inner}": number for inner, number in value.items()}
        elif isinstance(value, int):
            numbers[name] = value
    names = [f"<|codec_{i}|>" for i in range(count)]
    for name, number in numbers.items():
        if not isinstance(number, int) or not -count <= number < count:
            raise FormatError(f"{config.path}: {name} is {short(number)}, not one of {count} codes", "QK-E112")
        names[number] = f"<|{name}|>"
    return names


def _write_vocab(v: Vocabulary) -> None:
    """Write the tokens of texts and of codes; there is no chat template (Qwen3TTSTalkerModel)."""
    codes = _code_names(v.config)
    if v.has("tokenizer.model"):
        tokens = sentencepiece_tokens(v) + [Piece(text, 0.0, CONTROL) for text in codes]
        set_pieces(v, tokens)
        special_tokens(v.folder, n_tokens=len(tokens)).write(v.keys)
        return
    v.run()
    v.check_model("BPE")
    texts, types = bpe_tokens(v)
    v.keys.text("tokenizer.ggml.model", "gpt2")
    v.keys.text("tokenizer.ggml.pre", v.pre_name)
    v.keys.array("tokenizer.ggml.tokens", texts + codes)
    v.keys.array("tokenizer.ggml.token_type", types + [CONTROL] * len(codes))
    special = special_tokens(v.folder, merges=True)
    special.template = None
    special.write(v.keys)


@dataclass(frozen=True)
class _FoldEmbeddings(OneWayRule):
    """Folds the two layers after the embeddings of texts into these; the embeddings of codes follow."""

    names = (
        "model.text_embedding.weight",
        *(f"text_projection.linear_fc{n}.{end}" for n in (1, 2) for end in ("weight", "bias")),
        "model.codec_embedding.weight",
    )

    def __call__(self, tensor: Tensor, context: Context) -> Iterable[Tensor] | None:
        if tensor.name not in self.names:
            return None
        parts = context.gather(self, "embeddings", tensor.name, tensor, len(self.names))
        if parts is None:
            return ()
        texts, w1, b1, w2, b2, codes = (parts[name].x for name in self.names)
        activation = context.config.get("hidden_act")
        if activation not in ACTIVATIONS:
            raise FormatError(
                f"{context.config.path}: hidden_act is {short(activation)}; supported are {', '.join(ACTIVATIONS)}",
                "QK-E305",
            )
        chain = texts.shape[1:] == w1.shape[1:] and w2.shape[1:] == b1.shape == w1.shape[:1]
        if not chain or not w2.shape[:1] == b2.shape == codes.shape[1:]:
            raise context.fail(tensor, "text_embedding, text_projection and codec_embedding do not match in shape")
        folded = Linear(Linear(texts, w1, b1, activation), w2, b2)
        return (replace(tensor, x=concatenate((folded, codes)), name_in_file="token_embd.weight"),)


ARCHITECTURES: dict[str, Architecture] = {
    "Qwen3TTSForConditionalGeneration": Architecture(
        "qwen3tts",
        stored=(Drop(r"^(?!talker\.)|^talker\.code_predictor\."), Rename(r"^talker\.", "")),
        rules=(_FoldEmbeddings(), Rename(r"^codec_head\.", "lm_head.")),
        keys=(
            Computed("tokenizer.ggml.suppress_tokens", _suppressed_tokens, "array"),
            Computed("tokenizer.ggml.eos_token_id", _end_of_speech),
            Always("tokenizer.ggml.add_eos_token", False, "flag"),
        ),
        vocab=_write_vocab,
        patch_config=_use_talker,
    ),
}


# --- Encoders --------------------------------------------------------------------------------------------------------


def _read_config(config: Config) -> Json:
    talker = config.outer.get("talker_config")
    if not isinstance(talker, dict):
        raise FormatError(f"{config.path}: talker_config is {short(talker)}, not an object", "QK-E112")
    wav = read_part(config.path.parent / _TOKENIZER).get("decoder_config")
    return {**config.outer, "text_config": {"hidden_size": talker.get("hidden_size")}, _TOKENIZER: wav}


def _patch(config: MmprojConfig) -> None:
    """Set the number of stages of the speaker encoder, always four."""
    config.audio.values["n_layers"] = 4


def _predictor(config: MmprojConfig, name: str) -> int | float:
    """Return a value of the configuration of the predictor of codes."""
    talker = config.model.with_values(config.model.table("talker_config"))
    predictor = talker.table("code_predictor_config")
    if name not in predictor:
        raise FormatError(f"{config.path}: code_predictor_config has no {name}", "QK-E112")
    value: int | float = predictor[name]
    return value


def _of_predictor(name: str) -> Callable[[MmprojConfig], int | float]:
    return lambda config: _predictor(config, name)


# --- The decoder of waveforms ---------------------------------------------------------------------------------------


def _round(t: TensorType, values: F32) -> F32:
    """Return values as a tensor of torch of this type has them."""
    data = np.empty(values.size * t.block_bytes, np.uint8)
    from_f32(t, values, data)
    return as_f32(t, data)


#: The range of vector_math.exp.
_MAX_EXPONENT = 87


@dataclass(frozen=True)
class _Snake(ByValue):
    """A parameter of SnakeBeta: exp(x), or its reciprocal; each step is rounded to the stored type."""

    reciprocal: bool

    def compute(self, x: F32) -> F32:
        t = self.x.type
        with np.errstate(over="ignore", divide="ignore"):
            usual = np.abs(x) < _MAX_EXPONENT
            exact = np.exp(x.astype(np.float64)).astype(np.float32)
            values = _round(t, np.where(usual, vector_math.exp(np.where(usual, x, 0)), exact))
            if self.reciprocal:
                values = _round(t, np.float32(1) / _round(t, values + np.float32(1e-9)))
        return values


@dataclass(frozen=True)
class _Codebook:
    """A codebook from the sums of its vectors and the number of each, [codes, width]."""

    sums: Expression
    counts: Expression

    @property
    def shape(self) -> tuple[int, ...]:
        return self.sums.shape

    @property
    def type(self) -> TensorType:
        return self.sums.type if self.sums.type is self.counts.type else TYPE_F32

    def read(self, start: int, out: U8, readahead: int = 0) -> None:
        width, n = row_of(self.sums), out.size // self.type.block_bytes
        first, last = start // width, -(-(start + n) // width)
        least = _round(self.counts.type, np.full(1, 1e-5, np.float32))
        counts = np.maximum(read_f32(self.counts, first, last - first), least)
        rows = np.arange(start, start + n) // width - first
        values = (read_f32(self.sums, start, n) / counts[rows]).astype(np.float32)
        from_f32(self.type, values, out)

    def parts(self) -> Iterator[StoredTensor]:
        yield from self.sums.parts()
        yield from self.counts.parts()


_WAV_LAYER = {
    "ln1.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_out.weight": "self_attn.o_proj.weight",
    "ls1.weight": "self_attn_layer_scale.scale",
    "ln2.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
    "ls2.weight": "mlp_layer_scale.scale",
}
_UPSAMPLING = {"conv": "0.conv", "dwconv": "1.dwconv.conv", "norm": "1.norm", "pw1": "1.pwconv1", "pw2": "1.pwconv2"}


def _with_bias(name: str, stored: str) -> Iterator[tuple[str, str]]:
    yield from ((f"{name}{end}", f"{stored}{end}") for end in (".weight", ".bias"))


def _wav_names(layers: int, upsamplings: int, blocks: int) -> Iterator[tuple[str, str]]:
    """Yield the names of the decoder's tensors after its codebooks, in the file and stored."""
    yield from _with_bias("pre_conv", "pre_conv.conv")
    yield from _with_bias("tfm.in_proj", "pre_transformer.input_proj")
    yield from _with_bias("tfm.out_proj", "pre_transformer.output_proj")
    yield "tfm.output_norm.weight", "pre_transformer.norm.weight"
    for layer in range(layers):
        for name, stored in _WAV_LAYER.items():
            yield f"tfm.blk.{layer}.{name}", f"pre_transformer.layers.{layer}.{stored}"
    for block in range(upsamplings):
        for name, stored in _UPSAMPLING.items():
            yield from _with_bias(f"up.blk.{block}.{name}", f"upsample.{block}.{stored}")
        yield f"up.blk.{block}.gamma", f"upsample.{block}.1.gamma"
    yield from _with_bias("dac.entry", "decoder.0.conv")
    for block in range(blocks):
        name, stored = f"dac.blk.{block}", f"decoder.{block + 1}.block"
        yield f"{name}.snake", f"{stored}.0"
        yield from _with_bias(f"{name}.conv", f"{stored}.1.conv")
        for unit in range(3):
            for step in (1, 2):
                yield f"{name}.res.{unit}.act{step}", f"{stored}.{unit + 2}.act{step}"
                yield from _with_bias(f"{name}.res.{unit}.conv{step}", f"{stored}.{unit + 2}.conv{step}.conv")
    yield "dac.post_snake", "decoder.5"
    yield from _with_bias("dac.post_conv", "decoder.6.conv")


@dataclass
class _Decoder:
    """The stored tensors of the decoder of waveforms."""

    config: MmprojConfig

    def __post_init__(self) -> None:
        self.folder = self.config.path.parent / _TOKENIZER
        self.stored = part_tensors(self.folder)

    def get(self, name: str) -> Stored:
        """Return a tensor. Raises FormatError if it is missing."""
        if f"decoder.{name}" not in self.stored:
            raise FormatError(f"{self.folder}: tensor decoder.{name} is missing", "QK-E105")
        return Stored(self.stored[f"decoder.{name}"])

    def matrix(self, name: str) -> Expression:
        """Return a convolution of width 1 as a matrix."""
        x = self.get(name)
        return Shaped(x, x.shape[:-1]) if x.shape[-1:] == (1,) else x

    def codebook(self, quantizer: str, number: int) -> Expression:
        """Return a codebook. Raises FormatError if its parts do not match."""
        name = f"quantizer.{quantizer}.vq.layers.{number}._codebook."
        book = _Codebook(self.get(f"{name}embedding_sum"), self.get(f"{name}cluster_usage"))
        if len(book.shape) != 2 or book.counts.shape != book.shape[:1]:
            raise FormatError(f"{self.folder}: the tensors decoder.{name}* do not match in shape", "QK-E106")
        return book

    def tensors(self) -> Iterator[tuple[str, Expression]]:
        """Yield the tensors of the file, without the beginning of names."""
        for place, quantizer, count in (("first", "rvq_first", 1), ("rest", "rvq_rest", _CODEBOOKS)):
            for part in ("in", "out"):
                yield f"quant.{place}.{part}_proj.weight", self.matrix(f"quantizer.{quantizer}.{part}put_proj.weight")
            books = [self.codebook(quantizer, number) for number in range(count)]
            if any(book.shape != books[0].shape for book in books):
                raise FormatError(f"{self.folder}: the codebooks of {quantizer} differ in shape", "QK-E106")
            yield f"quant.{place}.codebook.weight", books[0] if count == 1 else stack(books)
        wav = self.config.model.with_values(self.config.model.table(_TOKENIZER))
        sizes = (self._length(wav, "upsampling_ratios"), self._length(wav, "upsample_rates"))
        for name, stored in _wav_names(wav.number("num_hidden_layers"), *sizes):
            if name.endswith(("snake", "act1", "act2")):
                yield f"{name}.alpha", _Snake(self.get(f"{stored}.alpha"), False)
                yield f"{name}.beta", _Snake(self.get(f"{stored}.beta"), True)
            else:
                yield name, self.get(stored)

    def _length(self, wav: Config, name: str) -> int:
        values = wav[name]
        if not isinstance(values, list):
            raise FormatError(f"{self.folder}: {name} is {short(values)}, not a list", "QK-E112")
        return len(values)


def _wav_tensors(config: MmprojConfig) -> Iterator[Tensor]:
    for name, x in _Decoder(config).tensors():
        yield Tensor(f"a.gen.wav.{name}", x, None, name_in_file=f"a.gen.wav.{name}")


_CODE_LAYER = {
    "input_layernorm": "ln1",
    r"self_attn\.([qkv])_proj": r"attn_\2",
    r"self_attn\.([qk])_norm": r"attn_\2_norm",
    r"self_attn\.o_proj": "attn_out",
    "post_attention_layernorm": "ln2",
    r"mlp\.(gate|up|down)_proj": r"ffn_\2",
}
_PREDICTOR = r"^talker\.code_predictor\."

MMPROJ = {
    "Qwen3TTSForConditionalGeneration": Mmproj(
        (
            constant(".has_audio_encoder", True, "flag"),
            projector("qwen3tts_spkenc", "clip.audio.projector_type"),
            Key(".audio.projection_dim", lambda config: config.text_width),
            constant(".audio.num_mel_bins", 128),
            constant(".audio.block_count", 3),
            constant(".audio.embedding_length", 1536),
            constant(".audio.attention.head_count", 1),
            constant(".audio.feed_forward_length", 1536),
            constant(".audio.attention.layer_norm_epsilon", 1e-5, "f32"),
            constant(".has_gen_audio_encoder", True, "flag"),
            projector("qwen3tts_gen", "clip.gen.audio.projector_type"),
            Key(".gen.audio.projection_dim", lambda config: config.text_width),
            Key(".gen.audio.embedding_length", _of_predictor("hidden_size")),
            Key(".gen.audio.feed_forward_length", _of_predictor("intermediate_size")),
            Key(".gen.audio.block_count", _of_predictor("num_hidden_layers")),
            Key(".gen.audio.attention.head_count", _of_predictor("num_attention_heads")),
            Key(".gen.audio.attention.head_count_kv", _of_predictor("num_key_value_heads")),
            Key(".gen.audio.attention.layer_norm_epsilon", _of_predictor("rms_norm_eps"), "f32"),
        ),
        tensors=r"^(speaker_encoder\.|talker\.code_predictor\.|talker\.model\.codec_embedding\.weight$)",
        rules=(
            ForceType(r"^a\.gen\.wav\.(pre_conv|dac\.entry|dac\.post_conv)\.weight$", TYPE_F16),
            ForceType(r"\.up\.blk\..*\.dwconv\.weight$|\.dac\.blk\..*\.conv[12]\.weight$", TYPE_F16),
            ForceType(r"\.(up|dac)\.blk\..*\.conv\.weight$", TYPE_F32),
            ForceType(_PREDICTOR + r"model\.layers\..*mlp\.down_proj\.weight$", TYPE_F32),
            NameInFile(r"^talker\.model\.codec_embedding\.weight$", "a.gen.code.out_embd.weight"),
            NameInFile(_PREDICTOR + r"model\.norm\.weight$", "a.gen.code.output_norm.weight"),
            NameInFile(_PREDICTOR + r"small_to_mtp_projection\.(weight|bias)$", r"a.gen.code.proj_in.\1"),
            StackNumbered(
                _PREDICTOR + r"model\.codec_embedding\.(\d+)\.weight$", "a.gen.code.embd.weight", lambda _: _CODEBOOKS
            ),
            StackNumbered(_PREDICTOR + r"lm_head\.(\d+)\.weight$", "a.gen.code.head.weight", lambda _: _CODEBOOKS),
            *(
                NameInFile(rf"{_PREDICTOR}model\.layers\.(\d+)\.{stored}\.weight$", rf"a.gen.code.blk.\1.{name}.weight")
                for stored, name in _CODE_LAYER.items()
            ),
            NameInFile(
                r"^speaker_encoder\.blocks\.(\d+)\.res2net_block\.blocks\.(\d+)\..*\.(\w+)$", r"a.blk.\1.res2.\2.\3"
            ),
        ),
        vision=False,
        audio=True,
        base=(),
        audio_config=lambda outer: outer.get("speaker_encoder_config"),
        read_config=_read_config,
        patch_config=_patch,
        synthetic=_wav_tensors,
        files=(f"{_TOKENIZER}/config.json",),
    ),
}
