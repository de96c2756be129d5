"""Chat formats of well-known model families, each written twice: as a Jinja template, and as plain Python that puts
together what a target sees and what it then writes. The two share no code, so one can check the other.

`prompt(messages, tools, options)` is the text before an answer; `written(message, options, cut)` the answer, up to but
without the terminator, which is `ends(message)`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Messages = list[dict[str, Any]]
Tools = list[dict[str, Any]] | None
Options = dict[str, Any]


@dataclass(frozen=True)
class Format:
    """One family. `swallows`: special tokens that take the white space behind them along, as Phi's do."""

    template: str
    specials: tuple[str, ...]
    stops: tuple[str, ...]
    prompt: Callable[[Messages, Tools, Options], str]
    written: Callable[[dict[str, Any], Options, bool], str]
    ends: Callable[[dict[str, Any]], str]
    system: bool = True
    tools: bool = False
    thinks: str = ""  # "field": reasoning_content; "content": inside the content, its opening in the prompt
    swallows: bool = False
    bos: str | None = None


def dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def content_of(message: dict[str, Any], *_: Any) -> str:
    return message.get("content") or ""


# --- ChatML

CHATML = """
{%- for m in messages -%}
{{ '<|im_start|>' ~ m.role ~ '\n' ~ m.content ~ '<|im_end|>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}
"""


def chatml_turn(role: str, content: str) -> str:
    return f"<|im_start|>{role}\n{content}<|im_end|>\n"


def chatml_prompt(messages: Messages, tools: Tools, options: Options) -> str:
    return "".join(chatml_turn(m["role"], m["content"]) for m in messages) + "<|im_start|>assistant\n"


# --- Llama 3: headers, trimmed contents, tool calls as bare JSON, tools listed in the first user turn

LLAMA3 = """
{%- set seen = namespace(user=false) -%}
{%- macro turn(role, text) -%}
{{ '<|start_header_id|>' ~ role ~ '<|end_header_id|>\n\n' ~ text ~ '<|eot_id|>' }}
{%- endmacro -%}
{{ bos_token }}
{%- for m in messages -%}
  {%- if m.role == 'tool' -%}{{ turn('ipython', m.content | tojson) }}
  {%- elif m.tool_calls -%}
    {%- set f = m.tool_calls[0].function -%}
    {{ turn('assistant', '{"name": "' ~ f.name ~ '", "parameters": ' ~ (f.arguments | tojson) ~ '}') }}
  {%- elif m.role == 'user' and tools and not seen.user -%}
    {%- set seen.user = true -%}
    {{ turn('user', 'Functions: ' ~ (tools | tojson) ~ '\n\n' ~ (m.content | trim)) }}
  {%- else -%}{{ turn(m.role, m.content | trim) }}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif -%}
"""


def llama3_call(message: dict[str, Any]) -> str:
    function = message["tool_calls"][0]["function"]
    return '{"name": "' + function["name"] + '", "parameters": ' + dumped(function["arguments"]) + "}"


def llama3_prompt(messages: Messages, tools: Tools, options: Options) -> str:
    text, users = "<|begin_of_text|>", 0
    for m in messages:
        role, body = m["role"], content_of(m).strip()
        if role == "tool":
            role, body = "ipython", dumped(m["content"])
        elif "tool_calls" in m:
            body = llama3_call(m)
        elif role == "user":
            users += 1
            body = f"Functions: {dumped(tools)}\n\n{body}" if tools and users == 1 else body
        text += f"<|start_header_id|>{role}<|end_header_id|>\n\n{body}<|eot_id|>"
    return text + "<|start_header_id|>assistant<|end_header_id|>\n\n"


def llama3_written(message: dict[str, Any], options: Options, cut: bool) -> str:
    return llama3_call(message) if "tool_calls" in message else message["content"]


# --- Qwen 2.5 and Qwen 3: ChatML with tools; Qwen 3 keeps the thinking of the last question's answers alone

