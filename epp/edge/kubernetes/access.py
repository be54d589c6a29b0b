"""How to reach the API server: as a pod of the cluster, or by a kubeconfig file.

Everything that can be wrong with the files is found here, at start-up. What is in a kubeconfig but
not supported (a proxy, a password, impersonation) is refused by name: without it requests would be
made as somebody else.
"""

from __future__ import annotations

import base64
import binascii
import os
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import msgspec
import yaml

from epp.config.decode import decode
from epp.core.errors import ConfigError
from epp.edge.kubernetes.tokens import (
    ExecConfig,
    ExecToken,
    FileToken,
    FixedToken,
    TokenError,
    TokenSource,
    checked_token,
    program,
)

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Where a pod finds its token, the cluster's authority and its namespace."""
NAMESPACE_DEFAULT = "default"
FILE_BYTES_MAX = 1 << 20


class Access(msgspec.Struct, frozen=True, kw_only=True):
    """An API server and who we are to it."""

    server: str
    """URL without a slash at its end; may have a path."""
    namespace: str
    """The pod's, or the kubeconfig context's."""
    tls: ssl.SSLContext | None = None
    """`None` for plain HTTP."""
    token: TokenSource | None = None
    """`None`: no bearer token is sent."""
    tls_server_name: str | None = None
    """Name the server's certificate must have; `None`: the server's own."""


def find_access(kubeconfig: str | None, environ: Mapping[str, str]) -> Access:
    """The file that is named, else the cluster we are in, else the file KUBECONFIG names.

    Raises: ConfigError when there is none of these or it cannot be used.
    """
    if kubeconfig:
        return from_kubeconfig(Path(kubeconfig), environ=environ)
    if environ.get("KUBERNETES_SERVICE_HOST"):
        return in_cluster(environ)
    paths = [path for path in environ.get("KUBECONFIG", "").split(os.pathsep) if path]
    if len(paths) > 1:
        raise ConfigError(
            "KUBECONFIG names several files; make one of them with"
            " `kubectl config view --flatten` and name it with --kubeconfig",
            path="KUBECONFIG",
        )
    if paths:
        return from_kubeconfig(Path(paths[0]), environ=environ)
    raise ConfigError(
        "--kubeconfig: no API server is known: run in a cluster (KUBERNETES_SERVICE_HOST is set"
        " there), name a file with --kubeconfig or set KUBECONFIG",
        path="--kubeconfig",
    )


# -- in a cluster --------------------------------------------------------------------------


def in_cluster(environ: Mapping[str, str], folder: Path = SERVICE_ACCOUNT) -> Access:
    """Access as the service account of the pod we are in.

    Args:
        environ: has KUBERNETES_SERVICE_HOST and KUBERNETES_SERVICE_PORT.
        folder: has `token`, `ca.crt` and `namespace`.
    Raises: ConfigError naming the file and the remedy.
    """
    host = environ.get("KUBERNETES_SERVICE_HOST", "")
    if not host:
        raise ConfigError("KUBERNETES_SERVICE_HOST is not set: this is no pod", path="environment")
    if ":" in host and not host.startswith("["):
        host = f"[{host}]"
    server = _server(f"https://{host}:{environ.get('KUBERNETES_SERVICE_PORT') or 443}", folder)
    try:
        token = FileToken(folder / "token")
    except TokenError as error:
        raise ConfigError(
            f"{error}; is automountServiceAccountToken off?", path=str(folder / "token")
        ) from None
    authority = _read(folder / "ca.crt", "mount the service account's ca.crt")
    return Access(
        server=server,
        namespace=_namespace(folder / "namespace"),
        tls=_context(authority, folder / "ca.crt"),
        token=token,
    )


def _namespace(path: Path) -> str:
    if not path.exists():
        return NAMESPACE_DEFAULT
    return _read(path, "mount the service account").decode(errors="replace").strip()


# -- a kubeconfig file ---------------------------------------------------------------------


