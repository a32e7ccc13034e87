//go:build linux

package cluster

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"time"

	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
)

// authority signs the certificates of one cluster. A client's certificate
// states its user name as the common name, and its groups as the organisations.
type authority struct {
	dir  string
	key  *ecdsa.PrivateKey
	cert *x509.Certificate
	// pem is the certificate in PEM format.
	pem []byte
}

// validity is longer than any test cluster lives. Certificates start an hour in
// the past, in case a clock is set back.
const validity = 30 * 24 * time.Hour

func newAuthority(dir string) (*authority, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("make folder for certificates: %w", err)
	}
	a := &authority{dir: dir}
	certPEM, keyPEM, err := a.certificate(&x509.Certificate{
		Subject:               pkix.Name{CommonName: "slipstream-cluster"},
		IsCA:                  true,
		BasicConstraintsValid: true,
		KeyUsage:              x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature,
	})
	if err != nil {
		return nil, err
	}
	a.pem = certPEM
	return a, a.write("ca", certPEM, keyPEM)
}

// certificate signs the template. The first certificate that it signs is its
// own.
func (a *authority) certificate(template *x509.Certificate) (certPEM, keyPEM []byte, err error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, nil, fmt.Errorf("make key: %w", err)
	}
	if template.SerialNumber, err = rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 120)); err != nil {
		return nil, nil, fmt.Errorf("make serial number: %w", err)
	}
	template.NotBefore, template.NotAfter = time.Now().Add(-time.Hour), time.Now().Add(validity)
	parent, signer := a.cert, a.key
	if parent == nil {
		parent, signer = template, key
	}
	der, err := x509.CreateCertificate(rand.Reader, template, parent, key.Public(), signer)
	if err != nil {
		return nil, nil, fmt.Errorf("sign certificate of %s: %w", template.Subject.CommonName, err)
	}
	if a.cert == nil {
		if a.cert, err = x509.ParseCertificate(der); err != nil {
			return nil, nil, fmt.Errorf("parse certificate: %w", err)
		}
		a.key = key
	}
	keyDER, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		return nil, nil, fmt.Errorf("encode key: %w", err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}),
		pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: keyDER}), nil
}

func (a *authority) path(name string) string { return filepath.Join(a.dir, name) }

func (a *authority) write(name string, certPEM, keyPEM []byte) error {
	for ext, data := range map[string][]byte{".crt": certPEM, ".key": keyPEM} {
		if err := os.WriteFile(a.path(name+ext), data, 0o600); err != nil {
			return fmt.Errorf("write certificate: %w", err)
		}
	}
	return nil
}

// client returns a client certificate.
func (a *authority) client(user string, groups ...string) (certPEM, keyPEM []byte, err error) {
	return a.certificate(&x509.Certificate{
		Subject:     pkix.Name{CommonName: user, Organization: groups},
		KeyUsage:    x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
	})
}

// files writes what the API server needs besides the authority's own
// certificate: its server certificate, its client certificate for the kubelets,
// and the key that signs the tokens of service accounts.
func (a *authority) files() error {
	certPEM, keyPEM, err := a.certificate(&x509.Certificate{
		Subject:     pkix.Name{CommonName: "kube-apiserver"},
		KeyUsage:    x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
		DNSNames:    []string{"kubernetes", "kubernetes.default", "kubernetes.default.svc", "kubernetes.default.svc.cluster.local", "localhost"},
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1), net.ParseIP(controlAddr), net.ParseIP(kubernetesService)},
	})
	if err != nil {
		return err
	}
	if err := a.write("apiserver", certPEM, keyPEM); err != nil {
		return err
	}
	if certPEM, keyPEM, err = a.client("kube-apiserver", "system:masters"); err != nil {
		return err
	}
	if err := a.write("apiserver-kubelet", certPEM, keyPEM); err != nil {
		return err
	}
	// The API server only uses the public key in this certificate.
	if certPEM, keyPEM, err = a.client("service-accounts"); err != nil {
		return err
	}
	return a.write("service-accounts", certPEM, keyPEM)
}

// kubeconfig writes a self-contained kubeconfig, and returns its path.
func (a *authority) kubeconfig(name, server, user string, groups ...string) (string, error) {
	certPEM, keyPEM, err := a.client(user, groups...)
	if err != nil {
		return "", err
	}
	c := clientcmdapi.NewConfig()
	c.Clusters["slipstream"] = &clientcmdapi.Cluster{Server: server, CertificateAuthorityData: a.pem}
	c.AuthInfos[user] = &clientcmdapi.AuthInfo{ClientCertificateData: certPEM, ClientKeyData: keyPEM}
	c.Contexts["slipstream"] = &clientcmdapi.Context{Cluster: "slipstream", AuthInfo: user}
	c.CurrentContext = "slipstream"
	path := a.path(name + ".kubeconfig")
	if err := clientcmd.WriteToFile(*c, path); err != nil {
		return "", fmt.Errorf("write kubeconfig of %s: %w", user, err)
	}
	return path, nil
}
