package bundle

import (
	"archive/zip"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"regexp"
	"strings"

	"slipstream.dev/internal/record"
)

const (
	// format is the version of the format of bundles. It grows when a program would misread a bundle.
	format       = 1
	manifestFile = "manifest.json"
	// lines is the ending of files whose lines have hashes of their own.
	lines = ".jsonl"
	// most bounds a bundle, in bytes, because it is held in memory. It is above the limits of a results folder.
	most = 5 << 28
)

// manifest is manifest.json.
type manifest struct {
	// Bundle is the version of the format.
	Bundle  int     `json:"bundle"`
	Program Program `json:"slipstream"`
	// Result is the name of the results folder.
	Result string `json:"result"`
	Files  []sum  `json:"files"`
}

// sum has the SHA-256 of a file, and that of each line if it has lines.
type sum struct {
	Name   string   `json:"name"`
	SHA256 string   `json:"sha256"`
	Lines  []string `json:"lines,omitempty"`
}

func sumOf(f file) sum {
	s := sum{Name: f.name, SHA256: hash(f.data)}
	if strings.HasSuffix(f.name, lines) {
		for line := range bytes.Lines(f.data) {
			s.Lines = append(s.Lines, hash(line))
		}
	}
	return s
}

// write writes files into a folder of a ZIP archive. They are stored uncompressed and without times. So the files determine every
// byte of the archive, whatever program wrote it, it contains nothing else, and it unpacks into no more than its size. The
// histograms and series in the trials are compressed already.
func write(w io.Writer, folder string, files []file) error {
	z := zip.NewWriter(w)
	for _, f := range files {
		size := uint64(len(f.data))
		h := &zip.FileHeader{Name: folder + "/" + f.name, Method: zip.Store, CRC32: crc32.ChecksumIEEE(f.data), CompressedSize64: size, UncompressedSize64: size}
		h.SetMode(0o644)
		out, err := z.CreateRaw(h) // Create would put sizes behind the data, where some programs do not read them
		if err == nil {
			_, err = out.Write(f.data)
		}
		if err != nil {
			return fmt.Errorf("write %s: %w", f.name, err)
		}
	}
	return z.Close()
}

// Bundle is a bundle that was read whole. It may be somebody else's.
type Bundle struct {
	manifest manifest
	files    fileSet
	hash     string
}

var (
	goodFolder = regexp.MustCompile(`^[A-Za-z0-9_+][A-Za-z0-9._+-]*$`)
	goodName   = regexp.MustCompile(`^(figures/)?[a-z0-9][a-z0-9._+-]*$`)
)

// errOther is the error for whatever write would not have written: links, other folders, two files of one name, hidden bytes.
var errOther = errors.New("not as slipstream report --bundle writes it: it has other files, or other bytes around them")

// Open reads a bundle. It does not say whether the files are those that were sealed: see Verify.
func Open(from io.Reader) (*Bundle, error) {
	data, err := record.ReadAtMost(from, most)
	if err != nil {
		return nil, err
	}
	z, err := zip.NewReader(bytes.NewReader(data), int64(len(data)))
	if err != nil {
		return nil, fmt.Errorf("not a bundle: %w", err)
	}
	b := &Bundle{hash: hash(data)}
	all, folder, err := unpack(z, uint64(len(data)))
	if err != nil {
		return nil, err
	}
	again := &comparer{want: data}
	if err := write(again, folder, all); err != nil || len(again.want) > 0 {
		return nil, errOther
	}
	d := json.NewDecoder(bytes.NewReader(all[0].data))
	d.DisallowUnknownFields()
	if err := d.Decode(&b.manifest); err != nil {
		return nil, fmt.Errorf("%s: %w", manifestFile, err)
	}
	if b.files = all[1:]; b.manifest.Bundle > format {
		return nil, fmt.Errorf("it has format %d and this program reads up to %d: verify it with slipstream %s, which sealed it, or a later one", b.manifest.Bundle, format, b.manifest.Program.Version)
	}
	return b, nil
}

// unpack returns the files of an archive, the manifest first, and their folder. limit is the size of the archive.
func unpack(z *zip.Reader, limit uint64) (all []file, folder string, err error) {
	var size uint64
	seen := make(map[string]bool)
	for _, f := range z.File {
		in, name, _ := strings.Cut(f.Name, "/")
		if size += f.UncompressedSize64; f.Method != zip.Store || f.UncompressedSize64 > limit || size > limit || !goodFolder.MatchString(in) || !goodName.MatchString(name) {
			return nil, "", fmt.Errorf("%q: %w", f.Name, errOther)
		}
		if folder == "" {
			folder = in
		}
		r, err := f.Open()
		if err != nil {
			return nil, "", fmt.Errorf("%s: %w", f.Name, err)
		}
		data, err := io.ReadAll(r)
		if err != nil {
			return nil, "", fmt.Errorf("%s: %w", f.Name, err)
		}
		if in != folder || seen[name] {
			return nil, "", fmt.Errorf("%q: %w", f.Name, errOther)
		}
		all, seen[name] = append(all, file{name, data}), true
	}
	if len(all) == 0 || all[0].name != manifestFile {
		return nil, "", fmt.Errorf("not a bundle: %s is not its first file", manifestFile)
	}
	return all, folder, nil
}

// comparer fails for writes other than the bytes that it wants.
type comparer struct{ want []byte }

func (c *comparer) Write(p []byte) (int, error) {
	if !bytes.HasPrefix(c.want, p) {
		return 0, errOther
	}
	c.want = c.want[len(p):]
	return len(p), nil
}

// Result returns the result, if no file was changed since it was sealed. An error may be a Difference.
func (b *Bundle) Result() (*Result, error) {
	if err := b.changed(); err != nil {
		return nil, err
	}
	return read(b.files.ReadFile)
}

// changed returns an error that names the first file, and line of it, that is not as it was sealed.
func (b *Bundle) changed() error {
	for i, f := range b.files {
		if i >= len(b.manifest.Files) || b.manifest.Files[i].Name != f.name {
			return Difference{f.name, "is not in the manifest"}
		}
		if err := b.manifest.Files[i].compare(f); err != nil {
			return err
		}
	}
	if missing := b.manifest.Files[min(len(b.files), len(b.manifest.Files)):]; len(missing) > 0 {
		return Difference{missing[0].Name, "was sealed, and is missing"}
	}
	return nil
}

func (s sum) compare(f file) error {
	is := sumOf(f)
	for i := range max(len(s.Lines), len(is.Lines)) {
		switch {
		case i >= len(s.Lines):
			return Difference{f.name, fmt.Sprintf("line %d was added after it was sealed", i+1)}
		case i >= len(is.Lines):
			return Difference{f.name, fmt.Sprintf("line %d was sealed, and is missing", i+1)}
		case s.Lines[i] != is.Lines[i]:
			return Difference{f.name, fmt.Sprintf("line %d (%s) was changed after it was sealed", i+1, lineOf(f.data, i))}
		}
	}
	if s.SHA256 != is.SHA256 {
		return Difference{f.name, "was changed after it was sealed"}
	}
	return nil
}

// lineOf says which trial a line is.
func lineOf(data []byte, i int) string {
	for line := range bytes.Lines(data) {
		if i--; i < 0 {
			var t record.Trial
			if err := record.Decode(line, &t); err != nil {
				return "no trial any more"
			}
			return describe(t)
		}
	}
	return ""
}
