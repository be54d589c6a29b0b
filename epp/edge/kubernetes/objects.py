"""The Kubernetes objects we read, with only the fields we want; everything else is skipped unread.

A `Resource` says where objects of a kind are served and what they decode to. What a client of the
API server may not rely on: items of a built-in kind's list have no `kind` and `apiVersion`; an
object may lack any field but its metadata; `resourceVersion` is an opaque string, equal or not.

Cost: 7 us for a pod of 6.3 kB, most of it to skip `managedFields` and the containers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, TypeVar
from urllib.parse import quote

import msgspec

POOL_GROUP = "inference.networking.k8s.io"
EXTENSION_GROUP = "llm-d.ai"
LEGACY_GROUP = "inference.networking.x-k8s.io"
"""Objectives and rewrites had it before `EXTENSION_GROUP`."""


class Metadata(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """What every object has. Encoded, it leaves out what is not set."""

    name: str = ""
    namespace: str = ""
    uid: str = ""
    """Differs between two objects that had the same name one after the other."""
    resource_version: str = ""
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}
    creation_timestamp: str | None = None
    """RFC 3339, to the second."""
    deletion_timestamp: str | None = None
    """Set from the moment its termination begins."""


class Object(msgspec.Struct, frozen=True, kw_only=True):
    """Any object."""

    metadata: Metadata

    @property
    def key(self) -> str:
        return f"{self.metadata.namespace}/{self.metadata.name}"


class Condition(msgspec.Struct, frozen=True):
    """One line of a pod's state."""

    type: str = ""
    status: str = ""
    """`True`, `False` or `Unknown`."""


class PodIp(msgspec.Struct, frozen=True):
    """One address of a pod."""

    ip: str = ""


