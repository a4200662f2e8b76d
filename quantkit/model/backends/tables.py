"""Tables of whole numbers that operations look up: read from the file, and checked before kernels trust them."""

from __future__ import annotations

from quantkit.errors import FormatError
from quantkit.formats.gguf import GGUFFile
from quantkit.model.batch import Ints
from quantkit.model.ops import Lookup


def table_of(source: GGUFFile, op: Lookup) -> Ints:
    """Return the table of an operation, int32 [n_vocab, width].

    Raises FormatError unless its numbers run from 0 to n - 1.
    """
    tensor = op.weight.tensor
    table = source.data(tensor).view("<i4").reshape(-1, op.weight.n_in)
    if table.size and not (table.min() >= 0 and table.max() < op.n):
        raise FormatError(
            f"{tensor.name}: its numbers run from {table.min()} to {table.max()}, not from 0 to {op.n - 1}"
        )
    return table
