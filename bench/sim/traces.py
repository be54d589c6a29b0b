"""Public traces as workloads, read from a folder that the user fills.

The files stay with their publishers; `SOURCES` says what each is and where it is published. A file
may have its published name or a short one, and may be compressed with gzip.

- Mooncake: one request per line, with an id per 512 prompt tokens. The ids are chained: an equal id
  means an equal prompt up to there. The conversation trace has its times rounded to 3 s, with up to
  28 arrivals at one instant; jitter spreads them over that time, `conversation-raw` does not.
- weka: agentic coding sessions, an id per 64 tokens that means something only within its session
  (and model). A session begins at a random time (open loop: nobody waits for an answer), and its
  pauses are kept, up to `gap_s_max`; a nested group of requests runs on the clock of its session.
- Azure: times and lengths without prompts. Every prompt gets blocks of its own: nothing can be
  reused, but caches and indexes fill as they would.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from itertools import accumulate, count, islice, pairwise
from operator import itemgetter
from pathlib import Path
from random import Random
from types import MappingProxyType
from typing import Annotated

import msgspec

from bench.sim.lines import LINE_BYTES_MAX, at, decode, read_lines
from bench.sim.model import Workload
from bench.sim.plan import (
    Draft,
    Names,
    WorkloadError,
    WorkloadOptions,
    arrange,
    pieces,
)

Tokens = Annotated[int, msgspec.Meta(ge=1, le=10_000_000)]
Output = Annotated[int, msgspec.Meta(ge=0, le=10_000_000)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e10)]

MOONCAKE_BLOCK_TOKENS = 512
SESSIONS_MAX = 100_000
_SESSION_ENTRIES_MAX = 100_000


class Source(msgspec.Struct, frozen=True):
    """One trace: what it is, under which names it is looked for, where it is published."""

    what: str
    files: tuple[str, ...]
    """Names in the folder, tried in order, each also with `.gz`; one without a suffix is a folder
    of `.json` files."""
    published: str


SOURCES: Mapping[str, Source] = MappingProxyType(
    {
        "conversation": Source(
            "the conversation trace of Mooncake",
            ("conversation_trace.jsonl", "mooncake_conversation.jsonl"),
            "project kvcache-ai/Mooncake, FAST25-release/traces/conversation_trace.jsonl",
        ),
        "synthetic": Source(
            "the synthetic trace of Mooncake",
            ("synthetic_trace.jsonl", "mooncake_synthetic.jsonl"),
            "project kvcache-ai/Mooncake, FAST25-release/traces/synthetic_trace.jsonl",
        ),
        "weka": Source(
            "agentic coding sessions, one JSON object per line or per file",
            ("weka.jsonl", "weka_dev.jsonl", "weka"),
            "project callanjfox/kv-cache-tester, the .json files of its folder traces",
        ),
        "azure": Source(
            "the conversation part of the Azure LLM inference trace 2023",
            ("AzureLLMInferenceTrace_conv.csv", "azure_2023_conv.csv"),
            "project Azure/AzurePublicDataset, AzureLLMInferenceTrace_conv.csv",
        ),
    }
)


def find(name: str, options: WorkloadOptions) -> Path:
    """The file (or folder) of a trace.

    Raises:
        WorkloadError: no folder is given, or the trace is not in it.
    """
    source = SOURCES[name]
    folder = options.traces or os.environ.get("TRACES")
    needed = f"{source.what}, published by {source.published}"
    if not folder:
        raise WorkloadError(
            f"workload {name} needs {needed}; name the folder it is in with --traces or TRACES"
        )
    for file in source.files:
        for candidate in (Path(folder, file), Path(folder, f"{file}.gz")):
            if candidate.exists():
                return candidate
    raise WorkloadError(f"{folder} has no {' or '.join(source.files)} (or .gz): {needed}")


JITTER_S: Mapping[str, float] = MappingProxyType(
    {"conversation": 3.05, "synthetic": 1.0, "azure": 1.0}
)
"""Default `jitter_s`. The conversation trace's covers its rounding; the others' is there for the
seed: their arrivals are a Poisson process with it as without."""


class _Clock:
    """When the requests of a trace arrive in the run; asked once per request, in the file's order,
    so that a seed shifts the same request alike at every speed."""

    def __init__(self, name: str, options: WorkloadOptions) -> None:
        self._jitter_s = JITTER_S[name] if options.jitter_s is None else options.jitter_s
        self._speed = options.speed
        self._rng = Random(options.seed)

    def at_s(self, recorded_s: float) -> float:
        return (recorded_s + self._rng.random() * self._jitter_s) / self._speed


# ---- Mooncake ----


class _MooncakeLine(msgspec.Struct, gc=False):
    timestamp: Annotated[float, msgspec.Meta(ge=0, le=1e13)]
    """Milliseconds since the start."""
    input_length: Tokens
    output_length: Output
    hash_ids: list[int]


def mooncake_conversation(options: WorkloadOptions) -> Workload:
    """12,031 chat requests in 59 minutes; see the module."""
    return _mooncake("conversation", options)


def mooncake_conversation_raw(options: WorkloadOptions) -> Workload:
    """The same at the rounded times of the file, in bursts; every seed gives the same."""
    return _mooncake("conversation", msgspec.structs.replace(options, jitter_s=0.0))


def mooncake_synthetic(options: WorkloadOptions) -> Workload:
    """3,993 requests in 17 minutes, 65 % of whose tokens can be reused."""
    return _mooncake("synthetic", options)


def _mooncake(name: str, options: WorkloadOptions) -> Workload:
    drafts = _mooncake_drafts(find(name, options), _Clock(name, options), options.block_tokens)
    return arrange(name, islice(drafts, options.requests_max), options)


def _mooncake_drafts(path: Path, clock: _Clock, block_tokens: int) -> Iterator[Draft]:
    decoder = msgspec.json.Decoder(_MooncakeLine)
    names = Names()
    root = names.root("mooncake")
    for number, text in read_lines(path):
        line = decode(decoder, path, number, text)
        parts = pieces(line.hash_ids, unit_tokens=MOONCAKE_BLOCK_TOKENS, block_tokens=block_tokens)
        blocks = names.chain(root, islice(parts, line.input_length // block_tokens))
        yield Draft(
            at_s=clock.at_s(line.timestamp / 1000.0),
            prompt_tokens=line.input_length,
            output_tokens=max(1, line.output_length),
            blocks=blocks,
        )


# ---- weka ----


class _Entry(msgspec.Struct, rename={"prompt_tokens": "in", "output_tokens": "out"}):
    """A request, or a nested group of them: then `requests` is there, and `t` is when it began."""

    t: Seconds
    """Since the start of the session, or of the group."""
    model: str = ""
    prompt_tokens: Output = 0
    output_tokens: Output = 0
    hash_ids: list[int] = []
    requests: list[_Entry] | None = None


class _Session(msgspec.Struct):
    id: str
    block_size: Annotated[int, msgspec.Meta(ge=1, le=65536)]
    requests: list[_Entry]


def weka(options: WorkloadOptions) -> Workload:
    """Agentic coding sessions: long prompts that grow, 95 % of whose tokens can be reused."""
    path = find("weka", options)
    total = sum(1 for _ in islice(_session_texts(path), SESSIONS_MAX))
    rng = Random(options.seed)
    chosen = rng.sample(range(total), min(total, options.sessions or total))
    rate = options.sessions_per_s * options.speed
    starts = accumulate(rng.expovariate(rate) for _ in chosen)
    return arrange(
        "weka", _weka_drafts(path, dict(zip(chosen, starts, strict=True)), options), options
    )


def _weka_drafts(
    path: Path, starts: Mapping[int, float], options: WorkloadOptions
) -> Iterator[Draft]:
    """`starts`: place of a session in the trace -> when it starts."""
    decoder = msgspec.json.Decoder(_Session)
    names = Names()
    for place, (file, number, text) in enumerate(_session_texts(path)):
        if (start_s := starts.get(place)) is not None:
            session = decode(decoder, file, number, text)
            yield from _session_drafts(session, place, start_s, names, options)
            names.forget()


def _session_texts(path: Path) -> Iterator[tuple[Path, int, bytes]]:
    """File, line and text of each session."""
    if not path.is_dir():
        yield from ((path, number, text) for number, text in read_lines(path))
        return
    for file in sorted(path.glob("*.json"))[:SESSIONS_MAX]:
        if file.stat().st_size > LINE_BYTES_MAX:
            raise WorkloadError(f"{file} is longer than {LINE_BYTES_MAX} bytes; leave it out")
        yield file, 1, file.read_bytes()


def _session_drafts(
    session: _Session, place: int, start_s: float, names: Names, options: WorkloadOptions
) -> Iterator[Draft]:
    entries = list(islice(_flat(session.requests), _SESSION_ENTRIES_MAX))
    entries.sort(key=itemgetter(0))
    gaps = (min(options.gap_s_max, late - early) for (early, _), (late, _) in pairwise(entries))
    for at_s, (_, entry) in zip(accumulate(gaps, initial=start_s), entries, strict=False):
        parts = pieces(
            entry.hash_ids, unit_tokens=session.block_size, block_tokens=options.block_tokens
        )
        root = names.root((place, entry.model))
        full = entry.prompt_tokens // options.block_tokens
        yield Draft(
            at_s=at_s,
            prompt_tokens=entry.prompt_tokens,
            output_tokens=max(1, entry.output_tokens),
            blocks=names.chain(root, islice(parts, full)),
            session=place,
        )


def _flat(entries: list[_Entry], start_s: float = 0.0) -> Iterator[tuple[float, _Entry]]:
    """Requests and when each was sent, nested ones included. The decoder bounds the depth."""
    for entry in entries:
        if entry.requests is not None:
            yield from _flat(entry.requests, start_s + entry.t)
        elif entry.prompt_tokens:
            yield start_s + entry.t, entry


# ---- Azure ----

_AZURE_COLUMNS = b"TIMESTAMP,ContextTokens,GeneratedTokens"


def azure(options: WorkloadOptions) -> Workload:
    """19,366 short chat requests in 58 minutes, without common prefixes."""
    drafts = _azure_drafts(find("azure", options), _Clock("azure", options), options.block_tokens)
    return arrange("azure", islice(drafts, options.requests_max), options)


def _azure_drafts(path: Path, clock: _Clock, block_tokens: int) -> Iterator[Draft]:
    fresh = count()
    start_s: float | None = None
    for number, text in read_lines(path):
        if number == 1:
            if text.replace(b" ", b"") != _AZURE_COLUMNS:
                raise at(path, number, f"is not the header {_AZURE_COLUMNS.decode()}")
            continue
        recorded_s, prompt_tokens, output_tokens = _azure_row(path, number, text)
        start_s = recorded_s if start_s is None else start_s
        yield Draft(
            at_s=clock.at_s(recorded_s - start_s),
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            blocks=tuple(islice(fresh, prompt_tokens // block_tokens)),
        )


def _azure_row(path: Path, number: int, text: bytes) -> tuple[float, int, int]:
    """Seconds, prompt tokens, output tokens. Its times have seven decimals, Python reads six."""
    try:
        when, prompt, output = text.decode("ascii").split(",")
        # The zone does not matter, only differences do; naming one avoids the machine's own.
        recorded = datetime.fromisoformat(f"{when.strip()[:26]}+00:00")
        tokens = int(prompt), int(output)
        if not all(0 <= each <= 10_000_000 for each in tokens):
            raise ValueError(f"{tokens} is no count of tokens")
    except ValueError as error:
        raise at(path, number, f"is not time, prompt tokens, output tokens: {error}") from None
    return recorded.timestamp(), max(1, tokens[0]), max(1, tokens[1])


TRACES: Mapping[str, Callable[[WorkloadOptions], Workload]] = MappingProxyType(
    {
        "conversation": mooncake_conversation,
        "conversation-raw": mooncake_conversation_raw,
        "synthetic": mooncake_synthetic,
        "weka": weka,
        "azure": azure,
    }
)
