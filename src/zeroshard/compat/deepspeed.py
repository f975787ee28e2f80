"""`import zeroshard.compat.deepspeed` makes `import deepspeed` mean the stand-in, and is that module."""

import importlib
import sys

from zeroshard.compat import activate

activate()
sys.modules[__name__] = importlib.import_module("deepspeed")
