"""Chat templates of our own writing, each in the style of a family of real ones.

A style says what its author takes for granted about messages; the template does the rest.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Style:
    """A template, and the messages that it was written for.

    developer: it knows the role
    empty:     the content of a message that only calls tools
    as_text:   arguments are JSON text, otherwise an object
    wraps:     arguments that are no object go into one
    as_parts:  content is a list of parts
    """

    source: str
    developer: bool = False
    empty: str | None = ""
    as_text: bool = False
    wraps: bool = False
    as_parts: bool = False
    thought: str | None = None


# every role is written, calls are not
CHATML = """
{%- for m in messages %}<|{{ m.role }}|>{{ m['content'] + '\n' }}{% endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""

# unknown roles are skipped; a null content fails
HERMES = """
{%- for m in messages %}
    {%- if m.role in ['system', 'user'] %}<|{{ m.role }}|>{{ m.content }}
    {%- elif m.role == 'assistant' %}<|assistant|>
        {%- if '</think>' in m.content %}{{ m.content.split('</think>')[-1] }}
        {%- else %}{{ m.content }}{% endif %}
        {%- for call in m.tool_calls or [] %}<tool_call>
            {{- '{"name": "' + call.function.name + '", "arguments": ' }}
            {%- if call.function.arguments is string %}{{ call.function.arguments }}
            {%- else %}{{ call.function.arguments | tojson }}{% endif %}}</tool_call>
        {%- endfor %}
    {%- elif m.role == 'tool' %}<tool_response>{{ m.content }}</tool_response>
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""

# calls as XML, an element for each argument; unknown roles are refused
XML = """
{%- for m in messages %}
    {%- if m.role not in ['system', 'user', 'assistant', 'tool'] %}
        {{- raise_exception('Unexpected message role.') }}
    {%- endif %}<|{{ m.role }}|>{{ m.content or '' }}
    {%- for call in m.tool_calls or [] %}<function={{ call.function.name }}>
        {%- for name, value in call.function.arguments | items %}
            {{- '<parameter=' + name + '>' + value | string + '</parameter>' }}
        {%- endfor %}</function>
    {%- endfor %}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""

# as XML, but a null content is written as a word, and a text has no items
GLM = """
{%- for m in messages %}<|{{ m.role }}|>{{ m['content'] | string }}
    {%- for call in m.tool_calls or [] %}<call>{{ call.function.name }}
        {%- for name, value in call.function.arguments.items() %}
            {{- '<key>' + name + '</key>' + value | string }}
        {%- endfor %}</call>
    {%- endfor %}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""

# a single call, and content that is trimmed, null as well
LLAMA = """{{ bos_token }}
{%- for m in messages %}
    {%- if 'tool_calls' in m %}
        {%- if m.tool_calls | length != 1 %}
            {{- raise_exception('This model only supports single tool-calls at once!') }}
        {%- endif %}<|assistant|>{"name": "{{ m.tool_calls[0].function.name }}", "parameters": {{
            m.tool_calls[0].function.arguments | tojson }}}
    {%- else %}<|{{ m.role }}|>{{ m['content'] | trim }}
    {%- endif %}<|eot_id|>
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""

# users and assistants take turns; a call is written whole, with its id
MISTRAL = """{{ bos_token }}
{%- set turns = namespace(user=true) %}
{%- for m in messages %}
    {%- if m.role == 'system' %}[SYSTEM]{{ m.content }}[/SYSTEM]
    {%- elif m.role == 'tool' %}[RESULT]{{ m.content }}[/RESULT]
    {%- elif m.tool_calls is defined and m.tool_calls %}[CALLS]
        {%- for call in m.tool_calls %}
            {%- if call.id | length != 9 %}{{ raise_exception('Expected ids of nine') }}{% endif %}
            {{- call.function | tojson }}
        {%- endfor %}{{ eos_token }}
        {%- set turns.user = false %}
    {%- else %}
        {%- if (m.role == 'user') != turns.user %}
            {{- raise_exception('Roles must alternate') }}
        {%- endif %}
        {%- set turns.user = not turns.user %}
        {%- if m.role == 'user' %}[INST]{{ m.content }}[/INST]
        {%- else %}{{ m.content + eos_token }}{% endif %}
    {%- endif %}
{%- endfor %}"""

# calls only where the content is null, and their arguments as text
R1 = """{{ bos_token }}
{%- for m in messages %}
    {%- if m.role in ['system', 'user'] %}<|{{ m.role }}|>{{ m.content }}
    {%- elif m.role == 'tool' %}<|output|>{{ m['content'] }}
    {%- elif m.role == 'assistant' and m['content'] is none %}<|assistant|>
        {%- for call in m['tool_calls'] %}<|call|>
            {{- call['function']['name'] + '\n' + call['function']['arguments'] }}
        {%- endfor %}{{ eos_token }}
    {%- elif m.role == 'assistant' %}<|assistant|>{{ m['content'] + eos_token }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""

# arguments as text, content null or not
V3 = """{{ bos_token }}
{%- for m in messages %}
    {%- if m.role == 'assistant' and 'tool_calls' in m %}<|assistant|>{{ m['content'] or '' }}
        {%- for call in m['tool_calls'] %}<|call|>
            {{- call['function']['name'] + '\n' + call['function']['arguments'] }}
        {%- endfor %}{{ eos_token }}
    {%- elif m.role == 'assistant' %}<|assistant|>{{ m['content'] + eos_token }}
    {%- elif m.role in ['system', 'user', 'tool'] %}<|{{ m.role }}|>{{ m['content'] }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""

# no system messages; users and the model take turns
GEMMA = """{{ bos_token }}
{%- if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- for m in messages %}
    {%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant') }}
    {%- endif %}<start>{{ 'model' if m.role == 'assistant' else m.role }}
{{ m.content | trim }}<end>
{% endfor %}
{%- if add_generation_prompt %}<start>model
{% endif %}"""

# the first message may be a developer's or the system's; later ones are skipped
HARMONY = """<|system|>
{%- set first = messages[0].role in ['developer', 'system'] %}
{%- if first %}<|developer|>{{ messages[0].content }}<|end|>{% endif %}
{%- set turns = messages[1:] if first else messages %}
{%- for m in turns %}
    {%- if m.role == 'user' %}<|user|>{{ m.content }}<|end|>
    {%- elif m.role == 'tool' %}<|tool|>{{ m.content | tojson }}<|end|>
    {%- elif m.role == 'assistant' %}
        {%- if m.thinking %}<|analysis|>{{ m.thinking }}<|end|>{% endif %}
        {%- if m.tool_calls %}
            {%- for call in m.tool_calls %}<|call|>{{ call.function.name }}
                {{- call.function.arguments | tojson }}<|end|>
            {%- endfor %}
        {%- elif '<|analysis|>' in m.content %}{{ raise_exception('Use thinking.') }}
        {%- else %}<|final|>{{ m.content }}<|end|>{% endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""

# developers have their own place
DEVELOPERS = """{{ bos_token }}
{%- for m in messages %}
    {%- if m.role in ['system', "developer"] %}<|{{ m.role }}|>{{ m.content }}
    {%- elif m.role == 'user' %}<|user|>{{ m.content }}
    {%- elif m.role == 'assistant' %}<|assistant|>{{ m.content or '' }}
        {%- for call in m.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}
    {%- elif m.role == 'tool' %}<|tool|>{{ m.content }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""

# the word stands in the text, and the role is not known
COHERE = """{{ bos_token }}<|system|>You follow the developer.
{%- if messages[0].role == 'system' %} {{ messages[0].content }}{% endif %}
{%- for m in messages %}
    {%- if m.role == 'user' %}<|user|>{{ m.content }}
    {%- elif m.role == 'assistant' and m.tool_calls %}<|action|>
        {%- for call in m.tool_calls %}{{ call.function.name }}: {{
            call.function.arguments | tojson }}
        {%- endfor %}
    {%- elif m.role == 'assistant' %}<|chatbot|>{{ m.content }}
    {%- elif m.role == 'tool' %}<|tool|>{{ m.content }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|chatbot|>{% endif %}"""

# for images too: content is a list of parts
PARTS = """
{%- for m in messages %}{{ m.role | capitalize }}:
    {%- for part in m.content %}
        {%- if part.type == 'image' %}<image>
        {%- elif part.type == 'text' %} {{ part.text }}
        {%- endif %}
    {%- endfor %}<end>
{% endfor %}
{%- if add_generation_prompt %}Assistant:{% endif %}"""

# only for conversations with tools
TOOL_USE = """
{%- for tool in tools %}{{ tool | tojson }}{% endfor %}
{%- for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"""

STYLES = {
    "chatml": Style(CHATML),
    "hermes": Style(HERMES),
    "xml": Style(XML, wraps=True),
    "glm": Style(GLM, wraps=True),
    "llama": Style(LLAMA),
    "mistral": Style(MISTRAL),
    "r1": Style(R1, empty=None, as_text=True),
    "v3": Style(V3, as_text=True),
    "gemma": Style(GEMMA),
    "harmony": Style(HARMONY, thought="thinking"),
    "developers": Style(DEVELOPERS, developer=True),
    "cohere": Style(COHERE),
    "parts": Style(PARTS, as_parts=True),
    "tool_use": Style(TOOL_USE),
}
