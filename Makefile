# The tasks of this repository. `make` alone lists the targets, with the comments
# after ## as their descriptions.

SHELL       := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

VERSION := $(shell .ci/version 2>/dev/null || echo devel)

# A binary without libc runs in every container, whatever its image.
export CGO_ENABLED := 0

# An image has the tag of its version, which a run uses by default, and that which the chart asks for by default.
REF := slipstream.dev/slipstream:$(VERSION)
CHART_REF := slipstream.dev/slipstream:$(shell sed -n 's/^appVersion: *//p' charts/slipstream/Chart.yaml)

# The tools are built once, and again when their go.mod changes.
TOOLS := bin/tools/.built
LINT  := bin/tools/golangci-lint
HELM  := bin/tools/helm
KREW  := bin/tools/krew
GOTESTSUM := bin/tools/gotestsum
# sudo's secure_path lacks Go, so PATH includes the folder of Go's installation instructions.
export PATH := $(CURDIR)/bin/tools:$(PATH):/usr/local/go/bin

.PHONY: help
help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: demo
demo: build ## Show what an overlay costs here and what helps, in about five minutes (root; RUNS=1 for a first look)
	bin/slipstream run demo $(if $(RUNS),--runs $(RUNS))

.PHONY: build
build: ## Build bin/slipstream and bin/slipstream-azure
	for program in slipstream slipstream-azure; do \
		go build -trimpath -ldflags '-s -w -X main.version=$(VERSION)' -o bin/$$program ./cmd/$$program; \
	done

.PHONY: windows
windows: ## Build bin/slipstream.exe, for hosts that run Windows
	GOOS=windows GOARCH=amd64 go build -trimpath -ldflags '-s -w -X main.version=$(VERSION)' -o bin/slipstream.exe ./cmd/slipstream

# The same sources give the same archive, byte for byte.
.PHONY: image
image: bin/tools/image ## Build bin/slipstream-image.tar: an OCI archive for amd64 and arm64
	for arch in amd64 arm64; do \
		GOOS=linux GOARCH=$$arch go build -trimpath -ldflags '-s -w -X main.version=$(VERSION)' -o bin/image/$$arch/slipstream ./cmd/slipstream; \
	done
	bin/tools/image -o bin/slipstream-image.tar -ref $(REF),$(CHART_REF) \
		linux/amd64=bin/image/amd64/slipstream linux/arm64=bin/image/arm64/slipstream

.PHONY: image-windows
image-windows: image windows ## Build bin/slipstream-windows-image.tar: the image, and that for host-process containers on Windows nodes under the same name
	bin/tools/image -o bin/slipstream-windows-image.tar -ref $(REF),$(CHART_REF) \
		linux/amd64=bin/image/amd64/slipstream linux/arm64=bin/image/arm64/slipstream windows/amd64=bin/slipstream.exe

# Where the files and the image of a release will be. The default is no real address.
RELEASE_URL   ?= https://slipstream.dev/releases/v$(VERSION)
RELEASE_IMAGE ?= slipstream.dev/slipstream
# The same commit gives the same files, byte for byte.
.PHONY: snapshot
snapshot: bin/tools/image bin/tools/release ## Build bin/dist, the files of a release: archives, packages, image, chart, manifests, SBOMs, checksums
	rm -rf bin/dist bin/release
	mkdir -p bin/dist
	for platform in {linux,darwin,windows}/{amd64,arm64}; do \
		GOOS=$${platform%/*} GOARCH=$${platform#*/} go build -trimpath -ldflags '-s -w -X main.version=$(VERSION) -X main.image=$(RELEASE_IMAGE)' \
			-o bin/release/$${platform/\//_}/ ./cmd/slipstream ./cmd/slipstream-azure; \
	done
	SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) go run ./docs/generate bin/release
	bin/tools/image -o bin/dist/slipstream_$(VERSION)_image.tar -ref $(RELEASE_IMAGE):$(VERSION) \
		linux/amd64=bin/release/linux_amd64/slipstream linux/arm64=bin/release/linux_arm64/slipstream
	bin/tools/release -from bin/release -o bin/dist -version $(VERSION) -date $$(git log -1 --format=%ct) -url $(RELEASE_URL) -image $(RELEASE_IMAGE)

