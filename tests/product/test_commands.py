"""Options, inputs and output that the commands share."""

import sys
from dataclasses import fields

import pytest
import torch
from rich.table import Table

from spec_compile import cli
from spec_compile.serve import FLAGS
from spec_compile.serve import cli as server
from spec_compile.serve.door import Policy


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (cli.json_object, '{"a": [1]}', {"a": [1]}),
        (cli.at_least(3), "3", 3),
        (cli.int_list, "1,30,2", [1, 30, 2]),
        (cli.dtype_name, "bfloat16", "bfloat16"),
        (cli.local_device, "cpu", torch.device("cpu")),
        (cli.share_or_file, "0.25", 0.25),
        (cli.share_or_file, "texts.jsonl", "texts.jsonl"),
    ],
)
def test_texts_become_values(parse, text, value):
    assert parse(text) == value


@pytest.mark.parametrize(
    ("parse", "text", "message"),
    [
        (cli.json_object, "[1]", r"expected a JSON object, got '\[1\]'"),
        (cli.at_least(3), "2", "expected an int of 3 or more, got '2'"),
        (cli.int_list, "1,,2", "expected an int of 1 or more, got ''"),
        (cli.dtype_name, "int8", "invalid choice: 'int8'; expected one of auto"),
        (cli.local_device, "meta", "expected cpu, cuda or cuda:N, got 'meta'"),
    ],
)
def test_other_texts_are_refused(parse, text, message):
    with pytest.raises(ValueError, match=message):
        parse(text)


def test_prompts_are_lines_or_objects_of_a_file(tmp_path):
    path = tmp_path / "prompts"
    path.write_text('one\n\n  {"prompt": "two\\nlines"}\nthree\n')
    assert cli.read_prompts(path, 2) == ["one", "two\nlines"]
    with pytest.raises(ValueError, match=r"--prompts: .*none cannot be read: "):
        cli.read_prompts(tmp_path / "none", 2)


def test_a_pipe_gets_whole_rows(capsys, monkeypatch):
    table = Table("a" * 150)
    cli.print_table(table)
    assert "a" * 150 in capsys.readouterr().out
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "60")
    cli.print_table(table)
    assert len(capsys.readouterr().out.splitlines()[0]) == 60


def test_an_error_is_one_line():
    assert cli.one_line(ValueError("a\n  b")) == "a b" and cli.one_line(KeyError()) == "KeyError"


def test_flags_of_the_server_are_arguments_of_what_it_builds():
    permissions = {each.name for each in fields(Policy)} - {"keys"}
    assert {*FLAGS} | permissions <= server.OPTIONS.keys()
