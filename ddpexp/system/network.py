"""Addresses and interfaces of this host, for the rendezvous of several machines."""

from __future__ import annotations

import fcntl
import ipaddress
import os
import queue
import socket
import struct
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from ddpexp.errors import RefusedError, subject

LOOPBACK = "127.0.0.1"
GLOO_INTERFACE, NCCL_INTERFACE = INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_SECONDS = 5.0  # for an answer of this host itself
_SIOCGIFADDR = 0x8915  # Source: netdevice(7)


def own_address() -> str:
    """Return the address at which other hosts reach this one.

    The interface that the user chose for gloo or NCCL takes precedence, then the address that the host name resolves
    to, then the interface of the default route; loopback if there is none.
    """
    named = os.environ.get(GLOO_INTERFACE) or os.environ.get(NCCL_INTERFACE)
    if named:
        address = address_of(named.lstrip("=^").split(",")[0])
        if address:
            return address
    try:
        for *_, endpoint in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET, socket.SOCK_STREAM):
            if not ipaddress.ip_address(endpoint[0]).is_loopback and interface_of(str(endpoint[0])):
                return str(endpoint[0])
    except OSError:
        pass  # the host name does not resolve
    address = _address_on_route("192.0.2.1", 9)  # a reserved address
    if address is not None:
        return address
    addresses = [address_of(name) for _, name in socket.if_nameindex()]
    return next((address for address in addresses if address and address != LOOPBACK), LOOPBACK)


def address_towards(host: str, port: int) -> str | None:
    """Return this host's IPv4 address on its route to another one, or the address of the interface chosen for gloo.

    None if the other one is not known, or is reached by IPv6.
    """
    is_chosen = any(os.environ.get(name) for name in INTERFACES)
    return own_address() if is_chosen else _address_on_route(host, port)


def _address_on_route(host: str, port: int) -> str | None:
    """Return the IPv4 address from which the kernel would send to another host; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, port))
            return str(probe.getsockname()[0])
        except (OSError, OverflowError, UnicodeError):
            return None


def interface_variables(
    interface: str, environ: Mapping[str, str] = os.environ, nccl_files: Sequence[Path] | None = None
) -> dict[str, str]:
    """Return the variables that make gloo and NCCL use an interface, each only where the user has not chosen one.

    A variable would override NCCL's configuration files, so settings in them count as chosen too.
    Source: NCCL user guide, Environment Variables: NCCL_CONF_FILE, else ~/.nccl.conf, and /etc/nccl.conf.
    """
    if nccl_files is None:
        own = Path(environ.get("NCCL_CONF_FILE") or "~/.nccl.conf").expanduser()
        nccl_files = (own, Path("/etc/nccl.conf"))
    variables = {name: interface for name in INTERFACES if name not in environ}
    if NCCL_INTERFACE in variables and any(_sets(path, NCCL_INTERFACE) for path in nccl_files):
        del variables[NCCL_INTERFACE]
    return variables


def _sets(path: Path, name: str) -> bool:
    """Return whether a configuration file of NCCL sets a variable."""
    try:
        return any(line.strip().startswith(f"{name}=") for line in path.read_text(errors="replace").splitlines())
    except (OSError, RuntimeError):
        return False


def is_loopback(host: str) -> bool:
    """Return whether a name or address belongs to the loopback interface."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_loopback() -> None:
    """Check that processes of this host can connect to one another. Raises: RefusedError."""
    try:
        with socket.create_server((LOOPBACK, 0)) as server, socket.create_connection(server.getsockname(), _SECONDS):
            pass
    except OSError as error:
        raise RefusedError(
            "is down, as in a new network namespace: the workers on this host connect to one another at "
            f"{LOOPBACK}, which does not answer ({error})",
            place="the loopback interface",
            suggestion="Type: ip link set lo up.",
        ) from None


def check_resolves(host: str, typed: str) -> None:
    """Check that a name stands for an address; `typed` is the override that has it.

    Raises:
        RefusedError: it does not, or no name server answers within five seconds; nothing else limits that time.
    """
    problems: queue.SimpleQueue[OSError | UnicodeError | None] = queue.SimpleQueue()

    def look_up() -> None:
        try:
            socket.getaddrinfo(host, None)
            problems.put(None)
        except (OSError, UnicodeError) as error:
            problems.put(error)

    threading.Thread(target=look_up, name="resolver", daemon=True).start()
    try:
        problem = problems.get(timeout=_SECONDS)
    except queue.Empty:
        raise RefusedError(
            f"No name server has answered for {host} within {_SECONDS:.0f} seconds",
            suggestion="Use its address, or enter it into /etc/hosts.",
            **subject(typed),
        ) from None
    if problem is not None:
        raise RefusedError(
            f"The name {host} has no address on this host ({getattr(problem, 'strerror', None) or problem})",
            suggestion="Check the name, use its address, or enter it into /etc/hosts.",
            **subject(typed),
        )


def is_wildcard(host: str) -> bool:
    """Return whether an address is the wildcard address, which others cannot connect to."""
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
    """Return id and name of the local process that has a TCP port open, as far as this user may see it."""
    inodes = set()
    for name in ("tcp", "tcp6"):
        try:
            lines = Path("/proc/net", name).read_text().splitlines()[1:]
        except OSError:
            continue
        rows = [line.split() for line in lines]  # Source: proc(5), /proc/net/tcp
        inodes |= {row[9] for row in rows if int(row[1].rpartition(":")[2], 16) == port and row[9] != "0"}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if any(os.readlink(link) in {f"socket:[{inode}]" for inode in inodes} for link in (entry / "fd").iterdir()):
                return int(entry.name), (entry / "comm").read_text().strip()
        except OSError:
            continue  # it has ended, or belongs to another user
    return None


def boot_id() -> str:
    """Return an id of this boot of this host; containers on one host share it."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return socket.gethostname()
