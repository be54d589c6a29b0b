{{/* What the schema cannot say, or not clearly. */}}
{{- define "epp.validate" -}}
{{- $router := .Values.router -}}
{{- $finds := or (include "epp.createsPool" .) (include "epp.standalone" .) -}}
{{- if and $finds (not $router.modelServers.matchLabels) -}}
{{- fail "router.modelServers.matchLabels is needed: the labels of the engines' pods, for example app: vllm" -}}
{{- end -}}
{{- if and (eq .Values.mode "standalone") (ne .Values.provider.name "none") -}}
{{- fail (printf "provider.name %s is for mode gateway: in standalone mode there is no gateway product" .Values.provider.name) -}}
{{- end -}}
{{- if and (eq .Values.mode "standalone") .Values.httpRoute.create -}}
{{- fail "httpRoute.create is for mode gateway: in standalone mode clients use the Service's port http" -}}
{{- end -}}
{{- if and (not (include "epp.hasPool" .)) $router.inferenceObjectives -}}
{{- fail "router.inferenceObjectives needs router.inferencePool.create: objectives belong to a pool" -}}
{{- end -}}
{{- if and (not (include "epp.hasPool" .)) (include "epp.severalPools" .) -}}
{{- fail "router.inferencePool.additionalNames and allInNamespace need router.inferencePool.create" -}}
{{- end -}}
{{- $grace := include "epp.grace" . | int -}}
{{- $needed := add (include "epp.preStop" . | int) ($router.epp.drainTimeoutSeconds | int) | int -}}
{{- if lt $grace $needed -}}
{{- fail (printf "router.epp.terminationGracePeriodSeconds is %d: the pod would be killed before its drain is over; write at least %d, or null" $grace $needed) -}}
{{- end -}}
{{- $taken := dict
  "pool-name" "router.inferencePool.name"
  "pool-namespace" "helm's --namespace"
  "pool-group" "nothing: there is one"
  "endpoint-selector" "router.modelServers.matchLabels"
  "endpoint-target-ports" "router.modelServers.targetPorts"
  "config-file" "router.epp.pluginsConfigFile"
  "config-text" "router.epp.pluginsConfig"
  "grpc-port" "nothing: the container's is 9002; router.epp.extProcPort is the Service's"
  "grpc-health-port" "router.epp.grpcHealthPort"
  "metrics-port" "nothing: it is 9090"
  "metrics-endpoint-auth" "router.monitoring.prometheus.auth.enabled"
  "ha-enable-leader-election" "router.epp.ha.leaderElection"
  "drain-timeout" "router.epp.drainTimeoutSeconds"
  "cert-path" "router.epp.tls.secretName"
  "enable-cert-reload" "router.epp.tls.secretName" -}}
{{- range $flag, $_ := $router.epp.flags -}}
{{- with get $taken $flag -}}
{{- fail (printf "router.epp.flags.%s is set by the chart: use %s" $flag .) -}}
{{- end -}}
{{- end -}}
{{- if and $router.epp.tls.secretName (not (include "epp.secure" .)) -}}
{{- fail "router.epp.tls.secretName contradicts router.epp.flags.secure-serving=false: remove one" -}}
{{- end -}}
{{- if and $router.epp.pluginsConfig (hasKey $router.epp.pluginsCustomConfig $router.epp.pluginsConfigFile) -}}
{{- fail (printf "router.epp.pluginsConfig and router.epp.pluginsCustomConfig both say what %s is: remove one" $router.epp.pluginsConfigFile) -}}
{{- end -}}
{{- $bytes := 0 -}}
{{- range $name, $text := $router.epp.pluginsCustomConfig -}}
{{- $bytes = add $bytes (len $text) -}}
{{- end -}}
{{- if gt ($bytes | int) 1000000 -}}
{{- fail (printf "router.epp.pluginsCustomConfig has %d bytes: a ConfigMap holds 1 MiB; mount a volume instead" ($bytes | int)) -}}
{{- end -}}
{{- $ports := dict "9002" "ext_proc" "9090" "metrics" -}}
{{- $health := $router.epp.grpcHealthPort | int | toString -}}
{{- with get $ports $health -}}
{{- fail (printf "router.epp.grpcHealthPort %s is the port of %s" $health .) -}}
{{- end -}}
{{- end -}}
