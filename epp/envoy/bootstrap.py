"""Builds the Envoy bootstrap of `epp envoy-config` from Envoy's typed messages.

Typed, so that a field that does not exist cannot be written; rendered as the proto's JSON form,
which is also YAML. What the shape guards against is said beside the field; each has a test with a
real Envoy.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import betterproto2
from envoy_data_plane.envoy.config.bootstrap import v3 as bootstrap_v3
from envoy_data_plane.envoy.config.cluster import v3 as cluster_v3
from envoy_data_plane.envoy.config.common.mutation_rules import v3 as mutation_v3
from envoy_data_plane.envoy.config.core import v3 as core_v3
from envoy_data_plane.envoy.config.endpoint import v3 as endpoint_v3
from envoy_data_plane.envoy.config.listener import v3 as listener_v3
from envoy_data_plane.envoy.config.overload import v3 as overload_v3
from envoy_data_plane.envoy.config.route import v3 as route_v3
from envoy_data_plane.envoy.extensions.filters.http.ext_proc import v3 as ext_proc_v3
from envoy_data_plane.envoy.extensions.filters.http.header_mutation import v3 as header_mutation_v3
from envoy_data_plane.envoy.extensions.filters.http.header_to_metadata import v3 as to_metadata_v3
from envoy_data_plane.envoy.extensions.filters.http.router import v3 as router_v3
from envoy_data_plane.envoy.extensions.filters.network.http_connection_manager import v3 as hcm_v3
from envoy_data_plane.envoy.extensions.load_balancing_policies.override_host import (
    v3 as override_host_v3,
)
from envoy_data_plane.envoy.extensions.load_balancing_policies.round_robin import (
    v3 as round_robin_v3,
)
from envoy_data_plane.envoy.extensions.resource_monitors.downstream_connections import (
    v3 as connections_v3,
)
from envoy_data_plane.envoy.extensions.retry.host.previous_hosts import v3 as previous_hosts_v3
from envoy_data_plane.envoy.extensions.transport_sockets.tls import v3 as tls_v3
from envoy_data_plane.envoy.extensions.upstreams.http import v3 as upstream_v3
from envoy_data_plane.envoy.type import v3 as type_v3
from envoy_data_plane.envoy.type.metadata import v3 as metadata_v3
from envoy_data_plane.google import protobuf as google

from epp.core.headers import (
    DESTINATION,
    DESTINATION_SERVED,
    DESTINATION_SUBSET,
    LB_NAMESPACE,
    NOT_FOR_UPSTREAM,
    POOL as POOL_METADATA,
    REQUEST_TRAILERS,
    SUBSET_NAMESPACE,
    TEST_SELECTION,
)
from epp.envoy.options import BodyProcessing, EnvoyOptions, Routing, split_address

POOL, EPP = "pool", "epp"
CONNECTION_BUFFER_BYTES = 32_768
REQUESTS_MAX = 100_000
"""Each request holds a stream to the EPP for its whole life; Envoy's default of 1024 is far too low
for streamed answers. Also the most connections of clients."""
RETRY_ON = "connect-failure,refused-stream,reset"
"""An engine that dies before it answers has done nothing that another could not do again."""
HEALTH_SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"

# What the EPP reads itself stays until it has read it; it removes these from what goes upstream.
READ_BY_US = ("fairness-id", "objective", "rewrite", "pool", "slo-", "video", TEST_SELECTION)
CLIENT_MAY_NOT_SEND = tuple(
    sorted(
        name
        for name in {DESTINATION, *NOT_FOR_UPSTREAM}
        if not any(part in name for part in READ_BY_US)
    )
)

BODY_MODE = {
    BodyProcessing.FULL_DUPLEX: ext_proc_v3.ProcessingModeBodySendMode.FULL_DUPLEX_STREAMED,
    BodyProcessing.BUFFERED: ext_proc_v3.ProcessingModeBodySendMode.BUFFERED,
    BodyProcessing.STREAMED: ext_proc_v3.ProcessingModeBodySendMode.STREAMED,
    BodyProcessing.NONE: ext_proc_v3.ProcessingModeBodySendMode.NONE,
}
SEND = ext_proc_v3.ProcessingModeHeaderSendMode.SEND
SKIP = ext_proc_v3.ProcessingModeHeaderSendMode.SKIP


def bootstrap(options: EnvoyOptions) -> dict[str, Any]:
    """The bootstrap as plain values; `options` are already checked."""
    document = bootstrap_v3.Bootstrap(
        admin=None
        if options.admin is None
        else bootstrap_v3.Admin(address=_address(options.admin, "--admin")),
        static_resources=bootstrap_v3.BootstrapStaticResources(
            listeners=[_listener(options)], clusters=[_epp_cluster(options), _pool_cluster(options)]
        ),
        overload_manager=_overload_manager(),
    )
    return document.to_dict(casing=betterproto2.Casing.SNAKE)


def _pack(message: betterproto2.Message) -> google.Any:
    return google.Any.pack(message)


def _address(address: str, flag: str = "--endpoints") -> core_v3.Address:
    host, port = split_address(address, flag)
    return core_v3.Address(socket_address=core_v3.SocketAddress(address=host, port_value=port))


def _overload_manager() -> overload_v3.OverloadManager:
    # Envoy warns at each start when nothing bounds its connections.
    limit = connections_v3.DownstreamConnectionsConfig(
        max_active_downstream_connections=REQUESTS_MAX
    )
    return overload_v3.OverloadManager(
        resource_monitors=[
            overload_v3.ResourceMonitor(
                name="envoy.resource_monitors.global_downstream_max_connections",
                typed_config=_pack(limit),
            )
        ]
    )


# -- listener, routes ----------------------------------------------------------------------


def _listener(options: EnvoyOptions) -> listener_v3.Listener:
    manager = hcm_v3.HttpConnectionManager(
        stat_prefix="inference",
        # A prefill or a queue may be silent for minutes.
        stream_idle_timeout=timedelta(0),
        route_config=_routes(options),
        http_filters=_filters(options, _processing(options)),
        upgrade_configs=[
            hcm_v3.HttpConnectionManagerUpgradeConfig(
                upgrade_type="websocket", filters=_filters(options, _processing_of_upgrades())
            )
        ],
    )
    buffer_bytes = CONNECTION_BUFFER_BYTES
    if options.request_body is BodyProcessing.BUFFERED:
        # Here this is the largest body there can be (413 beyond); elsewhere it is the piece size.
        buffer_bytes = options.buffer_bytes
    return listener_v3.Listener(
        name="inference",
        address=_address(options.listen, "--listen"),
        per_connection_buffer_limit_bytes=buffer_bytes,
        filter_chains=[
            listener_v3.FilterChain(
                filters=[
                    listener_v3.Filter(
                        name="envoy.filters.network.http_connection_manager",
                        typed_config=_pack(manager),
                    )
                ]
            )
        ],
    )


def _routes(options: EnvoyOptions) -> route_v3.RouteConfiguration:
    to_pool = _to_pool(None)
    everything = route_v3.Route(
        match=route_v3.RouteMatch(prefix="/"),
        route=to_pool,
        # To send a body again it must be kept whole; the connection's buffer is too small for that.
        request_body_buffer_limit=options.buffer_bytes,
    )
    routes = [everything]
    if options.retries and options.routing is Routing.OVERRIDE_HOST:
        everything.route = _to_pool(_retry_policy(options))
        # With a retry policy Envoy 1.40 sends a body that ends in trailers upstream twice, so such
        # requests, which the EPP marks, get a route without one. This needs clear_route_cache.
        marked = route_v3.HeaderMatcher(name=REQUEST_TRAILERS, present_match=True)
        with_trailers = route_v3.Route(
            match=route_v3.RouteMatch(prefix="/", headers=[marked]), route=to_pool
        )
        routes = [with_trailers, everything]
    host = route_v3.VirtualHost(
        name="all",
        domains=["*"],
        routes=routes,
        # The mark is for the routes above, also where nobody looks for it.
        request_headers_to_remove=[REQUEST_TRAILERS],
    )
    return route_v3.RouteConfiguration(name="inference", virtual_hosts=[host])


def _to_pool(retry_policy: route_v3.RetryPolicy | None) -> route_v3.RouteAction:
    # An answer may take as long as it takes: no route timeout.
    return route_v3.RouteAction(cluster=POOL, timeout=timedelta(0), retry_policy=retry_policy)


def _retry_policy(options: EnvoyOptions) -> route_v3.RetryPolicy:
    # Past the end of our list retries go round robin, which would come back to the dead endpoint.
    elsewhere = route_v3.RetryPolicyRetryHostPredicate(
        name="envoy.retry_host_predicates.previous_hosts",
        typed_config=_pack(previous_hosts_v3.PreviousHostsPredicate()),
    )
    return route_v3.RetryPolicy(
        retry_on=RETRY_ON,
        num_retries=options.retries,
        retry_host_predicate=[elsewhere],
        host_selection_retry_max_attempts=5,
    )


# -- filters -------------------------------------------------------------------------------


def _filters(
    options: EnvoyOptions, processing: ext_proc_v3.ProcessingMode
) -> list[hcm_v3.HttpFilter]:
    filters: list[tuple[str, betterproto2.Message]] = []
    if options.subset_header is not None:
        filters.append(("envoy.filters.http.header_to_metadata", _subset(options.subset_header)))
    filters += [
        ("envoy.filters.http.header_mutation", _strip_control_headers()),
        ("envoy.filters.http.ext_proc", _ext_proc(options, processing)),
        ("envoy.filters.http.router", router_v3.Router()),
    ]
    return [hcm_v3.HttpFilter(name=name, typed_config=_pack(config)) for name, config in filters]


def _strip_control_headers() -> header_mutation_v3.HeaderMutation:
    # The EPP removes these too; this also holds while the EPP is down and requests fail open.
    return header_mutation_v3.HeaderMutation(
        mutations=header_mutation_v3.Mutations(
            request_mutations=[
                mutation_v3.HeaderMutation(remove=name) for name in CLIENT_MAY_NOT_SEND
            ]
        )
    )


def _subset(header: str) -> to_metadata_v3.Config:
    return to_metadata_v3.Config(
        request_rules=[
            to_metadata_v3.ConfigRule(
                header=header,
                on_header_present=to_metadata_v3.ConfigKeyValuePair(
                    metadata_namespace=SUBSET_NAMESPACE, key=DESTINATION_SUBSET
                ),
                remove=True,
            )
        ]
    )


def _pool_metadata(options: EnvoyOptions) -> list[core_v3.HeaderValue]:
    if options.pool is None:
        return []
    return [core_v3.HeaderValue(key=POOL_METADATA, value=options.pool)]


def _ext_proc(
    options: EnvoyOptions, processing: ext_proc_v3.ProcessingMode
) -> ext_proc_v3.ExternalProcessor:
    namespaces = ext_proc_v3.MetadataOptionsMetadataNamespaces
    return ext_proc_v3.ExternalProcessor(
        grpc_service=core_v3.GrpcService(
            envoy_grpc=core_v3.GrpcServiceEnvoyGrpc(cluster_name=EPP, authority="epp"),
            initial_metadata=_pool_metadata(options),
        ),
        failure_mode_allow=options.fail_open,
        message_timeout=timedelta(seconds=options.message_timeout_s),
        processing_mode=processing,
        metadata_options=ext_proc_v3.MetadataOptions(
            # Without this Envoy drops our pick silently and goes round robin.
            receiving_namespaces=namespaces(untyped=[LB_NAMESPACE]),
            forwarding_namespaces=namespaces(untyped=[LB_NAMESPACE, SUBSET_NAMESPACE]),
        ),
    )


def _processing(options: EnvoyOptions) -> ext_proc_v3.ProcessingMode:
    return ext_proc_v3.ProcessingMode(
        request_header_mode=SEND,
        response_header_mode=SEND,
        request_body_mode=BODY_MODE[options.request_body],
        response_body_mode=BODY_MODE[options.response_body],
        # Full duplex demands trailers; without response bodies they tell nothing.
        request_trailer_mode=SEND,
        response_trailer_mode=SKIP if options.response_body is BodyProcessing.NONE else SEND,
    )


def _processing_of_upgrades() -> ext_proc_v3.ProcessingMode:
    # A client that asks for an upgrade sends nothing more before the 101. With bodies buffered,
    # either way, Envoy 1.40 waits for their end before it lets the request or the 101 pass
    # (envoyproxy/envoy #47081), so headers are all we see of an upgraded connection. Trailers,
    # which never come, keep Envoy's stream to us open: the session is in flight until it ends.
    return ext_proc_v3.ProcessingMode(
        request_header_mode=SEND,
        response_header_mode=SEND,
        request_body_mode=BODY_MODE[BodyProcessing.NONE],
        response_body_mode=BODY_MODE[BodyProcessing.NONE],
        request_trailer_mode=SKIP,
        response_trailer_mode=SEND,
    )


# -- clusters ------------------------------------------------------------------------------


def _epp_cluster(options: EnvoyOptions) -> cluster_v3.Cluster:
    http2 = upstream_v3.HttpProtocolOptions(
        explicit_http_config=upstream_v3.HttpProtocolOptionsExplicitHttpConfig(
            http2_protocol_options=core_v3.Http2ProtocolOptions()
        )
    )
    return cluster_v3.Cluster(
        name=EPP,
        type=cluster_v3.ClusterDiscoveryType.STRICT_DNS,
        connect_timeout=timedelta(seconds=1),
        typed_extension_protocol_options={
            "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": _pack(http2)
        },
        load_assignment=_assignment(EPP, options.epps),
        # An EPP known to be down fails at once, so that requests with a body can fail open: with a
        # refused connection most of them would have sent body by then and get a 500. The panic
        # threshold of 0 keeps Envoy from using it all the same, the merge window of 0 from holding
        # the news back for a second when the last news is no older than that.
        health_checks=[_health_check()],
        common_lb_config=cluster_v3.ClusterCommonLbConfig(
            healthy_panic_threshold=type_v3.Percent(value=0.0), update_merge_window=timedelta(0)
        ),
        circuit_breakers=_circuit_breakers(),
        transport_socket=_any_certificate() if options.epp_tls else None,
    )


def _health_check() -> core_v3.HealthCheck:
    second = timedelta(seconds=1)
    return core_v3.HealthCheck(
        timeout=second,
        interval=second,
        # Before the first request Envoy would otherwise check once a minute.
        no_traffic_interval=second,
        unhealthy_threshold=1,
        healthy_threshold=1,
        grpc_health_check=core_v3.HealthCheckGrpcHealthCheck(service_name=HEALTH_SERVICE),
    )


def _any_certificate() -> core_v3.TransportSocket:
    context = tls_v3.UpstreamTlsContext(
        common_tls_context=tls_v3.CommonTlsContext(
            # Health checks do not take the protocol from the cluster's HTTP options; gRPC servers
            # hang up on a client that does not offer h2.
            alpn_protocols=["h2"],
            tls_params=tls_v3.TlsParameters(
                tls_maximum_protocol_version=tls_v3.TlsParametersTlsProtocol.TLSv1_3
            ),
            validation_context=tls_v3.CertificateValidationContext(),
        )
    )
    return core_v3.TransportSocket(name="envoy.transport_sockets.tls", typed_config=_pack(context))


def _circuit_breakers() -> cluster_v3.CircuitBreakers:
    return cluster_v3.CircuitBreakers(
        thresholds=[
            cluster_v3.CircuitBreakersThresholds(
                max_connections=REQUESTS_MAX,
                max_pending_requests=REQUESTS_MAX,
                max_requests=REQUESTS_MAX,
                max_retries=1024,
            )
        ]
    )


def _pool_cluster(options: EnvoyOptions) -> cluster_v3.Cluster:
    if options.routing is Routing.ORIGINAL_DST:
        return cluster_v3.Cluster(
            name=POOL,
            type=cluster_v3.ClusterDiscoveryType.ORIGINAL_DST,
            lb_policy=cluster_v3.ClusterLbPolicy.CLUSTER_PROVIDED,
            connect_timeout=timedelta(seconds=5),
            original_dst_lb_config=cluster_v3.ClusterOriginalDstLbConfig(
                use_http_header=True, http_header_name=DESTINATION
            ),
            circuit_breakers=_circuit_breakers(),
        )
    return cluster_v3.Cluster(
        name=POOL,
        type=cluster_v3.ClusterDiscoveryType.STRICT_DNS,
        connect_timeout=timedelta(seconds=1),
        load_assignment=_assignment(POOL, options.endpoints),
        load_balancing_policy=_override_host(),
        circuit_breakers=_circuit_breakers(),
    )


def _assignment(name: str, addresses: tuple[str, ...]) -> endpoint_v3.ClusterLoadAssignment:
    return endpoint_v3.ClusterLoadAssignment(
        cluster_name=name,
        endpoints=[
            endpoint_v3.LocalityLbEndpoints(
                lb_endpoints=[
                    endpoint_v3.LbEndpoint(endpoint=endpoint_v3.Endpoint(address=_address(address)))
                    for address in addresses
                ]
            )
        ],
    )


def _override_host() -> cluster_v3.LoadBalancingPolicy:
    # Metadata alone: a header named here could be sent by a client.
    return _policy(
        "envoy.load_balancing_policies.override_host",
        override_host_v3.OverrideHost(
            override_host_sources=[
                override_host_v3.OverrideHostOverrideHostSource(metadata=_lb_key(DESTINATION))
            ],
            selected_host_key=_lb_key(DESTINATION_SERVED),
            fallback_policy=_policy(
                "envoy.load_balancing_policies.round_robin", round_robin_v3.RoundRobin()
            ),
        ),
    )


def _policy(name: str, message: betterproto2.Message) -> cluster_v3.LoadBalancingPolicy:
    extension = core_v3.TypedExtensionConfig(name=name, typed_config=_pack(message))
    policy = cluster_v3.LoadBalancingPolicyPolicy(typed_extension_config=extension)
    return cluster_v3.LoadBalancingPolicy(policies=[policy])


def _lb_key(key: str) -> metadata_v3.MetadataKey:
    return metadata_v3.MetadataKey(
        key=LB_NAMESPACE, path=[metadata_v3.MetadataKeyPathSegment(key=key)]
    )
