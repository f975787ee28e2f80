"""`zeroshard run`: from the words of a command line to ranks that have ended."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from zeroshard import compat
from zeroshard.errors import LaunchError
from zeroshard.interrupts import held
from zeroshard.launch.cores import cores_here, cut_cores, parse_core_list
from zeroshard.launch.dry_run import show_job, show_node
from zeroshard.launch.hosts import Hosts, select_hosts, visible_devices
from zeroshard.launch.lifeline import hold_lifeline
from zeroshard.launch.messages import log, show_from
from zeroshard.launch.options import Options, parse_options
from zeroshard.launch.plan import (
    DEFAULT_PORT,
    Place,
    choose_hosts,
    choose_launcher,
    is_this_machine,
    master_of,
    missing_hostfile,
    node_bounds,
    place_in_slurm,
    place_of,
    plan_job,
)
from zeroshard.launch.preflight import require_hosts
from zeroshard.launch.probe import Question
from zeroshard.launch.remote import Job, build_starts, require_program
from zeroshard.launch.sessions import run_starts

if TYPE_CHECKING:
    from zeroshard.launch.runner import Node

__all__ = ["run"]


def run(words: Sequence[str], name: str = "zeroshard run", **defaults: object) -> int:
    """Run one command line of `zeroshard run`; returns the exit status for the shell.

    `defaults` are those of options that a command with another `name` has otherwise.

    Raises:
        LaunchError: the command line, the hostfile, a host or this machine does not allow it.
    """
    options = parse_options(words, name, **defaults)
    show_from(options.log_level, name.partition(" ")[0])
    _require_script(options)
    if place_in_slurm(os.environ) is not None:
        options.no_ssh = True  # srun has started this command on every host
    if options.node_rank is not None and not options.no_ssh:
        log.warning("--node_rank %d has no effect without --no_ssh", options.node_rank)
    hosts = choose_hosts(options, os.environ)
    if missing_hostfile(options):
        log.warning("there is no hostfile %r: using this machine alone", options.hostfile)
    with _saved_pid(options.save_pid and not options.dry_run):
        if options.no_ssh:
            return _run_here(options, place_of(options, os.environ, hosts), hosts)
        if hosts is None or _only_here(hosts, options):
            if options.venv_script:
                log.warning(
                    "--venv_script is for other hosts; here ranks run in the environment of this command"
                )
            if hosts is None and (options.launcher or options.force_multi):
                log.warning("there are no hosts to use a launcher for (--hostfile): using this machine alone")
            place = Place(address=options.master_addr, port=options.master_port)
            return _run_here(options, place, hosts)
        return _run_on_hosts(options, hosts, choose_launcher(options, os.environ))


def _require_script(options: Options) -> None:
    if options.module:
        return
    if options.no_python:
        if shutil.which(options.script) is None:
            if Path(options.script).is_file():
                raise LaunchError(f"--no_python: {options.script!r} may not be executed (chmod +x)")
            raise LaunchError(f"--no_python: there is no program {options.script!r}, here or on the PATH")
    elif Path(options.script).is_dir():
        raise LaunchError(
            f"{options.script!r} is a directory; give a file in it (with --module: a module name)"
        )
    elif not Path(options.script).is_file():
        raise LaunchError(f"there is no file {options.script!r} (with --module: a module name)")


def _only_here(hosts: Hosts, options: Options) -> bool:
    return len(hosts) == 1 and not options.force_multi and is_this_machine(next(iter(hosts)))


@contextmanager
def _saved_pid(wanted: bool) -> Iterator[None]:
    """The file under which programs that watch DeepSpeed's launcher look for its process."""
    if not wanted:
        yield
        return
    file = Path("/tmp") / f"{os.getpid()}.deepspeed"
    try:
        file.unlink(missing_ok=True)  # of a process that had this number before
        with file.open("x") as pid:  # "x": not through a link that somebody else has put there
            pid.write(str(os.getpid()))
    except OSError as error:
        raise LaunchError(f"--save_pid: {file} cannot be written: {error.strerror}") from None
    try:
        yield
    finally:
        file.unlink(missing_ok=True)


def _run_on_hosts(options: Options, hosts: Hosts, launcher: str) -> int:
    job = replace(plan_job(options, hosts, launcher, os.environ), shown=options.dry_run)
    starts = build_starts(launcher, job, os.environ)
    if options.dry_run:
        show_job(job, starts)
        return 0
    if not all(command.here for command in job.commands):
        require_program(launcher)
    asked = None if options.no_ssh_check else _asked_over_ssh(job, launcher, os.environ)
    if asked is None and not options.no_ssh_check:
        told = "--launcher %s: hosts are not asked first whether they have the versions, the script and the slots"
        log.info(told, launcher)
    if asked is not None:
        script = options.script if not options.module else None
        file, program = (None, script) if options.no_python else (script, None)
        port = options.master_port or DEFAULT_PORT
        require_hosts(
            asked, hosts, Question(file, program, master_of(options, hosts), port, False), os.environ
        )
    least, most = node_bounds(options, hosts)
    return run_starts(starts, os.environ, job.directory, least if least < most else None)


