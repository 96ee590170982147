"""Chat templates that want to get out, or to take all time or memory there is."""

from __future__ import annotations

import time

import pytest
from alarm import alarm
from fake_model import DEMO

from sparseflow import template_sandbox
from sparseflow.chat import ChatTemplate
from sparseflow.errors import OptionError, PackedModelError
from sparseflow.tokenizer import Tokenizer

TOKENIZER = Tokenizer.from_folder(DEMO)
MESSAGES = [{"role": "user", "content": "ab" * 50}]


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_sandbox, "MAX_SECONDS", 0.5)


def render(source: str) -> str:
    with alarm(20):
        return ChatTemplate(source, TOKENIZER).render(MESSAGES)


@pytest.mark.parametrize("source", [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__class__.__init__.__globals__ }}",
    "{{ ''['__class__']['__mro__'] }}",
    "{{ ('' | attr('__class__')).mro() }}",
    "{{ self.__init__.__globals__.__builtins__.open('/etc/passwd').read() }}",
    "{{ raise_exception.__globals__.os }}",
    "{{ strftime_now.__closure__[0] }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ '{0.__class__.__mro__}'.format(messages) }}",
    "{{ messages | map(attribute='__class__.__mro__') | list }}",
    "{% set x = messages[0].update({'role': 'system'}) %}",
    "{{ messages.append(1) }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}",
    "{% extends '/etc/passwd' %}",
    "{{ joiner.__init__.__globals__ }}",
    "{% for x in (1,) recursive %}{{ loop.__init__.__globals__ }}{% endfor %}",
    "{% macro f() %}{% endmacro %}{{ f.__globals__ }}{{ f.__init__.__globals__ }}",
])  # fmt: skip
def test_there_is_no_way_out(source: str) -> None:
    with pytest.raises(OptionError, match="the chat template (refused|.* failed on) the messages"):
        render(source)


@pytest.mark.parametrize("source", [
    "{{ open('/etc/passwd') }}", "{{ os }}{{ os.popen('id') }}", "{{ __import__('os') }}", "{{ eval('1') }}",
])  # fmt: skip
def test_there_are_no_builtins(source: str) -> None:
    with pytest.raises(OptionError, match="is undefined"):
        render(source)


@pytest.mark.parametrize("source", [
    "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}",
    "{% for a in range(100000) %}{% for b in range(100000) %}{% set x = a * b %}{% endfor %}{% endfor %}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{{ range(100000) | map('string') | map('upper') | map('replace', '1', '22') | select('in', range(100000) | list) | list | length }}",
    "{% for a in range(100000) %}{{ range(100000) | map('trim') | list | length }}{% endfor %}",
    "{% for a in range(100000) %}{% if range(100000) | sum %}{% endif %}{% endfor %}",
])  # fmt: skip
def test_time_is_bounded(source: str) -> None:
    started = time.monotonic()
    with pytest.raises(OptionError, match=r"chat_template.jinja\) (takes more than 0.5 seconds|makes more than)"):
        render(source)
    assert time.monotonic() - started < 10


@pytest.mark.parametrize("source", [
    "{{ 10 ** (10 ** 8) }}",
    "{{ 2 ** 5000 }}",
    "{% set ns = namespace(x=3) %}{% for i in range(40) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "{{ 'a' * 10 ** 12 }}",
    "{{ 10 ** 12 * 'a' }}",
    "{{ [0] * 10 ** 9 }}",
    "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}{% endfor %}",
    "{% set ns = namespace(x=['ab']) %}{% for i in range(45) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
    "{% set ns = namespace(x=['ab']) %}{% for i in range(40) %}{% set ns.x = {'a': ns.x, 'b': ns.x} %}{% endfor %}{{ ns.x | tojson }}",
    "{% set ns = namespace(x='a') %}{% for i in range(40) %}{% set ns.x = namespace(a=ns.x, b=ns.x) %}{% endfor %}{{ ns.x }}",
    "{% set ns = namespace(x=1) %}{% for i in range(100000) %}{% set ns.x = (ns.x,) %}{% endfor %}{{ {ns.x: 1} }}",
    "{% set ns = namespace(x=1) %}{% set ns.x = ns %}{{ ns }}",
    "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x | replace('a', ns.x) %}{% endfor %}",
    "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x.replace('a', ns.x) %}{% endfor %}",
    "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x.join(ns.x) %}{% endfor %}",
    "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] | join(ns.x) %}{% endfor %}",
    "{{ '%999999999s' % 1 }}",
    "{{ '%*s' % (999999999, 1) }}",
    "{{ '%999999999s' | format(1) }}",
    "{{ '{:999999999}'.format(1) }}",
    "{{ '{:{}}'.format(1, 999999999) }}",
    "{{ ('{0}' * 100000).format(messages[0].content * 10000) }}",
    "{{ messages | tojson(indent=1000000) }}",
    "{{ messages[0].content | indent(1000000000) }}",
    "{% for i in range(100000) %}{{ messages[0].content }}{{ messages[0].content }}{% endfor %}",
    "{% for i in range(100000) %}" + "a" * 1000 + "{% endfor %}",
    "{% set x %}{% for i in range(100000) %}" + "a" * 10000 + "{% endfor %}{% endset %}",
    "{{ range(100000) | map('string') | list | string * 1000 }}",
    "{% set x = 'a' * 4000000 %}{{ range(100000) | map('string') | map('replace', '1', x) | list | length }}",
    "{{ [[1], [2]] | sum(start=[]) }}",
])  # fmt: skip
def test_size_is_bounded(source: str) -> None:
    with pytest.raises(OptionError, match=r"chat_template.jinja\) (makes more than 4,194,304 characters|takes more than)"):
        render(source)


