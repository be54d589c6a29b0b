"""Who a caller is and what it may do: bearer tokens, RBAC rules, and the reviews that ask."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.kubernetes.resources import Object

MASTERS = "system:masters"
"""Members may do everything."""


@dataclass(frozen=True, slots=True)
class User:
    """A caller."""

    name: str
    groups: tuple[str, ...] = ()
    uid: str = ""
    audiences: tuple[str, ...] = ("https://kubernetes.default.svc",)
    """What its token is for."""

    def info(self) -> Object:
        found: Object = {"username": self.name, "groups": [*self.groups, "system:authenticated"]}
        return found | ({"uid": self.uid} if self.uid else {})


ADMIN = User("admin", (MASTERS,))


def service_account(namespace: str, name: str) -> User:
    """The user that a pod's token stands for."""
    groups = ("system:serviceaccounts", f"system:serviceaccounts:{namespace}")
    return User(f"system:serviceaccount:{namespace}:{name}", groups, f"uid-of-{name}")


@dataclass(frozen=True, slots=True)
class Attributes:
    """One thing somebody wants to do: with a resource, or with another path."""

    verb: str
    path: str = ""
    """For what is no resource; then the rest is empty."""
    group: str = ""
    resource: str = ""
    """With its subresource: `pods/status`."""
    namespace: str = ""
    """Empty: all of them, or the resource has none."""
    name: str = ""


@dataclass(frozen=True, slots=True)
class Grant:
    """A PolicyRule bound to a user or group."""

    subject: str
    rule: Mapping[str, Any]
    namespace: str | None

    def allows(self, user: User, wanted: Attributes) -> bool:
        if self.subject not in (user.name, *user.groups, "system:authenticated"):
            return False
        rule = self.rule
        if not _listed(rule.get("verbs"), wanted.verb):
            return False
        if wanted.path:
            paths = rule.get("nonResourceURLs") or ()
            return self.namespace is None and any(_path_fits(each, wanted.path) for each in paths)
        names = rule.get("resourceNames")
        return (
            self.namespace in (None, wanted.namespace)
            and _listed(rule.get("apiGroups"), wanted.group)
            and _listed(rule.get("resources"), wanted.resource)
            and (not names or wanted.name in names)
        )


def _listed(wanted: Iterable[str] | None, found: str) -> bool:
    return wanted is not None and ("*" in wanted or found in wanted)


def _path_fits(pattern: str, path: str) -> bool:
    return path.startswith(pattern[:-1]) if pattern.endswith("*") else path == pattern


@dataclass
class Access:
    """The users that tokens stand for, and what they were granted."""

    users: dict[str, User] = field(default_factory=dict)
    """Bearer token -> user."""
    grants: list[Grant] = field(default_factory=list)

    def grant(self, subject: str, *rules: Mapping[str, Any], namespace: str | None = None) -> None:
        """Bind PolicyRules (as in a Role's YAML) to a user's or group's name.

        Args:
            namespace: where they hold, as for a RoleBinding; None: everywhere, as for a
                ClusterRoleBinding.
        """
        self.grants += [Grant(subject, dict(rule), namespace) for rule in rules]

    def may(self, user: User, wanted: Attributes) -> bool:
        if MASTERS in user.groups:
            return True
        return any(grant.allows(user, wanted) for grant in self.grants)

    # -- reviews -----------------------------------------------------------------------

    def review(self, kind: str, body: Object, caller: User) -> Object:
        """The answer to a review that is POSTed: the body with its `status`."""
        spec = body.get("spec") or {}
        answer: dict[str, Any]
        if kind == "TokenReview":
            answer = self._token_review(spec)
        elif kind == "SelfSubjectReview":
            answer = {"userInfo": caller.info()}
        else:
            user = caller
            if kind == "SubjectAccessReview":
                user = User(spec.get("user", ""), tuple(spec.get("groups") or ()))
            allowed = self.may(user, _asked(spec))
            answer = {"allowed": allowed} | ({} if allowed else {"reason": "no rule allows it"})
        return {**body, "metadata": {**body.get("metadata", {})}, "status": answer}

    def _token_review(self, spec: Object) -> Object:
        user = self.users.get(spec.get("token", ""))
        if user is None:
            return {"user": {}, "error": "[invalid bearer token]"}
        wanted = spec.get("audiences")
        shared = [each for each in user.audiences if wanted is None or each in wanted]
        if not shared:
            return {"user": {}, "error": "[invalid bearer token, token audiences do not match]"}
        return {"authenticated": True, "user": user.info(), "audiences": shared}


def _asked(spec: Object) -> Attributes:
    if other := spec.get("nonResourceAttributes"):
        return Attributes(other.get("verb", ""), path=other.get("path", ""))
    asked = spec.get("resourceAttributes") or {}
    resource, part = asked.get("resource", ""), asked.get("subresource")
    return Attributes(
        asked.get("verb", ""),
        group=asked.get("group", ""),
        resource=f"{resource}/{part}" if part else resource,
        namespace=asked.get("namespace", ""),
        name=asked.get("name", ""),
    )
