"""Chat formats of families that think (see tests/data_prep/chat_formats.py): Qwen, DeepSeek, gpt-oss."""

from __future__ import annotations

from typing import Any

from tests.data_prep.chat_format import Messages, Options, Tools, chatml_turn, content_of, dumped

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
