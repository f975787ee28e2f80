"""The options of `zeroshard run`, which are those of the `deepspeed` command and a few more.

Every long option may be spelt with underscores or with dashes. Options end at the script: what follows is the
script's, even if it looks like ours.
"""

from __future__ import annotations

import argparse
import difflib
import shlex
from collections.abc import Sequence
from typing import NoReturn

from zeroshard.errors import LaunchError
from zeroshard.launch.hosts import MOST_SLOTS, parse_numbers
from zeroshard.launch.remote import LAUNCHERS

__all__ = ["DEFAULT_HOSTFILE", "OneLine", "Options", "build_parser", "parse_options"]

DEFAULT_HOSTFILE = "/job/hostfile"

_ELASTIC = "give the bounds to torch's elastic agent, --num_nodes MIN:MAX, and --max_restarts"
_REFUSED = {
    "autotuning": "tuning by trial runs is not there; `zeroshard explain` plans a schedule without running it",
    "elastic_training": _ELASTIC,
    "min_elastic_nodes": _ELASTIC,
    "max_elastic_nodes": _ELASTIC,
}


class Options(argparse.Namespace):
    """One command line; every attribute is the option of that name."""

    words: list[str]  # the script and its arguments
    script: str
    script_args: list[str]
    hostfile: str
    include: str
    exclude: str
    num_nodes: tuple[int, int] | None
    num_gpus: int | None
    slots: tuple[int, ...] | None
    master_addr: str | None
    master_port: int | None
    node_rank: int | None
    launcher: str | None
    launcher_args: list[str]
    ssh_port: int | None
    no_ssh: bool
    no_ssh_check: bool
    force_multi: bool
    max_restarts: int
    module: bool
    no_python: bool
    pass_local_rank: bool
    no_local_rank: bool
    as_deepspeed: bool | None
    enable_each_rank_log: str | None
    bind_cores_to_rank: bool
    bind_core_list: str | None
    venv_script: str | None
    save_pid: bool
    dry_run: bool
    log_level: str
    quiet: bool
    attached: str | None  # launcher: it also takes signals from there, and reports failures as records


class OneLine(argparse.ArgumentParser):
    """A parser whose errors are LaunchErrors, with the option as it was written."""

    _words: Sequence[str] = ()

    def parse_known_args(self, args=None, namespace=None):  # type: ignore[no-untyped-def]
        self._words = args or ()
        return super().parse_known_args(args, namespace)

    def _get_option_tuples(self, option_string: str) -> list[tuple[argparse.Action, str, str | None]]:
        """The options that a word abbreviates: one, in whichever spelling, or none.

        argparse looks at the script's words, too, and ends the run when one of them could be several of ours.
        """
        found = super()._get_option_tuples(option_string)
        return found[:1] if len({action.dest for action, *_ in found}) == 1 else []

    def error(self, message: str) -> NoReturn:
        unknown = message.removeprefix("unrecognized arguments: ")
        if unknown != message:
            word = unknown.split()[0].partition("=")[0]
            near = difflib.get_close_matches(word, self._option_string_actions, n=1)
            message = f"there is no option {unknown}" + (f"; did you mean {near[0]}?" if near else "")
        spellings, colon, what = message.removeprefix("argument ").partition(": ")
        if message.startswith("argument "):
            message = self._written(spellings.split("/")) + colon + what
        raise LaunchError(message)

    def _written(self, spellings: list[str]) -> str:
        """That of an option's `spellings` which is in the command line: argparse names all of them."""
        for word in (word.partition("=")[0] for word in self._words):
            for name in spellings:
                joined, begun = len(name) == 2 and word.startswith(name), word[2:] and name.startswith(word)
                if word == name or joined or begun:
                    return name
        return spellings[0]


def _spellings(*names: str) -> list[str]:
    """The names as options, with underscores and with dashes."""
    return list(dict.fromkeys(f"--{n}" for name in names for n in (name, name.replace("_", "-"))))


class _Number:
    """Parses a whole number of at least `least`; -1, DeepSpeed's way to say nothing, is None."""

    def __init__(self, least: int, most: int | None = None) -> None:
        self.least, self.most = least, most

    def __call__(self, text: str) -> int | None:
        if text == "-1":
            return None
        if not (text.isascii() and text.isdigit() and int(text) >= self.least):
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {self.least}")
        if self.most is not None and int(text) > self.most:
            raise argparse.ArgumentTypeError(f"{text} is more than {self.most}, the most that can be given")
        return int(text)


