"""What clients get back, per API: a JSON body, or the events of a stream.

An answer object serves one HTTP request. For a stream the server sends `head` with the first token,
one `token` per generated token, and `tail`; events of the four APIs differ as in recorded output of
vLLM 0.32. A token's event is a prepared frame around four bytes of text: about 0.3 us.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence
from random import Random
from struct import pack
from typing import Any, Protocol

import msgspec

from bench.engine.bodies import Api, Job

DONE = b"data: [DONE]\n\n"
FINGERPRINT = "vllm-0.32.0-sim"
EMBEDDING_DIMENSIONS = 32
_encode = msgspec.json.encode


class Usage(msgspec.Struct, frozen=True):
    """Token counts of one HTTP request, its prompts together."""

    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    full_block_tokens: int = 0
    """Prompt tokens in full blocks: what the prefix cache now has of the prompt."""


class Ident(msgspec.Struct, frozen=True):
    """What every event of an answer repeats."""

    key: str
    """`X-Request-Id`, or made up."""
    model: str
    created: int
    show_cached: bool = True
    """Whether usage tells cached tokens (`--enable-prompt-tokens-details`)."""


class Answer(Protocol):
    """See the module. `text` is ASCII without anything JSON escapes."""

    def head(self, usage: Usage, /) -> bytes:
        """What precedes the first token."""
        ...

    def token(self, choice: int, text: bytes, finish: str | None) -> bytes:
        """One generated token; `finish` with the last one of its choice."""
        ...

    def tail(self, usage: Usage) -> bytes:
        """What ends the stream."""
        ...

    def cut(self) -> bytes:
        """What ends the stream when the engine shuts down in the middle of it."""
        ...

    def body(self, texts: Sequence[str], finish: str, usage: Usage) -> bytes:
        """The whole answer, not streamed. `texts`: one per prompt."""
        ...


def answer_for(job: Job, ident: Ident) -> Answer:
    """The answer in the form of the job's API; embeddings have `embeddings_body`."""
    if job.api is Api.CHAT:
        return ChatAnswer(job, ident)
    if job.api is Api.RESPONSES:
        return ResponsesAnswer(job, ident)
    if job.api is Api.MESSAGES:
        return MessagesAnswer(ident)
    return CompletionAnswer(job, ident)


def embeddings_body(job: Job, ident: Ident, usage: Usage, seed: int) -> bytes:
    """Unit-scale vectors that depend on the prompt and the seed only."""
    data = []
    for index, prompt in enumerate(job.prompts):
        rng = Random(prompt + seed.to_bytes(8, "little"))
        vector: Any = [rng.uniform(-0.3, 0.3) for _ in range(EMBEDDING_DIMENSIONS)]
        if job.base64:
            vector = b64encode(pack(f"<{len(vector)}f", *vector)).decode()
        data.append({"index": index, "object": "embedding", "embedding": vector})
    return _encode(
        {
            "id": f"embd-{ident.key}",
            "object": "list",
            "created": ident.created,
            "model": ident.model,
            "data": data,
            "usage": _openai_usage(usage, ident.show_cached, details={}),
        }
    )


def _openai_usage(
    usage: Usage, show_cached: bool, details: dict[str, int | None]
) -> dict[str, Any]:
    cached = {"cached_tokens": usage.cached_tokens, **details} if show_cached else None
    return {
        "prompt_tokens": usage.prompt_tokens,
        "total_tokens": usage.prompt_tokens + usage.output_tokens,
        "completion_tokens": usage.output_tokens,
        "prompt_tokens_details": cached,
    }


def _created_tokens(usage: Usage) -> int:
    return max(0, usage.full_block_tokens - usage.cached_tokens)


def _data(value: object) -> bytes:
    return b"data: " + _encode(value) + b"\n\n"


def _event(name: str, value: object) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + _encode(value) + b"\n\n"


