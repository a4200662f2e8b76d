"""Checkpoints of other sizes: layers, widths, patches, images, experts, heads and tokens drawn at random.

A description is changed as a whole: the sizes in config.json and in the files of preprocessors, and the shapes of the
tensors that have them. Each part of a model (text, images, sound) has its own sizes. Real models differ in these;
no converter checks whether tensors fit one another, so what counts is that settings and shapes change together.
"""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from checkpoints import Description, Json, Shape, expand

#: Parts of a model, by names of tensors and of settings; all else is text.
_IMAGES = re.compile(
    r"vis|image|(^|\.)vit(\.|$)|sam_|qwen2_model|mm_projector|multi_modal|projector|siglip|mlp1|merger|aligner"
)
_SOUND = re.compile(r"audio|sound|speech|speaker|conformer|whisper|mimi|(^|\.)encoder\.|acoustic")
_WIDTH = re.compile(r"(^|_)(dim|size|width|rank|d_model|channels)(_|$)|^d_model$")
_NO_WIDTH = re.compile(
    r"vocab|image|patch|kernel|window|block|chunk|group|context|position|merge|ngram|conv|sample|input_feat|in_chan"
    r"|num_chan|audio_chan|_id|pooling|posemb|sparse_block"
)
_FEED_FORWARD = re.compile(r"intermediate|ffn_dim|inter_dim|ff_dim")
#: Tensors of feed-forward layers.
_FEED_FORWARD_TENSOR = re.compile(
    r"\.(mlp|ffn|feed_forward|fc[0-3]|w[123]|gate_proj|up_proj|down_proj|linear_fc[12]|dense_h_to_4h|dense_4h_to_h|c_fc|c_proj"
    r"|linear[12]|intermediate|output_query|lin[12])\b"
)
_LAYERS = re.compile(r"^(?!num_hash|num_nextn)(\w*_)?(layers|depth)$")
#: The beginning of names of layers.
_STACK = re.compile(r"(?<!mtp\.)\b(layers?|blocks|resblocks)\.$")
_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
_PATCH = ("patch_size", "spatial_patch_size", "vision_patch_size")
#: Tensors whose rows or planes count positions, codes or filters.
_TABLE = re.compile(
    r"pos_emb|position|query|pos_embed|probe|boi|eoi|cls_token|class_embedding|codebook|speech_embeddings"
)
#: A multiple of 16 in a table is one of these for 16.
_UNITS = (4, 8, 12, 20, 24, 32, 40, 48, 72)
_FEED_FORWARDS = (16, 40, 72, 88, 104, 160, 200, 269, 320)


def part_of(name: str) -> str:
    """Return the part of a model that a tensor or a setting (a path with dots) belongs to."""
    return "sound" if _SOUND.search(name) else "images" if _IMAGES.search(name) else "text"


def resize(description: Description, seed: int) -> Description:
    """Return a checkpoint of the same class with other sizes, which depend on the seed alone."""
    rng = random.Random(seed)
    model = _Sizes(description)
    changes: list[tuple[Callable[[random.Random], None], float]] = [
        (model.change_widths, 0.8 if description.quantized is None else 0.0),
        (model.add_layers, 0.8),
        (model.change_patches, 0.5),
        (model.change_images, 0.4),
        (model.change_experts, 0.5),
        (model.add_tokens, 0.4),
    ]
    for change, share in changes:
        # Drawn in any case, so that a draft model and its target get the same sizes.
        generator = random.Random(rng.random())
        if rng.random() < share:
            change(generator)
    generator = random.Random(rng.random())
    plain = description.quantized is None
    return replace(
        description,
        config=model.config,
        files=model.files,
        tensors={name: list(shape) for name, shape in model.tensors.items()},
        parts={
            file: tensors if file.endswith(".pt") else {n: list(s) for n, s in model.parts[file].items()}
            for file, tensors in description.parts.items()
        },
        dtype=generator.choice(("bfloat16", "bfloat16", "float16", "float32")) if plain else description.dtype,
        shards=generator.randint(1, 4),
    )