class _Cluster(msgspec.Struct, frozen=True, kw_only=True, rename="kebab"):
    server: str
    certificate_authority: str = ""
    certificate_authority_data: str = ""
    insecure_skip_tls_verify: bool = False
    tls_server_name: str = ""
    proxy_url: str = ""


class _User(msgspec.Struct, frozen=True, kw_only=True, rename="kebab"):
    client_certificate: str = ""
    client_certificate_data: str = ""
    client_key: str = ""
    client_key_data: str = ""
    token: str = ""
    token_file: str = msgspec.field(name="tokenFile", default="")
    exec: ExecConfig | None = None
    username: str = ""
    password: str = ""
    auth_provider: Any = None
    impersonate: str = msgspec.field(name="as", default="")


class _Context(msgspec.Struct, frozen=True, kw_only=True):
    cluster: str
    user: str = ""
    namespace: str = ""


class _NamedCluster(msgspec.Struct, frozen=True):
    name: str
    cluster: _Cluster


class _NamedUser(msgspec.Struct, frozen=True):
    name: str
    user: _User | None = None


class _NamedContext(msgspec.Struct, frozen=True):
    name: str
    context: _Context


class _File(msgspec.Struct, frozen=True, kw_only=True):
    clusters: list[_NamedCluster]
    contexts: list[_NamedContext]
    users: list[_NamedUser] | None = None
    current_context: str = msgspec.field(name="current-context", default="")


def from_kubeconfig(
    path: Path, context: str | None = None, *, environ: Mapping[str, str] | None = None
) -> Access:
    """Access as a context of the file says.

    Args:
        context: its name; `None`: the file's current one.
        environ: what a program that makes tokens inherits; `None`: our own environment.
    Raises: ConfigError naming the file, the key and the remedy.
    """
    file = _parsed(_read(path, "name a kubeconfig with --kubeconfig or KUBECONFIG"), path)
    chosen = context or file.current_context
    if not chosen:
        raise ConfigError("no current-context: name one", path=str(path))
    in_context = _named(file.contexts, chosen, "context", path).context
    cluster = _named(file.clusters, in_context.cluster, "cluster", path).cluster
    user = None
    if in_context.user:
        user = _named(file.users or [], in_context.user, "user", path).user
    user = user or _User()
    _refuse(cluster, user, path)
    server = _server(cluster.server, path)
    return Access(
        server=server,
        namespace=in_context.namespace or NAMESPACE_DEFAULT,
        tls=_tls(cluster, user, path) if server.startswith("https:") else None,
        token=_token(cluster, user, path, os.environ if environ is None else environ),
        tls_server_name=cluster.tls_server_name or None,
    )


def _parsed(data: bytes, path: Path) -> _File:
    # Not with the configuration's reader: it refuses what is usual here, such as line breaks.
    try:
        content = yaml.safe_load(data)
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(f"is not valid YAML: {reason}", path=str(path)) from None
    try:
        return decode(content, _File, path="$")
    except ConfigError as error:
        said = str(error).removesuffix(f" - at `{error.path}`")
        raise ConfigError(f"{path}: {said}", path=error.path) from None


_Named = TypeVar("_Named", _NamedCluster, _NamedUser, _NamedContext)


def _named(entries: list[_Named], name: str, kind: str, path: Path) -> _Named:
    for entry in entries:
        if entry.name == name:
            return entry
    known = ", ".join(entry.name for entry in entries[:10]) or "none"
    raise ConfigError(f"there is no {kind} {name!r}; there is: {known}", path=str(path))


def _refuse(cluster: _Cluster, user: _User, path: Path) -> None:
    """Raises: ConfigError for what would have to be obeyed and is not."""
    unsupported = {
        "proxy-url": cluster.proxy_url,
        "username": user.username,
        "password": user.password,
        "auth-provider": user.auth_provider,
        "as": user.impersonate,
    }
    for key, value in unsupported.items():
        if value:
            remedy = "use a token, a client certificate or an exec program, and no proxy"
            raise ConfigError(f"{key} is not supported: {remedy}", path=str(path))


