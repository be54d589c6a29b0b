"""A user's own log of requests as a workload: JSON lines, described in docs/replay.md.

A line holds a prompt as text (`prompt` or `messages`) or, where nobody may see the text, as names
of its blocks (`prefix_hashes`). Text is read as the product reads a client's body, and its blocks
are named as the product names them: by four bytes of prompt view per token. Names stand for
prefixes in a workload, so hashes are numbered along their chain.

A line that does not fit is never guessed at: it is an error with its number, or left out and
counted by what is wrong with it. Where most lines are wrong, the file is. The reader streams: of
each request only its blocks are kept, at 8 B each, their names once for all requests;
text is dropped with its line. What the whole may take is bounded, and so is each line.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Iterator, Mapping
from datetime import datetime
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

import msgspec
from msgspec import Raw

from bench.sim.lines import LINE_BYTES_MAX, LineError, at, decode, read_lines
from bench.sim.model import Workload
from bench.sim.plan import (
    Draft,
    Names,
    WorkloadError,
    WorkloadOptions,
    arrange,
    check_size,
    pieces,
)
from epp.core.errors import RequestDropped
from epp.core.parse import ParseLimits, parse_request
from epp.core.prefix import name_blocks, root_of
from epp.core.prompt import PromptLimits
from epp.core.rawjson import EMPTY, is_given

TEXT_BLOCK_TOKENS = 64
"""Default block size where the log holds text: the product's smallest."""
BAD_RATIO_MAX = 0.5
"""Where more of the lines are bad, the log is of another kind than is thought."""
BAD_KINDS_MAX = 12
SPAN_S_MAX = 31 * 86_400.0
MILLISECONDS_MIN = 1e11
"""Seconds since 1970 reach this in the year 5138; milliseconds did in 1973."""

_TOKENS_MAX = 10_000_000
_LIMITS = ParseLimits(
    read_bytes_max=LINE_BYTES_MAX + 1024, prompt=PromptLimits(view_bytes_max=LINE_BYTES_MAX)
)
_CHAT: Mapping[str, str] = MappingProxyType({":path": "/v1/chat/completions"})
_COMPLETION: Mapping[str, str] = MappingProxyType({":path": "/v1/completions"})

Count = Annotated[int, msgspec.Meta(ge=0, le=_TOKENS_MAX)]
Size = Annotated[int, msgspec.Meta(ge=1, le=_TOKENS_MAX)]
Name = Annotated[str, msgspec.Meta(max_length=1024)]


