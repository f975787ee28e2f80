"""Commands that start one process per host: over ssh, pdsh, mpirun or srun.

What runs on a host is always the same, `python -m zeroshard run --no_ssh ...` (`plan.py`); a transport only brings
it there. So these are pure functions from that command to the words of another one. mpirun and srun start one
process per host, which starts the ranks, and never bind it to a core.
"""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from zeroshard.errors import LaunchError

__all__ = [
    "LAUNCHERS",
    "HostCommand",
    "Job",
    "Start",
    "build_starts",
    "on_host",
    "require_program",
    "ssh_words",
]

# The environment comes as the first line of standard input: a command line can be read by everybody (`ps`).
_RECEIVE = (
    'import json, os, sys; os.environ.update(json.loads(open(0, "rb", 0, closefd=False).readline() or "{}")); '
    "os.execvp(sys.argv[1], sys.argv[1:])"
)
_CONNECT_SECONDS = 10
_ALIVE_SECONDS, _ALIVE_COUNT = 15, 4  # a connection that is dead for a minute ends


@dataclass(frozen=True)
class HostCommand:
    """What runs on one host."""

    host: str
    words: tuple[str, ...]
    here: bool = False  # it is this machine, and needs no transport


@dataclass(frozen=True)
class Job:
    """What runs on all hosts, and what a transport has to know."""

    commands: tuple[HostCommand, ...]
    directory: str
    environment: Mapping[str, str]
    launcher_args: tuple[str, ...] = ()
    ssh_port: int | None = None
    venv_script: str | None = None
    named_hosts: bool = True  # the user chose hosts; False: all that SLURM gave
    shown: bool = False  # for people, who want to see and to type it: all is on the command line


@dataclass(frozen=True)
class Start:
    """One process to start on this machine: its words, and what is added to its environment."""

    host: str  # of whom its output is; "" if its lines are labelled, or of all
    words: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    listens: bool = False  # it reads signals on standard input and stops at its end (`lifeline.py`)
    first_line: str = ""  # for its standard input


def ssh_words(job: Job, host: str) -> tuple[str, ...]:
    """ssh up to the remote command. The user's words come first: ssh takes the first value of an option."""
    port = () if job.ssh_port is None else ("-p", str(job.ssh_port))
    alive = f"ServerAliveInterval={_ALIVE_SECONDS}", f"ServerAliveCountMax={_ALIVE_COUNT}"
    options = ("BatchMode=yes", f"ConnectTimeout={_CONNECT_SECONDS}", *alive)
    return ("ssh", *job.launcher_args, *port, *(word for o in options for word in ("-o", o)), host)


def _shell_line(job: Job, words: tuple[str, ...]) -> str:
    """The line for a shell on the host: the directory, then the command."""
    there = f"cd {shlex.quote(job.directory)} && "
    command = f"exec {shlex.join(words)}"
    if job.venv_script:
        script = f"{there}source {shlex.quote(job.venv_script)} && {command}"
        return f"exec bash -c {shlex.quote(script)}"
    return there + command


def on_host(job: Job, command: HostCommand, words: tuple[str, ...]) -> Start:
    """`words` on the host of `command`: over ssh, or started from here if that is this machine."""
    if command.here:
        if job.venv_script:
            words = ("bash", "-c", _shell_line(job, words))
        return Start(command.host, words, job.environment)
    if job.shown:
        line, first = _shell_line(job, _with_environment(job, words)), ""
    else:
        line, first = _shell_line(job, (words[0], "-I", "-S", "-c", _RECEIVE, *words)), _as_line(job)
    return Start(command.host, (*ssh_words(job, command.host), line), first_line=first)


def _as_line(job: Job) -> str:
    return json.dumps(dict(job.environment)) + "\n"


def _with_environment(job: Job, words: tuple[str, ...]) -> tuple[str, ...]:
    return ("env", *(f"{name}={value}" for name, value in job.environment.items()), *words)


def _ssh(job: Job, environ: Mapping[str, str]) -> list[Start]:
    return [replace(on_host(job, command, command.words), listens=True) for command in job.commands]


