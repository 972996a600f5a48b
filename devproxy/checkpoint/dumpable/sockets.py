# SPDX-License-Identifier: Apache-2.0
"""Sockets, and where their other ends are."""

from __future__ import annotations

import ipaddress
import os
import socket

from devproxy import procfs
from devproxy.checkpoint import netdiag
from devproxy.checkpoint.dumpable.tree import Socket, Tree, name_of, obstacle
from devproxy.checkpoint.dumpable.verdict import OutsideTcp, Verdict

_SOCKETS_OK = ("TCP", "UDP", "UNIX", "NETLINK", "PACKET", "RAW")


def check_sockets(tree: Tree, verdict: Verdict, root_pid: int, job_dir: str, network: str) -> None:
    if not tree.sockets:
        return
    inodes = {s.inode for s in tree.sockets}
    internet = netdiag.internet_sockets(root_pid, inodes)
    unix = netdiag.unix_sockets()
    done: set[int] = set()
    unread = netdiag.unread_netlink(root_pid, inodes)
    pairs = {(s.local, s.remote) for s in internet.values() if s.protocol.startswith("tcp")}
    listeners = {
        s.local for s in internet.values() if s.state == netdiag.LISTEN and "tcp" in s.protocol
    }
    verdict.listeners = sorted(listeners)
    for one in tree.sockets:
        if one.inode in done:
            continue
        done.add(one.inode)
        if one.inode in internet:
            info = internet[one.inode]
            if netdiag.protocol_name(one.process.pid, one.fd).startswith("MPTCP"):
                _check_other_socket(tree, one, False)  # its first subflow is in the tables of TCP
                continue
            if not info.protocol.startswith("tcp"):
                _check_datagram(tree, one, info)
            elif info.state == netdiag.LISTEN:
                if info.queued:
                    what = (
                        f"listening socket {info.local} with {info.queued} connections in its queue"
                    )
                    why = "they are not accepted yet, and cannot be dumped"
                    tree.refusals.append(
                        obstacle(one.process, f"fd {one.fd}", what, why, "try again", True)
                    )
            elif info.remote:
                if (
                    (info.remote, info.local) in pairs
                    or _listens(listeners, info.remote)
                    or _is_in(network, info.remote)
                ):
                    ends = (info.local, info.remote)
                    for pair in (ends, ends[::-1]):
                        if pair not in verdict.inside_tcp:
                            verdict.inside_tcp.append(pair)
                else:
                    _outside_tcp(tree, verdict, one, info)
        elif one.inode in unread:
            what, why = "netlink socket with unread messages", "they cannot be dumped"
            tree.refusals.append(
                obstacle(one.process, f"fd {one.fd}", what, why, "try again", True)
            )
        elif unix is not None and one.inode in unix:
            _check_unix(tree, one, unix, inodes, job_dir)
        else:
            _check_other_socket(tree, one, unix is None)
    if verdict.outside_tcp and not verdict.inside_tcp:
        verdict.tcp = "close"


def _listens(listeners: set[str], address: str) -> bool:
    """A connection that nobody has accepted yet belongs to the listener."""
    port = address.rsplit(":", 1)[1]
    return any(at in listeners for at in (address, f"0.0.0.0:{port}", f"[::]:{port}"))


def _is_in(network: str, address: str) -> bool:
    """Is the other end a tree of the same job, which is dumped at the same moment?"""
    if not network or address.startswith("["):
        return False
    host = ipaddress.ip_address(address.rsplit(":", 1)[0])
    return host in ipaddress.ip_network(network)


def _outside_tcp(tree: Tree, verdict: Verdict, one: Socket, info: netdiag.InternetSocket) -> None:
    process, state = one.process, netdiag.TCP_STATES.get(info.state, str(info.state))
    verdict.outside_tcp.append(
        OutsideTcp(
            process.status.inner_pid,
            process.pid,
            process.status.name,
            one.fd,
            info.local,
            info.remote,
            state,
        )
    )
    tree.warnings.append(
        obstacle(
            process,
            f"fd {one.fd}",
            f"TCP connection {info.local} -> {info.remote} ({state})",
            "its other end is outside of the job, so it will be closed at restore",
            "",
        )
    )


