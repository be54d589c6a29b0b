"""The front of the fake Kubernetes API server: a real socket, and the handles for a test.

    async with FakeApi(tls=True, token="secret") as api:
        api.store.put(pod("a", "10.0.0.1"))             # as if somebody had created it
        client = client_of(api.kubeconfig(folder))
        rule = api.faults.add(Answer(503), verb="list", count=2)
        await api.until(lambda: api.calls("watch", "pods"))

Requests that came in are in `api.seen`. For tests that are no coroutines, or that run the client
in another process, `FakeApiThread` in `fake_thread.py` is the same on a thread of its own.
`python -m tests.kubernetes.fake_api --help` runs one to play with.
"""

from __future__ import annotations

import asyncio
import base64
import gzip
import ssl
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import yaml
from aiohttp import web

from tests.kubernetes.answers import RefusedError
from tests.kubernetes.authority import ADMIN, Access, User
from tests.kubernetes.calls import Call, read_call
from tests.kubernetes.certificates import Authority
from tests.kubernetes.discovery import discover
from tests.kubernetes.faults import Answer, Bends, CutError, Faults, Outlet, break_off
from tests.kubernetes.openapi import openapi
from tests.kubernetes.resources import Kind, Kinds
from tests.kubernetes.store import Store, encode
from tests.kubernetes.verbs import Reply, Verbs, absent, not_allowed, refusal
from tests.kubernetes.watching import WatchStream, scope

HOST = "127.0.0.1"
BODY_BYTES_MAX = 16 << 20
SEEN_MAX = 10_000
GZIP_BYTES = 128 << 10
"""Longer answers are compressed for who takes it, as the API server does; watches never are."""


