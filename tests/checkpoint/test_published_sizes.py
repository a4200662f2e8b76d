"""Checkpoints with the sizes of popular models convert to the reference's headers: metadata, names, shapes, types."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from published_sizes import PUBLISHED, describe_published, write_published
from quantkit.convert import ConvertOptions, plan_convert, plan_mmproj
from quantkit.types import type_by_name

pytestmark = pytest.mark.usefixtures("services_in_process")

EXPECTED: dict[str, Any] = json.loads((Path(__file__).parents[1] / "data/published-sha256.json").read_text())


def plan_of(source: Path, name: str, key: str, out: Path) -> Any:
    kind, outtype = key.split()
    keywords = describe_published(name).convert_keywords() | {"outtype": outtype}
    if kind == "text":
        return plan_convert(source, out, None, ConvertOptions(**keywords))
    return plan_mmproj(source, out, None, ConvertOptions(outtype=outtype))


@pytest.mark.parametrize("name", PUBLISHED)
def test_headers_are_the_references(name: str, tmp_path: Path) -> None:
    source, wrong = write_published(name, tmp_path), {}
    for key, row in EXPECTED[name].items():
        (shard,) = plan_of(source, name, key, tmp_path).shards
        header = shard.layout.header
        if (hashlib.sha256(header).hexdigest(), len(header)) != (row["sha256"], row["bytes"]):
            wrong[key] = len(header)
    shutil.rmtree(source)
    assert wrong == {}


def test_rows_without_blocks_are_f16_in_q8_0(tmp_path: Path) -> None:
    """Of 4304 values: the second matrix of the feed-forward layers of SigLIP SO400M and of encoders like it."""
    source = write_published("kimi-vl-a3b", tmp_path)
    types = {t.name: t.type for t in plan_of(source, "kimi-vl-a3b", "mmproj q8_0", tmp_path).tensors}
    assert types["v.blk.0.ffn_down.weight"] is type_by_name("F16")
    assert types["v.blk.0.ffn_up.weight"] is type_by_name("Q8_0")
