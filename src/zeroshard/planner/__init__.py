"""Looks at plans before they run: `zeroshard explain`, `zeroshard check`."""
