"""The machine as the kernel tells of it: memory and its limits, shared memory, cores, NUMA. Imports no torch.

Each function reads below `root`, which is `/` but in tests, and gives None for what the system does not tell.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = [
    "available_memory",
    "cores",
    "limits",
    "memory",
    "numa_nodes",
    "shared_memory",
]

ROOT = Path("/")
_UNLIMITED = 1 << 60
"""cgroups of version 1 write a huge number where there is no limit."""
_LIMITS = {
    "open files": "RLIMIT_NOFILE",
    "locked memory": "RLIMIT_MEMLOCK",
    "processes": "RLIMIT_NPROC",
    "address space": "RLIMIT_AS",
    "resident memory": "RLIMIT_RSS",
}


def memory(root: Path = ROOT) -> dict[str, int | None]:
    """Bytes: of the host (`total`, `available`), and the limit and use of the control group."""
    told = _meminfo(root)
    limit, used = _cgroup_memory(root)
    return {
        "total": told.get("MemTotal"),
        "available": told.get("MemAvailable"),
        "swap": told.get("SwapTotal"),
        "group limit": limit,
        "group used": used,
    }


def available_memory(root: Path = ROOT) -> int | None:
    """Bytes that can still be taken: of the host or of the control group, whichever is less."""
    told = memory(root)
    left = [told["available"]] if told["available"] is not None else []
    if told["group limit"] is not None and told["group used"] is not None:
        left.append(max(told["group limit"] - told["group used"], 0))
    return min(left, default=None)


def shared_memory(root: Path = ROOT) -> dict[str, int]:
    """Bytes of /dev/shm: `size` and `free`. Raises OSError where there is none."""
    told = os.statvfs(root / "dev/shm")
    return {"size": told.f_blocks * told.f_frsize, "free": told.f_bavail * told.f_frsize}


def limits() -> dict[str, dict[str, int | None]]:
    """(soft, hard) limits of this process, as `ulimit` has them; None is unlimited."""
    import resource  # not on Windows

    found = {}
    for name, constant in _LIMITS.items():
        soft, hard = resource.getrlimit(getattr(resource, constant))
        known = [None if value == resource.RLIM_INFINITY else value for value in (soft, hard)]
        found[name] = dict(zip(("soft", "hard"), known, strict=True))
    return found


def cores(root: Path = ROOT) -> dict[str, Any]:
    """The processor's name, its logical cores, those this process may run on, and what the control group gives."""
    allowed = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
    model = None
    for line in _lines(root / "proc/cpuinfo"):
        name, _, value = line.partition(":")
        if name.strip() in ("model name", "Model", "CPU part"):
            model = value.strip()
            break
    return {"model": model, "logical": os.cpu_count(), "allowed": allowed, "group quota": _cgroup_cores(root)}


def numa_nodes(root: Path = ROOT) -> list[dict[str, Any]]:
    """Node by node: its number, cores (as the kernel writes them: 0-3,8) and bytes of memory."""
    found = []
    for folder in sorted(
        (root / "sys/devices/system/node").glob("node[0-9]*"), key=lambda path: int(path.name[4:])
    ):
        total = None
        for line in _lines(folder / "meminfo"):
            if "MemTotal" in line:
                total = int(line.split()[3]) * 1024
        cpus = next(iter(_lines(folder / "cpulist")), "")
        found.append({"node": int(folder.name[4:]), "cores": cpus, "memory": total})
    return found


def _lines(file: Path) -> Iterator[str]:
    try:
        yield from file.read_text().splitlines()
    except OSError:
        return


def _meminfo(root: Path) -> dict[str, int]:
    found = {}
    for line in _lines(root / "proc/meminfo"):
        name, _, rest = line.partition(":")
        words = rest.split()
        if len(words) == 2 and words[1] == "kB":
            found[name] = int(words[0]) * 1024
    return found


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """Folders of this process's control group, innermost first: version 1's of the controller, or version 2's."""
    mounted = root / "sys/fs/cgroup"
    for line in _lines(root / "proc/self/cgroup"):
        number, names, inside = line.split(":", 2)
        if controller in names.split(","):
            base = mounted / controller
        elif number == "0" and not names:
            base = mounted
        else:
            continue
        # Inside a container the path may be one of the host, of which only the end is mounted here.
        path = base / inside.strip("/")
        while path != base:
            yield path
            path = path.parent
        yield base


def _number(file: Path) -> int | None:
    text = next(iter(_lines(file)), "max")
    return int(text) if text.strip().lstrip("-").isdigit() else None


def _cgroup_memory(root: Path) -> tuple[int | None, int | None]:
    """(limit, used) of the tightest control group around this process; what the kernel can drop is not used."""
    tightest: tuple[int | None, int | None] = (None, None)
    for folder in _groups(root, "memory"):
        for limit_name, used_name in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            limit = _number(folder / limit_name)
            if limit is None or limit >= _UNLIMITED or (tightest[0] is not None and limit >= tightest[0]):
                continue
            used = _number(folder / used_name)
            if used is not None:
                used = max(used - _droppable(folder), 0)
            tightest = limit, used
    return tightest


def _droppable(folder: Path) -> int:
    """Bytes of files that are cached and have not been read again."""
    told = dict(line.split(None, 1) for line in _lines(folder / "memory.stat") if " " in line)
    return int(told.get("total_inactive_file", told.get("inactive_file", 0)))


def _cgroup_cores(root: Path) -> float | None:
    """Cores' worth of time that the tightest control group gives."""
    found: list[float] = []
    for folder in _groups(root, "cpu"):
        words = next(iter(_lines(folder / "cpu.max")), "").split()
        quota = int(words[0]) if words and words[0].isdigit() else _number(folder / "cpu.cfs_quota_us")
        period = int(words[1]) if len(words) > 1 else _number(folder / "cpu.cfs_period_us")
        if quota is not None and quota > 0 and period:
            found.append(quota / period)
    return min(found, default=None)
