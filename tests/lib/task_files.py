"""Small files of multiple-choice tasks in the formats of llama-perplexity, drawn from a few sentences."""

from __future__ import annotations

import json
import struct

import numpy as np

_PEOPLE = ("Sarah", "Maria", "the old man", "Tom", "a girl", "the teacher")
_PLACES = ("in the garden", "at the market", "on a boat", "near the house", "in the kitchen", "under a tree")
_ENDINGS = (
    "opens the door and walks into the room.",
    "puts the bread on the table, then cuts it.",
    "throws the ball to the dog.",
    "sings a song about the rain!",
    "reads a book until it is dark.",
    "is",
    "looks at the sky; it is going to rain, so they go home before the others.",
)
_THINGS = ("cup", "box", "letter", "horse", "piano", "stone")


def hellaswag(n: int, seed: int = 0) -> bytes:
    rng, lines = np.random.default_rng(seed), list[str]()
    for i in range(n):
        person, place = rng.choice(_PEOPLE), rng.choice(_PLACES)
        endings = rng.choice(_ENDINGS, 4, replace=False)
        lines += [f"Task {i}: One morning {person} sits {place}. Then {person}", str(rng.integers(4)), *endings]
    return "\n".join(lines).encode() + b"\n"


def winogrande(n: int, seed: int = 0) -> bytes:
    """Return CSV: some sentences quoted, some with the blank near the end, one line that is no task."""
    rng, lines = np.random.default_rng(seed), list[str]()
    for i in range(n):
        a, b = rng.choice(_THINGS, 2, replace=False)
        sentence = (
            f'"The {a}, which was old, did not fit into the {b} because the _ was too large for it."',
            f"I carried the {a} and left the {b} because I like the _.",
            f"The {a} hit the {b} and the _ broke",
        )[int(rng.integers(3))]
        lines.append(f"{i},{sentence},{a},{b},{rng.integers(1, 3)}")
    lines.insert(2, "no task")
    return "\n".join(lines).encode() + b"\n"


def multiple_choice(n: int, seed: int = 0) -> bytes:
    """Return tasks of 2 to 5 answers in ikawrakow's binary format."""
    rng, tasks = np.random.default_rng(seed), list[bytes]()

    def text(value: str) -> bytes:
        return struct.pack("<I", len(value.encode())) + value.encode()

    for i in range(n):
        count = int(rng.integers(2, 6))
        answers, correct = rng.choice(_ENDINGS, count, replace=False), int(rng.integers(count))
        labels = struct.pack(f"<{count}i", *(int(j == correct) for j in range(count)))
        answers_bytes = struct.pack("<I", count) + b"".join(map(text, answers)) + labels
        tasks.append(text(f"Question {i}: What does {rng.choice(_PEOPLE)} do?") + answers_bytes + struct.pack("<I", 0))
    positions = 4 + 4 * n + np.cumsum([0, *map(len, tasks)])[:-1]
    return struct.pack(f"<{n + 1}I", n, *positions.tolist()) + b"".join(tasks)


def requests(n: int, seed: int = 0) -> bytes:
    """Return lines of three forms: plain, and the samples of two versions of lm-evaluation-harness."""
    rng, lines = np.random.default_rng(seed), list[str]()
    for i in range(n):
        endings = [f" {ending}" for ending in rng.choice(_ENDINGS, 3, replace=False)]
        prompt, answer = f"Then {rng.choice(_PEOPLE)}", int(rng.integers(3))
        pairs = [[prompt, ending] for ending in endings]
        arguments = {f"gen_args_{j}": {"arg_0": a, "arg_1": b} for j, (a, b) in enumerate(pairs)}
        sample = (
            {"prompt": prompt, "choices": endings, "answer": answer},
            {"doc_id": i, "arguments": pairs, "target": str(answer)},
            {"doc_id": i, "arguments": arguments, "target": endings[answer].strip()},
        )[i % 3]
        lines.append(json.dumps(sample))
    return "\n".join(lines).encode() + b"\n"
