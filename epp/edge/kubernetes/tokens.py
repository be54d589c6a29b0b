"""Bearer tokens that change: from a file that is replaced, or from a program that is asked.

A token is read again when it is a minute old, and at once when the API server refuses it. What
cannot be read leaves the token as it was: the API server decides what is still good.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol

import msgspec

from epp.core.errors import EppError
from epp.core.model import Clock

TOKEN_AGE_S_MAX = 60.0
TOKEN_BYTES_MAX = 1 << 20
EXEC_TIMEOUT_S = 30.0
EXEC_PAUSE_S = 10.0
"""Between two runs of a program that fails or gives a token that is refused."""
EXEC_END_S = 1.0
"""For what a program that was killed had written."""
EXEC_EARLY_S = 60.0
"""A token is asked for again this long before it expires."""

log = logging.getLogger(__name__)


class TokenSource(Protocol):
    """Where the token of a request comes from."""

    async def current(self) -> str:
        """The token to send.

        Raises: TokenError when there has never been one.
        """
        ...

    async def renewed(self, refused: str) -> str:
        """The token to send in place of one the API server refused; the same when there is no
        newer one.

        Raises: TokenError.
        """
        ...


class TokenError(EppError):
    """There is no token to send. Says why, never what was read."""


class FixedToken:
    """A token that stands in the kubeconfig."""

    def __init__(self, token: str) -> None:
        self._token = token

    async def current(self) -> str:
        return self._token

    async def renewed(self, refused: str) -> str:  # noqa: ARG002 - there is no other
        return self._token


class FileToken:
    """A token in a file that is replaced from time to time, such as a pod's.

    Args:
        path: the file; read at once.
    Raises: TokenError when it cannot be read now.
    """

    def __init__(self, path: Path, *, clock: Clock = time.monotonic) -> None:
        self._path = path
        self._clock = clock
        self._token = read_token(path)
        self._read_at_s = clock()
        self._failing = False

    async def current(self) -> str:
        if self._clock() - self._read_at_s >= TOKEN_AGE_S_MAX:
            await self._read()
        return self._token

    async def renewed(self, refused: str) -> str:
        if self._token == refused:
            await self._read()
        return self._token

    async def _read(self) -> None:
        self._read_at_s = self._clock()
        try:
            self._token = await asyncio.to_thread(read_token, self._path)
        except TokenError as exception:
            if not self._failing:
                log.warning("Keeping the token there was: %s", exception)
            self._failing = True
        else:
            self._failing = False


def read_token(path: Path) -> str:
    """A token file's content.

    Raises: TokenError naming the file and the remedy.
    """
    try:
        with path.open("rb") as file:
            data = file.read(TOKEN_BYTES_MAX + 1)
    except OSError as exception:
        raise TokenError(
            f"the token {path} cannot be read ({exception.strerror}); mount a service account's"
            " token there and let the user we run as read it"
        ) from None
    try:
        return checked_token(data.decode("ascii"))
    except (UnicodeDecodeError, ValueError):
        raise TokenError(f"{path} does not hold a token") from None


def checked_token(text: str) -> str:
    """A token without the blanks around it.

    Raises: ValueError when it cannot be one.
    """
    token = text.strip()
    if not token or len(token) > TOKEN_BYTES_MAX or not token.isascii() or not token.isprintable():
        raise ValueError("not a token")
    return token


# -- a program -----------------------------------------------------------------------------


class ExecVariable(msgspec.Struct, frozen=True):
    """A variable of the program's environment."""

    name: str
    value: str = ""


