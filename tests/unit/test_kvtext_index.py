"""What each engine holds of a text, as engines with a tokenizer of four bytes a token tell it."""

import hashlib
import json

import pytest

from epp.core.kvevents import Stored
from epp.core.kvindex import KvIndex
from epp.core.kvindex.keys import pack_tokens
from epp.core.kvtext.index import TextIndex
from epp.core.kvtext.view import view_of
from epp.core.model import Api
from epp.core.parse import parse_request

BLOCK_TOKENS = 16
SECRET = b"0123456789abcdef"
HEADERS = {":method": "POST", ":path": "/v1/completions", "content-type": "application/json"}


def body(text: str, **fields: object) -> bytes:
    return json.dumps({"model": "m", "prompt": text, **fields}).encode()


class Engines:
    """Engines that hold for ever what they once computed."""

    def __init__(self, *, nodes_max: int = 10_000) -> None:
        self.blocks = KvIndex(blocks_max=100_000, secret=SECRET)
        self.texts = TextIndex(self.blocks, nodes_max=nodes_max, secret=SECRET)
        self.held: dict[int, set[int]] = {}
        self.asked = 0

    def path(self, data: bytes):
        request = parse_request(HEADERS, data)
        view = view_of(Api.COMPLETIONS, data, request.prompts)
        assert view is not None
        return self.texts.path(view, request.model)

    def match(self, data: bytes):
        return self.texts.match(self.path(data))

    def serve(self, slot: int, data: bytes, *, named: bool = True, late: bool = False) -> int:
        """One request, from dispatch to end; returns its prompt tokens."""
        self.asked += 1
        session = f"{self.asked:016x}"
        self.texts.dispatched(session, slot, self.path(data))
        fields = json.loads(data)
        text = (fields.get("cache_salt", "") + "|" + fields["prompt"]).encode()
        tokens = [int.from_bytes(text[i : i + 4]) % 2**31 for i in range(0, len(text), 4)]
        if late:
            self.texts.ended(session, len(tokens), now_s=float(self.asked))
        self._compute(slot, tokens, session if named else None)
        if not late:
            self.texts.ended(session, len(tokens), now_s=float(self.asked))
        return len(tokens)

    def _compute(self, slot: int, tokens: list[int], session: str | None) -> None:
        parent, held = None, self.held.setdefault(slot, set())
        for at in range(0, len(tokens) // BLOCK_TOKENS * BLOCK_TOKENS, BLOCK_TOKENS):
            part = tokens[at : at + BLOCK_TOKENS]
            digest = hashlib.sha256(repr((parent, part)).encode()).digest()
            name = int.from_bytes(digest[:7])
            if name not in held:
                held.add(name)
                event = Stored((name,), parent, pack_tokens(part), BLOCK_TOKENS, session_id=session)
                joined = self.blocks.apply(slot, event)
                if joined is not None:
                    self.texts.joined(slot, joined)
                else:
                    self.texts.unnamed(slot)
            parent = name


TEXT = "".join(f"Sentence {n} of a long story that is told again. " for n in range(60))


def test_what_was_never_asked_is_held_by_nobody() -> None:
    engines = Engines()
    assert engines.match(body(TEXT)).tokens == {}
    engines.serve(0, body("something else entirely, and long enough " * 20))
    assert engines.match(body(TEXT)).tokens == {}


@pytest.mark.parametrize("late", [False, True])
def test_the_same_prompt_again_is_held_in_whole_blocks_where_it_was_served(late: bool) -> None:
    engines = Engines()
    tokens = engines.serve(1, body(TEXT), late=late)
    found = engines.match(body(TEXT)).tokens
    assert found == {1: tokens // BLOCK_TOKENS * BLOCK_TOKENS}


def test_two_that_part_are_known_to_part_there() -> None:
    engines = Engines()
    first, second = body(TEXT + "A" * 400), body(TEXT + "B" * 400)
    engines.serve(0, first)
    engines.serve(0, second)
    common = (len(TEXT) + 1) // 4
    found = engines.match(body(TEXT + "C" * 400)).tokens[0]
    assert common - 3 * BLOCK_TOKENS <= found <= common + BLOCK_TOKENS


def test_who_serves_what_another_has_served_holds_it_too() -> None:
    engines = Engines()
    for slot in (0, 3):
        tokens = engines.serve(slot, body(TEXT))
    assert set(engines.match(body(TEXT)).tokens) == {0, 3}
    assert max(engines.match(body(TEXT)).tokens.values()) <= tokens


def test_salts_and_models_are_kept_apart() -> None:
    engines = Engines()
    engines.serve(0, body(TEXT, cache_salt="a"))
    assert engines.match(body(TEXT, cache_salt="b")).tokens == {}
    assert engines.match(body(TEXT, model="other", cache_salt="a")).tokens == {}
    assert engines.match(body(TEXT, cache_salt="a")).tokens


def test_an_endpoint_that_left_holds_nothing() -> None:
    engines = Engines()
    engines.serve(0, body(TEXT))
    engines.blocks.forget(0)
    engines.texts.forget(0)
    assert engines.match(body(TEXT)).tokens.get(0, 0) == 0


def test_an_engine_that_names_no_session_is_known_for_one() -> None:
    engines = Engines()
    assert not engines.texts.names_us(0)
    engines.serve(0, body(TEXT), named=False)
    assert not engines.texts.names_us(0)
    engines.serve(0, body("another " * 100))
    assert engines.texts.names_us(0)


def test_an_id_that_is_not_ours_changes_nothing() -> None:
    engines = Engines()
    engines.serve(0, body(TEXT))
    before = engines.match(body(TEXT)).tokens
    engines._compute(0, list(range(1000, 1064)), "somebody-else")
    assert engines.match(body(TEXT)).tokens == before


def test_what_is_remembered_is_bounded() -> None:
    engines = Engines(nodes_max=200)
    for number in range(60):
        engines.serve(0, body(f"{number} " + TEXT))
    assert engines.texts.nodes <= 200
    assert engines.match(body("59 " + TEXT)).tokens.get(0, 0) > 0


def test_usage_that_no_engine_can_mean_breaks_nothing() -> None:
    engines = Engines()
    tokens = engines.serve(0, body(TEXT))
    for number, nonsense in enumerate((-(2**40), -1, 0, 2**40)):
        session = f"{number:016x}{number:x}"
        engines.texts.dispatched(session, 0, engines.path(body(TEXT)))
        engines.texts.ended(session, nonsense, now_s=100.0 + number)
    assert 0 <= engines.match(body(TEXT)).tokens.get(0, 0) <= tokens