def _port(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 0 < int(text) < 65536):
        raise argparse.ArgumentTypeError(f"{text!r} is not a port, a number from 1 to 65535")
    return int(text)


def _node_count(text: str) -> tuple[int, int] | None:
    if text == "-1":
        return None
    low, _, high = text.partition(":")
    least, most = _Number(1)(low), _Number(1)(high or low)
    if least is None or most is None or least > most:
        raise argparse.ArgumentTypeError(f"{text!r} is neither N nor MIN:MAX with MIN <= MAX")
    return least, most


def _slots(text: str) -> tuple[int, ...]:
    try:
        return parse_numbers(text)
    except ValueError as error:  # argparse would hide its words
        raise argparse.ArgumentTypeError(str(error)) from None


def _path_or_none(text: str) -> str | None:
    return None if text == "None" else text  # DeepSpeed's default, which its users' scripts pass on


def _launcher(text: str) -> str:
    if text.lower() not in LAUNCHERS:
        raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(LAUNCHERS)}")
    return text.lower()


def build_parser(name: str = "zeroshard run", **defaults: object) -> argparse.ArgumentParser:
    """The parser; `defaults` are those that the command called `deepspeed` has otherwise."""
    parser = OneLine(
        prog=name,
        usage="%(prog)s [options] script [the script's arguments]",
        description="Run a script on N ranks of this machine, or of every host of a hostfile. "
        "A run that hangs: ZEROSHARD_DEBUG=collectives says who is where.",
        epilog="Long options may be spelt with dashes. More: docs/launcher.md.",
    )
    what = "Python file to run (with --module: a module; --no_python: a program); what follows is its own"
    parser.add_argument("words", nargs=argparse.REMAINDER, metavar="script", help=what)
    _add_where(parser)
    _add_how(parser)
    _add_script(parser)
    _add_output(parser)
    for name in _REFUSED:
        flag = name == "elastic_training"
        extra = {"action": "store_true"} if flag else {"default": ""}
        parser.add_argument(*_spellings(name), dest=name, help=argparse.SUPPRESS, **extra)  # type: ignore[arg-type]
    parser.set_defaults(**defaults)
    return parser


