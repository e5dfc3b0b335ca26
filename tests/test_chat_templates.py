"""Chat templates in the manner of each family of models: their tool calls are parsed, their conversations bridged.

The templates are ours and have only what differs: marks, the syntax of tool calls, rules of reasoning, stop tokens.
What a model writes is spelt out beside them, so that a template and its parser cannot be wrong together. Its tokens are
others than the tokenizer's, so that only a bridge continues them."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count
from types import SimpleNamespace

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from asyncrl.rollouter.agents.base import Completion
from asyncrl.rollouter.endpoint.calls import Answer, BadRequest, Call, ToolCall
from asyncrl.rollouter.endpoint.rendering.renderer import ChatRenderer, Conversation
from asyncrl.rollouter.endpoint.turns import Turn, Turns, as_message
from asyncrl.types.samples import FinishReason

TEXT = 'if x == "{}":\n\tprint(\'[a, b]\')  # é </b>, "name":'
ARGUMENTS = {"n": 3, "x": -1.5, "text": TEXT, "digits": "007", "deep": {"a": [1, {"z": "}"}]}, "yes": True, "no": None}
CALLS = [("look_up", ARGUMENTS), ("stop-2", {"n": 12})]
TYPES = {"n": "integer", "x": "number", "text": "string", "deep": "object", "yes": "boolean"}
PROPERTIES = {name: {"type": kind} for name, kind in TYPES.items()}
PROPERTIES |= {name: {"anyOf": [{"type": "string"}, {"type": "null"}]} for name in ("digits", "no")}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "", "parameters": {"properties": PROPERTIES}}}
    for name, _ in CALLS
]

#: an answer's content and tool calls stand where ``@content`` and ``@calls`` are
SKELETON = """{{ bos_token }}
{%- macro gemma(v) -%}
{%- if v is string %}<|"|>{{ v }}<|"|>
{%- elif v is mapping %}{{ '{' }}{% for k, x in v.items() %}{{ k }}:{{ gemma(x) }}{{ '' if loop.last else ',' }}
{%- endfor %}{{ '}' }}
{%- elif v is sequence %}[{% for x in v %}{{ gemma(x) }}{{ '' if loop.last else ',' }}{% endfor %}]
{%- else %}{{ v | tojson }}{% endif %}
{%- endmacro -%}
{%- if tools %}<|tools|>{{ tools | tojson }}{% endif %}
{%- set last = namespace(user=-1) %}
{%- for m in messages %}{% if m.role == "user" %}{% set last.user = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}{% set current = loop.index0 > last.user %}
{%- if m.role == "user" %}<|user|>{{ m.content }}@stop
{%- elif m.role == "tool" %}<|tool|>{{ m.content }}@stop
{%- else %}<|assistant|>@reasoning{% if m.tool_calls %}@text@calls{% else %}@content{% endif %}@stop
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}<|assistant|>@prompt{% endif %}"""


def js(value):
    return json.dumps(value, ensure_ascii=False)


def gemma(value):
    if isinstance(value, dict):
        return "{" + ",".join(f"{k}:{gemma(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(gemma, value)) + "]"
    return f'<|"|>{value}<|"|>' if isinstance(value, str) else js(value)


def each(body, join=""):
    """A template's loop over the tool calls of a message."""
    between = "{{ '' if loop.last else '" + join + "' }}"
    return "{% for c in m.tool_calls %}{% set f = c.function %}" + body + between + "{% endfor %}"


@dataclass(frozen=True)
class Family:
    """``calls`` is the template's part that renders tool calls, ``writes(calls)`` what the model writes. ``stop`` ends
    messages; empty: the next one's mark ends them. ``most``: tool calls of a message."""

    calls: str
    writes: Callable[[list], str]
    stop: str = "<|stop|>\n"
    content: str = "{{ m.content }}"
    text: str = "{{ m.content }}"
    reasoning: str = ""
    prompt: str = ""
    most: int = 2

    @property
    def template(self):
        parts = {name: getattr(self, name) for name in ("stop", "content", "text", "calls", "reasoning", "prompt")}
        return re.sub(r"@(\w+)", lambda found: parts[found[1]], SKELETON)


def objects(begin, end="", join="", before="", after="", one='{"name": "%s", "arguments": %s}', **options):
    """Calls as JSON objects; ``one``: of them, its name and its arguments."""
    body = begin + one.replace("%s", "{{ f.name }}", 1).replace("%s", "{{ f.arguments | tojson }}") + end
    return Family(
        before + each(body, join) + after,
        lambda calls: before + join.join(begin + one % (n, js(a)) + end for n, a in calls) + after,
        **options,
    )


