# SPDX-License-Identifier: Apache-2.0
"""The network of one tree, in a job of several trees: an address that goes where the tree goes.

The processes of such a tree have a network namespace of their own, with a loopback device and a TUN device `devproxy0`.
Tree k of the job has the address `first host + k` of the job's network on it, on whatever host the tree runs. What the
processes send to another tree of the job comes out of the TUN device as packets, which the caller's `send` carries; what
other trees send goes in by deliver().

So connections between the trees (a TCPStore, gloo) outlive a checkpoint, a restore and a change of hosts: the two
kernels see the same addresses, and lost packets are TCP's to send again. While the network is held no packet goes in or
out: the state of all sockets, taken at different moments on different hosts, is that of one moment. What came meanwhile
is kept and delivered when the hold ends, up to KEPT_BYTES; the rest is lost, as on any network.

Threads: one reads the device. hold(), release(), deliver() and close(): any. Lock: _mu, over each write to the device,
and over the state; a leaf but for `send`, which must not block.
"""

from __future__ import annotations

import ctypes
import fcntl
import ipaddress
import os
import select
import socket
import struct
import threading
from collections.abc import Callable
from typing import TypeVar

from devproxy.errors import Refused

DEVICE = "devproxy0"
DEFAULT = "10.213.0.0/24"
MTU = 16000  # packets travel inside of a stream: the larger, the fewer
KEPT_BYTES = 8 << 20
SLOTS = 128  # csrc/wire/segment.h: kMaxSlots
MOST_TREES = 32
_BATCH = 64

# linux/if_tun.h, linux/sockios.h, linux/if.h, linux/sched.h
_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 0x1, 0x1000
_SIOCSIFADDR, _SIOCSIFNETMASK, _SIOCSIFMTU = 0x8916, 0x891C, 0x8922
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 0x1
_CLONE_NEWNET = 0x40000000

T = TypeVar("T")


def address(network: str, tree: int) -> str:
    """Of that tree of the job. Raises Refused where the network has no room for it."""
    hosts = ipaddress.ip_network(network)
    if not isinstance(hosts, ipaddress.IPv4Network) or tree + 2 >= hosts.num_addresses:
        raise Refused(f"the network {network} has no address for node {tree}", "name a larger one")
    return str(hosts[tree + 1])


def check(network: str) -> str:
    """As it is written in full. Raises Refused for what is no IPv4 network."""
    try:
        return str(ipaddress.IPv4Network(network))
    except ValueError:
        raise Refused(f"{network!r} is no IPv4 network", f"write it like {DEFAULT}") from None


def inside(namespace: int, action: Callable[[], T]) -> T:
    """Runs it in that network namespace (a descriptor): in a thread of its own, since the namespace is the thread's."""
    result: list[T] = []
    failure: list[BaseException] = []

    def work() -> None:
        try:
            _must(_libc.setns(namespace, _CLONE_NEWNET), "enter the tree's network namespace")
            result.append(action())
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=work, name="in namespace")
    thread.start()
    thread.join()
    if failure:
        raise failure[0]
    return result[0]


_libc = ctypes.CDLL(None, use_errno=True)


def _must(code: int, what: str) -> None:
    if code != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"cannot {what}: {os.strerror(number)}")


class Place:
    """Which tree of a job of several this is, and what its servers and processes need to find the others.

    data_address: where its servers take other trees' data. encrypt_data: what servers of different trees send each other.
    send: see TreeNetwork.
    """

    def __init__(
        self,
        tree: int,
        trees: int,
        network: str,
        data_address: str,
        send: Callable[[int, list[bytes]], None],
        encrypt_data: bool = False,
    ) -> None:
        self.tree, self.trees, self.network = tree, trees, network
        self.data_address = data_address
        self.encrypt_data = encrypt_data
        self.send = send

    def server_arguments(self) -> tuple[str, ...]:
        """Slots of processes are unique over the job: each tree gives its own share of them away."""
        share = SLOTS // self.trees
        slots = f"{self.tree * share}-{(self.tree + 1) * share}"
        encrypt = ("--encrypt-data",) if self.encrypt_data else ()
        return (
            "--tree",
            str(self.tree),
            "--data-address",
            self.data_address,
            *encrypt,
            "--slots",
            slots,
        )

    def environment(self) -> dict[str, str]:
        return {
            "DEVPROXY_NODES": str(self.trees),
            "DEVPROXY_NODE": str(self.tree),
            "DEVPROXY_NODE_ADDRESS": address(self.network, self.tree),
            "DEVPROXY_MASTER_ADDRESS": address(self.network, 0),
        }

    def make_network(self) -> TreeNetwork:
        return TreeNetwork(self.network, self.tree, self.send)


