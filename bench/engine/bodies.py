"""What clients send: a body to a `Job`, or an `ApiError` in vLLM's words and shape.

A conversation becomes a prompt by a chat template with tools first, one segment per message. Every
part of a segment is padded to whole tokens, so a conversation that goes on, with the engine's own
answer in it, begins with the very tokens that were computed before.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Any, TypeVar

import msgspec

from bench.engine.tokens import count_tokens, pad, prompt_of_ids

T = TypeVar("T")

Content = str | list[dict[str, Any]] | None


class ApiError(Exception):
    """An answer that is an error: `{"error": {message, type, param, code}}`."""

    def __init__(self, status: int, message: str, kind: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.param = param

    def body(self) -> bytes:
        """The JSON body."""
        error = {"message": str(self), "type": self.kind, "param": self.param, "code": self.status}
        return msgspec.json.encode({"error": error})


class Api(StrEnum):
    """The generating APIs, by path."""

    COMPLETIONS = "/v1/completions"
    CHAT = "/v1/chat/completions"
    RESPONSES = "/v1/responses"
    MESSAGES = "/v1/messages"
    EMBEDDINGS = "/v1/embeddings"


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be computed for one HTTP request."""

    api: Api
    model: str | None
    """As the client wrote it; `None`: the first served model."""
    prompts: tuple[bytes, ...]
    """Padded prompts, each at least one token."""
    max_tokens: int | None
    """`None`: the client set no limit."""
    stream: bool = False
    include_usage: bool = False
    cache_salt: str = ""
    session_id: str = ""
    """From the body; empty: the client gave none there."""
    session_id_xarg: str = ""
    """From the body's `vllm_xargs`, which counts least."""
    base64: bool = False
    """Embeddings as base64 of little-endian floats."""


class Message(msgspec.Struct):
    """A message of a conversation, in any of the APIs."""

    role: str = "user"
    content: Content = None
    tool_calls: msgspec.Raw = msgspec.Raw()


class StreamOptions(msgspec.Struct):
    """`stream_options`."""

    include_usage: bool = False


class _Body(msgspec.Struct, kw_only=True):
    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    cache_salt: str | None = None
    n: int | None = None


class _Session(_Body, kw_only=True):
    session_id: str | None = None
    vllm_xargs: dict[str, Any] | None = None


class _Completion(_Session, kw_only=True):
    prompt: str | list[str | int | list[int]]
    max_tokens: int | None = 16


class _Chat(_Session, kw_only=True):
    messages: list[Message]
    tools: msgspec.Raw = msgspec.Raw()
    max_tokens: int | None = None
    max_completion_tokens: int | None = None


class _Response(_Session, kw_only=True):
    input: str | list[Message]
    instructions: str | None = None
    tools: msgspec.Raw = msgspec.Raw()
    max_output_tokens: int | None = None


class _Messages(_Body, kw_only=True):
    messages: list[Message]
    max_tokens: int
    system: Content = None
    tools: msgspec.Raw = msgspec.Raw()


class _CountTokens(_Body, kw_only=True):
    messages: list[Message]
    system: Content = None
    tools: msgspec.Raw = msgspec.Raw()


class _Embedding(_Body, kw_only=True):
    input: str | list[str | int | list[int]]
    encoding_format: str = "float"


class _Tokenize(msgspec.Struct):
    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    tools: msgspec.Raw = msgspec.Raw()
    add_generation_prompt: bool = True
    return_token_strs: bool = False


class Detokenize(msgspec.Struct):
    """Body of `/detokenize`."""

    tokens: list[int]
    model: str | None = None


