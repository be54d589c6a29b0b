"""A server that the contract is checked against, and what one test made there."""

from __future__ import annotations

import uuid
from typing import Any

from tests.kubernetes.objects import lease
from tests.kubernetes.plain import Answered, Plain
from tests.kubernetes.resources import CONFIG_MAP, LEASE, Kind, Object

LABEL = "contract-test"


class Cluster:
    """A server, a namespace of it, and what one test made there."""

    def __init__(self, plain: Plain, stranger: Plain, namespace: str) -> None:
        self.plain = plain
        self.stranger = stranger
        """A client with a token that is wrong."""
        self.namespace = namespace
        self.run = f"contract-{uuid.uuid4().hex[:8]}"
        """Prefix of all names, and value of the label, of this test."""
        self.mine = f"{LABEL}={self.run}"

    def path(self, kind: Kind, name: str = "") -> str:
        return kind.path(self.namespace, self.name(name) if name else "")

    def name(self, short: str) -> str:
        return f"{self.run}-{short}"

    def short(self, names: list[str]) -> list[str]:
        return [name.removeprefix(f"{self.run}-") for name in names]

    def config_map(self, name: str, **data: str) -> Object:
        meta = {"name": self.name(name), "labels": {LABEL: self.run}}
        return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta, "data": data}

    def lease(self, name: str, holder: str) -> Object:
        made = lease(self.name(name), holder, namespace=self.namespace)
        made["metadata"]["labels"] = {LABEL: self.run}
        return made

    async def create(self, kind: Kind, obj: Object) -> Object:
        answer = await self.plain.call("POST", self.path(kind), obj)
        assert answer.code == 201, answer
        made: Object = answer.body
        return made

    async def replace(self, kind: Kind, obj: Object) -> Answered:
        path = kind.path(self.namespace, obj["metadata"]["name"])
        return await self.plain.call("PUT", path, obj)

    async def list(self, kind: Kind, **query: Any) -> Answered:
        """What this test made; a `labelSelector` of the query adds to that."""
        more = query.pop("labelSelector", "")
        selector = f"{self.mine},{more}" if more else self.mine
        return await self.plain.get(self.path(kind), labelSelector=selector, **query)

    async def clean(self) -> None:
        for kind in (CONFIG_MAP, LEASE):
            await self.plain.call("DELETE", self.path(kind), labelSelector=self.mine)
