# SPDX-License-Identifier: Apache-2.0
"""Traits of sockets."""

from __future__ import annotations

import fcntl
import os
import random
import socket
import struct
import time

from tests.subjects.odd.shared import (
    HOME,
    PATIENCE_S,
    Child,
    Look,
    Wrong,
    flow,
    here,
    same,
    trait,
)


@trait()
def pairs(dice: random.Random) -> Look:
    """Socket pairs of all kinds, with unread data in both directions, and one whose other end is closed."""
    kinds = (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_SEQPACKET)
    ends = [socket.socketpair(socket.AF_UNIX, kind) for kind in kinds]
    alone, gone = socket.socketpair()
    gone.send(b"last words")
    gone.close()
    for a, b in ends:
        a.send(b"to b 0")
        b.send(b"to a 0")
    while True:
        step = yield None
        for a, b in ends:
            same(f"{a.type} to b", b.recv(99), b"to b %d" % (step - 1))
            same(f"{a.type} to a", a.recv(99), b"to a %d" % (step - 1))
            a.send(b"to b %d" % step)
            b.send(b"to a %d" % step)
        if step < 3:
            same("last words", alone.recv(99, socket.MSG_PEEK), b"last words")
        elif step == 3:
            alone.recv(99)
        else:
            same("the end", alone.recv(99), b"")


@trait()
def pair_messages(dice: random.Random) -> Look:
    """Many unread messages of many lengths, whose bounds stay."""
    ends = [socket.socketpair(socket.AF_UNIX, kind) for kind in (socket.SOCK_DGRAM, socket.SOCK_SEQPACKET)]  # fmt: skip
    waiting: list[bytes] = []
    value = 0
    while True:
        while len(waiting) < 6:
            waiting.append(flow(dice.randrange(1000), dice.choice([1, 2, 700, 5000])))
            for a, _ in ends:
                a.send(waiting[-1])
        yield value
        for _ in range(dice.randrange(1, 6)):
            wanted = waiting.pop(0)
            value += len(wanted)
            for a, b in ends:
                same(f"message of {a.type}", b.recv(1 << 16), wanted)


@trait()
def half_closed(dice: random.Random) -> Look:
    """Streams of which one direction is shut down."""
    a, b = socket.socketpair()
    a.shutdown(socket.SHUT_WR)
    while True:
        step = yield None
        same("shut down", b.recv(9), b"")
        b.send(b"%d" % step)
        same("the other direction", a.recv(9), b"%d" % step)


def _serve(where: bytes) -> Look:
    """A listener: each step somebody connects, says something, and is answered."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(where)
        listener.listen(7)
        kept: list[socket.socket] = []
        while True:
            step = yield None
            near = socket.socket(socket.AF_UNIX)
            near.connect(where)
            far, _ = listener.accept()
            near.send(b"%d" % step)
            same("what arrives", far.recv(99), b"%d" % step)
            same("name", (near.getpeername(), far.getsockname()), (listener.getsockname(),) * 2)
            for one in kept:
                one.close()
            kept = [near, far]


@trait(may="connection to .* of the job itself")
def unix_path(dice: random.Random) -> Look:
    """A listener with a path."""
    return _serve(here("odd.sock"))


@trait(
    may="connection to .* of the job itself",
    apart="the image cannot be restored: Can't bind .* Address already in use",
)
def unix_by_descriptor(dice: random.Random) -> Look:
    """A listener whose path leads through a descriptor, as programs do whose paths are too long for a socket."""
    folder = os.open(HOME, os.O_PATH)
    return _serve(f"/proc/self/fd/{folder}/odd.sock".encode())


@trait(may="connection to .* of the job itself")
def unix_abstract(dice: random.Random) -> Look:
    """A listener without a file."""
    return _serve(b"\0odd" + HOME[-40:])


@trait(may="with \\d+ connections from outside.*try again")
def unix_waits(dice: random.Random) -> Look:
    """A connection that nobody has accepted yet."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(b"\0waits" + HOME[-40:])
        listener.listen(7)
        near = socket.socket(socket.AF_UNIX)
        near.connect(listener.getsockname())
        while True:
            step = yield None
            if step % 4 == 0:
                far, _ = listener.accept()
                near.send(b"x")
                same("what arrives", far.recv(9), b"x")
                far.close()
                near.close()
                near = socket.socket(socket.AF_UNIX)
                near.connect(listener.getsockname())


