"""From an access log of an OpenAI-style gateway to the lines that a replay reads.

    python -m bench.sim.accesslog IN > OUT        IN may be `-`, or end in `.gz`

Reads JSON lines of three forms, told apart line by line (docs/replay.md has an example of each):

- a request and its response: `timestamp`, `request` (the body), `response` (with `usage`)
- a payload of LiteLLM's loggers: `startTime`, `messages`, `model`, `prompt_tokens`, ...
- a line of an OpenAI batch: `body`, and `response.body` in its output

With `--hash` the output holds no text: a prompt becomes one keyed hash per block. The key is drawn
anew for each conversion unless one is given, so that nobody can tell by trial what a hash stands
for; two conversions under one key can be put together. Times, lengths, model names, and which
prompts begin alike remain visible. What the log lacks is not made up unless an option says how.
"""

from __future__ import annotations

import argparse
import hashlib
import secrets
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO, TextIO

import msgspec
from msgspec import Raw

from bench.sim.lines import at, decode, read_lines
from bench.sim.plan import WorkloadError
from bench.sim.replay import (
    MILLISECONDS_MIN,
    TEXT_BLOCK_TOKENS,
    LogLine,
    check_shape,
    seconds,
    text_blocks,
)
from epp.core.rawjson import EMPTY, first_byte, is_given, is_true, text_of, whole_of

_TIME_KEYS = ("timestamp", "time", "startTime", "start_time", "created_at")
_REDACTED = b'"redacted-by-litellm"'
_HASH_BYTES = 8


class Entry(msgspec.Struct):
    """A line of a log, a request's body or a response: every key of any form that is read. Other
    keys are ignored, as each logger has its own."""

    timestamp: Raw = EMPTY
    time: Raw = EMPTY
    startTime: Raw = EMPTY  # noqa: N815 - LiteLLM's key
    start_time: Raw = EMPTY
    created_at: Raw = EMPTY
    request: Raw = EMPTY
    body: Raw = EMPTY
    response: Raw = EMPTY
    model: Raw = EMPTY
    prompt: Raw = EMPTY
    messages: Raw = EMPTY
    tools: Raw = EMPTY
    model_parameters: Raw = EMPTY
    cache_salt: Raw = EMPTY
    cache_hit: Raw = EMPTY
    usage: Raw = EMPTY
    prompt_tokens: Raw = EMPTY
    completion_tokens: Raw = EMPTY
    input_tokens: Raw = EMPTY
    output_tokens: Raw = EMPTY


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """How a log is converted."""

    rate_per_s: float | None = None
    """Times are made up, so many requests per second, evenly; `None`: the log's own."""
    output_tokens: int | None = None
    """For requests whose log tells no usage; `None`: such a line is an error."""
    hash_key: bytes | None = None
    """Hashes instead of text, under this key; `None`: text."""
    block_tokens: int = TEXT_BLOCK_TOKENS
    """Of the hashes."""


class NotServed(Exception):  # noqa: N818 - a finding, not an error
    """The line's request never reached an engine, so it is no load."""


_EMPTY_ENTRY = Entry()
_entry = msgspec.json.Decoder(Entry)


def convert(path: Path, options: Options) -> Iterator[LogLine | WorkloadError | None]:
    """One result per line of the log, in its order: a line of a replay, what is wrong with it, or
    `None` where no engine served it.

    Raises:
        WorkloadError: the file cannot be read.
    """
    written = 0
    for number, text in read_lines(path):
        try:
            entry = decode(_entry, path, number, text)
        except WorkloadError as error:
            yield error
            continue
        try:
            yield _line(entry, written, options)
            written += 1
        except NotServed:
            yield None
        except WorkloadError as error:
            yield at(path, number, str(error))


def _line(entry: Entry, place: int, options: Options) -> LogLine:
    if is_true(entry.cache_hit):
        raise NotServed
    body = _nested(entry.request, entry.body) or entry
    output_tokens = _tokens(entry, "completion_tokens", "output_tokens")
    if output_tokens is None:
        output_tokens = options.output_tokens
    if output_tokens is None:
        raise WorkloadError(
            "tells no completion tokens (usage); take --output-tokens for such lines"
        )
    line = LogLine(
        time=_time_s(entry) if options.rate_per_s is None else place / options.rate_per_s,
        model=text_of(body.model) or text_of(entry.model) or _refuse('names no "model"'),
        prompt_tokens=_tokens(entry, "prompt_tokens", "input_tokens") or None,
        output_tokens=output_tokens,
        cache_salt=text_of(body.cache_salt),
    )
    _add_prompt(line, body)
    check_shape(line)
    names, estimate = text_blocks(line, options.block_tokens)  # also when text is kept: a check
    if options.hash_key is not None:
        _hide(line, names, estimate, options)
    return line


def _add_prompt(line: LogLine, body: Entry) -> None:
    prompt = body.messages if first_byte(body.messages) == b'"' else body.prompt
    if _REDACTED in bytes(body.messages):
        _refuse("has its text removed by the logger; prompts that differ would seem alike")
    if is_given(prompt):
        line.prompt = prompt
    elif is_given(body.messages):
        line.messages = body.messages
        tools = (
            body.tools if is_given(body.tools) else _nested_or_empty(body.model_parameters).tools
        )
        line.tools = tools if is_given(tools) else EMPTY
    else:
        _refuse('has neither "messages" nor "prompt"')


