"""PATCH, as far as clients need it: JSON merge patch, and what may pass for the other kinds.

A strategic merge patch is treated as a merge patch without its directives (lists are replaced, not
merged by key), and server-side apply as a merge patch that may create.
"""

from __future__ import annotations

import json
from typing import Any

import yaml

from tests.kubernetes.answers import RefusedError, bad_request, not_found
from tests.kubernetes.calls import Call
from tests.kubernetes.placing import as_object
from tests.kubernetes.resources import Kind, Object
from tests.kubernetes.store import Store, Stored, copied

APPLY = "application/apply-patch+yaml"
MERGE = ("application/merge-patch+json", "application/strategic-merge-patch+json")


def patch(store: Store, kind: Kind, call: Call, data: bytes) -> tuple[Stored, bool]:
    """Returns: the new state, and whether the object was made.

    Raises: RefusedError 415 for another kind of patch, 404, 409, 400 or 422.
    """
    form = call.headers.get("content-type", "").partition(";")[0].strip()
    if form not in (APPLY, *MERGE):
        known = ", ".join((APPLY, *MERGE))
        message = (
            f"the body of the request was in an unknown format - accepted media types: {known}"
        )
        raise RefusedError(415, "UnsupportedMediaType", message)
    change = _read(data, yaml_too=form == APPLY)
    namespace = call.namespace or ""
    try:
        old = store.find(kind, namespace, call.name)
    except RefusedError:
        if form != APPLY or call.part:
            raise not_found(kind, call.name) from None
        return store.create(kind, change, call.namespace), True
    new = as_object(merged(copied(old.obj), change))
    wanted = (change.get("metadata") or {}).get("resourceVersion")
    new["metadata"]["resourceVersion"] = wanted or old.obj["metadata"]["resourceVersion"]
    if new == old.obj:
        return old, False
    return store.replace(kind, new, namespace, call.name, call.part), False


def merged(target: Any, change: Any) -> Any:
    """RFC 7386, without the `$` directives of a strategic merge patch."""
    if not isinstance(change, dict):
        return change
    found = dict(target) if isinstance(target, dict) else {}
    for key, value in change.items():
        if value is None:
            found.pop(key, None)
        elif not key.startswith("$"):
            found[key] = merged(found.get(key), value)
    return found


def _read(data: bytes, *, yaml_too: bool) -> Object:
    try:
        found = yaml.safe_load(data) if yaml_too else json.loads(data)
    except (yaml.YAMLError, ValueError) as error:
        raise bad_request(f"error decoding patch: {error}") from None
    return as_object(copied(found) if yaml_too else found)
