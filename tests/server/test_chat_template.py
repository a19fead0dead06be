"""Chat templates render as transformers renders them, and reach nothing."""

from __future__ import annotations

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from draftloop.errors import RequestError
from draftloop.server.chat_template import ChatTemplate

TEMPLATE = """{{- bos_token }}
{%- set seen = namespace(self=0, count=0) %}
{%- for message in messages %}
    {%- if message.role == 'system' %}
        {%- continue %}
    {%- endif %}
    {%- set seen.count = seen.count + 1 %}
    {%- generation %}
    {{- '<|' + message.role + '|>\n' + message.content + '\n' }}
    {%- endgeneration %}
{%- endfor %}
{%- if tools %}
    {%- for tool in tools %}
        {{- tool | tojson }}{{ tool | tojson(sort_keys=true, indent=2) }}
    {%- endfor %}
{%- endif %}
{%- if add_generation_prompt %}
    {{- seen.count ~ '<|assistant|>\n' }}
    {%- if thinking is defined and thinking %}{{ '<think>\n' }}{% endif %}
{%- endif %}
"""
MESSAGES = [{"role": "system", "content": "s"}, {"role": "user", "content": "grüß <b>'\""}]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "title": "ü<"}}}]


@pytest.mark.parametrize("options", [{}, {"tools": TOOLS}, {"thinking": True}, {"add_generation_prompt": False}])
def test_it_renders_as_transformers_does(options):
    ours = ChatTemplate(TEMPLATE, {"bos_token": "<s>"}).render(MESSAGES, **options)
    theirs, _ = render_jinja_template(
        [MESSAGES], chat_template=TEMPLATE, bos_token="<s>", **{"add_generation_prompt": True, **options}
    )
    assert [ours] == theirs


def test_the_last_message_can_be_continued():
    template = ChatTemplate(TEMPLATE, {"bos_token": ""})
    messages = [MESSAGES[1], {"role": "assistant", "content": "Well, "}]
    text = template.render(messages, add_generation_prompt=False, continue_final_message=True)
    assert text.endswith("<|assistant|>\nWell, ")
    with pytest.raises(RequestError, match="exclude each other"):
        template.render(messages, continue_final_message=True)
    with pytest.raises(RequestError, match="needs a last message with a text"):
        template.render([{"role": "user", "content": " "}], add_generation_prompt=False, continue_final_message=True)
    loud = ChatTemplate("{{ messages[-1].content | upper }}", {})
    with pytest.raises(RequestError, match="the chat template changes the last message"):
        loud.render(messages, add_generation_prompt=False, continue_final_message=True)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
        ("{{ cycler.__init__.__globals__.os.popen('id').read() }}", "unsafe"),
        ("{% include '/etc/passwd' %}", "no loader"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{% set ns = namespace() %}{% set ns.__call__ = messages %}", "unsafe"),
        ("{{ namespace({'__class__': 1}) }}", "unsafe"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content + 1 }}", "TypeError"),
        ("{% for %}", "cannot be read"),
        ("x" * (1 << 21), "at most"),
    ],
)
def test_what_a_template_may_not_do_is_refused(template, message):
    with pytest.raises(RequestError, match=message):
        ChatTemplate(template, {}).render(MESSAGES)
