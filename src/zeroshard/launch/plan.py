"""From a command line to what runs on each host: which hosts, with which slots, meeting where."""

from __future__ import annotations

import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from zeroshard.errors import LaunchError
from zeroshard.launch.forwarding import forwarded_environment
from zeroshard.launch.hosts import Hosts, expand_nodelist, first_hosts, read_hostfile, select_hosts
from zeroshard.launch.options import DEFAULT_HOSTFILE, Options
from zeroshard.launch.remote import HostCommand, Job

__all__ = [
    "DEFAULT_PORT",
    "Place",
    "choose_hosts",
    "choose_launcher",
    "is_this_machine",
    "master_of",
    "node_bounds",
    "node_words",
    "place_in_slurm",
    "place_of",
    "plan_job",
]

DEFAULT_PORT = 29500

# The shell of `salloc` and the script of `sbatch`, in slurm.h: SLURM_INTERACTIVE_STEP and SLURM_BATCH_SCRIPT.
_STEPS_OF_THE_JOB_ITSELF = ("4294967290", "4294967291")


@dataclass(frozen=True)
class Place:
    """Where one host stands in the job. Of `min_nodes < max_nodes`, hosts may come and go."""

    node_rank: int = 0
    min_nodes: int = 1
    max_nodes: int = 1
    address: str | None = None  # None: loopback
    port: int | None = None  # None: a free one

    @property
    def alone(self) -> bool:
        return self.max_nodes == 1


def choose_hosts(options: Options, environ: Mapping[str, str]) -> Hosts | None:
    """The hosts and slots of the job, in order; None is this machine alone, with what it has."""
    named = Path(options.hostfile) if options.hostfile else None
    if named is not None and named.exists():
        pool = read_hostfile(named, "--hostfile")
    elif _in_allocation(environ):
        given = environ.get("SLURM_GPUS_ON_NODE", "")
        slots = options.num_gpus or (int(given) if given.isdigit() else 1)
        pool = {host: tuple(range(slots)) for host in expand_nodelist(environ["SLURM_JOB_NODELIST"])}
    else:
        _require_one_host(options)
        return None
    chosen = select_hosts(pool, options.include, options.exclude)
    least, most = options.num_nodes or (None, None)
    if least is not None and least < (most or least):
        most = max(least, min(most or least, len(chosen)))
    return first_hosts(chosen, most, options.num_gpus)


def _require_one_host(options: Options) -> None:
    most = options.num_nodes[1] if options.num_nodes else 1
    if most > 1 and not options.no_ssh:
        raise LaunchError(
            f"--num_nodes {most} needs a hostfile that names them, and there is no file {options.hostfile!r} "
            "(or --no_ssh, and this command on every host)"
        )


def node_bounds(options: Options, hosts: Hosts) -> tuple[int, int]:
    """The fewest and the most of `hosts` that the job runs on. A host that is not among them never comes."""
    least, most = options.num_nodes or (len(hosts), len(hosts))
    return least, min(most, len(hosts))


def _in_allocation(environ: Mapping[str, str]) -> bool:
    """Whether SLURM gave us several hosts, and this is the script that is to use them."""
    several = environ.get("SLURM_JOB_NUM_NODES", "1") != "1" and "SLURM_JOB_NODELIST" in environ
    in_step = (
        "SLURM_STEP_NODELIST" in environ and environ.get("SLURM_STEP_ID") not in _STEPS_OF_THE_JOB_ITSELF
    )
    return several and not in_step


def missing_hostfile(options: Options) -> bool:
    """Whether the user named a hostfile that is not there."""
    return options.hostfile not in ("", DEFAULT_HOSTFILE) and not Path(options.hostfile).exists()


def choose_launcher(options: Options, environ: Mapping[str, str]) -> str:
    """What the user says; else srun where the hosts are SLURM's; else ssh."""
    hostfile = bool(options.hostfile) and Path(options.hostfile).exists()
    return options.launcher or ("slurm" if not hostfile and _in_allocation(environ) else "ssh")


def is_this_machine(host: str) -> bool:
    """Whether `host` leads back here: the name of this machine, or an address that can be bound here."""
    name = host.rpartition("@")[2]
    if name in ("localhost", socket.gethostname()):
        return True
    try:
        addresses = socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return any(_can_bind(family, address) for family, _, _, _, address in addresses)


def _can_bind(family: socket.AddressFamily, address: object) -> bool:
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind(address)  # type: ignore[arg-type]  # what getaddrinfo gave for this family
        except OSError:
            return False
    return True


def master_of(options: Options, hosts: Hosts) -> str:
    """The name under which all hosts find the first one."""
    if options.master_addr is not None:
        return options.master_addr
    name = next(iter(hosts)).rpartition("@")[2]
    if len(hosts) > 1 and (name == "localhost" or name.startswith("127.")):
        raise LaunchError(
            f"{name!r} is the first host, and for the others it is themselves: put its real name into the "
            "hostfile, or give --master_addr"
        )
    return name


