"""The JSON we decode, as structs for msgspec: request bodies and what answers say of their usage.

Fields are `Raw`, so that a value of an unexpected type costs nothing and refuses nothing. They are
apart from their readers, which may be compiled (see `structs`).
"""

from __future__ import annotations

from typing import Final

import msgspec
from msgspec import Raw

from epp.core.rawjson import EMPTY

NO_CONTENT: Final = Raw(b"null")


class Message(msgspec.Struct, gc=False):
    """One chat message: the fields that templates render."""

    role: Raw = EMPTY
    content: Raw = NO_CONTENT
    name: Raw = EMPTY
    tool_call_id: Raw = EMPTY
    reasoning: Raw = EMPTY
    reasoning_content: Raw = EMPTY
    tool_calls: Raw = EMPTY


class Head(msgspec.Struct, gc=False):
    """What we read of any body besides its prompt; keys as in the APIs."""

    model: Raw = EMPTY
    stream: Raw = EMPTY
    cache_salt: Raw = EMPTY
    max_tokens: Raw = EMPTY
    max_completion_tokens: Raw = EMPTY
    max_output_tokens: Raw = EMPTY
    sampling_params: Raw = EMPTY
    truncate_prompt_tokens: Raw = EMPTY


class Body(Head, gc=False):
    """A body with its prompt, of whatever API."""

    messages: list[Message] = []
    tools: Raw = EMPTY
    system: Raw = EMPTY
    instructions: Raw = EMPTY
    input: Raw = EMPTY
    prompt: Raw = EMPTY
    items: Raw = EMPTY
    token_ids: Raw = EMPTY
    features: Raw = EMPTY
    chat_template: Raw = EMPTY
    chat_template_kwargs: Raw = EMPTY
    documents: Raw = EMPTY
    reasoning_effort: Raw = EMPTY
    previous_response_id: Raw = EMPTY
    conversation: Raw = EMPTY


class Envelope(msgspec.Struct, gc=False):
    """Where the APIs put `usage`: on top, in Anthropic's `message_start`, in a Responses event."""

    type: Raw = EMPTY
    usage: Raw = EMPTY
    message: Raw = EMPTY
    response: Raw = EMPTY


class Counts(msgspec.Struct, gc=False):
    """`usage` in the words of OpenAI (two sets) and Anthropic; also their details objects."""

    prompt_tokens: Raw = EMPTY
    input_tokens: Raw = EMPTY
    completion_tokens: Raw = EMPTY
    output_tokens: Raw = EMPTY
    prompt_tokens_details: Raw = EMPTY
    input_tokens_details: Raw = EMPTY
    cache_read_input_tokens: Raw = EMPTY
    cached_tokens: Raw = EMPTY
