"""Which file of a repository ``-hf`` takes: quantkit.formats.hub, without a server."""

from __future__ import annotations

import pytest

from quantkit.formats.hub import _of_type, _shards
from quantkit.formats.remote.url import URL

NAMES = ["Tiny-IQ4_XS.gguf", "Tiny-Q4_K_M.gguf", "tiny.q8_0.gguf", "UD-Q2_K_XL.gguf"]


@pytest.mark.parametrize(
    ("type_name", "name"),
    [
        ("Q4_K_M", "Tiny-Q4_K_M.gguf"),
        ("q4_k_m", "Tiny-Q4_K_M.gguf"),
        ("Q8_0", "tiny.q8_0.gguf"),
        ("Q4_K", None),
        ("Q2_K", None),
    ],
)
def test_a_type_is_a_whole_word(type_name: str, name: str | None) -> None:
    assert _of_type(NAMES, type_name) == name


def test_all_shards_of_a_file_in_order() -> None:
    place = URL("hf://org/model/BF16")
    names = [f"a-0000{i}-of-00003.gguf" for i in (3, 1, 2)] + ["b-00001-of-00003.gguf", "a.gguf"]
    assert [url.name for url in _shards(place, names[0], names)] == sorted(names[:3])
    assert [url.name for url in _shards(place, "a.gguf", names)] == ["a.gguf"]
