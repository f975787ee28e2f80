"""The exact commands that bring a job to its hosts, for every launcher."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from zeroshard.errors import LaunchError
from zeroshard.launch import remote
from zeroshard.launch.hosts import Hosts
from zeroshard.launch.options import parse_options
from zeroshard.launch.plan import choose_hosts, choose_launcher, plan_job
from zeroshard.launch.remote import LAUNCHERS, Job, Start, build_starts, require_program

EQUAL: Hosts = {"node1": (0, 1), "me@node2": (0, 1)}
UNEQUAL: Hosts = {"node1": (0, 1), "node2": (0, 2)}
SSH = "ssh -o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=15 -o ServerAliveCountMax=4"
HERE = "/work dir"


@pytest.fixture(autouse=True)
def somewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(Path, "cwd", lambda: Path(HERE))
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    monkeypatch.setattr(sys, "executable", "/bin/python3")


def plan(words: str, hosts: Hosts, launcher: str, environ: dict[str, str] | None = None) -> Job:
    options = parse_options([*shlex.split(words), "train.py", "--lr", "1 e-3"])
    return plan_job(options, hosts, launcher, environ or {})


def starts(words: str, hosts: Hosts, launcher: str, environ: dict[str, str] | None = None) -> list[Start]:
    return build_starts(launcher, plan(words, hosts, launcher, environ), environ or {})


def on_host(rank: int, ending: str, slots: str = "--num_gpus=2") -> str:
    return (
        f"/bin/python3 -m zeroshard run --no_ssh --hostfile= --node_rank={rank} --num_nodes=2 --master_addr=node1 "
        f"--master_port=29500 {slots} --log_level=info{ending} train.py --lr '1 e-3'"
    )


def environment(**more: str) -> str:
    return " ".join(["env", *(f"{name}={value}" for name, value in more.items()), f"PYTHONPATH='{HERE}'"])


RECEIVE = f"/bin/python3 -I -S -c {shlex.quote(remote._RECEIVE)}"


def test_ssh_hides_the_environment() -> None:
    first, second = starts("", EQUAL, "ssh", {"NCCL_DEBUG": "INFO"})
    for rank, start in enumerate((first, second)):
        *ssh, line = start.words
        assert shlex.join(ssh) == f"{SSH} {start.host}"
        assert line == f"cd '{HERE}' && exec {RECEIVE} {on_host(rank, ' --attached=launcher')}"
        assert start.listens
        assert json.loads(start.first_line) == {"NCCL_DEBUG": "INFO", "PYTHONPATH": HERE}
    assert [first.host, second.host] == ["node1", "me@node2"]


def test_ssh_as_it_is_shown() -> None:
    job = replace(plan("", EQUAL, "ssh", {"NCCL_DEBUG": "INFO"}), shown=True)
    for rank, start in enumerate(build_starts("ssh", job, {})):
        expected = (
            f"cd '{HERE}' && exec {environment(NCCL_DEBUG='INFO')} {on_host(rank, ' --attached=launcher')}"
        )
        assert start.words[-1] == expected.replace(f"PYTHONPATH='{HERE}'", f"'PYTHONPATH={HERE}'")
        assert not start.first_line


def test_a_host_takes_its_environment_from_the_first_line_and_leaves_the_rest() -> None:
    code = "import os; print(os.environ['SECRET'], os.read(0, 99))"
    words = [sys._base_executable, "-I", "-S", "-c", remote._RECEIVE, sys._base_executable, "-c", code]  # type: ignore[attr-defined]
    secret = "a 'word'\n\udcff"
    done = subprocess.run(
        words,
        input=json.dumps({"SECRET": secret}).encode() + b"\n\nSIGINT\n",
        capture_output=True,
        check=True,
    )
    assert done.stdout == b"a 'word'\n\xff b'\\nSIGINT\\n'\n"


def test_the_users_words_for_ssh_come_first_and_the_port_only_if_there_is_one() -> None:
    start = starts("--ssh_port 2222 --launcher_args '-F conf -o ConnectTimeout=3'", EQUAL, "ssh")[0]
    assert start.words[:8] == ("ssh", "-F", "conf", "-o", "ConnectTimeout=3", "-p", "2222", "-o")
    assert "-p" not in starts("", EQUAL, "ssh")[0].words


def test_this_machine_needs_no_ssh() -> None:
    start, other = starts("--master_addr node1", {"localhost": (0, 1), "node2": (0, 1)}, "ssh")
    assert shlex.join(start.words) == on_host(0, " --attached=launcher")
    assert start.environment == {"PYTHONPATH": HERE}
    assert other.words[0] == "ssh"
    forced, _ = starts("--master_addr node1 --force_multi", {"localhost": (0, 1), "node2": (0, 1)}, "ssh")
    assert forced.words[0] == "ssh"


def test_a_virtual_environment_is_sourced_and_its_python_taken() -> None:
    line = starts("--venv_script 'my env/activate'", EQUAL, "ssh")[0].words[-1]
    assert line.startswith("exec bash -c ")
    script = shlex.split(line)[3]
    assert script.startswith(f"cd '{HERE}' && source 'my env/activate' && exec python -I -S -c ")
    assert " python -m zeroshard run " in script
    here = starts("--venv_script v --master_addr n", {"localhost": (0,), "node2": (0,)}, "ssh")[0]
    assert here.words[:2] == ("bash", "-c")


def test_pdsh_numbers_hosts_itself() -> None:
    (start,) = starts("--launcher_args '-t 5'", EQUAL, "pdsh")
    line = f"cd '{HERE}' && exec env 'PYTHONPATH={HERE}' {on_host(0, ' --attached=stdin')}"
    expected = line.replace("node_rank=0", "node_rank=%n")
    assert start.words == ("pdsh", "-S", "-b", "-f", "1024", "-w", "node1,me@node2", "-t", "5", expected)
    assert start.environment == {"PDSH_RCMD_TYPE": "ssh"}
    assert not start.listens


def test_pdsh_keeps_what_is_set_for_ssh_and_adds_the_port() -> None:
    kept = {"PDSH_SSH_ARGS_APPEND": "-i key", "PDSH_RCMD_TYPE": "exec"}
    assert starts("--ssh_port 22", EQUAL, "pdsh", kept)[0].environment == {
        "PDSH_RCMD_TYPE": "exec",
        "PDSH_SSH_ARGS_APPEND": "-i key -p 22",
    }
    assert starts("--ssh_port 22", EQUAL, "pdsh")[0].environment["PDSH_SSH_ARGS_APPEND"] == "-p 22"
    assert "PDSH_SSH_ARGS_APPEND" not in starts("", EQUAL, "pdsh", kept)[0].environment


@pytest.mark.parametrize("rank", [0, 1])
def test_pdsh_with_hosts_that_differ_chooses_by_number(rank: int) -> None:
    line = starts("", UNEQUAL, "pdsh")[0].words[-1]
    assert line.startswith("case %n in 0) ")
    # As pdsh and the shell there would read it.
    script = (
        line.replace("%n", str(rank))
        .replace("%%", "%")
        .replace("exec env", "echo")
        .replace(f"cd '{HERE}'", ":")
    )
    shown = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True).stdout
    slots = ("--num_gpus=2", "--slots=0,2")[rank]
    assert f" --node_rank={rank} " in shown
    assert f" {slots} " in shown


def test_a_percent_sign_reaches_the_script_through_pdsh() -> None:
    options = parse_options(["train.py", "--format=%n%h"])
    (start,) = build_starts("pdsh", plan_job(options, EQUAL, "pdsh", {}), {})
    assert start.words[-1].endswith("train.py --format=%%n%%h")


def test_openmpi() -> None:
    (start,) = starts("--launcher_args='--allow-run-as-root'", UNEQUAL, "openmpi")
    parts = (
        f"--host node1:1 -np 1 --bind-to none env 'PYTHONPATH={HERE}' {on_host(0, '')}",
        f"--host node2:1 -np 1 --bind-to none env 'PYTHONPATH={HERE}' {on_host(1, '', '--slots=0,2')}",
    )
    assert shlex.join(start.words) == f"mpirun --allow-run-as-root {parts[0]} : {parts[1]}"


@pytest.mark.parametrize(
    ("launcher", "pinning"),
    [("mpich", {}), ("impi", {"I_MPI_PIN": "0"}), ("mvapich", {"MV2_ENABLE_AFFINITY": "0"})],
)
def test_hydra(launcher: str, pinning: dict[str, str]) -> None:
    (start,) = starts("", UNEQUAL, launcher)
    parts = (
        f"-n 1 env 'PYTHONPATH={HERE}' {on_host(0, '')}",
        f"-n 1 env 'PYTHONPATH={HERE}' {on_host(1, '', '--slots=0,2')}",
    )
    assert shlex.join(start.words) == f"mpirun -hosts node1,node2 -ppn 1 {parts[0]} : {parts[1]}"
    assert start.environment == pinning
    assert starts("", UNEQUAL, launcher, dict.fromkeys(pinning, "1"))[0].environment == dict.fromkeys(
        pinning, "1"
    )


SRUN = "srun --nodes=2 --ntasks=2 --ntasks-per-node=1 --cpu-bind=none --kill-on-bad-exit=1 --disable-status"


def test_srun_lets_each_host_find_its_place() -> None:
    (start,) = starts("--launcher_args '--partition gpu'", EQUAL, "slurm")
    assert shlex.join(start.words) == (
        f"{SRUN} --nodelist=node1,me@node2 --partition gpu env 'PYTHONPATH={HERE}' /bin/python3 -m zeroshard run "
        "--no_ssh --hostfile= --master_port=29500 --num_gpus=2 --log_level=info train.py --lr '1 e-3'"
    )
    assert "--master_addr=10.0.0.1" in starts("--master_addr 10.0.0.1", EQUAL, "slurm")[0].words
    with pytest.raises(LaunchError, match="slots differ"):
        starts("", UNEQUAL, "slurm")


def test_inside_of_an_allocation_srun_is_the_launcher_and_slurm_names_the_hosts() -> None:
    environ = {
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_NODELIST": "gpu[08-09]",
        "SLURM_GPUS_ON_NODE": "4",
        "CUDA_VISIBLE_DEVICES": "0,1,2,3",
    }
    options = parse_options(["train.py"])
    hosts = choose_hosts(options, environ)
    assert hosts == {"gpu08": (0, 1, 2, 3), "gpu09": (0, 1, 2, 3)}
    assert choose_launcher(options, environ) == "slurm"
    (start,) = build_starts("slurm", plan_job(options, hosts, "slurm", environ), environ)
    assert shlex.join(start.words).startswith(f"{SRUN} env ")
    assert "--num_gpus=4" in start.words
    chosen = choose_hosts(parse_options(["-i", "gpu09:1", "train.py"]), environ)
    assert chosen == {"gpu09": (1,)}
    assert choose_launcher(parse_options(["--launcher", "ssh", "train.py"]), environ) == "ssh"
    # The shell of salloc is a step of its own kind; a step that srun started is not to start another one.
    shell = environ | {"SLURM_STEP_NODELIST": "gpu08", "SLURM_STEP_ID": "4294967290"}
    assert choose_launcher(options, shell) == "slurm"
    assert choose_hosts(options, shell | {"SLURM_STEP_ID": "0"}) is None


@pytest.mark.parametrize("option", ["--venv_script", "--ssh_port"])
def test_what_only_ssh_knows_is_no_silent_word_for_others(option: str) -> None:
    for launcher in set(LAUNCHERS) - {"ssh", "pdsh"}:
        with pytest.raises(LaunchError, match=f"{option} is for --launcher ssh and pdsh; for {launcher} use"):
            starts(f"{option} 22", EQUAL, launcher)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_program_that_is_missing_is_named(launcher: str, tmp_path: Path) -> None:
    with pytest.raises(
        LaunchError, match=f"--launcher {launcher} needs the program '(ssh|pdsh|mpirun|srun)'"
    ):
        require_program(launcher, path=str(tmp_path))


def test_options_of_the_script_go_along() -> None:
    flags = "--module --pass_local_rank --as_deepspeed"
    values = "--bind_core_list=0-3 --enable_each_rank_log=logs --max_restarts=2"
    first = plan(f"{flags} {values} --num_nodes 1:4 -q", EQUAL, "ssh").commands[0].words
    assert {*flags.split(), *values.split()} <= set(first)
    assert "--num_nodes=1:2" in first  # of the four there are two
    assert "--log_level=error" in first
