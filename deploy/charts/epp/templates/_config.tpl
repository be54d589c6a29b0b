{{/* The EndpointPickerConfig that --config-file reads. */}}
{{- define "epp.config" -}}
{{- $epp := .Values.router.epp -}}
{{- if $epp.pluginsConfig -}}
{{- toYaml $epp.pluginsConfig -}}
{{- else -}}
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
# No profile: the default one.
plugins:
  - type: metrics-data-source
    parameters:
      scheme: {{ $epp.metricsDataSource.scheme }}
      path: {{ $epp.metricsDataSource.path | quote }}
      insecureSkipVerify: {{ $epp.metricsDataSource.insecureSkipVerify }}
  - type: core-metrics-extractor
    parameters:
      defaultEngine: {{ .Values.router.modelServers.type }}
dataLayer:
  sources:
    - pluginRef: metrics-data-source
      extractors:
        - pluginRef: core-metrics-extractor
{{- with $epp.parsers }}
requestHandler:
  parsers:
    {{- range . }}
    - pluginRef: {{ . }}
    {{- end }}
{{- end }}
{{- end -}}
{{- end -}}

{{/* Every file of the ConfigMap. */}}
{{- define "epp.configFiles" -}}
{{- $files := deepCopy .Values.router.epp.pluginsCustomConfig -}}
{{- if not (hasKey $files .Values.router.epp.pluginsConfigFile) -}}
{{- $_ := set $files .Values.router.epp.pluginsConfigFile (printf "%s\n" (include "epp.config" .)) -}}
{{- end -}}
{{- toYaml $files -}}
{{- end -}}
