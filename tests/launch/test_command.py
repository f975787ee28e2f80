"""`zeroshard run` on one machine: what ranks find, and one clear error for each thing that cannot be."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from zeroshard import compat
from zeroshard.errors import LaunchError
from zeroshard.launch import cli, command, deepspeed_commands
from zeroshard.launch.cores import cores_here

LIMIT_SECONDS = 60

Launch = Callable[..., "subprocess.CompletedProcess[str]"]  # the fixture `zeroshard`

REPORT = """
import json, os, pathlib, sys
names = "RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE", "MASTER_PORT", "PYTHONPATH", "OMP_NUM_THREADS"
seen = {name: os.environ.get(name) for name in names} | {"args": sys.argv[1:]}
seen["cores"] = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
seen["pids"] = [int(p.stem) for p in pathlib.Path("/tmp").glob("*.deepspeed")]
pathlib.Path("rank" + os.environ["RANK"]).write_text(json.dumps(seen))
print("to stdout"); print("to stderr", file=sys.stderr)
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    (tmp_path / "script.py").write_text(REPORT)
    return "script.py"


def reports(folder: Path) -> list[dict[str, object]]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("rank?"))]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


@pytest.mark.skipif(sys.platform != "linux", reason="cores are bound on Linux")
def test_every_option_of_one_machine_at_once(zeroshard: Launch, script: str, tmp_path: Path) -> None:
    port, cores = free_port(), sorted(os.sched_getaffinity(0))
    ranks = min(2, len(cores))
    options = ["--num_gpus", str(ranks), "--master_port", str(port), "--bind_cores_to_rank", "--save_pid"]
    logs = ["--enable_each_rank_log", "logs", "--pass_local_rank", "--as_deepspeed", "--quiet"]
    words = ["--cost", "$5", "$$", "${local_rank}"]
    done = zeroshard(
        "run", *options, *logs, script, *words, PYTHONPATH=os.environ.get("PYTHONPATH", "") or "/x"
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    seen = reports(tmp_path)
    each = len(cores) // ranks
    for rank, report in enumerate(seen):
        assert report["args"] == [f"--local_rank={rank}", *words]
        assert report["cores"] == cores[rank * each : (rank + 1) * each]
        assert report["OMP_NUM_THREADS"] == str(each)
        assert (report["LOCAL_SIZE"], report["CROSS_RANK"], report["CROSS_SIZE"]) == (str(ranks), "0", "1")
        assert report["MASTER_PORT"] == str(port)
        path = str(report["PYTHONPATH"]).split(os.pathsep)
        assert path[0] == str(compat.standin_directory())
        assert path[1:] == (os.environ.get("PYTHONPATH", "") or "/x").split(os.pathsep)
        assert report["pids"]
        (log,) = (tmp_path / "logs").glob(f"*_rank{rank}.log")
        assert sorted(log.read_text().splitlines()) == ["to stderr", "to stdout"]
    assert len(seen) == ranks
    assert not [pid for pid in seen[0]["pids"] if (Path("/tmp") / f"{pid}.deepspeed").exists()]  # type: ignore[union-attr,attr-defined]


def test_a_program_that_is_not_python_and_one_that_starts_again(zeroshard: Launch, tmp_path: Path) -> None:
    line = 'echo "$RANK of $WORLD_SIZE, try $TORCHELASTIC_RESTART_COUNT"; exit $((1 - TORCHELASTIC_RESTART_COUNT))'
    done = zeroshard("run", "-n", "1", "--max_restarts", "1", "--no_python", "sh", "-c", line)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["0 of 1, try 0", "0 of 1, try 1"]


def test_the_last_lines_of_the_rank_that_failed(zeroshard: Launch, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "import os, time\nif os.environ['RANK'] == '0': time.sleep(60)\n[][1]\n"
    )
    done = zeroshard("run", "-n", "2", "script.py")
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    told = lines.index("zeroshard: last lines of rank 1:")
    assert "IndexError: list index out of range" in lines[:told]  # at once, and again at the end
    assert lines[-2] == "  | IndexError: list index out of range"
    assert lines[-1].startswith("zeroshard: rank 1 (pid ")


def test_dry_run_prints_what_each_rank_would_be(zeroshard: Launch, script: str, tmp_path: Path) -> None:
    """Pasted into a shell it is what runs."""
    words = ("-n", "2", "--pass_local_rank", "--as_deepspeed", script, "a b", "$5", "it's")
    done = zeroshard("run", "--dry_run", *words)
    assert done.returncode == 0
    head, commands = done.stdout.split("\n", maxsplit=1)
    assert head == "2 ranks on this machine, which meet at 127.0.0.1, port free to choose:"
    assert commands.count(f"  {sys.executable} -u script.py --local_rank=") == 2
    assert not list(tmp_path.glob("rank?"))
    bare = {
        name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "OMP_NUM_THREADS")
    }
    subprocess.run(["sh", "-c", commands], cwd=tmp_path, env=bare, timeout=LIMIT_SECONDS, check=True)
    pasted = reports(tmp_path)
    assert zeroshard("run", *words).returncode == 0
    for rank, (shown, seen) in enumerate(zip(pasted, reports(tmp_path), strict=True)):
        assert shown["args"] == [f"--local_rank={rank}", *words[-3:]]
        same = "RANK", "args", "PYTHONPATH", "OMP_NUM_THREADS"
        assert [shown[name] for name in same] == [seen[name] for name in same]


