"""Who may read the admin port: asks the API server about a bearer token, as the reference EPP does.

Two questions: whose token it is (TokenReview), and whether that user may `get` the path
(SubjectAccessReview, a non-resource URL). A yes counts for a minute, a no for five seconds, so a
Prometheus that scrapes every second costs two requests a minute. Requests with the same token and
path that come meanwhile wait for the same answer. Tokens are not kept: answers are found by a keyed
hash of them, whose key is made at start. Everything is bounded, and what does not fit is refused
rather than let in.

An API server that does not answer, or does not let us ask, is no judgement of the caller: 503, and
one line in the log per period.

Cost: 8 us for a token that is known.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import OrderedDict
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, NamedTuple, Protocol

import msgspec

from epp.core.model import Clock
from epp.edge.kubernetes.client import ApiError

AUTHENTICATION = "authentication.k8s.io/v1"
AUTHORIZATION = "authorization.k8s.io/v1"
TOKEN_REVIEWS = f"/apis/{AUTHENTICATION}/tokenreviews"
ACCESS_REVIEWS = f"/apis/{AUTHORIZATION}/subjectaccessreviews"

ALLOWED_S = 60.0
DENIED_S = 5.0
TOKEN_BYTES_MAX = 16 * 2**10
LOG_PERIOD_S = 60.0
SCHEME = "bearer "

_log = logging.getLogger(__name__)


class Verdict(NamedTuple):
    """What to answer."""

    status: int
    """200: let it in. 401: no valid token. 403: it may not. 503: it could not be found out."""
    detail: str
    """For the caller; says nothing a stranger may not know."""


ALLOWED = Verdict(200, "ok")
NO_TOKEN = Verdict(401, "send a Kubernetes token: Authorization: Bearer TOKEN")
BAD_TOKEN = Verdict(401, "the token is not valid")
UNKNOWN = Verdict(503, "the token cannot be checked: the API server does not answer; try again")
NO_RIGHTS = Verdict(
    503, "the token cannot be checked: the picker may not ask the API server about it, see its log"
)
BUSY = Verdict(503, "too many tokens are being checked; try again")


class ReviewApi(Protocol):
    """What a reviewer needs of `ApiClient`."""

    async def create(self, path: str, body: bytes) -> bytes:
        """Post an object; what was made of it."""


class User(msgspec.Struct, frozen=True, omit_defaults=True):
    """Whose token it is; handed on as it came."""

    username: str = ""
    uid: str = ""
    groups: list[str] | None = None
    extra: dict[str, list[str]] | None = None


class TokenStatus(msgspec.Struct, frozen=True):
    """The answer to a TokenReview."""

    authenticated: bool = False
    user: User = User()


class AccessStatus(msgspec.Struct, frozen=True):
    """The answer to a SubjectAccessReview."""

    allowed: bool = False
    denied: bool = False


class _TokenReview(msgspec.Struct, frozen=True):
    status: TokenStatus


class _AccessReview(msgspec.Struct, frozen=True):
    status: AccessStatus


_TOKEN_REVIEW = msgspec.json.Decoder(_TokenReview)
_ACCESS_REVIEW = msgspec.json.Decoder(_AccessReview)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReviewLimits:
    """How much is remembered and asked.

    Args:
        entries_max: judgements kept; the one longest unused makes room.
        asking_max: tokens being checked at once.
        timeout_s: for both questions about one token.
    """

    entries_max: int = 1_024
    asking_max: int = 16
    timeout_s: float = 10.0


class Reviewer:
    """Judges requests by their `Authorization` header."""

    def __init__(
        self,
        client: ReviewApi,
        *,
        limits: ReviewLimits | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        self._client = client
        self._limits = limits or ReviewLimits()
        self._clock = clock
        self._key = os.urandom(32)
        self._known: OrderedDict[bytes, tuple[Verdict, float]] = OrderedDict()
        """Judgement and when it ends, the one longest unused first."""
        self._asking: dict[bytes, asyncio.Task[Verdict]] = {}
        self._logged_s = float("-inf")

    async def check(self, authorization: str | None, path: str) -> Verdict:
        """May it `get` this path?

        Args:
            authorization: the header as it came; `None`: there was none.
            path: without query.
        """
        token = _token_of(authorization)
        if not token:
            return NO_TOKEN
        if len(token) > TOKEN_BYTES_MAX:
            return BAD_TOKEN
        name = blake2b(b"%b\0%b" % (path.encode(), token), key=self._key, digest_size=32).digest()
        known = self._known.get(name)
        if known is not None and self._clock() < known[1]:
            self._known.move_to_end(name)
            return known[0]
        asking = self._asking.get(name)
        if asking is None:
            if len(self._asking) >= self._limits.asking_max:
                return BUSY
            asking = asyncio.create_task(self._ask(name, token.decode(), path))
            self._asking[name] = asking
        # Who hangs up does not take the answer from those who wait for the same one.
        return await asyncio.shield(asking)

    async def _ask(self, name: bytes, token: str, path: str) -> Verdict:
        try:
            async with asyncio.timeout(self._limits.timeout_s):
                verdict = await self._review(token, path)
        except TimeoutError:
            return self._unknown("no answer in time")
        except ApiError as error:
            unknown = self._unknown(_explained(error))
            return NO_RIGHTS if error.status in {401, 403} else unknown
        except (msgspec.DecodeError, RecursionError) as error:
            return self._unknown(f"the answer cannot be read: {error}")
        else:
            self._remember(name, verdict)
            return verdict
        finally:
            del self._asking[name]

    async def _review(self, token: str, path: str) -> Verdict:
        answer = await self._post(TOKEN_REVIEWS, AUTHENTICATION, "TokenReview", {"token": token})
        who = _TOKEN_REVIEW.decode(answer).status
        if not who.authenticated or not who.user.username:
            return BAD_TOKEN
        user = msgspec.to_builtins(who.user)
        user["user"] = user.pop("username")
        wanted = {"nonResourceAttributes": {"path": path, "verb": "get"}}
        answer = await self._post(
            ACCESS_REVIEWS, AUTHORIZATION, "SubjectAccessReview", {**user, **wanted}
        )
        access = _ACCESS_REVIEW.decode(answer).status
        if access.allowed and not access.denied:
            return ALLOWED
        return Verdict(403, f"{who.user.username} may not get {path}; a ClusterRole must allow it")

    async def _post(self, path: str, version: str, kind: str, spec: dict[str, Any]) -> bytes:
        body = {"apiVersion": version, "kind": kind, "metadata": {}, "spec": spec}
        return await self._client.create(path, msgspec.json.encode(body))

    def _remember(self, name: bytes, verdict: Verdict) -> None:
        keep_s = ALLOWED_S if verdict is ALLOWED else DENIED_S
        self._known[name] = verdict, self._clock() + keep_s
        self._known.move_to_end(name)
        if len(self._known) > self._limits.entries_max:
            self._known.popitem(last=False)

    def _unknown(self, failure: str) -> Verdict:
        now_s = self._clock()
        if now_s - self._logged_s >= LOG_PERIOD_S:
            self._logged_s = now_s
            _log.error(
                "requests to the metrics port are refused, as no token is checked: %s", failure
            )
        return UNKNOWN


def _token_of(authorization: str | None) -> bytes:
    """The bearer token; empty: there is none."""
    if authorization is None or authorization[: len(SCHEME)].lower() != SCHEME:
        return b""
    token = authorization[len(SCHEME) :].strip()
    return token.encode() if token.isascii() and token.isprintable() else b""


def _explained(error: ApiError) -> str:
    if error.status == 403:
        return (
            f"{error}; a ClusterRole must allow us to create tokenreviews.authentication.k8s.io and"
            " subjectaccessreviews.authorization.k8s.io, or give --metrics-endpoint-auth=false"
        )
    return str(error)
