"""Hosts and slots: the hostfile, the filters over it, SLURM's node lists, and which devices slots are.

Pure functions over an ordered mapping from host to slots. A slot is the place of one rank on its host: the n-th
device that is visible there, or on a CPU host a number and nothing else. Hosts keep the order of the hostfile,
since ranks are numbered along it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from zeroshard.errors import LaunchError
from zeroshard.wording import first_few

__all__ = [
    "MOST_SLOTS",
    "Hosts",
    "expand_nodelist",
    "first_hosts",
    "parse_hostfile",
    "parse_numbers",
    "read_hostfile",
    "select_hosts",
    "visible_devices",
]

Hosts = dict[str, tuple[int, ...]]

# Commas join hosts for pdsh, mpirun and srun. The maximum is mpirun's, whose hostfile may serve here, too.
_LINE = re.compile(r"([^\s,@-][^\s,]*)\s+slots\s*=\s*([0-9]{1,9})(?:\s+max[_-]slots\s*=\s*[0-9]+)?")
_NODE_GROUP = re.compile(r"([^\[\],]*)(?:\[([^\]]*)\]([^\[\],]*))?(?:,|$)")

MOST_SLOTS = 4096
"""Of one host: more is a slip, and would take the machine down before anybody could say so."""


def read_hostfile(file: Path, option: str) -> Hosts:
    """The hosts of a file that `option` names. Raises LaunchError, also when the file cannot be read."""
    try:
        text = file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        raise LaunchError(f"{option} {file} cannot be read: {why}") from None
    return parse_hostfile(text, str(file))


def parse_hostfile(text: str, source: str) -> Hosts:
    """Hosts of lines `host slots=N`; blank lines and what follows a `#` are passed over.

    >>> parse_hostfile("a slots=2\\nb slots=1", "hostfile")
    {'a': (0, 1), 'b': (0,)}
    """
    hosts: Hosts = {}
    for number, raw in enumerate(text.splitlines(), start=1):
        line = raw.partition("#")[0].strip()
        if not line:
            continue
        match = _LINE.fullmatch(line)
        if match is None:
            raise LaunchError(f"{source}, line {number}: {line!r} is not of the form 'host slots=N'")
        host, slots = match[1], int(match[2])
        if slots == 0:
            raise LaunchError(f"{source}, line {number}: host {host!r} has 0 slots; leave it out instead")
        if slots > MOST_SLOTS:
            raise LaunchError(
                f"{source}, line {number}: host {host!r} has {slots} slots; at most {MOST_SLOTS} can be given"
            )
        if host.lower() in map(str.lower, hosts):
            raise LaunchError(f"{source}, line {number}: host {host!r} is there twice; give it one line")
        hosts[host] = tuple(range(slots))
    if not hosts:
        raise LaunchError(f"{source} names no host; a line is 'host slots=N'")
    return hosts


def select_hosts(hosts: Hosts, include: str = "", exclude: str = "") -> Hosts:
    """The part of `hosts` that a filter leaves: `NODE[@NODE...]`, `NODE = host[:slot[,slot...]]`.

    Without slots a NODE is the whole host. Hosts keep the order of `hosts`; slots that `include` names keep the
    order in which they are written, which is the order of the ranks there.
    """
    if include and exclude:
        raise LaunchError(f"--include {include!r} and --exclude {exclude!r} exclude each other: give one")
    if include:
        named = _parse_filter("--include", include, hosts)
        chosen = {host: named[host] for host in hosts if host in named}
    elif exclude:
        named = _parse_filter("--exclude", exclude, hosts)
        left = {
            host: tuple(s for s in slots if s not in named.get(host, ())) for host, slots in hosts.items()
        }
        chosen = {host: slots for host, slots in left.items() if slots}
    else:
        chosen = dict(hosts)
    if not chosen:
        raise LaunchError(f"--exclude {exclude!r} leaves no slot of {first_few(hosts, 8)}")
    return chosen


def _split_nodes(text: str, hosts: Hosts) -> list[str]:
    """The nodes of a filter. An `@` joins them, and stands in a host `user@name`, too."""
    users = {host.partition("@")[0] for host in hosts if "@" in host} - set(hosts)
    nodes: list[str] = []
    for piece in map(str.strip, text.split("@")):
        if nodes and nodes[-1] in users:
            nodes[-1] += f"@{piece}"
        else:
            nodes.append(piece)
    return nodes


def _parse_filter(option: str, text: str, hosts: Hosts) -> Hosts:
    named: Hosts = {}
    for node in _split_nodes(text, hosts):
        # The last colon: an IPv6 address has more of them, and may stand without slots.
        alone = node in hosts or ":" not in node
        host, colon, slot_list = (node, "", "") if alone else node.rpartition(":")
        if not host:
            raise LaunchError(
                f"{option} {text!r}: a host is missing; a node is host[:slot[,slot...]], joined by '@'"
            )
        if host not in hosts:
            raise LaunchError(f"{option} {text!r}: no host {host!r} among {first_few(hosts, 8)}")
        if host in named:
            raise LaunchError(f"{option} {text!r}: host {host!r} is there twice; list its slots in one place")
        named[host] = hosts[host]
        if colon:
            try:
                named[host] = parse_numbers(slot_list)
            except ValueError as error:
                raise LaunchError(f"{option} {text!r}: {error}") from None
            for slot in named[host]:
                if slot not in hosts[host]:
                    there = ",".join(map(str, hosts[host]))
                    raise LaunchError(f"{option} {text!r}: host {host!r} has no slot {slot}; it has {there}")
    return named


def parse_numbers(text: str) -> tuple[int, ...]:
    """`"0,2"` as `(0, 2)`: whole numbers, each once, order kept. Raises ValueError."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdigit() for word in words):
        raise ValueError(f"{text!r} is not a list of slots such as 0,2")
    numbers = tuple(int(word) for word in words)
    if len(set(numbers)) < len(numbers):
        raise ValueError(f"{text!r} names a slot twice")
    return numbers