def test_the_command_deepspeed(script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    received: list[tuple[list[str], dict[str, object]]] = []
    monkeypatch.setattr(command, "run", lambda words, **defaults: received.append((words, defaults)) or 3)
    assert deepspeed_commands.deepspeed(["--num_gpus", "2", script]) == 3
    assert received == [
        (["--num_gpus", "2", script], {"name": "deepspeed", "as_deepspeed": True, "pass_local_rank": True})
    ]


@pytest.fixture
def bad(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """`bad("--num_gpus", "9", "script.py")` fails before anything starts; what it said."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (tmp_path / "script.py").write_text("raise SystemExit('it started')")
    (tmp_path / "two").write_text("192.0.2.1 slots=2\n192.0.2.2 slots=2\n")
    (tmp_path / "malformed").write_text("a slots=2\nb slots\n")
    (tmp_path / "twice").write_text("a slots=2\na slots=2\n")
    (tmp_path / "empty").write_text("\n")
    (tmp_path / "binary").write_bytes(b"\xff\xfe slots=2\n")
    (tmp_path / "bin").mkdir()

    def launch(*words: str) -> str:
        before = dict(os.environ)
        assert cli.main(["run", *words]) == 2
        assert dict(os.environ) == before  # nothing for ranks is left with whoever called
        printed = capsys.readouterr()
        assert printed.out == ""
        assert printed.err.startswith("zeroshard: ")
        assert printed.err.count("\n") == 1
        return printed.err

    return launch


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["missing.py"], "there is no file 'missing.py'"),
        (["--no_python", "no-such-program"], "there is no program 'no-such-program'"),
        (["-H", "malformed", "script.py"], "malformed, line 2: 'b slots' is not of the form"),
        (["-H", "twice", "script.py"], "twice, line 2: host 'a' is there twice"),
        (["-H", "empty", "script.py"], "empty names no host"),
        (["-H", "binary", "script.py"], "--hostfile binary cannot be read"),
        (["--no_python", "./script.py"], "'./script.py' may not be executed (chmod +x)"),
        (["-H", "two", "-i", "c", "script.py"], "no host 'c' among 192.0.2.1, 192.0.2.2"),
        (["-H", "two", "-e", "192.0.2.1:2", "script.py"], "has no slot 2; it has 0,1"),
        (["-H", "two", "-i", "a", "-e", "b", "script.py"], "exclude each other"),
        (["-H", "two", "--num_gpus", "3", "script.py"], "host '192.0.2.1' has 2 slots"),
        (["-H", "two", "--num_nodes", "3", "script.py"], "there are 2 hosts"),
        (["--num_nodes", "2", "script.py"], "needs a hostfile"),
        (["--no_ssh", "--num_nodes", "2", "script.py"], "--node_rank is missing"),
        (["-n", "1", "--enable_each_rank_log", "two", "script.py"], "'two' is a file; give a directory"),
        (["-n", "1", "--enable_each_rank_log", "two/logs", "script.py"], "'two/logs' cannot be made"),
        (["-n", "2", "--bind_core_list", str(cores_here()[0]), "script.py"], "2 ranks, and only 1 cores"),
        (["-n", "1", "--bind_core_list", "99999", "script.py"], "core 99999 is not among those"),
        (
            ["-n", "1", "--master_addr", "no-such-host.invalid", "script.py"],
            "cannot resolve 'no-such-host.invalid'",
        ),
    ],
)
def test_bad_input_is_one_line_and_status_2(bad: Callable[..., str], words: list[str], told: str) -> None:
    assert told in bad(*words)


@pytest.mark.parametrize(
    ("launcher", "program"), [("ssh", "ssh"), ("pdsh", "pdsh"), ("mpich", "mpirun"), ("slurm", "srun")]
)
def test_a_missing_program(
    bad: Callable[..., str], launcher: str, program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    told = bad("-H", "two", "--launcher", launcher, "script.py")
    assert f"--launcher {launcher} needs the program '{program}'" in told


def test_a_port_in_use(bad: Callable[..., str]) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        assert f"port {port} is in use" in bad("-n", "1", "--master_port", str(port), "script.py")


def test_more_ranks_than_accelerators(bad: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert "slot 2 (of 3 ranks here) has no accelerator: this machine shows 2" in bad("-n", "3", "script.py")
    assert "host 'localhost' has no slot 5; it has 0,1" in bad("-i", "localhost:5", "script.py")
    assert "no host 'other' among localhost" in bad("-i", "other", "script.py")


def test_slots_become_devices(
    bad: Callable[..., str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch

    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for words, devices in (([], "4,5"), (["-i", "localhost:1"], "5"), (["-i", "localhost:1,0"], "5,4")):
        assert cli.main(["run", "--dry_run", "--no_as_deepspeed", *words, "script.py"]) == 0
        shown = capsys.readouterr().out.replace("'", "")
        ranks = len(devices.split(","))
        assert shown.count(f"  CUDA_VISIBLE_DEVICES={devices} \\\n") == ranks
        assert shown.count(" -u script.py") == ranks


def test_devices_that_are_hidden_are_no_mistake(
    bad: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    for hidden in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert cli.main(["run", "--dry_run", "-n", "1", "script.py"]) == 0
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    with pytest.raises(LaunchError, match="CUDA_VISIBLE_DEVICES=7 names no device"):
        command.run(["--dry_run", "-n", "1", "script.py"])


def test_a_node_rank_without_no_ssh_is_told(
    bad: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["run", "--dry_run", "-n", "1", "--node_rank", "0", "script.py"]) == 0
    assert "zeroshard: --node_rank 0 has no effect without --no_ssh\n" in capsys.readouterr().err


@pytest.mark.skipif(sys.platform != "linux", reason="ranks die with their agent on Linux")
def test_ranks_die_with_a_launcher_that_is_killed(
    tmp_path: Path, clean_environment: dict[str, str], is_running: Callable[[int], bool]
) -> None:
    (tmp_path / "script.py").write_text("import os, time; print(os.getpid(), flush=True); time.sleep(600)")
    words = [sys.executable, "-m", "zeroshard", "run", "-n", "1", "script.py"]
    (tmp_path / "temporary").mkdir()
    environment = clean_environment | {"TMPDIR": str(tmp_path / "temporary")}
    launcher = subprocess.Popen(words, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True)
    assert launcher.stdout is not None
    rank = int(launcher.stdout.readline())
    launcher.send_signal(signal.SIGKILL)
    launcher.communicate(timeout=LIMIT_SECONDS)
    end = time.monotonic() + LIMIT_SECONDS
    while is_running(rank):
        if time.monotonic() > end:
            os.kill(rank, signal.SIGKILL)
            pytest.fail("the rank goes on")
        time.sleep(0.02)
    assert not list((tmp_path / "temporary").iterdir())


@pytest.mark.skipif(sys.platform != "linux", reason="/proc says what a process has open")
def test_closed_standard_streams_are_not_taken_for_other_files(
    tmp_path: Path, clean_environment: dict[str, str]
) -> None:
    """What the launcher opens would have their numbers, and the ranks would have that for their own."""
    (tmp_path / "script.py").write_text(
        "import os\nopen('seen', 'w').write(os.readlink('/proc/self/fd/0'))\nprint('nobody reads it')"
    )
    run = [sys.executable, "-m", "zeroshard", "run", "-n", "1", "script.py"]
    words = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "-", *run]
    done = subprocess.run(words, cwd=tmp_path, env=clean_environment, timeout=LIMIT_SECONDS, check=False)
    assert done.returncode == 0
    assert (tmp_path / "seen").read_text() == os.devnull


@pytest.mark.parametrize(
    ("launcher", "option", "told"), [("slurm", "-q", 0), ("openmpi", "", 1), ("mpich", "", 1)]
)
def test_who_cannot_be_asked_first_is_told(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    launcher: str,
    option: str,
    told: int,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "require_program", lambda launcher: None)
    monkeypatch.setattr(command, "run_starts", lambda *given: 0)
    (tmp_path / "hosts").write_text("a slots=1\nb slots=1\n")
    (tmp_path / "t.py").touch()
    words = [*filter(None, [option]), "-H", "hosts", "--launcher", launcher, "t.py"]
    assert command.run(words) == 0
    assert capsys.readouterr().err.count(f"--launcher {launcher}: hosts are not asked first") == told
    assert command.run(["--no_ssh_check", *words]) == 0
    assert "asked" not in capsys.readouterr().err
