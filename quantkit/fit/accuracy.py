"""Error bounds of the estimated compute buffers, by architecture, relative to those of llama.cpp and ik_llama.cpp.

Measured on the models of tests/data/zoo, which are small, so that buffers are all the larger beside weights: contexts
of 4096 and 32768, with and without flash attention, of llama.cpp also one sequence and four, caches of f16 and q8_0.
"""

from __future__ import annotations

#: The note on buffers of GPUs.
GPU_NOTE = "compute buffers of GPUs are estimates: the same graph as on the CPU, not compared with a GPU's log"
#: Architectures whose buffers differ by less than 3 %, most of them not at all.
CLOSE = frozenset(
    """
    afmoe apertus arcee arctic baichuan bailingmoe bailingmoe2 bailingmoe3 bitnet bloom chatglm codeshell
    cohere2moe dbrx deci deepseek dots1 dots3note dream ernie4_5-moe exaone exaone-moe exaone4 gemma gemma2
    gemma3 gemma4 glm4 glm4moe gpt-oss gpt2 gptneox granite granite_swa granitemoe grok grovemoe hunyuan-moe
    hunyuan_vl hy_v3 jais2 jamba laguna lfm2 lfm2moe llada llada-moe llama llama4 maincoder mamba mamba2 maple mellum
    mimo2 minicpm minimax-m2 minimax-m3 mistral3 mpt muse-glimmer nanbeige nemotron nemotron_h nemotron_h_moe olmo
    olmo2 olmoe orion paddleocr pangu-embedded phi3 phimoe plamo2 plamo3 qwen qwen2 qwen2moe qwen2vl qwen3
    qwen35moe qwen3moe qwen3next qwen3vl qwen3vlmoe refact rnd1 seed_oss smollm3 stablelm starcoder starcoder2 step35
    """.split()  # noqa: SIM905 - a list of 80 lines
)
#: Architectures whose buffers differ by more, and the largest difference, as a share of the buffer.
APPROXIMATE = {
    "arwkv7": 0.11,
    "cohere2": 0.07,
    "command-r": 0.08,
    "deepseek2": 0.05,
    "deepseek4": 0.11,
    "falcon": 0.06,
    "falcon-h1": 0.06,
    "gemma3n": 0.26,
    "hy_v4": 0.14,
    "jais": 0.16,
    "kimi-k3": 0.24,
    "kimi-linear": 0.04,
    "minimax-01": 0.39,
    "openelm": 0.12,
    "phi2": 0.1,
    "plamo": 0.08,
    "rwkv6": 0.06,
    "rwkv6qwen2": 0.06,
    "rwkv7": 0.08,
    "smallthinker": 0.07,
    "spark2_5": 0.14,
    "talkie": 0.08,
}


#: The same of ik_llama.cpp, of those that the wheel ik-llama-cpp-python loads.
IK_CLOSE = frozenset(
    """
    arctic baichuan bailingmoe2 deci deepseek2 ernie4_5-moe gemma gemma3 gpt-oss grok llama minimax-m2 mistral3 olmo
    orion qwen2 qwen3 qwen3moe qwen3vlmoe refact seed_oss smollm3 stablelm
    """.split()  # noqa: SIM905 - as above
)
IK_APPROXIMATE = {
    "bitnet": 0.09,
    "command-r": 0.05,
    "dots1": 0.1,
    "falcon": 0.06,
    "glm4": 0.09,
    "gptneox": 0.1,
    "hunyuan-moe": 0.09,
    "jais": 0.09,
    "llama4": 0.07,
    "openelm": 0.08,
    "qwen": 0.1,
    "qwen3vl": 0.17,
}


def accuracy_note(arch: str, runtime: str = "llama.cpp") -> str | None:
    """Return a note on an architecture whose compute buffers are not those of the runtime within 3 %."""
    close, approximate = (IK_CLOSE, IK_APPROXIMATE) if runtime == "ik" else (CLOSE, APPROXIMATE)
    if arch in close:
        return None
    if (bound := approximate.get(arch)) is not None:
        return f"compute buffers of {arch} are approximate: up to {bound:.0%} off on the models of the tests"
    name = "ik_llama.cpp" if runtime == "ik" else "llama.cpp"
    return f"compute buffers of {arch} are not compared with {name}'s"