def _asked_over_ssh(job: Job, launcher: str, environ: Mapping[str, str]) -> Job | None:
    """The job as ssh reaches its hosts; None where ssh may not be how they are reached."""
    if launcher == "ssh":
        return job
    if launcher != "pdsh" or environ.get("PDSH_RCMD_TYPE", "ssh") != "ssh" or shutil.which("ssh") is None:
        return None
    return replace(job, launcher_args=tuple(shlex.split(environ.get("PDSH_SSH_ARGS_APPEND", ""))))


def _run_here(options: Options, place: Place, hosts: Hosts | None) -> int:
    """Be the launcher of this host's ranks."""
    if options.attached and not options.dry_run:
        hold_lifeline(beats=options.attached == "launcher")
    with held(), _quiet_cpp():
        from zeroshard.launch import runner

    slots, environment = _slots_here(options, place, hosts, os.environ)
    if options.as_deepspeed or (options.as_deepspeed is None and not compat.real_deepspeed_installed()):
        found = os.environ.get("PYTHONPATH")
        environment["PYTHONPATH"] = os.pathsep.join([str(compat.standin_directory()), *filter(None, [found])])
    node = _node(options, place, len(slots), environment)
    if options.dry_run:
        show_node(node)
        return 0
    return runner.run_node(node)


@contextmanager
def _quiet_cpp() -> Iterator[None]:
    """Import torch so that its C++ half says nothing below errors here; what starts from here has its own say."""
    name = "TORCH_CPP_LOG_LEVEL"
    if name in os.environ:
        yield
        return
    os.environ[name] = "ERROR"
    try:
        yield
    finally:
        del os.environ[name]


def _slots_here(
    options: Options, place: Place, hosts: Hosts | None, environ: Mapping[str, str]
) -> tuple[tuple[int, ...], dict[str, str]]:
    """The slots of this host, and the environment variable that says which devices they are."""
    import torch

    from zeroshard.launch.runner import accelerators_here
    from zeroshard.world import VISIBLE_DEVICES

    count = accelerators_here()
    kind = torch.accelerator.current_accelerator(check_available=True)
    name = VISIBLE_DEVICES.get("cuda" if kind is None else kind.type, VISIBLE_DEVICES["cuda"])
    hidden = environ.get(name, "").strip() in ("", "-1", "NoDevFiles")  # the last one is SLURM's
    if count == 0 and not hidden and torch.version.cuda is not None:
        raise LaunchError(f"{name}={environ[name]} names no device that can be seen here")
    if options.slots is not None:
        slots = options.slots
    elif hosts is not None:
        slots = list(hosts.values())[0 if place.alone else place.node_rank]
    else:
        slots = _default_slots(options, count)
    devices = visible_devices(slots, environ, name, count)
    return slots, {} if devices is None else {name: devices}


def _default_slots(options: Options, count: int) -> tuple[int, ...]:
    if options.num_gpus is not None:
        return tuple(range(options.num_gpus))
    if options.include or options.exclude:
        # On a CPU a slot is a number: as many as there are cores.
        pool = {"localhost": tuple(range(count or os.cpu_count() or 1))}
        return select_hosts(pool, options.include, options.exclude)["localhost"]
    if count:
        return tuple(range(count))
    log.info("no accelerator found: starting 2 ranks on the CPU (--num_gpus N chooses)")
    return 0, 1


def _node(options: Options, place: Place, ranks: int, environment: Mapping[str, str]) -> Node:
    from zeroshard.launch.output import python_of_ranks
    from zeroshard.launch.runner import Node

    python = python_of_ranks(options.enable_each_rank_log)
    prefix = () if options.no_python else (*python, *(("-m",) if options.module else ()))
    # torchrun puts values in for names after a dollar sign; those of the user stay.
    command = [word.replace("$", "$$") for word in (*prefix, options.script, *options.script_args)]
    if options.pass_local_rank:
        command.insert(len(prefix) + 1, "--local_rank=${local_rank}")
    return Node(
        command=tuple(command),
        ranks=ranks,
        place=place,
        max_restarts=options.max_restarts,
        environment=environment,
        cores=_cores(options, ranks) if options.bind_cores_to_rank else None,
        log_folder=options.enable_each_rank_log,
        record_failures=options.attached == "launcher",
    )


def _cores(options: Options, ranks: int) -> list[tuple[int, ...]]:
    if "KMP_AFFINITY" in os.environ:
        raise LaunchError(
            "KMP_AFFINITY binds threads to cores itself: unset it, or drop --bind_cores_to_rank"
        )
    here = cores_here()
    chosen = parse_core_list(options.bind_core_list) if options.bind_core_list else here
    if strange := sorted(set(chosen) - set(here)):
        raise LaunchError(
            f"--bind_core_list {options.bind_core_list}: core {strange[0]} is not among those that this process "
            f"may use: {','.join(map(str, here))}"
        )
    return cut_cores(chosen, ranks)
