"""The admin port behind TLS, a client CA and a judge of tokens."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from epp.core.errors import EppError
from epp.edge.admin import AdminServer, Authorize
from epp.edge.admin_tls import AdminTls
from epp.edge.metrics import Metrics
from epp.edge.tls import (
    CERTIFICATE_FILE,
    KEY_FILE,
    CertificateError,
    CertificateFiles,
    KeyPair,
    SelfSigned,
    self_signed,
)
from epp.explain_command import _fetch
from tests.integration.test_admin import empty_state

SERVER, RENEWED, CLIENT, STRANGER = (self_signed() for _ in range(4))


@asynccontextmanager
async def serving(
    *, tls: AdminTls | None = None, auth: Authorize | None = None
) -> AsyncIterator[str]:
    server = AdminServer(
        host="127.0.0.1", port=0, metrics=Metrics(dict), state=empty_state, tls=tls, auth=auth
    )
    port = await server.start()
    try:
        yield f"{'http' if tls is None else 'https'}://127.0.0.1:{port}"
    finally:
        await server.stop()


async def ask(
    url: str,
    *,
    trusts: KeyPair = SERVER,
    as_client: Path | None = None,
    token: str | None = None,
    method: str = "GET",
) -> aiohttp.ClientResponse:
    """One request on a connection of its own."""
    context = ssl.create_default_context(cadata=trusts.certificate_chain.decode())
    if as_client is not None:
        context.load_cert_chain(as_client / CERTIFICATE_FILE, as_client / KEY_FILE)
    headers = {} if token is None else {"Authorization": token}
    timeout = aiohttp.ClientTimeout(total=20)
    async with (
        aiohttp.ClientSession(timeout=timeout) as session,
        session.request(method, url, ssl=context, headers=headers) as response,
    ):
        await response.read()
        return response


def put(folder: Path, pair: KeyPair) -> Path:
    folder.mkdir(exist_ok=True)
    for name, data in ((CERTIFICATE_FILE, pair.certificate_chain), (KEY_FILE, pair.private_key)):
        replace(folder / name, data)
    return folder


def replace(path: Path, data: bytes) -> None:
    fresh = path.with_name(f"{path.name}.new")
    fresh.write_bytes(data)
    fresh.rename(path)


# -- who asks ------------------------------------------------------------------------------


class Judge:
    """Lets one token in, and keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str | None, str]] = []

    async def __call__(self, authorization: str | None, path: str) -> tuple[int, str]:
        self.asked.append((authorization, path))
        if authorization is None:
            return 401, "no token"
        return (200, "ok") if authorization == "Bearer good" else (403, "not you")


@pytest.mark.parametrize("path", ["/metrics", "/debug/state", "/debug/state?blocks=true"])
@pytest.mark.parametrize("method", ["GET", "HEAD"])
async def test_D11_metrics_and_debug_pages_are_for_those_who_may(path: str, method: str) -> None:
    judge = Judge()
    async with serving(auth=judge) as url:
        none = await ask(url + path, method=method)
        bad = await ask(url + path, method=method, token="Bearer bad")
        good = await ask(url + path, method=method, token="Bearer good")
    assert (none.status, bad.status, good.status) == (401, 403, 200)
    assert none.headers["WWW-Authenticate"] == "Bearer"
    assert {asked for _, asked in judge.asked} == {path.partition("?")[0]}
    if method == "GET":
        assert (await none.text(), await bad.text()) == ("no token\n", "not you\n")


@pytest.mark.parametrize(("path", "status"), [("/healthz", 200), ("/", 200), ("/nothing", 404)])
async def test_what_says_nothing_is_answered_to_everyone(path: str, status: int) -> None:
    judge = Judge()
    async with serving(auth=judge) as url:
        assert (await ask(url + path)).status == status
    assert judge.asked == []


@pytest.mark.parametrize("path", ["/%6detrics", "/./metrics", "//metrics", "/debug/../metrics"])
async def test_another_spelling_of_a_path_is_no_way_round(path: str) -> None:
    async with serving(auth=Judge()) as url:
        host = url.removeprefix("http://")
        async with (
            aiohttp.ClientSession() as session,
            session.get(aiohttp.client.URL(f"http://{host}{path}", encoded=True)) as response,
        ):
            assert response.status in (401, 404)


async def test_a_judge_that_fails_lets_nobody_in(caplog: pytest.LogCaptureFixture) -> None:
    async def broken(_authorization: str | None, _path: str) -> tuple[int, str]:
        raise RuntimeError("a bug")

    async with serving(auth=broken) as url:
        assert (await ask(f"{url}/metrics", token="Bearer good")).status == 500
    assert "a bug" in caplog.text


async def test_without_a_judge_everyone_may_read() -> None:
    async with serving() as url:
        assert (await ask(f"{url}/metrics")).status == 200


# -- TLS -----------------------------------------------------------------------------------


