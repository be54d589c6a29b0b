"""Which engines a simulated fleet is made of.

One model throughout, Qwen3-32B in 16 bits (64 GB of weights, 256 KiB of KV per token) on two cards
with tensor parallelism, so that fleets differ in hardware alone. One deployment has a published
prefill rate; the others are estimates, scaled from it by the vendors' peak figures per card:

    card          dense bf16    memory    bandwidth
    H100 SXM      989 TFLOP/s    80 GB    3.35 TB/s
    A100 SXM      312 TFLOP/s    80 GB    2.04 TB/s
    H200 SXM      989 TFLOP/s   141 GB    4.80 TB/s

Prefill and attention scale with arithmetic, reading the KV cache with bandwidth. A step's base is
the weights once (32 GB a card: 9.6 ms on an H100) and 2.4 ms that no card makes shorter; nor does
the cost per decoding sequence change. Nothing here was measured on a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import msgspec

from bench.engine.cost import CostModel


class EngineKind(msgspec.Struct, frozen=True, kw_only=True):
    """One deployment of the model: what its steps cost and what its cache holds."""

    name: str
    cost: CostModel
    kv_tokens: int
    """Capacity of the KV cache, tokens."""
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    source: str
    """Where the figures come from."""


H100_PAIR = EngineKind(
    name="h100-pair-32b",
    cost=CostModel(),
    kv_tokens=288_000,
    source=(
        "prefill rate: llm-d's published 15,928 tokens/s for Qwen3-32B on two H100; the other"
        " constants are estimates chosen to agree with it (bench.engine.cost)"
    ),
)

_FLOPS_H100_PER_A100 = 989 / 312
_BANDWIDTH_H100_PER_A100 = 3.35 / 2.04
_BANDWIDTH_H100_PER_H200 = 3.35 / 4.80
_WEIGHTS_READ_S = 0.0096
_STEP_REST_S = 0.0024

A100_PAIR = EngineKind(
    name="a100",
    cost=CostModel(
        step_base_s=_WEIGHTS_READ_S * _BANDWIDTH_H100_PER_A100 + _STEP_REST_S,
        prefill_token_s=H100_PAIR.cost.prefill_token_s * _FLOPS_H100_PER_A100,
        attention_pair_s=H100_PAIR.cost.attention_pair_s * _FLOPS_H100_PER_A100,
        decode_kv_token_s=H100_PAIR.cost.decode_kv_token_s * _BANDWIDTH_H100_PER_A100,
    ),
    kv_tokens=288_000,
    source=(
        "estimate, scaled by peak figures from h100-pair-32b (A100 SXM: 312 for 989 TFLOP/s, 2.04"
        " for 3.35 TB/s, memory alike); takes both cards to reach the same share of their peak"
    ),
)

H200_PAIR = EngineKind(
    name="h200",
    cost=CostModel(
        step_base_s=_WEIGHTS_READ_S * _BANDWIDTH_H100_PER_H200 + _STEP_REST_S,
        decode_kv_token_s=H100_PAIR.cost.decode_kv_token_s * _BANDWIDTH_H100_PER_H200,
    ),
    kv_tokens=716_000,
    source=(
        "estimate, scaled by peak figures from h100-pair-32b (H200 SXM: 4.80 for 3.35 TB/s, same"
        " arithmetic, 141 for 80 GB a card: 112 GB more at 0.92 of the memory)"
    ),
)

HARDWARE: Mapping[str, EngineKind] = MappingProxyType(
    {kind.name: kind for kind in (H100_PAIR, A100_PAIR, H200_PAIR)}
)
"""By name; the first is the default of every experiment."""
