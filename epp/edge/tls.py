"""The certificate we serve with: made in memory, or read from a folder and followed as it changes.

A source has a `pair` that is always complete and valid; a transport reads it for each new
connection, so a renewed certificate takes effect without touching open ones. `CertificateFiles`
looks at its two files when `check` is called (by `watch`, once a second) and replaces the pair only
by one that parses and matches; whatever else it finds there is logged once and the old pair stays.
Kubernetes swaps a Secret's files by re-pointing a symbolic link; `stat` follows it, so inode and
time tell. A swap between reading the two files shows as a pair that does not match, and as a new
`stat` at the next look.

Cost: a look is two `stat` calls, about 10 µs. Making a P-256 pair takes less than 1 ms.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import os
import ssl
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NoReturn, Protocol

import msgspec
from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from epp.core.errors import EppError

CERTIFICATE_FILE = "tls.crt"
KEY_FILE = "tls.key"
FILE_BYTES_MAX = 1 << 20
"""Longest file read, either of the two."""
SELF_SIGNED_DAYS = 3_650
SELF_SIGNED_NAMES = ("localhost", "127.0.0.1", "::1")

_log = logging.getLogger(__name__)


class CertificateError(EppError):
    """The certificate or its key cannot be used; the message names the file and the remedy."""


class KeyPair(msgspec.Struct, frozen=True):
    """A certificate chain and its key, both PEM, known to match."""

    certificate_chain: bytes
    private_key: bytes

    def __repr__(self) -> str:
        return f"<KeyPair certificate_chain={len(self.certificate_chain)} bytes>"


class CertificateSource(Protocol):
    """What a server needs to know of certificates. Read from any thread."""

    @property
    def pair(self) -> KeyPair:
        """For connections that begin now; a new object whenever it changed."""
        ...


class SelfSigned:
    """A certificate made at start-up that nobody vouches for: encryption without identity, enough
    where the gateway does not verify (the reference EPP's default)."""

    def __init__(self, names: Iterable[str] = SELF_SIGNED_NAMES) -> None:
        self.pair = self_signed(names)


class CertificateFiles:
    """`tls.crt` and `tls.key` in one folder, as cert-manager and Kubernetes Secrets lay them out.

    Raises: CertificateError when there is no usable pair at the start; later never.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._seen = self._stat()
        self.pair = load_files(self.folder)
        self._failure = ""
        self._failed: tuple[bytes, ...] = ()

    def check(self) -> bool:
        """Look at the files; `True` when there is a new pair. On the event loop only."""
        seen = self._stat()
        if seen == self._seen:
            return False
        self._seen = seen
        contents: tuple[bytes, ...] = ()
        try:
            contents = _read_files(self.folder)
            pair = validate(*contents, folder=self.folder)
        except CertificateError as error:
            self._report(str(error), contents)
            return False
        self._failure, self._failed = "", ()
        if pair == self.pair:
            return False
        self.pair = pair
        _log.info("TLS certificate in %s reloaded", self.folder)
        return True

    async def watch(self, *, period_s: float = 1.0) -> NoReturn:
        """Check for ever, once per `period_s`."""
        while True:
            await asyncio.sleep(period_s)
            self.check()

    def _report(self, failure: str, contents: tuple[bytes, ...]) -> None:
        """Log a failure unless the same bytes failed the same way the last time."""
        if (failure, contents) != (self._failure, self._failed):
            self._failure, self._failed = failure, contents
            _log.error("the former TLS certificate stays in use: %s", failure)

    def _stat(self) -> tuple[tuple[int, ...], ...]:
        """What tells that a file was replaced or written; `()` for one that cannot be looked at."""
        return tuple(_stat(self.folder / name) for name in (CERTIFICATE_FILE, KEY_FILE))


def _stat(path: Path) -> tuple[int, ...]:
    try:
        found = os.stat(path)
    except OSError:
        return ()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def self_signed(names: Iterable[str] = SELF_SIGNED_NAMES) -> KeyPair:
    """A new P-256 key and a certificate for `names` (host names and IP addresses), valid for ten
    years and from an hour ago, so that a gateway's slow clock accepts it."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "endpoint-picker")])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(days=SELF_SIGNED_DAYS))
        .add_extension(x509.SubjectAlternativeName([_general_name(n) for n in names]), False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), True)
        .sign(key, hashes.SHA256())
    )
    return KeyPair(
        certificate.public_bytes(serialization.Encoding.PEM),
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        ),
    )


def _general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def load_files(folder: str | Path) -> KeyPair:
    """The pair in `folder`.

    Raises: CertificateError naming the file and the remedy when one is missing, unreadable, not
        PEM, encrypted, or when the two do not belong together.
    """
    folder = Path(folder)
    return validate(*_read_files(folder), folder=folder)


def _read_files(folder: Path) -> tuple[bytes, bytes]:
    return _read(folder / CERTIFICATE_FILE), _read(folder / KEY_FILE)


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(FILE_BYTES_MAX + 1)
    except FileNotFoundError:
        raise CertificateError(
            f"{path} does not exist; the certificate folder needs {CERTIFICATE_FILE} and {KEY_FILE}"
        ) from None
    except OSError as error:
        raise CertificateError(
            f"{path} cannot be read ({error.strerror}); let the user we run as read it"
        ) from None
    if len(data) > FILE_BYTES_MAX:
        raise CertificateError(f"{path} is longer than {FILE_BYTES_MAX} bytes; is it a PEM file?")
    return data


def validate(certificate_chain: bytes, private_key: bytes, *, folder: Path) -> KeyPair:
    """The two as a pair, if they are one.

    Args:
        folder: where they come from, for the error only.
    Raises: CertificateError.
    """
    certificate_path, key_path = folder / CERTIFICATE_FILE, folder / KEY_FILE
    try:
        certified = x509.load_pem_x509_certificates(certificate_chain)[0].public_key()
    except (ValueError, UnsupportedAlgorithm):
        raise CertificateError(f"{certificate_path} holds no usable PEM certificate") from None
    try:
        key = serialization.load_pem_private_key(private_key, password=None)
    except TypeError:
        raise CertificateError(
            f"{key_path} is encrypted; store the key without a passphrase"
        ) from None
    except (ValueError, UnsupportedAlgorithm):
        raise CertificateError(f"{key_path} holds no usable PEM private key") from None
    if key.public_key() != certified:
        raise CertificateError(
            f"{key_path} is not the key of the first certificate in {certificate_path};"
            " put the server's own certificate first, its issuers behind it"
        )
    return KeyPair(certificate_chain, private_key)


def ssl_context(
    pair: KeyPair, *, version_min: ssl.TLSVersion = ssl.TLSVersion.TLSv1_2
) -> ssl.SSLContext:
    """A server context for HTTP/2 (ALPN `h2`) for a transport of our own.

    The ssl module loads files only; an anonymous file in memory keeps the key off the disk.

    Args:
        version_min: lowest TLS version spoken; HTTP/2 itself demands 1.2.
    Raises: CertificateError when OpenSSL refuses what `validate` accepted.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = version_min
    context.set_alpn_protocols(["h2"])
    with os.fdopen(os.memfd_create("tls"), "wb") as file:
        file.write(pair.private_key.rstrip() + b"\n" + pair.certificate_chain)
        file.flush()
        try:
            context.load_cert_chain(f"/proc/self/fd/{file.fileno()}")
        except ssl.SSLError as error:
            raise CertificateError(f"TLS: the certificate is refused ({error.reason})") from None
    return context