def _add_where(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("where")
    add = group.add_argument
    add(*_spellings("nproc", "num_gpus", "num_accelerators"), "-n", dest="num_gpus", metavar="N",
        type=_Number(1, MOST_SLOTS), help="ranks per host; default: one per accelerator or slot, or 2")  # fmt: skip
    add("-H", *_spellings("hostfile"), default=DEFAULT_HOSTFILE, metavar="FILE",
        help="lines 'host slots=N' (default: %(default)s, if it is there); empty: none")  # fmt: skip
    add("-i", *_spellings("include"), default="", metavar="NODES",
        help="only these: host[:slot[,slot...]][@host...]")  # fmt: skip
    add("-e", *_spellings("exclude"), default="", metavar="NODES", help="all but these")
    add(*_spellings("num_nodes"), type=_node_count, metavar="N",
        help="the first N hosts; MIN:MAX lets hosts come and go")  # fmt: skip
    add(*_spellings("master_addr"), type=lambda text: text or None, metavar="ADDR",
        help="where ranks meet; default: the first host")  # fmt: skip
    add(*_spellings("master_port"), type=_port, metavar="PORT",
        help="default: a free one on one host, 29500 on several")  # fmt: skip
    add(*_spellings("no_ssh"), action="store_true",
        help="this command is given on every host by hand, with --node_rank")  # fmt: skip
    add(*_spellings("node_rank"), type=_Number(0), metavar="I",
        help="with --no_ssh: the place of this host; default: what SLURM says")  # fmt: skip
    add(*_spellings("slots"), type=_slots, metavar="LIST", help="with --no_ssh: which slots, as 0,2")


def _add_how(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("how")
    add = group.add_argument
    add(*_spellings("launcher"), type=_launcher, metavar="NAME",
        help=f"{', '.join(LAUNCHERS)}; default: slurm inside of an allocation, else ssh")  # fmt: skip
    add(*_spellings("launcher_args"), type=shlex.split, default=[], metavar="WORDS",
        help="more words for ssh, pdsh, mpirun or srun")  # fmt: skip
    add(*_spellings("ssh_port"), type=_port, metavar="PORT", help="port of sshd on the hosts")
    add(*_spellings("no_ssh_check"), action="store_true", help="start without asking the hosts first")
    add(*_spellings("force_multi"), action="store_true", help="use the launcher for one host, too")
    add(*_spellings("venv_script"), metavar="FILE",
        help="shell script, sourced on each other host first; python is then that of its environment")  # fmt: skip
    add(*_spellings("max_restarts"), type=_Number(0), default=0, metavar="N",
        help="start all ranks again, N times at most, when one fails")  # fmt: skip
    add(*_spellings("dry_run"), action="store_true",
        help="print command and environment per host, start nothing")  # fmt: skip
    add(*_spellings("attached"), choices=("stdin", "launcher"), metavar="TO",
        help="stdin: stop the ranks when standard input ends, for what starts this from afar")  # fmt: skip


def _add_script(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the script")
    add = group.add_argument
    add("-m", *_spellings("module"), action="store_true", help="the script is a module, as in python -m")
    add(*_spellings("no_python"), action="store_true", help="the script is a program of its own")
    add(*_spellings("pass_local_rank"), action="store_true",
        help="put --local_rank=N before the script's arguments, as the deepspeed command does")  # fmt: skip
    add(*_spellings("no_local_rank"), action="store_true", help="do not pass it")
    add(*_spellings("as_deepspeed"), action="store_const", const=True, default=None,
        help="`import deepspeed` finds zeroshard; default: where no DeepSpeed is installed")  # fmt: skip
    add(
        *_spellings("no_as_deepspeed"),
        action="store_const",
        const=False,
        dest="as_deepspeed",
        help="`import deepspeed` finds what is installed, or nothing",
    )
    add(*_spellings("bind_cores_to_rank"), action="store_true",
        help="cut the cores of a host into one part per rank")  # fmt: skip
    add(*_spellings("bind_core_list"), metavar="CORES", help="which cores to cut, as 0-3,8")


def _add_output(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("output")
    add = group.add_argument
    add(*_spellings("enable_each_rank_log"), metavar="DIR", type=_path_or_none,
        help="what rank R prints goes to DIR/<time>_rank<R>.log")  # fmt: skip
    add(*_spellings("save_pid"), action="store_true", help="write this process's id to /tmp/<pid>.deepspeed")
    add(*_spellings("log_level"), type=str.lower, default="info", metavar="LEVEL",
        choices=("debug", "info", "warning", "error", "critical"),
        help="of the launcher's own lines: debug, info (default), warning, error, critical")  # fmt: skip
    add("-q", *_spellings("quiet"), action="store_true", help="only errors")


def parse_options(words: Sequence[str], name: str = "zeroshard run", **defaults: object) -> Options:
    """`words` as options, complete and free of contradictions.

    Raises:
        LaunchError: an option that is unknown, malformed, refused, or contradicts another one.
    """
    options = build_parser(name, **defaults).parse_args(list(words), namespace=Options())
    given = options.words[1:] if options.words[:1] == ["--"] else options.words
    if not given:
        raise LaunchError(f"give a script to run; `{name} --help` has the options")
    options.script, *options.script_args = given
    for name, cure in _REFUSED.items():
        if getattr(options, name) not in ("", "-1", False):
            raise LaunchError(f"--{name}: {cure}")
    if options.include and options.exclude:
        raise LaunchError("--include and --exclude exclude each other: give one")
    counts = [f"--{name}" for name in ("num_nodes", "num_gpus") if getattr(options, name) is not None]
    filters = [f"--{name}" for name in ("include", "exclude") if getattr(options, name)]
    if counts and filters:
        raise LaunchError(f"{filters[0]} says which hosts and slots; {counts[0]} says it again: give one")
    if options.module and options.no_python:
        raise LaunchError("--module and --no_python exclude each other: a program of its own is no module")
    if options.slots is not None and (not options.no_ssh or options.num_gpus is not None):
        raise LaunchError("--slots goes with --no_ssh, and without --num_gpus")
    options.max_restarts = options.max_restarts or 0
    options.bind_cores_to_rank = options.bind_cores_to_rank or bool(options.bind_core_list)
    if options.quiet:
        options.log_level = "error"
    options.pass_local_rank = options.pass_local_rank and not options.no_local_rank
    return options
