// Waiters for one lock that use etcd's own Go library: concurrency.Mutex.
//
//	go_mutex contend|hold|wait ENDPOINT KEY TTL WAITERS
//
// Speaks to the bench as its own workers do: says on stdout when it is ready and what it found, is told on stdin when
// to begin, and ends when stdin does. All waiters share one client, as tasks of one process would; each has a session,
// since a session is what owns a lock.
package main

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"strconv"
	"sync"
	"syscall"
	"time"
	"unsafe"

	"go.etcd.io/etcd/clientv3"
	"go.etcd.io/etcd/clientv3/concurrency"
)

func check(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, "go_mutex:", err)
		os.Exit(1)
	}
}

// CLOCK_MONOTONIC, which all processes of the host share; Go's own clock has no common zero.
func now() int64 {
	const monotonic = 1
	var at syscall.Timespec
	_, _, errno := syscall.Syscall(syscall.SYS_CLOCK_GETTIME, monotonic, uintptr(unsafe.Pointer(&at)), 0)
	if errno != 0 {
		check(errno)
	}
	return at.Nano()
}

func cpuTime() int64 {
	var used syscall.Rusage
	check(syscall.Getrusage(syscall.RUSAGE_SELF, &used))
	return used.Utime.Nano() + used.Stime.Nano()
}

type hold struct{ want, got, release int64 }

func contend(mutex *concurrency.Mutex, end int64, length syscall.Timespec) (holds []hold) {
	ctx := context.Background()
	for {
		want := now()
		if want >= end {
			return holds
		}
		check(mutex.Lock(ctx))
		got := now()
		// Sleeps as the others do. Go's timers are later.
		if length.Nano() > 0 {
			_ = syscall.Nanosleep(&length, nil)
		}
		release := now()
		check(mutex.Unlock(ctx))
		holds = append(holds, hold{want, got, release})
	}
}

func contest(mutexes []*concurrency.Mutex) {
	fmt.Println("ready")
	var start, end, length int64
	_, err := fmt.Scan(&start, &end, &length)
	check(err)
	time.Sleep(time.Duration(start - now()))
	used := cpuTime()
	all := make([][]hold, len(mutexes))
	var group sync.WaitGroup
	for at, mutex := range mutexes {
		group.Add(1)
		go func(at int, mutex *concurrency.Mutex) {
			defer group.Done()
			all[at] = contend(mutex, end, syscall.NsecToTimespec(length))
		}(at, mutex)
	}
	group.Wait()
	used = cpuTime() - used
	out := bufio.NewWriter(os.Stdout)
	for at, holds := range all {
		if at > 0 {
			fmt.Fprintln(out, "next")
		}
		for _, hold := range holds {
			fmt.Fprintln(out, hold.want, hold.got, hold.release)
		}
	}
	fmt.Fprintln(out, "cpu", used)
	check(out.Flush())
}

func waitForEnd() {
	_, _ = os.Stdin.Read(make([]byte, 1))
}

func main() {
	asked := now()
	role, endpoint, key := os.Args[1], os.Args[2], os.Args[3]
	ttl, err := strconv.Atoi(os.Args[4])
	check(err)
	waiters, err := strconv.Atoi(os.Args[5])
	check(err)
	client, err := clientv3.New(clientv3.Config{Endpoints: []string{endpoint}, DialTimeout: 10 * time.Second})
	check(err)
	var mutexes []*concurrency.Mutex
	var sessions []*concurrency.Session
	for len(mutexes) < waiters {
		session, err := concurrency.NewSession(client, concurrency.WithTTL(ttl))
		check(err)
		sessions = append(sessions, session)
		mutexes = append(mutexes, concurrency.NewMutex(session, key))
	}
	switch role {
	case "contend":
		contest(mutexes)
	case "hold":
		// The lease was granted between these two moments.
		check(mutexes[0].Lock(context.Background()))
		fmt.Printf("ready\n%d %d\n", asked, now())
		waitForEnd()
		check(mutexes[0].Unlock(context.Background()))
	case "wait":
		go func() {
			waitForEnd()
			os.Exit(1)
		}()
		fmt.Println("ready")
		check(mutexes[0].Lock(context.Background()))
		fmt.Println(now())
		check(mutexes[0].Unlock(context.Background()))
	}
	for _, session := range sessions {
		check(session.Close())
	}
}
