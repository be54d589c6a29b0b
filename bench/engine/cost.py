"""How long one engine step takes: one linear model, one calibrated set of constants.

step_s = ( step_base_s
         + prefill_tokens   * prefill_token_s
         + attention_pairs  * attention_pair_s      each chunk token times the context it sees
         + decode_sequences * decode_sequence_s
         + decode_kv_tokens * decode_kv_token_s ) / speed
"""

from __future__ import annotations

import msgspec


class CostModel(msgspec.Struct, frozen=True, kw_only=True):
    """Constants of one deployment; the defaults are Qwen3-32B on two H100 with tensor parallelism.

    Source: the prefill rate is llm-d's published 15 928 tokens/s for that deployment (vLLM 0.19,
    one chunk of 8192 tokens); the other constants are estimates chosen to agree with it, and were
    never checked on a GPU.
    """

    step_base_s: float = 0.012
    """Reading the weights once: what a step costs with next to nothing in it."""
    prefill_token_s: float = 1 / 15928
    attention_pair_s: float = 2.2e-10
    """One prompt token attending to one earlier token."""
    decode_sequence_s: float = 6e-5
    decode_kv_token_s: float = 5.6e-8
    """One decoding sequence reading one token of its KV cache."""
    speed: float = 1.0
    """The whole engine faster by this factor, > 0; for demos on small machines."""

    def step_s(
        self,
        *,
        prefill_tokens: int = 0,
        attention_pairs: float = 0.0,
        decode_sequences: int = 0,
        decode_kv_tokens: int = 0,
    ) -> float:
        """Seconds of one step with this batch."""
        work_s = (
            self.step_base_s
            + prefill_tokens * self.prefill_token_s
            + attention_pairs * self.attention_pair_s
            + decode_sequences * self.decode_sequence_s
            + decode_kv_tokens * self.decode_kv_token_s
        )
        return work_s / self.speed
