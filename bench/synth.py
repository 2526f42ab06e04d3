"""Synthetic multi-layer hidden states with the compression statistics of real ones, as bfloat16 bit patterns.

Fitted to two real models with a serving engine's bfloat16 residual stream (SmolLM2-135M, Gemma-3-270m): the entropies
of sign, exponent and mantissa, their conditional entropies and the ratios of codecs agree within 2 %. Plain Gaussian
data cast to bfloat16 does not. What it leaves out is the correlation across channels, which no codec here can use, and
any meaning: it is for measuring storage and throughput, not for training. Needs NumPy only.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Float32 = npt.NDArray[np.float32]
UInt16 = npt.NDArray[np.uint16]


@dataclass(frozen=True, slots=True)
class Statistics:
    """What the states look like.

    Attributes
    ----------
    rms
        Root mean square of each layer: the residual stream grows with depth. Used again from the start if there are
        more layers.
    channel_scale_std
        Standard deviation of log2 of the scale of a channel: 0.5-0.8 in SmolLM2, 1.1-1.5 in Gemma-3.
    channel_mean
        Typical |mean| / standard deviation of a channel.
    token_scale_std
        Standard deviation of log2 of the RMS of a token.
    tail
        Standard deviation of log2 of a scale for each value: kurtosis within a channel goes from 3 to about 4.
    rho_token, rho_layer
        Correlation with the previous token (none across the start of a sequence), and with the previous layer.
    n_adds, add_rms
        Residual additions in bfloat16 just below the layer, and their RMS relative to the state: sums of bfloat16
        numbers leave low mantissa bits that are zero.
    massive_channels, massive_ratio, massive_tokens
        The first tokens of a sequence have this many channels of `massive_ratio` times the median.
    outlier_channels, outlier_gain
        Fraction of channels that are always large, and by which factor.
    """

    rms: tuple[float, ...] = (3.0, 9.0, 25.0, 38.0)
    channel_scale_std: float = 0.75
    channel_mean: float = 0.35
    token_scale_std: float = 0.27
    tail: float = 0.22
    rho_token: float = 0.2
    rho_layer: float = 0.35
    n_adds: int = 2
    add_rms: float = 0.5
    massive_channels: int = 3
    massive_ratio: float = 1500.0
    massive_tokens: int = 1
    outlier_channels: float = 0.002
    outlier_gain: float = 24.0


def to_bf16(values: npt.ArrayLike) -> UInt16:
    """Return the bfloat16 patterns of finite float32 values, rounded to nearest, ties to even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16).astype(np.uint16)


def from_bf16(patterns: npt.ArrayLike) -> Float32:
    """Return the float32 values of bfloat16 patterns."""
    return (np.asarray(patterns, np.uint16).astype(np.uint32) << 16).view(np.float32)


def _rounded(values: Float32) -> Float32:
    """Round to bfloat16 in place."""
    bits = values.view(np.uint32)
    bits += ((bits >> 16) & 1) + np.uint32(0x7FFF)
    bits &= np.uint32(0xFFFF0000)
    return values


def synth_hidden(
    tokens: int,
    layers: int = 4,
    hidden: int = 7168,
    seed: int = 0,
    *,
    seq_len: int = 1024,
    block: int = 256,
    statistics: Statistics | None = None,
) -> UInt16:
    """Return uint16 [token, layer, hidden] bfloat16 patterns; 2 to 4 s for 1000 tokens of 4 x 7168 on one core.

    Parameters
    ----------
    tokens, layers, hidden
        The shape.
    seed
        The same one gives the same states.
    seq_len
        Tokens of a sequence; each starts anew.
    block
        Tokens made at once.
    statistics
        What the states look like.
    """
    return _Generator(layers, hidden, seed, statistics or Statistics()).states(tokens, seq_len, block)


class _Generator:
    def __init__(self, layers: int, hidden: int, seed: int, s: Statistics) -> None:
        g = np.random.default_rng(seed)
        self.g, self.s, self.layers, self.hidden = g, s, layers, hidden
        # Neighbouring layers share most of their channel scales.
        base = g.standard_normal(hidden)
        self.scales = [
            np.exp2((0.8 * base + 0.6 * g.standard_normal(hidden)) * s.channel_scale_std).astype(np.float32)
            for _ in range(layers)
        ]
        for scale in self.scales:
            scale[g.choice(hidden, max(1, int(s.outlier_channels * hidden)), replace=False)] *= s.outlier_gain
            np.divide(scale, np.sqrt((scale * scale).mean()), out=scale)
        self.means = [(g.standard_normal(hidden) * s.channel_mean).astype(np.float32) for _ in range(layers)]
        self.massive = g.choice(hidden, s.massive_channels, replace=False)
        self.signs = np.where(g.random(s.massive_channels) < 0.5, -1, 1).astype(np.float32)
        self.previous: list[Float32 | None] = [None] * layers

    def states(self, tokens: int, seq_len: int, block: int) -> UInt16:
        out = np.empty((tokens, self.layers, self.hidden), np.uint16)
        for start in range(0, tokens, block):
            place = np.arange(start, min(start + block, tokens)) % seq_len
            token_scale = np.exp2(self.g.standard_normal((len(place), 1)) * self.s.token_scale_std).astype(np.float32)
            below: Float32 | None = None
            for layer in range(self.layers):
                below = self._noise(layer, place, below)
                scale = self.scales[layer] * token_scale * np.float32(self.s.rms[layer % len(self.s.rms)])
                x = self._added(self._tailed(below + self.means[layer]) * scale, scale)
                self._put_massive(x, place < self.s.massive_tokens)
                out[start : start + len(place), layer] = to_bf16(x)
        return out

    def _noise(self, layer: int, place: npt.NDArray[np.int64], below: Float32 | None) -> Float32:
        s = self.s
        z = self.g.standard_normal((len(place), self.hidden), np.float32)
        if s.rho_token:
            a, b = np.float32(s.rho_token), np.float32(np.sqrt(1 - s.rho_token**2))
            last = self.previous[layer]
            for t in range(len(place)):
                if place[t] and last is not None:
                    z[t] = a * last + b * z[t]
                last = z[t]
            self.previous[layer] = None if last is None else last.copy()
        if below is not None and s.rho_layer:
            z = np.float32(s.rho_layer) * below + np.float32(np.sqrt(1 - s.rho_layer**2)) * z
        return z

    def _tailed(self, x: Float32) -> Float32:
        if not self.s.tail:
            return x
        return x * np.exp2(self.g.standard_normal(x.shape, np.float32) * np.float32(self.s.tail))

    def _added(self, x: Float32, scale: Float32) -> Float32:
        """Make x the end of a residual stream: y_k = bf16(y_{k-1} + bf16(d_k))."""
        if not self.s.n_adds:
            return x
        scale = scale * np.float32(self.s.add_rms)
        additions = [_rounded(self.g.standard_normal(x.shape, np.float32) * scale) for _ in range(self.s.n_adds)]
        y = _rounded(x - sum(additions))
        for addition in additions:
            y += addition
            _rounded(y)
        return y

    def _put_massive(self, x: Float32, first: npt.NDArray[np.bool_]) -> None:
        if not first.any() or not self.s.massive_channels:
            return
        median = np.median(np.abs(x[:, :: max(1, self.hidden // 256)]))
        for channel, sign in zip(self.massive, self.signs, strict=True):
            spread = np.exp2(self.g.standard_normal(first.sum()).astype(np.float32) * 0.3)
            x[first, channel] = sign * self.s.massive_ratio * median * spread