QWEN = """
{%- set first = messages[0].content if messages[0].role == 'system' else DEFAULT -%}
{%- if first or tools -%}
  {{ '<|im_start|>system\n' ~ first }}
  {%- if tools -%}{{ '\n\n<tools>' }}{%- for t in tools -%}{{ '\n' ~ (t | tojson) }}{%- endfor -%}{{ '\n</tools>' }}{%- endif -%}
  {{ '<|im_end|>\n' }}
{%- endif -%}
{%- set asked = namespace(at=0) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set asked.at = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- for m in messages -%}
  {%- if m.role == 'user' or (m.role == 'system' and not loop.first) -%}
    {{ '<|im_start|>' ~ m.role ~ '\n' ~ m.content ~ '<|im_end|>\n' }}
  {%- elif m.role == 'tool' -%}
    {%- if loop.previtem.role != 'tool' -%}{{ '<|im_start|>user' }}{%- endif -%}
    {{ '\n<tool_response>\n' ~ m.content ~ '\n</tool_response>' }}
    {%- if loop.last or loop.nextitem.role != 'tool' -%}{{ '<|im_end|>\n' }}{%- endif -%}
  {%- elif m.role == 'assistant' -%}
    {%- set say = m.content if m.content is string else '' -%}
    {%- set why = m.reasoning_content if m.reasoning_content is string else '' -%}
    {%- if THINKS and not why and '</think>' in say -%}
      {%- set why = say.split('</think>')[0].split('<think>')[-1] -%}
      {%- set say = say.split('</think>')[-1] -%}
    {%- endif -%}
    {{ '<|im_start|>assistant\n' }}
    {%- if THINKS and loop.index0 > asked.at and (why or loop.last) -%}
      {{ '<think>\n' ~ why.strip('\n') ~ '\n</think>\n\n' }}{%- set say = say.lstrip('\n') -%}
    {%- endif -%}
    {{ say }}
    {%- for call in m.tool_calls or [] -%}
      {{ '\n' if say or not loop.first }}{{ '<tool_call>\n{"name": "' ~ call.function.name ~ '", "arguments": ' }}
      {{- (call.function.arguments | tojson) ~ '}\n</tool_call>' }}
    {%- endfor -%}
    {{ '<|im_end|>\n' }}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{ '<|im_start|>assistant\n' }}
  {%- if THINKS and enable_thinking is defined and not enable_thinking -%}{{ '<think>\n\n</think>\n\n' }}{%- endif -%}
{%- endif -%}
"""


def qwen_answer(message: dict[str, Any]) -> str:
    said = content_of(message)
    for call in message.get("tool_calls", []):
        call = f'{{"name": "{call["function"]["name"]}", "arguments": {dumped(call["function"]["arguments"])}}}'
        said += ("\n" if said else "") + f"<tool_call>\n{call}\n</tool_call>"
    return said


def qwen_history(messages: Messages, tools: Tools, default: str, thinks: bool) -> str:
    told = messages[0]["role"] == "system"
    system = messages[0]["content"] if told else default
    listed = "\n\n<tools>\n" + "\n".join(map(dumped, tools)) + "\n</tools>" if tools else ""
    text = chatml_turn("system", system + listed) if system or tools else ""
    asked = max(at for at, m in enumerate(messages) if m["role"] == "user")
    for at, m in enumerate(messages):
        if m["role"] == "tool":
            previous, following = messages[at - 1]["role"], [each["role"] for each in messages[at + 1 : at + 2]]
            text += "" if previous == "tool" else "<|im_start|>user"
            text += f"\n<tool_response>\n{m['content']}\n</tool_response>"
            text += "" if following == ["tool"] else "<|im_end|>\n"
        elif m["role"] == "assistant":
            thought = m.get("reasoning_content") if thinks and at > asked else None
            text += chatml_turn("assistant", (f"<think>\n{thought}\n</think>\n\n" if thought else "") + qwen_answer(m))
        elif at or not told:
            text += chatml_turn(m["role"], m["content"])
    return text


def qwen25_prompt(messages: Messages, tools: Tools, options: Options) -> str:
    return qwen_history(messages, tools, "be of use", False) + "<|im_start|>assistant\n"


def qwen3_on_prompt(messages: Messages, tools: Tools, options: Options) -> str:
    return qwen_history(messages, tools, "", True) + "<|im_start|>assistant\n"


def qwen3_off_prompt(messages: Messages, tools: Tools, options: Options) -> str:
    return qwen3_on_prompt(messages, tools, options) + "<think>\n\n</think>\n\n"


