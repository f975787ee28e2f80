"""`zeroshard bench`: time and bandwidth of collectives, torch's and the seam's, on this machine."""
