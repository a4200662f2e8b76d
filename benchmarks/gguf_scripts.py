"""Prune experts and stitch files as scripts over gguf-py do: read, select, write. Peers of benchmarks/bench_files.py.

    benchmarks/gguf_scripts.py prune IN.gguf OUT.gguf COUNT
    benchmarks/gguf_scripts.py stitch BASE.gguf DONOR.gguf REGEX OUT.gguf

``prune`` keeps the first COUNT experts of every layer of a model with one number of experts. ``stitch`` takes the
tensors that match from DONOR, all others and the metadata from BASE. Tensors are mapped and never decoded.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from typing import Any

from gguf import GGUFReader, GGUFValueType, GGUFWriter, ReaderTensor


def write(
    base: GGUFReader, out: str, select: Callable[[ReaderTensor], tuple[ReaderTensor, Any]], values: Mapping[str, Any]
) -> None:
    """Write a file with the metadata of ``base``, but ``values``, and the selected type and data of each tensor."""
    architecture = base.fields["general.architecture"].contents()
    writer = GGUFWriter(out, architecture)
    for key, field in base.fields.items():
        if key == "general.architecture" or key.startswith("GGUF."):
            continue
        item_type = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
        writer.add_key_value(key, values.get(key, field.contents()), field.types[0], item_type)
    parts = [(tensor.name, *select(tensor)) for tensor in base.tensors]
    for name, tensor, data in parts:
        writer.add_tensor_info(name, data.shape, data.dtype, data.nbytes, tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for _, _, data in parts:
        writer.write_tensor_data(data)
    writer.close()


def prune(source: str, out: str, count: int) -> None:
    base = GGUFReader(source)
    key = f"{base.fields['general.architecture'].contents()}.expert_count"

    def select(tensor: ReaderTensor) -> tuple[ReaderTensor, Any]:
        # The experts are the last dimension of ggml, the first of numpy, for the router, too.
        is_expert = "_exps." in tensor.name or ".ffn_gate_inp." in tensor.name
        return tensor, tensor.data[:count] if is_expert else tensor.data

    write(base, out, select, {key: count})


def stitch(source: str, donor: str, pattern: str, out: str) -> None:
    tensors = {tensor.name: tensor for tensor in GGUFReader(donor).tensors}

    def select(tensor: ReaderTensor) -> tuple[ReaderTensor, Any]:
        tensor = tensors[tensor.name] if re.search(pattern, tensor.name) else tensor
        return tensor, tensor.data

    write(GGUFReader(source), out, select, {})


def main() -> None:
    match sys.argv[1:]:
        case ["prune", source, out, count]:
            prune(source, out, int(count))
        case ["stitch", source, donor, pattern, out]:
            stitch(source, donor, pattern, out)
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main()
