"""Reading: every accepted form, and an error that names source, place, rule and cure for the rest."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeroshard.config import parse, read_config
from zeroshard.errors import ConfigError


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_dict_is_copied_and_left_alone() -> None:
    given = {"zero_optimization": {"stage": 1}}
    read = read_config(given)
    read.data["zero_optimization"]["stage"] = 2
    assert given == {"zero_optimization": {"stage": 1}}
    assert read.source == "dict"


def test_path_str_and_pathlike(tmp_path: Path) -> None:
    path = write(tmp_path / "ds.json", '{"train_batch_size": 8}')
    for form in (path, str(path)):
        read = read_config(form)
        assert read.data == {"train_batch_size": 8}
        assert read.source == f"file {path}"


def test_byte_order_mark_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_bytes(b"\xef\xbb\xbf{}")
    assert read_config(path).data == {}


def test_comments_and_trailing_commas() -> None:
    text = """{ // line
      # hash
      "a": [1, 2, /* inside
      two lines */ ],
      "b": {"c": 1,}, // , }
    }"""
    assert read_config(text).data == {"a": [1, 2], "b": {"c": 1}}


@pytest.mark.parametrize(
    "value", ["http://x/y", "/* no comment */", "a,}", "# no", '\\" // still', "a, ]"], ids=range(6)
)
def test_comment_signs_inside_strings_stay(value: str) -> None:
    data = {"csv_monitor": {"output_path": value}, "list": [value]}
    assert read_config(json.dumps(data)).data == data


def test_base64_of_json() -> None:
    text = base64.urlsafe_b64encode(b'{"train_batch_size": 8}').decode()
    assert read_config(text).data == {"train_batch_size": 8}


def test_duplicate_keys_are_named_with_their_lines() -> None:
    text = """{
      "zero_optimization": {
        "stage": 1, "leaf_module": {"names": []},
        /* not "stage": 3, that is
           a comment */ "stage": 2},
      "a": 1, "a": 2
    }"""
    with pytest.raises(ConfigError) as caught:
        read_config(text)
    assert "zero_optimization.stage: on lines 3 and 5" in str(caught.value)
    assert "a: on lines 6 and 6" in str(caught.value)


def test_equal_keys_of_different_objects_are_no_duplicates() -> None:
    text = '{"fp16": {"x": 1}, "bf16": {"x": 2}, "list": [{"a": 1}, {"a": "a"}], "x": "x"}'
    assert read_config(text).data == json.loads(text)


names = st.text(max_size=6)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
    max_leaves=8,
)


@given(
    data=st.dictionaries(names, values, max_size=4), comment=st.sampled_from(["// x, }", "# [", '/* "\n" */'])
)
def test_comments_and_trailing_commas_anywhere_change_nothing(data: dict[str, Any], comment: str) -> None:
    lines = json.dumps(data, indent=1).split("\n")
    decorated = [
        line + ("," if line.endswith(("]", "}")) and line.startswith(" ") else "") + f" {comment}"
        for line in lines
    ]
    assert read_config("\n".join(decorated)).data == data


@given(data=st.dictionaries(names, values, max_size=4), name=names)
def test_a_repeated_key_is_always_found(data: dict[str, Any], name: str) -> None:
    key = json.dumps(name)
    text = f'{{"outer": [{{{key}: {json.dumps(data)}, {key}: 1}}]}}'
    with pytest.raises(ConfigError, match="only once"):
        read_config(text)


def test_bad_json_shows_line_column_and_text(tmp_path: Path) -> None:
    path = write(tmp_path / "ds.json", '{\n  // a comment\n  "stage" 3\n}')
    with pytest.raises(ConfigError) as caught:
        read_config(path)
    message = str(caught.value)
    assert f"file {path}: not JSON at line 3, column 11" in message
    shown, arrow = message.splitlines()[1:3]
    assert shown == '  3 |   "stage" 3'
    assert arrow.index("^") == shown.index("3", 6)


def test_bad_json_in_a_long_line_keeps_the_place_in_view() -> None:
    text = '{"a": "' + "x" * 500 + '" 1}'
    with pytest.raises(ConfigError) as caught:
        read_config(text)
    shown, arrow = str(caught.value).splitlines()[1:3]
    assert len(shown) < 120
    assert shown[arrow.index("^")] == "1"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ("empty", "write at least {}")),
        ("[1]", ("top level is [1]", "must be an object")),
        ("3", ("top level is 3", "must be an object")),
        ('{"a": NaN}', ("NaN is not JSON",)),
        ("// only a comment\n", ("not JSON",)),
        ("[" * 100_000, ("nested too deeply",)),
    ],
    ids=["empty", "list", "number", "nan", "comment", "deep"],
)
def test_other_texts_in_a_file(tmp_path: Path, text: str, words: tuple[str, ...]) -> None:
    path = write(tmp_path / "ds.json", text)
    with pytest.raises(ConfigError) as caught:
        read_config(path)
    assert str(caught.value).startswith(f"file {path}")
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize("text", ["", " \n"])
def test_blank_text(text: str) -> None:
    with pytest.raises(ConfigError, match="text: empty"):
        read_config(text)


def test_missing_file_names_path_and_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        ConfigError, match=r"file ds\.json: no such file \(the working directory is .*correct"
    ):
        read_config("ds.json")


def test_directory_names_the_json_files_in_it(tmp_path: Path) -> None:
    write(tmp_path / "zero3.json", "{}")
    with pytest.raises(ConfigError, match=r"a directory.*zero3\.json"):
        read_config(tmp_path)


def test_binary_file(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_bytes(b"\xff\xfe{}")
    with pytest.raises(ConfigError, match="not UTF-8 at byte 0"):
        read_config(tmp_path / "ds.json")


def test_key_that_is_no_string() -> None:
    with pytest.raises(ConfigError, match="key 3 in zero_optimization: must be a string"):
        read_config({"zero_optimization": {3: 1}})


def test_other_types_are_refused() -> None:
    with pytest.raises(ConfigError, match="NoneType given"):
        parse(None)  # type: ignore[arg-type]


def test_source_is_kept_on_the_tree(tmp_path: Path) -> None:
    path = write(tmp_path / "ds.json", "{}")
    assert parse(path).source == f"file {path}"
    assert parse({}).source == "dict"
    assert parse("{}").source == "text"