def headed(begin, between, end="", before="", after="", arguments="{{ f.arguments | tojson }}", write=js, **options):
    """Names, each before its arguments."""
    return Family(
        before + each(begin + "{{ f.name }}" + between + arguments + end) + after,
        lambda calls: before + "".join(begin + n + between + write(a) + end for n, a in calls) + after,
        **options,
    )


def keyed(call, pair, end, before="", after="", write=js, **options):
    """Names, each before pairs of keys and texts: ``call`` and ``pair`` have their places as %s."""
    value = "{{ v | string if v is string or (python and v is boolean) else v | tojson }}"
    value = value.replace("python", "1" if write is python else "0")
    loop = "{% for k, v in f.arguments.items() %}" + pair % ("{{ k }}", value) + "{% endfor %}"

    def one(name, arguments):
        texts = ((k, v if isinstance(v, str) else write(v)) for k, v in arguments.items())
        return call % name + "".join(pair % (k, text) for k, text in texts) + end

    return Family(
        before + each(call % "{{ f.name }}" + loop + end) + after,
        lambda calls: before + "".join(one(*call) for call in calls) + after,
        **options,
    )


def python(value):
    return str(value) if isinstance(value, bool) else js(value)


LLAMA = '{"name": "%s", "parameters": %s}'
ONE_CALL = "{{ raise_exception('one!') if m.tool_calls | length > 1 else '' }}"
COMMAND = '{"tool_call_id": "0", "tool_name": "%s", "parameters": %s}'
SECTION = {"before": "<｜tool▁calls▁begin｜>", "after": "<｜tool▁calls▁end｜>"}
FAMILIES = {
    "Hermes": objects("<tool_call>\n", "\n</tool_call>", "\n"),
    "Qwen3-Coder": keyed(
        "<tool_call>\n<function=%s>\n", "<parameter=%s>\n%s\n</parameter>\n", "</function>\n</tool_call>", write=python
    ),
    "GLM": keyed(
        "<tool_call>%s\n", "<arg_key>%s</arg_key>\n<arg_value>%s</arg_value>\n", "</tool_call>", stop=""
    ),
    "MiniMax-M2": keyed(
        '<invoke name="%s">\n', '<parameter name="%s">%s</parameter>\n', "</invoke>\n",
        "<minimax:tool_call>\n", "</minimax:tool_call>",
    ),
    "MiniCPM": keyed('<function name="%s">', '<param name="%s">%s</param>', "</function>"),
    "DeepSeek V4": keyed(
        '<｜DSML｜invoke name="%s">\n', '<｜DSML｜parameter name="%s" string="-">%s</｜DSML｜parameter>\n',
        "</｜DSML｜invoke>\n", "<｜DSML｜tool_calls>\n", "</｜DSML｜tool_calls>",
    ),
    "Mistral Nemo": objects("", "", ", ", "[TOOL_CALLS][", "]", text=""),
    "Ministral": headed("[TOOL_CALLS]", "[ARGS]"),
    "DeepSeek V3": headed(
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>", "\n```json\n", "\n```<｜tool▁call▁end｜>", **SECTION,
        arguments="{{ '' + f.arguments }}", text="{{ '' if m.content is none else m.content + '<｜Assistant｜>' }}",
    ),
    "DeepSeek V3.1": headed("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", **SECTION),
    "Gemma 4": headed("<|tool_call>call:", "", "<tool_call|>", arguments="{{ gemma(f.arguments) }}", write=gemma),
    "Functionary": headed("<function=", ">", "</function>"),
    "Command": objects(
        "", "", ", ", "<|START_ACTION|>[", "]<|END_ACTION|>", COMMAND,
        content="<|START_TEXT|>{{ m.content }}<|END_TEXT|>",
    ),
    "Granite 3": objects("", "", ", ", "<|tool_call|>[", "]"),
    "Nemotron Nano 2": objects("", "", ", ", "<TOOLCALL>[", "]</TOOLCALL>"),
    "MiniMax-M1": objects("", "\n", "", "<tool_calls>\n", "</tool_calls>"),
    "xLAM": objects("", "", ", ", "[", "]", text=""),
    "Phi-4-mini": objects("", "", ", ", "functools[", "]", text=""),
    "Llama 3": objects("", "", "; ", one=LLAMA, text=ONE_CALL, most=1),
}  # fmt: skip
HERMES = FAMILIES["Hermes"]
ALL = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)


PAIRS = ("oo", "on")  # the tokenizer's only merges: in all that models write here


