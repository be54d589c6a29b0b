"""The HTTP side: vLLM's routes over one `Driver`, and `/sim/...` to watch and disturb it.

Headers of a stream go out before its first token, as from vLLM: the first body byte, not the first
response byte, tells that the prefill is over. Every response carries `x-sim-engine`.

Shutting down has vLLM's two forms. Without `shutdown_timeout_s` streams in flight end at once, in
the normal way, and the port closes. With it they run on, at most that long; until then `/health` is
200 and every new request is answered 500.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from random import Random
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web

from bench.engine import metrics_page
from bench.engine.answers import Answer, Ident, Usage, answer_for, embeddings_body
from bench.engine.bodies import (
    Api,
    ApiError,
    Detokenize,
    Job,
    decode,
    output_tokens,
    parse_count_tokens,
    parse_job,
    parse_tokenize,
    session_of,
)
from bench.engine.cost import CostModel
from bench.engine.driver import Driver, Reply
from bench.engine.faults import Faults, FaultSwitch, parse_faults
from bench.engine.kvcache import BlockContent, BlockName
from bench.engine.kvevents import BlockHasher, KvEventsConfig
from bench.engine.scheduler import Engine, EngineLimits, EngineRequest, QueueFullError
from bench.engine.stats import LOG_REQUESTS_MAX, Stats
from bench.engine.tokens import (
    TOKEN_BYTES,
    Filler,
    count_tokens,
    ids_of_prompt,
    name_blocks,
    name_root,
    text_of_ids,
)

if TYPE_CHECKING:
    from bench.engine.publisher import Publisher

BODY_BYTES_MAX = 64 * 1024 * 1024
VERSION = "0.32.0"
CUT_S_MAX = 1.0
"""Longest wait for handlers to write their last bytes when the server stops."""
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Everything `python -m bench.engine` can be told, apart from the address."""

    name: str = ""
    """Value of `x-sim-engine`; empty: sim-PORT."""
    models: tuple[str, ...] = ("sim",)
    """Served names; the first is the one in metrics."""
    loras: tuple[str, ...] = ()
    limits: EngineLimits = EngineLimits()
    cost: CostModel = CostModel()
    seed: int = 0
    max_model_len: int = 40_960
    """Most tokens of prompt and output."""
    default_output_tokens: int = 64
    """Length of an answer to a client that set no limit."""
    shutdown_timeout_s: float | None = None
    request_id_headers: bool = False
    load_tracking: bool = False
    prompt_tokens_details: bool = True
    """vLLM tells cached tokens only with `--enable-prompt-tokens-details`."""
    faults: Faults = Faults()
    kv_events: KvEventsConfig = KvEventsConfig()