def qwen3_written(message: dict[str, Any], options: Options, cut: bool) -> str:
    thought = message["reasoning_content"]
    if cut and not message["content"]:
        return f"<think>\n{thought}"
    return f"<think>\n{thought}\n</think>\n\n{qwen_answer(message)}"


# --- Mistral: no generation prompt at all; system turn and tools stand in the last user turn, while that is the last

MISTRAL = """
{%- set told = messages[0].content if messages[0].role == 'system' else none -%}
{%- set asked = namespace(at=0) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set asked.at = loop.index0 -%}{%- endif -%}{%- endfor -%}
{{ bos_token }}
{%- for m in messages -%}
  {%- if m.role == 'user' -%}
    {%- if tools and loop.index0 == asked.at -%}{{ '[AVAILABLE_TOOLS]' ~ (tools | tojson) ~ '[/AVAILABLE_TOOLS]' }}{%- endif -%}
    {{ '[INST] ' ~ (told ~ '\n\n' if told is string and loop.last else '') ~ m.content ~ '[/INST]' }}
  {%- elif m.role == 'tool' -%}
    {{ '[TOOL_RESULTS]{"content": ' ~ (m.content | tojson) ~ '}[/TOOL_RESULTS]' }}
  {%- elif m.tool_calls -%}
    {{ '[TOOL_CALLS][' }}
    {%- for c in m.tool_calls -%}{{ (c.function | tojson) ~ ('' if loop.last else ', ') }}{%- endfor -%}
    {{ ']' ~ eos_token }}
  {%- elif m.role == 'assistant' -%}{{ ' ' ~ m.content ~ eos_token }}
  {%- endif -%}
{%- endfor -%}
"""


def mistral_prompt(messages: Messages, tools: Tools, options: Options) -> str:
    text, asked = "<s>", max(at for at, m in enumerate(messages) if m["role"] == "user")
    for at, m in enumerate(messages):
        if m["role"] == "user":
            told = messages[0]["role"] == "system" and at == len(messages) - 1
            text += f"[AVAILABLE_TOOLS]{dumped(tools)}[/AVAILABLE_TOOLS]" if tools and at == asked else ""
            text += "[INST] " + (messages[0]["content"] + "\n\n" if told else "") + m["content"] + "[/INST]"
        elif m["role"] == "tool":
            text += '[TOOL_RESULTS]{"content": ' + dumped(m["content"]) + "}[/TOOL_RESULTS]"
        elif m["role"] == "assistant":
            text += mistral_written(m, options, False) + "</s>"
    return text


def mistral_written(message: dict[str, Any], options: Options, cut: bool) -> str:
    if "tool_calls" in message:
        return "[TOOL_CALLS]" + dumped([call["function"] for call in message["tool_calls"]])
    return " " + message["content"]


# --- Gemma: the assistant is called model, contents are trimmed, the system turn joins the first user turn

GEMMA = """
{%- set told = messages[0].content ~ '\n\n' if messages[0].role == 'system' else '' -%}
{%- set turns = messages[1:] if told else messages -%}
{{ bos_token }}
{%- for m in turns -%}
  {{ '<start_of_turn>' ~ ('model' if m.role == 'assistant' else m.role) ~ '\n' }}
  {{- (told if loop.first else '') ~ (m.content | trim) ~ '<end_of_turn>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\n' }}{%- endif -%}
"""


def gemma_prompt(messages: Messages, tools: Tools, options: Options) -> str:
    told, text = "", "<bos>"
    for m in messages:
        if m["role"] == "system":
            told = m["content"] + "\n\n"
            continue
        role = {"user": "user", "assistant": "model"}[m["role"]]
        text += f"<start_of_turn>{role}\n{told}{m['content'].strip()}<end_of_turn>\n"
        told = ""
    return text + "<start_of_turn>model\n"


# --- Phi 3: special tokens swallow line ends; a second stop token closes what has no generation prompt

PHI = """
{%- for m in messages -%}{{ '<|' ~ m.role ~ '|>\n' ~ m.content ~ '<|end|>\n' }}{%- endfor -%}
{{ '<|assistant|>\n' if add_generation_prompt else '<|endoftext|>' }}
"""


