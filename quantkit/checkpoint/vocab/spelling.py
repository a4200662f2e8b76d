"""How byte-level BPE spells bytes: each as a letter that can be printed (GPT-2)."""

from __future__ import annotations

_PLAIN = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
_OTHERS = [byte for byte in range(256) if byte not in _PLAIN]
_LETTERS = {byte: chr(byte) for byte in _PLAIN} | {byte: chr(256 + i) for i, byte in enumerate(_OTHERS)}
_BYTES = {letter: byte for byte, letter in _LETTERS.items()}


def spelled(token: bytes) -> str:
    """Return bytes as byte-level BPE spells them."""
    return token.decode("latin-1").translate(_LETTERS)


def letters(text: str) -> bytes:
    """Return the bytes that byte-level BPE spells so. Raises ValueError for what it does not spell."""
    try:
        return bytes(_BYTES[letter] for letter in text)
    except KeyError as e:
        raise ValueError(f"{text!r} is no token of byte-level BPE") from e
