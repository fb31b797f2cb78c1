"""`demo` and `chat` of the command line: who gave each token, plain text, what is refused, conversations."""

import json
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub import constants
from huggingface_hub.errors import HfHubHTTPError
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

from spec_compile import UnsupportedModelError, speculate
from spec_compile.__main__ import main
from spec_compile.contrib import cli
from spec_compile.contrib.terminal import demo
from spec_compile.contrib.terminal.chat import TerminalChat, interrupts
from spec_compile.contrib.terminal.streamed import (
    NGRAMS,
    OWN,
    RECYCLED,
    Fragment,
    Fragments,
    SourcedStreamer,
    TokenSources,
    coloured,
    make_console,
)

CODER = Path(__file__).parents[2] / "examples" / "tiny_coder"
HTTP_ERROR = HfHubHTTPError.__bases__[0]
PROMPT = demo.PROMPT + demo.COMPLETION


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(CODER)


@pytest.fixture(scope="module")
def coder():
    return AutoModelForCausalLM.from_pretrained(CODER, dtype="float32").eval()


@pytest.fixture(scope="module")
def fast(coder):
    return speculate(coder, compile=False)


def streamed(fast, tokenizer, new_tokens=80):
    """The pieces of an answer and its ids, by a SourcedStreamer and by generate()."""
    fast.speculation.ngram.reset()
    inputs, pieces, stats = tokenizer(PROMPT, return_tensors="pt"), [], fast.speculation.stats
    prompt = inputs.input_ids[0].tolist()
    streamer = SourcedStreamer(tokenizer, pieces.extend, TokenSources.of(fast, prompt), lambda: stats.trace)
    output = fast.generate(**inputs, max_new_tokens=new_tokens, do_sample=False, pad_token_id=0, streamer=streamer)
    ids = output[0, len(prompt) :].tolist()
    assert streamer.ids == ids
    return pieces, ids


# Who gave a token.


@pytest.mark.parametrize(
    ("prompt", "rounds", "sources"),
    [
        ([1, 2, 3, 1], [[2, 7, 4]], [[NGRAMS, RECYCLED, OWN]]),
        ([1, 2, 3, 1], [[2, 3, 1, 9]], [[NGRAMS] * 3 + [OWN]]),
        ([1, 2, 3, 1], [[3, 2, 4]], [[RECYCLED, RECYCLED, OWN]]),  # 3 stands above, but not after 1
        ([5, 6, 8, 6, 9], [[6, 9, 2]], [[RECYCLED, RECYCLED, OWN]]),  # 6, 9 does, but not after the round's 9
        ([1, 2], [[1], [2, 1, 2, 3]], [[OWN], [NGRAMS, NGRAMS, RECYCLED, OWN]]),  # the round itself is not above
        ([1], [[]], [[]]),
    ],
)
def test_drafts_that_stand_above_are_from_ngrams(prompt, rounds, sources):
    told = TokenSources(prompt, RECYCLED)
    assert [told.of_round(gained) for gained in rounds] == sources
    others = TokenSources(prompt, "eagle3", has_ngrams=False)
    assert [others.of_round(gained) for gained in rounds] == [
        ["eagle3"] * (len(gained) - 1) + [OWN][: len(gained)] for gained in rounds
    ]


def test_without_other_drafts_all_stand_above(coder, tokenizer):
    """N-grams continue text that stands above, so no token that they gave may be told otherwise."""
    fast = speculate(coder, recycle=0, compile=False, check=False)
    pieces, ids = streamed(fast, tokenizer)
    found = [piece.source for piece in pieces]
    rounds = len(fast.speculation.stats.trace)
    assert {*found} == {NGRAMS, OWN} and found.count(OWN) == rounds < len(ids) / 2


def test_sources_of_recycled_tokens_and_of_heads(coder, fast, tokenizer):
    pieces, ids = streamed(fast, tokenizer)
    assert {piece.source for piece in pieces} <= {NGRAMS, RECYCLED, OWN}
    assert "".join(piece.text for piece in pieces) == tokenizer.decode(ids, skip_special_tokens=True)
    seconds = [piece.seconds for piece in pieces]
    assert seconds == sorted(seconds) and len({*seconds}) == len(fast.speculation.stats.trace)
    engine = SimpleNamespace(name="eagle3", runtime=SimpleNamespace(algorithm=SimpleNamespace(store=None)))
    head = SimpleNamespace(speculation=SimpleNamespace(engine=engine))
    assert TokenSources.of(head, [1, 2, 1]).of_round([2, 3]) == ["eagle3", OWN]


def test_characters_of_several_tokens_come_whole(tokenizer):
    text = "x = 'é中😀'  # naïve\n"
    ids = tokenizer(text).input_ids
    pieces = Fragments(tokenizer)
    parts = [pieces.text_of(token) for token in ids]
    assert "".join(parts) == text and "" in parts and "�" not in "".join(parts)


# What is printed.