class _Sizes:
    """Settings and shapes of a checkpoint, while they are changed."""

    def __init__(self, description: Description) -> None:
        self.config: Json = copy.deepcopy(description.config)
        self.files: Json = copy.deepcopy(description.files)
        self.tensors: dict[str, Shape] = dict(expand(description.tensors))
        self.parts = {f: dict(expand(x)) for f, x in description.parts.items() if not f.endswith(".pt")}
        self.vocabulary = {value for _, key, value, _ in _numbers(self.config) if "vocab" in key}

    def _settings(self, part: str | None = None) -> Iterator[tuple[Json, str, int]]:
        for container, key, value, path in _numbers(self.config):
            if part is None or part_of(path) == part:
                yield container, key, value

    def _change_shapes(self, part: str | None, change: Callable[[str, Shape], Shape]) -> None:
        for tensors in (self.tensors, *self.parts.values()):
            for name, shape in tensors.items():
                if part is None or part_of(name) == part:
                    tensors[name] = change(name, shape)

    def change_widths(self, rng: random.Random) -> None:
        """Change the widths of each part: one unit, and that of feed-forward layers."""
        for part in ("text", "images", "sound"):
            unit, feed_forward = rng.choice(_UNITS), rng.choice(_FEED_FORWARDS)
            before = {value for _, key, value in self._settings(part) if _FEED_FORWARD.search(key) and value % 16 == 0}
            only = before if rng.random() < 0.7 else set()
            for container, key, value in self._settings(part):
                if _FEED_FORWARD.search(key) and value in only:
                    container[key] = value // 32 * feed_forward
                elif _WIDTH.search(key) and not _NO_WIDTH.search(key):
                    container[key] = _scaled(value, unit)
            self._change_shapes(part, partial(self._widened, unit=unit, feed_forward=feed_forward, before=only))

    def _widened(self, name: str, shape: Shape, unit: int, feed_forward: int, before: set[int]) -> Shape:
        if "featurizer" in name:
            return shape
        is_feed_forward = bool(_FEED_FORWARD_TENSOR.search(name)) and "experts" not in name
        first = len(shape) - 1 if _TABLE.search(name) else 0
        last = 2 if len(shape) > 2 and not _TABLE.search(name) and "experts" not in name else len(shape)
        out = list(shape)
        for i in range(first, last):
            if shape[i] in self.vocabulary:
                continue
            if is_feed_forward and shape[i] in before:
                out[i] = shape[i] // 32 * feed_forward
            else:
                out[i] = _scaled(shape[i], unit)
        return tuple(out)

    def add_layers(self, rng: random.Random) -> None:
        """Add layers to each part, copies of its last."""
        for part in ("text", "images", "sound"):
            n = rng.randint(1, 3)
            counts = {value for _, key, value in self._settings(part) if _LAYERS.search(key)}
            stacks = {
                prefix: 1 + max(int(m[2]) for m in map(_layer, self.tensors) if m and m[1] == prefix)
                for prefix in {m[1] for m in map(_layer, self.tensors) if m and part_of(m[1]) == part}
                if _STACK.search(prefix)
            }
            for count in sorted(counts & set(stacks.values())):
                for container, key, value, path in list(_numbers(self.config)):
                    if part_of(path) == part and _LAYERS.search(key) and value == count:
                        container[key] = count + n
                        _lengthen(container, count, n)
                for prefix in (prefix for prefix, layers in stacks.items() if layers == count):
                    last = f"{prefix}{count - 1}."
                    for name in [name for name in self.tensors if name.startswith(last)]:
                        for i in range(count, count + n):
                            self.tensors[f"{prefix}{i}.{name.removeprefix(last)}"] = self.tensors[name]
        self.tensors = dict(expand({name: list(shape) for name, shape in self.tensors.items()}))

    def change_patches(self, rng: random.Random) -> None:
        """Change the side of patches, of an image of as many."""
        numbers = [*_numbers(self.config), *_numbers(self.files)]
        sides = {value for _, key, value, _ in numbers if key in _PATCH}
        if len(sides) != 1:
            return
        (before,) = sides
        side = rng.choice([n for n in (2, 4, 6, 7, 8, 14, 16) if n != before])
        for container, key, value, _ in numbers:
            if key in _PATCH:
                container[key] = side
            elif key in ("image_size", "force_image_size", "max_image_size") and value % before == 0:
                container[key] = value // before * side

        def planes(name: str, shape: Shape) -> Shape:
            if part_of(name) != "images":
                return shape
            if len(shape) >= 4 and shape[-2:] == (before, before):
                return (*shape[:-2], side, side)
            if "patch" in name and len(shape) == 2 and shape[1] % (3 * before**2) == 0:
                return shape[0], shape[1] // before**2 * side**2
            return shape

        self._change_shapes(None, planes)

    def change_images(self, rng: random.Random) -> None:
        """Change the side of images, and the rows of tables of positions."""
        factor = rng.choice((2, 3))
        sides = {value for _, key, value, _ in _numbers(self.config) if key in ("image_size", "force_image_size")}
        patches = {value for _, key, value, _ in _numbers(self.config) if key in _PATCH}
        if len(sides) != 1 or len(patches) != 1:
            return
        n = (sides.pop() // patches.pop()) ** 2
        for container, key, value, _ in _numbers(self.config):
            if key in ("image_size", "force_image_size"):
                container[key] = value * factor

        def rows(name: str, shape: Shape) -> Shape:
            if not re.search("pos_emb|position|pos_embed", name):
                return shape
            return (*(size + n * (factor**2 - 1) if size in (n, n + 1) else size for size in shape[:-1]), shape[-1])

        self._change_shapes("images", rows)

    def change_experts(self, rng: random.Random) -> None:
        """Change the number of experts."""
        counts = {value for _, key, value, _ in _numbers(self.config) if key in _EXPERTS}
        if len(counts) != 1:
            return
        (before,) = counts
        n = rng.choice((3, 5, 6, 8))
        for container, key, _, _ in _numbers(self.config):
            if key in _EXPERTS:
                container[key] = n
        for name in list(self.tensors):
            if match := re.fullmatch(r"(.*experts\.)(\d+)(\..*)", name):
                if int(match[2]) >= n:
                    del self.tensors[name]
                elif int(match[2]) == before - 1:
                    for i in range(before, n):
                        self.tensors[f"{match[1]}{i}{match[3]}"] = self.tensors[name]
        pattern = re.compile(
            r"experts\.(gate_up|down|up|gate)|router|\.gate\.(weight|bias|e_score)|e_score|expert_bias"
        )

        def rows(name: str, shape: Shape) -> Shape:
            return (n, *shape[1:]) if pattern.search(name) and shape and shape[0] == before else shape

        self._change_shapes("text", rows)
        self.tensors = dict(expand({name: list(shape) for name, shape in self.tensors.items()}))

    def add_tokens(self, rng: random.Random) -> None:
        """Add rows to the embedding, beyond the tokens of the vocabulary."""
        n = rng.choice((1, 7, 32, 63))
        numbers = [(c, key, value) for c, key, value, _ in _numbers(self.config) if key == "vocab_size"]
        sizes = {value for _, _, value in numbers if value >= 512}
        if len(sizes) != 1 or any("d2t" in name for name in self.tensors):
            return
        (before,) = sizes
        for container, key, value in numbers:
            if value == before:
                container[key] = before + n
        self._change_shapes(None, lambda _, shape: tuple(before + n if size == before else size for size in shape))


def _scaled(size: int, unit: int) -> int:
    return size // 16 * unit if size and size % 16 == 0 else size


def _layer(name: str) -> re.Match[str] | None:
    return re.match(r"(.*?\.)(\d+)\.", name)


def _lengthen(container: Json, count: int, n: int) -> None:
    """Let settings of each layer have as many more."""
    for key, value in container.items():
        if isinstance(value, list) and len(value) == count and (isinstance(value[0], str) or key.startswith("layer")):
            container[key] = value + [value[-1]] * n


def _numbers(tree: Any, path: str = "") -> Iterator[tuple[Json, str, int, str]]:
    """Yield the numbers of settings: container, key, value, and the path with dots."""
    for key, value in list(tree.items()):
        where = f"{path}.{key}".removeprefix(".")
        if isinstance(value, dict):
            yield from _numbers(value, where)
        elif isinstance(value, int) and not isinstance(value, bool):
            yield tree, key, value, where