@pytest.mark.parametrize("source", [
    "{{ 'a'.center(10 ** 9) }}", "{{ 'a'.ljust(10 ** 9) }}", "{{ 'a'.zfill(10 ** 9) }}", "{{ (1).to_bytes(10 ** 9, 'big') }}",
    "{{ ('\\t' * 9).expandtabs(10 ** 9) }}", "{{ lipsum(10 ** 9) }}",
])  # fmt: skip
def test_methods_that_make_much_of_little_are_left_out(source: str) -> None:
    with pytest.raises(OptionError, match="refused the messages"):
        render(source)


@pytest.mark.parametrize("source", [
    "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "{{ " + "[" * 5000, "{{ " + "-" * 5000 + "1 }}", "{{ a" + ".b" * 20000 + " }}",
    "{% if a %}" * 5000, "{% for a in b %}" * 50 + "{% endfor %}" * 50, "{{ " + "1 + " * 20000 + "1 }}", "{{ " + "9" * 5000 + " }}",
    "{{ 'a' | center(9) }}", "a" * (template_sandbox.MAX_SOURCE + 1), "{% block a %}{% endblock %}{% block a %}{% endblock %}",
    "{{ x | groupby('a') }}", "{{ '\ud800' }}{% for %}",
])  # fmt: skip
def test_what_cannot_be_compiled_is_an_error_of_the_model(source: str) -> None:
    with alarm(20), pytest.raises(PackedModelError, match="chat_template.jinja: the chat template "):
        ChatTemplate(source, TOKENIZER)


def test_lone_surrogates_of_a_template_are_told() -> None:
    template = ChatTemplate("{{ messages[0].content }}\ud800", TOKENIZER)
    for content in ("a", "<a"):
        with pytest.raises(OptionError, match="what the chat template .* lone surrogate"):
            template.encode([{"role": "user", "content": content}])


@pytest.mark.parametrize(("source", "text"), [
    ("{% for m in messages %}{{ m.role ~ ':' ~ m.content[:4] + '|' }}{% endfor %}", "user:abab|"),
    ("{{ ['a', 'b'] + ['c'] }}{{ (1, 2) }}{{ {'a': [1]} | tojson }}", "['a', 'b', 'c'](1, 2){\"a\": [1]}"),
    ("{{ '%s-%03d' % ('a', 7) }} {{ '{:>3}{}'.format(1, 'x') }} {{ '%d' | format(3) }}", "a-007   1x 3"),
    ("{{ [1, 2] | join(', ') }}{{ messages | map(attribute='role') | join('') }}{{ '-'.join(['a', 'b']) }}", "1, 2usera-b"),
    ("{{ 'a.b' | replace('.', '/') }}{{ 'a.b'.replace('.', '') }}{{ 2 ** 10 }}{{ 3 * 'a' }}", "a/bab1024aaa"),
    ("{% for a, b in [(1, 2), (3, 4)] %}{{ a + b }}{% if loop.last %}!{% endif %}{% endfor %}", "37!"),
    ("{% macro f(x, y=[1]) %}{{ x }}{{ y }}{% endmacro %}{{ f(2) }}{{ f(3, y='z') }}", "2[1]3z"),
    ("{% set ns = namespace(x=[]) %}{% for i in range(3) %}{% set ns.x = ns.x + [i] %}{% endfor %}{{ ns.x | length }}", "3"),
    ("{% macro f() %}<{{ caller() }}>{% endmacro %}{% call f() %}a{% endcall %}{{ messages[0].content in ['a', 'b'] }}", "<a>False"),
    ("{{ {'a': 1} | tojson(indent=2) }}{{ 'a\nb' | indent(2) }}{{ [3, 1] | sort | first }}", '{\n  "a": 1\n}a\n  b1'),
])  # fmt: skip
def test_what_templates_do_still_works(source: str, text: str) -> None:
    assert render(source) == text


def test_a_long_conversation_is_no_hostile_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_sandbox, "MAX_SECONDS", 10.0)
    messages = [{"role": role, "content": "word " * 400} for _ in range(250) for role in ("user", "assistant")]
    assert len(ChatTemplate.from_folder(DEMO, TOKENIZER).render(messages)) > 900_000
