"""Certificates: made, read, refused, and renewed under a server that goes on serving."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import ssl
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from grpc import aio

from epp.core.streams import Transport
from epp.edge.grpcio import PROCESS_PATH, GrpcioServer
from epp.edge.health import CHECK_PATH, Health
from epp.edge.tls import (
    CertificateError,
    CertificateFiles,
    CertificateSource,
    KeyPair,
    SelfSigned,
    load_files,
    self_signed,
    ssl_context,
)

pytestmark = pytest.mark.asyncio(loop_scope="session")


class Echo:
    def __init__(self, transport: Transport) -> None:
        self.transport = transport

    def on_message(self, data: bytes) -> None:
        self.transport.send((data,))

    def on_close(self) -> None:
        pass


async def started(tls: CertificateSource | None) -> tuple[GrpcioServer, int]:
    server = GrpcioServer(new_stream=Echo, health=Health(), host="127.0.0.1", port=0, tls=tls)
    return server, (await server.start())[0]


def trusting(port: int, pair: KeyPair) -> aio.Channel:
    credentials = grpc.ssl_channel_credentials(root_certificates=pair.certificate_chain)
    options = [("grpc.use_local_subchannel_pool", 1)]  # a connection of its own
    return aio.secure_channel(f"127.0.0.1:{port}", credentials, options=options)


async def served(port: int) -> tuple[bytes, str | None]:
    """The certificate (DER) a new connection gets, and the protocol chosen by ALPN."""

    def shake_hands() -> tuple[bytes, str | None]:
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        context.set_alpn_protocols(["h2"])
        with (
            socket.create_connection(("127.0.0.1", port), timeout=10) as plain,
            context.wrap_socket(plain) as secure,
        ):
            return secure.getpeercert(binary_form=True), secure.selected_alpn_protocol()

    return await asyncio.to_thread(shake_hands)


def der(pair: KeyPair) -> bytes:
    return ssl.PEM_cert_to_DER_cert(pair.certificate_chain.decode())


def write(folder: Path, certificate_chain: bytes, private_key: bytes) -> None:
    (folder / "tls.crt").write_bytes(certificate_chain)
    (folder / "tls.key").write_bytes(private_key)


def swap(folder: Path, pair: KeyPair, name: str) -> None:
    """Put a pair in place as the kubelet does: a new folder, and a link re-pointed atomically."""
    (folder / name).mkdir()
    write(folder / name, pair.certificate_chain, pair.private_key)
    (folder / "..next").symlink_to(name)
    (folder / "..next").rename(folder / "..data")
    for file in ("tls.crt", "tls.key"):
        with suppress(FileExistsError):
            (folder / file).symlink_to(Path("..data") / file)


async def test_a_self_signed_pair_is_small_long_lived_and_names_this_host() -> None:
    pair = self_signed(("localhost", "::1", "epp.example"))
    certificate = x509.load_pem_x509_certificate(pair.certificate_chain)
    assert isinstance(certificate.public_key(), ec.EllipticCurvePublicKey)
    now = datetime.now(UTC)
    assert certificate.not_valid_before_utc < now - timedelta(minutes=50)
    assert certificate.not_valid_after_utc > now + timedelta(days=3_640)
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["localhost", "epp.example"]
    assert [str(ip) for ip in names.get_values_for_type(x509.IPAddress)] == ["::1"]
    assert "PRIVATE" not in repr(pair)
    assert self_signed() != self_signed()


async def test_a_client_that_trusts_the_certificate_talks_and_a_plain_one_does_not() -> None:
    source = SelfSigned()
    server, port = await started(source)
    assert await served(port) == (der(source.pair), "h2")
    async with trusting(port, source.pair) as channel:
        call = channel.stream_stream(PROCESS_PATH)()
        await call.write(b"secret")
        assert await call.read() == b"secret"
        call.cancel()
    for channel in (aio.insecure_channel(f"127.0.0.1:{port}"), trusting(port, self_signed())):
        async with channel:
            with pytest.raises(aio.AioRpcError) as caught:
                await channel.unary_unary(CHECK_PATH)(b"", timeout=20)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    await server.drain(0)


async def test_the_health_port_is_plaintext_also_with_tls() -> None:
    server = GrpcioServer(
        new_stream=Echo, health=Health(), host="127.0.0.1", port=0, health_port=0, tls=SelfSigned()
    )
    _, health_port = await server.start()
    async with aio.insecure_channel(f"127.0.0.1:{health_port}") as channel:
        assert await channel.unary_unary(CHECK_PATH)(b"", timeout=20) == b"\x08\x02"
    await server.drain(0)


async def test_a_new_connection_gets_the_new_certificate_and_open_streams_go_on(
    tmp_path: Path,
) -> None:
    old, new = self_signed(), self_signed()
    swap(tmp_path, old, "..2026_01")
    files = CertificateFiles(tmp_path)
    server, port = await started(files)
    async with trusting(port, old) as channel:
        call = channel.stream_stream(PROCESS_PATH)()
        await call.write(b"before")
        assert await call.read() == b"before"
        assert not files.check()
        swap(tmp_path, new, "..2026_02")
        assert (await served(port))[0] == der(old)
        assert files.check()
        assert (await served(port))[0] == der(new)
        assert (await served(port))[0] == der(new)
        await call.write(b"after")
        assert await call.read() == b"after"
        async with trusting(port, new) as renewed:
            assert await renewed.unary_unary(CHECK_PATH)(b"", timeout=20) == b"\x08\x02"
        call.cancel()
    await server.drain(0)


async def test_a_broken_new_pair_keeps_the_old_one_and_is_logged_once_per_content(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    old, new = self_signed(), self_signed()
    write(tmp_path, old.certificate_chain, old.private_key)
    files = CertificateFiles(tmp_path)
    caplog.set_level(logging.INFO)
    (tmp_path / "tls.crt").write_bytes(new.certificate_chain)  # its key is still to come
    for touched_ns in range(3):
        os.utime(tmp_path / "tls.crt", ns=(touched_ns, touched_ns))
        assert not files.check()
        assert files.pair == old
    (record,) = caplog.records
    assert "tls.key is not the key of the first certificate" in record.getMessage()
    (tmp_path / "tls.crt").unlink()
    assert not files.check()
    assert not files.check()
    assert "tls.crt does not exist" in caplog.records[1].getMessage()
    write(tmp_path, new.certificate_chain, new.private_key)
    assert files.check()
    assert files.pair == new
    assert [r.levelno for r in caplog.records] == [logging.ERROR, logging.ERROR, logging.INFO]
    assert "reloaded" in caplog.records[2].getMessage()
    assert "PRIVATE" not in caplog.text


async def test_files_written_again_with_the_same_content_change_nothing(tmp_path: Path) -> None:
    pair = self_signed()
    swap(tmp_path, pair, "..1")
    files = CertificateFiles(tmp_path)
    swap(tmp_path, pair, "..2")
    before = files.pair
    assert not files.check()
    assert files.pair is before


async def test_the_watch_looks_by_itself(tmp_path: Path) -> None:
    write(tmp_path, *_contents(self_signed()))
    files, new = CertificateFiles(tmp_path), self_signed()
    write(tmp_path, *_contents(new))
    watch = asyncio.create_task(files.watch(period_s=0.001))
    async with asyncio.timeout(20):
        while files.pair != new:  # noqa: ASYNC110 - the watch tells nobody
            await asyncio.sleep(0)
    watch.cancel()
    with pytest.raises(asyncio.CancelledError):
        await watch


def _contents(pair: KeyPair) -> tuple[bytes, bytes]:
    return pair.certificate_chain, pair.private_key


def _encrypted(pair: KeyPair) -> bytes:
    key = serialization.load_pem_private_key(pair.private_key, password=None)
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(b"secret"),
    )


PAIR, OTHER = self_signed(), self_signed()


@pytest.mark.parametrize(
    ("certificate_chain", "private_key", "message"),
    [
        (None, PAIR.private_key, r"tls\.crt does not exist; .* needs tls\.crt and tls\.key"),
        (PAIR.certificate_chain, None, r"tls\.key does not exist"),
        (PAIR.certificate_chain, OTHER.private_key, r"tls\.key is not the key of the first"),
        (
            OTHER.certificate_chain + PAIR.certificate_chain,
            PAIR.private_key,
            "own certificate first",
        ),
        (b"", PAIR.private_key, r"tls\.crt holds no usable PEM certificate"),
        (PAIR.certificate_chain[:200], PAIR.private_key, r"tls\.crt holds no usable PEM"),
        (PAIR.private_key, PAIR.private_key, r"tls\.crt holds no usable PEM certificate"),
        (PAIR.certificate_chain, PAIR.certificate_chain, r"tls\.key holds no usable PEM private"),
        (PAIR.certificate_chain, b"", r"tls\.key holds no usable PEM private key"),
        (
            PAIR.certificate_chain,
            _encrypted(PAIR),
            r"tls\.key is encrypted; .*without a passphrase",
        ),
        (bytes((1 << 20) + 1), PAIR.private_key, r"tls\.crt is longer than 1048576 bytes"),
    ],
)
async def test_unusable_files_are_named_with_the_remedy(
    tmp_path: Path, certificate_chain: bytes | None, private_key: bytes | None, message: str
) -> None:
    for name, content in (("tls.crt", certificate_chain), ("tls.key", private_key)):
        if content is not None:
            (tmp_path / name).write_bytes(content)
    with pytest.raises(CertificateError, match=message) as caught:
        CertificateFiles(tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert "BEGIN" not in str(caught.value)


async def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    write(tmp_path, *_contents(PAIR))
    (tmp_path / "tls.key").unlink()
    (tmp_path / "tls.key").mkdir()
    with pytest.raises(CertificateError, match=r"tls\.key cannot be read \(Is a directory\)"):
        load_files(tmp_path)


async def test_an_rsa_pair_with_a_chain_is_served_whole(tmp_path: Path) -> None:
    key = rsa.generate_private_key(65_537, 2_048)
    issuer = x509.load_pem_x509_certificate(PAIR.certificate_chain)
    issuer_key = serialization.load_pem_private_key(PAIR.private_key, password=None)
    leaf = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([]))
        .issuer_name(issuer.subject)
        .public_key(key.public_key())
        .serial_number(7)
        .not_valid_before(datetime.now(UTC) - timedelta(days=1))
        .not_valid_after(datetime.now(UTC) + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), True)
        .sign(issuer_key, issuer.signature_hash_algorithm)
    )
    pem, form = serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL
    private_key = key.private_bytes(pem, form, serialization.NoEncryption())
    write(tmp_path, leaf.public_bytes(pem) + PAIR.certificate_chain, private_key)
    server, port = await started(CertificateFiles(tmp_path))
    credentials = grpc.ssl_channel_credentials(root_certificates=PAIR.certificate_chain)
    options = [("grpc.ssl_target_name_override", "localhost")]
    async with aio.secure_channel(f"127.0.0.1:{port}", credentials, options=options) as channel:
        assert await channel.unary_unary(CHECK_PATH)(b"", timeout=20) == b"\x08\x02"
    await server.drain(0)


async def test_the_same_pair_serves_a_transport_of_our_own() -> None:
    server = await asyncio.start_server(
        lambda _reader, writer: writer.close(), "127.0.0.1", 0, ssl=ssl_context(PAIR)
    )
    async with server:
        assert await served(server.sockets[0].getsockname()[1]) == (der(PAIR), "h2")
    with pytest.raises(CertificateError, match="refused"):
        ssl_context(KeyPair(PAIR.certificate_chain, OTHER.private_key))
