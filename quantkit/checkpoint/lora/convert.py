"""Convert an adapter to a GGUF file, as convert_lora_to_gguf.py (llama.cpp b11434) does.

Names and transformations of factors follow from the rules of the base's architecture. The runtime multiplies by alpha /
rank, the rank being that of the tensor, so a file has one alpha for all. If PEFT's scales differ from those of that
program, which only reads lora_alpha, the file has PEFT's:

* rsLoRA divides by the root of the rank: alpha is lora_alpha times that root.
* with rank_pattern or alpha_pattern the scales of weights differ: alpha is lora_alpha (with rsLoRA times the root of
  r), and the ratio of a weight's own scale is multiplied into its B.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

from quantkit.checkpoint.checkpoint import Checkpoint, converted_tensors
from quantkit.checkpoint.config import Config
from quantkit.checkpoint.expressions import Transposed
from quantkit.checkpoint.general import ParameterCount, read_general
from quantkit.checkpoint.keys import Keys
from quantkit.checkpoint.lora.low_rank import LowRank, factors_of, products_in
from quantkit.checkpoint.lora.merge import check_copies, check_shape, copy_notes, left_tensors, part_weights
from quantkit.checkpoint.lora.parts import TextPart
from quantkit.checkpoint.lora.peft import CONFIG, Adapter, read_adapter
from quantkit.checkpoint.nextn import WITH
from quantkit.checkpoint.open import blame_config, stored_tensors
from quantkit.checkpoint.policy import find_outtype
from quantkit.checkpoint.quantized import decode_tensors
from quantkit.checkpoint.registry import find_architecture, read_model
from quantkit.checkpoint.row import Architecture
from quantkit.checkpoint.rules import is_tied
from quantkit.checkpoint.tensor_names import TensorNames
from quantkit.checkpoint.tensors import Context, Tensor, named_tensors
from quantkit.errors import FormatError
from quantkit.formats.gguf.rules import short
from quantkit.formats.safetensors import read_checkpoint


def open_adapter(folder: Path, *, base: Path | None = None, outtype: str = "f32") -> Checkpoint:
    """Open a PEFT adapter.

    Args:
        folder: with adapter_config.json and adapter_model.safetensors.
        base: the checkpoint it belongs to, of which config.json is enough; None for the directory it names.
        outtype: f32, f16, bf16, q8_0, or auto: that of its first matrix.

    Raises:
        FormatError: a file is damaged or missing, or the adapter belongs to another base or cannot be expressed as
            factors.
        TypeNotSupported: an architecture that is not converted.
    """
    adapter = read_adapter(folder)
    _check_kind(adapter)
    base = adapter.base() if base is None else base
    with blame_config(base):
        return _open(base, adapter, outtype)


def _check_kind(adapter: Adapter) -> None:
    """Refuse adapters with more than factors."""
    problem = ""
    if adapter.magnitudes:
        problem = "holds the lengths of rows (DoRA)"
    elif adapter.replacements:
        problem = "replaces a tensor of the base (modules_to_save, added tokens, biases or norms)"
    if problem:
        t = next(iter((adapter.magnitudes or adapter.replacements).values()))
        raise adapter.fail(
            t.name,
            f"{problem}, which GGUF adapters cannot express: merge the adapter (quantkit convert CHECKPOINT "
            f"OUT.gguf --merge-lora {adapter.path})",
        )


def _open(base: Path, adapter: Adapter, outtype: str) -> Checkpoint:
    config = read_model(base)
    row = find_architecture(config)
    row.patch_config(config)
    row.inspect_tensors(config, set(adapter.weights))
    context = Context(config, TensorNames(row.arch, row.layers(config)))
    part = TextPart(row, context)
    weights = part_weights(adapter, part)
    if not weights:
        raise adapter.fail(
            next(iter(adapter.weights)), "it and all others belong to the encoders, which llama.cpp does not adapt"
        )
    notes = _check(adapter, weights, base, row, context)
    alpha = adapter.one_alpha
    output_type = find_outtype(outtype, (x for _, product in weights.values() for x in (product.a, product.b)))
    products = named_tensors({text: product for text, (_, product) in weights.items()}, row.rules, context)
    factors = list(_factors(products, adapter, weights, alpha, context))
    tensors = converted_tensors(factors, context.names, output_type, outtype == "q8_0", False)
    keys = Keys(row.arch, adapter.path / CONFIG)
    keys.text("general.type", "adapter")
    keys.text("adapter.type", "lora")
    general = read_general(adapter.path, ParameterCount.from_adapter(_count_changed_weights(factors)))
    general.write(keys)
    keys.f32("adapter.lora.alpha", alpha)
    if (tokens := adapter.config.get("alora_invocation_tokens")) is not None:
        if not isinstance(tokens, list) or not all(type(token) is int and 0 <= token < 1 << 31 for token in tokens):
            raise FormatError(
                f"{adapter.path / CONFIG}: alora_invocation_tokens is {short(tokens)}, not a list of tokens", "QK-E117"
            )
        if tokens:
            keys.counts("adapter.alora.invocation_tokens", tokens)
    keys.u32("general.quantization_version", 2)
    files = [*adapter.files, config.path, *sorted(base.glob("model*.safetensors*"))]
    files += [card] if (card := adapter.path / "README.md").is_file() else []
    opened = Checkpoint(adapter.path, tuple(files), keys.fields, tensors, output_type, adapter.digest())
    opened.general, opened.kind = general, "lora"
    opened.notes = (*notes, *copy_notes(adapter), *_encoder_notes(adapter, part))
    return opened


def _encoder_notes(adapter: Adapter, part: TextPart) -> list[str]:
    """Return a note on tensors that the file lacks, because no runtime adapts encoders."""
    if not (left := left_tensors(adapter, part)):
        return []
    return [
        f"{adapter.path}: {len(left)} tensors belong to the encoders, which llama.cpp does not adapt, and are left "
        f"out: {', '.join(map(short, left[:2]))}; quantkit convert --mmproj --merge-lora merges them"
    ]


def _factors(
    product_tensors: Iterator[tuple[str, Tensor]],
    adapter: Adapter,
    weights: dict[str, tuple[str, LowRank]],
    alpha: float,
    context: Context,
) -> Iterator[tuple[str, Tensor]]:
    """Yield A and B of each tensor of the file. Raises FormatError for a product that no tensor uses."""
    used: set[int] = set()
    for name, tensor in product_tensors:
        used.update(id(item) for item in products_in(tensor.x))
        try:
            a, b = factors_of(tensor.x, alpha)
        except ValueError as e:
            raise context.fail(tensor, str(e)) from None
        if name == "token_embd.weight":  # rows of it are taken, not products with it: see llm_graph_context
            a, b = b, Transposed(a)
        for end, x in (("a", a), ("b", b)):
            yield f"{name}.lora_{end}", Tensor(tensor.name, x, tensor.layer)
    unused = next((name for name, product in weights.values() if id(product) not in used), None)
    if unused is not None:
        raise adapter.fail(unused, "converted models of this architecture have no such tensor, so it would be lost")


def _count_changed_weights(factors: list[tuple[str, Tensor]]) -> int:
    """Count the weights that the adapter changes, as gguf_writer.py does."""
    shapes = [tensor.x.shape for _, tensor in factors]
    return sum(math.prod(b[:-1]) * a[-1] for a, b in zip(shapes[::2], shapes[1::2], strict=True))


# --- the base --------------------------------------------------------------------------------------------------------


def _check(
    adapter: Adapter, weights: dict[str, tuple[str, LowRank]], base: Path, row: Architecture, context: Context
) -> list[str]:
    """Refuse shapes that differ from the base's, and tensors that llama.cpp cannot adapt; return notes."""
    config = context.config
    if is_tied(config):
        for name, _ in weights.values():
            if name.endswith(("embed_tokens.weight", "lm_head.weight")):
                raise adapter.fail(
                    name,
                    "the embeddings are also the output matrix (tie_word_embeddings), which llama.cpp stores as one "
                    "tensor without adapter support: merge the adapter (quantkit convert --merge-lora)",
                )
    shapes, notes = _shapes(base, row, context)
    for text, (name, product) in weights.items():
        if shapes:
            check_shape(adapter, name, product, shapes.get(text), base)
        elif wrong := _shape_mismatch(config, text, product.shape):
            raise adapter.fail(name, f"B @ A is {list(product.shape)}, but {config.path} {wrong}")
    check_copies(adapter, shapes or dict(_embedding_shapes(config)), TextPart(row, context))
    return notes


