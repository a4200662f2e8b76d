"""Inputs of the rope table from a RopeConfig: constants of every pair, and three scalars.

Pair i of n_rot / 2 rotates by theta_i = position * freq_base^(-2i / n_rot). As in ggml (llama.cpp b11434
ggml-cpu/ops.cpp ggml_compute_forward_rope, ggml.c ggml_rope_yarn_corr_dims), theta is a running product in f32, divided
by the pair's factor (a tensor, for long contexts) and interpolated (YaRN)::

    theta' = freq_scale * theta * (1 - mix_i) + theta * mix_i     mix_i = ext_factor * (1 - ramp(i)), 0 without YaRN
    ramp(i) = clamp((i - low) / max(0.001, high - low), 0, 1)     low, high: pairs with beta_fast, beta_slow rotations
    cos, sin = mscale * (cos theta', sin theta')                  mscale = attn_factor [* 1 + 0.1 ln(1 / freq_scale)]

M-RoPE: in text, time, height and width positions all equal the token's; the fourth is 0, so its pairs do not rotate.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from quantkit.kernels.parameters import RopeConfig

f32 = np.float32


def rope_constants(config: RopeConfig, factors: npt.NDArray[np.float32] | None) -> npt.NDArray[np.float32]:
    """Return the constants of each pair, float32 [3, n_rot / 2]: 1 if it rotates, its factor, its YaRN mix."""
    pairs = config.n_rot // 2
    constants = np.zeros((3, pairs), f32)
    constants[0] = 1 if not config.sections else _turns(config, pairs)
    constants[1] = 1 if factors is None else factors[:pairs]
    if config.ext_factor:
        low, high = _yarn_range(config)
        y = (np.arange(pairs, dtype=f32) - low) / max(f32(0.001), high - low)
        constants[2] = (1 - np.clip(y, f32(0), f32(1))) * f32(config.ext_factor)
    return constants


def rope_scalars(config: RopeConfig) -> dict[str, float]:
    """Return the slots step, freq_scale and mscale of rope_table."""
    mscale = f32(config.attn_factor)
    if config.ext_factor:
        mscale *= f32(1) + f32(0.1) * f32(math.log(f32(1) / f32(config.freq_scale)))
    step = math.pow(f32(config.freq_base), f32(-2) / f32(config.n_rot))
    return {"step": step, "freq_scale": config.freq_scale, "mscale": float(mscale)}


def _turns(config: RopeConfig, pairs: int) -> npt.NDArray[np.bool_]:
    """Return which pairs use one of M-RoPE's first three positions."""
    t, h, w = config.sections[:3]
    sector = np.arange(pairs) % sum(config.sections)
    last = 3 * np.array([t, h, w])[sector % 3] if config.interleaved else t + h + w
    return np.asarray(sector < last)


def _yarn_range(config: RopeConfig) -> tuple[np.float32, np.float32]:
    """Return the pairs between which YaRN blends extrapolation into interpolation."""

    def pair(turns: float) -> float:
        length = f32(config.n_ctx_orig) / (f32(turns) * 2 * f32(math.pi))
        return float(config.n_rot * f32(math.log(length)) / (2 * f32(math.log(f32(config.freq_base)))))

    low, high = math.floor(pair(config.beta_fast)), math.ceil(pair(config.beta_slow))
    return f32(max(0, low)), f32(min(config.n_rot - 1, high))
