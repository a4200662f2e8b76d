"""How many launches generating a token takes: a fusion that is lost shows. Nothing is run, or compiled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import test_delta_net
import test_mamba
import test_mla
from null_device import NullDevice, launches_of, load_on
from sparse_gguf import write_layout

import quantkit
from quantkit.formats.gguf import open_gguf
from quantkit.kernels.cuda.core.device import Launch
from quantkit.kernels.cuda.core.kernel import Kernel
from quantkit.model.arch import ARCHS
from quantkit.model.backends.cuda.backend import CUDAProgram
from quantkit.model.fusion import Fusion
from zoo import NAMES, write_hollow_zoo

Zoo = Callable[[str], Path]

#: Kernels of parts of layers, weights Q8_0.
ATTENTION = "mul_mats per_head attention attention_combine_to mul_mat row_epilogue "
LATENT = "mul_mats row_epilogue mul_mat per_head mul_mat_heads attention attention_combine_to mul_mat_heads_to mul_mat "
LATENT += "row_epilogue "
GATED = "mul_mats per_head attention attention_combine per_head mul_mat row_epilogue "
DELTA = "mul_mats convolve per_head delta_net per_head mul_mat row_epilogue "
MAMBA = "mul_mat per_head convolve per_head ssm_scan row_epilogue mul_mat row_epilogue "
UP_GATE = "up_gate_to mul_mat row_epilogue"
#: One matrix for gate and up, or no gate.
UP = "mul_mat per_head mul_mat row_epilogue"
EXPERTS = "mul_mats_route up_gate_id_to mul_mat_id row_epilogue"
SHARED = "mul_mats_route up_gate_shared_expert mul_mat_shared_expert row_epilogue"

#: The last layer of each architecture, and how many launches a token takes: with embeddings, angles and logits.
LAYERS = {
    "afmoe-moe": (GATED + SHARED + " row_epilogue", 62),
    "arcee-dense": (ATTENTION + UP, 34),
    "bailingmoe-moe": (ATTENTION + SHARED, 34),
    "bailingmoe2-moe": (ATTENTION.replace("mul_mats", "mul_mat") + SHARED, 23),
    # The last layer's normed input goes to both of its parts.
    "cohere2-dense": ("select_outputs select_outputs select_outputs quantize up_gate_to mul_mat row_epilogue", 24),
    "cohere2moe-moe": (
        "select_outputs select_outputs select_outputs mul_mats_route quantize up_gate_shared_expert "
        "mul_mat_shared_expert row_epilogue row_epilogue mul_mat",
        57,
    ),
    "command-r-dense": (
        "select_outputs select_outputs select_outputs quantize up_gate_to mul_mat row_epilogue mul_mat",
        33,
    ),
    "deepseek-moe": (ATTENTION + SHARED, 23),
    "deepseek2-moe": (LATENT + SHARED, 31),
    # Blocks: their rows, an indexer's and attention's, and those that it selects; streams that mix.
    "deepseek4-moe": (
        "mul_mats compress per_head block_write mul_mats compress per_head block_write indexer_scores indexer_select "
        "window_and_blocks attention per_head mul_mat_heads_to mul_mat select_outputs select_outputs select_outputs "
        "select_outputs repeat mix row_epilogue mul_mat stream_weights row_epilogue mul_mats_route up_gate_id_to "
        "mul_mat_id up_gate_to mul_mat row_epilogue repeat mix row_epilogue mul_mat activate shift row_epilogue",
        153,
    ),
    "dots1-moe": (ATTENTION + SHARED, 23),
    "dots3note-moe": (
        "mul_mats row_epilogue mul_mats mul_mats per_head indexer_scores indexer_select mul_mat_heads attention "
        f"quantize mul_mat_heads glu quantize mul_mat row_epilogue {SHARED}",
        76,
    ),
    "ernie4_5-moe-moe": (ATTENTION + SHARED, 23),
    "exaone-moe-moe": (ATTENTION + SHARED, 53),
    "exaone4-dense": (ATTENTION + UP_GATE, 22),
    "gemma-dense": (ATTENTION + UP_GATE, 31),
    "gemma2-dense": (ATTENTION + UP_GATE + " mul_mat", 23),
    "gemma3-dense": (ATTENTION + UP_GATE, 22),
    # It has no keys and values of its own; gelu and a factor of the layer's second input.
    "gemma4-dense": (
        ATTENTION.replace("mul_mats", "mul_mat") + UP_GATE + " mul_mat select_outputs per_head mul_mat row_epilogue "
        "per_head mul_mat",
        96,
    ),
    # The router's input; a dense layer and experts, added.
    "gemma4-moe": (
        f"{ATTENTION}{UP_GATE} multiply_by {EXPERTS.replace('e up', 'e row_epilogue up')} row_epilogue add per_head "
        "mul_mat",
        78,
    ),
    "glm4-dense": (ATTENTION + UP, 24),
    "glm4moe-moe": (ATTENTION + SHARED, 23),
    "gpt-oss-moe": (ATTENTION + EXPERTS, 24),
    "granite-dense": (ATTENTION + UP_GATE, 22),
    "granitemoe-moe": (ATTENTION + SHARED, 24),
    # Gate and up of the shared expert in one.
    "granite_swa-moe": (f"{ATTENTION}mul_mats_route up_gate_id_to mul_mat_id {UP} mul_mat", 57),
    # A second choice of the same router.
    "grovemoe-moe": (f"{ATTENTION}{EXPERTS} {EXPERTS.replace('mul_mats_route', 'route')} row_epilogue", 49),
    "hunyuan-moe-moe": (ATTENTION + SHARED, 24),
    "hy_v3-moe": (ATTENTION + SHARED, 33),
    # Streams: the input of a part, and how it counts; what experts and the shared one give; the input of the logits.
    "hy_v4-moe": (
        "repeat row_epilogue mul_mats per_head shift scale shift row_epilogue mul_mats_route up_gate_id_to mul_mat_id "
        "up_gate_to mul_mat row_epilogue repeat row_epilogue mul_mat activate shift row_epilogue",
        144,
    ),
    "laguna-elements": (GATED.replace("mul_mats", "mul_mats activate") + SHARED, 39),
    "laguna-moe": (
        GATED.replace("mul_mats", "mul_mats activate").replace("combine per_head", "combine glu quantize") + SHARED,
        69,
    ),
    # Norms after rope, a factor of every head; the model's input once more.
    "talkie-dense": (
        "mul_mats rope norm multiply_by per_head attention attention_combine_to mul_mat row_epilogue up_gate_to "
        "mul_mat select_outputs multiply_by row_epilogue mul_mat",
        44,
    ),
    # Biases and scales of its tensors: products, scaled with their biases.
    "llama-dense": (ATTENTION + "mul_mats multiply_by per_head mul_mat multiply_by row_epilogue", 28),
    "llama-moe": (ATTENTION + EXPERTS, 24),
    "llama4-moe": (ATTENTION + SHARED.replace("route", "route per_head"), 44),
    "llada-moe-moe": (ATTENTION + EXPERTS, 34),
    "mellum-moe": (ATTENTION + EXPERTS, 55),
    "mimo2-moe": ("mul_mat per_head attention attention_combine_to mul_mat scale row_epilogue " + EXPERTS, 36),
    "minimax-m2-moe": (ATTENTION + EXPERTS, 24),
    "minimax-m3-moe": (ATTENTION + SHARED, 33),
    "mistral3-dense": (ATTENTION + UP_GATE, 22),
    "olmo-dense": (ATTENTION.replace("mul_mats", "mul_mats clamp clamp clamp") + UP_GATE, 40),
    "olmo2-dense": (ATTENTION + UP_GATE, 22),
    "olmoe-moe": (ATTENTION + EXPERTS, 24),
    "phi2-dense": ("select_outputs select_outputs select_outputs quantize " + UP, 35),
    "phi3-dense": (ATTENTION + UP, 24),
    "phimoe-moe": (ATTENTION + EXPERTS, 24),
    "qwen2-dense": (ATTENTION + UP_GATE, 22),
    "qwen2moe-moe": (ATTENTION + SHARED, 24),
    "qwen3-dense": (ATTENTION + UP_GATE, 22),
    "qwen35moe-moe": (GATED + SHARED, 26),
    "qwen3moe-moe": (ATTENTION + EXPERTS, 24),
    "qwen3next-moe": (GATED + SHARED, 26),
    "qwen3vl-dense": (ATTENTION + UP_GATE, 31),
    "qwen3vlmoe-moe": (ATTENTION + EXPERTS, 24),
    "rnd1-moe": (ATTENTION + EXPERTS, 34),
    "seed_oss-dense": (ATTENTION + UP_GATE, 22),
    # The router reads the layer's input.
    "smallthinker-moe": (
        "mul_mats cache_write attention attention_combine_to mul_mat select_outputs row_epilogue "
        + EXPERTS.replace("mul_mats_route", "route"),
        56,
    ),
    "smollm3-dense": (ATTENTION + UP_GATE, 22),
    "stablelm-dense": (ATTENTION + UP_GATE, 22),
    "starcoder-dense": (ATTENTION.replace("mul_mats", "mul_mat") + UP, 34),
    "starcoder2-dense": (ATTENTION + UP, 24),
    # The last layer limits its experts, and not the shared one.
    "step35-moe": (
        GATED.replace("combine per_head", "combine glu quantize")
        + "mul_mats_route up_gate_id_to mul_mat_id up_gate_to mul_mat row_epilogue",
        68,
    ),
    # Recurrent and dense ones: the end of the last layer.
    "apertus-dense": (
        "attention attention_combine_to mul_mat row_epilogue mul_mat xielu quantize mul_mat row_epilogue",
        37,
    ),
    "bailingmoe3-moe": (
        "scale delta_net per_head mul_mat "
        "row_epilogue mul_mats_route up_gate_shared_expert mul_mat_shared_expert row_epilogue",
        53,
    ),
    "bitnet-dense": (
        "attention attention_combine row_epilogue mul_mat row_epilogue up_gate row_epilogue mul_mat row_epilogue",
        37,
    ),
    "bloom-dense": (ATTENTION.replace("mul_mats", "mul_mat") + UP, 34),
    "chatglm-dense": (ATTENTION.replace("mul_mats", "mul_mat") + UP, 34),
    "codeshell-dense": (ATTENTION.replace("mul_mats", "mul_mat") + UP, 34),
    "exaone-dense": (ATTENTION + UP_GATE, 31),
    "falcon-dense": (
        "mul_mat select_outputs select_outputs select_outputs quantize mul_mat per_head mul_mat row_epilogue",
        38,
    ),
    "falcon-h1-dense": ("per_head ssm_scan quantize mul_mat add row_epilogue up_gate_to mul_mat row_epilogue", 53),
    "falcon-small": (
        "mul_mat select_outputs select_outputs select_outputs quantize mul_mat per_head mul_mat row_epilogue",
        31,
    ),
    "gemma3n-dense": ("per_head add per_head mul_mat_heads to_length per_head row_epilogue row_epilogue mul_mat", 227),
    "gpt2-dense": (ATTENTION.replace("mul_mats", "mul_mat") + UP, 34),
    "gptneox-dense": (
        "attention_combine_to mul_mat select_outputs select_outputs row_epilogue mul_mat per_head mul_mat row_epilogue",
        36,
    ),
    "gptneox-sequential": (ATTENTION.replace("mul_mats", "mul_mat") + UP, 34),
    "jais2-dense": (ATTENTION + UP, 34),
    "jamba-moe": ("per_head mul_mat column_scan quantize mul_mat row_epilogue up_gate_to mul_mat row_epilogue", 41),
    "kimi-k3-moe": ("add mul_mat row_epilogue row_epilogue glu add activate add row_epilogue", 161),
    "kimi-linear-moe": (
        "quantize mul_mat per_head mul_mat "
        "row_epilogue mul_mats_route up_gate_shared_expert mul_mat_shared_expert row_epilogue",
        56,
    ),
    "lfm2-dense": ("mul_mat per_head convolve per_head mul_mat row_epilogue up_gate_to mul_mat row_epilogue", 40),
    "lfm2moe-moe": (
        "per_head convolve per_head mul_mat row_epilogue mul_mats_route up_gate_id_to mul_mat_id row_epilogue",
        33,
    ),
    "maincoder-dense": (ATTENTION + UP_GATE, 31),
    "mamba-dense": ("convolve per_head mul_mat per_head mul_mat column_scan quantize mul_mat row_epilogue", 36),
    "mamba-normed": ("convolve per_head mul_mat per_head mul_mat column_scan quantize mul_mat row_epilogue", 36),
    "mamba2-dense": ("row_epilogue mul_mat per_head convolve per_head ssm_scan per_head mul_mat row_epilogue", 27),
    "minicpm-dense": (
        "per_head attention attention_combine_to mul_mat row_epilogue up_gate_to mul_mat row_epilogue mul_mat",
        32,
    ),
    "minimax-01-moe": (
        "per_head mul_mat select_outputs row_epilogue mul_mats_route up_gate_id_to mul_mat_id scale row_epilogue",
        38,
    ),
    "nanbeige-looped": (ATTENTION + UP_GATE, 59),
    "nemotron-dense": (ATTENTION + UP, 34),
    "nemotron_h-dense": ("row_epilogue mul_mat per_head convolve per_head ssm_scan per_head mul_mat row_epilogue", 33),
    "nemotron_h_moe-moe": ("per_head mul_mat_id row_epilogue mul_mat mul_mat per_head mul_mat add row_epilogue", 50),
    "orion-dense": (ATTENTION + UP_GATE, 31),
    "paddleocr-dense": (ATTENTION + UP_GATE, 31),
    "pangu-embedded-dense": (ATTENTION + UP_GATE, 31),
    "qwen2vl-dense": (ATTENTION + UP_GATE, 31),
    "spark2_5-dense": (
        "attention attention_combine glu quantize mul_mat row_epilogue up_gate_to mul_mat row_epilogue",
        38,
    ),
    # Experts of the layer's input beside a dense layer.
    "arctic-moe": (
        "select_outputs select_outputs row_epilogue row_epilogue up_gate_to mul_mat mul_mats_route up_gate_id_to "
        "mul_mat_id row_epilogue",
        32,
    ),
    "baichuan-13b": (ATTENTION.replace("per_head", "cache_write") + UP_GATE, 363),
    "baichuan-7b": (ATTENTION + UP_GATE, 292),
    "dbrx-moe": ("clamp clamp clamp per_head attention attention_combine_to mul_mat row_epilogue " + EXPERTS, 32),
    "deci-dense": (ATTENTION + UP_GATE, 30),
    "dream-dense": (ATTENTION + UP_GATE, 22),
    "grok-both": (ATTENTION + SHARED + " row_epilogue mul_mat scale", 28),
    "grok-moe": (ATTENTION + EXPERTS + " mul_mat", 25),
    "hunyuan_vl-dense": (ATTENTION + UP_GATE, 22),
    "jais-dense": (ATTENTION.replace("mul_mats", "mul_mat") + UP_GATE, 21),
    "llada-dense": (ATTENTION + UP_GATE, 22),
    "maple-moe": (ATTENTION + EXPERTS, 34),
    "mpt-dense": (
        "clamp clamp clamp cache_write attention attention_combine_to mul_mat row_epilogue "
        "mul_mat activate multiply_by quantize mul_mat row_epilogue",
        36,
    ),
    "muse-glimmer-dense": (GATED + UP_GATE + " mul_mat scale", 47),
    "openelm-dense": (ATTENTION.replace("mul_mats", "mul_mat") + UP_GATE, 31),
    "plamo-dense": ("select_outputs select_outputs select_outputs quantize up_gate_to mul_mat row_epilogue", 24),
    "plamo2-dense": (
        "convolve per_head mul_mat per_head mul_mat ssm_scan quantize mul_mat row_epilogue mul_mat per_head mul_mat "
        "row_epilogue",
        44,
    ),
    "plamo3-dense": (ATTENTION.replace("mul_mats", "mul_mat") + UP, 35),
    "qwen-dense": (ATTENTION.replace("mul_mats", "mul_mat") + UP_GATE, 22),
    "refact-dense": (ATTENTION.replace("per_head", "cache_write") + UP_GATE, 21),
    # All rows that a token is mixed to are made in one launch, and in a second one what products read.
    "arwkv7-dense": (
        "per_head lerp lerp wkv bonus quantize mul_mat row_epilogue up_gate_to mul_mat row_epilogue",
        50,
    ),
    "rwkv6-dense": (
        "wkv bonus per_head mul_mat row_epilogue convolve select_outputs select_outputs select_outputs lerp quantize "
        "mul_mat per_head mul_mat lerp quantize mul_mat glu row_epilogue",
        67,
    ),
    "rwkv6qwen2-dense": (
        "convolve lerp mul_mat softcap mul_mat_heads lerp per_head mul_mat mul_mat mul_mat mul_mat mul_mat softcap "
        "mul_mat wkv per_head mul_mat row_epilogue up_gate_to mul_mat row_epilogue",
        45,
    ),
    "rwkv7-dense": (
        "per_head lerp lerp wkv norm bonus mul_mat activate mul_mat per_head mul_mat row_epilogue convolve "
        "select_outputs select_outputs select_outputs lerp quantize mul_mat per_head mul_mat row_epilogue",
        70,
    ),
}


def of_a_token(monkeypatch: pytest.MonkeyPatch, path: Path, n_tokens: int = 1, n_ctx: int = 4096) -> list[str]:
    """Return the kernels of a batch, weights Q8_0, all of them zero."""
    return launches_of(monkeypatch, write_quantized(path, path.with_suffix(".q8.gguf"), "Q8_0"), n_tokens, n_ctx)


def write_quantized(path: Path, target: Path, name: str) -> Path:
    """Write the file that a model is quantized to, but with holes for weights: nobody computes with them."""
    (shard,) = quantkit.plan_quantize(path, target, name).shards
    return write_layout(target, shard.layout)


@pytest.fixture
def zoo(tmp_path: Path) -> Zoo:
    """Models of the zoo without their weights."""
    return lambda name: write_hollow_zoo(name, tmp_path / f"{name}.gguf")


def without_angles(names: list[str]) -> list[str]:
    return [name for name in names if name != "rope_table"]


def test_every_model_of_the_zoo_is_counted() -> None:
    """All but encoders, which generate no tokens."""
    generating = {name for name in NAMES if not ARCHS[name.rpartition("-")[0]].encoder}
    assert set(LAYERS) == generating


@pytest.mark.parametrize("name", LAYERS)
def test_launches_of_a_token_of_every_architecture(zoo: Zoo, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, total = LAYERS[name]
    names = of_a_token(
        monkeypatch, zoo(name), n_ctx=512 if name in ("gpt2-dense", "mpt-dense", "starcoder-dense") else 4096
    )  # it has no more
    assert without_angles(names)[-len(layer.split()) - 1 : -1] == layer.split()
    assert len(names) == total


@pytest.mark.parametrize(
    ("variant", "first"),
    [
        (
            "lite",
            LATENT.replace("mul_mats row_epilogue mul_mat", "mul_mats").replace(
                "mul_mat_heads_to", "mul_mat_heads quantize"
            ),
        ),
        (
            "expanded",
            "mul_mats row_epilogue mul_mat per_head mul_mat per_head attention attention_combine quantize mul_mat "
            "row_epilogue",
        ),
    ],
)
def test_latent_attention(variant: str, first: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads of 24 columns do not make up the 256 of a format."""
    changes, tensors = test_mla.VARIANTS[variant]
    path = test_mla.deepseek2(tmp_path / "model.gguf", changes, **tensors)
    names = without_angles(of_a_token(monkeypatch, path))
    assert names[2 : 2 + len(first.split())] == first.split()


