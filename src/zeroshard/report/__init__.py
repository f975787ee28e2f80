"""`zeroshard report`: what this machine and this installation offer a run, on one screen or as JSON."""
