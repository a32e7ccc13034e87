// Package image pushes the image of the agents and workers from an archive, which make image or a release has written, to a
// registry, so that a cluster without access to any other can pull it. The program tools/image packs that archive.
package image

import (
	"context"
	"fmt"
	"net"

	"oras.land/oras-go/v2"
	"oras.land/oras-go/v2/content/oci"
	"oras.land/oras-go/v2/registry"
	"oras.land/oras-go/v2/registry/remote"
	"oras.land/oras-go/v2/registry/remote/auth"
	"oras.land/oras-go/v2/registry/remote/credentials"
	"oras.land/oras-go/v2/registry/remote/retry"
)

// Pushed is an image in a registry.
type Pushed struct {
	// Repository has the registry's address, Tag names the image there until it is pushed again, and Digest (sha256:…) names
	// it for good.
	Repository, Tag, Digest string
}

// Check returns an error if a reference is not that of an image in a registry: REGISTRY/NAME or REGISTRY/NAME:TAG.
func Check(reference string) error {
	_, err := parse(reference)
	return err
}

func parse(reference string) (registry.Reference, error) {
	r, err := registry.ParseReference(reference)
	if err != nil {
		return r, fmt.Errorf("%s: must be REGISTRY/NAME or REGISTRY/NAME:TAG: %w", reference, err)
	}
	if r.Reference != "" && r.ValidateReferenceAsDigest() == nil {
		return r, fmt.Errorf("%s: must be REGISTRY/NAME or REGISTRY/NAME:TAG, because the image decides about its digest", reference)
	}
	return r, nil
}

// Push copies the image of an archive, for all its platforms, to REGISTRY/NAME[:TAG]. The default tag is the first one in the archive: the
// version. It authenticates with what docker login has recorded, or with its credential helpers. It speaks HTTP to a registry on
// this machine's loopback interface, and to others only if plain is true.
func Push(ctx context.Context, archive, to string, plain bool) (p Pushed, err error) {
	target, err := parse(to)
	if err != nil {
		return p, err
	}
	store, err := oci.NewFromTar(ctx, archive)
	if err != nil {
		return p, fmt.Errorf("read the image in %s: %w", archive, err)
	}
	var tags []string
	if err := store.Tags(ctx, "", func(some []string) error { tags = append(tags, some...); return nil }); err != nil {
		return p, fmt.Errorf("read the image in %s: %w", archive, err)
	}
	images := make(map[string]bool) // by digest: one may have several tags
	for _, tag := range tags {
		d, err := store.Resolve(ctx, tag)
		if err != nil {
			return p, fmt.Errorf("read the image in %s: %w", archive, err)
		}
		images[d.Digest.String()] = true
	}
	if len(images) != 1 {
		return p, fmt.Errorf("%s has %d images, want one, as make image writes it", archive, len(images))
	}
	if target.Reference == "" {
		target.Reference = tags[0]
	}
	docker, err := credentials.NewStoreFromDocker(credentials.StoreOptions{})
	if err != nil {
		return p, fmt.Errorf("read the credentials of registries: %w", err)
	}
	repository := &remote.Repository{
		Reference: target, PlainHTTP: plain || loopback(target.Host()),
		Client: &auth.Client{Client: retry.DefaultClient, Cache: auth.NewCache(), Credential: credentials.Credential(docker)},
	}
	pushed, err := oras.Copy(ctx, store, tags[0], repository, target.Reference, oras.DefaultCopyOptions)
	if err != nil {
		return p, fmt.Errorf("push to %s: %w", target, err)
	}
	return Pushed{Repository: target.Registry + "/" + target.Repository, Tag: target.Reference, Digest: pushed.Digest.String()}, nil
}

func loopback(address string) bool {
	host, _, err := net.SplitHostPort(address)
	if err != nil {
		host = address
	}
	return host == "localhost" || net.ParseIP(host).IsLoopback()
}
