from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeroshard.trace import Action, Kind, digest, format_actions, parse_actions

actions = st.lists(st.builds(Action, st.sampled_from(list(Kind)), st.integers(0, 1000)))


@given(actions)
def test_text_form_parses_back(sequence: list[Action]) -> None:
    assert parse_actions(format_actions(sequence)) == tuple(sequence)


@given(actions)
def test_digest_goes_on_from_a_seed(sequence: list[Action]) -> None:
    middle = len(sequence) // 2
    assert digest(sequence[middle:], digest(sequence[:middle])) == digest(sequence)


def test_digest_sees_order_and_bucket() -> None:
    texts = ["0F 1F", "1F 0F", "0F 2F", "0F 1f", "0GATHER 1GATHER", "1GATHER 0GATHER"]
    assert len({digest(parse_actions(text)) for text in texts}) == len(texts)


@pytest.mark.parametrize("word", ["F", "0", "0X", "x0F", "0FF", "-"])
def test_a_word_that_is_no_action_is_named(word: str) -> None:
    with pytest.raises(ValueError, match=word):
        parse_actions(f"0F {word}")