@pytest.mark.parametrize(("variant", "variant_key"), [("next", ""), ("next-ssm-in", "per_head "), ("35", "")])
def test_delta_nets(variant: str, variant_key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Old files have q, k, v and z of each key head side by side."""
    arch, changes, tensors = test_delta_net.VARIANTS[variant]
    path = test_delta_net.qwen(tmp_path / "model.gguf", arch, changes, **tensors)
    names, first = of_a_token(monkeypatch, path), DELTA.replace("convolve", f"{variant_key}convolve").split()
    assert names[2 : 2 + len(first)] == first


def test_layers_of_mamba(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changes, tensors = test_mamba.VARIANTS["dense"]
    names = of_a_token(monkeypatch, test_mamba.hybrid(tmp_path / "model.gguf", changes, **tensors))
    assert names[2 : 2 + len(MAMBA.split())] == MAMBA.split()


def test_q_k_and_v_may_have_two_types(zoo: Zoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "q4.gguf"
    write_quantized(zoo("qwen2-dense"), path, "Q4_K_S")
    with open_gguf(path) as file:
        assert {"Q4_K", "Q5_K"} <= {t.type.name for name, t in file.tensors.items() if name.startswith("blk.0.attn_")}
    names = launches_of(monkeypatch, path)
    assert [names.count(name) for name in ("mul_mats", "mul_mat")] == [2, 2 * 2 + 1]


@pytest.mark.parametrize("name", ["qwen3moe-moe", "deepseek2-moe", "qwen3next-moe", "llama4-moe"])
def test_batches_use_mat_mat_kernels(zoo: Zoo, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is done for one token in one launch is not left out for more, nor done twice."""
    short, long = (of_a_token(monkeypatch, zoo(name), n) for n in (8, 9))
    for names in (short, long):
        assert not {"up_gate_shared_expert", "mul_mat_shared_expert"}.intersection(names)
        assert names.count("delta_net") == ("next" in name)
    assert "mul_mats_route" in short
    assert "route" not in short
    assert "mul_mats_route" not in long
    assert "route" in long
    for kind in ("up_gate_id", "mul_mat_id"):
        of_few, of_many = ([n for n in names if n.removesuffix("_to") == kind] for names in (short, long))
        assert len(of_few) == len(of_many) > 0


def test_every_switch_changes_the_launches(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without qkv nothing multiplies by several matrices; without launches every operation has its own."""
    path = zoo("qwen2moe-moe")
    plain, no_qkv = (launches_of(monkeypatch, path, fusion=Fusion(qkv=on)) for on in (True, False))
    assert plain.count("mul_mats") > 0 == no_qkv.count("mul_mats")
    assert len(no_qkv) > len(plain)
    single_launches = launches_of(monkeypatch, path, fusion=Fusion(launches=False))
    assert {"mul_mats", "up_gate", "up_gate_id", "norm", "rope", "cache_write", "route", "add"} <= set(single_launches)
    assert not {"per_head", "row_epilogue", "mul_mats_route", "up_gate_shared_expert"}.intersection(single_launches)
    nothing = launches_of(monkeypatch, path, fusion=Fusion.none())
    assert not {"mul_mats", "up_gate", "up_gate_id"}.intersection(nothing)
    assert len(nothing) > len(single_launches) > len(no_qkv)


# ---------------------------------------------------------------- cost of a batch before its launches


class NotedDevice(NullDevice):
    """Notes what it is asked for: bytes of uploads, downloads, launches at once, kernels prepared, pinned values."""

    def __init__(self) -> None:
        super().__init__()
        self.uploads, self.downloads, self.runs, self.pinned = list[int](), 0, list[int](), list[int]()
        self.prepared = set[Kernel]()

    def upload(self, address: int, data: Any) -> None:
        self.uploads.append(data.nbytes)

    def download(self, address: int, out: Any) -> None:
        self.downloads += 1
        super().download(address, out)

    def host_array(self, count: int, dtype: Any) -> Any:
        self.pinned.append(count)
        return super().host_array(count, dtype)

    def prepare(self, kernels: Sequence[Kernel]) -> None:
        self.prepared |= set(kernels)

    def run(self, launches: Sequence[Launch]) -> None:
        self.runs.append(len(launches))
        super().run(launches)


def test_a_new_length_is_launched_while_it_is_recorded(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then recorded; and a token sends no more than its own words."""
    device, n_packed, launch = NotedDevice(), list[int](), CUDAProgram._launch

    def noted(self: CUDAProgram, *arguments: Any) -> Launch | None:
        n_packed.append(len(device.launches))
        return launch(self, *arguments)

    monkeypatch.setattr(CUDAProgram, "_launch", noted)
    with load_on(monkeypatch, device, zoo("qwen3moe-moe"), n_ubatch=512) as model:
        session = model.session(4096)
        for noted_so_far in (device.launches, device.runs, device.uploads):
            noted_so_far.clear()  # type: ignore[attr-defined]
        session.decode(np.ones(1, np.int32))
        of_a_run = len(device.launches)
        assert device.uploads == [80]
        assert sum(device.runs) == of_a_run > 16 == device.runs[0]
        assert {0, 16} <= set(n_packed)  # the first are on their way when the last are packed
        n_packed.clear()
        for _ in range(3):
            session.decode(np.ones(1, np.int32))
        assert not n_packed
        assert device.runs[-3:] == [of_a_run] * 3


def test_no_kernel_is_compiled_during_generation(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    device = NotedDevice()
    with load_on(monkeypatch, device, zoo("qwen3moe-moe"), n_ubatch=512) as model:
        session = model.session(4096)
        for n in (*range(1, 12), 31, 33, 63, 65, 127, 129, 257, 512):
            session.clear()
            session.decode(np.ones(n, np.int32), outputs=np.arange(n) == n - 1)
            session.clear()
            session.decode(np.ones(n, np.int32))
    assert {launch.kernel for launch in device.launches} <= device.prepared


def test_logits_allocate_pinned_memory_when_read(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for every row of a prompt, because only the last is needed."""
    device = NotedDevice()
    with load_on(monkeypatch, device, zoo("qwen3moe-moe"), n_ubatch=64) as model:
        session, n = model.session(4096), model.n_vocab
        for rows in (1, 8, 8, 4):
            session.decode(np.ones(64, np.int32), outputs=np.arange(64) >= 64 - rows)
    assert device.pinned == [n, 8 * n]


def test_expert_ids_are_read_back_once_per_layer(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    """For weights that are sent for every batch: gate, up and down."""
    device = NotedDevice()
    with load_on(monkeypatch, device, zoo("qwen3moe-moe"), max_vram=0) as model:
        session = model.session(64)
        device.downloads = 0
        session.decode(np.ones(12, np.int32))
        assert device.downloads == model.n_layer + 1  # and the logits