class Server:
    """One engine and its routes. `start` and `stop` on a running loop."""

    def __init__(self, config: ServerConfig) -> None:
        """Raises: PublishingError or ImportError when KV events are asked for and impossible."""
        assert config.max_model_len <= config.limits.kv_tokens, "the longest request must fit"
        self.config = config
        self.name = config.name
        self.switch = FaultSwitch(config.faults)
        self.stats = Stats(config.max_model_len)
        self.publisher = _publisher(config)
        self.driver = Driver(
            Engine(config.limits, config.cost),
            self.stats,
            self.switch,
            on_step=None if self.publisher is None else self.publisher.on_step,
        )
        self._hasher = BlockHasher(
            block_tokens=config.limits.block_tokens, blocks_max=2 * config.limits.kv_blocks
        )
        self._filler = Filler(config.seed)
        self._ids = Random(config.seed)
        self._started_unix_s = time.time()
        self._submitted = 0
        self._handling = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._shutting_down = False
        self._runner: web.AppRunner | None = None
        self._site: web.TCPSite | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self, host: str, port: int) -> int:
        """Listen; returns the port (`port` 0: any free one)."""
        runner = web.AppRunner(
            self.app(), handler_cancellation=True, access_log=None, shutdown_timeout=CUT_S_MAX
        )
        await runner.setup()
        self._runner = runner
        self._site = web.TCPSite(runner, host, port)
        await self._site.start()
        self._task = asyncio.create_task(self.driver.run())
        if self.publisher is not None:
            self.publisher.start()
        address: tuple[Any, ...] = runner.addresses[0]
        self.name = self.config.name or f"sim-{address[1]}"
        return int(address[1])

    async def stop(self) -> None:
        """Shut down as on SIGTERM; see the module."""
        assert self._runner is not None, "not started"
        assert self._site is not None
        assert self._task is not None
        self._shutting_down = True
        if self.config.shutdown_timeout_s is not None:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), self.config.shutdown_timeout_s)
        await self._site.stop()
        self.driver.cut_all()
        await self._runner.cleanup()
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        if self.publisher is not None:
            self.publisher.close()

    def app(self) -> web.Application:
        """The routes."""
        app = web.Application(client_max_size=BODY_BYTES_MAX, middlewares=[self._errors])
        app.on_response_prepare.append(self._sign)
        for api in Api:
            app.router.add_post(api.value, self._generating(api))
        routes: tuple[tuple[str, str, Handler], ...] = (
            ("GET", "/health", self._health),
            ("GET", "/ping", self._health),
            ("POST", "/ping", self._health),
            ("GET", "/metrics", self._metrics),
            ("GET", "/v1/models", self._models),
            ("GET", "/version", self._version),
            ("GET", "/load", self._load),
            ("POST", "/tokenize", self._tokenize),
            ("POST", "/detokenize", self._detokenize),
            ("POST", "/v1/messages/count_tokens", self._count_tokens),
            ("POST", "/reset_prefix_cache", self._reset_prefix_cache),
            ("GET", "/kv_event_sources", self._kv_event_sources),
            ("GET", "/sim/kv_blocks", self._kv_blocks),
            ("POST", "/sim/fault", self._fault),
            ("GET", "/sim/state", self._state),
        )
        for method, path, handler in routes:
            app.router.add_route(method, path, handler)
        return app

    @web.middleware
    async def _errors(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Errors in vLLM's shapes."""
        try:
            return await handler(request)
        except ApiError as error:
            return _json(error.body(), status=error.status)
        except web.HTTPException as error:
            headers = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else None
            body = msgspec.json.encode({"detail": error.reason})
            return _json(body, status=error.status, headers=headers)

    async def _sign(self, request: web.Request, response: web.StreamResponse) -> None:
        response.headers["x-sim-engine"] = self.name
        response.headers["Server"] = "uvicorn"
        if self.config.request_id_headers:
            key = request.headers.get("X-Request-Id") or self._make_id()
            response.headers["X-Request-Id"] = key

    def _generating(self, api: Api) -> Handler:
        async def handler(request: web.Request) -> web.StreamResponse:
            self._handling += 1
            self._idle.clear()
            try:
                return await self._generate(request, api)
            finally:
                self._handling -= 1
                if not self._handling:
                    self._idle.set()

        return handler

    async def _generate(self, request: web.Request, api: Api) -> web.StreamResponse:
        faults = self.switch.now
        if faults.drop:
            return _drop(request)
        if self._shutting_down:
            raise _internal_error("cannot schedule new futures after shutdown")
        if faults.error_500:
            raise _internal_error("EngineCore encountered an issue.")
        job = parse_job(api, await request.read(), request.headers.get("Content-Type", ""))
        model = self._check_model(job.model)
        session_id = session_of(job, request.headers.get("X-Session-ID"))
        reply, texts = self._submit(job, model, session_id)
        try:
            ident = Ident(
                key=request.headers.get("X-Request-Id") or self._make_id(),
                model=model,
                created=int(time.time()),
                show_cached=self.config.prompt_tokens_details,
            )
            if job.stream:
                return await self._stream(request, reply, texts, answer_for(job, ident))
            await reply.wait()
            return self._whole(request, reply, texts, job, ident)
        finally:
            self.driver.release(reply)

    def _submit(self, job: Job, model: str, session_id: str) -> tuple[Reply, list[bytes]]:
        """Queue the job's prompts. Returns where the answer arrives, and the answers' texts."""
        config = self.config
        tokens = output_tokens(
            job, longest=config.max_model_len, default=config.default_output_tokens
        )
        lora = model if model in config.loras else ""
        texts, requests = [], []
        for prompt in job.prompts:
            text = self._filler.text(prompt, tokens)
            self._submitted += 1
            blocks, content = self._blocks(prompt + text, lora, job.cache_salt, session_id)
            texts.append(text)
            requests.append(
                EngineRequest(
                    id=f"{self.name}-{self._submitted}",
                    prompt_tokens=count_tokens(prompt),
                    output_tokens=tokens,
                    blocks=blocks,
                    lora=lora,
                    content=content,
                )
            )
        finish = "stop" if job.max_tokens is None else "length"
        try:
            return self.driver.submit(requests, stream=job.stream, finish=finish), texts
        except QueueFullError as error:
            message = "The engine is busy: its queue is full. Try later or another instance."
            raise ApiError(503, message, "Service Unavailable") from error

    def _blocks(
        self, tokens: bytes, lora: str, salt: str, session_id: str
    ) -> tuple[list[BlockName], BlockContent | None]:
        """Names of the blocks and, when events tell of them, what they hold."""
        if self.publisher is None:
            size, root = self.config.limits.block_tokens, name_root(lora, salt)
            return name_blocks(tokens, block_tokens=size, root=root), None
        lora_id = self.config.loras.index(lora) + 1 if lora else None
        content = BlockContent(
            tokens=tokens, lora_id=lora_id, cache_salt=salt, session_id=session_id
        )
        return self._hasher.names(tokens, lora=lora, cache_salt=salt), content

    async def _stream(
        self, request: web.Request, reply: Reply, texts: list[bytes], answer: Answer
    ) -> web.StreamResponse:
        response = web.StreamResponse()
        response.headers["Content-Type"] = "text/event-stream; charset=utf-8"
        await response.prepare(request)
        sent = 0
        while True:
            tokens = await reply.wait()
            parts = [answer.head(self._usage(reply))] if tokens and not sent else []
            for choice, number, last in tokens:
                text = texts[choice][(number - 1) * TOKEN_BYTES : number * TOKEN_BYTES]
                parts.append(answer.token(choice, text, reply.finish if last else None))
            sent += len(tokens)
            if reply.over:
                parts.append(answer.cut() if reply.cut else answer.tail(self._usage(reply)))
            await response.write(b"".join(parts))
            cut_after = self.switch.now.drop_after_tokens
            if cut_after is not None and sent >= cut_after:
                return _drop(request, response)
            if reply.over:
                return response

    def _whole(
        self, request: web.Request, reply: Reply, texts: list[bytes], job: Job, ident: Ident
    ) -> web.Response:
        usage = self._usage(reply)
        if job.api is Api.EMBEDDINGS:
            return _json(embeddings_body(job, ident, usage, self.config.seed))
        parts = [
            text[: live.generated * TOKEN_BYTES].decode()
            for text, live in zip(texts, reply.lives, strict=True)
        ]
        finish = "abort" if reply.cut else reply.finish
        headers = None
        if job.api in (Api.COMPLETIONS, Api.CHAT):
            wanted = request.headers.get("endpoint-load-metrics-format")
            headers = metrics_page.load_header(self.stats.load, wanted)
        return _json(answer_for(job, ident).body(parts, finish, usage), headers=headers)

    def _usage(self, reply: Reply) -> Usage:
        size = self.config.limits.block_tokens
        return Usage(
            prompt_tokens=sum(live.request.prompt_tokens for live in reply.lives),
            cached_tokens=sum(live.cached_tokens for live in reply.lives),
            output_tokens=sum(live.generated for live in reply.lives),
            full_block_tokens=sum(
                live.request.prompt_tokens // size * size for live in reply.lives
            ),
        )

    def _check_model(self, model: str | None) -> str:
        """The name to answer with. Raises: ApiError 404."""
        if model is None:
            return self.config.models[0]
        if model not in self.config.models and model not in self.config.loras:
            known = ", ".join(self.config.models + self.config.loras)
            message = f"The model `{model}` does not exist. Served here: {known}."
            raise ApiError(404, message, "NotFoundError", "model")
        return model

    def _make_id(self) -> str:
        return f"{self._ids.getrandbits(64):016x}"

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(status=503 if self.switch.now.unhealthy else 200)

    async def _metrics(self, request: web.Request) -> web.StreamResponse:
        faults = self.switch.now
        if faults.metrics_delay_s:
            await asyncio.sleep(faults.metrics_delay_s)
        if faults.metrics == "refuse":
            return _drop(request)
        if faults.metrics == "error":
            raise _internal_error("metrics are broken on purpose")
        if faults.metrics == "html":
            page = "<!doctype html><html><body>Welcome</body></html>"
            return web.Response(text=page, content_type="text/html")
        page_bytes = metrics_page.render(self.stats, self._page_context())
        if faults.metrics == "nan":
            lines = page_bytes.splitlines(keepends=True)
            broken = (line.rpartition(b" ")[0] + b" NaN\n" for line in lines if line[:1] != b"#")
            page_bytes = b"".join(broken)
        return web.Response(body=page_bytes, headers={"Content-Type": metrics_page.CONTENT_TYPE})

    def _page_context(self) -> metrics_page.PageContext:
        return metrics_page.PageContext(
            model_name=self.config.models[0],
            limits=self.config.limits,
            max_model_len=self.config.max_model_len,
            has_loras=bool(self.config.loras),
            started_unix_s=self._started_unix_s,
            clock_offset_s=time.time() - time.monotonic(),
        )

    async def _models(self, _: web.Request) -> web.Response:
        root = self.config.models[0]
        cards = [
            self._card(name, root=root, parent=None, length=self.config.max_model_len)
            for name in self.config.models
        ]
        cards += [
            self._card(name, root=name, parent=root, length=None) for name in self.config.loras
        ]
        return _json(msgspec.json.encode({"object": "list", "data": cards}))

    def _card(
        self, name: str, *, root: str, parent: str | None, length: int | None
    ) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": int(self._started_unix_s),
            "owned_by": "vllm",
            "root": root,
            "parent": parent,
            "max_model_len": length,
            "permission": [],
        }

    async def _version(self, _: web.Request) -> web.Response:
        return _json(msgspec.json.encode({"version": VERSION}))

    async def _load(self, _: web.Request) -> web.Response:
        load = self._handling if self.config.load_tracking else 0
        return _json(msgspec.json.encode({"server_load": load}))

    async def _tokenize(self, request: web.Request) -> web.Response:
        prompt, with_strings = parse_tokenize(await request.read())
        ids = ids_of_prompt(prompt)
        strings = [text_of_ids([token]) for token in ids] if with_strings else None
        answer = {"count": len(ids), "max_model_len": self.config.max_model_len}
        return _json(msgspec.json.encode({**answer, "tokens": ids, "token_strs": strings}))

    async def _detokenize(self, request: web.Request) -> web.Response:
        asked = decode(await request.read(), Detokenize)
        try:
            text = text_of_ids(asked.tokens)
        except OverflowError as error:
            raise ApiError(400, f"not a token id: {error}", "Bad Request", "tokens") from error
        return _json(msgspec.json.encode({"prompt": text}))

    async def _count_tokens(self, request: web.Request) -> web.Response:
        count = count_tokens(parse_count_tokens(await request.read()))
        context = {"original_input_tokens": count}
        return _json(msgspec.json.encode({"input_tokens": count, "context_management": context}))

    async def _reset_prefix_cache(self, _: web.Request) -> web.Response:
        self.driver.engine.clear_cache()
        return web.Response()

    async def _kv_event_sources(self, _: web.Request) -> web.Response:
        sources = {} if self.publisher is None else self.publisher.sources()
        return _json(msgspec.json.encode(sources))

    async def _kv_blocks(self, _: web.Request) -> web.Response:
        """What a follower of the events must know when it has all before `next_sequence`; only
        while `settled`, because a step is told when it is over."""
        engine = self.driver.engine
        state = {
            "settled": engine.told,
            "next_sequence": 0 if self.publisher is None else self.publisher.next_sequence,
            "blocks": engine.kv.names(),
        }
        return _json(msgspec.json.encode(state))

    async def _fault(self, request: web.Request) -> web.Response:
        self.switch.set(parse_faults(await request.read()))
        if self.publisher is not None:
            self.publisher.set_faults(self.switch.now)
        return _json(msgspec.json.encode(self.switch.now))

    async def _state(self, request: web.Request) -> web.Response:
        """Counters, load and, with `?log=N`, the last N requests."""
        text = request.query.get("log", "0")
        if not text.isascii() or not text.isdigit():
            raise ApiError(400, f"log is a count of requests, not {text!r}", "Bad Request", "log")
        lines = min(int(text), LOG_REQUESTS_MAX)
        state = {
            "engine": self.name,
            "counters": self.stats.counters,
            "load": self.driver.engine.load(),
            "in_flight": self.driver.in_flight,
            "late_s": self.driver.late_s,
            "faults": self.switch.now,
            "kv_events": self.publisher and self.publisher.counts,
            "log": list(self.stats.log)[-lines:] if lines else [],
        }
        return _json(msgspec.json.encode(state))


def _publisher(config: ServerConfig) -> Publisher | None:
    if not config.kv_events.active:
        return None
    # Only here, because the package it needs is needed by nothing else.
    from bench.engine.publisher import Publisher

    return Publisher(
        config.kv_events, block_tokens=config.limits.block_tokens, faults=config.faults
    )


def _json(body: bytes, *, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(
        body=body, status=status, headers={"Content-Type": "application/json", **(headers or {})}
    )


def _internal_error(message: str) -> ApiError:
    return ApiError(500, message, "Internal Server Error")


def _drop(request: web.Request, response: web.StreamResponse | None = None) -> web.StreamResponse:
    """Close the connection without (the rest of) an answer; what is returned goes nowhere."""
    if request.transport is not None:
        request.transport.abort()
    return response or web.Response(status=500)
