"""Which pools to follow, as the flags of `epp serve` say it: by name, all of a namespace, or pods
without a pool object."""

from __future__ import annotations

import re
from typing import ClassVar

from epp.core.addresses import PORT_MAX
from epp.core.cluster import PoolKey
from epp.core.errors import ConfigError
from epp.core.selectors import SelectorError, parse_selector
from epp.core.structs import Frozen
from epp.edge.kubernetes.membership import HTTP, PoolShape, ranks
from epp.edge.kubernetes.objects import POOL_GROUP

ALL_POOLS = "*"
PORTS_MAX = 8
"""Target ports of a pool, as in the InferencePool API."""

_NAME = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*", re.ASCII)
_POD_NAME = re.compile(r"(.+)-[a-z0-9]+-[a-z0-9]+", re.ASCII)
"""Deployment, ReplicaSet hash, pod suffix."""


class PoolsByName(Frozen, frozen=True):
    """InferencePool objects of one namespace."""

    namespace: str
    names: tuple[str, ...] | None
    """`None` for all there are."""

    label_selector: ClassVar[str | None] = None
    """Of the pods to ask the API server for: all, since a pool's selector may change."""

    @property
    def named(self) -> tuple[PoolKey, ...]:
        """The pools that are asked for by name."""
        return tuple(PoolKey(self.namespace, name) for name in self.names or ())

    @property
    def field_selector(self) -> str | None:
        """Of the pools to ask the API server for; a role may then be bound to the one name."""
        return f"metadata.name={self.names[0]}" if self.names and len(self.names) == 1 else None

    def follows(self, key: PoolKey) -> bool:
        """Whether the pool is one of those."""
        return key.namespace == self.namespace and (self.names is None or key.name in self.names)


class PodsBySelector(Frozen, frozen=True):
    """Pods that are a pool without an InferencePool object; `key` names it."""

    key: PoolKey
    shape: PoolShape

    @property
    def namespace(self) -> str:
        return self.key.namespace

    @property
    def label_selector(self) -> str:
        """Of the pods to ask the API server for."""
        return str(self.shape.selector)

    @property
    def named(self) -> tuple[PoolKey, ...]:
        return (self.key,)

    def follows(self, key: PoolKey) -> bool:
        return key == self.key


PoolChoice = PoolsByName | PodsBySelector


def pools_by_name(text: str, *, namespace: str, flag: str = "--pool-name") -> PoolsByName:
    """Read `a`, `a,b` or `*`; blanks around a name do not count.

    Raises: ConfigError that begins with `flag`.
    """
    if text.strip() == ALL_POOLS:
        return PoolsByName(namespace, None)
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if not _NAME.fullmatch(name) or len(name) > 253:
            raise _error(
                flag, f"'{name}' is no pool name: write NAME, NAME,NAME,... or {ALL_POOLS}"
            )
        if names.count(name) > 1:
            raise _error(flag, f"'{name}' comes twice")
    return PoolsByName(namespace, tuple(names))


def check_pool_group(text: str, *, flag: str = "--pool-group") -> None:
    """Raises: ConfigError for any other group than the one that has InferencePool v1."""
    if text != POOL_GROUP:
        raise _error(
            flag,
            f"pools of API group '{text}' cannot be read: install the InferencePool v1 CRD, move "
            f"the pool there, and leave the flag out or write {POOL_GROUP}",
        )


def pods_by_selector(
    selector: str, ports: str, *, namespace: str, pod_name: str, app_protocol: str = HTTP
) -> PodsBySelector:
    """Read `--endpoint-selector` and `--endpoint-target-ports`.

    Args:
        pod_name: of the EPP itself, environment POD_NAME; the pool is called as its Deployment.
    Raises: ConfigError that begins with the flag.
    """
    try:
        wanted = parse_selector(selector)
    except SelectorError as exception:
        raise _error("--endpoint-selector", str(exception)) from exception
    if not selector.strip():
        raise _error("--endpoint-selector", "it is empty and would select every pod: write one")
    shape = PoolShape(wanted, ranks(target_ports(ports)), app_protocol)
    return PodsBySelector(PoolKey(namespace, pool_name_of(pod_name)), shape)


def target_ports(text: str, *, flag: str = "--endpoint-target-ports") -> tuple[int, ...]:
    """Read `8000,8001`: 1 to 8 different ports.

    Raises: ConfigError that begins with `flag`.
    """
    entries = [entry.strip() for entry in text.split(",")]
    for entry in entries:
        if not re.fullmatch(r"0*[0-9]{1,5}", entry, re.ASCII) or not 1 <= int(entry) <= PORT_MAX:
            raise _error(flag, f"'{entry}' is no port: write 1 to {PORTS_MAX} of 1..{PORT_MAX}")
    ports = tuple(map(int, entries))
    if len(ports) > PORTS_MAX:
        raise _error(flag, f"{len(ports)} ports are too many: {PORTS_MAX} at most")
    if len(set(ports)) < len(ports):
        raise _error(flag, f"'{text}' has a port twice")
    return ports


def pool_name_of(pod_name: str, *, flag: str = "--endpoint-selector") -> str:
    """The name of the Deployment a pod belongs to.

    Raises: ConfigError that begins with `flag` when the pod is of none.
    """
    found = _POD_NAME.fullmatch(pod_name)
    if found is None:
        raise _error(
            flag,
            f"the pool is named after the EPP's Deployment, and POD_NAME '{pod_name}' is not "
            "NAME-HASH-SUFFIX: set that environment variable from metadata.name, outside of a pod "
            "to anything of this form",
        )
    return found[1]


def _error(flag: str, message: str) -> ConfigError:
    return ConfigError(f"{flag}: {message}", path=flag)