def _hide(line: LogLine, names: Sequence[int], estimate: int, options: Options) -> None:
    """Hashes instead of the text. The salt goes too: it is part of the names."""
    key = options.hash_key or b""
    line.prompt_tokens = max(1, line.prompt_tokens or estimate)
    line.prefix_hashes = [
        hashlib.blake2b(name.to_bytes(8, "big"), digest_size=_HASH_BYTES, key=key).hexdigest()
        for name in names[: line.prompt_tokens // options.block_tokens]
    ]
    line.block_tokens = options.block_tokens
    line.prompt = line.messages = line.tools = EMPTY
    line.cache_salt = ""


def _tokens(entry: Entry, *keys: str) -> int | None:
    """A count of tokens, from wherever the form has it: the line, its usage, its response's."""
    response = _nested_or_empty(entry.response)
    usages = (entry.usage, response.usage, _nested_or_empty(response.body).usage)
    for holder in (*map(_nested_or_empty, usages), entry):
        for key in keys:
            if (tokens := whole_of(getattr(holder, key))) is not None:
                return tokens
    return None


def _time_s(entry: Entry) -> float:
    """Seconds since 1970. Access logs also count milliseconds, and leave out that they mean UTC."""
    raw = next((each for key in _TIME_KEYS if is_given(each := getattr(entry, key))), EMPTY)
    text = text_of(raw)
    if text:
        try:
            when = datetime.fromisoformat(text)
            return (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp()
        except (ValueError, OverflowError):
            return seconds(text)
    try:
        number = msgspec.json.decode(raw, type=float)
    except msgspec.DecodeError:
        _refuse(f"has no time ({', '.join(_TIME_KEYS)}); take --rate to make times up")
    return seconds(number / 1000.0 if abs(number) >= MILLISECONDS_MIN else number)


def _nested(*values: Raw) -> Entry | None:
    """The first that is an object, or a string that holds one, as some loggers write."""
    for value in values:
        data: Any = text_of(value).encode() if first_byte(value) == b'"' else value
        try:
            if first_byte(value) in (b'"', b"{"):
                return _entry.decode(data)
        except (msgspec.DecodeError, RecursionError):
            continue
    return None


def _nested_or_empty(value: Raw) -> Entry:
    return _nested(value) or _EMPTY_ENTRY


def _refuse(what: str) -> Any:
    raise WorkloadError(what)


# ---- command ----


def main(
    arguments: Sequence[str] | None = None,
    *,
    output: BinaryIO | None = None,
    messages: TextIO | None = None,
) -> int:
    """Convert a log; the exit status."""
    output, messages = output or sys.stdout.buffer, messages or sys.stderr
    flags = _parser().parse_args(arguments)
    path = Path("/dev/stdin" if flags.log == "-" else flags.log)
    read = written = not_served = bad = 0
    try:
        for result in convert(path, _options(flags)):
            read += 1
            if isinstance(result, LogLine):
                written += 1
                output.write(msgspec.json.encode(result) + b"\n")
            elif result is None:
                not_served += 1
            elif flags.skip_bad:
                bad += 1
            else:
                raise result
        output.flush()
    except WorkloadError as error:
        print(f"accesslog: {error}", file=messages)
        return 2
    except BrokenPipeError:
        return 1
    print(
        f"accesslog: {read} lines read, {written} written, {not_served} served from a gateway's "
        f"cache, {bad} bad ones skipped",
        file=messages,
    )
    return 0


def _options(flags: argparse.Namespace) -> Options:
    key = flags.key.encode() if flags.key else secrets.token_bytes(32)
    if flags.key and not (flags.hash and len(key) <= hashlib.blake2b.MAX_KEY_SIZE):
        raise WorkloadError("--key belongs to --hash and has at most 64 bytes")
    return Options(
        rate_per_s=flags.rate,
        output_tokens=flags.output_tokens,
        hash_key=key if flags.hash else None,
        block_tokens=flags.block_tokens,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.sim.accesslog",
        description="Convert an access log (JSON lines) to what `make replay` reads.",
    )
    parser.add_argument("log", help="the access log; - for standard input")
    parser.add_argument("--hash", action="store_true", help="keyed hashes instead of text")
    parser.add_argument(
        "--key", help="key of the hashes, to convert parts of a log alike (default: a new one)"
    )
    parser.add_argument(
        "--block-tokens",
        type=_positive(int),
        default=TEXT_BLOCK_TOKENS,
        help="tokens per hash (default %(default)s)",
    )
    parser.add_argument(
        "--rate", type=_positive(float), help="ignore times: so many requests per second"
    )
    parser.add_argument("--output-tokens", type=_positive(int), help="for lines that tell no usage")
    parser.add_argument(
        "--skip-bad",
        action="store_true",
        help="leave out lines that cannot be read, and count them",
    )
    return parser


def _positive(kind: Callable[[str], float]) -> Callable[[str], float]:
    def number(text: str) -> float:
        value = kind(text)
        if not 0 < value <= 10_000_000:
            raise argparse.ArgumentTypeError("must be above 0 and at most 10,000,000")
        return value

    return number


if __name__ == "__main__":
    sys.exit(main())
