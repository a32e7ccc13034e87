// Package shell quotes commands as one types them into a POSIX shell. A recorded command is text that later versions
// still read, so the text never changes: libraries differ from it, and from version to version, in what they quote.
package shell

import (
	"errors"
	"regexp"
	"strings"
)

var safeWord = regexp.MustCompile(`^[A-Za-z0-9_@%+=:,./-]+$`)

// Quote quotes a word for a shell, if it needs quotes.
func Quote(word string) string {
	if safeWord.MatchString(word) {
		return word
	}
	return "'" + strings.ReplaceAll(word, "'", `'\''`) + "'"
}

// Join returns a command as one types it into a shell, so that it shows where each argument ends.
func Join(argv []string) string {
	words := make([]string, len(argv))
	for i, a := range argv {
		words[i] = Quote(a)
	}
	return strings.Join(words, " ")
}

// Split splits the output of Join into words. Of a shell's syntax it knows only spaces, single quotes, and
// backslashes outside quotes. An unterminated quote is an error.
func Split(text string) (words []string, err error) {
	word, quoted, begun := "", false, false
	for i := 0; i < len(text); i++ {
		switch c := text[i]; {
		case c == '\'':
			quoted, begun = !quoted, true
		case quoted:
			word += text[i : i+1]
		case c == ' ':
			if begun {
				words = append(words, word)
			}
			word, begun = "", false
		case c == '\\' && i+1 < len(text):
			i++
			word, begun = word+text[i:i+1], true
		default:
			word, begun = word+text[i:i+1], true
		}
	}
	if quoted {
		return nil, errors.New("a quote does not end")
	}
	if begun {
		words = append(words, word)
	}
	return words, nil
}
