"""Libraries that take a model of transformers, with a speculative one: the same answers as with the plain model."""

import copy

import pytest
from server_fixtures import EAGER, save_model
from transformers import AutoModelForCausalLM, AutoTokenizer, TextIteratorStreamer, pipeline

from spec_compile import speculate

TEXTS = ["def mean(values):\n", "import os\n\nfor path in", "class Stack:\n    def"]
CHATS = [[{"role": "user", "content": text}] for text in TEXTS]
GREEDY = {"max_new_tokens": 12, "do_sample": False}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def tokenizer(folder):
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def plain(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval()


@pytest.fixture(scope="module")
def systems(plain):
    """The plain model, and the speculative one."""
    return plain, speculate(plain, **EAGER)


def writer(model, tokenizer, **settings):
    return pipeline("text-generation", model=model, tokenizer=tokenizer, device="cpu", **settings)


def same(systems, ask):
    """The answer that `ask` gets from both models; the speculative one runs rounds."""
    before = systems[1].speculation.stats.rounds
    expected, got = map(ask, systems)
    assert got == expected and systems[1].speculation.stats.rounds > before
    return got


@pytest.mark.parametrize(
    ("inputs", "settings"),
    [
        (TEXTS, {"batch_size": 3}),
        (CHATS, {"batch_size": 2}),
        (TEXTS[0], {"return_full_text": False, "repetition_penalty": 1.5}),
        (TEXTS, {"return_tensors": True}),
        (TEXTS[1], {"stop_sequence": "):", "max_new_tokens": 24}),
        (TEXTS[0], {"prefix": "import math\n", "handle_long_generation": "hole"}),
    ],
    ids=["batch", "chats", "new text", "tensors", "stop", "prefix"],
)
def test_pipelines(systems, tokenizer, inputs, settings):
    def ask(model):
        return writer(model, tokenizer)(inputs, **GREEDY | settings)

    same(systems, ask)


def test_pipelines_over_iterators_and_with_settings_of_their_own(systems, tokenizer):
    def ask(model):
        write = writer(model, tokenizer, **GREEDY, no_repeat_ngram_size=2)
        return list(write(text for text in TEXTS)), write.model.generation_config.to_dict()

    same(systems, ask)


def test_pipelines_stream(systems, tokenizer):
    def ask(model):
        streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
        answer = writer(model, tokenizer)(CHATS[0], **GREEDY, streamer=streamer)
        pieces = list(streamer)
        assert "".join(pieces) == answer[0]["generated_text"][-1]["content"] and len(pieces) > 2
        return pieces

    same(systems, ask)


def test_a_copied_pipeline_speculates(systems, tokenizer):
    write = writer(systems[1], tokenizer)
    other = copy.deepcopy(write)
    assert other(TEXTS[0], **GREEDY) == write(TEXTS[0], **GREEDY)
    assert other.model is not write.model and other.model.speculation.stats.rounds


def test_smolagents(systems, folder):
    """Its criterion for stops remembers the text of one row, and its streamer is read in another thread."""
    smolagents = pytest.importorskip("smolagents")
    pytest.importorskip("accelerate")
    engine = smolagents.TransformersModel(str(folder), device_map="cpu", max_new_tokens=16, do_sample=False)
    messages = [smolagents.ChatMessage(role="user", content=[{"type": "text", "text": TEXTS[0]}])]

    def ask(model):
        engine.model = model
        whole = engine.generate(messages)
        stopped = engine.generate(messages, stop_sequences=[whole.content[6:8]])
        pieces = [piece.content for piece in engine.generate_stream(messages)]
        assert "".join(pieces) == whole.content and whole.content.startswith(stopped.content)
        return whole.content, whole.token_usage, stopped.content, stopped.token_usage, pieces

    answer = same(systems, ask)
    assert len(answer[2]) < len(answer[0])


def test_langchain(systems, tokenizer):
    """Its pipeline, which streams from a thread with a criterion that returns a bool, and its chats."""
    langchain = pytest.importorskip("langchain_huggingface")

    def ask(model):
        llm = langchain.HuggingFacePipeline(pipeline=writer(model, tokenizer, **GREEDY), batch_size=2)
        assert llm.model_id == model.name_or_path
        chat = langchain.ChatHuggingFace(llm=llm, tokenizer=tokenizer)
        return llm.invoke(TEXTS[0]), llm.batch(TEXTS), list(llm.stream(TEXTS[0])), chat.invoke("a mean").content

    answer = same(systems, ask)
    assert "".join(answer[2]) == answer[0].removeprefix(TEXTS[0])