def _pdsh(job: Job, environ: Mapping[str, str]) -> list[Start]:
    """One pdsh for all. It replaces %n by the place of the host; a % of ours is written twice."""
    hosts = ",".join(command.host for command in job.commands)
    lines = [_shell_line(job, _with_environment(job, c.words)).replace("%", "%%") for c in job.commands]
    anywhere = {line.replace(f"--node_rank={rank}", "--node_rank=%n", 1) for rank, line in enumerate(lines)}
    if len(anywhere) == 1:
        line = anywhere.pop()
    else:  # hosts differ in their slots
        line = " ".join(["case %n in", *(f"{rank}) {line} ;;" for rank, line in enumerate(lines)), "esac"])
    added = {"PDSH_RCMD_TYPE": environ.get("PDSH_RCMD_TYPE", "ssh")}
    if job.ssh_port is not None:
        kept = environ.get("PDSH_SSH_ARGS_APPEND", "")
        added["PDSH_SSH_ARGS_APPEND"] = f"{kept} -p {job.ssh_port}".strip()
    # -S: the largest exit status is pdsh's; -b: one Ctrl-C ends it; -f: all hosts at once.
    fixed = ("pdsh", "-S", "-b", "-f", str(max(1024, len(job.commands))), "-w", hosts)
    return [Start("", (*fixed, *job.launcher_args, line), added)]


def _openmpi(job: Job, environ: Mapping[str, str]) -> list[Start]:
    parts = [
        ("--host", f"{c.host}:1", "-np", "1", "--bind-to", "none", *_with_environment(job, c.words))
        for c in job.commands
    ]
    return [Start("", ("mpirun", *job.launcher_args, *_joined(parts)))]


def _hydra(**added: str) -> Callable[[Job, Mapping[str, str]], list[Start]]:
    """MPICH, Intel MPI and MVAPICH share one process starter, which takes hosts in turn, one process each."""

    def build(job: Job, environ: Mapping[str, str]) -> list[Start]:
        hosts = ",".join(command.host for command in job.commands)
        parts = [("-n", "1", *_with_environment(job, command.words)) for command in job.commands]
        words = ("mpirun", *job.launcher_args, "-hosts", hosts, "-ppn", "1", *_joined(parts))
        return [Start("", words, {name: environ.get(name, value) for name, value in added.items()})]

    return build


def _joined(parts: list[tuple[str, ...]]) -> tuple[str, ...]:
    """Programs side by side, as mpirun has them: first : second : third."""
    return tuple(word for number, part in enumerate(parts) for word in ((":",) if number else ()) + part)


def _slurm(job: Job, environ: Mapping[str, str]) -> list[Start]:
    """One srun. SLURM sorts hosts by itself, so each learns its place there: see `plan.place_in_slurm`."""
    words = {command.words for command in job.commands}
    if len(words) > 1:
        raise LaunchError(
            "srun starts the same command on every host, but slots differ: give all hosts the same"
        )
    count = len(job.commands)
    fixed = (f"--nodes={count}", f"--ntasks={count}", "--ntasks-per-node=1", "--cpu-bind=none")
    # One failed host ends the others; one Ctrl-C is passed on at once.
    ending = ("--kill-on-bad-exit=1", "--disable-status")
    hosts = ("--nodelist=" + ",".join(c.host for c in job.commands),) if job.named_hosts else ()
    command = _with_environment(job, words.pop())
    return [Start("", ("srun", *fixed, *ending, *hosts, *job.launcher_args, *command))]


_BUILDERS: dict[str, tuple[str, Callable[[Job, Mapping[str, str]], list[Start]]]] = {
    "ssh": ("ssh", _ssh),
    "pdsh": ("pdsh", _pdsh),
    "openmpi": ("mpirun", _openmpi),
    "mpich": ("mpirun", _hydra()),
    "impi": ("mpirun", _hydra(I_MPI_PIN="0")),
    "mvapich": ("mpirun", _hydra(MV2_ENABLE_AFFINITY="0")),
    "slurm": ("srun", _slurm),
}

LAUNCHERS = tuple(_BUILDERS)


def build_starts(launcher: str, job: Job, environ: Mapping[str, str]) -> list[Start]:
    """What to start on this machine so that every command of `job` runs on its host."""
    for option, given in (("--venv_script", job.venv_script), ("--ssh_port", job.ssh_port)):
        if given is not None and launcher not in ("ssh", "pdsh"):
            raise LaunchError(f"{option} is for --launcher ssh and pdsh; for {launcher} use --launcher_args")
    return _BUILDERS[launcher][1](job, environ)


def require_program(launcher: str, path: str | None = None) -> None:
    """Raise if the program that `launcher` starts with is not on the PATH."""
    program = _BUILDERS[launcher][0]
    if shutil.which(program, path=path) is None:
        raise LaunchError(
            f"--launcher {launcher} needs the program {program!r}, which is not on the PATH: install it, or choose "
            f"another launcher ({', '.join(name for name in LAUNCHERS if name != launcher)})"
        )