def _check_datagram(tree: Tree, one: Socket, info: netdiag.InternetSocket) -> None:
    if info.protocol.startswith("udp") and info.queued:
        tree.refusals.append(
            obstacle(
                one.process,
                f"fd {one.fd}",
                f"UDP socket {info.local} with {info.queued} unread bytes",
                "CRIU takes no datagrams along, so a restore would lose them",
                "try again when the program has read them",
                True,
            )
        )
    elif info.protocol.startswith("udp") and info.remote:
        tree.warnings.append(
            obstacle(
                one.process,
                f"fd {one.fd}",
                f"UDP socket {info.local} -> {info.remote}",
                "what is sent to it while the job is away is lost",
            )
        )


def _check_unix(
    tree: Tree,
    one: Socket,
    unix: dict[int, netdiag.UnixSocket],
    inodes: set[int],
    job_dir: str,
) -> None:
    info = unix[one.inode]
    if info.state == netdiag.LISTEN and info.pending:
        outside = [inode for inode in info.pending if inode not in inodes]
        if outside:
            name = info.name or "without a name"
            what = f"listening socket {name} with {len(outside)} connections from outside"
            why = "they wait to be accepted, and cannot be dumped"
            tree.refusals.append(
                obstacle(one.process, f"fd {one.fd}", what, why, "try again", True)
            )
        return
    if info.state != netdiag.ESTABLISHED and info.kind != socket.SOCK_DGRAM:
        return
    if info.peer in inodes:
        return
    listener = next((s for s in unix.values() if one.inode in s.pending), None)
    if listener is not None and listener.inode in inodes:
        # CRIU connects it anew, without what was already written to it.
        if info.unread_bytes:
            what = f"connection to {listener.name or 'a socket'} of the job itself"
            why = "data waits in it, and nobody has accepted it yet"
            tree.refusals.append(
                obstacle(one.process, f"fd {one.fd}", what, why, "try again", True)
            )
        return
    if not info.peer and listener is None:
        return  # the other end has been closed
    peer = listener or unix.get(info.peer)
    ours = peer is not None and _of_the_proxy(peer.name, job_dir)
    holder = _socket_holder(info.peer)
    name = (peer.name if peer else "") or "without a name"
    what = f"unix socket connected to {name}" + (f" of {holder}" if holder else "")
    if ours:
        why = "the process is just being attached to its device proxy"
        tree.refusals.append(obstacle(one.process, f"fd {one.fd}", what, why, "try again", True))
        return
    why = "its other end is outside of the job"
    remedy = "close the connection in the program, or start that program within the job"
    tree.refusals.append(obstacle(one.process, f"fd {one.fd}", what, why, remedy))


def _of_the_proxy(name: str, job_dir: str) -> bool:
    """job_dir is the host's name of the folder; the job sees it as .job beside it."""
    seen = os.path.join(os.path.dirname(job_dir), ".job")
    return os.path.dirname(name) in (job_dir, seen)


def _socket_holder(inode: int) -> str:
    """ "process 12 (name)": who holds the socket; "" where we may not see. Only called for a refusal."""
    mark = f"socket:[{inode}]"
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            if any(target == mark for _, target in procfs.descriptors(name)):
                return f"process {name} ({name_of(int(name))})"
        except OSError:
            continue
    return ""


def _check_other_socket(tree: Tree, one: Socket, blind: bool) -> None:
    """A socket in no table: not bound yet, or of another family."""
    protocol = netdiag.protocol_name(one.process.pid, one.fd)
    if protocol.startswith("UNIX"):
        if blind:
            what, why = "unix socket", "the kernel does not tell its other end (no unix_diag)"
            remedy = "load the kernel module unix_diag"
            tree.refusals.append(obstacle(one.process, f"fd {one.fd}", what, why, remedy))
        return
    if protocol and not protocol.startswith(_SOCKETS_OK):
        what = f"{protocol} socket"
        why = "CRIU knows no sockets of that kind"
        tree.refusals.append(
            obstacle(one.process, f"fd {one.fd}", what, why, "close it in the program")
        )
