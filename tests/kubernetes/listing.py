"""Lists: as of now or of an older version, whole or in pages."""

from __future__ import annotations

import base64
import json
from typing import Any

from tests.kubernetes.answers import RefusedError, bad_request
from tests.kubernetes.resources import Kind
from tests.kubernetes.store import Store, encode
from tests.kubernetes.watching import Scope, version_of

TOO_NEW_RETRY_S = 1


def list_body(store: Store, about: Scope, query: dict[str, str]) -> bytes:
    """The answer to a list.

    `continue` tokens hold the version of the first page, so that all pages are of one moment; a
    token whose version is forgotten is refused with 410 and a token to go on inconsistently.
    Raises: RefusedError 400, 410, or 504 for a version that is yet to come.
    """
    limit = _limit(query.get("limit"))
    start, version = "", None
    if token := query.get("continue"):
        start, version = _read(token)
        if version is not None and version < store.compacted:
            message = "The provided continue parameter is too old for a consistent list"
            raise RefusedError(410, "Expired", message, token=_token(None, start))
    else:
        version, limit = _asked_version(store, query, limit)
    stored = store.stored(about.kind, about.namespace, version)
    found = [(f"{each.namespace}/{each.obj['metadata']['name']}", each) for each in stored]
    found = [(key, each) for key, each in found if key > start and about.sees(each)]
    shown = store.version if version is None else version
    meta: dict[str, Any] = {"resourceVersion": str(shown)}
    if limit and len(found) > limit:
        meta["continue"] = _token(shown, found[limit - 1][0])
        if not about.selective:
            meta["remainingItemCount"] = len(found) - limit
        del found[limit:]
    return _body(about.kind, meta, [each.bare for _, each in found])


def _asked_version(store: Store, query: dict[str, str], limit: int) -> tuple[int | None, int]:
    """The version a first page is of (None: now), and the limit that goes with it."""
    text, match = query.get("resourceVersion", ""), query.get("resourceVersionMatch")
    version = version_of(text or "0")
    if match is not None and not text:
        raise bad_request("resourceVersionMatch is forbidden unless resourceVersion is provided")
    if version > store.version:
        causes = [{"reason": "ResourceVersionTooLarge", "message": "Too large resource version"}]
        raise RefusedError(
            504,
            "Timeout",
            f"Too large resource version: {version}, current: {store.version}",
            details={"causes": causes, "retryAfterSeconds": TOO_NEW_RETRY_S},
        )
    if match == "Exact":
        return version, limit
    if text == "0":
        return None, 0  # served from the watch cache, which knows no pages
    return None, limit


def _limit(text: str | None) -> int:
    if not text:
        return 0
    if not text.isascii() or not text.isdigit():
        raise bad_request(f'limit: Invalid value: "{text}"')
    return int(text)


def _token(version: int | None, start: str) -> str:
    text = json.dumps({"v": "meta.k8s.io/v1", "rv": version or -1, "start": start})
    return base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")


def _read(token: str) -> tuple[str, int | None]:
    try:
        found = json.loads(base64.urlsafe_b64decode(token + "=="))
        start, version = str(found["start"]), int(found["rv"])
    except (ValueError, KeyError, TypeError):
        raise bad_request("continue key is not valid") from None
    return start, None if version < 0 else version


def _body(kind: Kind, meta: dict[str, Any], items: list[bytes]) -> bytes:
    head = {"kind": f"{kind.kind}List", "apiVersion": kind.api_version, "metadata": meta}
    return encode(head)[:-1] + b',"items":[' + b",".join(items) + b"]}"