class PodStatus(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """A pod as its node sees it."""

    phase: str = ""
    pod_ip: str = msgspec.field(name="podIP", default="")
    """Without brackets; empty: it has none (yet, or any more)."""
    pod_ips: tuple[PodIp, ...] = msgspec.field(name="podIPs", default=())
    """One per family, `pod_ip` first."""
    host_ip: str = msgspec.field(name="hostIP", default="")
    conditions: tuple[Condition, ...] = ()


class Pod(Object, frozen=True, kw_only=True):
    """A pod."""

    status: PodStatus = PodStatus()

    @property
    def ready(self) -> bool:
        return any(
            each.type == "Ready" and each.status == "True" for each in self.status.conditions
        )


class Selector(msgspec.Struct, frozen=True, rename="camel"):
    """Labels that must all be equal."""

    match_labels: dict[str, str] = {}


class TargetPort(msgspec.Struct, frozen=True):
    """A port that every pod of a pool serves on."""

    number: int


class PickerRef(msgspec.Struct, frozen=True, kw_only=True):
    """Whom a gateway asks for a pool."""

    name: str = ""
    group: str = ""
    kind: str = "Service"


class InferencePoolSpec(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """What an InferencePool wants."""

    selector: Selector
    target_ports: tuple[TargetPort, ...]
    """1 to 8, unique, each 1..65535, says the CRD."""
    app_protocol: str = "http"
    endpoint_picker_ref: PickerRef | None = None


class InferencePool(Object, frozen=True, kw_only=True):
    """A pool, `v1`."""

    spec: InferencePoolSpec


class PoolRef(msgspec.Struct, frozen=True, kw_only=True):
    """The pool an object belongs to; in the object's own namespace."""

    name: str
    group: str = POOL_GROUP
    kind: str = "InferencePool"


class InferenceObjectiveSpec(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """What an InferenceObjective wants."""

    pool_ref: PoolRef
    priority: int | None = None
    """`None` counts as 0; negative is sheddable."""


class InferenceObjective(Object, frozen=True, kw_only=True):
    """A named priority."""

    spec: InferenceObjectiveSpec


class ModelMatch(msgspec.Struct, frozen=True, kw_only=True):
    """A model's name."""

    value: str
    type: str = "Exact"


class RewriteMatch(msgspec.Struct, frozen=True):
    """One way for a request to match a rule."""

    model: ModelMatch | None = None


class RewriteTargetModel(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Where a rule sends requests."""

    model_rewrite: str
    weight: int | None = None


class RewriteRuleSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Any of `matches` (none: everything) goes to one of `targets`."""

    matches: tuple[RewriteMatch, ...] = ()
    targets: tuple[RewriteTargetModel, ...] = ()


class InferenceModelRewriteSpec(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """What an InferenceModelRewrite wants."""

    pool_ref: PoolRef
    rules: tuple[RewriteRuleSpec, ...] = ()


class InferenceModelRewrite(Object, frozen=True, kw_only=True):
    """Rules by which models get another name."""

    spec: InferenceModelRewriteSpec


class LeaseSpec(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """Who leads. Times are RFC 3339 in UTC with six digits of a second."""

    holder_identity: str | None = None
    """Empty: nobody, after a release."""
    lease_duration_seconds: int | None = None
    acquire_time: str | None = None
    renew_time: str | None = None
    lease_transitions: int | None = None


class Lease(Object, frozen=True, kw_only=True, rename="camel"):
    """A lease; encodes to what the API server accepts."""

    api_version: str = "coordination.k8s.io/v1"
    kind: str = "Lease"
    spec: LeaseSpec = LeaseSpec()


class StatusCause(msgspec.Struct, frozen=True):
    """A detail of a refusal."""

    reason: str = ""


class StatusDetails(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """More about a refusal."""

    retry_after_seconds: int = 0
    causes: tuple[StatusCause, ...] = ()


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """What the API server says instead of an object."""

    kind: str = ""
    code: int = 0
    """As an HTTP status; 0: it did not say."""
    reason: str = ""
    """One word, such as `Expired`."""
    message: str = ""
    details: StatusDetails | None = None


class WatchEvent(msgspec.Struct, frozen=True):
    """One line of a watch."""

    type: str
    object: msgspec.Raw


class ListMetadata(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """What a page says about its list."""

    resource_version: str = ""
    continue_: str = msgspec.field(name="continue", default="")
    """Asks for the next page; empty: this is the last one."""


class Page(msgspec.Struct, frozen=True, kw_only=True):
    """One page of a list, its objects still to be decoded."""

    metadata: ListMetadata
    items: list[msgspec.Raw] | None = None


T = TypeVar("T", bound=Object)


@dataclass(frozen=True, slots=True, kw_only=True)
class Resource(Generic[T]):
    """Where objects of one kind are served."""

    group: str
    """Empty: the core group."""
    version: str
    plural: str
    kind: str
    type: type[T]
    """What one object decodes to."""
    built_in: bool = False
    """Served by every API server. Otherwise it comes with a CRD and may be absent."""
    older: tuple[Resource[T], ...] = field(default=())
    """Where the same kind may be served instead, the preferred one first."""

    @property
    def group_path(self) -> str:
        """Path of the group's version; asked, it lists what is served."""
        return f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"

    def path(self, namespace: str, name: str = "") -> str:
        """Path of all objects of a namespace, or of the one that is named."""
        path = f"{self.group_path}/namespaces/{quote(namespace, safe='')}/{self.plural}"
        return f"{path}/{quote(name, safe='')}" if name else path

    def __str__(self) -> str:
        return f"{self.plural}.{self.group}" if self.group else self.plural


PODS = Resource(group="", version="v1", plural="pods", kind="Pod", type=Pod, built_in=True)
LEASES = Resource(
    group="coordination.k8s.io",
    version="v1",
    plural="leases",
    kind="Lease",
    type=Lease,
    built_in=True,
)
INFERENCE_POOLS = Resource(
    group=POOL_GROUP,
    version="v1",
    plural="inferencepools",
    kind="InferencePool",
    type=InferencePool,
)


def _extension(plural: str, kind: str, type_: type[T]) -> Resource[T]:
    """A kind that moved from one group to another; the new one wins where both are installed."""
    older = Resource(group=LEGACY_GROUP, version="v1alpha2", plural=plural, kind=kind, type=type_)
    return Resource(
        group=EXTENSION_GROUP,
        version="v1alpha2",
        plural=plural,
        kind=kind,
        type=type_,
        older=(older,),
    )


INFERENCE_OBJECTIVES = _extension("inferenceobjectives", "InferenceObjective", InferenceObjective)
INFERENCE_MODEL_REWRITES = _extension(
    "inferencemodelrewrites", "InferenceModelRewrite", InferenceModelRewrite
)