# The programs and libraries come from this machine, so the image only works on its architecture.
IMAGE_TOOLS := $(addprefix /usr/bin/,iperf3 iperf sockperf qperf ab redis-server redis-benchmark)
.PHONY: image-tools
image-tools: bin/tools/image ## Build bin/slipstream-tools-image.tar: the image with iperf3, iperf 2, sockperf, qperf, ab and Redis of this machine in it
	@.ci/deps $(foreach tool,$(IMAGE_TOOLS),$(tool)=$(patsubst redis-benchmark,redis-tools,$(patsubst ab,apache2-utils,$(notdir $(tool)))))
	arch=$$(go env GOARCH); \
	GOOS=linux go build -trimpath -ldflags '-s -w -X main.version=$(VERSION)' -o bin/image/$$arch/slipstream ./cmd/slipstream; \
	libraries=$$(ldd $(IMAGE_TOOLS) | awk '$$2 == "=>" {print $$3} $$1 ~ "^/.*[^:]$$" {print $$1}' | sort -u); \
	bin/tools/image -o bin/slipstream-tools-image.tar -ref $(REF)-tools \
		linux/$$arch=$$(printf '%s\n' bin/image/$$arch/slipstream $(IMAGE_TOOLS) $$libraries | paste -sd,)

.PHONY: cluster
cluster: cluster-deps image ## Bring up a Kubernetes cluster with the image on it, to play in until Ctrl-C (root)
	go run ./test/cluster/play bin/slipstream-image.tar

.PHONY: portable
portable: ## Check that results can be read on other systems too, and that a worker can run on Windows
	GOOS=darwin go vet ./cmd/slipstream ./cmd/slipstream-azure ./pkg/...
	GOOS=windows go vet ./cmd/slipstream ./cmd/slipstream-azure ./pkg/...

.PHONY: cluster-deps
cluster-deps:
	@.ci/deps containerd runc /usr/lib/cni/bridge=containernetworking-plugins iptables nft=nftables nsenter=util-linux \
		gcc /usr/include/stdlib.h=libc6-dev

# Without root the packages cannot be installed, and tests that need them are skipped.
.PHONY: test-deps
test-deps:
	@if ((EUID == 0)); then $(MAKE) --no-print-directory cluster-deps && \
		.ci/deps iperf3 iperf sockperf qperf ab=apache2-utils haproxy /usr/sbin/sshd=openssh-server sudo zsh fish tcsh bsd-csh=csh busybox ethtool promtool=prometheus /usr/lib/wine/wine64=wine64 mmdebstrap chromium && \
		$(MAKE) --no-print-directory apps-deps; fi

.PHONY: apps-deps
apps-deps: ## Install the programs of the preset applications that are missing (root, apt)
	@.ci/deps redis-server redis-benchmark=redis-tools nginx wrk memcached memcaslap=libmemcached-tools /usr/share/postgresql-common/pg_wrapper=postgresql

.PHONY: generate-deps
generate-deps:
	@.ci/deps clang-19 llvm-strip-19=llvm-19 /usr/include/bpf/bpf_helpers.h=libbpf-dev /usr/include/linux/bpf.h=linux-libc-dev

.PHONY: deps
deps: test-deps generate-deps ## Install what tests and generation need and is missing (root, apt)

# MEASURING: packages whose tests measure. They run one after another.
# QUIET: the tests of ./test that check measured figures. They run alone.
# WHOLE and WAITING: packages that create network namespaces. They wait for the kernel and for processes more than they compute,
# so several run at a time. In WHOLE, ./test checks that a run leaves the machine as it was, and the others change nothing that it
# checks. ./test/scale hardly needs a CPU, so it is a third package beside two of these. WAITING has the other packages, the
# longest first and ./test/cluster last: it keeps the CPUs busy, and starts when the others end.
# All other packages run first, at the same time. Only CPU time limits them, and GOGC=400 leaves less of it to garbage collection.
MEASURING := ./internal/collect ./internal/traffic
QUIET := ^Test(Action|Balancer|Bridge|Mesh|Protocols|Run|Services|Switch|Tools)$$
WHOLE := ./test ./internal/place/hosts ./test/scale ./internal/worker ./internal/doctor
WAITING := ./internal/fastpath ./internal/agent ./internal/place/lab/... ./internal/traffic/tools ./internal/testenv ./test/install ./test/cluster
# -vet=off, because make lint runs vet. Test programs without symbols link faster, and tests copy some of them to other hosts.
GOTEST  := .ci/gotest -count=1 -vet=off -ldflags='-s -w' -timeout=25m $(if $(RUN),-run '$(RUN)')

