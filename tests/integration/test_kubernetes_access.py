"""How the API server is found, and who we are to it: files of a pod, kubeconfig files, tokens."""

from __future__ import annotations

import base64
import ssl
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from epp.core.errors import ConfigError
from epp.edge.kubernetes.access import Access, find_access, from_kubeconfig, in_cluster
from epp.edge.kubernetes.tokens import FileToken, TokenError
from epp.edge.tls import self_signed

PAIR = self_signed(["localhost"])
AUTHORITY = PAIR.certificate_chain.decode()


def encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


@pytest.fixture
def account(tmp_path: Path) -> Path:
    """What a pod finds of its service account."""
    (tmp_path / "token").write_text("t1\n")
    (tmp_path / "ca.crt").write_text(AUTHORITY)
    (tmp_path / "namespace").write_text("serving")
    return tmp_path


def environ(host: str = "10.0.0.1", port: str = "443") -> dict[str, str]:
    return {"KUBERNETES_SERVICE_HOST": host, "KUBERNETES_SERVICE_PORT": port}


# -- in a cluster --------------------------------------------------------------------------


async def test_a_pod_is_its_service_account(account: Path) -> None:
    access = in_cluster(environ(), account)
    assert (access.server, access.namespace) == ("https://10.0.0.1:443", "serving")
    assert access.tls is not None
    assert access.tls.verify_mode is ssl.CERT_REQUIRED
    assert access.tls.get_ca_certs()
    assert access.token is not None
    assert await access.token.current() == "t1"


@pytest.mark.parametrize("host", ["fd00::1", "[fd00::1]"])
def test_an_ipv6_host_is_bracketed_once(account: Path, host: str) -> None:
    assert in_cluster(environ(host, "6443"), account).server == "https://[fd00::1]:6443"


