"""examples/compare_drafts.py: it asks a server with drafts and without, and shows what differs."""

import json
import runpy
import sys

import pytest
from generated_calls import request
from server_fixtures import DEMO, PROMPT, running, save_model

SCRIPT = DEMO.parent / "compare_drafts.py"


def compare(monkeypatch, capsys, file, client):
    """The status and the output of the script."""
    monkeypatch.setattr(sys, "argv", [SCRIPT.name, str(file), "--url", f"{client.base_url}/v1"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    return ended.value.code, capsys.readouterr().out


def test_it_shows_what_differs(tmp_path, monkeypatch, capsys):
    bodies = [{"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 12, "temperature": n} for n in (0, 1)]
    file = tmp_path / "requests.jsonl"
    file.write_text("\n\n".join(map(json.dumps, bodies)))
    with running(save_model(tmp_path / "model"), slots=2) as client:
        status, printed = compare(monkeypatch, capsys, file, client)
        assert status == 0 and "2 requests, 0 tool calls, 0 answers differ" in printed
        manager = client.runner.requests.manager
        add = manager.add_request

        def wrong(*args, generation_config, speculation, **kwargs):
            if speculation is None:
                generation_config.max_new_tokens = 5
            return add(*args, generation_config=generation_config, speculation=speculation, **kwargs)

        monkeypatch.setattr(manager, "add_request", wrong)
        status, printed = compare(monkeypatch, capsys, file, client)
    assert status == 1 and "2 answers differ" in printed
    assert "request 1, tokens: 5 with drafts, 12 without" in printed and "request 2, content: " in printed


def test_it_compares_tool_calls(tmp_path, monkeypatch, capsys):
    pytest.importorskip("xgrammar")
    from tool_templates import save_tool_model

    file = tmp_path / "requests.jsonl"
    bodies = [request(number) | {"max_tokens": 300} for number in range(1, 4)]
    file.write_text("\n".join(json.dumps(body | {"parallel_tool_calls": False}) for body in bodies))
    with running(save_tool_model(tmp_path / "model"), slots=2) as client:
        status, printed = compare(monkeypatch, capsys, file, client)
    assert status == 0 and "3 requests, 3 tool calls, 0 answers differ" in printed
