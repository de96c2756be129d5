"""Chat formats of well-known model families, each written twice: as a Jinja template, and as plain Python that puts
together what a target sees and what it then writes. The two share no code, so one can check the other.

`prompt(messages, tools, options)` is the text before an answer; `written(message, options, cut)` the answer, up to but
without the terminator, which is `ends(message)`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.data_prep.chat_format import Format, Messages, Options, Tools, chatml_turn, content_of, dumped
from tests.data_prep.thinking_formats import (
    DEEPSEEK,
    HARMONY,
    QWEN,
    deepseek_prompt,
    harmony_prompt,
    harmony_written,
    qwen3_off_prompt,
    qwen3_on_prompt,
    qwen3_written,
    qwen25_prompt,
    qwen_answer,
)

# --- ChatML

CHATML = """
{%- for m in messages -%}
{{ '<|im_start|>' ~ m.role ~ '\n' ~ m.content ~ '<|im_end|>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}
"""


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
