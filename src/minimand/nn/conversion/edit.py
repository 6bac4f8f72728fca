"""Methods of a module with edited expressions, compiled from the module's own source text.

An edit replaces one expression at the place where a record has seen it. A template is an expression in which ``__f``
stands for the callee, ``__0`` and ``__1`` for the operands and ``__s`` for the module.
"""

import ast
import dataclasses
import inspect
import linecache
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import nn

from ...errors import ConversionError
from ...network.record import Place

__all__ = ["EditedMethod", "Edits", "Uneditable", "method_at"]

Span = tuple[int | None, int | None, int | None, int | None]


class Uneditable(Exception):
    """An expression cannot be edited. The message completes a sentence that begins with the method's name."""


@dataclasses.dataclass(frozen=True)
class Edits:
    """The edits of one method.

    Attributes:
        expressions: Templates by the span of the expression that they replace.
        before: Statements by the span of an expression before whose statement they are inserted.
        prelude: Statements that begin the method.
        keywords: Names of additional keyword arguments, whose default is None.
    """

    expressions: Mapping[Span, str] = dataclasses.field(default_factory=dict)
    before: Mapping[Span, str] = dataclasses.field(default_factory=dict)
    prelude: tuple[str, ...] = ()
    keywords: tuple[str, ...] = ()

    def __or__(self, other: "Edits") -> "Edits":
        for name in ("expressions", "before"):
            ours, theirs = getattr(self, name), getattr(other, name)
            if any(ours.get(span, text) != text for span, text in theirs.items()):
                raise Uneditable("has been edited in another way at the same place")
        return Edits(
            {**self.expressions, **other.expressions},
            {**self.before, **other.before},
            tuple(dict.fromkeys((*self.prelude, *other.prelude))),
            tuple(dict.fromkeys((*self.keywords, *other.keywords))),
        )


def method_at(place: Place) -> tuple[nn.Module, str]:
    """The module and the name of the method that a place belongs to."""
    owner, code = place.owner, place.code
    where = f"{code.co_name} in {code.co_filename.rpartition('/')[2]}"
    if owner is None:
        raise Uneditable(f"{where} is not a method of a module")
    for name, value in vars(owner).items():
        if isinstance(value, EditedMethod) and value.function.__code__ is code:
            return owner, name
    found = getattr(type(owner), code.co_name, None)
    if getattr(found, "__code__", None) is not code or code.co_name in vars(owner):
        raise Uneditable(f"{where} is not the method {type(owner).__name__}.{code.co_name} itself")
    return owner, code.co_name


