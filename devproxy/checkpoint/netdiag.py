# SPDX-License-Identifier: Apache-2.0
"""Which sockets the kernel has, and who their peers are, read from outside of the process that holds them.

unix sockets: sock_diag netlink (linux/unix_diag.h), since /proc/net/unix does not tell the peer. Internet sockets: the
tables of /proc/PID/net, which show the network namespace of that process. Nothing is stopped, nothing is written.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import struct
from dataclasses import dataclass

_NETLINK_SOCK_DIAG = 4
_SOCK_DIAG_BY_FAMILY = 20
_SOCK_DESTROY = 21
_NLM_F_REQUEST_DUMP, _NLM_F_REQUEST_ACK = 0x301, 0x5
_NLMSG_ERROR, _NLMSG_DONE = 2, 3
_SHOW_NAME, _SHOW_PEER, _SHOW_ICONS, _SHOW_RQLEN = 1, 4, 8, 16
_ATTR_NAME, _ATTR_PEER, _ATTR_ICONS, _ATTR_RQLEN = 0, 2, 3, 4
_WAIT_S = 2

ESTABLISHED, CLOSE, LISTEN = 1, 7, 10  # include/net/tcp_states.h
TCP_STATES = {
    1: "established", 2: "syn-sent", 3: "syn-received", 4: "fin-wait-1", 5: "fin-wait-2", 6: "time-wait", 7: "close",
    8: "close-wait", 9: "last-ack", 10: "listen", 11: "closing",
}  # fmt: skip


@dataclass(frozen=True)
class UnixSocket:
    """peer: inode of the other end, 0 for none. pending: inodes of connections that wait to be accepted.

    unread_bytes: what was written to it and its peer has not read yet.
    """

    inode: int
    kind: int
    state: int
    peer: int
    name: str
    unread_bytes: int
    pending: tuple[int, ...]


@dataclass(frozen=True)
class InternetSocket:
    """local, remote: "address:port"; remote is "" where the socket is not connected.

    queued: of a listener the connections that wait to be accepted, else bytes not read yet.
    """

    inode: int
    protocol: str
    state: int
    local: str
    remote: str
    queued: int


def unix_sockets() -> dict[int, UnixSocket] | None:
    """All unix sockets of our network namespace by inode; None where the kernel has no unix_diag."""
    request = struct.pack(
        "<IHHIIBBHIIIII",
        40, _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST_DUMP, 1, 0,
        socket.AF_UNIX, 0, 0, 0xFFFFFFFF, 0, _SHOW_NAME | _SHOW_PEER | _SHOW_ICONS | _SHOW_RQLEN, 0, 0,
    )  # fmt: skip
    found: dict[int, UnixSocket] = {}
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as link:
            link.settimeout(_WAIT_S)
            link.send(request)
            while True:
                data = link.recv(1 << 18)
                at = 0
                while at + 16 <= len(data):
                    length, kind = struct.unpack_from("<IH", data, at)
                    if kind == _NLMSG_DONE:
                        return found
                    if kind == _NLMSG_ERROR or length < 16:
                        return None
                    one = _unix_socket(data[at + 16 : at + length])
                    found[one.inode] = one
                    at += (length + 3) & ~3
    except OSError:
        return None


def _unix_socket(message: bytes) -> UnixSocket:
    _, kind, state, _, inode = struct.unpack_from("<BBBBI", message)
    name, peer, unread = "", 0, 0
    pending: tuple[int, ...] = ()
    at = 16
    while at + 4 <= len(message):
        length, attribute = struct.unpack_from("<HH", message, at)
        if length < 4:
            break
        value = message[at + 4 : at + length]
        if attribute == _ATTR_NAME:
            # an abstract name begins with a NUL, which the tools show as @
            name = value.decode(errors="replace").rstrip("\0").replace("\0", "@")
        elif attribute == _ATTR_PEER:
            peer = struct.unpack_from("<I", value)[0]
        elif attribute == _ATTR_ICONS:
            pending = struct.unpack_from(f"<{len(value) // 4}I", value)
        elif attribute == _ATTR_RQLEN:
            unread = struct.unpack_from("<I", value, 4)[0]  # udiag_wqueue
        at += (length + 3) & ~3
    return UnixSocket(inode, kind, state, peer, name, unread, pending)


def internet_sockets(pid: int, inodes: set[int]) -> dict[int, InternetSocket]:
    """Those of `inodes` that are in the internet tables of the network namespace of process `pid`."""
    found: dict[int, InternetSocket] = {}
    for protocol in ("tcp", "tcp6", "udp", "udp6", "udplite", "udplite6", "raw", "raw6", "icmp"):
        try:
            with open(f"/proc/{pid}/net/{protocol}", encoding="ascii") as file:
                lines = file.readlines()[1:]
        except OSError:
            continue  # a kernel without IPv6, or the process is gone
        for line in lines:
            words = line.split()
            inode = int(words[9])
            if inode in inodes and inode:
                remote = _address(words[2])
                connected = not remote.endswith(":0") or (
                    protocol.startswith("raw") and not remote.startswith(("0.0.0.0", "[::]"))
                )
                found[inode] = InternetSocket(
                    inode,
                    protocol,
                    int(words[3], 16),
                    _address(words[1]),
                    remote if connected else "",
                    int(words[4].split(":")[1], 16),
                )
    return found


def established(pairs: list[list[str]]) -> list[str]:
    """Those of the pairs (local, remote) that are living connections in our network namespace, as "local -> remote"."""
    wanted = {(local, remote) for local, remote in pairs}
    found = []
    for protocol in ("tcp", "tcp6") if wanted else ():
        try:
            with open(f"/proc/self/net/{protocol}", encoding="ascii") as file:
                lines = file.readlines()[1:]
        except OSError:
            continue
        for line in lines:
            words = line.split()
            ends = _address(words[1]), _address(words[2])
            if int(words[3], 16) == ESTABLISHED and ends in wanted:
                found.append(" -> ".join(ends))
    return found


def unread_netlink(pid: int, inodes: set[int]) -> set[int]:
    """Those of `inodes` that are netlink sockets with messages that nobody has read."""
    found = set()
    try:
        with open(f"/proc/{pid}/net/netlink", encoding="ascii") as file:
            for line in file.readlines()[1:]:
                words = line.split()
                if int(words[9]) in inodes and int(words[4]):
                    found.add(int(words[9]))
    except OSError:
        pass
    return found


def destroy_tcp(local: str, remote: str) -> bool:
    """Removes what the kernel still keeps of a connection ("address:port" twice), say in TIME_WAIT. True if it was there.

    Needs CAP_NET_ADMIN and CONFIG_INET_DIAG_DESTROY; without them it does nothing. For before a restore: a job that was
    killed leaves connections in TIME_WAIT, and CRIU's bind to their ports would fail with EADDRINUSE for a minute.
    """
    try:
        family, source, source_port = _parse(local)
        other, target, target_port = _parse(remote)
        if family != other:
            return False
        # inet_diag_req_v2: family, protocol, ext, pad, states, then inet_diag_sockid
        body = struct.pack("<BBBBI", family, socket.IPPROTO_TCP, 0, 0, 0xFFFFFFFF)
        body += struct.pack(">HH", source_port, target_port) + source.ljust(16, b"\0")
        body += target.ljust(16, b"\0") + struct.pack("<III", 0, 0xFFFFFFFF, 0xFFFFFFFF)
        head = struct.pack("<IHHII", 16 + len(body), _SOCK_DESTROY, _NLM_F_REQUEST_ACK, 1, 0)
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as link:
            link.settimeout(_WAIT_S)
            link.send(head + body)
            answer = link.recv(4096)
    except (OSError, ValueError):
        return False
    return bool(struct.unpack_from("<i", answer, 16)[0] == 0)


def taken(listeners: list[str]) -> list[str]:
    """Those of "address:port" on which somebody listens now, in our own network namespace."""
    there: set[int] = set()
    for protocol in ("tcp", "tcp6"):
        try:
            with open(f"/proc/self/net/{protocol}", encoding="ascii") as file:
                rows = [line.split() for line in file.readlines()[1:]]
        except OSError:
            continue  # a kernel without IPv6
        there.update(
            int(row[1].rpartition(":")[2], 16) for row in rows if int(row[3], 16) == LISTEN
        )
    return [one for one in listeners if int(one.rpartition(":")[2]) in there and not _may_bind(one)]


def is_free(family: int, kind: int, local: tuple[str, int] | bytes) -> bool:
    """Could a restored socket be bound to that name or address now, in our own network namespace? Asks the kernel, and lets go
    of it at once. CRIU binds as this does."""
    with socket.socket(family, kind) as probe:
        if family != socket.AF_UNIX:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        try:
            probe.bind(local)
        except OSError as error:
            return error.errno != errno.EADDRINUSE
    return True


def _may_bind(local: str) -> bool:
    """The same port of another address, or of IPv6 alone, is in nobody's way: the kernel knows."""
    family, address, port = _parse(local)
    return is_free(family, socket.SOCK_STREAM, (socket.inet_ntop(family, address), port))


