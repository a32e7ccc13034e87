// Command latte stands in for Microsoft's: it takes the same options, exchanges the same messages, and prints
// the same lines. The figures of the machine are made up.
package main

import (
	"fmt"
	"io"
	"log"
	"net"
	"os"
	"strconv"
	"strings"
	"time"
)

func main() {
	protocol, address, client, size, limit, iterations := "tcp", "", false, 4, 10*time.Second, 0
	for i := 1; i < len(os.Args); i++ {
		value := func() string { i++; return os.Args[i] }
		number := func() int {
			n, err := strconv.Atoi(value())
			if err != nil {
				log.Fatal(err)
			}
			return n
		}
		switch os.Args[i] {
		case "-tcp", "-udp":
			protocol = os.Args[i][1:]
		case "-a":
			address = value()
		case "-c":
			client = true
		case "-m":
			size = number()
		case "-t":
			limit = time.Duration(number()) * time.Second
		case "-i":
			iterations = number()
		case "-hist":
		case "-hl", "-hc":
			number()
		default:
			log.Fatalf("unknown option %s", os.Args[i])
		}
	}
	fmt.Printf("Protocol      %s\n", strings.ToUpper(protocol))
	buf := make([]byte, size)
	if !client {
		serve(protocol, address, buf)
		return
	}
	c, err := net.Dial(protocol, address)
	if err != nil {
		log.Fatal(err)
	}
	buckets := make([]int, 9998)
	n, began := 0, time.Now()
	for ; n < iterations || iterations == 0 && time.Since(began) < limit; n++ {
		sent := time.Now()
		if _, err := c.Write(buf); err != nil {
			log.Fatal(err)
		}
		if _, err := io.ReadFull(c, buf); err != nil {
			log.Fatal(err)
		}
		if us := time.Since(sent).Microseconds(); us < int64(len(buckets)) {
			buckets[us]++
		}
	}
	took := time.Since(began)
	fmt.Printf("SendMethod    Blocking\nReceiveMethod Blocking\nSO_SNDBUF     Default\nSO_RCVBUF     Default\nMsgSize(byte) %d\nIterations    %d\n", size, n)
	fmt.Printf("Latency(usec) %.2f\nCPU(%%)        2.8\n", took.Seconds()*1e6/float64(n))
	for name, each := range map[string]float64{"CtxSwitch/sec": 2.29, "SysCall/sec": 6.99, "Interrupt/sec": 3.86} {
		fmt.Printf("%-13s %.0f     (%.2f/iteration)\n", name, each*float64(n)/took.Seconds(), each)
	}
	fmt.Print("\nInterval(usec)   Frequency\n")
	for us, count := range buckets {
		fmt.Printf("%7d          %d\n", us, count)
	}
}

// serve answers one client.
func serve(protocol, address string, buf []byte) {
	if protocol == "udp" {
		c, err := net.ListenPacket(protocol, address)
		if err != nil {
			log.Fatal(err)
		}
		for {
			n, from, err := c.ReadFrom(buf)
			if err != nil {
				log.Fatal(err)
			}
			_, _ = c.WriteTo(buf[:n], from)
		}
	}
	l, err := net.Listen(protocol, address)
	if err != nil {
		log.Fatal(err)
	}
	c, err := l.Accept()
	if err != nil {
		log.Fatal(err)
	}
	for {
		if _, err := io.ReadFull(c, buf); err != nil {
			return
		}
		if _, err := c.Write(buf); err != nil {
			return
		}
	}
}
