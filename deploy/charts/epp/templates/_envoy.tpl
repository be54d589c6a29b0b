{{/*
The Envoy of standalone mode. The bootstrap is what `epp envoy-config` prints for the same options: a
test compares the two. Change it there first (epp/envoy/bootstrap.py says what each field is for).
*/}}
{{- define "epp.envoy" -}}
{{- $proxy := .Values.router.proxy -}}
{{- $override := $proxy.endpoints -}}
{{- $bodies := dict "full-duplex" "FULL_DUPLEX_STREAMED" "buffered" "BUFFERED" "streamed" "STREAMED" -}}
{{- $response := get $bodies $proxy.responseBody -}}
static_resources:
  listeners:
    - name: inference
      address:
        socket_address:
          address: 0.0.0.0
          port_value: {{ $proxy.port | int }}
      filter_chains:
        - filters:
            - name: envoy.filters.network.http_connection_manager
              typed_config:
                "@type": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
                stat_prefix: inference
                route_config:
                  name: inference
                  virtual_hosts:
                    - name: all
                      domains:
                        - "*"
                      routes:
                        {{- if and $override ($proxy.retries | int) }}
                        - match:
                            prefix: /
                            headers:
                              - name: x-epp-request-trailers
                                present_match: true
                          route:
                            cluster: pool
                            timeout: 0s
                        {{- end }}
                        - match:
                            prefix: /
                          route:
                            cluster: pool
                            timeout: 0s
                            {{- if and $override ($proxy.retries | int) }}
                            retry_policy:
                              retry_on: connect-failure,refused-stream,reset
                              num_retries: {{ $proxy.retries | int }}
                              retry_host_predicate:
                                - name: envoy.retry_host_predicates.previous_hosts
                                  typed_config:
                                    "@type": type.googleapis.com/envoy.extensions.retry.host.previous_hosts.v3.PreviousHostsPredicate
                              host_selection_retry_max_attempts: "5"
                            {{- end }}
                          request_body_buffer_limit: {{ $proxy.bufferBytes | int64 }}
                      request_headers_to_remove:
                        - x-epp-request-trailers
                http_filters:
                  {{- include "epp.envoyFilters" . | nindent 18 }}
                      processing_mode:
                        request_header_mode: SEND
                        response_header_mode: SEND
                        request_body_mode: {{ get $bodies $proxy.requestBody }}
                        {{- with $response }}
                        response_body_mode: {{ . }}
                        {{- end }}
                        request_trailer_mode: SEND
                        response_trailer_mode: {{ ternary "SEND" "SKIP" (ne $response "") }}
                  {{- include "epp.envoyRouter" . | nindent 18 }}
                stream_idle_timeout: 0s
                upgrade_configs:
                  - upgrade_type: websocket
                    filters:
                      {{- include "epp.envoyFilters" . | nindent 22 }}
                          processing_mode:
                            request_header_mode: SEND
                            response_header_mode: SEND
                            request_trailer_mode: SKIP
                            response_trailer_mode: SEND
                      {{- include "epp.envoyRouter" . | nindent 22 }}
      per_connection_buffer_limit_bytes: {{ ternary $proxy.bufferBytes 32768 (eq $proxy.requestBody "buffered") | int64 }}
  clusters:
    - name: epp
      type: STRICT_DNS
      connect_timeout: 1s
      load_assignment:
        cluster_name: epp
        endpoints:
          - lb_endpoints:
              - endpoint:
                  address:
                    socket_address:
                      address: 127.0.0.1
                      port_value: 9002
      health_checks:
        - timeout: 1s
          interval: 1s
          unhealthy_threshold: 1
          healthy_threshold: 1
          grpc_health_check:
            service_name: envoy.service.ext_proc.v3.ExternalProcessor
          no_traffic_interval: 1s
      circuit_breakers:
        {{- include "epp.envoyThresholds" . | nindent 8 }}
      typed_extension_protocol_options:
        envoy.extensions.upstreams.http.v3.HttpProtocolOptions:
          "@type": type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions
          explicit_http_config:
            http2_protocol_options: {}
      common_lb_config:
        healthy_panic_threshold: {}
        update_merge_window: 0s
      {{- if include "epp.secure" . }}
      transport_socket:
        name: envoy.transport_sockets.tls
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext
          common_tls_context:
            tls_params:
              tls_maximum_protocol_version: TLSv1_3
            validation_context: {}
            alpn_protocols:
              - h2
      {{- end }}
    - name: pool
      {{- if $override }}
      type: STRICT_DNS
      connect_timeout: 1s
      load_assignment:
        cluster_name: pool
        endpoints:
          - lb_endpoints:
              {{- range $override }}
              - endpoint:
                  address:
                    socket_address:
                      address: {{ regexReplaceAll ":[0-9]+$" . "" | trimPrefix "[" | trimSuffix "]" | quote }}
                      port_value: {{ regexFind "[0-9]+$" . }}
              {{- end }}
      {{- else }}
      type: ORIGINAL_DST
      connect_timeout: 5s
      lb_policy: CLUSTER_PROVIDED
      {{- end }}
      circuit_breakers:
        {{- include "epp.envoyThresholds" . | nindent 8 }}
      {{- if $override }}
      load_balancing_policy:
        policies:
          - typed_extension_config:
              name: envoy.load_balancing_policies.override_host
              typed_config:
                "@type": type.googleapis.com/envoy.extensions.load_balancing_policies.override_host.v3.OverrideHost
                override_host_sources:
                  - metadata:
                      key: envoy.lb
                      path:
                        - key: x-gateway-destination-endpoint
                selected_host_key:
                  key: envoy.lb
                  path:
                    - key: x-gateway-destination-endpoint-served
                fallback_policy:
                  policies:
                    - typed_extension_config:
                        name: envoy.load_balancing_policies.round_robin
                        typed_config:
                          "@type": type.googleapis.com/envoy.extensions.load_balancing_policies.round_robin.v3.RoundRobin
      {{- else }}
      original_dst_lb_config:
        use_http_header: true
        http_header_name: x-gateway-destination-endpoint
      {{- end }}