def _dgram(unread: bool) -> Look:
    folder = "senders" if unread else "dgram"
    os.mkdir(here(folder))
    names = [os.fsdecode(here(f"{folder}/{end}")) for end in ("in", "out")]
    receiver, sender = (socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) for _ in names)
    receiver.bind(names[0])
    sender.bind(names[1])
    sender.sendto(b"0", names[0])
    while True:
        step = yield None
        value, who = receiver.recvfrom(99)
        same("message", (value, who if unread else ""), (b"%d" % (step - 1), names[1] * unread))
        sender.sendto(b"now", names[0])
        same("message and sender", receiver.recvfrom(99), (b"now", names[1]))
        sender.sendto(b"%d" % step, names[0])


@trait()
def unix_dgram(dice: random.Random) -> Look:
    """A bound receiver with an unread message, and a sender with a name."""
    return _dgram(unread=False)


@trait(apart="the message comes back without its sender, without a word")
def unix_dgram_sender(dice: random.Random) -> Look:
    """The same; who sent the unread message is looked at too."""
    return _dgram(unread=True)


@trait()
def unix_deleted(dice: random.Random) -> Look:
    """A connection over a listener whose path and which itself are gone."""
    listener = socket.socket(socket.AF_UNIX)
    os.chdir(HOME)
    listener.bind("gone.sock")
    listener.listen()
    near = socket.socket(socket.AF_UNIX)
    near.connect("gone.sock")
    far, _ = listener.accept()
    os.unlink("gone.sock")
    listener.close()
    while True:
        step = yield None
        near.send(b"%d" % step)
        same("over a deleted name", far.recv(99), b"%d" % step)


@trait()
def descriptors_in_flight(dice: random.Random) -> Look:
    """A descriptor in a socket that nobody has received yet, which has its offset with others in common."""
    a, b = socket.socketpair()
    file = os.open(here("flight"), os.O_RDWR | os.O_CREAT)
    os.write(file, flow(0, 4096))
    os.lseek(file, 0, os.SEEK_SET)
    socket.send_fds(a, [b"x"], [file])
    at = 0
    while True:
        yield at
        _, (arrived,), _, _ = socket.recv_fds(b, 1, 1)
        same("read through the one that flew", os.read(arrived, 7), flow(at, 7))
        same("read through the one that stayed", os.read(file, 5), flow(at + 7, 5))
        at += 12
        os.close(arrived)
        socket.send_fds(a, [b"x"], [file])


@trait()
def shared_offsets(dice: random.Random) -> Look:
    """One open file under many descriptors and in two processes, and a second open of the same file."""
    file = os.open(here("shared"), os.O_RDWR | os.O_CREAT)
    os.write(file, flow(0, 9000))
    os.lseek(file, 0, os.SEEK_SET)
    high = fcntl.fcntl(file, fcntl.F_DUPFD, 300)
    other = os.open(here("shared"), os.O_RDONLY)
    child = Child(lambda word: os.read(file, int(word)) if word != "-" else b"")
    os.close(file)
    at = apart = 0
    while True:
        yield at
        mine, theirs = dice.randrange(1, 9), dice.randrange(1, 9)
        same("mine", os.read(high, mine), flow(at, mine))
        same("the child's", child.ask(str(theirs)), flow(at + mine, theirs))
        at += mine + theirs
        same("opened apart", os.read(other, 3), flow(apart, 3))
        apart += 3


def _tcp(family: int, address: str) -> Look:
    with socket.socket(family) as listener:
        listener.bind((address, 0))
        listener.listen(3)
        where = listener.getsockname()

        def first() -> None:
            global _line
            _line = socket.socket(family)
            _line.connect(where)

        def answer(word: str) -> object:
            at, count = map(int, word.split()[:2]) if word != "-" else (0, 0)
            _line.sendall(flow(at, count))
            return _line.recv(1 << 16) if word.count(" ") > 1 else b""

        child = Child(answer, first)
        line, _ = listener.accept()
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        line.settimeout(PATIENCE_S)
        names = line.getsockname(), line.getpeername()
        put, said = 2000, b""
        child.ask("0 2000")
        got = 0
        while True:
            step = yield said
            same("names", (line.getsockname(), line.getpeername()), names)
            same("no delay", line.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) > 0, True)
            line.send(b"%d" % step)
            heard = child.ask(f"{put} 700 and what comes")
            put += 700
            same("what the child hears", heard, b"%d" % step)
            count, said = 600, b""
            while len(said) < count:
                if not (piece := line.recv(count - len(said))):
                    raise Wrong("the child has closed the connection")
                said += piece
            same("what the child says", said, flow(got, count))
            got += count