def test_without_a_port_it_is_that_of_https(account: Path) -> None:
    access = in_cluster({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, account)
    assert access.server == "https://10.0.0.1:443"


def test_a_pod_without_a_token_says_what_may_be_off(account: Path) -> None:
    (account / "token").unlink()
    with pytest.raises(ConfigError, match="automountServiceAccountToken"):
        in_cluster(environ(), account)


def test_an_empty_token_is_none(account: Path) -> None:
    (account / "token").write_text(" \n")
    with pytest.raises(ConfigError, match="does not hold a token"):
        in_cluster(environ(), account)


@pytest.mark.parametrize("content", ["", "nonsense", "-----BEGIN CERTIFICATE-----\nAAAA\n"])
def test_an_authority_that_is_none_is_named(account: Path, content: str) -> None:
    (account / "ca.crt").write_text(content)
    with pytest.raises(ConfigError, match=r"authority.*ca\.crt"):
        in_cluster(environ(), account)


def test_without_a_namespace_file_it_is_the_default(account: Path) -> None:
    (account / "namespace").unlink()
    assert in_cluster(environ(), account).namespace == "default"


@pytest.mark.parametrize("port", ["x", "99999999", "0"])
def test_a_port_that_is_none_is_refused(account: Path, port: str) -> None:
    with pytest.raises(ConfigError, match="no API server"):
        in_cluster(environ(port=port), account)


# -- the token's file ----------------------------------------------------------------------


async def test_a_token_is_read_again_after_a_minute(tmp_path: Path) -> None:
    file, now_s = tmp_path / "token", 100.0
    file.write_text("t1")
    token = FileToken(file, clock=lambda: now_s)
    file.write_text("t2")
    now_s = 159.0
    assert await token.current() == "t1"
    now_s = 160.0
    assert await token.current() == "t2"


async def test_a_refused_token_is_read_again_at_once(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("t1")
    token = FileToken(file, clock=lambda: 0.0)
    file.write_text("t2")
    assert await token.renewed("t1") == "t2"
    file.write_text("t3")
    assert await token.renewed("t1") == "t2", "t2 has not been refused yet"


async def test_a_token_file_that_vanishes_leaves_the_token_there_was(tmp_path: Path) -> None:
    file, now_s = tmp_path / "token", 0.0
    file.write_text("t1")
    token = FileToken(file, clock=lambda: now_s)
    file.unlink()
    now_s = 60.0
    assert await token.current() == "t1"


# -- kubeconfig ----------------------------------------------------------------------------


def write(
    folder: Path, *, cluster: Mapping[str, Any] = {}, user: Mapping[str, Any] | None = None
) -> Path:
    file = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "here",
        "clusters": [{"name": "c", "cluster": {"server": "https://localhost:6443", **cluster}}],
        "contexts": [
            {"name": "here", "context": {"cluster": "c", "user": "u", "namespace": "serving"}},
            {"name": "there", "context": {"cluster": "c", "user": "u"}},
            {"name": "lost", "context": {"cluster": "gone", "user": "u"}},
        ],
        "users": [{"name": "u", "user": user}],
    }
    path = folder / "config"
    path.write_bytes(msgspec.yaml.encode(file))
    return path


async def token_of(access: Access) -> str:
    assert access.token is not None
    return await access.token.current()


async def test_a_kubeconfig_with_a_token(tmp_path: Path) -> None:
    authority = {"certificate-authority-data": encoded(PAIR.certificate_chain)}
    access = from_kubeconfig(write(tmp_path, cluster=authority, user={"token": "abc"}))
    assert (access.server, access.namespace) == ("https://localhost:6443", "serving")
    assert await token_of(access) == "abc"
    assert access.tls is not None
    assert len(access.tls.get_ca_certs()) == 1


def test_another_context_can_be_chosen(tmp_path: Path) -> None:
    assert from_kubeconfig(write(tmp_path), "there").namespace == "default"


@pytest.mark.parametrize(("context", "said"), [("nowhere", "here, there"), ("lost", "'gone'")])
def test_what_a_context_names_must_be_there(tmp_path: Path, context: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        from_kubeconfig(write(tmp_path), context)


async def test_files_are_relative_to_the_kubeconfig(tmp_path: Path) -> None:
    (tmp_path / "ca").write_bytes(PAIR.certificate_chain)
    (tmp_path / "crt").write_bytes(PAIR.certificate_chain)
    (tmp_path / "key").write_bytes(PAIR.private_key)
    (tmp_path / "tok").write_text("from a file")
    user = {"client-certificate": "crt", "client-key": "key", "tokenFile": "tok", "token": "x"}
    access = from_kubeconfig(
        write(tmp_path, cluster={"certificate-authority": "ca"}, user=user), environ={}
    )
    assert await token_of(access) == "from a file"
    assert access.tls is not None


def test_a_client_certificate_may_stand_in_the_file(tmp_path: Path) -> None:
    user = {
        "client-certificate-data": encoded(PAIR.certificate_chain),
        "client-key-data": encoded(PAIR.private_key),
    }
    assert from_kubeconfig(write(tmp_path, user=user)).tls is not None


def test_a_certificate_is_verified_unless_the_file_says_not_to(tmp_path: Path) -> None:
    secure = from_kubeconfig(write(tmp_path)).tls
    insecure = from_kubeconfig(write(tmp_path, cluster={"insecure-skip-tls-verify": True})).tls
    assert secure is not None
    assert insecure is not None
    assert (secure.verify_mode, insecure.verify_mode) == (ssl.CERT_REQUIRED, ssl.CERT_NONE)


def test_the_name_of_the_certificate_may_be_another(tmp_path: Path) -> None:
    access = from_kubeconfig(write(tmp_path, cluster={"tls-server-name": "api.example"}))
    assert access.tls_server_name == "api.example"


def test_plain_http_has_no_tls_and_a_path_is_kept(tmp_path: Path) -> None:
    access = from_kubeconfig(write(tmp_path, cluster={"server": "http://127.0.0.1:8001/k8s/c1/"}))
    assert (access.server, access.tls) == ("http://127.0.0.1:8001/k8s/c1", None)


@pytest.mark.parametrize(
    ("cluster", "user", "said"),
    [
        ({"proxy-url": "http://proxy"}, {}, "proxy-url is not supported"),
        ({"server": "localhost:6443"}, {}, "no API server"),
        ({"server": "https://u:p@localhost"}, {}, "no API server"),
        ({"certificate-authority-data": "%%"}, {}, "authority-data is not base64"),
        ({"certificate-authority-data": "AAAA"}, {}, "authority is no PEM"),
        ({"certificate-authority": "gone"}, {}, "gone"),
        ({}, {"username": "u", "password": "p"}, "username is not supported"),
        ({}, {"auth-provider": {"name": "gcp"}}, "auth-provider is not supported"),
        ({}, {"as": "system:admin"}, "as is not supported"),
        ({}, {"tokenFile": "gone"}, "gone"),
        ({}, {"token": "two\nlines"}, "token is not one"),
        ({}, {"client-certificate-data": "AAAA"}, "go together"),
        ({}, {"client-certificate-data": "AAAA", "client-key-data": "AAAA"}, "cannot be used"),
        ({}, {"exec": {"command": "x", "apiVersion": "v1", "interactiveMode": "Always"}}, "asks"),
        ({"server": 7}, {}, r"clusters\[0\]"),
    ],
)
def test_what_cannot_be_used_is_refused_by_name(
    tmp_path: Path, cluster: Mapping[str, Any], user: Mapping[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said) as refused:
        from_kubeconfig(write(tmp_path, cluster=cluster, user=user))
    assert str(tmp_path) in str(refused.value)


@pytest.mark.parametrize("content", [b"", b"- a", b"{", b"\xff\xfe", b"clusters: 7\n"])
def test_a_file_that_is_no_kubeconfig_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "config"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="config"):
        from_kubeconfig(path)


def test_a_client_key_with_a_passphrase_is_refused_without_asking(tmp_path: Path) -> None:
    from cryptography.hazmat.primitives import serialization

    key = serialization.load_pem_private_key(PAIR.private_key, password=None)
    locked = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(b"secret"),
    )
    user = {
        "client-certificate-data": encoded(PAIR.certificate_chain),
        "client-key-data": encoded(locked),
    }
    with pytest.raises(ConfigError, match="must not be encrypted"):
        from_kubeconfig(write(tmp_path, user=user))


# -- a program that makes tokens -----------------------------------------------------------


def script(folder: Path, text: str) -> dict[str, Any]:
    path = folder / "make-token"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return {
        "exec": {
            "apiVersion": "client.authentication.k8s.io/v1",
            "command": "./make-token",
            "args": ["one"],
            "env": [{"name": "WHO", "value": "me"}],
            "installHint": "get it",
        }
    }


CREDENTIAL = '{"kind": "ExecCredential", "status": {"token": "%s"%s}}'


async def test_a_program_makes_the_token_once(tmp_path: Path) -> None:
    said = CREDENTIAL % ("$WHO-$1", "")
    user = script(tmp_path, f"echo run >> {tmp_path}/runs\ncat <<END\n{said}\nEND")
    access = from_kubeconfig(write(tmp_path, user=user))
    assert [await token_of(access) for _ in range(3)] == ["me-one"] * 3
    assert (tmp_path / "runs").read_text() == "run\n"


async def test_a_program_may_take_its_time_to_say_it_all(tmp_path: Path) -> None:
    first, last = (CREDENTIAL % ("t", "")).split(" ", 1)
    text = f"printf '%s' '{first}'\nsleep 0.1\nprintf '%s' '{last}'"
    assert await token_of(from_kubeconfig(write(tmp_path, user=script(tmp_path, text)))) == "t"


async def test_a_program_that_says_too_much_is_an_error(tmp_path: Path) -> None:
    access = from_kubeconfig(write(tmp_path, user=script(tmp_path, "exec cat /dev/zero")))
    with pytest.raises(TokenError):
        await token_of(access)


async def test_a_program_is_told_of_the_cluster_if_it_wants(tmp_path: Path) -> None:
    text = 'echo "$KUBERNETES_EXEC_INFO" > ' + f"{tmp_path}/info\n" + "exit 1"
    user = script(tmp_path, text)
    user["exec"]["provideClusterInfo"] = True
    with pytest.raises(TokenError, match="status 1"):
        await token_of(from_kubeconfig(write(tmp_path, user=user)))
    info = msgspec.json.decode((tmp_path / "info").read_bytes())
    assert info["kind"] == "ExecCredential"
    assert info["apiVersion"] == "client.authentication.k8s.io/v1"
    assert info["spec"]["cluster"]["server"] == "https://localhost:6443"
    assert info["spec"]["interactive"] is False


async def test_an_expired_token_is_asked_for_again_but_not_without_end(tmp_path: Path) -> None:
    said = CREDENTIAL % ("t", ', "expirationTimestamp": "2020-01-01T00:00:00Z"')
    user = script(tmp_path, f"echo run >> {tmp_path}/runs\ncat <<END\n{said}\nEND")
    access = from_kubeconfig(write(tmp_path, user=user))
    assert [await token_of(access) for _ in range(3)] == ["t"] * 3
    assert (tmp_path / "runs").read_text() == "run\n", "not again for some seconds"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("exit 3", "status 3"),
        ("echo nonsense", "no ExecCredential"),
        ("echo '" + CREDENTIAL % ("", "") + "'", "no ExecCredential"),
        (
            "echo '" + CREDENTIAL % ("t", ', "expirationTimestamp": "2020-01-01T00:00:00"') + "'",
            "time zone",
        ),
    ],
)
async def test_a_program_that_makes_none_is_an_error(tmp_path: Path, text: str, said: str) -> None:
    access = from_kubeconfig(write(tmp_path, user=script(tmp_path, text)))
    with pytest.raises(TokenError, match=said):
        await token_of(access)


