"""What the CRDs of our manifests demand, in our words and strictly: an unknown field is an error.

Written from the APIs' documentation, with only the fields that our manifests use; a field that is
added to a manifest is added here, after a look at its API. A CRD's CEL rules are predicates: each
takes the object and says whether it holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jsonschema import Draft202012Validator

Schema = Mapping[str, Any]
TEXT: Schema = {"type": "string"}
FLAG: Schema = {"type": "boolean"}
PORT: Schema = {"type": "integer", "minimum": 1, "maximum": 65_535}
NAME: Schema = {"type": "string", "pattern": r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$", "maxLength": 253}
GROUP: Schema = {"type": "string", "pattern": r"^$|^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9-]+)*$"}
LABELS: Schema = {"type": "object", "additionalProperties": {"type": "string", "maxLength": 63}}
TEXTS: Schema = {"type": "object", "additionalProperties": TEXT}
GATEWAY_DURATION: Schema = {"type": "string", "pattern": r"^([0-9]{1,5}(h|m|s|ms)){1,4}$"}


def one_of(*values: Any) -> Schema:
    return {"enum": list(values)}


def whole(low: int, high: int = (1 << 31) - 1) -> Schema:
    return {"type": "integer", "minimum": low, "maximum": high}


def obj(required: str = "", /, **properties: Schema) -> Schema:
    return {
        "type": "object",
        "properties": properties,
        "required": required.split(),
        "additionalProperties": False,
    }


def some(items: Schema, low: int = 1, high: int = 64) -> Schema:
    return {"type": "array", "items": items, "minItems": low, "maxItems": high}


METADATA = obj("name", name=NAME, namespace=NAME, labels=LABELS, annotations=TEXTS)
SELECTOR = obj("matchLabels", matchLabels=LABELS)
POOL_REF = obj("name", group=GROUP, kind=TEXT, name=NAME)
TARGET = obj("group kind name", group=GROUP, kind=TEXT, name=NAME)


def pool_ports_differ(pool: Any) -> bool:
    ports = [port["number"] for port in pool["spec"]["targetPorts"]]
    return len(ports) == len(set(ports))


def service_has_port(pool: Any) -> bool:
    ref = pool["spec"].get("endpointPickerRef")
    return ref is None or ref.get("kind", "Service") != "Service" or "port" in ref


INFERENCE_POOL = obj(
    "selector targetPorts",
    selector=obj("matchLabels", matchLabels={**LABELS, "minProperties": 1, "maxProperties": 64}),
    targetPorts=some(obj("number", number=PORT), 1, 8),
    appProtocol=one_of("http", "kubernetes.io/h2c"),
    endpointPickerRef=obj(
        "name",
        group=GROUP,
        kind=TEXT,
        name=NAME,
        port=obj("number", number=PORT),
        failureMode=one_of("FailOpen", "FailClose"),
    ),
)
INFERENCE_OBJECTIVE = obj("poolRef", poolRef=POOL_REF, priority=whole(-(1 << 31)))
INFERENCE_MODEL_REWRITE = obj(
    "poolRef rules",
    poolRef=POOL_REF,
    rules=some(
        obj(
            "targets",
            matches=some(obj("model", model=obj("value", type=one_of("Exact"), value=TEXT))),
            targets=some(obj("modelRewrite", modelRewrite=TEXT, weight=whole(1, 1_000_000))),
        )
    ),
)

HEADER = obj(
    "name value",
    name={"type": "string", "pattern": r"^[A-Za-z0-9!#$%&'*+\-.^_`|~]+$", "maxLength": 256},
    value={"type": "string", "minLength": 1, "maxLength": 4096},
)
ROUTE_RULE = obj(
    "",
    matches=some(
        obj(
            "",
            path=obj("type value", type=one_of("Exact", "PathPrefix"), value=TEXT),
            headers=some(obj("name value", type=one_of("Exact"), **HEADER["properties"]), 1, 16),
        )
    ),
    filters=some(
        obj(
            "type",
            type=one_of("RequestHeaderModifier"),
            requestHeaderModifier=obj("", set=some(HEADER, 1, 16), add=some(HEADER, 1, 16)),
        ),
        1,
        16,
    ),
    backendRefs=some(
        obj("name", group=GROUP, kind=TEXT, name=NAME, port=PORT, weight=whole(0, 1_000_000)), 1, 16
    ),
    timeouts=obj("", request=GATEWAY_DURATION, backendRequest=GATEWAY_DURATION),
)
HTTP_ROUTE = obj(
    "rules",
    parentRefs=some(
        obj("name", group=GROUP, kind=TEXT, name=NAME, namespace=NAME, sectionName=NAME), 1, 32
    ),
    hostnames=some(
        {"type": "string", "pattern": r"^(\*\.)?[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9-]+)*$"},
        1,
        16,
    ),
    rules=some(ROUTE_RULE, 1, 16),
)


def paths_are_absolute(route: Any) -> bool:
    return all(match["path"]["value"].startswith("/") for match in _matches(route))


def headers_are_matched_once(route: Any) -> bool:
    lists = [[each["name"].lower() for each in m.get("headers", ())] for m in _matches(route)]
    return all(len(names) == len(set(names)) for names in lists)


def modifiers_are_there(route: Any) -> bool:
    filters = [each for rule in route["spec"]["rules"] for each in rule.get("filters", ())]
    return all("requestHeaderModifier" in each for each in filters)


def _matches(route: Any) -> Iterator[Any]:
    for rule in route["spec"]["rules"]:
        yield from rule.get("matches", ())


GATEWAY = obj(
    "gatewayClassName listeners",
    gatewayClassName=NAME,
    listeners=some(
        obj(
            "name port protocol",
            name=NAME,
            port=PORT,
            protocol=one_of("HTTP", "HTTPS"),
            allowedRoutes=obj("", namespaces=obj("", **{"from": one_of("All", "Same")})),
        )
    ),
)
GATEWAY_CLASS = obj("controllerName", controllerName=TEXT)

PROMETHEUS_DURATION: Schema = {"type": "string", "pattern": r"^([0-9]+(ms|s|m|h|d))+$"}
SERVICE_MONITOR = obj(
    "selector endpoints",
    selector=SELECTOR,
    namespaceSelector=obj("", any=FLAG, matchNames=some(NAME)),
    endpoints=some(
        obj(
            "",
            port=TEXT,
            path=TEXT,
            interval=PROMETHEUS_DURATION,
            authorization=obj("", type=TEXT, credentials=obj("key", name=NAME, key=TEXT)),
        )
    ),
)

DESTINATION_RULE = obj(
    "host",
    host=TEXT,
    trafficPolicy=obj(
        "",
        connectionPool=obj(
            "",
            http=obj(
                "",
                http2MaxRequests=whole(0),
                http1MaxPendingRequests=whole(0),
                maxRequestsPerConnection=whole(0),
                idleTimeout=GATEWAY_DURATION,
            ),
            tcp=obj("", maxConnections=whole(0), connectTimeout=GATEWAY_DURATION),
        ),
        tls=obj(
            "mode",
            mode=one_of("DISABLE", "SIMPLE", "MUTUAL", "ISTIO_MUTUAL"),
            insecureSkipVerify=FLAG,
            sni=TEXT,
        ),
    ),
)


def unverified_tls_is_simple(rule: Any) -> bool:
    tls = rule["spec"].get("trafficPolicy", {}).get("tls", {})
    return not tls.get("insecureSkipVerify") or tls["mode"] == "SIMPLE"


HEALTH_CHECK_POLICY = obj(
    "targetRef default",
    targetRef=TARGET,
    default=obj(
        "",
        checkIntervalSec=whole(1, 300),
        timeoutSec=whole(1, 300),
        config=obj(
            "type",
            type=one_of("TCP", "HTTP", "HTTPS", "HTTP2", "GRPC"),
            httpHealthCheck=obj("", requestPath=TEXT, port=PORT, host=TEXT),
            grpcHealthCheck=obj("", port=PORT, grpcServiceName=TEXT),
        ),
    ),
)
CHECKS = {"HTTP": "httpHealthCheck", "GRPC": "grpcHealthCheck"}


def check_is_of_its_type(policy: Any) -> bool:
    config = policy["spec"]["default"]["config"]
    return config.keys() == {"type", CHECKS[config["type"]]}


GCP_BACKEND_POLICY = obj(
    "targetRef default",
    targetRef=TARGET,
    default=obj(
        "",
        timeoutSec=whole(1),
        logging=obj("", enabled=FLAG, sampleRate=whole(0, 1_000_000)),
    ),
)


class Kind(NamedTuple):
    """A custom resource: what its `spec` looks like, and what else must hold."""

    spec: Schema
    rules: Sequence[Callable[[Any], bool]] = ()


KINDS: Mapping[tuple[str, str], Kind] = {
    ("inference.networking.k8s.io/v1", "InferencePool"): Kind(
        INFERENCE_POOL, (pool_ports_differ, service_has_port)
    ),
    ("llm-d.ai/v1alpha2", "InferenceObjective"): Kind(INFERENCE_OBJECTIVE),
    ("llm-d.ai/v1alpha2", "InferenceModelRewrite"): Kind(INFERENCE_MODEL_REWRITE),
    ("gateway.networking.k8s.io/v1", "HTTPRoute"): Kind(
        HTTP_ROUTE, (paths_are_absolute, headers_are_matched_once, modifiers_are_there)
    ),
    ("gateway.networking.k8s.io/v1", "Gateway"): Kind(GATEWAY),
    ("gateway.networking.k8s.io/v1", "GatewayClass"): Kind(GATEWAY_CLASS),
    ("monitoring.coreos.com/v1", "ServiceMonitor"): Kind(SERVICE_MONITOR),
    ("networking.istio.io/v1", "DestinationRule"): Kind(
        DESTINATION_RULE, (unverified_tls_is_simple,)
    ),
    ("networking.gke.io/v1", "HealthCheckPolicy"): Kind(
        HEALTH_CHECK_POLICY, (check_is_of_its_type,)
    ),
    ("networking.gke.io/v1", "GCPBackendPolicy"): Kind(GCP_BACKEND_POLICY),
}


def problems_of(document: Any) -> list[str] | None:
    """What is wrong with a custom resource; `None` if its kind is not described here."""
    kind = KINDS.get((document["apiVersion"], document["kind"]))
    if kind is None:
        return None
    schema = obj("apiVersion kind metadata spec", apiVersion=TEXT, kind=TEXT, metadata=METADATA,
                 spec=kind.spec)  # fmt: skip
    found = [
        f"{error.json_path}: {error.message}"
        for error in Draft202012Validator(schema).iter_errors(document)
    ]
    return found or [rule.__name__ for rule in kind.rules if not rule(document)]