def renderer_of(family, stops=("<|stop|>",)):
    """A renderer with a tokenizer of bytes and of the template's marks."""
    special = re.findall(r"<\|[^\s{}<>]*?\|>|<｜[^\s<>]*?｜>|\[[A-Z_]+\]", family.template)
    special = dict.fromkeys(["<BOS>", *stops, *special])
    plain = ("<think>", "</think>", "<tool_call>", "</tool_call>")
    vocabulary = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *PAIRS]
    bpe = Tokenizer(models.BPE({token: i for i, token in enumerate(vocabulary)}, [(a, b) for a, b in PAIRS]))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.add_special_tokens([AddedToken(mark, normalized=False) for mark in special])
    bpe.add_tokens([AddedToken(mark, normalized=False) for mark in plain])
    hf = PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<BOS>", chat_template=family.template)
    return ChatRenderer(SimpleNamespace(hf=hf, stop_token_ids=tuple(hf.convert_tokens_to_ids(list(stops)))))


class Chat:
    """A client's conversation, with what the endpoint does for each call."""

    def __init__(self, renderer, tools=TOOLS):
        self.renderer, self.tools, self.turns, self.numbers = renderer, tools, Turns(renderer), count()
        self.messages, self.hf = [], renderer._hf

    def ask(self, *messages):
        """How the prompt of the next call is made, which begins with the very tokens of an earlier one if bridged."""
        self.messages += messages
        self.call = Call("m", messages=list(self.messages), tools=self.tools)
        self.prompt = self._as_the_whole_would_give()
        earlier = self.turns.all[-1] if self.turns.all else None
        if earlier is not None and self.prompt.how == "bridged":
            tokens = earlier.end.tolist()
            assert self.prompt.tokens.tolist()[: len(tokens)] == tokens
        return self.prompt.reason or self.prompt.how

    def _as_the_whole_would_give(self):
        """The prompt of the call, which is the same if every bridge is rendered with the whole conversation."""
        prompt = self.turns.prompt_of(self.call)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self.renderer, "_is_local", False)
            whole = self.turns.prompt_of(self.call)
        assert (prompt.how, prompt.reason, prompt.opens_reasoning) == (whole.how, whole.reason, whole.opens_reasoning)
        assert prompt.tokens.tolist() == whole.tokens.tolist()
        return prompt

    def answer(self, text):
        """The parts of what the model writes, stop token included."""
        renderer, number = self.renderer, next(self.numbers)
        letters = {self.hf.convert_tokens_to_ids(pair): self.hf.convert_tokens_to_ids([*pair]) for pair in PAIRS}
        chosen = renderer.encode(text).tolist()
        tokens = np.asarray([token for one in chosen for token in letters.get(one, [one])], np.int32)
        assert len(tokens) > len(chosen) or self.prompt.begun
        whole = self.prompt.begun + renderer.text_of(tokens)
        written = renderer.parse(whole, self.prompt.opens_reasoning, self.tools)
        calls = [ToolCall(c.id or f"call{number:04}{i}", c.name, c.arguments) for i, c in enumerate(written.tool_calls)]
        answer = Answer(
            f"a{number}", "m", 0, text, written.content, written.reasoning, calls, "stop", None, self.prompt.tokens,
            tokens, np.zeros(len(tokens), np.float32),
        )  # fmt: skip
        completion = Completion(tokens, answer.logprobs, [], FinishReason.STOP)
        self.turns.add(Turn(number, self.call, self.prompt, completion, answer, True))
        self.messages.append(as_message(answer))
        return written

    def results(self):
        return [{"role": "tool", "tool_call_id": c["id"], "content": "out"} for c in self.messages[-1]["tool_calls"]]

    @property
    def text(self):
        return self.hf.decode(self.prompt.tokens.tolist())

    @property
    def rendered(self):
        return self.hf.decode(self.renderer.render(Conversation(self.messages, self.tools, {})).tokens.tolist())


def user(text="hi"):
    return {"role": "user", "content": text}


def found(written):
    return [(call.name, json.loads(call.arguments)) for call in written.tool_calls]


def ends(family):
    """Stop tokens, and those that end tool calls and plain answers."""
    return (
        (("<|stop|>",), "<|stop|>", "<|stop|>") if family.stop else (("<|user|>", "<|tool|>"), "<|tool|>", "<|user|>")
    )


@ALL
def test_tool_calls_are_parsed_and_the_conversation_is_bridged(family):
    stops, called, answered = ends(family)
    chat = Chat(renderer_of(family, stops))
    assert chat.ask(user()) == "rendered"
    for calls in (CALLS[:1], CALLS[: family.most]):
        written = chat.answer(family.writes(calls) + called)
        assert (found(written), written.content) == (calls, "")
        assert chat.ask(*chat.results()) == "bridged"
        assert chat.text == chat.rendered
    before, after = family.content.split("{{ m.content }}")
    assert chat.answer(before + "It is done." + after + answered).content == "It is done."
    assert chat.ask(user("thanks")) == "bridged"
    assert chat.text == chat.rendered


