"""TLS of the admin port: a certificate, and on request only clients with one of a certain CA.

The files are looked at when a connection begins, before its handshake; what changed counts from
that connection on, for the client CA as well. What cannot be used is logged once, and the former
stays. A context is made when something changed, not per connection: a look is three `stat` calls.
"""

from __future__ import annotations

import logging
import os
import ssl
from pathlib import Path

from epp.edge.tls import CertificateError, CertificateFiles, CertificateSource, ssl_context

_log = logging.getLogger(__name__)

_Stat = tuple[int, ...]


class AdminTls:
    """What the admin server needs for TLS.

    Args:
        certificates: files are followed as they change.
        client_ca: PEM file; only clients whose certificate one of these signed get in. `None`:
            every client does.
    Raises: CertificateError naming the file and the remedy, at the start; later never.
    """

    def __init__(self, certificates: CertificateSource, *, client_ca: Path | None = None) -> None:
        self._certificates = certificates
        self._client_ca = client_ca
        self._made_of = self._look()
        self._failure = ""
        self.context = self._newest = self._make()
        """To serve with."""
        self.context.sni_callback = self._begin

    def _begin(self, connection: ssl.SSLObject, _name: str | None, _: ssl.SSLContext) -> None:
        """Called for every handshake, also one without a server name."""
        if isinstance(self._certificates, CertificateFiles):
            self._certificates.check()
        if (made_of := self._look()) != self._made_of:
            self._made_of = made_of
            try:
                self._newest, self._failure = self._make(), ""
            except CertificateError as error:
                self._report(str(error))
        connection.context = self._newest

    def _look(self) -> tuple[object, _Stat]:
        return self._certificates.pair, () if self._client_ca is None else _stat(self._client_ca)

    def _make(self) -> ssl.SSLContext:
        context = ssl_context(self._certificates.pair)
        context.set_alpn_protocols(["http/1.1"])
        if self._client_ca is not None:
            context.verify_mode = ssl.CERT_REQUIRED
            _trust(context, self._client_ca)
        return context

    def _report(self, failure: str) -> None:
        if failure != self._failure:
            self._failure = failure
            _log.error("the admin port's former TLS files stay in use: %s", failure)


def _trust(context: ssl.SSLContext, path: Path) -> None:
    try:
        context.load_verify_locations(cafile=path)
    except ssl.SSLError as error:
        reason = error.reason or str(error)
        raise CertificateError(
            f"--metrics-client-ca-file: {path} holds no usable PEM certificate ({reason})"
        ) from None
    except OSError as error:
        raise CertificateError(
            f"--metrics-client-ca-file: {path} cannot be read ({error.strerror})"
        ) from None


def _stat(path: Path) -> _Stat:
    try:
        found = os.stat(path)
    except OSError:
        return ()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
