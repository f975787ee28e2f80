"""The launcher over two hosts: network namespaces joined by a cable, with an sshd in each.

Everything is under the test's own directory: keys, configuration, the hostfile. What was started is ended by its
process id.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

LIMIT_SECONDS = 90
SSH_PORT = 2222

ALL_REDUCE = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
value = torch.tensor([dist.get_rank() + 1.0])
dist.all_reduce(value)
names = "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE", "FROM_FILE", "MASTER_ADDR"
print("SAW", value.item(), *(os.environ[name] for name in names), flush=True)
dist.barrier()
dist.destroy_process_group()
"""

# Needs no torch. The last rank does as told once all are up; the others would sleep on.
LAST_RANK = """
import os, pathlib, signal, sys, time
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
pathlib.Path(f"up{{rank}}").touch()
while len(list(pathlib.Path().glob("up*"))) < size:
    time.sleep(0.01)
if rank == size - 1:
    {ending}
time.sleep(600)
"""


@dataclass
class Network:
    """Two hosts; this process's commands run on the first."""

    names: tuple[str, str]
    addresses: tuple[str, str]
    folder: Path
    servers: tuple[int, ...]

    def command(self, *words: str) -> list[str]:
        ssh = f"-F {self.folder / 'ssh_config'}"
        run = [sys.executable, "-m", "zeroshard", "run", "--launcher_args", ssh, "--ssh_port", str(SSH_PORT)]
        return ["ip", "netns", "exec", self.names[0], *run, *words]

    def by_hand(self, rank: int, *words: str) -> list[str]:
        run = [sys.executable, "-m", "zeroshard", "run", "--no_ssh", "--master_addr", self.addresses[0]]
        return ["ip", "netns", "exec", self.names[rank], *run, "--node_rank", str(rank), *words]

    def hostfile(self, folder: Path, *slots: int) -> list[str]:
        file = folder / "hostfile"
        lines = (f"{address} slots={n}\n" for address, n in zip(self.addresses, slots, strict=True))
        file.write_text("".join(lines))
        return ["--hostfile", str(file)]

    def processes(self) -> dict[int, str]:
        """What runs on the hosts, apart from the servers that wait for connections."""
        found = {}
        for name in self.names:
            listed = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=True)
            for pid in map(int, listed.stdout.split()):
                if pid not in self.servers:
                    found[pid] = read_command(pid)
        return {pid: command for pid, command in found.items() if command}

    def wait_until_empty(self) -> None:
        end = time.monotonic() + LIMIT_SECONDS
        while left := self.processes():
            assert time.monotonic() < end, left
            time.sleep(0.05)