@ALL
def test_a_call_that_is_cut_or_garbled_is_content(family):
    renderer = renderer_of(family, ends(family)[0])
    calls = CALLS[: family.most]
    text = family.writes(calls)
    for length in range(len(text)):
        written = renderer.parse(text[:length], False, TOOLS)
        assert found(written) == calls[: len(written.tool_calls)]
        assert written.tool_calls or written.content == text[:length]
    for garbled in (text.replace("look_up", ""), text.replace(":", ""), text * 300):
        written = renderer.parse(garbled, False, TOOLS)
        assert all(call.name for call in written.tool_calls)
        assert written.tool_calls or written.content == garbled


@pytest.mark.parametrize(
    "call",
    [
        '"f"', "[]", "[1]", '{"name": "f"}', '{"name": 3, "arguments": {}}', '{"name": "f", "arguments": [1]}',
        '{"name": "f", "arguments": "{}"}', '{"name": "f", "arguments": {"a": NaN}}',
        '{"name": "f", "arguments": {"a": "\\ud800"}}', '{"name": "f", "arguments": {"a": "<tool_call>"}',
    ],
)  # fmt: skip
def test_json_that_is_no_call_is_content(call):
    text = f"<tool_call>\n{call}\n</tool_call>"
    assert renderer_of(HERMES).parse(text, False, TOOLS).content == text


@pytest.mark.parametrize(
    ("name", "end", "broken"),
    [("Hermes", "</tool_call>", ""), ("Qwen3-Coder", "</parameter>", ""), ("GLM", "</arg_value>", "</arg_value>and")],
)
def test_a_call_without_its_ends_is_content(name, end, broken):
    text = FAMILIES[name].writes(CALLS[:1]).replace(end, broken)
    assert renderer_of(FAMILIES[name], ends(FAMILIES[name])[0]).parse(text, False, TOOLS).content == text


def test_marks_inside_of_json_texts_are_part_of_them():
    renderer = renderer_of(HERMES)
    call = ("look_up", {"text": "</tool_call><tool_call>{}"})
    assert found(renderer.parse(HERMES.writes([call, call]), False, TOOLS)) == [call, call]


@ALL
def test_answers_without_calls_are_content(family):
    renderer = renderer_of(family, ends(family)[0])
    for text in ("Plain.", '{"name": "other", "arguments": {"n": 1}}', "[1, 2]", "<b>bold</b>", "\n {", ""):
        assert renderer.parse(text, False, TOOLS) == replace(renderer.parse("", False, ()), content=text)
    text = family.writes(CALLS[:1])
    assert not renderer.parse(text, False, ()).tool_calls  # without tools


@pytest.mark.parametrize("name", ["Hermes", "Qwen3-Coder", "GLM", "MiniMax-M2", "Ministral", "DeepSeek V3.1"])
def test_text_before_calls_is_kept(name):
    stops, called, _ = ends(FAMILIES[name])
    chat = Chat(renderer_of(FAMILIES[name], stops))
    chat.ask(user())
    written = chat.answer("Let me see." + FAMILIES[name].writes(CALLS) + called)
    assert (found(written), written.content) == (CALLS, "Let me see.")
    assert chat.ask(*chat.results()) == "bridged"


def test_a_second_call_is_content_where_the_template_renders_only_one():
    family = FAMILIES["Llama 3"]
    chat = Chat(renderer_of(family))
    chat.ask(user())
    text = family.writes(CALLS)
    assert chat.answer(text + "<|stop|>").content == text
    assert chat.ask(user("one at a time")) == "bridged"


def test_values_have_the_types_that_the_schema_allows():
    renderer = renderer_of(FAMILIES["Qwen3-Coder"])
    schemas = {
        "text": {"type": "string"}, "optional": {"type": ["string", "null"]}, "flag": {"type": "boolean"},
        "count": {"type": "integer"}, "any": {}, "strange": {"anyOf": 3},
    }  # fmt: skip
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"properties": schemas}}}]

    def value(key, text):
        pairs = f"<parameter={key}>\n{text}\n</parameter>"
        written = renderer.parse(f"<tool_call>\n<function=f>\n{pairs}\n</function>\n</tool_call>", False, tools)
        return found(written)[0][1][key]

    for text in ("5", "null", "True", "a\n", "<parameter", "a</parameter>b"):
        assert value("text", text) == text
    assert [value("optional", t) for t in ("5", "None", "null")] == ["5", None, None]
    assert [value("flag", t) for t in ("True", "false", "maybe")] == [True, False, "maybe"]
    assert [value(k, "12") for k in ("count", "any", "strange", "unknown")] == [12, 12, 12, 12]


