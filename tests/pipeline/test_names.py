"""Names in sentences: many become one part of it, and notes that differ in numbers alone one line."""

from __future__ import annotations

from quantkit.names import group_notes, printable, span

LAYERS = [f"blk.{i}.attn_v.weight" for i in range(30)]


def test_many_names_are_abbreviated_with_a_count() -> None:
    assert span(LAYERS[:1]) == LAYERS[0]
    assert span(LAYERS) == "blk.0.attn_v.weight .. blk.29.attn_v.weight (30 tensors)"
    assert span(["a", "b"], "files") == "a .. b (2 files)"


def test_notes_with_different_numbers_are_one_line() -> None:
    notes = [(name, f"uses that of blk.{i}.attn_k.weight, {i % 4 + 3} of 128 experts") for i, name in enumerate(LAYERS)]
    (line,) = group_notes([*notes])
    assert line == f"{span(LAYERS)}: uses that of blk.0..29.attn_k.weight, 3..6 of 128 experts"
    assert group_notes([("a", "x"), ("b", "y 1"), ("c", "x")]) == ["a .. c (2 tensors): x", "b: y 1"]


def test_a_name_is_counted_once() -> None:
    assert group_notes([("a", "saw 1 token"), ("a", "saw 2 token")]) == ["a: saw 1..2 token"]


def test_long_numbers_are_text() -> None:
    long = "9" * 5000
    assert group_notes([("a", f"entry {long}"), ("b", f"entry {long}")]) == [f"a .. b (2 tensors): entry {long}"]
    assert group_notes([("a", "00001-of-00002")]) == ["a: 00001-of-00002"]


def test_control_characters_are_escaped() -> None:
    text = "a\rb\x07\x1b[31m\n\u202e\u2028\x85\udcff é"
    assert printable(text) == r"a\rb\x07\x1b[31m\n\u202e\u2028\x85\udcff é"