def read_command(pid: int) -> str:
    """Its words; "" if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""


def configure_ssh(folder: Path) -> None:
    for key in ("host_key", "user_key"):
        words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key)]
        subprocess.run(words, check=True, timeout=LIMIT_SECONDS)
    shutil.copy(folder / "user_key.pub", folder / "authorized_keys")
    (folder / "sshd_config").write_text(
        f"Port {SSH_PORT}\nHostKey {folder}/host_key\nAuthorizedKeysFile {folder}/authorized_keys\n"
        "StrictModes no\nPasswordAuthentication no\nPermitRootLogin yes\nUsePAM no\nPidFile none\n"
    )
    (folder / "ssh_config").write_text(
        f"IdentityFile {folder}/user_key\nIdentitiesOnly yes\nStrictHostKeyChecking no\n"
        "UserKnownHostsFile /dev/null\nLogLevel ERROR\n"
    )


def ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False)
    if done.returncode:
        pytest.skip(f"no network namespaces here: ip {' '.join(words)}: {done.stderr.strip()}")


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    sshd = shutil.which("sshd", path=os.environ["PATH"] + ":/usr/sbin")
    for program in ("ip", "ssh", "ssh-keygen"):
        if shutil.which(program) is None:
            pytest.skip(f"no program {program!r} here")
    if sshd is None:
        pytest.skip("no sshd here")
    if os.geteuid() != 0:
        pytest.skip("network namespaces want root")
    folder = tmp_path_factory.mktemp("network")
    configure_ssh(folder)
    Path("/run/sshd").mkdir(exist_ok=True)
    number = os.getpid()
    names = (f"zs{number}a", f"zs{number}b")
    addresses = ("10.213.7.1", "10.213.7.2")
    servers: list[subprocess.Popen[bytes]] = []
    try:
        for name in names:
            ip("netns", "add", name)
        ip(
            "link",
            "add",
            f"v{number}a",
            "netns",
            names[0],
            "type",
            "veth",
            "peer",
            f"v{number}b",
            "netns",
            names[1],
        )
        for name, side, address in zip(names, "ab", addresses, strict=True):
            ip("-n", name, "address", "add", f"{address}/24", "dev", f"v{number}{side}")
            for link in ("lo", f"v{number}{side}"):
                ip("-n", name, "link", "set", link, "up")
            log = (folder / f"sshd_{side}").open("wb")
            words = ["ip", "netns", "exec", name, sshd, "-D", "-e", "-f", str(folder / "sshd_config")]
            servers.append(subprocess.Popen(words, stdout=log, stderr=log))
        yield Network(names, addresses, folder, tuple(server.pid for server in servers))
    finally:
        for server in servers:
            server.terminate()
            server.wait()
        for name in names:
            left = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=False)
            for pid in map(int, left.stdout.split()):  # a test has failed: leave nothing either
                os.kill(pid, signal.SIGKILL)
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


@pytest.fixture
def environment(clean_environment: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in clean_environment.items() if not name.startswith("SLURM")}


def run(words: list[str], folder: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        words, cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False
    )


def test_ranks_of_both_hosts_reduce_together(
    network: Network, tmp_path: Path, environment: dict[str, str]
) -> None:
    (tmp_path / "script.py").write_text(ALL_REDUCE)
    (tmp_path / ".deepspeed_env").write_text('FROM_FILE=it\'s a "$HOME"\n')
    words = network.command(*network.hostfile(tmp_path, 1, 2), "script.py")
    done = run(words, tmp_path, environment)
    assert done.returncode == 0, done.stderr
    first, second = network.addresses
    place = f'it\'s a "$HOME" {first}'
    # gloo of torch 2.9 prints a line of its own.
    assert sorted(line for line in done.stdout.splitlines() if "[Gloo]" not in line) == [
        f"{first}: SAW 6.0 0 3 0 1 0 2 {place}",
        f"{second}: SAW 6.0 1 3 0 2 1 2 {place}",
        f"{second}: SAW 6.0 2 3 1 2 1 2 {place}",
    ]
    network.wait_until_empty()


@pytest.mark.parametrize(
    ("ending", "status", "told"),
    [
        ("print('so it is', file=sys.stderr); sys.exit(7)", 7, "ended with exit code 7"),
        (
            "os.kill(os.getpid(), signal.SIGKILL)",
            128 + 9,
            "was killed by SIGKILL, which is what the system does",
        ),
    ],
)
def test_a_rank_that_fails_on_the_second_host_is_named_and_ends_the_job(
    network: Network, tmp_path: Path, environment: dict[str, str], ending: str, status: int, told: str
) -> None:
    (tmp_path / "script.py").write_text(LAST_RANK.format(ending=ending))
    words = network.command("--no_ssh_check", *network.hostfile(tmp_path, 1, 1), "script.py")
    done = run(words, tmp_path, environment)
    assert done.returncode == status, done.stderr
    lines = done.stderr.splitlines()
    assert f"on {network.addresses[1]} {told}" in lines[-1]
    assert lines[-1].startswith("zeroshard: rank 1 (pid ")
    assert lines[-1].endswith("; the others were stopped")
    if status == 7:
        assert lines[-3:-1] == ["zeroshard: last lines of rank 1:", "  | so it is"]
    network.wait_until_empty()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_when_the_launcher_ends(
    network: Network, tmp_path: Path, environment: dict[str, str], number: signal.Signals
) -> None:
    (tmp_path / "script.py").write_text(LAST_RANK.format(ending="pathlib.Path('all').touch()"))
    words = network.command("--no_ssh_check", *network.hostfile(tmp_path, 1, 1), "script.py")
    launcher = subprocess.Popen(words, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True)
    try:
        end = time.monotonic() + LIMIT_SECONDS
        while not (tmp_path / "all").exists():
            assert time.monotonic() < end, "ranks did not come up"
            assert launcher.poll() is None, launcher.stderr.read() if launcher.stderr else ""
            time.sleep(0.02)
        launcher.send_signal(number)
        _, told = launcher.communicate(timeout=LIMIT_SECONDS)
    finally:
        launcher.kill()
        launcher.wait()
    if number == signal.SIGINT:
        assert launcher.returncode == 128 + signal.SIGINT
        assert told.splitlines()[-1] == "zeroshard: stopped by SIGINT; all ranks have ended"
    network.wait_until_empty()


def test_a_host_that_is_down_is_named_before_anything_starts(
    network: Network, tmp_path: Path, environment: dict[str, str]
) -> None:
    (tmp_path / "script.py").write_text("import pathlib; pathlib.Path('started').touch()")
    words = network.hostfile(tmp_path, 1, 1)
    with (tmp_path / "hostfile").open("a") as file:
        file.write("10.213.7.99 slots=1\n")
    done = run(network.command(*words, "script.py"), tmp_path, environment)
    assert done.returncode == 2
    said = done.stderr.splitlines()
    assert said[-2] == "zeroshard: 1 of 3 hosts cannot take part:"
    assert said[-1].startswith("  10.213.7.99: cannot be reached over ssh (")
    assert not (tmp_path / "started").exists()


def test_a_host_started_by_hand_learns_that_another_one_failed(
    network: Network, tmp_path: Path, environment: dict[str, str]
) -> None:
    (tmp_path / "script.py").write_text(LAST_RANK.format(ending="sys.exit(7)"))
    words = ("--num_nodes", "2", "--num_gpus", "1", "script.py")
    first = subprocess.Popen(
        network.by_hand(0, *words), cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True
    )
    try:
        second = run(network.by_hand(1, *words), tmp_path, environment)
        _, told = first.communicate(timeout=LIMIT_SECONDS)
    finally:
        first.kill()
        first.wait()
    assert second.returncode == first.returncode == 7
    failure = second.stderr.splitlines()[-1]
    assert "ended with exit code 7; the others were stopped" in failure
    assert told.splitlines()[-1] == failure.replace("zeroshard: ", "zeroshard: stopping: ")
    network.wait_until_empty()


@pytest.mark.skipif(shutil.which("pdsh") is None, reason="no pdsh here")
def test_pdsh(network: Network, tmp_path: Path, environment: dict[str, str]) -> None:
    (tmp_path / "script.py").write_text(
        "import os, sys\nprint('SAW', os.environ['RANK'], sys.argv[1:], flush=True)\n"
        "sys.exit(int(os.environ['RANK']))\n"
    )
    words = (
        "--launcher",
        "pdsh",
        "--no_ssh_check",
        "--include",
        f"{network.addresses[1]}@{network.addresses[0]}:1",
    )
    command = network.command(*words, *network.hostfile(tmp_path, 2, 1), "script.py", "%n $HOME 'x'")
    command[command.index("--launcher_args") + 1] = f"-u {LIMIT_SECONDS - 10}"
    ssh = {"PDSH_SSH_ARGS_APPEND": f"-F {network.folder / 'ssh_config'}"}
    done = run(command, tmp_path, environment | ssh)
    first, second = network.addresses
    shown = "[\"%n $HOME 'x'\"]"
    assert sorted(done.stdout.splitlines()) == [f"{first}: SAW 0 {shown}", f"{second}: SAW 1 {shown}"]
    assert done.returncode == 1
    assert f"{second}: zeroshard: rank 1 (pid " in done.stderr
    network.wait_until_empty()


def test_one_command_on_every_host(
    network: Network, tmp_path: Path, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ssh").write_text(
        f'#!/bin/sh\nexec {shutil.which("ssh")} -F {network.folder}/ssh_config -p {SSH_PORT} "$@"\n'
    )
    (tmp_path / "ssh").chmod(0o755)
    code = "import sys; from zeroshard.launch.deepspeed_commands import ds_ssh; sys.exit(ds_ssh())"
    _, file = network.hostfile(tmp_path, 1, 1)
    words = ["ip", "netns", "exec", network.names[0], sys.executable, "-c", code, "-f", file]
    path = {"PATH": f"{tmp_path}:{environment['PATH']}"}
    done = run([*words, "echo", "two  words"], tmp_path, environment | path)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"{address}: two  words" for address in network.addresses]
    done = run([*words, f"test -d {tmp_path} && exit 3"], tmp_path, environment | path)
    assert done.returncode == 3
    assert done.stderr.splitlines()[-1].endswith(" ended with exit status 3")


@pytest.mark.slow
def test_the_job_goes_on_when_a_host_is_lost(
    network: Network, tmp_path: Path, environment: dict[str, str]
) -> None:
    """torchrun waits half a minute for more hosts when fewer are left than it was told to hope for."""
    (tmp_path / "script.py").write_text(
        "import os, pathlib, sys, time\n"
        "size, again = os.environ['WORLD_SIZE'], os.environ['TORCHELASTIC_RESTART_COUNT']\n"
        "pathlib.Path(f'saw{size}').touch()\n"
        "if size == '2': time.sleep(8); sys.exit(1)  # as a collective that lost its peer\n"
        "print('SAW', size, again, flush=True)\n"
    )
    options = ("--no_ssh_check", "--num_nodes", "1:2", "--max_restarts", "3")
    command = network.command(*options, *network.hostfile(tmp_path, 1, 1), "script.py")
    launcher = subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        end = time.monotonic() + LIMIT_SECONDS
        while not (tmp_path / "saw2").exists():
            assert time.monotonic() < end, "ranks did not come up"
            time.sleep(0.05)
        for pid, words in network.processes().items():
            if "--node_rank=1" in words and words.startswith(sys.executable):
                os.kill(pid, signal.SIGKILL)
        printed, told = launcher.communicate(timeout=LIMIT_SECONDS)
    finally:
        launcher.kill()
        launcher.wait()
    first, second = network.addresses
    assert launcher.returncode == 0, told
    assert printed == f"{first}: SAW 1 1\n"
    assert f"zeroshard: the connection to {second} ended; going on with 1" in told
    network.wait_until_empty()
