"""Which runtimes load a model, by its architecture, tensor types and names, and what their GPUs cannot run.

Sources: LLM_ARCH_NAMES and the supports_op of CUDA in llama.cpp b11434 and ik_llama.cpp 8337e4cd3.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from quantkit.names import printable, shorten
from quantkit.pipeline.experts import runtimes as load_merged
from quantkit.pipeline.facts import EXTRA_OUTPUT
from quantkit.types import TensorType

#: Architectures by name: of both trees (clip: multimodal projectors), and of one only.
# fmt: off
_BOTH = frozenset({
    "arctic", "baichuan", "bailingmoe2", "bailingmoe3", "bert", "bitnet", "bloom", "chatglm", "clip", "codeshell",
    "cohere2", "command-r", "dbrx", "deci", "deepseek2", "deepseek4", "dflash", "dots1", "ernie4_5", "ernie4_5-moe",
    "falcon", "gemma", "gemma2", "gemma3", "gemma4", "gemma4-assistant", "glm-dsa", "glm4", "glm4moe", "gpt-oss",
    "gpt2", "gptj", "gptneox", "granite", "granitemoe", "grok", "hunyuan-moe", "internlm2", "jais", "jina-bert-v2",
    "laguna", "llama", "llama4", "mamba", "mellum", "mimo2", "minicpm", "minimax-m2", "minimax-m3", "mistral3",
    "mistral4", "mpt", "muse-glimmer", "nomic-bert", "olmo", "openelm", "orion", "phi2", "phi3", "plamo", "qwen",
    "qwen2", "qwen2moe", "qwen2vl", "qwen3", "qwen35", "qwen35moe", "qwen3moe", "qwen3next", "qwen3vl",
    "qwen3vlmoe", "refact", "seed_oss", "smollm3", "stablelm", "starcoder", "starcoder2", "step35", "t5",
    "t5encoder", "xverse",
})
_MAINLINE = frozenset({
    "afmoe", "apertus", "arcee", "arwkv7", "bailingmoe", "chameleon", "clef", "cogvlm", "cohere2moe", "deepseek",
    "deepseek2-ocr", "deepseek32", "dots3note", "dream", "eagle3", "eurobert", "exaone", "exaone-moe", "exaone4",
    "falcon-h1", "gemma-embedding", "gemma3n", "glm5-next", "granite_swa", "granitehybrid", "graniteswitch",
    "grovemoe", "hrm_text", "hunyuan-dense", "hunyuan_vl", "hy_v3", "hy_v4", "jais2", "jamba", "jina-bert-v3",
    "kimi-k3", "kimi-linear", "lfm2", "lfm2moe", "llada", "llada-moe", "llama-embed", "maincoder", "mamba2",
    "maple", "minicpm3", "minimax-01", "modern-bert", "nanbeige", "nemotron", "nemotron_h", "nemotron_h_moe",
    "neo-bert", "nomic-bert-moe", "olmo2", "olmoe", "paddleocr", "pangu-embedded", "phimoe", "plamo2", "plamo3",
    "plm", "pockettts", "qwen3tts", "qwen4exp", "rnd1", "rwkv6", "rwkv6qwen2", "rwkv7", "smallthinker", "spark2_5",
    "talkie", "wavtokenizer-dec",
})
_IK = frozenset({
    "bitnet-25", "bitnet-b1.58", "cohere2_moe", "dflash-draft", "gemma4_mtp", "openpangu",
})
# fmt: on

#: Architectures whose second output (--extra-output-tensor) ik_llama.cpp loads; otherwise a tensor too many is refused.
_EXTRA_OUTPUT_IK = frozenset({"qwen35", "qwen35moe", "gemma4_mtp", "gemma4-assistant", "dflash-draft"})

#: ggml's tensor names have 64 bytes with the final zero.
_MAX_TENSOR_NAME = 63

#: Types without CUDA kernels; their tensors stay on the CPU. Of ik's interleaved types, only a few have them.
_CPU_ONLY = frozenset({"TQ1_0", "TQ2_0", "Q8_KV", "I2_S"})
_INTERLEAVED_ON_CUDA = frozenset(
    {"IQ2_K_R4", "IQ3_K_R4", "IQ4_K_R4", "IQ5_K_R4", "IQ4_KS_R4", "IQ5_KS_R4", "IQ1_S_R4", "IQ1_M_R4"}
)
_CPU_ONLY_IN_IK = frozenset({"Q1_0"})


@dataclass(frozen=True, slots=True)
class Runtime:
    """A runtime and a model: what keeps it from loading the file, and from running all of it on a GPU."""

    name: str
    #: The architecture, if it is unknown.
    unknown_architecture: str
    unknown_types: tuple[str, ...]
    #: Tensors whose names are longer than ggml holds.
    long_names: tuple[str, ...]
    #: Whether up and gate experts are merged, which it does not load for this architecture.
    refuses_merged: bool
    #: Whether there is a second output, which it does not load for this architecture.
    refuses_extra_output: bool
    #: Types that only the CPU multiplies.
    cpu_types: tuple[str, ...]

    @property
    def problems(self) -> tuple[str, ...]:
        """Why it does not load the file, in words; nothing if it does."""
        found = [f"no architecture {printable(self.unknown_architecture)}"] if self.unknown_architecture else []
        if self.unknown_types:
            found.append(f"no tensor type {', '.join(self.unknown_types)}")
        if self.refuses_merged:
            found.append("no merged up and gate experts for this architecture (quantkit split-up-gate)")
        if self.refuses_extra_output:
            found.append(f"no {EXTRA_OUTPUT} for this architecture")
        if self.long_names:
            first = shorten(printable(self.long_names[0]), 40)
            found.append(f"{len(self.long_names)} tensor names are longer than {_MAX_TENSOR_NAME} bytes ({first})")
        return tuple(found)

    @property
    def loads(self) -> bool:
        return not self.problems

    def as_dict(self) -> dict[str, Any]:
        """Return the findings for programs."""
        return {
            "loads": self.loads,
            "problems": list(self.problems),
            "unknown_types": list(self.unknown_types),
            "long_names": list(self.long_names),
            "cpu_types": list(self.cpu_types),
        }

    def __str__(self) -> str:
        if self.problems:
            return f"does not load: {'; '.join(self.problems)}"
        if self.cpu_types:
            stay = "stays" if len(self.cpu_types) == 1 else "stay"
            return f"loads; on CUDA, {', '.join(self.cpu_types)} {stay} on the CPU"
        return "loads, on CPU and CUDA"


def runtimes(architecture: str, tensors: Iterable[tuple[str, TensorType]]) -> tuple[Runtime, Runtime]:
    """Return what llama.cpp and ik_llama.cpp do with tensors, (name, type), of an architecture."""
    tensors = tuple(tensors)
    merged = any("ffn_gate_up_exps" in name for name, _ in tensors)
    second_output = any(name == EXTRA_OUTPUT for name, _ in tensors)
    long_names = tuple(name for name, _ in tensors if len(name.encode()) > _MAX_TENSOR_NAME)
    types = {t.name: t for _, t in tensors}
    found = []
    known = (("mainline", _BOTH | _MAINLINE), ("ik", _BOTH | _IK))
    for (tree, architectures), (name, merges) in zip(known, load_merged(architecture).items(), strict=True):
        knows = architecture in architectures
        unknown = sorted(t.name for t in types.values() if t.trees not in (tree, "both"))
        on_cpu = sorted(t.name for t in types.values() if t.name not in unknown and not _on_cuda(t, tree))
        found.append(
            Runtime(
                name=name.split()[0],
                unknown_architecture="" if knows else architecture,
                unknown_types=tuple(unknown),
                long_names=long_names,
                refuses_merged=merged and knows and not merges,
                refuses_extra_output=second_output
                and knows
                and not (tree == "ik" and architecture in _EXTRA_OUTPUT_IK),
                cpu_types=tuple(on_cpu),
            )
        )
    return found[0], found[1]


def _on_cuda(t: TensorType, tree: str) -> bool:
    if t.interleave > 1:
        return t.name in _INTERLEAVED_ON_CUDA
    return t.name not in (_CPU_ONLY | _CPU_ONLY_IN_IK if tree == "ik" else _CPU_ONLY)