def phi_prompt(messages: Messages, tools: Tools, options: Options) -> str:
    return "".join(f"<|{m['role']}|>\n{m['content']}<|end|>\n" for m in messages) + "<|assistant|>\n"


# --- role names in plain text: the generation prompt ends with a blank, which joins the answer's first token

PLAIN = """
{%- for m in messages -%}{{ m.role ~ ': ' ~ m.content ~ '</s> ' }}{%- endfor -%}
{%- if add_generation_prompt -%}{{ 'assistant: ' }}{%- endif -%}
"""


def plain_prompt(messages: Messages, tools: Tools, options: Options) -> str:
    return "".join(f"{m['role']}: {m['content']}</s> " for m in messages) + "assistant: "


# --- DeepSeek R1: the prompt opens the think block, the template shows no thinking of any answer

DEEPSEEK = """
{{- bos_token ~ (messages[0].content if messages[0].role == 'system' else '') }}
{%- for m in messages -%}
  {%- if m.role == 'user' -%}{{ '<｜User｜>' ~ m.content }}
  {%- elif m.role == 'assistant' -%}{{ '<｜Assistant｜>' ~ m.content.split('</think>')[-1] ~ '<｜end▁of▁sentence｜>' }}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<｜Assistant｜><think>\n' }}{%- endif -%}
"""


def deepseek_prompt(messages: Messages, tools: Tools, options: Options) -> str:
    text = "<｜begin▁of▁sentence｜>"
    for m in messages:
        if m["role"] == "assistant":
            text += "<｜Assistant｜>" + m["content"].rpartition("</think>")[2] + "<｜end▁of▁sentence｜>"
        else:
            text += ("<｜User｜>" if m["role"] == "user" else "") + m["content"]
    return text + "<｜Assistant｜><think>\n"


# --- gpt-oss (harmony): channels; a final answer drops the thinking before it, and ends otherwise once it is history

HARMONY = """
{{- '<|start|>system<|message|>Reasoning: ' ~ (reasoning_effort or 'medium') ~ '<|end|>' }}
{%- set told = messages[0].content if messages[0].role == 'system' else '' -%}
{%- if told or tools -%}{{ '<|start|>developer<|message|>' ~ told ~ (tools | tojson if tools else '') ~ '<|end|>' }}{%- endif -%}
{%- set final = namespace(at=-1) -%}
{%- for m in messages -%}
  {%- if m.role == 'assistant' and not m.tool_calls -%}{%- set final.at = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- set called = namespace(name='') -%}
{%- for m in messages -%}
  {%- set shown = m.thinking is defined and (loop.last and not add_generation_prompt or (m.tool_calls and loop.index0 > final.at)) -%}
  {%- if m.role == 'assistant' and shown -%}
    {{ '<|start|>assistant<|channel|>analysis<|message|>' ~ m.thinking ~ '<|end|>' }}
  {%- endif -%}
  {%- if m.role == 'user' -%}{{ '<|start|>user<|message|>' ~ m.content ~ '<|end|>' }}
  {%- elif m.role == 'tool' -%}
    {{ '<|start|>functions.' ~ called.name ~ ' to=assistant<|channel|>commentary<|message|>' ~ (m.content | tojson) ~ '<|end|>' }}
  {%- elif m.role == 'assistant' and m.tool_calls -%}
    {%- set f = m.tool_calls[0].function -%}{%- set called.name = f.name -%}
    {{ '<|start|>assistant to=functions.' ~ f.name ~ '<|channel|>commentary json<|message|>' ~ (f.arguments | tojson) ~ '<|call|>' }}
  {%- elif m.role == 'assistant' -%}
    {{ '<|start|>assistant<|channel|>final<|message|>' ~ m.content }}
    {{- '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|start|>assistant' }}{%- endif -%}
"""


