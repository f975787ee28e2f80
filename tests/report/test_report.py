"""`zeroshard report`: a stable schema, probes that cannot fail it, machines read from a made-up /proc and /sys."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import zeroshard
from zeroshard.launch.cli import main
from zeroshard.report import command, machine, software


def report(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert main(["report", "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


SECTIONS = {
    "format": int,
    "versions": dict,
    "devices": list,
    "backends": dict,
    "memory": dict,
    "shared memory": dict,
    "cores": dict,
    "numa": list,
    "limits": dict,
    "environment": dict,
    "fast paths": dict,
    "problems": list,
}


def test_the_schema_is_stable(capsys: pytest.CaptureFixture[str]) -> None:
    told = report(capsys)
    assert {name: type(value) for name, value in told.items()} == SECTIONS
    assert told["format"] == 1
    assert told["problems"] == []
    assert told["versions"]["zeroshard"] == zeroshard.__version__
    assert {"python", "torch", "CUDA", "NCCL", "NVIDIA driver", "transformers"} <= set(told["versions"])
    assert set(told["backends"]) == {"gloo", "nccl", "xccl", "ucc", "mpi"}
    assert all(set(backend) == {"available", "why"} for backend in told["backends"].values())
    assert set(told["memory"]) == {"total", "available", "swap", "group limit", "group used"}
    assert set(told["shared memory"]) == {"size", "free"}
    assert set(told["cores"]) == {"model", "logical", "allowed", "group quota"}
    assert {"open files", "locked memory"} <= set(told["limits"])
    assert all(set(limit) == {"soft", "hard"} for limit in told["limits"].values())
    assert set(told["fast paths"]) == set(software.FAST_PATHS)
    for path in told["fast paths"].values():
        assert isinstance(path["on"], bool)
        assert path["on"] or path["why"]


def test_one_screen(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 40
    assert lines[0].startswith(f"zeroshard {zeroshard.__version__}, python ")
    assert {"memory", "/dev/shm", "cores", "limits"} <= {line.split()[0] for line in lines if line}


@pytest.mark.parametrize("section", [*command.PROBES, *software.FAST_PATHS])
def test_no_probe_can_make_it_fail(
    section: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> Any:
        raise OSError("no such\ndevice")

    for table in (command.PROBES, software.FAST_PATHS):
        for name in table:
            monkeypatch.setitem(table, name, broken if name == section else lambda: (True, ""))
    for name in command.PROBES:
        if name != section:
            monkeypatch.setitem(command.PROBES, name, lambda: None)
    assert main(["report"]) == 0
    out = capsys.readouterr().out
    told = report(capsys)
    if section in software.FAST_PATHS:
        assert re.search(f"^off +{re.escape(section)} +OSError: no such device$", out, re.MULTILINE)
        assert told["fast paths"][section] == {"on": False, "why": "OSError: no such device"}
        assert told["problems"] == []
    else:
        assert f"{section}: OSError: no such device" in out
        assert told["problems"] == [{"section": section, "why": "OSError: no such device"}]
        assert told[section] is None


@pytest.mark.skipif(torch.accelerator.is_available(), reason="the compiler of C++ counts on the CPU alone")
def test_no_compiler() -> None:
    """In a process of its own: torch remembers the compiler that it found."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PATH", "CXX")}
    done = subprocess.run(
        [sys.executable, "-m", "zeroshard", "report", "--json"],
        env={**environment, "PATH": "/nowhere"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    told = json.loads(done.stdout)
    assert not told["fast paths"]["torch.compile"]["on"]
    assert "No working C++ compiler" in told["fast paths"]["torch.compile"]["why"]
    assert told["problems"] == []


def test_a_fast_path_that_is_off_says_why(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZEROSHARD_SHARED_MEMORY", "0")
    monkeypatch.setenv("ZEROSHARD_DEBUG", "collectives")
    told = report(capsys)
    assert told["fast paths"]["collectives through shared memory"] == {
        "on": False,
        "why": "ZEROSHARD_SHARED_MEMORY=0 is set",
    }
    assert not told["fast paths"]["collectives start at once"]["on"]
    assert told["environment"]["ZEROSHARD_SHARED_MEMORY"] == "0"


@pytest.mark.skipif(torch.accelerator.is_available(), reason="the kind that torch was built for is there")
def test_a_torch_for_cuda_without_a_device_is_a_cpu(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a build names cuda, unless it is asked for what is there."""
    plain = report(capsys)

    def current_accelerator(check_available: bool = False) -> torch.device | None:
        return None if check_available else torch.device("cuda")

    monkeypatch.setattr(torch.accelerator, "current_accelerator", current_accelerator)
    told = report(capsys)
    assert (told["devices"], told["fast paths"]) == ([], plain["fast paths"])


def test_secrets_stay_out(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    told = report(capsys)
    assert "secret" not in json.dumps(told)
    assert told["environment"]["OMP_NUM_THREADS"] == "3"


def test_a_mistake_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "--jsom"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def write(root: Path, **files: str) -> None:
    for name, text in files.items():
        file = root / name.replace("__", "/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


MEMINFO = "MemTotal:    16000 kB\nMemAvailable:    8000 kB\nSwapTotal:    0 kB\nHugePages_Total:    0\n"


def test_control_groups_of_version_2(tmp_path: Path) -> None:
    """The tightest of the groups around the process counts; cached files can be dropped."""
    write(
        tmp_path,
        proc__meminfo=MEMINFO,
        proc__self__cgroup="0::/batch/job\n",
        **{
            "sys/fs/cgroup/batch/job/memory.max": "max\n",
            "sys/fs/cgroup/batch/job/memory.current": "7\n",
            "sys/fs/cgroup/batch/memory.max": "4096000\n",
            "sys/fs/cgroup/batch/memory.current": "3000000\n",
            "sys/fs/cgroup/batch/memory.stat": "anon 1\ninactive_file 1000000\n",
            "sys/fs/cgroup/batch/job/cpu.max": "150000 100000\n",
            "sys/fs/cgroup/batch/cpu.max": "max 100000\n",
        },
    )
    assert machine.memory(tmp_path) == {
        "total": 16_384_000,
        "available": 8_192_000,
        "swap": 0,
        "group limit": 4_096_000,
        "group used": 2_000_000,
    }
    assert machine.available_memory(tmp_path) == 2_096_000
    assert machine.cores(tmp_path)["group quota"] == 1.5


def test_control_groups_of_version_1(tmp_path: Path) -> None:
    """Of a container the path is one of the host, and the files are at the root of the mount."""
    write(
        tmp_path,
        proc__meminfo=MEMINFO,
        proc__self__cgroup="9:name=systemd:/\n4:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc\n0::/\n",
        **{
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "5000000\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "1000000\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
        },
    )
    assert machine.memory(tmp_path)["group limit"] == 5_000_000
    assert machine.available_memory(tmp_path) == 4_000_000
    assert machine.cores(tmp_path)["group quota"] is None
    write(tmp_path, **{"sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n"})
    assert machine.memory(tmp_path)["group limit"] is None
    assert machine.available_memory(tmp_path) == 8_192_000


def test_numa_nodes_in_their_order(tmp_path: Path) -> None:
    for node in (0, 2, 10):
        write(
            tmp_path,
            **{
                f"sys/devices/system/node/node{node}/meminfo": f"Node {node} MemTotal:       {node + 1}000 kB\n",
                f"sys/devices/system/node/node{node}/cpulist": f"{node}-{node + 1}\n",
            },
        )
    assert machine.numa_nodes(tmp_path) == [
        {"node": 0, "cores": "0-1", "memory": 1_024_000},
        {"node": 2, "cores": "2-3", "memory": 3_072_000},
        {"node": 10, "cores": "10-11", "memory": 11_264_000},
    ]


def test_a_system_that_tells_nothing(tmp_path: Path) -> None:
    assert set(machine.memory(tmp_path).values()) == {None}
    assert machine.available_memory(tmp_path) is None
    assert machine.numa_nodes(tmp_path) == []
    assert machine.cores(tmp_path)["model"] is None
    with pytest.raises(OSError, match="shm"):
        machine.shared_memory(tmp_path)