def _parse(text: str) -> tuple[int, bytes, int]:
    address, port = text.rsplit(":", 1)
    family = socket.AF_INET6 if address.startswith("[") else socket.AF_INET
    return family, socket.inet_pton(family, address.strip("[]")), int(port)


def _address(text: str) -> str:
    """ "0100007F:1F90" -> "127.0.0.1:8080": words of 32 bits in the machine's byte order (net/ipv4/tcp_ipv4.c)."""
    address, port = text.split(":")
    raw = bytes.fromhex(address)
    data = b"".join(raw[i : i + 4][::-1] for i in range(0, len(raw), 4))
    if len(data) == 4:
        return f"{ipaddress.IPv4Address(data)}:{int(port, 16)}"
    six = ipaddress.IPv6Address(data)
    # An IPv4 connection of an IPv6 socket has the other end in the table of IPv4: one spelling for both.
    if six.ipv4_mapped:
        return f"{six.ipv4_mapped}:{int(port, 16)}"
    return f"[{six}]:{int(port, 16)}"


def protocol_name(pid: int, fd: int) -> str:
    """ "TCP", "NETLINK", "AF_VSOCK"...: what the kernel calls the protocol of that socket; "" where it does not say.

    net/socket.c, sockfs_xattr_get: the attribute exists for every socket, also for one that is in no table yet.
    """
    try:
        value = os.getxattr(f"/proc/{pid}/fd/{fd}", "system.sockprotoname")
    except OSError:
        return ""
    return value.rstrip(b"\0").decode(errors="replace")
