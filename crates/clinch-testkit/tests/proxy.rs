//! Each fault does what it says, to the byte.

#![allow(clippy::expect_used, clippy::unwrap_used, reason = "test code")]

use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use clinch_testkit::{Direction, Proxy, Redis, Resp, until};

/// A server that answers each byte with its successor, and remembers what it has read.
struct Echo {
    listener: TcpListener,
    heard: Arc<Mutex<Vec<u8>>>,
}

impl Echo {
    fn start() -> Echo {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let heard = Arc::new(Mutex::new(Vec::new()));
        let (accepting, hears) = (listener.try_clone().unwrap(), Arc::clone(&heard));
        std::thread::spawn(move || {
            for connection in accepting.incoming() {
                let (mut connection, hears) = (connection.unwrap(), Arc::clone(&hears));
                std::thread::spawn(move || {
                    let mut byte = [0];
                    while connection.read_exact(&mut byte).is_ok() {
                        hears.lock().unwrap().extend(byte);
                        let _ = connection.write_all(&byte.map(|byte| byte + 1));
                    }
                });
            }
        });
        Echo { listener, heard }
    }

    fn proxy(&self) -> Proxy {
        Proxy::start(self.listener.local_addr().unwrap())
    }

    fn heard(&self) -> Vec<u8> {
        self.heard.lock().unwrap().clone()
    }
}

fn connect(proxy: &Proxy) -> TcpStream {
    let stream = TcpStream::connect(proxy.addr()).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    stream
}

fn ask(stream: &mut TcpStream, request: &[u8]) -> Vec<u8> {
    stream.write_all(request).unwrap();
    let mut reply = vec![0; request.len()];
    stream.read_exact(&mut reply).unwrap();
    reply
}

/// What arrives until the connection is reset.
fn read_to_reset(stream: &mut TcpStream) -> Vec<u8> {
    let mut all = Vec::new();
    assert_eq!(stream.read_to_end(&mut all).unwrap_err().kind(), ErrorKind::ConnectionReset);
    all
}

/// Nothing can be read now.
fn assert_silent(stream: &mut TcpStream) {
    stream.set_nonblocking(true).unwrap();
    assert_eq!(stream.read(&mut [0]).unwrap_err().kind(), ErrorKind::WouldBlock);
    stream.set_nonblocking(false).unwrap();
}

#[test]
fn passes_everything_and_its_end() {
    let echo = Echo::start();
    let proxy = echo.proxy();
    let mut stream = connect(&proxy);
    assert_eq!(ask(&mut stream, b"abc"), b"bcd");
    assert_eq!(proxy.forwarded(Direction::Requests), 3);
    assert_eq!(proxy.forwarded(Direction::Replies), 3);
    assert_eq!((proxy.connections(), proxy.accepted()), (1, 1));
    stream.shutdown(std::net::Shutdown::Write).unwrap();
    assert_eq!(stream.read(&mut [0]).unwrap(), 0, "the server has heard of the end");
    until("the connection has ended", || proxy.connections() == 0);
}

#[test]
fn cuts_after_exactly_that_many_bytes_of_requests() {
    for bytes in 1..6 {
        let echo = Echo::start();
        let proxy = echo.proxy();
        let (mut first, mut second) = (connect(&proxy), connect(&proxy));
        assert_eq!(ask(&mut first, b"x"), b"y");
        proxy.cut_after(Direction::Requests, bytes + 1);
        assert_eq!(ask(&mut second, b"x"), b"y");
        first.write_all(b"abcdef").unwrap();
        let replies = read_to_reset(&mut first);
        assert!(b"bcdefg".starts_with(&replies));
        let heard = [b"xx", &b"abcdef"[..usize::try_from(bytes).unwrap()]].concat();
        until("the server has heard what was forwarded", || echo.heard() == heard);
        assert_eq!(proxy.forwarded(Direction::Requests), bytes + 2);
        assert_eq!((proxy.cuts(), proxy.connections()), (1, 1));
        assert_eq!(ask(&mut second, b"still here"), b"tujmm!ifsf");
        assert_eq!(echo.heard().len(), heard.len() + 10);
    }
}