# -- forced calls ------------------------------------------------------------------------------------------------------


def forced(chat, *names, **more):
    """How an answer begins that must call one of the tools ``names``; a chat goes on from there."""
    choice = "required" if len(names) > 1 else {"type": "function", "function": {"name": names[0]}}
    call = replace(chat.call, sampling={"tool_choice": choice}, **more)
    plain, chat.prompt = chat.prompt, chat.turns.prompt_of(call)
    written = chat.renderer.encode(chat.prompt.begun).tolist()
    assert chat.prompt.tokens.tolist() == [*plain.tokens.tolist(), *written]
    return chat.prompt.begun


@ALL
def test_a_forced_call_begins_as_the_template_writes_it_and_is_bridged(family):
    """Up to the arguments of a tool, or up to the name of one of several."""
    stops, called, _ = ends(family)
    for names in (["look_up"], ["look_up", "stop-2"]):
        chat = Chat(renderer_of(family, stops))
        chat.ask(user())
        text = family.writes(CALLS[:1])
        begun = forced(chat, *names)
        assert text.startswith(begun)
        assert ("look_up" in begun) == (len(names) == 1)
        written = chat.answer(text.removeprefix(begun) + called)
        assert (found(written), written.content) == (CALLS[:1], "")
        assert chat.ask(*chat.results()) == "bridged"
        assert chat.text == chat.rendered


# -- ids that the model writes -----------------------------------------------------------------------------------------

KIMI = Family(
    "<|tool_calls_section_begin|>"
    + each("<|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>{{ f.arguments | tojson }}<|tool_call_end|>")
    + "<|tool_calls_section_end|>",
    lambda calls: "<|tool_calls_section_begin|>" + "".join(
        f"<|tool_call_begin|>functions.{n}:{i}<|tool_call_argument_begin|>{js(a)}<|tool_call_end|>"
        for i, (n, a) in enumerate(calls)
    ) + "<|tool_calls_section_end|>",
)  # fmt: skip
MISTRAL = Family(
    each(
        "{{ raise_exception('nine!') if c.id | length != 9 else '' }}"
        "[TOOL_CALLS]{{ f.name }}[CALL_ID]{{ c.id }}[ARGS]{{ f.arguments | tojson }}"
    ),
    lambda calls: "".join(f"[TOOL_CALLS]{n}[CALL_ID]abcdefgh{i}[ARGS]{js(a)}" for i, (n, a) in enumerate(calls)),
)


@pytest.mark.parametrize(
    ("family", "ids"),
    [(KIMI, ["functions.look_up:0", "functions.stop-2:1"]), (MISTRAL, ["abcdefgh0", "abcdefgh1"])],
    ids=["Kimi", "Mistral"],
)
def test_ids_that_the_model_writes_are_kept(family, ids):
    chat = Chat(renderer_of(family))
    chat.ask(user())
    written = chat.answer(family.writes(CALLS) + "<|stop|>")
    assert (found(written), [call.id for call in written.tool_calls]) == (CALLS, ids)
    assert chat.ask(*chat.results()) == "bridged"
    assert chat.text == chat.rendered


@pytest.mark.parametrize(("family", "end"), [(KIMI, "functions.look_up:"), (MISTRAL, "look_up[CALL_ID]")])
def test_a_forced_call_is_begun_up_to_its_id(family, end):
    chat = Chat(renderer_of(family))
    chat.ask(user())
    text = family.writes(CALLS[:1])
    begun = forced(chat, "look_up")
    assert text.startswith(begun)
    assert begun.endswith(end)
    assert found(chat.answer(text.removeprefix(begun) + "<|stop|>")) == CALLS[:1]
    assert chat.ask(*chat.results()) == "bridged"


def test_ids_that_templates_refuse_or_that_are_not_unique_are_not_taken():
    renderer = renderer_of(MISTRAL)
    for text in (MISTRAL.writes(CALLS).replace("abcdefgh", "a-"), MISTRAL.writes(CALLS).replace("h1", "h0")):
        written = renderer.parse(text, False, TOOLS)
        assert (found(written), [call.id for call in written.tool_calls]) == (CALLS, [None, None])


def test_ids_in_a_list():
    renderer = renderer_of(FAMILIES["Mistral Nemo"])
    for written, taken in (("abcdefgh0", "abcdefgh0"), ("0", None), (7, None)):
        call = {"name": "look_up", "arguments": {}, "id": written}
        assert [c.id for c in renderer.parse(f"[TOOL_CALLS][{js(call)}]", False, TOOLS).tool_calls] == [taken]


