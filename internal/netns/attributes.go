//go:build linux

package netns

import (
	"encoding/binary"
	"errors"

	"golang.org/x/sys/unix"
)

// Attributes calls take for each netlink attribute in b, until one is truncated. The netlink
// package's function is not used: it fails if the last attribute lacks padding.
func Attributes(b []byte, take func(kind uint16, value []byte)) error {
	for len(b) >= unix.SizeofNlAttr {
		length := int(binary.NativeEndian.Uint16(b))
		if length < unix.SizeofNlAttr || length > len(b) {
			return errors.New("an attribute is truncated")
		}
		take(binary.NativeEndian.Uint16(b[2:])&^unix.NLA_F_NESTED, b[unix.SizeofNlAttr:length])
		b = b[min(len(b), (length+unix.NLA_ALIGNTO-1)&^(unix.NLA_ALIGNTO-1)):]
	}
	return nil
}