async def test_pages_are_served_over_tls_to_who_trusts_the_certificate() -> None:
    source = SelfSigned()
    async with serving(tls=AdminTls(source)) as url:
        assert (await ask(f"{url}/healthz", trusts=source.pair)).status == 200
        with pytest.raises(aiohttp.ClientConnectorCertificateError):
            await ask(f"{url}/healthz", trusts=STRANGER)
        with pytest.raises(aiohttp.ClientError):
            await ask(url.replace("https", "http") + "/healthz")
        assert (await ask(f"{url}/metrics", trusts=source.pair)).status == 200


async def test_a_renewed_certificate_counts_from_the_next_connection_on(tmp_path: Path) -> None:
    tls = AdminTls(CertificateFiles(put(tmp_path, SERVER)))
    async with serving(tls=tls) as url:
        assert (await ask(f"{url}/healthz", trusts=SERVER)).status == 200
        put(tmp_path, RENEWED)
        assert (await ask(f"{url}/healthz", trusts=RENEWED)).status == 200
        with pytest.raises(aiohttp.ClientConnectorCertificateError):
            await ask(f"{url}/healthz", trusts=SERVER)


async def test_files_that_cannot_be_used_change_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tls = AdminTls(CertificateFiles(put(tmp_path, SERVER)))
    async with serving(tls=tls) as url:
        replace(tmp_path / KEY_FILE, STRANGER.private_key)
        for _ in range(3):
            assert (await ask(f"{url}/healthz", trusts=SERVER)).status == 200
    assert caplog.text.count("stays in use") == 1


@pytest.fixture
def client_ca(tmp_path: Path) -> Path:
    path = tmp_path / "ca.crt"
    path.write_bytes(CLIENT.certificate_chain)
    return path


async def test_with_a_client_ca_only_its_clients_get_in(tmp_path: Path, client_ca: Path) -> None:
    client, stranger = put(tmp_path / "client", CLIENT), put(tmp_path / "stranger", STRANGER)
    tls = AdminTls(CertificateFiles(put(tmp_path / "server", SERVER)), client_ca=client_ca)
    async with serving(tls=tls) as url:
        assert (await ask(f"{url}/metrics", as_client=client)).status == 200
        for nobody in (None, stranger):
            with pytest.raises((aiohttp.ClientError, OSError)):
                await ask(f"{url}/healthz", as_client=nobody)


async def test_a_changed_client_ca_lets_others_in_and_the_former_ones_out(
    tmp_path: Path, client_ca: Path
) -> None:
    former, new = put(tmp_path / "former", CLIENT), put(tmp_path / "new", STRANGER)
    tls = AdminTls(CertificateFiles(put(tmp_path / "server", SERVER)), client_ca=client_ca)
    async with serving(tls=tls) as url:
        assert (await ask(f"{url}/metrics", as_client=former)).status == 200
        replace(client_ca, STRANGER.certificate_chain)
        assert (await ask(f"{url}/metrics", as_client=new)).status == 200
        with pytest.raises((aiohttp.ClientError, OSError)):
            await ask(f"{url}/metrics", as_client=former)


async def test_a_client_ca_that_vanishes_keeps_counting(
    tmp_path: Path, client_ca: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    client = put(tmp_path / "client", CLIENT)
    tls = AdminTls(CertificateFiles(put(tmp_path / "server", SERVER)), client_ca=client_ca)
    async with serving(tls=tls) as url:
        client_ca.unlink()
        for _ in range(2):
            assert (await ask(f"{url}/metrics", as_client=client)).status == 200
        with pytest.raises((aiohttp.ClientError, OSError)):
            await ask(f"{url}/metrics")
    assert caplog.text.count("cannot be read") == 1


@pytest.mark.parametrize("data", [None, b"", b"no certificate"])
def test_a_client_ca_that_is_none_stops_the_start(tmp_path: Path, data: bytes | None) -> None:
    path = tmp_path / "ca.crt"
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(CertificateError, match=r"--metrics-client-ca-file: .*ca\.crt"):
        AdminTls(SelfSigned(), client_ca=path)


async def test_tls_and_a_judge_act_together() -> None:
    source = SelfSigned()
    async with serving(tls=AdminTls(source), auth=Judge()) as url:
        assert (await ask(f"{url}/metrics", trusts=source.pair)).status == 401
        good = await ask(f"{url}/metrics", trusts=source.pair, token="Bearer good")
        assert good.status == 200


async def test_explain_reads_the_state_with_a_token_and_says_what_is_missing_without() -> None:
    async with serving(auth=Judge()) as url:
        with pytest.raises(EppError, match=r"401.*--token-file"):
            await asyncio.to_thread(_fetch, url)
        with pytest.raises(EppError, match=r"403.*non-resource URL"):
            await asyncio.to_thread(_fetch, url, token="other")
        assert b'"pool"' in await asyncio.to_thread(_fetch, url, token="good")


async def test_D06_what_a_stranger_sends_malformed_is_not_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with serving() as url:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        writer.write(b"GET /metrics HTTP/1.1\r\nAuthorization: Bearer SECRET\x00\r\n\r\n")
        answer = await reader.read()
        writer.close()
    assert answer.startswith(b"HTTP/1.0 400")
    assert "SECRET" not in caplog.text
    assert caplog.records == []