PACKAGES ?= ./...
asked = { go list $(1) | grep -xFf <(go list $(PACKAGES)) || true; }
.PHONY: test
test: test-deps $(GOTESTSUM) $(HELM) $(KREW) ## Run every test; as root, those of the network too (RUN=REGEXP and PACKAGES=… for some; CI=1: no skips)
	@rm -f bin/flaky.txt
	go test -C tools -count=1 ./image
	go test -C tools/release -count=1 .
	@comm -23 <(go list $(PACKAGES) | sort) <(go list $(MEASURING) $(WHOLE) $(WAITING) | sort) | GOGC=400 xargs -r $(GOTEST) -p=4 --
	@$(call asked,$(MEASURING)) | xargs -r $(GOTEST) -p=1 --
	@$(if $(RUN),,$(call asked,./test) | xargs -r $(GOTEST) -run '$(QUIET)' --)
	@$(call asked,$(WHOLE)) | .ci/expedite xargs -r $(GOTEST) -p=3 -parallel=12 $(if $(RUN),,-skip '$(QUIET)') --
	@$(call asked,$(WAITING)) | .ci/expedite xargs -r $(GOTEST) -p=2 -parallel=6 --

# ./test and its folders need root and a built program, except for test/text. The race detector needs a C compiler. Linking
# is much of the work, and faster without symbols; reports of races name functions and lines all the same.
RACE := $(if $(shell command -v gcc || command -v clang),-race)
.PHONY: check
check: ## Run the tests that need nothing of the machine: no root, nothing installed (with the race detector if there is a C compiler)
	go list ./... | grep -vE '^slipstream.dev/test(/(builds|cluster|install|kernels|scale)|$$)' | \
		CGO_ENABLED=$(if $(RACE),1,0) GOGC=400 xargs go test -short -vet=off -ldflags='-s -w' $(RACE)

.PHONY: test-cluster
test-cluster: cluster-deps $(HELM) ## Run the tests that need a Kubernetes cluster only (root)
	go test -count=1 -timeout=30m ./test/cluster/

.PHONY: placebo
placebo: cluster-deps $(HELM) ## Compare two clusters that are alike, and count the verdicts; then two whose NICs have another rate, in 40 minutes (root)
	go test -tags placebo -count=1 -v -timeout=2h -run '^Test(Placebo|HalfRate)$$' ./test/cluster

# Cilium's programs are built once, and again when their go.mod changes. At low priority, because it takes long.
PEERS := bin/peers/.built
CILIUM := github.com/cilium/cilium
.PHONY: peers
peers: cluster-deps $(HELM) $(PEERS) ## Build Cilium from its Go module, and try clusters with it and with slipstream in them (root)
	@.ci/deps /usr/lib/llvm-19/bin/clang=clang-19 ipset
	go test -tags peers -count=1 -v -timeout=1h -run '^TestPeers' ./test/cluster