#[test]
fn cuts_after_exactly_that_many_bytes_of_replies() {
    for bytes in 0..6 {
        let echo = Echo::start();
        let proxy = echo.proxy();
        let mut stream = connect(&proxy);
        proxy.cut_after(Direction::Replies, bytes);
        stream.write_all(b"abcdef").unwrap();
        assert_eq!(read_to_reset(&mut stream), b"bcdefg"[..usize::try_from(bytes).unwrap()]);
        assert_eq!(proxy.forwarded(Direction::Replies), bytes);
        until("all requests have passed", || echo.heard().starts_with(b"a"));
        assert_eq!(ask(&mut connect(&proxy), b"again"), b"bhbjo");
    }
}

#[test]
fn a_command_whose_reply_is_cut_was_executed() {
    let redis = Redis::start();
    let proxy = Proxy::start(redis.addr());
    for cut in 0..4 {
        let mut client = Resp::connect(proxy.addr()).unwrap();
        proxy.cut_after(Direction::Replies, cut);
        client.try_call(&["INCR", "n"]).unwrap_err();
    }
    assert_eq!(redis.call(&["GET", "n"]).int(), 4);
    // The last byte of the request decides.
    let request = b"*2\r\n$4\r\nINCR\r\n$1\r\nn\r\n".len() as u64;
    for cut in 0..request {
        let mut client = Resp::connect(proxy.addr()).unwrap();
        proxy.cut_after(Direction::Requests, cut);
        client.try_call(&["INCR", "n"]).unwrap_err();
    }
    assert_eq!(redis.call(&["GET", "n"]).int(), 4);
    proxy.cut_after(Direction::Requests, request);
    let mut client = Resp::connect(proxy.addr()).unwrap();
    client.try_call(&["INCR", "n"]).unwrap_err();
    until("the command was executed", || redis.call(&["GET", "n"]).int() == 5);
}

#[test]
fn resets_all_and_accepts_again() {
    let echo = Echo::start();
    let proxy = echo.proxy();
    let mut streams = [(); 3].map(|()| connect(&proxy));
    proxy.cut_all();
    assert_eq!(proxy.connections(), 0);
    for stream in &mut streams {
        assert_eq!(read_to_reset(stream), b"");
    }
    assert_eq!(ask(&mut connect(&proxy), b"a"), b"b");
}

#[test]
fn refuses_and_accepts_again() {
    let echo = Echo::start();
    let proxy = echo.proxy();
    let mut before = connect(&proxy);
    proxy.refuse(true);
    assert_eq!(TcpStream::connect(proxy.addr()).unwrap_err().kind(), ErrorKind::ConnectionRefused);
    assert_eq!(ask(&mut before, b"a"), b"b");
    proxy.refuse(false);
    assert_eq!(ask(&mut connect(&proxy), b"a"), b"b");
}

#[test]
fn a_black_hole_gives_back_what_fell_in() {
    let echo = Echo::start();
    let proxy = echo.proxy();
    let mut before = connect(&proxy);
    assert_eq!(ask(&mut before, b"a"), b"b");
    proxy.black_hole(true);
    let mut inside = connect(&proxy);
    before.write_all(b"b").unwrap();
    inside.write_all(b"c").unwrap();
    inside.shutdown(std::net::Shutdown::Write).unwrap();
    until("both stand", || proxy.connections() == 2);
    assert_eq!(echo.heard(), b"a");
    assert_silent(&mut before);
    proxy.black_hole(false);
    let mut reply = Vec::new();
    inside.read_to_end(&mut reply).unwrap();
    assert_eq!(reply, b"d");
    let mut reply = [0];
    before.read_exact(&mut reply).unwrap();
    assert_eq!(&reply, b"c");
}

#[test]
fn the_connections_of_one_process_can_be_held() {
    let echo = Echo::start();
    let proxy = echo.proxy();
    let mut before = connect(&proxy);
    assert_eq!(ask(&mut before, b"a"), b"b");
    // No process of ours.
    proxy.hold_process(Some(1));
    assert_eq!(ask(&mut before, b"b"), b"c");
    proxy.hold_process(Some(std::process::id()));
    let mut inside = connect(&proxy);
    before.write_all(b"c").unwrap();
    inside.write_all(b"d").unwrap();
    until("both stand", || proxy.connections() == 2);
    assert_silent(&mut before);
    assert_silent(&mut inside);
    proxy.hold_process(None);
    let mut reply = [0];
    before.read_exact(&mut reply).unwrap();
    assert_eq!(&reply, b"d");
    inside.read_exact(&mut reply).unwrap();
    assert_eq!(&reply, b"e");
}