def test_colours_tell_the_source():
    text = coloured(
        [Fragment(0, "a", OWN), Fragment(0, "b", NGRAMS), Fragment(1, "c", NGRAMS), Fragment(1, "d", RECYCLED)]
    )
    assert text.plain == "abcd"
    assert [(text.plain[span.start : span.end], span.style) for span in text.spans] == [
        ("bc", "bold green"),
        ("d", "bold cyan"),
    ]


@pytest.mark.parametrize(
    ("is_terminal", "environment", "has_colours"),
    [
        (True, {"TERM": "xterm"}, True),
        (True, {"TERM": "xterm", "NO_COLOR": "1"}, False),
        (True, {"TERM": "dumb"}, False),
        (False, {"TERM": "xterm"}, False),
    ],
)
def test_escape_codes_are_for_terminals_with_colours(is_terminal, environment, has_colours, monkeypatch, capsys):
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    make_console().print("x", style="bold green")
    assert ("\x1b" in capsys.readouterr().out) == has_colours


@pytest.mark.parametrize("width", [100, 60])
def test_panes_fit_the_screen_and_end_with_the_last_lines(width):
    console = Console(width=width, force_terminal=True, color_system=None)
    comparison = demo.Comparison()
    for run in comparison.runs:
        run.pieces += [Fragment(0.1, f"line {number}\n", OWN) for number in range(40)]
    printed = "".join(part.text for part in console.render(comparison.screen(console, 10)))
    lines = [line.rstrip() for line in printed.splitlines()]
    assert len(lines) == 12 and max(map(len, lines)) == width  # panes below each other have half of the lines each
    assert "line 39" in "\n".join(lines) and "line 29" not in "\n".join(lines)
    whole = "".join(part.text for part in console.render(comparison.screen(console, None)))
    assert whole.count("line 0 ") == 2


def test_the_verdict_compares_tokens():
    comparison = demo.Comparison((demo.Run("a", 2.0, [1, 2]), demo.Run("b", 0.5, [1, 2])))
    assert comparison.verdict == "4.00× · same tokens: yes"
    comparison.runs[1].ids = [1, 3]
    assert "same tokens: no, from token 2 on" in comparison.verdict


# The commands.


def test_demo_runs_without_arguments_that_name_things(tmp_path, capsys, two_layers):
    file = tmp_path / "run.json"
    assert main(["demo", "--new-tokens", "24", "--device", "cpu", "--record", str(file)]) == 0
    printed = capsys.readouterr().out
    assert "same tokens: yes" in printed and printed.count("24 tokens in ") == 2 and "\x1b" not in printed
    data = json.loads(file.read_text())
    texts = ["".join(text for _, text, _ in run["pieces"]) for run in data["runs"]]
    assert texts[0] == texts[1] and texts[0] in printed and data["model"] == "tiny_coder"
    assert {source for _, _, source in data["runs"][0]["pieces"]} == {OWN}
    assert data["runs"][1]["rate"] == pytest.approx(24 / data["runs"][1]["seconds"])


def test_the_model_of_a_wheel_comes_first(tmp_path, monkeypatch):
    assert demo.demo_model() == CODER
    monkeypatch.setattr(demo, "PACKAGE", tmp_path)
    with pytest.raises(ValueError, match="--model: the demo's own model is not in"):
        demo.demo_model()
    (tmp_path / "demo_model").mkdir()
    (tmp_path / "demo_model" / "config.json").write_text("{}")
    assert demo.demo_model() == tmp_path / "demo_model"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["demo", "--prompt", " "], "--prompt: expected a text, got an empty one"),
        (["demo", "--model", "/no/such/folder"], "--model: there is no folder /no/such/folder"),
        (["chat", "/no/such/folder"], "MODEL: there is no folder /no/such/folder"),
        (["demo", "--new-tokens", "2000"], "exceed the model's 2048 positions; give a shorter --prompt"),
        (["demo", "--record", "/no/such/file"], "--record: there is no folder /no/such"),
        (["demo", "--draft", "/no/such/folder", "--algo", "eagle3"], "/no/such/folder"),
    ],
)
def test_bad_input_is_one_line(arguments, message, capsys):
    assert main([*arguments, "--device", "cpu"]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert message in errors[-1] and errors[-1].startswith(f"python -m spec_compile {arguments[0]}: error: ")


@pytest.mark.parametrize("command", ["demo", "chat"])
def test_a_gpu_that_is_not_there_is_refused(command, capsys):
    with pytest.raises(SystemExit) as end:
        main([command, "--device", "cuda:99"])
    assert end.value.code == 2 and "--device: cuda:99: torch sees" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "place"),
    [(OSError("We couldn't connect\nto the hub"), "load_model"), (UnsupportedModelError("X has no rule"), "speculate")],
)
def test_errors_of_the_hub_and_of_refused_models_are_one_line(error, place, monkeypatch, capsys):
    def refuse(*arguments, **options):
        raise error

    monkeypatch.setattr(cli, place, refuse)
    assert main(["demo", "--model", str(CODER), "--device", "cpu"]) == 2
    assert capsys.readouterr().err.splitlines()[-1].endswith(" ".join(str(error).split()))


