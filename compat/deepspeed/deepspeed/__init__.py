"""DeepSpeed's calls, answered by zeroshard. The names and their homes: `zeroshard.compat.names`."""

from zeroshard.compat import modules

modules.fill(__name__, globals())
