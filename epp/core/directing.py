"""What a pool's own objects say of a request: its priority, and the model it is really for.

A client names an objective in a header; the pool's InferenceObjective of that name gives the
priority. The model is, first match wins: the target of a rewrite rule for the name in the body, the
header `x-llm-d-model-name-rewrite`, the name in the body. Where that is another name, only the
model's bytes change in the body. A compressed body is sent on decoded then.

A body that was not read (another API, too large, a coding we do not know) is not changed either.
"""

from __future__ import annotations

from collections.abc import Mapping

from epp.core.encoding import decode_body
from epp.core.errors import DropReason, RequestDropped
from epp.core.headers import MODEL_REWRITE, OBJECTIVE
from epp.core.model import Api, Request
from epp.core.parse import ParseLimits, first_of, parse_request
from epp.core.renaming import renamed
from epp.core.serving import Serving
from epp.core.structs import Frozen

_MODEL_CHARS_MAX = 1_024


class Edit(Frozen, frozen=True):
    """A body that goes on changed."""

    body: bytes
    decoded: bool = False
    """It came compressed and is not any more."""


class Directed(Frozen, frozen=True):
    """A request as its pool wants it."""

    request: Request
    edit: Edit | None = None
    """`None` = the body goes on as it came."""


def direct(
    headers: Mapping[str, str],
    body: bytes | None,
    *,
    serving: Serving,
    limits: ParseLimits,
    partial: bool = False,
) -> Directed:
    """Read a request and apply what its pool says of it.

    Args:
        body: as for `parse_request`.
        partial: the gateway may have cut the body off: what cannot be read is routed by load.
    Raises: RequestDropped for a body that no engine could read, and one whose model would have to
        be changed and cannot.
    """
    asked = first_of(headers, MODEL_REWRITE)[:_MODEL_CHARS_MAX]
    renames = bool(asked or serving.rewrites)
    try:
        request = parse_request(headers, body, limits=limits, model_optional=renames)
    except RequestDropped:
        if not partial:
            raise
        request = parse_request(headers, None, limits=limits)
    if serving.objectives and (objective := first_of(headers, OBJECTIVE)):
        request.priority = serving.objectives.get(objective, 0)
    if not renames or body is None or request.api is Api.CONVERSATIONS:  # it names no model
        return Directed(request)
    chosen = serving.rewrites.choose(request.model, serving.rng)
    if chosen is not None:
        request.rewrite, asked = chosen
    if not asked:
        # Nobody knew better: what it says of its model has to do.
        return Directed(request if request.model else parse_request(headers, body, limits=limits))
    if asked == request.model:
        return Directed(request)
    return _rename(request, headers, body, asked, limits)


def _rename(
    request: Request, headers: Mapping[str, str], body: bytes, target: str, limits: ParseLimits
) -> Directed:
    if not request.body_read:
        return Directed(request)
    decoded = decode_body(
        headers.get("content-encoding", ""), body, bytes_max=limits.decoded_bytes_max
    )
    changed = None if decoded is None else renamed(decoded, target)
    if changed is None:
        raise RequestDropped(
            DropReason.BAD_REQUEST,
            "the model of this request is served under another name here, and the body cannot be "
            "changed to it: send a JSON object in UTF-8",
        )
    request.target_model = target
    return Directed(request, Edit(changed, decoded=decoded is not body))
