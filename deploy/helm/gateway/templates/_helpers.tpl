{{- define "gateway.name" -}}
{{- if contains .Chart.Name .Release.Name -}}{{ .Release.Name }}{{- else -}}{{ .Release.Name }}-{{ .Chart.Name }}{{- end -}}
{{- end }}

{{- define "gateway.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "gateway.labels" -}}
{{ include "gateway.selector" . }}
app.kubernetes.io/version: {{ .Values.image.tag | default .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- /* Values are merged: listeners among the defaults would stay beside those of the user. */ -}}
{{- define "gateway.listeners" -}}
{{- if .Values.config.listeners -}}
{{- toYaml .Values.config.listeners -}}
{{- else -}}
mqtt: {protocol: mqtt, port: 1883}
amqp091: {protocol: amqp091, port: 5672}
amqpfast: {protocol: amqpfast, port: 3018}
{{- end -}}
{{- end }}

{{- /* What the gateway reads: the values, and what only the chart knows. */ -}}
{{- define "gateway.configuration" -}}
{{- $fixed := dict "store" (dict "path" "/var/lib/gateway") "listeners" (include "gateway.listeners" . | fromYaml) -}}
{{- if .Values.mappings -}}
{{- $fixed = set $fixed "mappings" (list "/etc/gateway/mappings/*") -}}
{{- end -}}
{{- toYaml (merge $fixed (deepCopy .Values.config)) -}}
{{- end }}

{{- define "gateway.httpPort" -}}
{{- (.Values.config.http | default dict).port | default 8080 -}}
{{- end }}

{{- /* Names of ports have at most 15 small letters, digits and hyphens; those of listeners may be anything. */ -}}
{{- define "gateway.portName" -}}
{{- printf "p%v" . -}}
{{- end }}
