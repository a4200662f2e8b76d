"""Write tests/data/torch/*.pt, small files of torch.save, and tests/data/torch/values.json, what they contain.

PYTHON_WITH_TORCH scripts/make_torch_files.py
"""

from __future__ import annotations

import json
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch

FOLDER = Path(__file__).parents[1] / "tests" / "data" / "torch"
VECTOR = torch.arange(12, dtype=torch.float32) / 8 - 0.5
#: Name -> a saved object.
OBJECTS: dict[str, Any] = {
    "mask-f32": {"mask_token_id": 12, "embedding": VECTOR},
    "mask-f16": {"mask_token_id": 300, "embedding": VECTOR.half()},
    "mask-bf16": {"mask_token_id": 151669, "embedding": VECTOR.bfloat16()},
    "parameter": {"embedding": torch.nn.Parameter(VECTOR), "note": "a", "scale": 0.5, "none": None, "on": True},
    "offset": {"embedding": VECTOR[4:10]},
    "matrix": VECTOR.view(3, 4),
    "column": VECTOR.view(3, 4)[:, 1:2][1],
    "ordered": OrderedDict(a=VECTOR[:3].clone(), b=torch.arange(3), c=[1, -2, (3, 4, 5, 2**40)]),
    "shared": {"a": VECTOR, "b": VECTOR[2:]},
    "scalar": torch.tensor(7),
    "strided": VECTOR[::2],
    "transposed": VECTOR.view(3, 4).T,
    "module": torch.nn.Linear(2, 2),
}


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    values = {}
    for name, saved in OBJECTS.items():
        torch.save(saved, FOLDER / f"{name}.pt")
        values[name] = plain(saved)
    torch.save({"embedding": VECTOR}, FOLDER / "legacy.pt", _use_new_zipfile_serialization=False)
    (FOLDER / "values.json").write_text(json.dumps(values, indent=1) + "\n")


def plain(value: Any) -> Any:
    """Return an object with tensors as dtype, shape and values; None for others."""
    if isinstance(value, torch.Tensor):
        return {
            "dtype": str(value.dtype),
            "shape": list(value.shape),
            "values": value.detach().double().flatten().tolist(),
        }
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value if isinstance(value, (int, float, str, bool)) else None


if __name__ == "__main__":
    main()