class _OpenAiStream:
    """What `/v1/completions` and `/v1/chat/completions` share: frames, usage chunk, `[DONE]`."""

    _frame = b""
    """Between the choice's index and the text."""
    _last: bytes = b""
    """Between the text and the finish reason of the last token."""
    _close: bytes = b""
    """After the finish reason of the last token, up to the end of the choice."""
    _plain: bytes = b""
    """After the text of any other token."""

    def __init__(self, job: Job, ident: Ident, prefix: str, kind: str) -> None:
        self._ident = ident
        self._include_usage = job.include_usage
        self._start = {
            "id": f"{prefix}-{ident.key}",
            "object": kind,
            "created": ident.created,
            "model": ident.model,
        }
        opening = _encode(self._start)[:-1]
        self._opening = b"data: " + opening + b',"choices":[{"index":'

    def token(self, choice: int, text: bytes, finish: str | None) -> bytes:
        front = self._opening + b"%d" % choice + self._frame + text
        if finish is None:
            return front + self._plain
        return front + self._last + finish.encode() + self._close

    def tail(self, usage: Usage) -> bytes:
        if not self._include_usage:
            return DONE
        counts = _openai_usage(usage, self._ident.show_cached, details={})
        if not self._ident.show_cached:
            del counts["prompt_tokens_details"]
        final = {"choices": [], "usage": counts, "system_fingerprint": FINGERPRINT}
        return _data({**self._start, **final}) + DONE

    def cut(self) -> bytes:
        return DONE

    def _whole(
        self, choices: list[dict[str, Any]], usage: Usage, details: dict[str, int | None]
    ) -> bytes:
        counts = _openai_usage(usage, self._ident.show_cached, details)
        counts["completion_tokens_details"] = None
        return _encode(
            {
                **self._start,
                "choices": choices,
                "service_tier": None,
                "system_fingerprint": FINGERPRINT,
                "usage": counts,
                "kv_transfer_params": None,
                "metrics": None,
            }
        )


class CompletionAnswer(_OpenAiStream):
    """`/v1/completions`."""

    _frame = b',"text":"'
    _plain = (
        b'","logprobs":null,"finish_reason":null,"stop_reason":null,'
        b'"prompt_token_ids":null,"token_ids":null}]}\n\n'
    )
    _last = b'","logprobs":null,"finish_reason":"'
    _close = b'","stop_reason":null,"prompt_token_ids":null,"token_ids":null}]}\n\n'

    def __init__(self, job: Job, ident: Ident) -> None:
        super().__init__(job, ident, "cmpl", "text_completion")

    def head(self, _: Usage, /) -> bytes:
        return b""

    def body(self, texts: Sequence[str], finish: str, usage: Usage) -> bytes:
        choices = [
            {
                "index": index,
                "text": text,
                "logprobs": None,
                "finish_reason": finish,
                "stop_reason": None,
                "token_ids": None,
                "prompt_logprobs": None,
                "prompt_token_ids": None,
            }
            for index, text in enumerate(texts)
        ]
        return self._whole(choices, usage, {"created_cache_tokens": None})


class ChatAnswer(_OpenAiStream):
    """`/v1/chat/completions`."""

    _frame = b',"delta":{"content":"'
    _plain = b'"},"logprobs":null,"finish_reason":null,"token_ids":null}]}\n\n'
    _last = b'"},"logprobs":null,"finish_reason":"'
    _close = b'","stop_reason":null,"token_ids":null}]}\n\n'

    def __init__(self, job: Job, ident: Ident) -> None:
        super().__init__(job, ident, "chatcmpl", "chat.completion.chunk")

    def head(self, _: Usage, /) -> bytes:
        delta = {"role": "assistant", "content": ""}
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}
        return _data({**self._start, "choices": [choice], "prompt_token_ids": None})

    def body(self, texts: Sequence[str], finish: str, usage: Usage) -> bytes:
        self._start["object"] = "chat.completion"
        choices = [
            {
                "index": index,
                "message": {
                    "role": "assistant",
                    "content": text,
                    "refusal": None,
                    "reasoning": None,
                },
                "logprobs": None,
                "finish_reason": finish,
                "stop_reason": None,
                "token_ids": None,
            }
            for index, text in enumerate(texts)
        ]
        return self._whole(choices, usage, {"created_cache_tokens": _created_tokens(usage)})


