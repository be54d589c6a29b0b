"""A request's text in pieces, as the templates of engines put it together.

The prompt view of `core.prompt` already has everything that is rendered, in the order in which it
is rendered, with a control byte before each turn; this module takes it apart again there. What is
not in the view, but changes the prompt or the engine's block hashes (salt, media options,
an unknown field of tomorrow), goes into `root`: every top-level field does, except for those known
to change neither. A field that is missing in that list only costs hits, one that is in it wrongly
would give wrong matches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec
import xxhash
from msgspec import Raw

from epp.core.model import Api
from epp.core.rawjson import is_given

_TURN: Final = b"\x01"
_REPLIES: Final = (b'"assistant"', b'\x05"function_call"', b'\x05"reasoning"')
"""How pieces begin that an engine may have written itself."""
_VIEWED: Final = frozenset(
    (
        *("model", "messages", "tools", "system", "instructions", "input", "prompt"),
        *("chat_template", "chat_template_kwargs", "documents", "reasoning_effort"),
    )
)
"""Fields that the prompt view holds, and the model, which is named apart as it may be rewritten."""
UNRENDERED: Final = frozenset(
    (
        *("stream", "stream_options", "n", "best_of", "use_beam_search", "seed", "stop"),
        *("max_tokens", "max_completion_tokens", "max_output_tokens", "min_tokens"),
        *("temperature", "top_p", "top_k", "min_p", "length_penalty", "repetition_penalty"),
        *("presence_penalty", "frequency_penalty", "logit_bias", "logprobs", "top_logprobs"),
        *("stop_token_ids", "stop_sequences", "ignore_eos", "include_stop_str_in_output"),
        *("skip_special_tokens", "spaces_between_special_tokens", "allowed_token_ids"),
        *("bad_words", "return_tokens_as_token_ids", "return_token_ids", "store", "background"),
        *("user", "safety_identifier", "prompt_cache_key", "metadata", "service_tier"),
        *("priority", "request_id", "session_id", "vllm_xargs", "kv_transfer_params"),
    )
)
"""Top-level fields that change neither the prompt nor its block hashes (vLLM 0.32): how to sample,
when to stop, what to report, whose request it is."""
_APIS: Final = frozenset((Api.CHAT, Api.MESSAGES, Api.COMPLETIONS, Api.RESPONSES))

_fields: Final = msgspec.json.Decoder(dict[str, Raw]).decode


class TextView(NamedTuple):
    """What the path of a prompt is made of."""

    root: int
    """64 bits; prompts whose roots differ share no block, whatever their text."""
    pieces: tuple[bytes, ...]
    """Text in rendered order, never empty: template fields with tools, then the turns. A plain
    prompt is one piece. Bytes are as the client wrote them, JSON-escaped."""
    replies: frozenset[int] = frozenset()
    """Which pieces an engine may have written itself."""
    tooled: bool = False
    """The first piece holds tools or template fields."""


def view_of(api: Api, body: bytes, prompts: Sequence[bytes]) -> TextView | None:
    """The text of one request; `None` where it cannot be followed: a batch, token ids, an API
    without prefix cache, no prompt that we could read.

    Args:
        body: decoded JSON, the one that `prompts` was read from.
        prompts: `Request.prompts`.
    """
    if api not in _APIS or len(prompts) != 1:
        return None
    try:
        fields = _fields(body)
    except (msgspec.DecodeError, RecursionError):
        return None
    if api is Api.COMPLETIONS:
        if not _is_text(fields):
            return None
        return TextView(_root(api, fields), (prompts[0],))
    first, *turns = prompts[0].split(_TURN)
    replies = frozenset(
        at for at, turn in enumerate(turns, bool(first)) if turn.startswith(_REPLIES)
    )
    pieces = (first, *turns) if first else tuple(turns)
    if not pieces:
        return None
    return TextView(_root(api, fields), pieces, replies, bool(first))


def _is_text(fields: dict[str, Raw]) -> bool:
    """The prompt is a string, or a list of them."""
    return bytes(memoryview(fields.get("prompt", Raw(b"")))[:16]).lstrip(b"[ \t\r\n")[:1] == b'"'


def _root(api: Api, fields: dict[str, Raw]) -> int:
    root = xxhash.xxh3_64(api.value)
    for name in sorted(fields.keys() - UNRENDERED - _VIEWED):
        if is_given(fields[name]):
            root.update(b"\x00%d:" % len(name.encode("utf-8", "surrogatepass")))
            root.update(name.encode("utf-8", "surrogatepass"))
            root.update(fields[name])
    return root.intdigest()