class TreeNetwork:
    """Made held: nothing passes before release().

    send(to, packets): carries IP packets to that tree of the job; called with a lock held, so it must not block.
    Raises Refused where the namespace or the device cannot be made.
    """

    def __init__(self, network: str, tree: int, send: Callable[[int, list[bytes]], None]) -> None:
        self.address = address(network, tree)
        self.namespace = -1  # a descriptor
        self._hosts = ipaddress.IPv4Network(network)
        self._first = int(self._hosts.network_address) + 1
        self._send = send
        self._mu = threading.Lock()
        self._held = True
        self._kept: list[tuple[int, bytes]] = []  # (to, packet); to is -1: into the device
        self._kept_bytes = 0
        self._closed = False
        try:
            self.namespace, self._tun = self._make()
        except OSError as error:
            raise Refused(
                f"the job's network cannot be made: {error.strerror or error}",
                "a job of several nodes needs /dev/net/tun and the privilege for network namespaces",
            ) from None
        self._wake_read, self._wake_write = os.pipe()
        self._thread = threading.Thread(target=self._read, name="network", daemon=True)
        self._thread.start()

    # -- making it ----------------------------------------------------------------------------------------------

    def _make(self) -> tuple[int, int]:
        made: list[int] = []
        failure: list[OSError] = []

        def work() -> None:
            try:
                _must(_libc.unshare(_CLONE_NEWNET), "make a network namespace")
                made.append(os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC))
                made.append(self._make_devices())
            except OSError as error:
                failure.append(error)

        thread = threading.Thread(target=work, name="make network")
        thread.start()
        thread.join()
        if failure:
            for fd in made:
                os.close(fd)
            raise failure[0]
        return made[0], made[1]

    def _make_devices(self) -> int:
        """In the new namespace. Returns the TUN device's descriptor, with which the device goes."""
        tun = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            flags = _IFF_TUN | _IFF_NO_PI
            fcntl.ioctl(tun, _TUNSETIFF, struct.pack("16sH22x", DEVICE.encode(), flags))
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
                own = ipaddress.IPv4Address(self.address).packed
                mask = self._hosts.netmask.packed
                name = DEVICE.encode()
                fcntl.ioctl(control, _SIOCSIFMTU, struct.pack("16si20x", name, MTU))
                fcntl.ioctl(control, _SIOCSIFADDR, struct.pack("16sHH4s16x", name, socket.AF_INET, 0, own))  # fmt: skip
                fcntl.ioctl(control, _SIOCSIFNETMASK, struct.pack("16sHH4s16x", name, socket.AF_INET, 0, mask))  # fmt: skip
                for device in (b"lo", name):
                    answer = fcntl.ioctl(control, _SIOCGIFFLAGS, struct.pack("16sH22x", device, 0))
                    (now,) = struct.unpack_from("16xH", answer)
                    fcntl.ioctl(control, _SIOCSIFFLAGS, struct.pack("16sH22x", device, now | _IFF_UP))  # fmt: skip
        except BaseException:
            os.close(tun)
            raise
        return tun

    @property
    def inode(self) -> int:
        """What CRIU knows the namespace by."""
        return os.fstat(self.namespace).st_ino

    # -- packets ------------------------------------------------------------------------------------------------

    def _read(self) -> None:
        poll = select.poll()
        poll.register(self._tun, select.POLLIN)
        poll.register(self._wake_read, select.POLLIN)
        while True:
            poll.poll()
            packets: list[bytes] = []
            try:
                while len(packets) < _BATCH:
                    packets.append(os.read(self._tun, MTU + 64))
            except BlockingIOError:
                pass
            except OSError:
                return  # closed
            with self._mu:
                if self._closed:
                    return
                by_tree: dict[int, list[bytes]] = {}
                for packet in packets:
                    to = self._tree_of(packet)
                    if to is None:
                        continue
                    if self._held:
                        self._keep(to, packet)
                    else:
                        by_tree.setdefault(to, []).append(packet)
                for to, several in by_tree.items():
                    self._send(to, several)

    def _tree_of(self, packet: bytes) -> int | None:
        """Which tree it is for; None for what is no packet of the job's network (multicasts, IPv6)."""
        if len(packet) < 20 or packet[0] >> 4 != 4:
            return None
        tree = int.from_bytes(packet[16:20], "big") - self._first
        return tree if 0 <= tree < self._hosts.num_addresses - 2 else None

    def deliver(self, packets: list[bytes]) -> None:
        """From another tree."""
        with self._mu:
            for packet in packets:
                if self._closed:
                    return
                if self._held:
                    self._keep(-1, packet)
                else:
                    self._write(packet)

    def _keep(self, to: int, packet: bytes) -> None:
        if self._kept_bytes + len(packet) <= KEPT_BYTES:
            self._kept_bytes += len(packet)
            self._kept.append((to, packet))

    def _write(self, packet: bytes) -> None:
        try:
            os.write(self._tun, packet)
        except OSError:
            pass  # full, or nonsense: a lost packet

    def hold(self) -> None:
        """When it returns no packet is on its way into the tree, and none will leave it."""
        with self._mu:
            self._held = True

    def release(self) -> None:
        """Packets pass. May be called when they do already."""
        with self._mu:
            if not self._held or self._closed:
                return
            self._held = False
            kept, self._kept, self._kept_bytes = self._kept, [], 0
            for to, packet in kept:
                if to < 0:
                    self._write(packet)
                else:
                    self._send(to, [packet])

    def close(self) -> None:
        """The device goes. The namespace stays as long as a process is in it."""
        with self._mu:
            if self._closed:
                return
            self._closed = True
        os.write(self._wake_write, b"x")
        self._thread.join()
        for fd in (self._tun, self.namespace, self._wake_read, self._wake_write):
            os.close(fd)
