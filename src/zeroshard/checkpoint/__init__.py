"""Checkpoints that any world size and stage opens, and that are never half-written.

Read `session.py` first: saving and loading as a whole. `contents.py` names what is in one, `views.py` describes a
rank's part of it, `storage.py` and `files.py` put it on disk, `directory.py` makes it appear.
"""
