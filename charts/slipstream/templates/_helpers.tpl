{{- define "slipstream.name" -}}
{{- if contains .Chart.Name .Release.Name }}{{ .Release.Name | trunc 52 | trimSuffix "-" }}{{ else }}{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 52 | trimSuffix "-" }}{{ end -}}
{{- end }}

{{- define "slipstream.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "slipstream.labels" -}}
{{ include "slipstream.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end }}

{{- define "slipstream.image" -}}
{{ .Values.image.repository }}{{ if .Values.image.digest }}@{{ .Values.image.digest }}{{ else }}:{{ .Values.image.tag | default .Chart.AppVersion }}{{ end }}
{{- end }}

{{- /* The default image is nowhere but where it was imported. */ -}}
{{- define "slipstream.pullPolicy" -}}
{{ .Values.image.pullPolicy | default (eq .Values.image.repository "slipstream.dev/slipstream" | ternary "Never" "IfNotPresent") }}
{{- end }}

{{- define "slipstream.https" -}}
{{ if or .Values.metrics.auth .Values.metrics.tlsSecret }}yes{{ end }}
{{- end }}