# -- reasoning ---------------------------------------------------------------------------------------------------------

THOUGHT = "<think>\nhm\n</think>\n\n"
KEPT = "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
IN_LOOP = KEPT.replace("{% if", "{% if current and")
SEED = ("think>", "seed:think>")
REASONING = {
    "kept": (replace(HERMES, reasoning=KEPT), THOUGHT, "bridged"),
    "stripped by a user": (replace(HERMES, reasoning=IN_LOOP), THOUGHT, "history_rewritten"),
    "opened by the prompt": (replace(HERMES, reasoning=KEPT, prompt="<think>\n"), THOUGHT[8:], "bridged"),
    "opened and stripped": (replace(HERMES, reasoning=IN_LOOP, prompt="<think>\n"), THOUGHT[8:], "history_rewritten"),
    "of another name": (replace(HERMES, reasoning=KEPT.replace("reasoning_content", "thinking")), THOUGHT, "bridged"),
    "in the content": (replace(HERMES, reasoning="{% if 0 %}<think>{% endif %}"), THOUGHT, "bridged"),
    "other tags": (replace(HERMES, reasoning=KEPT.replace(*SEED)), THOUGHT.replace(*SEED), "bridged"),
}  # fmt: skip


@pytest.mark.parametrize(("family", "thought", "then"), REASONING.values(), ids=REASONING)
def test_reasoning_is_split_and_bridged_until_the_template_strips_it(family, thought, then):
    chat = Chat(renderer_of(family))
    chat.ask(user())
    for _ in range(2):
        written = chat.answer(thought + family.writes(CALLS) + "<|stop|>")
        assert (written.reasoning, written.content, found(written)) == ("hm", "", CALLS)
        assert chat.ask(*chat.results()) == "bridged"
    written = chat.answer(thought + "Done.<|stop|>")
    assert (written.reasoning, written.content) == ("hm", "Done.")
    assert chat.ask(user("thanks")) == then


ALWAYS = replace(HERMES, reasoning="<think>\n{{ m.reasoning_content }}\n</think>\n\n", prompt="<think>\n")


@pytest.mark.parametrize(("family", "then"), [(ALWAYS, "bridged"), (REASONING["opened by the prompt"][0], "branched")])
def test_reasoning_that_the_prompt_opens_is_closed_before_a_forced_call(family, then):
    """A template that leaves out empty reasoning renders another history."""
    chat = Chat(renderer_of(family))
    chat.ask(user())
    begun = forced(chat, "look_up")
    assert begun == '\n</think>\n\n<tool_call>\n{"name": "look_up", "arguments":'
    written = chat.answer(js(CALLS[0][1]) + "}\n</tool_call><|stop|>")
    assert (written.reasoning, written.content, found(written)) == ("", "", CALLS[:1])
    chat.ask(*chat.results())
    assert chat.prompt.how == then


def test_a_grammar_holds_for_the_content_after_what_the_template_has_before_it():
    for family, begun in (
        (ALWAYS, "\n</think>\n\n"), (FAMILIES["Command"], "<|START_TEXT|>"), (HERMES, ""),
        (SimpleNamespace(template=HARMONY), "<|channel|>final<|message|>"),
    ):  # fmt: skip
        chat = Chat(renderer_of(family))
        chat.ask(user())
        chat.prompt = chat.turns.prompt_of(chat.call, plain=True)
        assert chat.prompt.begun == begun
        assert chat.answer('{"on": 1}<|stop|>').content == '{"on": 1}'


def test_reasoning_of_a_plain_answer_that_the_template_strips_begins_a_branch():
    family = replace(HERMES, reasoning=IN_LOOP)
    chat = Chat(renderer_of(family))
    chat.ask(user())
    chat.answer(THOUGHT + "Done.<|stop|>")
    assert chat.ask(user("thanks")) == "answer_rewritten"


def test_reasoning_that_is_off_by_its_end_alone_is_not_content():
    family = replace(HERMES, reasoning=KEPT.replace("{% endif %}", "{% else %}</think>{% endif %}"))
    chat = Chat(renderer_of(family))
    chat.ask(user())
    written = chat.answer("</think>Done.<|stop|>")
    assert (written.reasoning, written.content) == (None, "Done.")
    assert chat.ask(user("thanks")) == "bridged"


