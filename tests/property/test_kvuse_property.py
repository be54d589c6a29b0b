"""KV tokens held, against a count of every prompt in flight from scratch."""

from __future__ import annotations

from hypothesis import given, strategies as st

from epp.core.kvuse import OUTPUT_TOKENS, UNIT_TOKENS, KvUse, units_of

prompts = st.tuples(
    st.lists(st.integers(0, 1), max_size=9).map(tuple),  # blocks; equal leading ones are shared
    st.integers(0, 700),  # tokens after the last full block
)
steps = st.lists(st.tuples(prompts, st.booleans(), st.integers(0, 20)), max_size=30)
NAMES: dict[tuple[int, ...], int] = {}


def chain_of(blocks: tuple[int, ...]) -> list[int]:
    """Chained names: one per leading part of the prompt."""
    parts = [blocks[: at + 1] for at in range(len(blocks))]
    return [NAMES.setdefault(part, len(NAMES)) for part in parts]


def slow_tokens(held: list[tuple[tuple[int, ...], int]], block_tokens: int) -> int:
    """Distinct full units, and what each request has besides."""
    stride = max(1, UNIT_TOKENS // block_tokens)
    units, own = set(), 0
    for blocks, rest in held:
        full = len(blocks) // stride
        units |= {blocks[: stride * (n + 1)] for n in range(full)}
        own += (len(blocks) - full * stride) * block_tokens + rest + OUTPUT_TOKENS
    return len(units) * stride * block_tokens + own


@given(steps, st.sampled_from([128, 256, 512, 1000]))
def test_a_multiset_of_prompts_holds_what_a_slow_count_says(steps, block_tokens: int) -> None:
    kv, held = KvUse(), []

    def units(blocks: tuple[int, ...], rest: int):
        rest = min(rest, block_tokens - 1)
        return units_of(chain_of(blocks), block_tokens, len(blocks) * block_tokens + rest)

    def check() -> None:
        cut = [(blocks, min(rest, block_tokens - 1)) for blocks, rest in held]
        assert kv.tokens == slow_tokens(cut, block_tokens)

    for asked, comes, which in steps:
        stride = max(1, UNIT_TOKENS // block_tokens)
        there = {b[: stride * (n + 1)] for b, _ in held for n in range(len(b) // stride)}
        mine = {asked[0][: stride * (n + 1)] for n in range(len(asked[0]) // stride)}
        assert kv.shared_tokens(units(*asked)) == len(mine & there) * stride * block_tokens
        if comes or not held:
            held.append(asked)
            kv.add(units(*asked))
        else:
            kv.remove(units(*held.pop(which % len(held))))
        check()
    while held:
        kv.remove(units(*held.pop()))
        check()
    assert kv.tokens == 0
