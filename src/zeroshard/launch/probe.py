"""What a host says of itself before a job starts there: `python -m zeroshard.launch.probe ARGUMENTS`."""

from __future__ import annotations

import json
import platform
import shutil
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

__all__ = ["PROBE_PREFIX", "Answer", "Question", "read_answer"]

PROBE_PREFIX = "::zeroshard-host "


@dataclass(frozen=True)
class Question:
    """What is asked of every host."""

    file: str | None  # the script, if it is a file
    program: str | None  # or what is looked up on the PATH
    master: str
    port: int
    serves: bool  # this host is the one where all meet

    def __str__(self) -> str:
        return json.dumps(asdict(self))


@dataclass(frozen=True)
class Answer:
    """What a host has."""

    python: str
    torch: str
    zeroshard: str
    accelerators: int
    lacks_script: bool
    port_taken: bool
    knows_master: bool


def read_answer(output: str) -> Answer | None:
    """The answer in what a host printed; shells may have printed more."""
    for line in output.splitlines():
        _, found, answer = line.partition(PROBE_PREFIX)
        if found:
            return Answer(**json.loads(answer))
    return None


def _answer(question: Question) -> Answer:
    import torch

    import zeroshard
    from zeroshard.launch.network import can_resolve, is_free
    from zeroshard.launch.runner import accelerators_here

    lacks_file = question.file is not None and not Path(question.file).is_file()
    lacks_program = question.program is not None and shutil.which(question.program) is None
    return Answer(
        python=".".join(platform.python_version_tuple()[:2]),
        torch=torch.__version__.partition("+")[0],
        zeroshard=zeroshard.__version__,
        accelerators=accelerators_here(),
        lacks_script=lacks_file or lacks_program,
        port_taken=question.serves and not is_free(question.port),
        knows_master=can_resolve(question.master),
    )


if __name__ == "__main__":
    print(PROBE_PREFIX + json.dumps(asdict(_answer(Question(**json.loads(sys.argv[1]))))))