async def test_a_program_that_is_not_there_is_an_error_with_its_hint(tmp_path: Path) -> None:
    user = script(tmp_path, "")
    (tmp_path / "make-token").unlink()
    access = from_kubeconfig(write(tmp_path, user=user))
    with pytest.raises(TokenError, match="get it"):
        await token_of(access)


# -- which of them -------------------------------------------------------------------------


def test_a_named_file_goes_before_everything(tmp_path: Path) -> None:
    access = find_access(str(write(tmp_path)), environ())
    assert access.server == "https://localhost:6443"


def test_the_environment_names_a_file_outside_of_a_cluster(tmp_path: Path) -> None:
    access = find_access(None, {"KUBECONFIG": f":{write(tmp_path)}"})
    assert access.server == "https://localhost:6443"


def test_in_a_cluster_the_environments_file_does_not_count(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="serviceaccount"):
        find_access(None, {**environ(), "KUBECONFIG": str(write(tmp_path))})


def test_several_files_are_not_merged_silently() -> None:
    with pytest.raises(ConfigError, match="--flatten"):
        find_access(None, {"KUBECONFIG": "a:b"})


def test_nowhere_says_all_that_could_be_done() -> None:
    with pytest.raises(ConfigError, match=r"--kubeconfig.*KUBECONFIG"):
        find_access(None, {})