def first_hosts(hosts: Hosts, nodes: int | None, slots: int | None) -> Hosts:
    """The first `nodes` hosts, of each its first `slots` slots; None is all."""
    if nodes is not None and nodes > len(hosts):
        raise LaunchError(f"--num_nodes {nodes}: there are {len(hosts)} hosts, {first_few(hosts, 8)}")
    first = dict(list(hosts.items())[:nodes])
    for host, there in first.items():
        if slots is not None and slots > len(there):
            raise LaunchError(f"--num_gpus {slots}: host {host!r} has {len(there)} slots")
    return {host: there[:slots] for host, there in first.items()}


def visible_devices(slots: tuple[int, ...], environ: Mapping[str, str], name: str, count: int) -> str | None:
    """What the environment variable `name` (CUDA_VISIBLE_DEVICES) is for the ranks of one host.

    `count` accelerators are to be seen with `name` as it is. A slot is the n-th of these: with `4,5` there,
    slot 1 is device 5. None where there is no accelerator, and where nothing has to be said.
    """
    listed = [word.strip() for word in environ.get(name, "").split(",") if word.strip()]
    if listed and 0 < count < len(listed):
        raise LaunchError(
            f"{name}={environ[name]} names {len(listed)} devices, of which {count} can be seen here"
        )
    if count == 0:
        return None
    for slot in slots:
        if slot >= count:
            origin = f" ({name}={environ[name]})" if name in environ else ""
            raise LaunchError(
                f"slot {slot} (of {len(slots)} ranks here) has no accelerator: this machine shows {count}{origin}"
            )
    if not listed and slots == tuple(range(count)):
        return None
    return ",".join(listed[slot] if listed else str(slot) for slot in slots)


def expand_nodelist(text: str) -> list[str]:
    """The hosts of a SLURM node list, in SLURM's order.

    >>> expand_nodelist("gpu[08-10,12],login")
    ['gpu08', 'gpu09', 'gpu10', 'gpu12', 'login']
    """
    hosts: list[str] = []
    position = 0
    while position < len(text):
        match = _NODE_GROUP.match(text, position)
        if match is None or match[0] in ("", ","):
            raise LaunchError(f"SLURM's node list {text!r} cannot be read at {text[position:]!r}")
        position = match.end()
        before, ranges, after = match[1], match[2], match[3] or ""
        if ranges is None:
            hosts.append(before)
            continue
        for span in ranges.split(","):
            low, _, high = span.partition("-")
            if not (low.isdecimal() and (high or low).isdecimal()):
                raise LaunchError(f"SLURM's node list {text!r} cannot be read at {span!r}")
            hosts += [f"{before}{n:0{len(low)}d}{after}" for n in range(int(low), int(high or low) + 1)]
    return hosts
