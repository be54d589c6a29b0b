"""A certificate authority of our own, for one run: the server's certificate and those of users."""

from __future__ import annotations

import ipaddress
import ssl
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

VALID = timedelta(days=1)


@dataclass(frozen=True, slots=True)
class Signed:
    """A certificate and its key, both PEM."""

    certificate: bytes
    key: bytes


class Authority:
    """Signs; its own certificate is `certificate` (PEM)."""

    def __init__(self) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _name("fake cluster CA")
        self._own = (
            _builder(self._name, self._name, self._key)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_key_usage(signs=True), critical=True)
            .add_extension(
                x509.SubjectKeyIdentifier.from_public_key(self._key.public_key()), critical=False
            )
            .sign(self._key, hashes.SHA256())
        )
        self.certificate = self._own.public_bytes(serialization.Encoding.PEM)

    def server(self, hosts: Sequence[str]) -> Signed:
        """A certificate for host names and IP addresses."""
        names = [_host(each) for each in hosts]
        return self._sign(_name(hosts[0]), x509.SubjectAlternativeName(names))

    def user(self, name: str, groups: Sequence[str] = ()) -> Signed:
        """A client certificate: the user is its common name, the groups its organizations."""
        return self._sign(_name(name, groups), None)

    def context(self, hosts: Sequence[str]) -> ssl.SSLContext:
        """A server's TLS: asks for a client certificate and does without."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.set_alpn_protocols(["http/1.1"])
        context.verify_mode = ssl.CERT_OPTIONAL
        context.load_verify_locations(cadata=self.certificate.decode())
        signed = self.server(hosts)
        with tempfile.TemporaryDirectory() as folder:
            pem = Path(folder, "server.pem")
            pem.write_bytes(signed.certificate + signed.key)
            context.load_cert_chain(pem)
        return context

    def _sign(self, name: x509.Name, names: x509.SubjectAlternativeName | None) -> Signed:
        key = ec.generate_private_key(ec.SECP256R1())
        builder = (
            _builder(name, self._name, key)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage(signs=False), critical=True)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()),
                critical=False,
            )
        )
        if names is not None:
            builder = builder.add_extension(names, critical=False)
        certificate = builder.sign(self._key, hashes.SHA256())
        return Signed(
            certificate.public_bytes(serialization.Encoding.PEM),
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            ),
        )


def _builder(
    name: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(minutes=5))
        .not_valid_after(now + VALID)
    )


def _name(common: str, organizations: Sequence[str] = ()) -> x509.Name:
    parts = [x509.NameAttribute(NameOID.ORGANIZATION_NAME, each) for each in organizations]
    return x509.Name([*parts, x509.NameAttribute(NameOID.COMMON_NAME, common)])


def _host(text: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        return x509.DNSName(text)


def _key_usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs,
        crl_sign=signs,
        encipher_only=False,
        decipher_only=False,
    )
