"""The tasks that llama-perplexity selects, in its order: std::mt19937 with seed 1 (llama.cpp b11434 perplexity.cpp).

HellaSwag draws by std::uniform_int_distribution (libstdc++ 11 and newer: Lemire's method, arXiv 1805.10941), and always
shuffles; the others draw by a product in float32, and only if they use a part of the tasks.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

#: llama-perplexity's default of --hellaswag-tasks; the others use all tasks.
HELLASWAG_TASKS = 400


def select_tasks(kind: str, n: int, limit: int | None) -> list[int]:
    """Return the numbers of the tasks to use, of ``n``, in their order.

    Args:
        kind: a key of ``files.KINDS``; ``requests`` keep their order.
        limit: the number of tasks; 0: all; None: the default of llama-perplexity.
    """
    limit = (HELLASWAG_TASKS if kind == "hellaswag" else 0) if limit is None else limit
    count = min(n, limit or n)
    if kind == "hellaswag":
        return _uniform_order(n, count)
    if kind == "requests" or count == n:
        return list(range(count))
    return _scaled_order(n, count)


def _mt19937(seed: int = 1) -> Iterator[int]:
    """Yield the numbers of std::mt19937, 0 to 2^32 - 1: numpy's legacy generator has its seeding."""
    generator = np.random.RandomState(seed)
    while True:
        yield from generator.randint(0, 1 << 32, 1024, dtype=np.uint32).tolist()


def _uniform_order(n: int, count: int) -> list[int]:
    numbers, remaining = _mt19937(), list(range(n))
    return [remaining.pop(_uniform(numbers, len(remaining))) for _ in range(count)]


def _uniform(numbers: Iterator[int], n: int) -> int:
    """Return a number below n, without bias."""
    product = next(numbers) * n
    threshold = (1 << 32) % n
    while product & 0xFFFFFFFF < threshold:
        product = next(numbers) * n
    return product >> 32


def _scaled_order(n: int, count: int) -> list[int]:
    numbers, remaining, scale = _mt19937(), list(range(n)), np.float32(2.0**-32)
    order = []
    for _ in range(count):
        # A product that rounds up to the length is out of range in llama-perplexity.
        i = min(int(scale * np.float32(next(numbers)) * np.float32(len(remaining))), len(remaining) - 1)
        order.append(remaining[i])
        remaining[i] = remaining[-1]
        remaining.pop()
    return order
