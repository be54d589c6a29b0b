"""A fixed number of the cases of `tests.fuzz_http2`; `python -m tests.fuzz_http2` runs more."""

from __future__ import annotations

import pytest

from tests.fuzz_http2 import Case

CASES = 2_000


@pytest.mark.parametrize("first", range(0, CASES, 500))
def test_broken_connections_never_raise_and_hold_bounded_memory(first: int) -> None:
    for number in range(first, first + 500):
        try:
            Case(number).run()
        except Exception as error:
            raise AssertionError(f"python -m tests.fuzz_http2 --case {number}") from error
