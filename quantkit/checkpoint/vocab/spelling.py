"""How byte-level BPE spells bytes: each as a letter that can be printed (GPT-2)."""

from __future__ import annotations

_PLAIN = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
_OTHERS = [byte for byte in range(256) if byte not in _PLAIN]
_LETTERS = {byte: chr(byte) for byte in _PLAIN} | {byte: chr(256 + i) for i, byte in enumerate(_OTHERS)}


def spelled(token: bytes) -> str:
    """Return bytes as byte-level BPE spells them."""
    return token.decode("latin-1").translate(_LETTERS)