HARMONY = """{% for m in messages %}{% if m.role == "user" %}<|start|>user<|message|>{{ m.content }}<|end|>
{%- elif m.role == "tool" %}<|start|>functions.x to=assistant<|channel|>commentary<|message|>{{ m.content }}<|end|>
{%- elif m.tool_calls %}{{ raise_exception('not both!') if m.thinking and m.content else '' }}
{%- if m.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>
{%- endif %}<|start|>assistant to=functions.{{ m.tool_calls[0].function.name }}<|channel|>commentary json<|message|>
{{- m.tool_calls[0].function.arguments | tojson }}<|call|>
{%- else %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}{{ '<|return|>' if loop.last else '<|end|>' }}
{%- endif %}{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"""


def test_channels_of_gpt_oss():
    renderer = renderer_of(SimpleNamespace(template=HARMONY), ("<|return|>", "<|call|>"))
    chat = Chat(renderer)
    chat.ask(user())
    analysis = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
    for call in CALLS:
        text = f"<|channel|>commentary to=functions.{call[0]} <|constrain|>json<|message|>{js(call[1])}<|call|>"
        written = chat.answer(analysis + text)
        assert (written.reasoning, written.content, found(written)) == ("hm", "", [call])
        assert chat.ask(*chat.results()) == "bridged"
    assert forced(chat, "look_up") == " to=functions.look_up<|channel|>commentary json<|message|>"
    assert found(chat.answer(js(ARGUMENTS) + "<|call|>")) == CALLS[:1]
    assert chat.ask(*chat.results()) == "bridged"
    preamble = "<|channel|>commentary<|message|>Soon.<|end|><|start|>assistant"
    assert chat.answer(analysis + preamble + text).content == "Soon."
    assert chat.ask(*chat.results()) == "answer_rewritten"  # the template takes reasoning or a text, not both
    written = chat.answer(analysis + "<|channel|>final<|message|>Done.<|return|>")
    assert (written.reasoning, written.content) == ("hm", "Done.")
    assert chat.ask(user("thanks")) == "no_bridge"  # the template renders another token than <|return|>


# -- stop tokens and dates ---------------------------------------------------------------------------------------------


def test_a_stop_token_that_the_template_does_not_render_begins_a_branch():
    chat = Chat(renderer_of(HERMES, ("<|stop|>", "<|eom|>")))
    chat.ask(user())
    chat.answer("Done.<|eom|>")
    assert chat.ask(user("thanks")) == "no_bridge"
    chat.answer("Soon.<|stop|>")
    assert chat.ask(user("bye")) == "bridged"


def test_a_template_that_leaves_out_the_last_stop_token_is_bridged():
    template = """{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}
    {{- '' if m.role == 'user' or loop.last else '<|stop|>' }}{% endfor %}
    {{- '<|assistant|>' if add_generation_prompt else '' }}"""
    chat = Chat(renderer_of(SimpleNamespace(template=template)), tools=[])
    chat.ask(user())
    for _ in range(2):
        chat.answer("Done.<|stop|>")
        assert chat.ask(user("more")) == "bridged"
        assert chat.text == chat.rendered
        assert chat.text.count("<BOS>") == 1


def test_a_conversation_keeps_the_date_with_which_it_began(monkeypatch):
    dated = SimpleNamespace(template="{{ today | default('monday') }}" + HERMES.template)
    renderer = renderer_of(dated)
    chat = Chat(renderer)
    chat.ask(user())
    chat.answer("Done.<|stop|>")
    text = renderer._text
    monkeypatch.setattr(renderer, "_text", lambda c: text(replace(c, template_args={"today": "tuesday"})))
    assert chat.ask(user("more")) == "bridged"
    assert "monday" in chat.text
    assert "tuesday" not in chat.text


def test_a_call_whose_arguments_come_first_is_begun_but_not_of_a_named_tool():
    one = '{"arguments": {{ f.arguments | tojson }}, "name": "{{ f.name }}"}'
    chat = Chat(renderer_of(replace(HERMES, calls=each("<tool_call>\n" + one + "\n</tool_call>", "\n"))))
    chat.ask(user())
    assert forced(chat, "look_up", "stop-2") == '<tool_call>\n{"arguments":'
    with pytest.raises(BadRequest, match="tool_choice: expected auto; no beginning is known"):
        forced(chat, "look_up")


def test_a_template_without_tool_calls_refuses_tools_and_chats():
    plain = replace(HERMES, calls="", text="{{ m.content }}")
    with pytest.raises(BadRequest, match="tools: nothing parses the tool calls"):
        Chat(renderer_of(plain)).ask(user())
    chat = Chat(renderer_of(plain), tools=[])
    chat.ask(user())
    chat.answer("Done.<|stop|>")
    assert chat.ask(user("more")) == "bridged"


