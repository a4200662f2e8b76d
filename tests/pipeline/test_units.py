from __future__ import annotations

import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantkit.pipeline.ledger import crc32_combine
from quantkit.units import format_count, format_seconds, format_size, parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [("0", 0), ("48G", 48 * 10**9), ("512MiB", 512 << 20), ("1.5k", 1500), (" 2 gb ", 2 * 10**9), ("1TiB", 1 << 40)],
)
def test_sizes_are_read(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "G", "-1", "1X", "1e9", "12 12"])
def test_an_invalid_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size"):
        parse_size(text)


def test_numbers_are_formatted_with_units() -> None:
    assert format_size(18526240) == "17.67 MiB"
    assert format_size(12) == "12 B"
    assert format_size(5 << 40) == "5.00 TiB"
    assert format_count(9_190_000) == "9.19 M"
    assert format_count(12) == "12"
    assert [format_seconds(s) for s in (3.21, 245, 7380)] == ["3.2 s", "4 min 05 s", "2 h 03 min"]


@given(st.binary(max_size=300), st.binary(max_size=300))
def test_crcs_combine(a: bytes, b: bytes) -> None:
    assert crc32_combine(zlib.crc32(a), zlib.crc32(b), len(b)) == zlib.crc32(a + b)