def plan_job(options: Options, hosts: Hosts, launcher: str, environ: Mapping[str, str]) -> Job:
    """What runs on each of `hosts`, for any transport."""
    least, most = node_bounds(options, hosts)
    if least < most and launcher == "slurm":
        raise LaunchError(
            "srun ends all hosts when one is lost: --num_nodes MIN:MAX wants another --launcher"
        )
    address, port = master_of(options, hosts), options.master_port or DEFAULT_PORT
    commands = []
    for rank, (host, slots) in enumerate(hosts.items()):
        words = node_words(options, Place(rank, least, most, address, port), slots, launcher)
        here = launcher == "ssh" and not options.force_multi and is_this_machine(host)
        commands.append(HostCommand(host, words, here))
    directory = Path.cwd()
    return Job(
        commands=tuple(commands),
        directory=str(directory),
        environment=forwarded_environment(environ, Path.home(), directory),
        launcher_args=tuple(options.launcher_args),
        ssh_port=options.ssh_port,
        venv_script=options.venv_script,
        named_hosts=not _in_allocation(environ)
        or bool(options.include or options.exclude or options.num_nodes),
    )


def node_words(options: Options, place: Place, slots: tuple[int, ...], launcher: str) -> tuple[str, ...]:
    """The command on one host, as one would type it there. Under srun the host finds its place by itself."""
    python = "python" if options.venv_script else sys.executable
    words = [python, "-m", "zeroshard", "run", "--no_ssh", "--hostfile="]
    if launcher != "slurm":
        nodes = (
            str(place.max_nodes)
            if place.min_nodes == place.max_nodes
            else f"{place.min_nodes}:{place.max_nodes}"
        )
        words += [f"--node_rank={place.node_rank}", f"--num_nodes={nodes}", f"--master_addr={place.address}"]
    elif options.master_addr is not None:
        words.append(f"--master_addr={options.master_addr}")
    words.append(f"--master_port={place.port}")
    plain = slots == tuple(range(len(slots)))
    words.append(f"--num_gpus={len(slots)}" if plain else "--slots=" + ",".join(map(str, slots)))
    words += [f"--{name}" for name in _FLAGS if getattr(options, name)]
    if options.as_deepspeed is not None:
        words.append("--as_deepspeed" if options.as_deepspeed else "--no_as_deepspeed")
    words += [f"--{name}={value}" for name in _VALUES if (value := getattr(options, name))]
    words.append(f"--log_level={options.log_level}")
    attached = {"ssh": "launcher", "pdsh": "stdin"}.get(launcher)
    words += [f"--attached={attached}"] if attached else []
    return (*words, options.script, *options.script_args)


_FLAGS = ("module", "no_python", "pass_local_rank", "bind_cores_to_rank")
_VALUES = ("max_restarts", "bind_core_list", "enable_each_rank_log")


def place_in_slurm(environ: Mapping[str, str]) -> Place | None:
    """This process as one of the tasks that srun started, one per host; None outside of such a step."""
    if "SLURM_STEP_NODELIST" not in environ or environ.get("SLURM_STEP_NUM_TASKS", "1") == "1":
        return None
    hosts = expand_nodelist(environ["SLURM_STEP_NODELIST"])
    if int(environ["SLURM_STEP_NUM_TASKS"]) != len(hosts):
        raise LaunchError(
            f"srun started {environ['SLURM_STEP_NUM_TASKS']} tasks on {len(hosts)} hosts: start one per host, with "
            "--ntasks-per-node=1; it starts the ranks there"
        )
    return Place(int(environ["SLURM_PROCID"]), len(hosts), len(hosts), hosts[0], DEFAULT_PORT)


def place_of(options: Options, environ: Mapping[str, str], hosts: Hosts | None) -> Place:
    """The place of this host when the command is given on every host (`--no_ssh`)."""
    slurm = place_in_slurm(environ)
    least, most = node_bounds(options, hosts) if hosts else options.num_nodes or (1, 1)
    if slurm is not None and options.num_nodes is None and options.node_rank is None:
        port = options.master_port or DEFAULT_PORT
        return Place(
            slurm.node_rank, slurm.min_nodes, slurm.max_nodes, options.master_addr or slurm.address, port
        )
    rank = options.node_rank
    if rank is None and most == 1:
        rank = 0
    if rank is None or not 0 <= rank < most:
        said = "is missing" if rank is None else f"{rank} is out of range"
        raise LaunchError(
            f"--node_rank {said}: with --no_ssh and {most} hosts it is a number from 0 to {most - 1}"
        )
    address = options.master_addr or (master_of(options, hosts) if hosts else None)
    if address is None and most > 1:
        raise LaunchError(
            "--master_addr is missing: with --no_ssh and several hosts, say where the first one is"
        )
    if most == 1:
        return Place(0, 1, 1, options.master_addr, options.master_port)
    return Place(rank, least, most, address, options.master_port or DEFAULT_PORT)
