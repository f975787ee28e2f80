"""Tests of `zeroshard.config`. A package, so that its files may have the names of other tests."""
