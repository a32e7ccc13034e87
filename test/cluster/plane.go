//go:build linux

package cluster

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"syscall"
	"time"

	"k8s.io/client-go/rest"
)

// planeParts are the programs of a control plane without nodes.
var planeParts = []part{
	{module: partsModule, pkg: kubernetesModule + "/cmd/kube-apiserver"},
	{module: partsModule, pkg: "go.etcd.io/etcd/server/v3", name: "etcd"},
}

// Plane is an API server with its etcd on ports of the loopback device, for tests of the requests that it
// gets. It has no namespaces, controllers or kubelets, and needs no root. Its processes end with this one,
// however this one ends.
type Plane struct {
	dir, parts, etcd string
	address          string
	authority        *authority
	// start passes functions to a thread that lives as long as this process. The processes started there end
	// with it.
	start     chan func()
	apiserver *exec.Cmd
	ended     map[*exec.Cmd]chan struct{}
}

// StartPlane starts a Plane with its files in dir, which must be empty. auditPolicy is the API server's
// policy for its log of requests. StartPlane builds the programs if necessary.
func StartPlane(ctx context.Context, dir, auditPolicy string, log io.Writer) (*Plane, error) {
	programs, err := buildParts(ctx, planeParts, log)
	if err != nil {
		return nil, err
	}
	p := &Plane{dir: dir, parts: programs, start: make(chan func()), ended: make(map[*exec.Cmd]chan struct{})}
	go func() {
		runtime.LockOSThread()
		for f := range p.start {
			f()
		}
	}()
	if p.authority, err = newAuthority(filepath.Join(dir, "pki")); err != nil {
		return nil, err
	}
	if err := p.authority.files(); err != nil {
		return nil, err
	}
	if err := os.WriteFile(filepath.Join(dir, "audit.yaml"), []byte(auditPolicy), 0o600); err != nil {
		return nil, fmt.Errorf("write the audit policy: %w", err)
	}
	ports, err := freePorts(3)
	if err != nil {
		return nil, err
	}
	p.address, p.etcd = ports[0], "http://"+ports[1]
	peer := "http://" + ports[2]
	if _, err := p.run("etcd", "--data-dir="+filepath.Join(dir, "etcd"), "--unsafe-no-fsync", "--log-level=warn", "--quota-backend-bytes=8589934592",
		"--listen-client-urls="+p.etcd, "--advertise-client-urls="+p.etcd, "--listen-peer-urls="+peer,
		"--initial-advertise-peer-urls="+peer, "--initial-cluster=default="+peer); err != nil {
		return nil, err
	}
	return p, p.StartServer(ctx)
}

// freePorts returns addresses of the loopback device at which nothing listens.
func freePorts(n int) (all []string, err error) {
	for len(all) < n {
		// Avoid the ephemeral ports (ip_local_port_range begins at 32768): the servers bind later, and again after
		// a restart.
		l, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", 20000+rand.IntN(10000)))
		if errors.Is(err, syscall.EADDRINUSE) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("find a free port: %w", err)
		}
		defer l.Close()
		all = append(all, l.Addr().String())
	}
	return all, nil
}

func (p *Plane) run(name string, args ...string) (*exec.Cmd, error) {
	log, err := os.OpenFile(filepath.Join(p.dir, name+".log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, fmt.Errorf("make log of %s: %w", name, err)
	}
	defer log.Close()
	cmd := exec.Command(filepath.Join(p.parts, name), args...)
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Setpgid: true}
	started := make(chan error)
	p.start <- func() { started <- cmd.Start() }
	if err := <-started; err != nil {
		return nil, fmt.Errorf("start %s: %w", name, err)
	}
	ended := make(chan struct{})
	p.ended[cmd] = ended
	go func() {
		defer close(ended)
		_ = cmd.Wait() // its log contains its complaints
	}()
	return cmd, nil
}

// StartServer starts the API server, or restarts it after KillServer, and waits until it is ready.
func (p *Plane) StartServer(ctx context.Context) error {
	_, port, err := net.SplitHostPort(p.address)
	if err != nil {
		return err
	}
	a := p.authority
	p.apiserver, err = p.run("kube-apiserver",
		"--etcd-servers="+p.etcd, "--bind-address=127.0.0.1", "--advertise-address=127.0.0.1", "--secure-port="+port, "--endpoint-reconciler-type=none",
		"--service-cluster-ip-range="+serviceNetwork, "--anonymous-auth=false", "--authorization-mode=RBAC", "--disable-admission-plugins=ServiceAccount",
		"--cert-dir="+a.path("apiserver"), "--client-ca-file="+a.path("ca.crt"),
		"--tls-cert-file="+a.path("apiserver.crt"), "--tls-private-key-file="+a.path("apiserver.key"),
		"--service-account-issuer=https://kubernetes.default.svc.cluster.local",
		"--service-account-key-file="+a.path("service-accounts.crt"), "--service-account-signing-key-file="+a.path("service-accounts.key"),
		"--audit-policy-file="+filepath.Join(p.dir, "audit.yaml"), "--audit-log-path="+p.AuditLog(), "--audit-log-maxsize=100000")
	if err != nil {
		return err
	}
	admin, err := p.Config("admin", "system:masters")
	if err != nil {
		return err
	}
	client, err := rest.HTTPClientFor(admin)
	if err != nil {
		return err
	}
	ended := p.ended[p.apiserver]
	if err := poll(ctx, 50*time.Millisecond, func() (bool, error) {
		select {
		case <-ended:
			return false, fmt.Errorf("kube-apiserver ended: %s", lastLines(filepath.Join(p.dir, "kube-apiserver.log")))
		default:
		}
		answer, err := client.Get(admin.Host + "/readyz")
		if err != nil {
			return false, nil //nolint:nilerr // it does not listen yet
		}
		answer.Body.Close()
		return answer.StatusCode == http.StatusOK, nil
	}); err != nil {
		return fmt.Errorf("wait for the API server: %w", err)
	}
	return nil
}

// KillServer kills the API server.
func (p *Plane) KillServer() error {
	if err := p.apiserver.Process.Kill(); err != nil {
		return fmt.Errorf("kill the API server: %w", err)
	}
	<-p.ended[p.apiserver]
	return nil
}

// Server returns the process ID of the API server.
func (p *Plane) Server() int { return p.apiserver.Process.Pid }

// AuditLog returns the path of the log of requests.
func (p *Plane) AuditLog() string { return filepath.Join(p.dir, "audit.log") }

// Config returns a configuration to connect as a user with groups, without a limit on requests.
func (p *Plane) Config(user string, groups ...string) (*rest.Config, error) {
	certPEM, keyPEM, err := p.authority.client(user, groups...)
	if err != nil {
		return nil, err
	}
	return &rest.Config{Host: "https://" + p.address, QPS: -1, TLSClientConfig: rest.TLSClientConfig{CAData: p.authority.pem, CertData: certPEM, KeyData: keyPEM}}, nil
}

// Stop ends the plane's processes. Its files stay.
func (p *Plane) Stop() {
	for cmd, ended := range p.ended {
		_ = cmd.Process.Kill() // an error means that it has ended
		<-ended
	}
	close(p.start)
}