_line: socket.socket


@trait()
def tcp(dice: random.Random) -> Look:
    """A connection to a child, with data on its way."""
    return _tcp(socket.AF_INET, "127.0.0.1")


@trait()
def tcp6(dice: random.Random) -> Look:
    """The same over IPv6."""
    return _tcp(socket.AF_INET6, "::1")


@trait(may="not accepted|In-flight")
def tcp_listener(dice: random.Random) -> Look:
    """A listener with connections that come, are half closed, and go."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        while True:
            step = yield None
            near = socket.create_connection(listener.getsockname())
            far, _ = listener.accept()
            near.sendall(b"%d" % step)
            near.shutdown(socket.SHUT_WR)
            same("what comes", far.recv(99), b"%d" % step)
            same("its end", far.recv(99), b"")
            time.sleep(0.002)
            far.close()
            near.close()


@trait(apart="the unread bytes are lost, without a word of them")
def tcp_closed(dice: random.Random) -> Look:
    """A connection whose other end is closed, with unread bytes."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
    near.sendall(flow(0, 400))
    near.close()
    got = 0
    while True:
        yield got
        value = far.recv(9)
        same("unread bytes", value, flow(got, min(9, 400 - got)))
        got += len(value)


@trait()
def socket_options(dice: random.Random) -> Look:
    """Options of sockets."""
    unix, other = socket.socketpair()
    listener = socket.create_server(("127.0.0.1", 0))
    udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    udp.bind(("127.0.0.1", 0))
    sol, every = socket.SOL_SOCKET, ("SNDBUF", "RCVBUF", "PRIORITY", "RCVLOWAT", "RCVTIMEO")
    more = {"PASSCRED": unix, "KEEPALIVE": listener, "REUSEADDR": listener, "BROADCAST": udp}
    names = [(one, f"SO_{name}") for one in (unix, listener, udp) for name in every]
    names += [(one, f"SO_{name}") for name, one in more.items()]
    values = {"SO_SNDBUF": 30_000, "SO_RCVBUF": 50_000, "SO_PRIORITY": 3, "SO_RCVLOWAT": 2}
    for one, name in names:
        value = struct.pack("qq", 7, 250_000) if name == "SO_RCVTIMEO" else values.get(name, 1)
        one.setsockopt(sol, getattr(socket, name, 20), value)

    def look() -> list[object]:
        return [
            (one.family, one.type, name, one.getsockopt(sol, getattr(socket, name, 20), 16))
            for one, name in names
        ]

    wanted = look()
    while True:
        yield None
        for found, before in zip(look(), wanted):
            same("option", found, before)
        assert other.fileno() > 0


@trait(apart="CRIU cannot dump it: Control messages in queue, not supported")
def credentials_unread(dice: random.Random) -> Look:
    """An unread message to a socket that is told who sent it."""
    a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    a.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    b.send(b"0")
    while True:
        step = yield None
        value, [(_, _, who)], _, _ = a.recvmsg(99, 99)
        same("message", (value, struct.unpack("3i", who)[0]), (b"%d" % (step - 1), os.getpid()))
        b.send(b"%d" % step)


@trait(may="unread bytes")
def udp(dice: random.Random) -> Look:
    """Datagram sockets, one of them connected."""
    a, b = (socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in "ab")
    a.bind(("127.0.0.1", 0))
    b.connect(a.getsockname())
    a.settimeout(PATIENCE_S)
    b.settimeout(PATIENCE_S)
    while True:
        step = yield None
        b.send(b"%d" % step)
        value, sender = a.recvfrom(99)
        same("datagram", (value, sender), (b"%d" % step, b.getsockname()))
        a.sendto(b"back", sender)
        same("answer", b.recv(99), b"back")


@trait(may="unread messages", root=True)
def other_sockets(dice: random.Random) -> Look:
    """Netlink, packet and raw sockets."""
    netlink = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE)
    netlink.bind((0, 0))
    packet = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
    raw = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP)
    names = netlink.getsockname()
    while True:
        yield packet.type + raw.type
        # RTM_GETLINK of interface 1
        netlink.send(struct.pack("=IHHIIBBHiII", 32, 18, 1, 7, 0, 0, 0, 0, 1, 0, 0))
        same("type of the answer", struct.unpack_from("=IH", netlink.recv(1 << 16))[1], 16)
        same("its name", netlink.getsockname(), names)
