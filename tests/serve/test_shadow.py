"""The second answers of a server by plain steps: equal ones are counted, and a fault in the rounds is noticed."""

import logging

import pytest
from server_fixtures import save_model, wait_until

SAVE, SERVER = save_model, dict(slots=4, served_model_name="tiny", shadow=1.0)
BODY = {"prompt": "def mean(values):\n", "max_tokens": 24}


def counted(client) -> tuple[float, float]:
    """The tokens that were checked, and those that differ."""
    lines = dict(line.rsplit(" ", 1) for line in client.get("/metrics").text.splitlines() if not line.startswith("#"))
    return tuple(float(lines[f"spec_compile:spec_decode_{name}_total"]) for name in ("checked", "mismatches"))


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0}, {"temperature": 1.0}, {"temperature": 1.0, "seed": 3, "n": 2}, {"frequency_penalty": 0.5},
        {"temperature": 0, "stop": ["return"], "stream": True}, {"allowed_token_ids": [5, 6, 7], "temperature": 0.7},
    ],
    ids=str,
)  # fmt: skip
def test_plain_steps_give_the_same(client, fields):
    before, wrong = counted(client)
    assert client.post("/v1/completions", json=BODY | fields).status_code == 200
    wait_until(lambda: counted(client)[0] >= before + 2 and not client.runner.requests.shadow._waiting)
    wait_until(lambda: client.runner.requests.active() == 0)
    assert counted(client)[1] == wrong == 0


def test_a_wrong_token_is_counted_and_told(client, caplog):
    shadow = client.runner.requests.shadow
    taken = []
    shadow.take, take = taken.append, shadow.take
    try:
        assert client.post("/v1/completions", json=BODY | {"temperature": 0}).status_code == 200
        wait_until(lambda: taken)
        del shadow.take
        (answered,) = taken
        answered.tokens[5] += 1
        with caplog.at_level(logging.ERROR, "spec_compile"):
            before, _ = counted(client)
            take(answered)
            wait_until(lambda: "shadow: token 5 after" in caplog.text)
        assert counted(client) == (before + 24, 1)
        take(answered)
        wait_until(lambda: counted(client) == (before + 48, 2))
        assert caplog.text.count("shadow: token") == 1
    finally:
        shadow.mismatches = 0


def test_a_second_answer_that_takes_long_is_given_up(client, caplog, monkeypatch):
    shadow, handlers = client.runner.requests.shadow, client.runner.requests.manager.output_router.result_handlers
    monkeypatch.setattr("spec_compile.serve.shadow.LONGEST", 0.0)
    before = counted(client)
    assert client.post("/v1/completions", json=BODY | {"temperature": 0}).status_code == 200
    wait_until(lambda: "took more than 0 s" in caplog.text)
    wait_until(lambda: client.runner.requests.active() == 0 and not handlers)
    assert counted(client) == before and not shadow._waiting


@pytest.mark.parametrize("share", [-0.1, 1.5, "all"])
def test_shares_are_checked(share, tmp_path):
    from spec_compile.serve.server import build

    with pytest.raises(ValueError, match=r"^shadow: expected a number from 0 to 1"):
        build(tmp_path, shadow=share)