def harmony_prompt(messages: Messages, tools: Tools, options: Options) -> str:
    told = messages[0]["content"] if messages[0]["role"] == "system" else ""
    text = f"<|start|>system<|message|>Reasoning: {options.get('reasoning_effort', 'medium')}<|end|>"
    if told or tools:
        text += f"<|start|>developer<|message|>{told}{dumped(tools) if tools else ''}<|end|>"
    name = ""
    for at, m in enumerate(messages):
        answered = any(later["role"] == "assistant" and "tool_calls" not in later for later in messages[at:])
        if m["role"] == "user":
            text += f"<|start|>user<|message|>{m['content']}<|end|>"
        elif m["role"] == "tool":
            head = f"<|start|>functions.{name} to=assistant<|channel|>commentary"
            text += f"{head}<|message|>{dumped(m['content'])}<|end|>"
        elif m["role"] == "assistant" and "tool_calls" in m:
            name = m["tool_calls"][0]["function"]["name"]
            kept = m if not answered else {key: m[key] for key in m if key != "reasoning_content"}
            text += "<|start|>assistant" + harmony_written(kept, options, False) + "<|call|>"
        elif m["role"] == "assistant":
            text += f"<|start|>assistant<|channel|>final<|message|>{m['content']}<|end|>"
    return text + "<|start|>assistant"


def harmony_written(message: dict[str, Any], options: Options, cut: bool) -> str:
    text = ""
    if "reasoning_content" in message:
        text = "<|channel|>analysis<|message|>" + message["reasoning_content"]
        if cut and not message["content"]:
            return text
        text += "<|end|><|start|>assistant"
    if "tool_calls" in message:
        function = message["tool_calls"][0]["function"]
        return f"{text} to=functions.{function['name']}<|channel|>commentary json<|message|>{dumped(function['arguments'])}"
    return f"{text}<|channel|>final<|message|>{message['content']}"


IM = ("<|im_start|>", "<|im_end|>")
QWEN_SPECIALS = (*IM, "<|endoftext|>", "<tool_call>", "</tool_call>", "<think>", "</think>")


def _end(token: str) -> Callable[[dict[str, Any]], str]:
    return lambda message: token


def _qwen(thinks: bool, prompt: Any, written: Any, think: str) -> Format:
    template = QWEN.replace("DEFAULT", "''" if thinks else "'be of use'").replace("THINKS", str(thinks).lower())
    return Format(template, QWEN_SPECIALS, IM[1:], prompt, written, _end("<|im_end|>"), tools=True, thinks=think)


def _qwen_plain(message: dict[str, Any], options: Options, cut: bool) -> str:
    return qwen_answer(message)


FORMATS = {
    "ChatML": Format(CHATML, IM, IM[1:], chatml_prompt, content_of, _end("<|im_end|>")),
    "Llama 3": Format(
        LLAMA3,
        ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>"),
        ("<|eom_id|>", "<|eot_id|>"),
        llama3_prompt,
        llama3_written,
        _end("<|eot_id|>"),
        tools=True,
        bos="<|begin_of_text|>",
    ),
    "Qwen 2.5": _qwen(False, qwen25_prompt, _qwen_plain, ""),
    "Qwen 3, thinking": _qwen(True, qwen3_on_prompt, qwen3_written, "field"),
    "Qwen 3, not thinking": _qwen(True, qwen3_off_prompt, _qwen_plain, ""),
    "Mistral": Format(
        MISTRAL,
        ("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
        ("</s>",),
        mistral_prompt,
        mistral_written,
        _end("</s>"),
        tools=True,
        bos="<s>",
    ),
    "Gemma": Format(
        GEMMA,
        ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
        ("<eos>", "<end_of_turn>"),
        gemma_prompt,
        content_of,
        _end("<end_of_turn>"),
        bos="<bos>",
    ),
    "Phi": Format(
        PHI,
        ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|endoftext|>"),
        ("<|end|>", "<|endoftext|>"),
        phi_prompt,
        content_of,
        _end("<|end|>"),
        swallows=True,
    ),
    "plain roles": Format(PLAIN, ("</s>",), ("</s>",), plain_prompt, content_of, _end("</s>")),
    "DeepSeek": Format(
        DEEPSEEK,
        ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<think>", "</think>"),
        ("<｜end▁of▁sentence｜>",),
        deepseek_prompt,
        content_of,
        _end("<｜end▁of▁sentence｜>"),
        thinks="content",
        bos="<｜begin▁of▁sentence｜>",
    ),
    "gpt-oss": Format(
        HARMONY,
        ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>"),
        ("<|return|>", "<|call|>"),
        harmony_prompt,
        harmony_written,
        lambda message: "<|call|>" if "tool_calls" in message else "<|return|>",
        tools=True,
        thinks="field",
    ),
}
