{{/* Names: everything is <release>-epp, the pool is <release>. Cut to what a label may have. */}}
{{- define "epp.name" -}}
{{- printf "%s-epp" (.Release.Name | trunc 59 | trimSuffix "-") -}}
{{- end -}}

{{- define "epp.pool" -}}
{{- .Values.router.inferencePool.name | default .Release.Name -}}
{{- end -}}

{{/* Text, or empty for no: templates return text only. */}}
{{- define "epp.standalone" -}}
{{- if eq .Values.mode "standalone" }}yes{{ end -}}
{{- end -}}

{{- define "epp.createsPool" -}}
{{- $create := .Values.router.inferencePool.create -}}
{{- if ternary (eq .Values.mode "gateway") $create (kindIs "invalid" $create) }}yes{{ end -}}
{{- end -}}

{{/* Pods are found by an InferencePool, and not by labels on the command line. */}}
{{- define "epp.hasPool" -}}
{{- if or (eq .Values.mode "gateway") (include "epp.createsPool" .) }}yes{{ end -}}
{{- end -}}

{{- define "epp.leaderElection" -}}
{{- if and (gt (.Values.router.epp.replicas | int) 1) .Values.router.epp.ha.leaderElection }}yes{{ end -}}
{{- end -}}

{{/* The pools this picker serves, as --pool-name takes them. */}}
{{- define "epp.poolNames" -}}
{{- if .Values.router.inferencePool.allInNamespace -}}
*
{{- else -}}
{{- prepend .Values.router.inferencePool.additionalNames (include "epp.pool" .) | uniq | join "," -}}
{{- end -}}
{{- end -}}

{{- define "epp.severalPools" -}}
{{- if or .Values.router.inferencePool.allInNamespace .Values.router.inferencePool.additionalNames }}yes{{ end -}}
{{- end -}}

{{/* Names of the Services: one for each pool, so that gateways say which one they ask for. */}}
{{- define "epp.services" -}}
{{- $names := list (include "epp.name" .) -}}
{{- range .Values.router.inferencePool.additionalNames -}}
{{- $names = append $names (printf "%s-epp" (. | trunc 59 | trimSuffix "-")) -}}
{{- end -}}
{{- join "," ($names | uniq) -}}
{{- end -}}

{{- define "epp.selectorLabels" -}}
app.kubernetes.io/name: epp
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end -}}

{{- define "epp.labels" -}}
{{ include "epp.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
{{- end -}}

{{- define "epp.metadata" -}}
name: {{ include "epp.name" . }}
namespace: {{ .Release.Namespace | quote }}
labels:
  {{- include "epp.labels" . | nindent 2 }}
{{- end -}}

{{- define "epp.image" -}}
{{- $image := .Values.router.epp.image -}}
{{- $tag := $image.tag | default .Chart.AppVersion -}}
{{- with $image.registry }}{{ . }}/{{ end }}{{ $image.repository }}
{{- if hasPrefix "sha256:" $tag }}@{{ else }}:{{ end }}{{ $tag -}}
{{- end -}}

{{/* A number or boolean as JSON has it: `%v` writes 26214400 as 2.62144e+07. */}}
{{- define "epp.plain" -}}
{{- if kindIs "string" . }}{{ . }}{{ else }}{{ toJson . }}{{ end -}}
{{- end -}}

{{/* ext_proc over TLS, unless a flag says no. */}}
{{- define "epp.secure" -}}
{{- $flag := get .Values.router.epp.flags "secure-serving" -}}
{{- if not (has (include "epp.plain" $flag) (list "false" "False" "FALSE" "f" "F" "0")) }}yes{{ end -}}
{{- end -}}

{{/* Seconds between the start of a pod's end and SIGTERM. */}}
{{- define "epp.preStop" -}}
{{- if include "epp.standalone" . -}}
{{- /* Envoy needs the picker until its own end. */ -}}
{{- add (.Values.router.proxy.drainSeconds | int) 1 -}}
{{- else -}}
{{- .Values.router.epp.preStopSeconds | int -}}
{{- end -}}
{{- end -}}

{{- define "epp.grace" -}}
{{- if kindIs "invalid" .Values.router.epp.terminationGracePeriodSeconds -}}
{{- add (include "epp.preStop" . | int) (.Values.router.epp.drainTimeoutSeconds | int) 10 -}}
{{- else -}}
{{- .Values.router.epp.terminationGracePeriodSeconds | int -}}
{{- end -}}
{{- end -}}

{{- define "epp.metricsSecret" -}}
{{- .Values.router.monitoring.prometheus.auth.secretName | default (printf "%s-metrics-reader" (include "epp.name" .)) -}}
{{- end -}}

{{- define "epp.clusterName" -}}
{{- printf "%s-%s-metrics" .Release.Namespace (include "epp.name" .) -}}
{{- end -}}

{{- define "epp.metricsAuth" -}}
{{- if and .Values.router.monitoring.prometheus.enabled .Values.router.monitoring.prometheus.auth.enabled }}yes{{ end -}}
{{- end -}}

{{/* What election writes: epp-<namespace>-<pool>.llm-d.ai, as the reference's. Several pools are
     joined in order and marked by a hash; without a pool object the pool is called as the
     Deployment. */}}
{{- define "epp.lease" -}}
{{- $names := include "epp.poolNames" . | splitList "," | sortAlpha -}}
{{- $pools := first $names -}}
{{- if not (include "epp.hasPool" .) -}}
{{- $pools = include "epp.name" . -}}
{{- else if .Values.router.inferencePool.allInNamespace -}}
{{- $pools = printf "all-%s" (sha256sum "*" | trunc 10) -}}
{{- else if gt (len $names) 1 -}}
{{- $pools = printf "%s-%s" (join "-" $names | trunc 150) (join "," $names | sha256sum | trunc 10) -}}
{{- end -}}
{{- printf "epp-%s-%s.llm-d.ai" .Release.Namespace $pools -}}
{{- end -}}

{{/* Pods of the engines, as Kubernetes' label selector grammar has it. */}}
{{- define "epp.selector" -}}
{{- $pairs := list -}}
{{- range $key, $value := .Values.router.modelServers.matchLabels -}}
{{- $pairs = append $pairs (printf "%s=%s" $key $value) -}}
{{- end -}}
{{- join "," $pairs -}}
{{- end -}}

{{- define "epp.targetPorts" -}}
{{- $ports := list -}}
{{- range .Values.router.modelServers.targetPorts -}}
{{- $ports = append $ports (.number | int | toString) -}}
{{- end -}}
{{- join "," $ports -}}
{{- end -}}
