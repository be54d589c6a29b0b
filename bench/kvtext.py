"""How well the text index tells what engines hold: recorded runs, replayed through it.

Run as `python -m bench.kvtext RUN.jsonl.gz...`. A run has one JSON object a line, in order of
arrival: `request` (id, endpoint, api, body), `events` (endpoint, events of an engine's batch),
`done` (id, tokens of prompt, cached and completion). The truth is what the engine reported as
cached; errors are in tokens, of the endpoint that was asked. The first requests are not scored.
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections.abc import Iterator, Mapping
from statistics import mean
from time import thread_time
from typing import Any, NamedTuple

from epp.core.kvevents import TOKEN_BYTES, Cleared, Event, Removed, Stored
from epp.core.kvindex import KvIndex, pack_tokens
from epp.core.kvtext.index import TextIndex, TextMatch
from epp.core.kvtext.view import view_of
from epp.core.parse import parse_request

UNSCORED = 20
_BLOCKS_MAX = 1_000_000
_PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}


class Scored(NamedTuple):
    """One request: what was foretold and what was so, in tokens."""

    why: str
    foretold: int
    cached: int


class Replay:
    """One run."""

    def __init__(self, rows: list[Mapping[str, Any]]) -> None:
        self.rows = rows
        self.blocks = KvIndex(blocks_max=_BLOCKS_MAX, secret=b"bench")
        self.texts = TextIndex(self.blocks, secret=b"bench")
        names = dict.fromkeys(row["endpoint"] for row in rows if "endpoint" in row)
        self.slots = {name: slot for slot, name in enumerate(names)}
        self.asked: dict[str, tuple[TextMatch, int]] = {}
        self.scored: list[Scored] = []
        self.cpu_s = dict.fromkeys(("view", "path", "match", "join", "events"), 0.0)
        self.chunks = 0

    def run(self) -> None:
        for at, row in enumerate(self.rows):
            getattr(self, "_" + row["kind"])(row, float(at) / 100)

    def _request(self, row: Mapping[str, Any], _now_s: float) -> None:
        body = json.dumps(row["body"], ensure_ascii=False).encode()
        request = parse_request({":path": _PATHS[row["api"]]}, body)
        began = thread_time()
        view = view_of(request.api, body, request.prompts)
        viewed = thread_time()
        assert view is not None
        path = self.texts.path(view, request.model)
        named = thread_time()
        match = self.texts.match(path)
        self.cpu_s["view"] += viewed - began
        self.cpu_s["path"] += named - viewed
        self.cpu_s["match"] += thread_time() - named
        self.chunks += len(path.keys)
        slot = self.slots[row["endpoint"]]
        self.texts.dispatched(row["id"], slot, path)
        self.asked[row["id"]] = (match, slot)

    def _events(self, row: Mapping[str, Any], _now_s: float) -> None:
        slot = self.slots[row["endpoint"]]
        for raw in row["events"]:
            event = _event(raw)
            began = thread_time()
            joined = self.blocks.apply(slot, event)
            applied = thread_time()
            if joined is not None:
                self.texts.joined(slot, joined)
            self.cpu_s["events"] += applied - began
            self.cpu_s["join"] += thread_time() - applied

    def _done(self, row: Mapping[str, Any], now_s: float) -> None:
        prompt, cached, _ = row["prompt_cached_completion_tokens"]
        match, slot = self.asked.pop(row["id"])
        began = thread_time()
        self.texts.ended(row["id"], prompt, now_s=now_s)
        self.cpu_s["join"] += thread_time() - began
        foretold = match.tokens.get(slot, 0)
        self.scored.append(Scored(str(match.why), foretold, cached))


def _event(raw: Mapping[str, Any]) -> Event:
    if raw["type"] == "BlockStored":
        tokens = pack_tokens(raw["token_ids"])
        assert len(tokens) == len(raw["block_hashes"]) * raw["block_size"] * TOKEN_BYTES
        extra = raw.get("extra_keys")
        return Stored(
            tuple(raw["block_hashes"]),
            raw["parent_block_hash"],
            tokens,
            raw["block_size"],
            lora=raw.get("lora_name"),
            extra_keys=None if extra is None else tuple(tuple(e) if e else None for e in extra),
            session_id=raw.get("session_id"),
        )
    if raw["type"] == "BlockRemoved":
        return Removed(tuple(raw["block_hashes"]))
    return Cleared()


def _lines(scored: list[Scored]) -> Iterator[str]:
    yield f"{'case':<8}{'n':>6}{'MAE':>8}{'bias':>8}{'>32':>7}{'>128':>7}"
    for why in ("", *sorted({s.why for s in scored})):
        errors = [s.foretold - s.cached for s in scored if not why or s.why == why]
        yield (
            f"{why or 'all':<8}{len(errors):>6}{mean(map(abs, errors)):>8.2f}{mean(errors):>8.2f}"
            f"{sum(abs(e) > 32 for e in errors):>7}{sum(abs(e) > 128 for e in errors):>7}"
        )


def main() -> None:
    """Replay each run and print its table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("runs", nargs="+", help="recorded runs, gzipped JSON lines")
    for name in parser.parse_args().runs:
        with gzip.open(name, "rt") as file:
            replay = Replay([json.loads(line) for line in file])
        replay.run()
        count = len(replay.scored)
        print(name)
        print(*_lines(replay.scored[UNSCORED:]), sep="\n")
        for stage, seconds in replay.cpu_s.items():
            print(f"{stage:<8}{seconds / count * 1e6:>8.1f} us per request")
        print(f"nodes {replay.texts.nodes}, chunks per request {replay.chunks / count:.0f}")


if __name__ == "__main__":
    main()