def _shapes(base: Path, row: Architecture, context: Context) -> tuple[dict[str, tuple[int, ...]], list[str]]:
    """Return the shapes of the base's weights, {} if they are missing, and notes."""
    if not any(base.glob("model*.safetensors")):
        return {}, []
    try:
        stored = stored_tensors(read_checkpoint(base), row, context, WITH)
        weights = decode_tensors(stored, context.config)
    except FormatError as e:
        return {}, [f"shapes are checked against config.json only: {e.message}"]
    return {name: x.shape for name, x in {**weights.first, **weights.tensors}.items()}, []


def _embedding_shapes(config: Config) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the shapes of embeddings in a configuration."""
    width, tokens = config.find("hidden_size", "n_embd"), config.get("vocab_size")
    if isinstance(width, int) and isinstance(tokens, int):
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            yield name, (tokens, width)


#: Projections whose inputs, or outputs, are as wide as the model in every architecture that has them.
_FROM_WIDTH = (
    "q_proj",
    "k_proj",
    "v_proj",
    "qkv_proj",
    "gate_proj",
    "up_proj",
    "gate_up_proj",
    "up_gate_proj",
    "query_key_value",
    "q_a_proj",
    "kv_a_proj_with_mqa",
    "w1",
    "w3",
    "embed_tokens",
    "lm_head",
)
_TO_WIDTH = ("o_proj", "down_proj", "w2")


def _shape_mismatch(config: Config, text: str, shape: tuple[int, ...]) -> str:
    """Describe the mismatch between a weight's shape and a configuration; "" if there is none."""
    width = config.find("hidden_size", "n_embd")
    last = text.removesuffix(".weight").rpartition(".")[2]
    if not isinstance(width, int):
        return ""
    if (last in _FROM_WIDTH and shape[1] != width) or (last in _TO_WIDTH and shape[0] != width):
        return f"has a width of {width} (hidden_size)"
    expected = dict(_embedding_shapes(config))
    if text in expected and expected[text] != shape:
        return f"has {expected[text][0]} tokens (vocab_size)"
    heads, head_dim = config.find("num_key_value_heads", "n_kv_heads"), config.get("head_dim")
    is_plain_attention = isinstance(heads, int) and isinstance(head_dim, int) and config.get("global_head_dim") is None
    if is_plain_attention and last in ("k_proj", "v_proj") and ".self_attn." in text and shape[0] != heads * head_dim:
        return f"has {heads} heads of {head_dim} for keys and values"
    return ""