class ExecConfig(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """`users[].user.exec` of a kubeconfig."""

    command: str
    api_version: str
    args: tuple[str, ...] | None = None
    env: tuple[ExecVariable, ...] | None = None
    interactive_mode: str = "IfAvailable"
    install_hint: str = ""
    provide_cluster_info: bool = False


class _Credential(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    token: str = ""
    expiration_timestamp: datetime | None = None


class _ExecCredential(msgspec.Struct, frozen=True):
    status: _Credential


class ExecToken:
    """A token that a program on this machine makes, as `kubectl` would run it. For development.

    Args:
        config: the program.
        environ: what it inherits.
        cluster: the cluster it asks a token for, for a program that wants to know.
    """

    def __init__(
        self,
        config: ExecConfig,
        *,
        environ: Mapping[str, str],
        cluster: Mapping[str, object] | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        self._config = config
        self._environ = _environ(config, environ, cluster)
        self._clock = clock
        self._lock = asyncio.Lock()
        self._token = ""
        self._expires_at: datetime | None = None
        self._again_at_s = clock()
        """Not to be run before."""

    async def current(self) -> str:
        async with self._lock:
            if not self._token or self._expired():
                await self._renew()
            return self._token

    async def renewed(self, refused: str) -> str:
        async with self._lock:
            if self._token == refused:
                await self._renew()
            return self._token

    def _expired(self) -> bool:
        if self._expires_at is None:
            return False
        return (self._expires_at - datetime.now(UTC)).total_seconds() < EXEC_EARLY_S

    async def _renew(self) -> None:
        try:
            if self._clock() < self._again_at_s:
                raise TokenError(f"{self._config.command} has just been run")
            self._again_at_s = self._clock() + EXEC_PAUSE_S
            credential = self._read(await self._output())
        except TokenError as exception:
            if not self._token:
                raise
            log.debug("Keeping the token there was: %s", exception)
            return
        self._token = checked_token(credential.token)
        self._expires_at = credential.expiration_timestamp

    def _read(self, output: bytes) -> _Credential:
        command = self._config.command
        try:
            credential = msgspec.json.decode(output, type=_ExecCredential).status
            checked_token(credential.token)
        except ValueError:  # msgspec's errors are of that kind
            raise TokenError(
                f"{command} printed no ExecCredential with a token; client certificates from a"
                " program are not supported"
            ) from None
        expires_at = credential.expiration_timestamp
        if expires_at is not None and expires_at.tzinfo is None:
            raise TokenError(f"{command}: the expirationTimestamp lacks its time zone")
        return credential

    async def _output(self) -> bytes:
        config = self._config
        try:
            process = await asyncio.create_subprocess_exec(
                config.command,
                *(config.args or ()),
                env=self._environ,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
            )
        except OSError as exception:
            hint = f": {config.install_hint.strip()}" if config.install_hint else ""
            raise TokenError(
                f"{config.command}, named in the kubeconfig, cannot be run"
                f" ({exception.strerror}){hint}"
            ) from None
        assert process.stdout is not None
        try:
            async with asyncio.timeout(EXEC_TIMEOUT_S):
                output = await _whole(process.stdout)
                code = await process.wait() if len(output) <= TOKEN_BYTES_MAX else 0
        except TimeoutError:
            raise TokenError(f"{config.command} gave no token in {EXEC_TIMEOUT_S:g} s") from None
        finally:
            await _ended(process)
        if code:
            raise TokenError(f"{config.command} ended with status {code}; run it by hand to see")
        return output


async def _ended(process: asyncio.subprocess.Process) -> None:
    """Kill it if it still runs. What it has yet to say keeps its pipe open, so that is read."""
    if process.returncode is not None:
        return
    process.kill()
    assert process.stdout is not None
    with suppress(TimeoutError):
        async with asyncio.timeout(EXEC_END_S):
            while await process.stdout.read(TOKEN_BYTES_MAX):
                pass
    await process.wait()


async def _whole(stream: asyncio.StreamReader) -> bytes:
    """All of it, but no more than a token can be."""
    output = b""
    while len(output) <= TOKEN_BYTES_MAX and (piece := await stream.read(TOKEN_BYTES_MAX)):
        output += piece
    return output


def _environ(
    config: ExecConfig, environ: Mapping[str, str], cluster: Mapping[str, object] | None
) -> dict[str, str]:
    spec: dict[str, object] = {"interactive": False}
    if config.provide_cluster_info and cluster is not None:
        spec["cluster"] = cluster
    info = {"apiVersion": config.api_version, "kind": "ExecCredential", "spec": spec}
    return {
        **environ,
        **{each.name: each.value for each in config.env or ()},
        "KUBERNETES_EXEC_INFO": msgspec.json.encode(info).decode(),
    }


def program(config: ExecConfig, folder: Path) -> ExecConfig:
    """The program with its command as an absolute path, unless it is to be looked up in PATH.

    Args:
        folder: the kubeconfig's; what a relative path is relative to.
    Raises: TokenError when it can only be run by a person.
    """
    if config.interactive_mode == "Always":
        raise TokenError(
            f"{config.command} asks questions (interactiveMode: Always); put a token into the"
            " kubeconfig instead"
        )
    if os.sep not in config.command:
        return config
    return msgspec.structs.replace(config, command=str(folder / config.command))