class ResponsesAnswer:
    """`/v1/responses`: numbered events, no `[DONE]`."""

    def __init__(self, job: Job, ident: Ident) -> None:
        self._ident = ident
        self._max_tokens = job.max_tokens
        self._item = f"msg_{ident.key}"
        self._number = 0
        self._text: list[bytes] = []
        self._finish = "stop"

    def head(self, _: Usage, /) -> bytes:
        response = self._response("in_progress", [], None, None)
        item = {**self._message(""), "content": [], "status": "in_progress"}
        part: dict[str, Any] = {
            "annotations": [],
            "text": "",
            "type": "output_text",
            "logprobs": [],
        }
        place = {"item_id": self._item, "output_index": 0, "content_index": 0}
        return b"".join(
            (
                self._next("response.created", {"response": response}),
                self._next("response.in_progress", {"response": response}),
                self._next("response.output_item.added", {"item": item, "output_index": 0}),
                self._next("response.content_part.added", {**place, "part": part}),
            )
        )

    def token(self, choice: int, text: bytes, finish: str | None) -> bytes:
        self._text.append(text)
        self._finish = finish or self._finish
        place = {"content_index": choice, "delta": text.decode(), "item_id": self._item}
        return self._next(
            "response.output_text.delta", {**place, "logprobs": [], "output_index": 0}
        )

    def tail(self, usage: Usage) -> bytes:
        text = b"".join(self._text).decode()
        item = self._message(text)
        place = {"item_id": self._item, "output_index": 0, "content_index": 0}
        response = self._ended(item, self._finish, usage)
        return b"".join(
            (
                self._next("response.output_text.done", {**place, "text": text}),
                self._next("response.content_part.done", {**place, "part": item["content"][0]}),
                self._next("response.output_item.done", {"item": item, "output_index": 0}),
                self._next("response.completed", {"response": response}),
            )
        )

    def cut(self) -> bytes:
        return b""

    def body(self, texts: Sequence[str], finish: str, usage: Usage) -> bytes:
        return _encode(self._ended(self._message(texts[0]), finish, usage))

    def _next(self, kind: str, value: dict[str, Any]) -> bytes:
        event = _event(kind, {**value, "sequence_number": self._number, "type": kind})
        self._number += 1
        return event

    def _message(self, text: str) -> dict[str, Any]:
        part: dict[str, Any] = {
            "annotations": [],
            "text": text,
            "type": "output_text",
            "logprobs": None,
        }
        kind = {"role": "assistant", "status": "completed", "type": "message", "phase": None}
        return {"id": self._item, "content": [part], **kind}

    def _ended(self, item: dict[str, Any], finish: str, usage: Usage) -> dict[str, Any]:
        if finish != "length":
            return self._response("completed", [item], usage, None)
        return self._response("incomplete", [item], usage, {"reason": "max_output_tokens"})

    def _response(
        self, status: str, output: list[Any], usage: Usage | None, incomplete: Any
    ) -> dict[str, Any]:
        return {
            "id": f"resp_{self._ident.key}",
            "created_at": self._ident.created,
            "incomplete_details": incomplete,
            "instructions": None,
            "model": self._ident.model,
            "object": "response",
            "output": output,
            "max_output_tokens": self._max_tokens,
            "service_tier": "auto",
            "status": status,
            "usage": None if usage is None else self._counts(usage),
        }

    def _counts(self, usage: Usage) -> dict[str, Any]:
        cached = usage.cached_tokens if self._ident.show_cached else 0
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": usage.output_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage.prompt_tokens + usage.output_tokens,
        }


class MessagesAnswer:
    """`/v1/messages`, Anthropic's form: named events, no `[DONE]`."""

    def __init__(self, ident: Ident) -> None:
        self._ident = ident
        self._stop_reason = "end_turn"

    def head(self, usage: Usage, /) -> bytes:
        counts = {"input_tokens": usage.prompt_tokens, "output_tokens": 0}
        empty: dict[str, Any] = {
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": counts,
        }
        start = {"type": "message_start", "message": {**self._message(), **empty}}
        block = {"type": "content_block_start", "content_block": {"type": "text", "text": ""}}
        return _event("message_start", start) + _event("content_block_start", {**block, "index": 0})

    def token(self, choice: int, text: bytes, finish: str | None) -> bytes:
        if finish is not None:
            self._stop_reason = self._reason(finish)
        return (
            b"event: content_block_delta\ndata: "
            b'{"type":"content_block_delta","delta":{"type":"text_delta","text":"'
            b'%b"},"index":%d}\n\n' % (text, choice)
        )

    def tail(self, usage: Usage) -> bytes:
        delta = {"stop_reason": self._stop_reason, "stop_sequence": None}
        end = {"type": "message_delta", "delta": delta, "usage": self._counts(usage)}
        return b"".join(
            (
                _event("content_block_stop", {"type": "content_block_stop", "index": 0}),
                _event("message_delta", end),
                _event("message_stop", {"type": "message_stop"}),
            )
        )

    def cut(self) -> bytes:
        return b""

    def body(self, texts: Sequence[str], finish: str, usage: Usage) -> bytes:
        content = [{"type": "text", "text": text} for text in texts]
        ended = {"stop_reason": self._reason(finish), "usage": self._counts(usage)}
        return _encode({**self._message(), "content": content, **ended})

    def _message(self) -> dict[str, Any]:
        kind = {"type": "message", "role": "assistant", "model": self._ident.model}
        return {"id": f"chatcmpl-{self._ident.key}", **kind}

    def _counts(self, usage: Usage) -> dict[str, int]:
        read = usage.cached_tokens if self._ident.show_cached else 0
        created = _created_tokens(usage) if self._ident.show_cached else 0
        return {
            "input_tokens": usage.prompt_tokens,
            "output_tokens": usage.output_tokens,
            "cache_creation_input_tokens": created,
            "cache_read_input_tokens": read,
        }

    @staticmethod
    def _reason(finish: str) -> str:
        return "max_tokens" if finish == "length" else "end_turn"
