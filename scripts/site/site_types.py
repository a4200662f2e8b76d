"""Pages of tensor types and presets: tables of quantkit/types.py, quantkit/pipeline/presets.py and quality.py."""

from __future__ import annotations

from collections.abc import Iterable

from quantkit.cli._paths import preset_use
from quantkit.kernels.formats import has_decoder, has_encoder
from quantkit.kernels.tensor_scale import decoded_as
from quantkit.pipeline.presets import PRESET_ALIASES, PRESETS, Preset
from quantkit.pipeline.quality import QUALITY, SPEEDS
from quantkit.types import TYPES, TensorType

RUNTIMES = {"both": "llama.cpp, ik_llama.cpp", "mainline": "llama.cpp", "ik": "ik_llama.cpp", "none": "neither"}

_TYPES_HEAD = f"""\
# Tensor types

The {len(TYPES)} types of llama.cpp and ik_llama.cpp. `quantkit types` prints this table, `--json` all fields.

![Error of tensor types against bits per weight](../types.svg)

* **bpw**: bits per weight, without the scale at the head of a row.
* **error**: relative error of the weights in percent, weighted by importance, on a fixed sample, encoded with an
  importance matrix. Compare it between types; it does not predict the quality of a model.
* **encoding**: fast is above {SPEEDS["fast"]} million weights a second on one core, slow below {SPEEDS["medium"]}.
* **imatrix**: what the encoder does with an importance matrix.
* **quantkit**: *full* encodes and decodes.
"""
_PRESETS_HEAD = """\
# Presets

A preset is a TYPE of `quantkit quantize` that gives tensors different types by the rules of llama-quantize, as `Q4_K_M`
does. TYPE may also be any [tensor type](types.md), which every matrix then gets, or the number. Presets of both
programs follow llama.cpp's rules; `--rules ik` applies ik_llama.cpp's. `quantkit types --presets` prints this table,
and `quantkit quantize --dry-run` the type of every tensor with the reason.

![Rise of perplexity at every preset against bits per weight](../presets.svg)

"""


def _table(header: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    names = list(header)
    lines = [names, ["---"] * len(names), *([str(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def _type_row(t: TensorType) -> tuple[object, ...]:
    quality = QUALITY.get(t.name)
    support = "full" if has_encoder(t) else "decodes" if has_decoder(decoded_as(t)) else "-"
    error = f"{quality.error:.3g}" if quality else ""
    speed = quality.speed if quality else ""
    return f"`{t.name}`", t.id, f"{t.bpw:g}", t.block, error, speed, t.imatrix, RUNTIMES[t.trees], support


def types_page() -> str:
    """Return the page of tensor types."""
    header = ("type", "id", "bpw", "block", "error, %", "encoding", "imatrix", "loaded by", "quantkit")
    plain, interleaved = ([t for t in TYPES if (t.interleave > 1) is weave] for weave in (False, True))
    parts = [_TYPES_HEAD, _table(header, map(_type_row, plain)), "## Interleaved types\n"]
    parts.append("Rows of 4, 8 or 16 stored together, for ik_llama.cpp on CPUs (and old ARM builds of llama.cpp);")
    parts.append("`quantize --repack` and `--unrepack` change between these and plain types.\n")
    parts.append(_table(header, map(_type_row, interleaved)))
    return "\n".join(parts)


def _preset_row(p: Preset) -> tuple[object, ...]:
    base = f"`{p.base}`" if p.base else ""
    return f"`{p.name}`", p.ftype, base, RUNTIMES[p.trees], preset_use(p) or "-", p.description


def presets_page() -> str:
    """Return the page of presets and their aliases."""
    header = ("preset", "number", "base type", "of", "use", "in short")
    aliases = "; ".join(f"`{alias}` is `{name}`" for alias, name in PRESET_ALIASES.items())
    return f"{_PRESETS_HEAD}{_table(header, map(_preset_row, PRESETS))}\nAs in llama-quantize {aliases}.\n"