def decode(body: bytes, shape: type[T], content_type: str = "application/json") -> T:
    """Raises: ApiError 400."""
    if not content_type.startswith("application/json"):
        raise _invalid("Unsupported Media Type: Only 'application/json' is allowed", None)
    try:
        return msgspec.json.decode(body, type=shape)
    except msgspec.ValidationError as error:
        text = str(error)
        path = text.rpartition(" - at `$")[2].rstrip("`") if " - at `$" in text else ""
        if "missing required field" in text:
            path += "." + text.split("`")[1]
        raise _invalid(text, f"body{path}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _invalid(f"JSON decode error: {error}", "body") from error


def parse_job(api: Api, body: bytes, content_type: str = "application/json") -> Job:
    """Raises: ApiError 400."""
    return _PARSERS[api](body, content_type)


def parse_tokenize(body: bytes) -> tuple[bytes, bool]:
    """Returns: (padded prompt, whether the client wants the tokens' text too)."""
    asked = decode(body, _Tokenize)
    if asked.messages is not None:
        generation = asked.add_generation_prompt
        prompt = render_chat(asked.messages, tools=asked.tools, generation_prompt=generation)
    elif asked.prompt is not None:
        prompt = pad(asked.prompt.encode())
    else:
        raise _invalid("one of `prompt` and `messages` is required", "body.prompt")
    return prompt, asked.return_token_strs


def parse_count_tokens(body: bytes) -> bytes:
    """The padded prompt of `/v1/messages/count_tokens`."""
    asked = decode(body, _CountTokens)
    return render_chat(_with_system(asked.messages, asked.system), tools=asked.tools)


def render_chat(
    messages: Sequence[Message], *, tools: msgspec.Raw, generation_prompt: bool = True
) -> bytes:
    """The prompt of a conversation, padded."""
    parts = []
    if bytes(tools) not in (b"", b"null", b"[]"):
        parts.append(_segment("tools", bytes(tools)))
    for message in messages:
        calls = bytes(message.tool_calls)
        content = _text(message.content).encode()
        parts.append(_segment(message.role, content if calls == b"null" else content + calls))
    if generation_prompt:
        parts.append(_opening("assistant"))
    return b"".join(parts)


def _opening(role: str) -> bytes:
    return pad(f"<|im_start|>{role}\n".encode())


def _segment(role: str, content: bytes) -> bytes:
    return _opening(role) + pad(content + b"<|im_end|>\n")


def _text(content: Content) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    texts = (part.get("text") for part in content)
    return "".join(
        text if isinstance(text, str) else msgspec.json.encode(part).decode()
        for text, part in zip(texts, content, strict=True)
    )


def _with_system(messages: list[Message], system: Content) -> list[Message]:
    return [Message("system", system), *messages] if system else messages


def _invalid(message: str, param: str | None) -> ApiError:
    return ApiError(400, f"1 validation error:\n  {message}", "Bad Request", param)


def _refused(message: str, param: str) -> ApiError:
    return ApiError(400, f"{message} (parameter={param})", "BadRequestError", param)


def _job(
    api: Api, body: _Body, prompts: tuple[bytes, ...], max_tokens: int | None, limit: str
) -> Job:
    """Checks what all APIs share; `limit` is the API's name for `max_tokens`."""
    if body.temperature is not None and body.temperature < 0:
        raise _refused(f"temperature must be non-negative, got {body.temperature}", "temperature")
    if max_tokens is not None and max_tokens < 1:
        raise _refused(f"{limit} must be at least 1, got {max_tokens}", limit)
    if body.n not in (None, 1):
        raise _refused(f"this simulated engine gives one choice per prompt, got n={body.n}", "n")
    if not prompts or not all(prompts):
        raise _refused("the prompt is empty", "prompt")
    options = body.stream_options
    session_id, session_id_xarg = _sessions(body)
    return Job(
        api=api,
        model=body.model,
        prompts=prompts,
        max_tokens=max_tokens,
        stream=body.stream,
        include_usage=options is not None and options.include_usage,
        cache_salt=body.cache_salt or "",
        session_id=session_id,
        session_id_xarg=session_id_xarg,
    )


def _sessions(body: _Body) -> tuple[str, str]:
    if not isinstance(body, _Session):
        return "", ""
    xarg = (body.vllm_xargs or {}).get("session_id")
    return body.session_id or "", xarg if isinstance(xarg, str) else ""


def session_of(job: Job, header: str | None) -> str:
    """The session of a request: that of the body, else of `X-Session-ID`, else of `vllm_xargs`.

    Bytes of the header beyond ASCII become one character each, as in vLLM. Empty: none given.
    """
    told = (header or "").encode(errors="surrogateescape").decode("latin-1")
    return job.session_id or told or job.session_id_xarg


def output_tokens(job: Job, *, longest: int, default: int) -> int:
    """How many tokens each prompt gets; `default` when the client set no limit.

    Args:
        longest: most tokens of prompt and output together.
    Raises: ApiError 400 when they exceed it.
    """
    prompt_tokens = max(count_tokens(prompt) for prompt in job.prompts)
    room = longest - prompt_tokens
    if job.max_tokens is not None and job.max_tokens > longest:
        raise ApiError(
            400,
            f"max_tokens={job.max_tokens} cannot be greater than max_model_len={longest}. "
            f"Ask for fewer output tokens. (parameter=max_tokens, value={job.max_tokens})",
            "BadRequestError",
            "max_tokens",
        )
    wanted = 0 if job.api is Api.EMBEDDINGS else job.max_tokens or 1
    if wanted > room:
        raise ApiError(
            400,
            f"This model's maximum context length is {longest} tokens, but the prompt has "
            f"{prompt_tokens} and {wanted} output tokens were asked for. "
            f"(parameter=input_tokens, value={prompt_tokens})",
            "BadRequestError",
            "input_tokens",
        )
    if job.api is not Api.EMBEDDINGS and job.max_tokens is None:
        return min(default, room)
    return wanted


def _prompts(value: str | list[str | int | list[int]], param: str) -> tuple[bytes, ...]:
    """One prompt (text or ids) or several."""
    items: list[Any] = [value] if isinstance(value, str) else value
    if items and isinstance(items[0], int):
        items = [items]
    try:
        return tuple(
            pad(item.encode()) if isinstance(item, str) else prompt_of_ids(item) for item in items
        )
    except (OverflowError, TypeError) as error:
        raise _invalid(f"a token id is an integer from 0 to 2**32 - 1: {error}", param) from error


def _parse_completion(body: bytes, content_type: str) -> Job:
    asked = decode(body, _Completion, content_type)
    prompts = _prompts(asked.prompt, "body.prompt")
    return _job(Api.COMPLETIONS, asked, prompts, asked.max_tokens, "max_tokens")


def _parse_chat(body: bytes, content_type: str) -> Job:
    asked = decode(body, _Chat, content_type)
    prompt = render_chat(asked.messages, tools=asked.tools)
    max_tokens = asked.max_completion_tokens or asked.max_tokens
    return _job(Api.CHAT, asked, (prompt,), max_tokens, "max_tokens")


def _parse_response(body: bytes, content_type: str) -> Job:
    asked = decode(body, _Response, content_type)
    given = [Message("user", asked.input)] if isinstance(asked.input, str) else asked.input
    prompt = render_chat(_with_system(given, asked.instructions), tools=asked.tools)
    return _job(Api.RESPONSES, asked, (prompt,), asked.max_output_tokens, "max_output_tokens")


def _parse_messages(body: bytes, content_type: str) -> Job:
    asked = decode(body, _Messages, content_type)
    prompt = render_chat(_with_system(asked.messages, asked.system), tools=asked.tools)
    return _job(Api.MESSAGES, asked, (prompt,), asked.max_tokens, "max_tokens")


def _parse_embedding(body: bytes, content_type: str) -> Job:
    asked = decode(body, _Embedding, content_type)
    prompts = _prompts(asked.input, "body.input")
    job = _job(Api.EMBEDDINGS, asked, prompts, None, "")
    return msgspec.structs.replace(job, stream=False, base64=asked.encoding_format == "base64")


_PARSERS = {
    Api.COMPLETIONS: _parse_completion,
    Api.CHAT: _parse_chat,
    Api.RESPONSES: _parse_response,
    Api.MESSAGES: _parse_messages,
    Api.EMBEDDINGS: _parse_embedding,
}