def _token(
    cluster: _Cluster, user: _User, path: Path, environ: Mapping[str, str]
) -> TokenSource | None:
    """The token the file names first: a file goes before a text, as with kubectl."""
    try:
        if user.token_file:
            return FileToken(path.parent / user.token_file)
        if user.token:
            return FixedToken(checked_token(user.token))
        if user.exec is None:
            return None
        about = {"server": cluster.server, "tls-server-name": cluster.tls_server_name}
        if cluster.certificate_authority_data:
            about["certificate-authority-data"] = cluster.certificate_authority_data
        return ExecToken(program(user.exec, path.parent), environ=environ, cluster=about)
    except TokenError as error:
        raise ConfigError(str(error), path=str(path)) from None
    except ValueError:
        raise ConfigError("the user's token is not one", path=str(path)) from None


def _tls(cluster: _Cluster, user: _User, path: Path) -> ssl.SSLContext:
    authority = _bytes(
        cluster.certificate_authority_data, cluster.certificate_authority, path, "authority"
    )
    context = _context(authority, path)
    if cluster.insecure_skip_tls_verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    certificate = _bytes(
        user.client_certificate_data, user.client_certificate, path, "client-certificate"
    )
    key = _bytes(user.client_key_data, user.client_key, path, "client-key")
    if (certificate is None) != (key is None):
        raise ConfigError(
            "client-certificate and client-key go together: give both", path=str(path)
        )
    if certificate is not None and key is not None:
        _load_pair(context, certificate, key, path)
    return context


def _bytes(data: str, file: str, path: Path, what: str) -> bytes | None:
    """Base64 text or a file, the text first; `None` when there is neither."""
    if data:
        try:
            return base64.b64decode(data, validate=True)
        except (binascii.Error, ValueError):
            raise ConfigError(f"{what}-data is not base64", path=str(path)) from None
    return _read(path.parent / file, f"{path} names it as {what}") if file else None


# -- pieces --------------------------------------------------------------------------------


def _server(url: str, path: Path) -> str:
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        usable = None
    if not usable or "?" in url or "#" in url or "@" in url:
        raise ConfigError(
            f"{url[:200]!r} is no API server: write https://HOST:PORT", path=str(path)
        )
    return url.rstrip("/")


def _context(authority: bytes | None, path: Path) -> ssl.SSLContext:
    """A client's context that trusts `authority`; `None`: what this machine trusts."""
    try:
        context = ssl.create_default_context(
            # An empty text would be taken for none.
            cadata=None if authority is None else authority.decode("ascii") or "-"
        )
    except (ssl.SSLError, ValueError):
        raise ConfigError("the authority is no PEM certificate", path=str(path)) from None
    context.set_alpn_protocols(["http/1.1"])
    # Newer Pythons demand key identifiers, which authorities of many a cluster lack.
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    return context


def _load_pair(context: ssl.SSLContext, certificate: bytes, key: bytes, path: Path) -> None:
    # The ssl module loads files only; an anonymous one in memory keeps the key off the disk. The
    # empty passphrase keeps it from asking on a terminal.
    with os.fdopen(os.memfd_create("tls"), "wb") as file:
        file.write(key.rstrip() + b"\n" + certificate)
        file.flush()
        try:
            context.load_cert_chain(f"/proc/self/fd/{file.fileno()}", password="")
        except (ssl.SSLError, ValueError) as error:
            reason = getattr(error, "reason", None) or "no pair"
            raise ConfigError(
                f"the client's certificate and key cannot be used ({reason}); they must be PEM,"
                " belong together, and the key must not be encrypted",
                path=str(path),
            ) from None


def _read(path: Path, remedy: str) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(
            f"the file cannot be read ({error.strerror}): {remedy}", path=str(path)
        ) from None
    if len(data) > FILE_BYTES_MAX:
        raise ConfigError(
            f"the file is larger than {FILE_BYTES_MAX} bytes: {remedy}", path=str(path)
        )
    return data
