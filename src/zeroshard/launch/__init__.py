"""The `zeroshard` command. Starts without importing torch; imported by nothing else in the package."""
