"""The kinds that the fake serves, and which of them are installed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

Object = dict[str, Any]
"""One Kubernetes object as JSON has it."""

POOL_GROUP = "inference.networking.k8s.io"
NEW_GROUP = "llm-d.ai"
OLD_GROUP = "inference.networking.x-k8s.io"

YES = ("true", "1", "True", "t", "T", "TRUE")
"""What a boolean in a query may look like."""

STORED_VERBS = ("create", "delete", "deletecollection", "get", "list", "patch", "update", "watch")


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind in one version of one API group."""

    group: str
    """Empty for the core group."""
    version: str
    plural: str
    kind: str
    singular: str
    short: tuple[str, ...] = ()
    namespaced: bool = True
    custom: bool = False
    """Defined by a CRD: may be absent; list items carry kind and apiVersion."""
    has_status: bool = False
    """Has the subresource `status`: a write to one leaves the other alone."""
    versionless_put: bool = True
    """A PUT without metadata.resourceVersion overwrites (else: 422)."""
    create_by_put: bool = False
    """A PUT creates what does not exist."""
    verbs: tuple[str, ...] = STORED_VERBS

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def full_name(self) -> str:
        """As kubectl says it: `inferenceobjectives.llm-d.ai`, or `pods`."""
        return f"{self.plural}.{self.group}" if self.group else self.plural

    def path(self, namespace: str | None = None, name: str = "") -> str:
        """The URL path of a collection (of all namespaces when `None`), or of one object."""
        root = f"/apis/{self.api_version}" if self.group else f"/api/{self.version}"
        home = f"/namespaces/{namespace}" if namespace else ""
        return f"{root}{home}/{self.plural}" + (f"/{name}" if name else "")

    @property
    def address(self) -> tuple[str, str, str]:
        return self.group, self.version, self.plural


def _custom(group: str, version: str, singular: str, kind: str, short: tuple[str, ...]) -> Kind:
    plural = f"{singular}s"
    return Kind(
        group, version, plural, kind, singular, short, custom=True, has_status=True,
        versionless_put=False,
    )  # fmt: skip


NAMESPACE = Kind("", "v1", "namespaces", "Namespace", "namespace", ("ns",), namespaced=False)
POD = Kind("", "v1", "pods", "Pod", "pod", ("po",), has_status=True)
CONFIG_MAP = Kind("", "v1", "configmaps", "ConfigMap", "configmap", ("cm",))
LEASE = Kind(
    "coordination.k8s.io", "v1", "leases", "Lease", "lease",
    versionless_put=False, create_by_put=True,
)  # fmt: skip
POOL = _custom(POOL_GROUP, "v1", "inferencepool", "InferencePool", ("infpool",))
OBJECTIVE, OLD_OBJECTIVE = (
    _custom(group, "v1alpha2", "inferenceobjective", "InferenceObjective", ())
    for group in (NEW_GROUP, OLD_GROUP)
)
REWRITE, OLD_REWRITE = (
    _custom(group, "v1alpha2", "inferencemodelrewrite", "InferenceModelRewrite", ())
    for group in (NEW_GROUP, OLD_GROUP)
)
REVIEW = ("create",)
BUILT_IN: tuple[Kind, ...] = (
    NAMESPACE,
    POD,
    Kind("", "v1", "services", "Service", "service", ("svc",), has_status=True),
    CONFIG_MAP,
    Kind("", "v1", "serviceaccounts", "ServiceAccount", "serviceaccount", ("sa",)),
    Kind("", "v1", "events", "Event", "event", ("ev",)),
    LEASE,
    Kind(
        "authentication.k8s.io", "v1", "tokenreviews", "TokenReview", "tokenreview",
        namespaced=False, verbs=REVIEW,
    ),
    Kind(
        "authentication.k8s.io", "v1", "selfsubjectreviews", "SelfSubjectReview",
        "selfsubjectreview", namespaced=False, verbs=REVIEW,
    ),
    Kind(
        "authorization.k8s.io", "v1", "subjectaccessreviews", "SubjectAccessReview",
        "subjectaccessreview", namespaced=False, verbs=REVIEW,
    ),
    Kind(
        "authorization.k8s.io", "v1", "selfsubjectaccessreviews", "SelfSubjectAccessReview",
        "selfsubjectaccessreview", namespaced=False, verbs=REVIEW,
    ),
)  # fmt: skip
CUSTOM: tuple[Kind, ...] = (POOL, OBJECTIVE, REWRITE, OLD_OBJECTIVE, OLD_REWRITE)


class Kinds:
    """Which kinds are served at the moment.

    Args:
        absent: groups whose CRDs are not installed at the start.
    """

    def __init__(self, absent: Iterable[str] = ()) -> None:
        missing = frozenset(absent)
        self.served: dict[tuple[str, str, str], Kind] = {
            kind.address: kind
            for kind in (*BUILT_IN, *CUSTOM)
            if not (kind.custom and kind.group in missing)
        }

    def install(self, group: str, plural: str | None = None) -> list[Kind]:
        """Serve the CRDs of a group (or one of them); returns the new ones."""
        new = [kind for kind in _crds(group, plural) if kind.address not in self.served]
        self.served.update({kind.address: kind for kind in new})
        return new

    def uninstall(self, group: str, plural: str | None = None) -> list[Kind]:
        """The reverse; returns those that were served."""
        return [
            self.served.pop(kind.address)
            for kind in _crds(group, plural)
            if kind.address in self.served
        ]

    def named(self, name: str) -> Kind:
        """The kind called `pods` or, where two groups have it, `inferenceobjectives.llm-d.ai`.

        Raises: KeyError naming what there is.
        """
        for kind in (*CUSTOM, *BUILT_IN):
            if name in (kind.plural, kind.full_name) and kind.address in self.served:
                return kind
        raise KeyError(f"{name!r} is not served here; served: {self._names()}")

    def of(self, obj: Mapping[str, Any]) -> Kind:
        """The kind of an object, by apiVersion and kind. Raises: KeyError naming what there is."""
        wanted = obj.get("apiVersion"), obj.get("kind")
        for kind in self.served.values():
            if (kind.api_version, kind.kind) == wanted:
                return kind
        raise KeyError(f"{wanted[0]} {wanted[1]} is not served here; served: {self._names()}")

    def groups(self) -> dict[str, list[str]]:
        """Group -> its versions, the core group left out."""
        found: dict[str, list[str]] = {}
        for kind in self.served.values():
            versions = found.setdefault(kind.group, []) if kind.group else []
            if kind.version not in versions:
                versions.append(kind.version)
        return found

    def _names(self) -> str:
        return ", ".join(sorted(kind.full_name for kind in self.served.values()))


def _crds(group: str, plural: str | None) -> list[Kind]:
    found = [kind for kind in CUSTOM if kind.group == group and plural in (None, kind.plural)]
    if not found:
        raise KeyError(f"no CRD {plural or ''} of group {group!r} is known to the fake")
    return found