class LogLine(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One line; exactly one of `prompt`, `messages` and `prefix_hashes`."""

    time: float | str
    """When it arrived: seconds, or RFC 3339 with an offset."""
    model: Annotated[str, msgspec.Meta(min_length=1, max_length=1024)]
    prompt: Raw = EMPTY
    """A string, or a list of token ids."""
    messages: Raw = EMPTY
    """As in a chat completion."""
    tools: Raw = EMPTY
    """As in a chat completion; with `messages` only."""
    prefix_hashes: list[int | str] | None = None
    """One per block, each naming all of the prompt up to its end: ints or hex strings."""
    block_tokens: Size | None = None
    """Tokens per block of `prefix_hashes`; the same in the whole file."""
    prompt_tokens: Count | None = None
    """`None`: the estimate of text, as the product makes it."""
    output_tokens: Count
    cache_salt: Name = ""
    """Prompts share blocks only under the same salt (and model)."""
    session: Name | int | None = None
    """Which conversation it belongs to, where the log knows."""


class BadLines:
    """Lines that were left out, by what is wrong with them."""

    def __init__(self) -> None:
        self.count = 0
        self._kinds: dict[str, tuple[LineError, int]] = {}
        """The first of each kind, and how many there are."""

    def add(self, error: LineError) -> None:
        """One more."""
        self.count += 1
        kind = re.sub(r"\d+", "N", error.what)
        if kind not in self._kinds and len(self._kinds) >= BAD_KINDS_MAX:
            kind = ""  # all others together
        first, count = self._kinds.get(kind, (error, 0))
        self._kinds[kind] = (first, count + 1)

    def told(self, lines: int) -> list[str]:
        """What a person has to know, most frequent first; nothing when all lines were good.

        Args:
            lines: those that were read, these included.
        """
        if not self.count:
            return []
        kinds = sorted(self._kinds.items(), key=lambda each: -each[1][1])
        head = f"{self.count} of {lines} lines of the log are left out:"
        return [head, *(_told_kind(kind, *found) for kind, found in kinds)]


def _told_kind(kind: str, first: LineError, count: int) -> str:
    if not kind:
        return f"{count} with something else, the first of them line {first.number}"
    others = f" (and {count - 1} more like it)" if count > 1 else ""
    return f"line {first.number} {first.what}{others}"


def load(
    path: str | Path,
    *,
    speed: float = 1.0,
    requests_max: int | None = None,
    block_tokens: int | None = None,
    bad: BadLines | None = None,
) -> Workload:
    """Read a log.

    Args:
        path: decompressed on the way when its name ends in `.gz`.
        speed: times are divided by it.
        requests_max: only so many requests are read; `None` = all.
        block_tokens: of the workload; `None` = the log's own, for text `TEXT_BLOCK_TOKENS`.
        bad: takes the lines that cannot be used; `None`: the first of them is raised.

    Raises:
        WorkloadError: the file cannot be used; names the line.
    """
    # The options check the numbers; which block size it is in the end, only the file tells.
    options = WorkloadOptions(
        speed=speed, requests_max=requests_max, block_tokens=block_tokens or 1
    )
    path = Path(path)
    reader = _Reader(path, block_tokens, bad)
    drafts = list(islice(reader.drafts(), requests_max))
    if bad is not None and bad.count > BAD_RATIO_MAX * (bad.count + len(drafts)):
        told = "\n  ".join(bad.told(bad.count + len(drafts)))
        raise WorkloadError(f"{path} is no log of the expected form: {told}")
    if not drafts:
        raise WorkloadError(f"{path} holds no request; one JSON object per line is expected")
    start_s = min(draft.at_s for draft in drafts)
    drafts = [draft._replace(at_s=(draft.at_s - start_s) / speed) for draft in drafts]
    options = msgspec.structs.replace(options, block_tokens=reader.block_tokens)
    return arrange(path.name.removesuffix(".gz").removesuffix(".jsonl"), drafts, options)


class _Reader:
    """Turns lines into drafts; `at_s` is still the log's own time."""

    def __init__(self, path: Path, block_tokens: int | None, bad: BadLines | None) -> None:
        self.block_tokens = block_tokens or 0
        """Of the workload; 0 until the first line tells."""
        self._wanted_tokens = block_tokens or 0
        self._path = path
        self._bad = bad
        self._names = Names()
        self._sessions: dict[str | int, int] = {}
        self._unit_tokens: int | None = None
        """Of the log's hashes; 0 = it holds text, `None` until the first line tells."""
        self._span_s: tuple[float, float] | None = None
        """The earliest and the latest time, of the lines that are used."""

    def drafts(self) -> Iterator[Draft]:
        decoder = msgspec.json.Decoder(LogLine)
        requests = blocks = 0
        for number, text in read_lines(self._path, None if self._bad is None else self._bad.add):
            try:
                draft = self._read(decoder, number, text)
            except LineError as error:
                if self._bad is None:
                    raise
                self._bad.add(error)
                continue
            requests += 1
            blocks += len(draft.blocks)
            check_size(str(self._path), requests=requests, blocks=blocks)
            yield draft

    def _read(self, decoder: msgspec.json.Decoder[LogLine], number: int, text: bytes) -> Draft:
        line = decode(decoder, self._path, number, text)
        try:
            return self._draft(line)
        except WorkloadError as error:
            raise at(self._path, number, str(error)) from None

    def _draft(self, line: LogLine) -> Draft:
        at_s, unit_tokens = seconds(line.time), _unit_tokens(line)
        span_s = self._widened(at_s)
        chain, prompt_tokens = self._prompt(line, unit_tokens)
        # From here on nothing is wrong with the line: what is remembered of it counts.
        self._span_s = span_s
        self._unit_tokens = unit_tokens
        session = line.session
        return Draft(
            at_s=at_s,
            prompt_tokens=prompt_tokens,
            output_tokens=max(1, line.output_tokens),
            blocks=chain,
            session=None
            if session is None
            else self._sessions.setdefault(session, len(self._sessions)),
            model=line.model,
        )

    def _widened(self, at_s: float) -> tuple[float, float]:
        earliest_s, latest_s = self._span_s or (at_s, at_s)
        span_s = (min(at_s, earliest_s), max(at_s, latest_s))
        if span_s[1] - span_s[0] > SPAN_S_MAX:
            raise WorkloadError(
                "lies more than 31 days from another line; all times must count from one moment, "
                "and a replay of so long a log needs a part of it"
            )
        return span_s

    def _prompt(self, line: LogLine, unit_tokens: int) -> tuple[tuple[int, ...], int]:
        """The chain and its prompt's tokens."""
        if self._unit_tokens is None:
            self.block_tokens = self._wanted_tokens or unit_tokens or TEXT_BLOCK_TOKENS
        elif unit_tokens != self._unit_tokens:
            raise WorkloadError(
                "mixes text and prefix_hashes, or sizes of blocks; one file has one of them"
            )
        root = self._names.root(root_of(line.model, line.cache_salt))
        parts: Iterable[Hashable]
        if line.prefix_hashes is None:
            parts, estimate = text_blocks(line, self.block_tokens)
        else:
            hashes = [_hash(each) for each in line.prefix_hashes]
            parts = pieces(hashes, unit_tokens=unit_tokens, block_tokens=self.block_tokens)
            estimate = 0
        prompt_tokens = max(1, line.prompt_tokens or estimate)
        full = islice(parts, prompt_tokens // self.block_tokens)
        return self._names.chain(root, full), prompt_tokens


def _unit_tokens(line: LogLine) -> int:
    """Tokens per hash, 0 for text. Raises: WorkloadError, see `check_shape`."""
    check_shape(line)
    return 0 if line.prefix_hashes is None else line.block_tokens or 0


def check_shape(line: LogLine) -> None:
    """Raises: WorkloadError unless the line has one prompt, and what belongs to it."""
    given = [is_given(line.prompt), is_given(line.messages), line.prefix_hashes is not None]
    if sum(given) != 1:
        raise WorkloadError('needs exactly one of "prompt", "messages" and "prefix_hashes"')
    if is_given(line.tools) and not given[1]:
        raise WorkloadError('has "tools" without "messages"')
    if line.prefix_hashes is None:
        if line.block_tokens is not None:
            raise WorkloadError('has "block_tokens", which belong to "prefix_hashes"')
        return
    if line.block_tokens is None or not line.prompt_tokens:
        raise WorkloadError('has "prefix_hashes" without "block_tokens" or "prompt_tokens"')
    if len(line.prefix_hashes) > -(-line.prompt_tokens // line.block_tokens):
        raise WorkloadError(
            f"has {len(line.prefix_hashes)} prefix_hashes; {line.prompt_tokens} prompt_tokens in "
            f"blocks of {line.block_tokens} have fewer"
        )


def text_blocks(line: LogLine, block_tokens: int) -> tuple[list[int], int]:
    """Names of a text prompt's full blocks, and the product's estimate of its tokens.

    Raises:
        WorkloadError: the prompt has a form that the product would not look into.
    """
    request_body, headers = _body(line)
    try:
        request = parse_request(headers, request_body, limits=_LIMITS)
    except RequestDropped as error:
        raise WorkloadError(f"is refused by the product: {error}") from None
    if len(request.prompts) != 1:
        raise WorkloadError(
            'has a "prompt" that is no string or list of token ids, or "messages" that are no list '
            "of chat messages"
        )
    names = name_blocks(
        request.prompts[0],
        block_tokens=block_tokens,
        root=root_of(line.model, line.cache_salt),
        blocks_max=0,
    )
    return names, request.prompt_tokens


def _body(line: LogLine) -> tuple[bytes, Mapping[str, str]]:
    fields: dict[str, Any] = {"model": line.model}
    if is_given(line.prompt):
        return msgspec.json.encode({**fields, "prompt": line.prompt}), _COMPLETION
    fields["messages"] = line.messages
    if is_given(line.tools):
        fields["tools"] = line.tools
    return msgspec.json.encode(fields), _CHAT


def seconds(time: float | str) -> float:
    """Seconds since the log's own zero (for RFC 3339: since 1970).

    Raises:
        WorkloadError: it is neither.
    """
    if isinstance(time, str):
        return _rfc3339_s(time)
    if abs(time) >= MILLISECONDS_MIN:
        raise WorkloadError('has a "time" that is no plausible number of seconds; milliseconds?')
    return time


def _rfc3339_s(time: str) -> float:
    try:
        when = datetime.fromisoformat(time)
        if when.tzinfo is not None:
            return when.timestamp()
    except (ValueError, OverflowError):
        pass
    raise WorkloadError(
        'has a "time" that is neither a number of seconds nor RFC 3339 with an offset, like '
        "2026-01-31T12:00:00.250Z"
    )


def _hash(value: int | str) -> int:
    if isinstance(value, int):
        return value
    try:
        if len(value) <= 128:
            return int(value, 16)
    except ValueError:
        pass
    raise WorkloadError('has "prefix_hashes" that are neither integers nor hex strings')
