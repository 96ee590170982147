"""Where chat templates run: nothing of the machine within reach, and bounds on time and size.

Design: a template comes with a checkpoint and is not trusted. jinja2's sandbox keeps it away from attributes and calls that lead
out. Here each step that could go on for long or grow (a round of a loop, a call, a filter, an operator, a value that is written) is
paid from the budget of the rendering, and one whose result would be too large does not begin. Filters and methods that make
much of little, which chat templates do not use, are left out.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterable
from datetime import datetime
from functools import update_wrapper, wraps
from typing import Any, NoReturn, cast

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

MAX_SECONDS = 10.0
MAX_SOURCE = 1 << 20
"""Characters of a template."""
MAX_CHARACTERS = 1 << 22
"""Characters of one value, and of what is rendered: 16 for each of 262,144 tokens."""
_MAX_MADE = 1 << 26  # characters of all values together that one rendering makes
_MAX_DEPTH = 50
_MAX_BITS = 1 << 12  # of a whole number
_MAX_INDENT = 8

_LEFT_OUT_FILTERS = (
    "batch", "center", "filesizeformat", "groupby", "pprint", "random", "slice", "striptags", "truncate", "urlize", "wordwrap", "xmlattr",
)  # fmt: skip
_LEFT_OUT_METHODS = frozenset(
    ("center", "encode", "expandtabs", "format_map", "ljust", "maketrans", "rjust", "to_bytes", "translate", "zfill")
)
# Filters that hand on or pick values without writing them out.
_STRUCTURAL = frozenset((
    "abs", "attr", "count", "d", "default", "dictsort", "first", "float", "int", "items", "join", "last", "length", "list", "map", "max",
    "min", "reject", "rejectattr", "reverse", "round", "select", "selectattr", "sort", "sum", "unique",
))  # fmt: skip
_WIDE_PERCENT = re.compile(r"%[^a-zA-Z%]*(?:\d{3}|\*)")
_WIDE_FORMAT = re.compile(r"\{[^{}]*:[^{}]*(?:\d{3}|\{)")


class TemplateLimitError(jinja2.TemplateRuntimeError):
    """A template takes too long, or makes too much. The message goes on after its name."""


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """The environment chat templates are written for, as transformers sets it up, within bounds.

    Thread-safety: templates may be rendered in several threads at once.
    """

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self) -> None:
        self._local = threading.local()
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols], finalize=self._written)
        self.filters["tojson"] = _tojson
        kept = {name: function for name, function in self.filters.items() if name not in _LEFT_OUT_FILTERS}
        self.filters = {name: self._guarded_filter(name, function) for name, function in kept.items()}
        self.filters["__tick"] = jinja2.pass_context(lambda context, characters: self._spend(characters))
        self.filters["__literal"] = self._literal
        self.filters["__concatenate"] = self._concatenate
        self.tests = {name: self._guarded_test(cast(Callable[..., Any], function)) for name, function in self.tests.items()}
        del self.globals["lipsum"]
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)

    def compile_within(self, source: str) -> jinja2.Template:
        """The template of a text. Raises TemplateLimitError, and whatever jinja2 and Python's compiler do."""
        if len(source) > MAX_SOURCE:
            raise TemplateLimitError(f"is longer than {MAX_SOURCE:,} characters")
        self._local.budget = _Budget()
        try:
            return self.from_string(source)
        finally:
            self._local.budget = None

    def render_within(self, template: jinja2.Template, **variables: Any) -> str:
        """The text of a template of this environment. Raises TemplateLimitError, and whatever the template does."""
        self._local.budget = _Budget()
        try:
            pieces, size = [], 0
            for piece in template.generate(**variables):
                size += len(piece)
                _require(size <= MAX_CHARACTERS)
                pieces.append(piece)
            return "".join(pieces)
        finally:
            self._local.budget = None

    # --- what jinja2 asks ---

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Leaves out methods that make much of little."""
        wide = attr in _LEFT_OUT_METHODS and isinstance(obj, (str, bytes, int))
        return not wide and super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """`str.format`, when the result cannot be far larger than its arguments."""
        formatted = super().wrap_str_format(value)
        if formatted is None:
            return None

        def checked(*args: Any, **kwargs: Any) -> str:
            _check_format(value.__self__, _WIDE_FORMAT, "{", (args, kwargs))
            return formatted(*args, **kwargs)

        return update_wrapper(checked, formatted)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: B902
        """Calls what a template calls."""
        __self._spend()
        owner, name = getattr(__obj, "__self__", None), getattr(__obj, "__name__", "")
        if isinstance(owner, str) and args:
            if name == "join":
                args = (_items(args[0], owner), *args[1:])
            elif name == "replace" and len(args) >= 2:
                _check_replace(owner, args[0], args[1])
        for value in (*args, *(value for key, value in kwargs.items() if not key.startswith("_"))):
            measure(value)
        return __self._made(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Computes what a template computes."""
        self._spend()
        sequences = (str, bytes, list, tuple)
        if isinstance(left, int) and isinstance(right, int):
            if operator == "*":
                _require(left.bit_length() + right.bit_length() <= _MAX_BITS)
            elif operator == "**":
                _require(left.bit_length() * abs(right) <= _MAX_BITS)
        elif operator == "*":
            for sequence, count in ((left, right), (right, left)):
                if isinstance(sequence, sequences) and isinstance(count, int):
                    _require(measure(sequence) * count <= MAX_CHARACTERS)
        elif operator == "+" and isinstance(left, sequences) and isinstance(right, sequences):
            _require(len(left) + len(right) <= MAX_CHARACTERS)
        elif operator == "%" and isinstance(left, (str, bytes)):
            _check_format(str(left), _WIDE_PERCENT, "%", right)
        return self._made(super().call_binop(context, operator, left, right))

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template: nodes.Template = _Counted().visit(super()._parse(source, name, filename))
        template.set_environment(self)
        return template

    # --- what is paid ---

    def _spend(self, characters: int = 0) -> None:
        budget: _Budget | None = getattr(self._local, "budget", None)
        if budget is not None:
            budget.spend(characters)

    def _made(self, value: Any) -> Any:
        if isinstance(value, (str, bytes)):
            _require(len(value) <= MAX_CHARACTERS)
            self._spend(len(value))
        elif isinstance(value, (list, tuple, dict)):
            self._spend(8 * len(value))
        return value

    def _written(self, value: Any) -> Any:
        """A value that goes to the output, or to a block that is set."""
        self._spend(measure(value))
        return value

    def _literal(self, value: Any) -> Any:
        self._spend(measure(value))
        return value

    def _concatenate(self, values: list[Any]) -> str:
        _require(measure(values) <= MAX_CHARACTERS)
        text: str = self._made("".join(map(str, values)))
        return text

    def _guarded_filter(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            self._spend()
            if name == "join":  # the first argument is jinja2's
                args = (args[0], _items(args[1], args[2] if len(args) > 2 else kwargs.get("d", "")), *args[2:])
            elif name == "replace":
                _check_replace(str(args[1]), *(*args[2:], *kwargs.values())[:2])
            elif name == "format":
                _check_format(str(args[0]), _WIDE_PERCENT, "%", (args[1:], kwargs))
            elif name in ("indent", "tojson"):
                further = (*args[1:], *kwargs.values())
                _require(measure(further) <= 64 and all(abs(value) <= _MAX_INDENT for value in further if isinstance(value, int)))
            elif name == "sum":
                _require(not any(isinstance(value, (list, tuple)) for value in (*args[2:], *kwargs.values())))
            if name not in _STRUCTURAL:
                measure((args, kwargs))
            return self._made(function(*args, **kwargs))

        return guarded

    def _guarded_test(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            self._spend()
            return function(*args, **kwargs)

        return guarded


class _Budget:
    """What is left of the time and the size of one rendering."""

    def __init__(self) -> None:
        self._seconds = MAX_SECONDS
        self._deadline = time.monotonic() + MAX_SECONDS
        self._made = 0

    def spend(self, characters: int) -> None:
        self._made += characters
        _require(self._made <= _MAX_MADE)
        if time.monotonic() > self._deadline:
            raise TemplateLimitError(f"takes more than {self._seconds:g} seconds")


class _Counted(NodeTransformer):
    """Puts a step to pay for into each round of a loop and each call of a macro, and around values that would come about unseen."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        return self._body(node)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        return self._body(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:
        return self._body(node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(nodes.List(node.nodes, lineno=node.lineno), "__concatenate")

    def visit_List(self, node: nodes.List) -> nodes.Node:
        return _filtered(self.generic_visit(node), "__literal")

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        return _filtered(self.generic_visit(node), "__literal")

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(node, "__literal") if node.ctx == "load" else node

    def _body(self, node: Any) -> nodes.Node:
        # A round also writes the text that stands in its body.
        characters = sum(len(text.data) for text in node.find_all(nodes.TemplateData))
        self.generic_visit(node)
        tick = _filtered(nodes.Const(characters, lineno=node.lineno), "__tick")
        node.body.insert(0, nodes.ExprStmt(tick, lineno=node.lineno))
        return node  # type: ignore[no-any-return]


def _filtered(node: nodes.Node, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def measure(value: Any) -> int:
    """About how many characters a value takes when it is written out. Raises TemplateLimitError when they are too many, or nested
    too deeply, before anything is written."""
    if isinstance(value, str):
        _require(len(value) <= MAX_CHARACTERS)
        return len(value)
    size, rest = 0, [(value, 0)]
    while rest:
        item, depth = rest.pop()
        size += 1
        if isinstance(item, Namespace):
            item = getattr(item, "_Namespace__attrs")  # noqa: B009
        if isinstance(item, (str, bytes)):
            size += len(item)
        elif isinstance(item, int):
            size += item.bit_length() // 3
        elif isinstance(item, (list, tuple, set, frozenset)):
            _require(size + len(item) <= MAX_CHARACTERS)
            rest += [(inner, depth + 1) for inner in item]
        elif isinstance(item, dict):
            rest += [(inner, depth + 1) for pair in item.items() for inner in pair]
        _require(size <= MAX_CHARACTERS and depth <= _MAX_DEPTH)
    return size


def _require(within: bool) -> None:
    if not within:
        raise TemplateLimitError(f"makes more than {MAX_CHARACTERS:,} characters, or values nested more than {_MAX_DEPTH} deep")


def _items(values: Iterable[Any], separator: Any) -> list[Any]:
    """The values that are to be joined."""
    items, size, between = [], 0, measure(separator)
    for value in values:
        size += measure(value) + between
        _require(size <= MAX_CHARACTERS)
        items.append(value)
    return items


def _check_replace(text: str, old: Any, new: Any) -> None:
    _require(len(text) + text.count(str(old)) * measure(new) <= MAX_CHARACTERS)


def _check_format(text: str, wide: re.Pattern[str], mark: str, values: Any) -> None:
    """No field is wider than two digits say, and all of them together are not too large."""
    _require(wide.search(text) is None and len(text) + text.count(mark) * (measure(values) + 99) <= MAX_CHARACTERS)


class _GenerationTag(Extension):
    """`{% generation %}…{% endgeneration %}` marks answers for training; here it is only its body."""

    tags = {"generation"}

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: tuple[str, str] | None = None,
            sort_keys: bool = False) -> str:
    """Plain JSON: jinja2's own filter escapes `<`, `>`, `&` and `'` for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
