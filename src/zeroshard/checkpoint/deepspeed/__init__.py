"""Reading checkpoints that DeepSpeed wrote, without DeepSpeed.

`reader.py` is the seam to torch.distributed.checkpoint; `contents.py` puts together what is in a checkpoint, from
`partitions.py` (stages 1 to 3), `whole.py` and `order.py` (stage 0) and `universal.py`; `files.py` finds the files
and `pickles.py` opens them.
"""

from zeroshard.checkpoint.deepspeed.reader import DeepSpeedReader, is_deepspeed

__all__ = ["DeepSpeedReader", "is_deepspeed"]
