"""All hosts are asked at once, before anything starts: can they be reached, are they alike, have they the slots."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from zeroshard.errors import LaunchError
from zeroshard.launch.child import start_through_child
from zeroshard.launch.hosts import Hosts
from zeroshard.launch.messages import log
from zeroshard.launch.probe import Answer, Question, read_answer
from zeroshard.launch.processes import child_processes, kill_session
from zeroshard.launch.remote import HostCommand, Job, on_host

__all__ = ["find_problems", "require_hosts"]

_LIMIT_SECONDS = 60


def require_hosts(job: Job, hosts: Hosts, question: Question, environ: Mapping[str, str]) -> None:
    """Ask every host of `job` over ssh, for a minute at most.

    Raises:
        LaunchError: names each host that cannot take part, and why.
    """
    log.info("asking %d hosts", len(hosts))
    with ThreadPoolExecutor(max_workers=len(hosts)) as pool:
        questions = [replace(question, serves=rank == 0) for rank in range(len(hosts))]
        try:
            answers = list(pool.map(lambda c, q: _ask(job, c, q, environ), job.commands, questions))
        except KeyboardInterrupt:
            for pid in child_processes():
                kill_session(pid)
            raise
    problems = find_problems(dict(zip(hosts, answers, strict=True)), hosts, question)
    if problems:
        told = "\n".join(f"  {host}: {problem}" for host, problem in problems.items())
        raise LaunchError(f"{len(problems)} of {len(hosts)} hosts cannot take part:\n{told}")


def _ask(job: Job, command: HostCommand, question: Question, environ: Mapping[str, str]) -> Answer | str:
    """The answer of one host, or why there is none."""
    probe = ("python" if job.venv_script else sys.executable, "-m", "zeroshard.launch.probe", str(question))
    start = on_host(job, command, probe)
    try:
        done = subprocess.run(
            (*start_through_child("SIGTERM"), *start.words),
            env={**environ, **start.environment},
            cwd=job.directory,
            input=start.first_line,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_LIMIT_SECONDS,
            start_new_session=True,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"no answer within {_LIMIT_SECONDS} s"
    answer = read_answer(done.stdout)
    if answer is not None:
        return answer
    last = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), "no message")
    if done.returncode == 255:
        return f"cannot be reached over ssh ({last.strip()})"
    return f"zeroshard does not start there ({last.strip()})"


def find_problems(answers: Mapping[str, Answer | str], hosts: Hosts, question: Question) -> dict[str, str]:
    """Why hosts cannot take part, by host. Versions are compared with what most of them have."""
    problems = {host: answer for host, answer in answers.items() if isinstance(answer, str)}
    known = {host: answer for host, answer in answers.items() if isinstance(answer, Answer)}
    if not known:
        return problems
    usual, _ = Counter((a.python, a.torch, a.zeroshard) for a in known.values()).most_common(1)[0]
    accelerated = any(answer.accelerators for answer in known.values())
    for host, answer in known.items():
        found = list(_problems_of(answer, usual, len(hosts[host]), max(hosts[host]), accelerated, question))
        if found:
            problems[host] = "; ".join(found)
    return {host: problems[host] for host in answers if host in problems}


def _problems_of(
    answer: Answer, usual: tuple[str, ...], ranks: int, last_slot: int, accelerated: bool, question: Question
) -> list[str]:
    found = [
        f"{name} {here}, the others have {there}"
        for name, here, there in zip(
            ("python", "torch", "zeroshard"),
            (answer.python, answer.torch, answer.zeroshard),
            usual,
            strict=True,
        )
        if here != there
    ]
    if accelerated and last_slot >= answer.accelerators:
        found.append(
            f"has {answer.accelerators} accelerators, and {ranks} ranks up to slot {last_slot} were asked for"
        )
    if answer.lacks_script:
        found.append(f"there is no {question.file or question.program}")
    if answer.port_taken:
        found.append(f"port {question.port} is in use: choose another one with --master_port")
    if not answer.knows_master:
        found.append(f"cannot resolve {question.master!r}, where the ranks meet: give --master_addr")
    return found