$(PEERS): test/cluster/peers/go.mod test/cluster/peers/go.sum
	rm -rf bin/peers
	cd test/cluster/peers && version=$$(go list -m -f '{{.Version}}' $(CILIUM)) && \
	for program in agent=daemon cni=plugins/cilium-cni dbg=cilium-dbg; do \
		nice -n 15 go build -trimpath -tags osusergo -ldflags "-s -w -X '$(CILIUM)/pkg/version.ciliumVersion=$${version#v} unknown unknown'" \
			-o $(CURDIR)/bin/peers/cilium-$${program%=*} $(CILIUM)/$${program#*=}; \
	done
	@# Files of the module cache are read-only.
	module=$$(go list -C test/cluster/peers -m -f '{{.Dir}}' $(CILIUM)); \
	cp -r --no-preserve=mode $$module/bpf bin/peers/bpf; \
	cp -r --no-preserve=mode $$module/install/kubernetes/cilium bin/peers/chart; \
	cp -r --no-preserve=mode $$module/pkg/k8s/apis/cilium.io/client/crds bin/peers/crds
	find bin/peers -name '*.go' -delete # otherwise they are packages of this module
	touch $@

NODES ?= 100
.PHONY: scale
scale: build ## Measure what the agents of NODES nodes ask of a real API server, in about 25 minutes for 100; with SCENARIO="pods policies services", repeat the published tests of Cilium's agent with slipstream's, in 12 minutes each (root)
	mkdir -p bin
	$(if $(SCENARIO),\
	for s in $(SCENARIO); do go run ./test/scale -nodes $(NODES) -scenario $$s -o bin/scale-$$s-$(NODES).json || exit; done; \
	go run ./test/scale -draw bin/scale-$(NODES) $(SCENARIO:%=bin/scale-%-$(NODES).json),\
	go run ./test/scale -nodes $(NODES) -o bin/scale-$(NODES).json)

SOAK ?= 1h
.PHONY: soak
soak: test-deps $(HELM) ## Run what is too long for make test: statistics, random packets, the costs of doctor's findings, interrupted migrations of node pools, then connections beside those of reference nodes without the fast path, under kills, floods, forged packets, …: SOAK=1h in namespaces, then as long in a cluster of each network, flannel's VXLAN and its host-gw (root)
	go test -count=1 -run '^TestCoverage' ./internal/stats -simulated 10000
	go test -count=1 -run '^TestDifferential$$' ./internal/fastpath -packets 100000
	go test -tags soak -count=1 -v -timeout=0 -run '^TestSoak' ./internal/cli
	go test -tags soak -count=1 -v -timeout=0 -run '^TestSoakMigrate' ./test/cluster
	go test -tags soak -count=1 -p=1 -v -timeout=0 -run '^TestSoak$$' ./internal/fastpath ./test/cluster -soak $(SOAK)

.PHONY: soak-alerts
soak-alerts: test-deps $(HELM) ## Evaluate the chart's alerts in a Prometheus for SOAK=1h of healthy agents in a cluster; fail if one fires (root)
	go test -tags soak -count=1 -v -timeout=0 -run '^TestSoakAlerts$$' ./test/cluster -soak $(SOAK)

.PHONY: first-minute
first-minute: test-deps ## Time the first steps with each package of a release and with a clone, in ten minutes (root)
	go test -tags firstminute -count=1 -v -timeout=30m -run '^TestFirstMinute$$' ./test/install

.PHONY: kernels
kernels: ## Boot kernels of Debian in QEMU and try the fast path on each, in about two hours (KERNELS="trixie/arm64 …" for some)
	@.ci/deps qemu-system-x86_64=qemu-system-x86 qemu-system-aarch64=qemu-system-arm xz=xz-utils zstd
	go run ./test/kernels $(KERNELS)

.PHONY: bench
bench: ## Run the benchmarks (root for those of the network)
	go test -run '^$$' -bench . -benchmem -count=1 -p=1 -timeout=60m ./...

.PHONY: lint
lint: $(LINT) $(TOOLS) ## Check style, likely bugs and import rules, and for known vulnerabilities
	golangci-lint run ./...
	cd tools && golangci-lint run --config ../.golangci.yml ./image
	cd tools/release && golangci-lint run --config ../../.golangci.yml .
	buf lint
	.ci/vulnerabilities

.PHONY: fmt
fmt: $(LINT) $(TOOLS) ## Format Go and protobuf
	golangci-lint fmt ./... tools/image tools/release
	buf format -w

.PHONY: generate
generate: generate-deps $(TOOLS) ## Generate the worker's protocol, the eBPF objects, the CRDs and deep copies
	buf generate
	BPF2GO_CC=clang-19 BPF2GO_STRIP=llvm-strip-19 go generate ./...

.PHONY: generated
generated: generate-deps $(TOOLS) ## Fail if what is generated is not what is in the tree
	.ci/generated

# The site has the same folders as the repository, so that links between pages work.
SITE := README.md CONTRIBUTING.md SECURITY.md CHANGELOG.md LICENSE bpf/LICENSE 'docs/*.md' 'docs/*.css' 'docs/*.json' 'docs/*.png' 'docs/*.svg' 'examples/*.yaml'
.PHONY: site
site: ## Build the documents as web pages that need no server: bin/site/html/index.html
	@.ci/deps mkdocs /usr/share/mkdocs/themes/material=mkdocs-material
	rm -rf bin/site
	mkdir -p bin/site/source
	git ls-files -z -co --exclude-standard $(SITE) | xargs -0 cp --parents -t bin/site/source
	@# Quiet hides what the build's own libraries find deprecated, but also what fails it.
	mkdocs build --quiet --strict -f docs/mkdocs.yml || mkdocs build --strict -f docs/mkdocs.yml
	@echo "file://$(CURDIR)/bin/site/html/index.html"

.PHONY: clean
clean: ## Remove what was built
	rm -rf bin

$(TOOLS): tools/go.mod tools/go.sum
	go build -C tools -o $(CURDIR)/bin/tools/ tool
	touch $@

$(LINT): tools/lint/go.mod tools/lint/go.sum
	go build -C tools/lint -o $(CURDIR)/bin/tools/ tool

$(HELM): tools/helm/go.mod tools/helm/go.sum
	go build -C tools/helm -trimpath -ldflags '-s -w' -o $(CURDIR)/bin/tools/ tool

$(KREW): tools/krew/go.mod tools/krew/go.sum
	go build -C tools/krew -trimpath -ldflags '-s -w' -o $(CURDIR)/bin/tools/ tool

$(GOTESTSUM): tools/gotestsum/go.mod tools/gotestsum/go.sum
	go build -C tools/gotestsum -o $(CURDIR)/bin/tools/ tool

bin/tools/release: $(wildcard tools/release/*.go) tools/release/go.mod tools/release/go.sum
	go build -C tools/release -o $(CURDIR)/$@ .

bin/tools/image: $(wildcard tools/image/*.go) tools/go.mod tools/go.sum
	go build -C tools -o $(CURDIR)/$@ ./image
