"""Addresses and interfaces of this host."""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct
from pathlib import Path

LOOPBACK = "127.0.0.1"
_SIOCGIFADDR = 0x8915  # Source: netdevice(7)


def own_address() -> str:
    """Return the address at which other hosts reach this one.

    The interface that the user named for gloo or NCCL comes first, then what the host's name stands for, then the
    interface of the default route; a host without any has loopback alone.
    """
    named = os.environ.get("GLOO_SOCKET_IFNAME") or os.environ.get("NCCL_SOCKET_IFNAME")
    if named:
        found = address_of(named.lstrip("=^").split(",")[0])
        if found:
            return found
    try:
        for *_, place in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET, socket.SOCK_STREAM):
            if not ipaddress.ip_address(place[0]).is_loopback and interface_of(str(place[0])):
                return str(place[0])
    except OSError:
        pass  # a name that nobody resolves
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # of no host: nothing is sent, the kernel only chooses the way
            return str(probe.getsockname()[0])
        except OSError:
            pass
    others = [found for _, name in socket.if_nameindex() if (found := address_of(name)) and found != LOOPBACK]
    return others[0] if others else LOOPBACK


def is_loopback(host: str) -> bool:
    """Tell whether a name or address stands for this host's loopback interface alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def is_wildcard(host: str) -> bool:
    """Tell whether an address stands for all interfaces of a host, and for none that others could reach."""
    try:
        return not host or ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def address_of(interface: str) -> str | None:
    """Return the IPv4 address of a network interface, or None."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            answer = fcntl.ioctl(any_socket.fileno(), _SIOCGIFADDR, struct.pack("256s", interface[:15].encode()))
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])


def interface_of(address: str) -> str | None:
    """Return the name of the network interface that has an IPv4 address, or None."""
    return next((name for _, name in socket.if_nameindex() if address_of(name) == address), None)


def holder_of(port: int) -> tuple[int, str] | None:
    """Return id and name of the process of this host that has a TCP port open, as far as this user may see it."""
    inodes = set()
    for name in ("tcp", "tcp6"):
        try:
            lines = Path("/proc/net", name).read_text().splitlines()[1:]
        except OSError:
            continue
        found = [line.split() for line in lines]  # Source: proc(5), /proc/net/tcp
        inodes |= {words[9] for words in found if int(words[1].rpartition(":")[2], 16) == port and words[9] != "0"}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if any(os.readlink(link) in {f"socket:[{inode}]" for inode in inodes} for link in (entry / "fd").iterdir()):
                return int(entry.name), (entry / "comm").read_text().strip()
        except OSError:
            continue  # it has ended, or is another user's
    return None


def boot_id() -> str:
    """Return what tells this host, since its last start, from every other: containers of one host share it."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return socket.gethostname()
