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

{{- /* What names the image to a run. The program knows the default one. */ -}}
{{- define "slipstream.podImage" -}}
{{- if ne .Values.image.repository "slipstream.dev/slipstream" }}- --image={{ include "slipstream.image" . }}{{ end }}
{{- end }}

{{- define "slipstream.https" -}}
{{ if or .Values.metrics.auth .Values.metrics.tlsSecret }}yes{{ end }}
{{- end }}

{{- /* Two agents on a node refuse each other, so helm install --wait would wait in vain. helm template finds none. */ -}}
{{- define "slipstream.onlyRelease" -}}
{{- range (lookup "apps/v1" "DaemonSet" "" "").items }}
{{- $release := dig "app.kubernetes.io/instance" "" (.metadata.labels | default dict) }}
{{- if and (eq (dig "app.kubernetes.io/name" "" (.metadata.labels | default dict)) $.Chart.Name) (ne (print .metadata.namespace "/" $release) (print $.Release.Namespace "/" $.Release.Name)) }}
{{- fail (printf "release %s in namespace %s has agents in this cluster already, and two agents on a node refuse each other: change that one (helm upgrade %s … --namespace %s), or uninstall it first" $release .metadata.namespace $release .metadata.namespace) }}
{{- end }}
{{- end }}
{{- end }}