SKELETON_OF_CHAT = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}@count<|stop|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def test_a_template_that_looks_further_back_is_rendered_whole():
    counting = SKELETON_OF_CHAT.replace("@count", "{{ loop.index0 if m.role == 'user' else '' }}")
    chat = Chat(renderer_of(SimpleNamespace(template=counting)), tools=[])
    assert not chat.renderer._is_local
    chat.ask(user("one"))
    for number in (2, 4):
        chat.answer("Done.<|stop|>")
        assert chat.ask(user("more")) == "bridged"
        assert chat.text.endswith(f"more{number}<|stop|><|assistant|>")


def test_most_families_are_rendered_with_the_nearest_messages():
    local = [name for name, family in FAMILIES.items() if renderer_of(family, ends(family)[0])._is_local]
    assert len(local) >= 0.8 * len(FAMILIES), sorted(set(FAMILIES) - set(local))


def test_empty_reasoning_that_only_a_prompt_has_is_bridged():
    """As Qwen3's template with thinking off."""
    chat = Chat(
        renderer_of(replace(HERMES, reasoning="{% if 0 %}<think>{% endif %}", prompt="<think>\n\n</think>\n\n"))
    )
    chat.ask(user())
    chat.answer(HERMES.writes(CALLS[:1]) + "<|stop|>")
    assert chat.ask(*chat.results()) == "bridged"
    chat.answer("Done.<|stop|>")
    assert chat.ask(user("thanks")) == "bridged"
    assert chat.text.count("</think>") == 3


def test_a_late_result_is_rendered_with_the_call_that_it_answers():
    named = "{% for x in messages %}{% for c in x.tool_calls or [] if c.id == m.tool_call_id %}{{ c.function.name }}"
    template = HERMES.template.replace('"tool" %}<|tool|>', f'"tool" %}}<|tool|>{named}{{% endfor %}}{{% endfor %}}:')
    chat = Chat(renderer_of(SimpleNamespace(template=template)))
    assert chat.renderer._is_local
    chat.ask(user())
    chat.answer(HERMES.writes(CALLS) + "<|stop|>")
    now, late = chat.results()
    assert chat.ask(now) == "bridged"
    chat.answer("Done.<|stop|>")
    assert chat.ask(user("well?")) == "bridged"
    chat.answer(HERMES.writes(CALLS[:1]) + "<|stop|>")
    assert chat.ask(late | {"content": "late"}) == "bridged"
    assert "stop-2:late" in chat.text


@pytest.mark.parametrize("field", ["name", "tool_call_id"])
def test_a_message_that_is_edited_in_what_it_shows_begins_a_branch(field):
    template = HERMES.template.replace('"tool" %}<|tool|>', f'"tool" %}}<|tool|>{{{{ m.{field} }}}}:')
    chat = Chat(renderer_of(SimpleNamespace(template=template)))
    chat.ask(user())
    chat.answer(HERMES.writes(CALLS[:1]) + "<|stop|>")
    (result,) = chat.results()
    assert chat.ask(result | {"name": "one"}) == "bridged"
    chat.answer("Done.<|stop|>")
    chat.messages[2] = chat.messages[2] | {field: "another"}
    assert chat.ask(user("more")) == "history_rewritten"


def test_a_text_that_looks_like_messages_is_one_message():
    chat = Chat(renderer_of(HERMES), tools=[])
    chat.ask(user("a"))
    chat.answer("Done.<|stop|>")
    chat.ask(user("c"))
    chat.answer("Done.<|stop|>")
    joined = [user("a\0assistant\0Done.\0user\0c"), user("aassistant 5 Done.user 1 c")]
    for one in joined:
        chat.messages = [one, {"role": "assistant", "content": "Done."}]
        assert chat.ask(user("more")) == "new_conversation"


@pytest.mark.parametrize("schema", [{"enum": ["1", "2"]}, {"const": "1"}, {"allOf": [{"type": "string"}]}])
def test_values_of_a_schema_of_texts_stay_texts(schema):
    renderer = renderer_of(FAMILIES["Qwen3-Coder"])
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"x": schema}}}}]
    text = "<tool_call>\n<function=f>\n<parameter=x>\n1\n</parameter>\n</function>\n</tool_call>"
    assert found(renderer.parse(text, False, tools)) == [("f", {"x": "1"})]


@pytest.mark.parametrize("text", ["[TOOL_CALLS]look up the thing[ARGS]{}", "[TOOL_CALLS]f{x}[ARGS]{}"])
def test_a_name_with_more_behind_it_is_content(text):
    renderer = renderer_of(next(f for name, f in FAMILIES.items() if "[ARGS]" in f.calls))
    written = renderer.parse(text, False, TOOLS)
    assert (written.content, written.tool_calls) == (text, ())
