// A client with the lock of etcd's own Go library: concurrency.Mutex.
//
// Reads orders, one a line, and answers each with a line:
//
//	lock          locked REVISION
//	try           yes or no, after a short wait
//	unlock        unlocked
//	work DIR N    done OVERLAPS, after N critical sections in which a counter in DIR is read and written
package main

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"go.etcd.io/etcd/clientv3"
	"go.etcd.io/etcd/clientv3/concurrency"
)

func check(err error) {
	if err != nil {
		fmt.Println("error", err)
		os.Exit(1)
	}
}

func section(dir string) (overlaps int) {
	inside, counter := filepath.Join(dir, "inside"), filepath.Join(dir, "counter")
	if os.Mkdir(inside, 0o755) != nil {
		overlaps++
	}
	text, err := os.ReadFile(counter)
	check(err)
	count, err := strconv.Atoi(strings.TrimSpace(string(text)))
	check(err)
	time.Sleep(500 * time.Microsecond)
	check(os.WriteFile(counter, []byte(strconv.Itoa(count+1)), 0o644))
	if os.Remove(inside) != nil {
		overlaps++
	}
	return overlaps
}

func main() {
	ctx := context.Background()
	client, err := clientv3.New(clientv3.Config{Endpoints: []string{os.Args[1]}, DialTimeout: 10 * time.Second})
	check(err)
	session, err := concurrency.NewSession(client)
	check(err)
	mutex := concurrency.NewMutex(session, os.Args[2])
	fmt.Println("ready")
	orders := bufio.NewScanner(os.Stdin)
	for orders.Scan() {
		words := strings.Fields(orders.Text())
		switch words[0] {
		case "lock":
			check(mutex.Lock(ctx))
			fmt.Println("locked", mutex.Header().Revision)
		case "try":
			brief, cancel := context.WithTimeout(ctx, 200*time.Millisecond)
			err := mutex.Lock(brief)
			cancel()
			if err == nil {
				check(mutex.Unlock(ctx))
				fmt.Println("yes")
			} else if brief.Err() != nil {
				fmt.Println("no")
			} else {
				check(err)
			}
		case "unlock":
			check(mutex.Unlock(ctx))
			fmt.Println("unlocked")
		case "work":
			overlaps := 0
			turns, err := strconv.Atoi(words[2])
			check(err)
			for ; turns > 0; turns-- {
				check(mutex.Lock(ctx))
				overlaps += section(words[1])
				check(mutex.Unlock(ctx))
			}
			fmt.Println("done", overlaps)
		}
	}
}