class EditedMethod:
    """A method of one instance in the place of the method of its class; :func:`~minimand.nn.revert` removes it."""

    def __init__(self, module: nn.Module, name: str, edits: Edits) -> None:
        self.module, self.name, self.edits = module, name, edits
        self._compile()

    def _compile(self) -> None:
        self.function = compiled(getattr(type(self.module), self.name), self.edits)
        # torch.export reads the code and the signature of a forward.
        self.__code__ = self.function.__code__
        self.__signature__ = inspect.signature(types.MethodType(self.function, self.module))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the edited function."""
        return self.function(self.module, *args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        return {"module": self.module, "name": self.name, "edits": self.edits}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        try:
            self._compile()
        except Uneditable as reason:
            raise ConversionError(f"the converted model cannot be restored, because {reason}") from None


def compiled(function: types.FunctionType, edits: Edits) -> types.FunctionType:
    """A function with edits."""
    code, where = function.__code__, f"{function.__qualname__}"
    lines = linecache.getlines(code.co_filename, function.__globals__)
    if not lines:
        raise Uneditable(f"the source text of {where} is not available")
    tree = ast.parse("".join(lines))
    if _found(compile(tree, code.co_filename, "exec", dont_inherit=True), code) != code:
        raise Uneditable(f"the source text of {where} has changed since it was imported")
    editor = _Editor(edits, code)
    tree = ast.fix_missing_locations(editor.visit(tree))
    if editor.pending:
        raise Uneditable(f"{where} has no call, addition or statement at the recorded place that can be edited")
    made = _found(compile(tree, code.co_filename, "exec", dont_inherit=True), code)
    cells = dict(zip(code.co_freevars, function.__closure__ or (), strict=True))
    assert made is not None
    closure = tuple(cells[name] for name in made.co_freevars)
    result = types.FunctionType(made, function.__globals__, function.__name__, function.__defaults__, closure)
    result.__kwdefaults__ = {**(function.__kwdefaults__ or {}), **dict.fromkeys(edits.keywords)}
    return result


def _found(outer: types.CodeType, like: types.CodeType) -> types.CodeType | None:
    """The code of the same function inside a compiled file."""
    for inner in outer.co_consts:
        if isinstance(inner, types.CodeType):
            if (inner.co_qualname, inner.co_firstlineno) == (like.co_qualname, like.co_firstlineno):
                return inner
            if (found := _found(inner, like)) is not None:
                return found
    return None


def _span(node: Any) -> Span:
    return node.lineno, node.end_lineno, node.col_offset, node.end_col_offset


def _operands(node: ast.AST, count: int) -> list[ast.expr]:
    if isinstance(node, ast.BinOp):
        return [node.left, node.right]
    if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
        return [ast.copy_location(ast.Name(node.target.id, ast.Load()), node.target), node.value]
    if isinstance(node, ast.Call) and not any(isinstance(part, ast.Starred) for part in node.args):
        given = [*node.args, *(part.value for part in node.keywords if part.arg == "input")]
        return [node.func.value, *given] if len(given) < count and isinstance(node.func, ast.Attribute) else given
    return []


class _Editor(ast.NodeTransformer):
    """Applies the edits of one function to the tree of its file."""

    def __init__(self, edits: Edits, code: types.CodeType) -> None:
        self.edits, self.code = edits, code
        self.pending = {*edits.expressions, *edits.before}
        self.module = code.co_varnames[0]

    def visit(self, node: ast.AST) -> Any:
        """Edit the parts of a node, then the node."""
        if isinstance(node, ast.Expr) and "__1" in self.edits.expressions.get(_span(node.value), ""):
            raise Uneditable(f"{self.code.co_qualname} adds in place without using the result")
        for name, value in ast.iter_fields(node):
            if isinstance(value, list) and value and isinstance(value[0], ast.stmt):
                setattr(node, name, list(self._inserted(value)))
        node = self.generic_visit(node)
        if isinstance(node, ast.FunctionDef) and self._is_method(node):
            start = 1 if ast.get_docstring(node, clean=False) is not None else 0
            node.body[start:start] = [part for text in self.edits.prelude for part in self._parsed(text, node.body[0])]
            node.args.kwonlyargs += [ast.arg(name) for name in self.edits.keywords]
            node.args.kw_defaults += [ast.Constant(None) for _ in self.edits.keywords]
        if isinstance(node, ast.Call | ast.BinOp | ast.AugAssign) and _span(node) in self.edits.expressions:
            return self._replaced(node, self.edits.expressions[_span(node)])
        return node

    def _is_method(self, node: ast.FunctionDef) -> bool:
        lines = [node.lineno, *(part.lineno for part in node.decorator_list)]
        return node.name == self.code.co_name and min(lines) == self.code.co_firstlineno

    def _replaced(self, node: Any, template: str) -> ast.AST:
        operands = _operands(node, 2 if "__1" in template else 1)
        (statement,) = self._parsed(template, node)
        parts: dict[str, ast.expr] = {f"__{i}": operand for i, operand in enumerate(operands)}
        if isinstance(node, ast.Call):
            parts["__f"] = node.func
        if not operands or not isinstance(statement, ast.Expr):
            return node
        self.pending.discard(_span(node))
        made: ast.expr = _Filled(parts).visit(statement.value)
        if isinstance(node, ast.AugAssign):
            return ast.copy_location(ast.Assign([node.target], made), node)
        return made

    def _parsed(self, text: str, like: Any) -> list[ast.stmt]:
        """Statements at the place of a node; ``__s`` becomes the method's first argument."""
        body = ast.parse(text).body
        for node in (inner for statement in body for inner in ast.walk(statement)):
            if hasattr(node, "lineno"):
                ast.copy_location(node, like)
            if isinstance(node, ast.Name) and node.id == "__s":
                node.id = self.module
        return body

    def _inserted(self, body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
        for statement in body:
            inner = [part for part in ast.walk(statement) if isinstance(part, ast.stmt) and part is not statement]
            for span, text in self.edits.before.items():
                repeats = isinstance(statement, ast.While | ast.FunctionDef | ast.ClassDef)
                if _holds(statement, span) and not repeats and not any(_holds(part, span) for part in inner):
                    self.pending.discard(span)
                    yield from self._parsed(text, statement)
            yield statement


def _holds(node: ast.stmt, span: Span) -> bool:
    first, last, left, right = _span(node)
    return (first, left) <= (span[0], span[2]) and (span[1], span[3]) <= (last, right)  # type: ignore[operator]


class _Filled(ast.NodeTransformer):
    """A template with the parts of the replaced expression."""

    def __init__(self, parts: Mapping[str, ast.expr]) -> None:
        self.parts = parts

    def visit_Name(self, node: ast.Name) -> ast.expr:
        """A placeholder's part."""
        return self.parts.get(node.id, node)
