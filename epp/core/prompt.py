"""Prompt views: bytes of a request whose equal beginnings mean equal beginnings for the engine.

A view is not what the engine will tokenize, only a stand-in that can be cut into blocks and hashed
without a tokenizer. It takes the parts in the order in which chat templates render them: what
changes the whole rendering (template, documents), tools, system, then the turns. Values are taken
as the client wrote them, still JSON-escaped, so nothing is decoded and no odd text can raise. Each
part begins with a control byte; JSON allows none of these in a value, so text cannot imitate a
part. A part has no end mark (but nested ones have), so the view of a conversation is a prefix of
the view of the same conversation with more turns.

Left out are fields that move or change without changing the prompt: `cache_control`, a text part's
annotations, a billing header that one client puts into its system prompt anew for each request.
An image, video or sound is named by 16 bytes of digest over what the client sent; it is neither
decoded nor fetched, and counts as many tokens as the reference's estimate for its kind says.

Cost, besides the parsing: 4 us for 10 messages of 16 KiB in all, 48 us for 200 of 128 KiB.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from sys import byteorder
from types import MappingProxyType
from typing import Final, NamedTuple

import msgspec
import xxhash
from msgspec import Raw

from epp.core.model import Api
from epp.core.rawjson import EMPTY, first_byte, is_given, peek
from epp.core.shapes import NO_CONTENT, Body, Message
from epp.core.structs import Frozen

BYTES_PER_TOKEN: Final = 4
"""Estimate for text (the reference's), and the exact width of a token id in a view."""

IMAGE_TOKENS: Final = 640 * 360 // 1024
"""An image of the size the reference assumes when it does not know: width x height / 1024."""
VIDEO_TOKENS: Final = 20 * IMAGE_TOKENS
"""10 s at 2 frames per second, as the reference assumes."""
AUDIO_TOKENS: Final = 250
"""10 s at 25 tokens per second. The reference counts a token per 4 encoded bytes, which is some 400
times what audio encoders make of them."""


class PromptLimits(Frozen, frozen=True, kw_only=True):
    """Bounds of the work on one request's prompt; what lies beyond is counted, not hashed."""

    prompts_max: int = 128
    """Prompts of one request that get a view."""
    view_bytes_max: int = 131_072 * BYTES_PER_TOKEN
    """All views of one request together (the reference's `maxPrefixTokensToMatch`)."""
    pieces_max: int = 65_536
    """Pieces of a view, about 4 to a turn or content part; with more it is routed by load. So is a
    list of parts with twice as many colons, and one of more prompts."""


class Prompt(NamedTuple):
    """Views of a request's prompts, and the estimate of all their tokens."""

    views: tuple[bytes, ...] = ()
    tokens: int = 0


NOT_READ: Final = Prompt()


class UnknownShape(Exception):  # noqa: N818 - a finding, not an error
    """Valid JSON whose prompt we do not know how to read; such a request is routed by load."""


def read_prompt(api: Api, body: Body, limits: PromptLimits) -> Prompt:
    """The prompt of `body`.

    Raises:
        UnknownShape: what stands where the prompt should be is none of the API's forms.
    """
    reader = _READERS.get(api)
    try:
        return NOT_READ if reader is None else reader(body, limits)
    except (msgspec.DecodeError, RecursionError) as error:
        raise UnknownShape from error


# ---- conversations ----

_TURN: Final = b"\x01"
_TEXT: Final = b"\x02"
_FIELD: Final = b"\x03"
_MEDIA: Final = b"\x04"
_PART: Final = b"\x05"
_KEY: Final = b"\x06"
_END: Final = b"\x07"

_NESTING_MAX: Final = 4
"""Content within content (a tool's result); deeper is taken as it stands."""
_TEXT_KINDS: Final = frozenset((b'"text"', b'"input_text"', b'"output_text"'))
_MEDIA_TOKENS: Final[Mapping[str, int]] = MappingProxyType(
    {
        "image_url": IMAGE_TOKENS,
        "input_image": IMAGE_TOKENS,
        "image": IMAGE_TOKENS,
        "image_pil": IMAGE_TOKENS,
        "image_embeds": IMAGE_TOKENS,
        "input_file": IMAGE_TOKENS,
        "file": IMAGE_TOKENS,
        "document": IMAGE_TOKENS,
        "video_url": VIDEO_TOKENS,
        "input_video": VIDEO_TOKENS,
        "video": VIDEO_TOKENS,
        "audio_url": AUDIO_TOKENS,
        "input_audio": AUDIO_TOKENS,
        "audio": AUDIO_TOKENS,
        "audio_embeds": AUDIO_TOKENS,
    }
)
"""Kind of a content part -> estimated prompt tokens. A file counts as one page's image."""
_PART_FIELDS_MAX: Final = 256
_UNRENDERED: Final = frozenset(("type", "cache_control"))
_MESSAGE_ITEM_FIELDS: Final = _UNRENDERED | {"role", "content"}
_TEMPLATE_FIELDS: Final = (
    "chat_template",
    "chat_template_kwargs",
    "documents",
    "reasoning_effort",
    "tools",
)
_template_values: Final = attrgetter(*_TEMPLATE_FIELDS)
_BILLING_HEADER: Final = b'"x-anthropic-billing-header'

_part: Final = msgspec.json.Decoder(dict[str, Raw]).decode
_parts: Final = msgspec.json.Decoder(list[dict[str, Raw]]).decode
_values: Final = msgspec.json.Decoder(list[Raw]).decode


class _View:
    """Collects the pieces of one view."""

    def __init__(self, body: Body, limits: PromptLimits) -> None:
        self.pieces: list[bytes | Raw] = []
        self.media_tokens = 0
        """Tokens of media beyond their bytes in the view."""
        self.media_bytes = 0
        self.limits = limits
        for name, value in zip(_TEMPLATE_FIELDS, _template_values(body), strict=True):
            if value is not EMPTY:
                self.field(name, value)

    def field(self, name: str, value: Raw) -> None:
        """A field of the whole request or of one turn; null and `[]` are as good as absent."""
        if value is not EMPTY and bytes(memoryview(value)[:3]) not in (b"nul", b"[]"):
            self.pieces += (_FIELD, name.encode(), value)

    def messages(self, messages: Sequence[Message]) -> None:
        """Turns in the common case inline, as this runs once per turn of a long conversation."""
        if 4 * len(messages) > self.limits.pieces_max:
            raise UnknownShape
        pieces = self.pieces
        for message in messages:
            content = message.content
            if not (
                message.tool_calls is EMPTY
                and message.tool_call_id is EMPTY
                and message.reasoning is EMPTY
                and message.reasoning_content is EMPTY
                and message.name is EMPTY
            ):
                self.message(message)
            elif peek(content)[0] == b'"':
                pieces += (_TURN, message.role, _TEXT, content)
            else:
                pieces += (_TURN, message.role)
                self.content(content)

    def message(self, message: Message) -> None:
        self.pieces += (_TURN, message.role)
        self.field("name", message.name)
        self.field("tool_call_id", message.tool_call_id)
        self.field("reasoning", message.reasoning)
        self.field("reasoning", message.reasoning_content)
        self.content(message.content)
        self.field("tool_calls", message.tool_calls)

    def system(self, content: Raw) -> None:
        """System prompt beside the messages: a string, or blocks, less the billing header."""
        if not is_given(content):
            return
        if first_byte(content) == b"[" and _BILLING_HEADER in bytes(content):
            content = _without_billing_header(content)
        self.pieces += (_TURN, b'"system"')
        self.content(content)

    def items(self, items: Raw) -> None:
        """Items of the Responses and Conversations APIs: messages, calls, results, reasoning."""
        for item in self.parts_of(items):
            role = item.get("role", EMPTY)
            self.pieces += (_TURN, role)
            if role is EMPTY:
                self.part(item)
            else:
                self.content(item.get("content", EMPTY))
                self.fields(item, _MESSAGE_ITEM_FIELDS, 0)

    def content(self, content: Raw, depth: int = 0) -> None:
        """A string, a list of parts, or nothing; anything else as it stands."""
        kind = first_byte(content)
        if kind == b'"':
            self.pieces += (_TEXT, content)
        elif kind == b"[":
            self.parts(content, depth)
        elif is_given(content):
            self.pieces += (_PART, content)

    def parts(self, content: Raw, depth: int) -> None:
        """Text parts inline, as conversations of agents consist of them."""
        pieces = self.pieces
        try:
            parts = self.parts_of(content)
        except msgspec.ValidationError:  # a list that holds other things than objects
            pieces += (_PART, content)
            return
        if len(pieces) + 2 * len(parts) > self.limits.pieces_max:
            raise UnknownShape
        for part in parts:
            text = part.get("text", NO_CONTENT)
            if peek(text)[0] == b'"' and bytes(part.get("type", EMPTY)) in _TEXT_KINDS:
                pieces += (_TEXT, text)
            else:
                self.part(part, depth)

    def parts_of(self, content: Raw) -> list[dict[str, Raw]]:
        """The objects of a list; each of their keys has a colon behind it."""
        if len(content) > self.limits.pieces_max and (
            bytes(content).count(b":") > 2 * self.limits.pieces_max
        ):
            raise UnknownShape
        return _parts(content)

    def part(self, part: Mapping[str, Raw], depth: int = 0) -> None:
        """A part that is no text: media by its digest, anything else with all its fields."""
        kind = bytes(part.get("type", EMPTY))
        media = _media_kind(kind, part)
        if media:
            self.pieces += (_MEDIA, media.encode(), _END, self.stand_in(part, _MEDIA_TOKENS[media]))
        else:
            self.pieces += (_PART, kind)
            self.fields(part, _UNRENDERED, depth)

    def stand_in(self, part: Mapping[str, Raw], tokens: int) -> bytes:
        """A medium's digest, repeated to as many bytes as it has tokens: what stands behind it is
        then cut into blocks where the engine cuts it, and a match counts the medium's tokens."""
        digest = _digest(part)
        repeats = tokens * BYTES_PER_TOKEN // len(digest)
        if self.media_bytes + repeats * len(digest) > self.limits.view_bytes_max:
            repeats = 1  # past what is hashed: only count it
        self.media_bytes += repeats * len(digest)
        self.media_tokens += tokens - repeats * len(digest) // BYTES_PER_TOKEN
        return digest * repeats

    def fields(self, part: Mapping[str, Raw], besides: frozenset[str], depth: int) -> None:
        if len(self.pieces) > self.limits.pieces_max or len(part) > _PART_FIELDS_MAX:
            raise UnknownShape
        for key, value in part.items():
            if key in besides or not is_given(value):
                continue
            self.pieces += (_KEY, msgspec.json.encode(key))
            if key == "content" and depth < _NESTING_MAX:
                self.content(value, depth + 1)
                self.pieces.append(_END)
            else:
                self.pieces.append(value)

    def prompt(self) -> Prompt:
        view = b"".join(self.pieces)
        tokens = text_tokens(len(view)) + self.media_tokens
        return Prompt((view[: self.limits.view_bytes_max],) if view else (), tokens)


def text_tokens(size_bytes: int) -> int:
    """Estimated tokens of so many bytes of a view, rounded up."""
    return -(-size_bytes // BYTES_PER_TOKEN)


def _without_billing_header(system: Raw) -> Raw:
    blocks = [
        block
        for block in _values(system)
        if not bytes(_part(block).get("text", EMPTY)).startswith(_BILLING_HEADER)
    ]
    return Raw(b"[" + b",".join(blocks) + b"]")


def _media_kind(kind: bytes, part: Mapping[str, Raw]) -> str:
    """Kind of an image, video, sound or file; `""` for any other part. vLLM takes parts without
    `type` too, and knows them by the key that holds the payload."""
    if kind:
        name = kind[1:-1].decode("latin-1")
        return name if name in _MEDIA_TOKENS else ""
    return next((key for key in part if key in _MEDIA_TOKENS), "")


def _digest(part: Mapping[str, Raw]) -> bytes:
    """16 bytes that name what a part shows: its URL or data, and how it is to be rendered."""
    digest = xxhash.xxh3_128()
    for key, value in part.items():
        if key not in _UNRENDERED:
            digest.update(key.encode())
            digest.update(value)
    return digest.digest()


def _chat(body: Body, limits: PromptLimits) -> Prompt:
    if not body.messages:
        raise UnknownShape
    view = _View(body, limits)
    view.system(body.system)
    view.messages(body.messages)
    return view.prompt()


def _responses(body: Body, limits: PromptLimits) -> Prompt:
    """Where the engine continues something it stored, the prompt's beginning is not in the body."""
    if any(map(is_given, (body.previous_response_id, body.conversation, body.prompt))):
        raise UnknownShape
    view = _View(body, limits)
    view.system(body.instructions)
    if first_byte(body.input) == b'"':
        view.pieces += (_TURN, b'"user"', _TEXT, body.input)
    else:
        view.items(body.input)
    return view.prompt()


def _conversations(body: Body, limits: PromptLimits) -> Prompt:
    view = _View(body, limits)
    view.items(body.items)
    return view.prompt()


# ---- plain prompts ----

_token_ids: Final = msgspec.json.Decoder(list[int]).decode
_token_id_lists: Final = msgspec.json.Decoder(list[list[int]]).decode


def _completions(body: Body, limits: PromptLimits) -> Prompt:
    return _plain(body.prompt, limits)


def _embeddings(body: Body, limits: PromptLimits) -> Prompt:
    return _chat(body, limits) if body.messages else _plain(body.input, limits)


def _plain(prompt: Raw, limits: PromptLimits) -> Prompt:
    """A string, a list of strings, token ids, or a list of lists of them."""
    kind = first_byte(prompt)
    if kind == b'"':
        return _texts([prompt], limits)
    element = bytes(memoryview(prompt)[1:16]).lstrip()[:1] if kind == b"[" else b""
    if element in (b'"', b"["):
        # Counted before they are decoded; text has such marks too, but seldom so many.
        marks_max = 2 * limits.pieces_max
        if len(prompt) > marks_max and bytes(prompt).count(element) > marks_max:
            raise UnknownShape
    if element == b'"':
        return _texts(_values(prompt), limits)
    if element == b"[":
        return _ids(_token_id_lists(prompt), limits)
    if element.isdigit():
        return _ids([_token_ids(prompt)], limits)
    raise UnknownShape


def _texts(strings: Sequence[Raw], limits: PromptLimits) -> Prompt:
    views: list[bytes] = []
    tokens = 0
    room = limits.view_bytes_max
    for string in strings:
        if first_byte(string) != b'"':
            raise UnknownShape
        size = len(string) - len('""')
        tokens += text_tokens(size)
        if size and room and len(views) < limits.prompts_max:
            views.append(bytes(memoryview(string)[1 : 1 + min(size, room)]))
            room -= len(views[-1])
    return Prompt(tuple(views), tokens)


def _ids(prompts: Sequence[Sequence[int]], limits: PromptLimits) -> Prompt:
    views: list[bytes] = []
    room = limits.view_bytes_max // BYTES_PER_TOKEN
    for ids in prompts[: limits.prompts_max]:
        if ids and room:
            views.append(_packed(ids[:room]))
            room -= min(len(ids), room)
    return Prompt(tuple(views), sum(map(len, prompts)))


def _packed(ids: Sequence[int]) -> bytes:
    """Little-endian, 4 bytes each."""
    try:
        packed = array("I", ids)
    except OverflowError as error:  # negative, or beyond 32 bits
        raise UnknownShape from error
    assert packed.itemsize == BYTES_PER_TOKEN
    if byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def _generate(body: Body, limits: PromptLimits) -> Prompt:
    """Token ids, headed by a digest of the media they stand for: placeholder ids look alike."""
    prompt = _ids([_token_ids(body.token_ids)], limits)
    if not prompt.views or not is_given(body.features):
        return prompt
    view = xxhash.xxh3_128_digest(body.features) + prompt.views[0]
    return Prompt((view[: limits.view_bytes_max],), prompt.tokens)


_READERS: Final[Mapping[Api, Callable[[Body, PromptLimits], Prompt]]] = MappingProxyType(
    {
        Api.CHAT: _chat,
        Api.MESSAGES: _chat,
        Api.COMPLETIONS: _completions,
        Api.RESPONSES: _responses,
        Api.CONVERSATIONS: _conversations,
        Api.EMBEDDINGS: _embeddings,
        Api.GENERATE: _generate,
    }
)
