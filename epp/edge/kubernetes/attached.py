"""What refers to a pool: objectives and model rewrites. Folds from objects to values.

An object belongs to the pool its `poolRef` names by group, kind and name, in the object's own
namespace. One that is being deleted counts as gone. A part of an object that can mean nothing is
left out and complained about; the rest of the object counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeVar

from epp.core.cluster import PoolKey
from epp.core.rewrite import RewriteRule, RewriteTarget
from epp.edge.kubernetes.objects import (
    INFERENCE_POOLS,
    InferenceModelRewrite,
    InferenceObjective,
    Object,
    PoolRef,
    RewriteRuleSpec,
)

POOL_GROUPS = (INFERENCE_POOLS.group, "llm-d.ai")
"""Some releases of the CRDs of group `llm-d.ai` fill in their own group, in which there is no pool,
where an object leaves it out."""
EXACT = "Exact"
"""The only way to match a model's name."""
WEIGHTS = range(1, 1_000_001)
"""Of a rewrite's target, as in the API."""

Complain = Callable[[str], object]
T = TypeVar("T", bound=Object)


def pool_of(reference: PoolRef, namespace: str) -> PoolKey | None:
    """The pool that is referred to; `None` for a thing of another group or kind."""
    kind = INFERENCE_POOLS.kind
    if (reference.group or INFERENCE_POOLS.group) not in POOL_GROUPS:
        return None
    if (reference.kind or kind) != kind:
        return None
    return PoolKey(namespace, reference.name)


def priorities_by_pool(
    objectives: Iterable[InferenceObjective],
) -> Mapping[PoolKey, Mapping[str, int]]:
    """Pool -> objective name -> priority, 0 when it has none set."""
    found: dict[PoolKey, dict[str, int]] = {}
    for each in _alive(objectives):
        key = pool_of(each.spec.pool_ref, each.metadata.namespace)
        if key is not None:
            found.setdefault(key, {})[each.metadata.name] = each.spec.priority or 0
    return found


def rules_by_pool(
    rewrites: Iterable[InferenceModelRewrite], complain: Complain
) -> Mapping[PoolKey, tuple[RewriteRule, ...]]:
    """Pool -> rules: the oldest object's first, by name within a second, then in their order."""
    found: dict[PoolKey, list[RewriteRule]] = {}
    for each in _alive(rewrites):
        key = pool_of(each.spec.pool_ref, each.metadata.namespace)
        if key is not None:
            found.setdefault(key, []).extend(_rules(each, complain))
    return {key: tuple(sorted(rules, key=_precedence)) for key, rules in found.items() if rules}


def _alive(objects: Iterable[T]) -> Iterator[T]:
    return (each for each in objects if each.metadata.deletion_timestamp is None)


def _precedence(rule: RewriteRule) -> tuple[str, str, int]:
    return rule.created, rule.name, rule.index


def _rules(rewrite: InferenceModelRewrite, complain: Complain) -> Iterator[RewriteRule]:
    meta = rewrite.metadata
    for index, rule in enumerate(rewrite.spec.rules):
        where = f"InferenceModelRewrite {meta.namespace}/{meta.name} spec.rules[{index}]"
        models = frozenset(_models(rule))
        if rule.matches and not models:
            complain(f"{where} never applies: none of its matches has an exact model name")
            continue
        yield RewriteRule(
            name=meta.name,
            models=models,
            targets=tuple(_targets(rule, where, complain)),
            created=meta.creation_timestamp or "",
            index=index,
        )


def _models(rule: RewriteRuleSpec) -> Iterator[str]:
    for match in rule.matches:
        model = match.model
        if model is not None and model.value and model.type == EXACT:
            yield model.value


def _targets(rule: RewriteRuleSpec, where: str, complain: Complain) -> Iterator[RewriteTarget]:
    for index, target in enumerate(rule.targets):
        if not target.model_rewrite:
            complain(f"{where}.targets[{index}] names no model and is never chosen")
        elif target.weight is not None and target.weight not in WEIGHTS:
            complain(f"{where}.targets[{index}] has weight {target.weight} and is never chosen")
        else:
            yield RewriteTarget(model=target.model_rewrite, weight=target.weight)