admin:
  address:
    socket_address:
      address: 127.0.0.1
      port_value: {{ $proxy.adminPort | int }}
overload_manager:
  resource_monitors:
    - name: envoy.resource_monitors.global_downstream_max_connections
      typed_config:
        "@type": type.googleapis.com/envoy.extensions.resource_monitors.downstream_connections.v3.DownstreamConnectionsConfig
        max_active_downstream_connections: "100000"
{{- end -}}

{{/* Up to the ext_proc filter, which the caller completes with its processing mode. */}}
{{- define "epp.envoyFilters" -}}
{{- $proxy := .Values.router.proxy -}}
- name: envoy.filters.http.header_mutation
  typed_config:
    "@type": type.googleapis.com/envoy.extensions.filters.http.header_mutation.v3.HeaderMutation
    mutations:
      request_mutations:
        - remove: x-data-parallel-host-port
        - remove: x-encoder-hosts-ports
        - remove: x-epp-request-trailers
        - remove: x-gateway-destination-endpoint
        - remove: x-gateway-destination-endpoint-scores
        - remove: x-gateway-destination-endpoint-served
        - remove: x-gateway-destination-endpoint-subset
        - remove: x-kv-cache-source-host-port
        - remove: x-llm-d-request-dropped-reason
        - remove: x-prefiller-host-port
        - remove: x-prefiller-url
- name: envoy.filters.http.ext_proc
  typed_config:
    "@type": type.googleapis.com/envoy.extensions.filters.http.ext_proc.v3.ExternalProcessor
    grpc_service:
      envoy_grpc:
        cluster_name: epp
        authority: epp
    {{- if $proxy.failOpen }}
    failure_mode_allow: true
    {{- end }}
    message_timeout: {{ printf "%ds" ($proxy.messageTimeoutSeconds | int) }}
    metadata_options:
      forwarding_namespaces:
        untyped:
          - envoy.lb
          - envoy.lb.subset_hint
      receiving_namespaces:
        untyped:
          - envoy.lb
{{- end -}}

{{- define "epp.envoyRouter" -}}
- name: envoy.filters.http.router
  typed_config:
    "@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router
{{- end -}}

{{- define "epp.envoyThresholds" -}}
thresholds:
  - max_connections: 100000
    max_pending_requests: 100000
    max_requests: 100000
    max_retries: 1024
{{- end -}}

{{- define "epp.envoyContainer" -}}
{{- $proxy := .Values.router.proxy -}}
- name: envoy
  image: {{ $proxy.image | quote }}
  imagePullPolicy: {{ $proxy.imagePullPolicy }}
  command:
    - envoy
  args:
    - --config-path
    - /etc/envoy/envoy.yaml
    - --log-level
    - {{ $proxy.logLevel }}
    # Hot restart needs shared memory, and nobody restarts it hot here.
    - --disable-hot-restart
    {{- with $proxy.concurrency | int }}
    - --concurrency
    - {{ . | quote }}
    {{- end }}
  ports:
    - name: http
      containerPort: {{ $proxy.port | int }}
  # Its admin port is for the pod only, so the probes ask whether it listens; the pod is ready when
  # the picker is too.
  startupProbe:
    tcpSocket:
      port: http
    periodSeconds: 1
    failureThreshold: 60
  readinessProbe:
    tcpSocket:
      port: http
    periodSeconds: 5
  lifecycle:
    preStop:
      # At SIGTERM Envoy ends at once, requests and all. The image has no shell to sleep in: this
      # needs Kubernetes 1.30.
      sleep:
        seconds: {{ $proxy.drainSeconds | int }}
  {{- with $proxy.resources }}
  resources:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .Values.router.epp.securityContext }}
  securityContext:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  volumeMounts:
    - name: envoy
      mountPath: /etc/envoy
      readOnly: true
{{- end -}}