#[test]
fn what_is_on_its_way_can_be_overtaken_by_what_comes_later() {
    let echo = Echo::start();
    let proxy = echo.proxy();
    let mut before = connect(&proxy);
    assert_eq!(ask(&mut before, b"a"), b"b");
    proxy.strand(true);
    before.write_all(b"c").unwrap();
    assert_eq!(ask(&mut connect(&proxy), b"e"), b"f");
    assert_silent(&mut before);
    proxy.strand(false);
    let mut reply = [0];
    before.read_exact(&mut reply).unwrap();
    assert_eq!(&reply, b"d");
    assert_eq!(echo.heard(), b"aec");
}

#[test]
fn the_end_of_a_connection_can_be_held_while_bytes_pass() {
    let echo = Echo::start();
    let proxy = echo.proxy();
    proxy.hold_ends(true);
    let mut stream = connect(&proxy);
    stream.write_all(b"a").unwrap();
    stream.shutdown(std::net::Shutdown::Write).unwrap();
    let mut reply = [0];
    stream.read_exact(&mut reply).unwrap();
    assert_eq!(&reply, b"b");
    assert_silent(&mut stream);
    proxy.hold_ends(false);
    assert_eq!(stream.read(&mut reply).unwrap(), 0);
}

#[test]
fn held_replies_come_later() {
    let echo = Echo::start();
    let proxy = echo.proxy();
    let mut stream = connect(&proxy);
    proxy.hold_replies(true);
    stream.write_all(b"abc").unwrap();
    until("the requests have passed", || echo.heard() == b"abc");
    assert_silent(&mut stream);
    assert_eq!(proxy.forwarded(Direction::Replies), 0);
    proxy.hold_replies(false);
    let mut reply = [0; 3];
    stream.read_exact(&mut reply).unwrap();
    assert_eq!(&reply, b"bcd");
}

#[test]
fn delays_each_way_and_keeps_the_order() {
    let echo = Echo::start();
    let proxy = echo.proxy();
    let mut stream = connect(&proxy);
    assert_eq!(ask(&mut stream, b"a"), b"b");
    let each_way = Duration::from_millis(50);
    proxy.delay(each_way);
    let start = Instant::now();
    assert_eq!(ask(&mut stream, b"a"), b"b");
    assert!(start.elapsed() >= 2 * each_way, "{:?}", start.elapsed());
    proxy.delay(Duration::ZERO);
    assert_eq!(ask(&mut stream, b"abc"), b"bcd");
}

#[test]
fn large_transfers_arrive_whole() {
    let echo = Echo::start();
    let proxy = echo.proxy();
    let mut stream = connect(&proxy);
    let mut writing = stream.try_clone().unwrap();
    const SIZE: usize = 300_000;
    let writer = std::thread::spawn(move || writing.write_all(&vec![b'a'; SIZE]).unwrap());
    let mut reply = vec![0; SIZE];
    stream.read_exact(&mut reply).unwrap();
    assert!(reply.iter().all(|&byte| byte == b'b'));
    writer.join().unwrap();
}

#[test]
fn no_server_is_a_reset_and_no_proxy_is_refused() {
    let echo = TcpListener::bind("127.0.0.1:0").unwrap();
    let proxy = Proxy::start(echo.local_addr().unwrap());
    let mut stream = connect(&proxy);
    until("it is connected", || proxy.connections() == 1);
    drop(echo);
    assert_eq!(read_to_reset(&mut stream), b"", "the server's end is passed on");
    assert_eq!(read_to_reset(&mut connect(&proxy)), b"");
    let addr = proxy.addr();
    drop(proxy);
    assert_eq!(TcpStream::connect(addr).unwrap_err().kind(), ErrorKind::ConnectionRefused);
}