class FakeApi:
    """One fake API server; an async context manager.

    Args:
        tls: serve HTTPS with a certificate for 127.0.0.1 and localhost of a CA of its own.
        token: the bearer token of an administrator; `None`: everybody is one. Change it to rotate
            it; `access.users` has further tokens, for users that may do what they are granted.
        absent: API groups whose CRDs are not installed at the start.
        bookmark_s: seconds between two bookmarks of a watch that asked for them.
        grace_s: seconds until a pod that a client deletes is gone.
        port: 0 = a free one.
    """

    def __init__(
        self,
        *,
        tls: bool = False,
        token: str | None = None,
        absent: Iterable[str] = (),
        bookmark_s: float = 60.0,
        grace_s: float = 0.0,
        port: int = 0,
    ) -> None:
        self.store = Store(Kinds(absent))
        self.faults = Faults()
        self.access = Access()
        self.seen: deque[Call] = deque(maxlen=SEEN_MAX)
        """The requests that came in, oldest first, with those that were refused."""
        self.gone_as_status = False
        """A watch from a forgotten version is answered with HTTP 410, not with an ERROR event."""
        self.bookmark_s = bookmark_s
        self.authority = Authority() if tls else None
        self._context = self.authority.context((HOST, "localhost")) if self.authority else None
        self._token: str | None = None
        self._token_files: list[Path] = []
        self._verbs = Verbs(self.store, self.access, grace_s)
        self._port = port
        self._runner: web.AppRunner | None = None
        self._transports: set[asyncio.Transport] = set()
        self._came = asyncio.Event()
        self.token = token

    # -- running -----------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        await self.recover()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.outage()

    async def recover(self) -> None:
        """Listen (again, on the same port)."""
        assert self._runner is None, "it is listening already"
        app = web.Application(client_max_size=BODY_BYTES_MAX)
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(
            app, access_log=None, handler_cancellation=True, shutdown_timeout=0.0
        )
        await self._runner.setup()
        site = web.TCPSite(self._runner, HOST, self._port, ssl_context=self._context)
        await site.start()
        self._port = self._runner.addresses[0][1]

    async def outage(self) -> None:
        """Stop listening and break all connections off; what is stored stays."""
        runner, self._runner = self._runner, None
        if runner is not None:
            self.faults.clear()
            self.cut_connections()
            await runner.cleanup()

    def cut_connections(self, *, reset: bool = True) -> None:
        """Break every open connection off, idle ones too."""
        for transport in list(self._transports):
            break_off(transport, reset=reset)
        self._transports.clear()

    # -- for clients -------------------------------------------------------------------

    @property
    def url(self) -> str:
        return f"{'https' if self._context else 'http'}://{HOST}:{self._port}"

    @property
    def port(self) -> int:
        return self._port

    @property
    def ca(self) -> bytes | None:
        """The certificate of its CA, PEM; `None` without TLS."""
        return self.authority.certificate if self.authority else None

    def client_tls(self) -> ssl.SSLContext | None:
        """What a client needs to trust it; `None` without TLS."""
        return ssl.create_default_context(cadata=self.ca.decode()) if self.ca else None

    @property
    def token(self) -> str | None:
        """The administrator's bearer token; files that were handed out follow a change."""
        return self._token

    @token.setter
    def token(self, token: str | None) -> None:
        self.rotate(token)

    def rotate(self, token: str | None, *, files: bool = True) -> None:
        """Another administrator's token; the old one gets 401.

        Args:
            files: write it to the token files that were handed out, as the kubelet would.
        """
        self.access.users.pop(self._token or "", None)
        self._token = token
        if token is not None:
            self.access.users[token] = ADMIN
        for path in self._token_files if files else ():
            path.write_text(token or "")

    def kubeconfig(
        self, folder: Path, *, namespace: str = "default", token_file: bool = False
    ) -> Path:
        """Write a kubeconfig of the administrator to a folder; returns its path.

        Args:
            token_file: name a file with the token (which follows `token`), not the token itself.
        """
        cluster = {"server": self.url}
        if self.ca is not None:
            cluster["certificate-authority-data"] = base64.b64encode(self.ca).decode()
        user: dict[str, str] = {}
        if token_file:
            user["tokenFile"] = str(self._token_file(folder))
        elif self._token is not None:
            user["token"] = self._token
        context = {"cluster": "fake", "user": "admin", "namespace": namespace}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "fake", "cluster": cluster}],
            "users": [{"name": "admin", "user": user}],
            "contexts": [{"name": "fake", "context": context}],
            "current-context": "fake",
        }
        path = folder / "kubeconfig.yaml"
        path.write_text(yaml.safe_dump(config))
        return path

    def service_account(self, folder: Path, *, namespace: str = "default") -> dict[str, str]:
        """Write the files a pod finds mounted (token, ca.crt, namespace) to a folder.

        Returns: the environment variables that go with them.
        """
        self._token_file(folder)
        (folder / "ca.crt").write_bytes(self.ca or b"")
        (folder / "namespace").write_text(namespace)
        return {"KUBERNETES_SERVICE_HOST": HOST, "KUBERNETES_SERVICE_PORT": str(self._port)}

    def _token_file(self, folder: Path) -> Path:
        path = folder / "token"
        path.write_text(self._token or "")
        self._token_files.append(path)
        return path

    # -- for tests ---------------------------------------------------------------------

    def calls(self, verb: str | None = None, plural: str | None = None) -> list[Call]:
        """The requests that came in, of one verb and plural (`None`: any)."""
        return [
            call
            for call in self.seen
            if verb in (None, call.verb) and plural in (None, call.plural)
        ]

    async def until(self, condition: Callable[[], object], within_s: float = 15.0) -> None:
        """Wait until a condition holds; looked at after each request, and every 10 ms.

        Raises: TimeoutError naming the last requests.
        """
        end = time.monotonic() + within_s
        while not condition():
            if time.monotonic() > end:
                last = [f"{call.verb} {call.path}" for call in list(self.seen)[-10:]]
                raise TimeoutError(f"not within {within_s} s; the last requests: {last}")
            self._came.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(0.01):
                    await self._came.wait()

    @property
    def open_watches(self) -> int:
        return len(self.faults.streams)

    # -- requests ----------------------------------------------------------------------

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        if request.transport is not None:
            self._transports = {each for each in self._transports if not each.is_closing()}
            self._transports.add(request.transport)
        call = read_call(
            request.method,
            request.path,
            dict(request.query),
            {name.lower(): value for name, value in request.headers.items()},
            time.monotonic(),
        )
        self.seen.append(call)
        self._came.set()
        bends = self.faults.take(call)
        try:
            return await self._answer(request, call, bends)
        except (CutError, ConnectionResetError):
            return web.Response()  # nobody gets it

    async def _answer(self, request: web.Request, call: Call, bends: Bends) -> web.StreamResponse:
        await bends.wait(after=False)
        try:
            user = self._user(request, call)
            answer = bends.answer()
            if answer is not None:
                return await self._send(request, bends, _injected(answer))
            kind = self.store.kinds.served.get((call.group, call.version, call.plural))
            if call.verb == "watch" and kind is not None and "watch" in kind.verbs:
                return await self._watch(request, call, kind, bends)
            reply = self._reply(call, kind, await request.read(), user)
        except RefusedError as refused:
            reply = refusal(refused)
        await bends.wait(after=True)
        return await self._send(request, bends, reply)

    def _user(self, request: web.Request, call: Call) -> User:
        """Who asks. Raises: RefusedError 401, or 403 when it may not."""
        if self._token is None:
            return ADMIN
        scheme, _, token = call.headers.get("authorization", "").partition(" ")
        user = self.access.users.get(token) if scheme == "Bearer" else None
        if user is None:
            user = _certified(request)
        if user is None:
            raise RefusedError(401, "Unauthorized", "Unauthorized")
        wanted = call.wanted()
        if call.verb != "discover" and not self.access.may(user, wanted):
            where = f' in the namespace "{wanted.namespace}"' if wanted.namespace else ""
            raise RefusedError(
                403,
                "Forbidden",
                f'{wanted.resource} is forbidden: User "{user.name}" cannot {wanted.verb} resource '
                f'"{wanted.resource}" in API group "{wanted.group}"{where}',
                details={"group": wanted.group, "kind": wanted.resource, "name": wanted.name},
            )
        return user

    def _reply(self, call: Call, kind: Kind | None, data: bytes, user: User) -> Reply:
        if call.verb == "discover":
            kinds = self.store.kinds
            found = discover(kinds, call.path) or openapi(kinds, call.path)
            if found is None:
                return absent(known_group=False)
            if isinstance(found, str):
                return Reply(200, found.encode(), "text/plain; charset=utf-8")
            return Reply(200, encode(found))
        if kind is None:
            versions = {each[:2] for each in self.store.kinds.served}
            return absent(known_group=(call.group, call.version) in versions)
        return self._verbs.answer(kind, call, data, user) if call.verb else not_allowed()

    async def _watch(
        self, request: web.Request, call: Call, kind: Kind, bends: Bends
    ) -> web.StreamResponse:
        query = dict(call.query)
        about = scope(kind, call.namespace, call.name or None, query)
        stream = WatchStream(self.store, about, query, self.bookmark_s)
        return await stream.run(request, bends, self.faults, gone_as_status=self.gone_as_status)

    async def _send(self, request: web.Request, bends: Bends, reply: Reply) -> web.StreamResponse:
        headers = {"Content-Type": reply.content_type, **dict(reply.headers)}
        body = reply.body
        if len(body) > GZIP_BYTES and "gzip" in request.headers.get("Accept-Encoding", ""):
            body = gzip.compress(body, 1)
            headers |= {"Content-Encoding": "gzip", "Vary": "Accept-Encoding"}
        outlet = Outlet(request, bends)
        if outlet.plain:
            return web.Response(status=reply.code, body=body, headers=headers)
        response = web.StreamResponse(status=reply.code, headers=headers)
        response.content_length = len(body)
        await outlet.begin(response)
        await outlet.send(body)
        await outlet.end()
        return response


def _injected(answer: Answer) -> Reply:
    wait = answer.retry_after_s
    headers = () if wait is None else (("Retry-After", str(wait)),)
    if answer.body is not None:
        return Reply(answer.code, answer.body, answer.content_type, headers)
    refused = RefusedError(answer.code, answer.reason, answer.message)
    return Reply(answer.code, encode(refused.status), answer.content_type, headers)


def _certified(request: web.Request) -> User | None:
    """The user of a client certificate, which TLS has checked."""
    found = request.get_extra_info("peercert") or {}
    names = [pair for group in found.get("subject", ()) for pair in group]
    common = [value for key, value in names if key == "commonName"]
    groups = tuple(value for key, value in names if key == "organizationName")
    return User(common[0], groups) if common else None


if __name__ == "__main__":
    from tests.kubernetes.command import main

    raise SystemExit(main())
