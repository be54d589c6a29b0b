"""What the fake does for each verb, once it knows who asks and that it may."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from tests.kubernetes.answers import RefusedError, bad_request, conflict
from tests.kubernetes.authority import Access, User
from tests.kubernetes.calls import Call
from tests.kubernetes.listing import list_body
from tests.kubernetes.patching import patch
from tests.kubernetes.placing import as_object
from tests.kubernetes.resources import POD, Kind, Object
from tests.kubernetes.store import Store, Stored, encode
from tests.kubernetes.watching import scope

PROTOBUF = "application/vnd.kubernetes.protobuf"
WRITES = ("create", "update", "patch", "delete", "deletecollection")


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer that is not a watch."""

    code: int
    body: bytes
    content_type: str = "application/json"
    headers: tuple[tuple[str, str], ...] = ()


def refusal(refused: RefusedError) -> Reply:
    wait = (refused.status.get("details") or {}).get("retryAfterSeconds")
    headers = (("Retry-After", str(wait)),) if wait else ()
    return Reply(refused.code, encode(refused.status), headers=headers)


def absent(known_group: bool) -> Reply:
    """404 for a resource that is not served: a Status in a group that is, else plain text."""
    if known_group:
        message = "the server could not find the requested resource"
        return refusal(RefusedError(404, "NotFound", message))
    return Reply(404, b"404 page not found\n", "text/plain; charset=utf-8")


def not_allowed() -> Reply:
    message = "the server does not allow this method on the requested resource"
    return refusal(RefusedError(405, "MethodNotAllowed", message))


def body_of(data: bytes) -> Object:
    """Raises: RefusedError 400."""
    try:
        found = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise bad_request(f"couldn't get version/kind; json parse error: {error}") from None
    return as_object(found)


class Verbs:
    """Answers calls that are about objects.

    Args:
        grace_s: how long a pod that is deleted by a client takes to end, in the kubelet's stead;
            seconds.
    """

    def __init__(self, store: Store, access: Access, grace_s: float) -> None:
        self.store = store
        self.access = access
        self.grace_s = grace_s
        self.rehearsing = False
        """Nothing that is done lasts."""
        self._table: dict[str, Callable[[Kind, Call, bytes, User], Reply]] = {
            "get": self._get,
            "list": self._list,
            "create": self._create,
            "update": self._update,
            "patch": self._patch,
            "delete": self._delete,
            "deletecollection": self._delete_all,
        }

    def answer(self, kind: Kind, call: Call, data: bytes, user: User) -> Reply:
        """Raises: RefusedError."""
        verb = self._table.get(call.verb)
        if verb is None or call.verb not in kind.verbs:
            return not_allowed()
        if call.part and not (call.part == "status" and kind.has_status):
            return absent(known_group=True)
        if PROTOBUF in call.headers.get("content-type", ""):
            message = "the body is in an unknown format - accepted media types: application/json"
            raise RefusedError(415, "UnsupportedMediaType", message)
        if call.verb not in WRITES:
            return verb(kind, call, data, user)
        strict = call.query.get("fieldValidation") == "Strict"
        dry = "dryRun" in call.query
        if (strict or dry) and not self.rehearsing:
            reply, dropped = self._rehearse(kind, call, data, user)
            if strict and dropped:
                names = ", ".join(f'unknown field "{name}"' for name in dropped)
                raise bad_request(
                    f"{kind.kind} in version {kind.version}: strict decoding: {names}"
                )
            if dry:
                return reply
        self.store.dropped = []
        reply = verb(kind, call, data, user)
        if not self.store.dropped or call.query.get("fieldValidation") == "Ignore":
            return reply
        warnings = ", ".join(f'299 - "unknown field \\"{name}\\""' for name in self.store.dropped)
        return Reply(reply.code, reply.body, headers=(("Warning", warnings),))

    def _rehearse(self, kind: Kind, call: Call, data: bytes, user: User) -> tuple[Reply, list[str]]:
        other = Verbs(self.store.fork(), self.access, self.grace_s)
        other.rehearsing = True
        return other.answer(kind, call, data, user), other.store.dropped

    def _get(self, kind: Kind, call: Call, data: bytes, user: User) -> Reply:
        return Reply(200, self.store.find(kind, call.namespace or "", call.name).raw)

    def _list(self, kind: Kind, call: Call, data: bytes, user: User) -> Reply:
        about = scope(kind, call.namespace, None, dict(call.query))
        return Reply(200, list_body(self.store, about, dict(call.query)))

    def _create(self, kind: Kind, call: Call, data: bytes, user: User) -> Reply:
        obj = body_of(data)
        if kind.verbs == ("create",):
            answer = self.access.review(kind.kind, obj, user)
            return Reply(201, encode(answer))
        if kind.namespaced and call.namespace is None:
            return not_allowed()
        return Reply(201, self.store.create(kind, obj, call.namespace).raw)

    def _update(self, kind: Kind, call: Call, data: bytes, user: User) -> Reply:
        stored = self.store.replace(kind, body_of(data), call.namespace or "", call.name, call.part)
        return Reply(200, stored.raw)

    def _patch(self, kind: Kind, call: Call, data: bytes, user: User) -> Reply:
        stored, made = patch(self.store, kind, call, data)
        return Reply(201 if made else 200, stored.raw)

    def _delete(self, kind: Kind, call: Call, data: bytes, user: User) -> Reply:
        options = body_of(data) if data else {}
        namespace, name = call.namespace or "", call.name
        _check_preconditions(kind, self.store.find(kind, namespace, name), options)
        last, gone = self._remove(kind, namespace, name, options)
        if not gone or kind == POD:
            return Reply(200, last.raw)
        uid = last.obj["metadata"]["uid"]
        details = {"name": name, "group": kind.group, "kind": kind.plural, "uid": uid}
        done = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success"}
        return Reply(200, encode(done | {"details": details}))

    def _delete_all(self, kind: Kind, call: Call, data: bytes, user: User) -> Reply:
        about = scope(kind, call.namespace, None, dict(call.query))
        body = list_body(self.store, about, dict(call.query))
        for each in self.store.stored(kind, call.namespace):
            if about.sees(each):
                meta = each.obj["metadata"]
                self._remove(kind, meta.get("namespace", ""), meta["name"], {})
        return Reply(200, body)

    def _remove(
        self, kind: Kind, namespace: str, name: str, options: dict[str, Any]
    ) -> tuple[Stored, bool]:
        graceful = kind == POD and options.get("gracePeriodSeconds") != 0
        last, gone = self.store.remove(kind, namespace, name, marked=graceful)
        if graceful and not gone and not self.rehearsing:
            uid = last.obj["metadata"]["uid"]
            asyncio.get_running_loop().call_later(self.grace_s, self._end_pod, namespace, name, uid)
        return last, gone

    def _end_pod(self, namespace: str, name: str, uid: str) -> None:
        found = self.store.get("pods", namespace, name)
        if found is not None and found["metadata"]["uid"] == uid:
            self.store.remove(POD, namespace, name, marked=False)


def _check_preconditions(kind: Kind, stored: Stored, options: Object) -> None:
    meta = stored.obj["metadata"]
    wanted = options.get("preconditions") or {}
    for name in ("uid", "resourceVersion"):
        if wanted.get(name) not in (None, meta[name]):
            why = f"Precondition failed: {name} in precondition: {wanted[name]}, in object meta: "
            raise conflict(kind, meta["name"], why + meta[name])