@pytest.mark.parametrize(
    ("answer", "is_offline"),
    [
        (HTTP_ERROR("no route"), True),
        (HfHubHTTPError("404", response=SimpleNamespace(headers={}, status_code=404, request=None)), False),
        (None, False),
    ],
)
def test_a_hub_out_of_reach_is_asked_once(answer, is_offline, monkeypatch):
    """Afterwards only the cache is looked into. A local folder is not asked for, and neither is what is no name."""
    asked = []

    def info(name, timeout):
        asked.append(name)
        if answer is not None:
            raise answer

    monkeypatch.setattr(cli.huggingface_hub, "model_info", info)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    cli.ask_hub(str(CODER))
    assert asked == []
    cli.ask_hub("user/model")
    assert asked == ["user/model"] and constants.HF_HUB_OFFLINE == is_offline


@pytest.mark.parametrize("arguments", [["demo", "--model", "user/model"], ["chat", "user/model"]])
def test_a_hub_out_of_reach_is_one_line(arguments, monkeypatch, tmp_path, capsys):
    def fail(*arguments, **options):
        raise HTTP_ERROR("no route")

    monkeypatch.setattr(cli.huggingface_hub, "model_info", fail)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    assert main([*arguments, "--device", "cpu"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "user/model cannot be loaded: We couldn't connect to" in line


# Conversations.


def talk(chat, lines, monkeypatch):
    """Let `chat` read lines, then the end of the input. KeyboardInterrupt among them is raised."""
    left = iter(lines)

    def read(prompt=""):
        line = next(left, None)
        if line is None:
            raise EOFError
        if line is KeyboardInterrupt:
            raise line
        return line

    monkeypatch.setattr(chat.console, "input", read)
    chat.run()
    return [*left]


def test_a_model_without_a_template_goes_on_with_the_text(coder, fast, tokenizer, monkeypatch, capsys):
    chat = TerminalChat(make_console(), fast, tokenizer, new_tokens=12)
    line = "def mean(values):"
    assert talk(chat, ["", "  ", KeyboardInterrupt, line], monkeypatch) == []
    ids = tokenizer(line, return_tensors="pt").input_ids
    wanted = coder.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False, pad_token_id=0
    )
    assert chat.ids == wanted[0].tolist()
    printed = capsys.readouterr().out
    assert tokenizer.decode(wanted[0, ids.shape[1] :], skip_special_tokens=True) in printed
    assert "no chat template" in printed and "\n12 tokens, " in printed and "tokens a round" in printed
    talk(chat, ["    return 1"], monkeypatch)
    assert chat.ids[: wanted.shape[1]] == wanted[0].tolist() and len(chat.ids) > wanted.shape[1] + 12
    assert talk(chat, ["/clear", "/quit", "never read"], monkeypatch) == ["never read"] and chat.ids == []


TEMPLATE = "{% for m in messages %}# {{ m.role }}: {{ m.content }}\n{% endfor %}"


def test_a_template_gets_the_whole_conversation(fast, tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", TEMPLATE)
    chat = TerminalChat(make_console(), fast, tokenizer, new_tokens=6)
    talk(chat, ["one", "two"], monkeypatch)
    assert [message["role"] for message in chat.messages] == ["user", "assistant"] * 2
    prompt = "".join(f"# {message['role']}: {message['content']}\n" for message in chat.messages[:3])
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    wanted = fast.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0)[0, ids.shape[1] :]
    assert chat.messages[3]["content"] == tokenizer.decode(wanted, skip_special_tokens=True)


def test_a_conversation_that_is_too_long_goes_on_after_clear(fast, tokenizer, monkeypatch, capsys):
    chat = TerminalChat(make_console(), fast, tokenizer, new_tokens=4)
    talk(chat, ["x " * 2100, "y", "/clear"], monkeypatch)
    printed = capsys.readouterr().out
    assert "positions; /clear forgets the conversation" in printed and printed.count("tokens a round") == 1


def test_ctrl_c_stops_an_answer_between_two_rounds(fast, tokenizer, monkeypatch, capsys):
    chat, stats = TerminalChat(make_console(), fast, tokenizer, new_tokens=60), fast.speculation.stats
    shown = []
    printing = chat.console.print

    def print_and_interrupt(*arguments, **options):
        printing(*arguments, **options)
        shown.append(options.get("end"))
        if shown.count("") == 3:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(chat.console, "print", print_and_interrupt)
    before = signal.getsignal(signal.SIGINT)
    chat.answer("def mean(values):")
    gained = len(chat.ids) - len(tokenizer("def mean(values):").input_ids)
    assert gained == sum(row for (row,) in stats.trace[:3]) and "… stopped" in capsys.readouterr().out
    assert signal.getsignal(signal.SIGINT) is before
    chat.answer("x = 1")  # the model answers again
    assert len(chat.ids) > gained


def test_a_second_ctrl_c_ends_at_once():
    with interrupts() as seen:
        signal.raise_signal(signal.SIGINT)
        assert seen
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
