"""Methods of a module with edited expressions, compiled from the module's own source text.

An edit replaces an expression, or one operand of it, where a record has seen it. A template is an expression in which
``__e`` stands for the expression, ``__f`` for the callee, ``__0`` and ``__1`` for operands, ``__s`` for the module.
"""

import ast
import dataclasses
import functools
import inspect
import linecache
import types
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.fx import GraphModule

from ...errors import ConversionError
from ...network.record import CallSite

__all__ = ["EditedMethod", "Edits", "Uneditable", "add_edit", "method_at"]

Span = tuple[int | None, ...]
Operand = tuple[int, int]


class Uneditable(ConversionError):
    """An expression cannot be edited; the message says why."""


@dataclasses.dataclass(frozen=True)
class Edits:
    """The edits of one method: templates by the span of the expression and the operand that they replace, given by its
    index and the number of operands, None for the whole expression; statements that begin the method; and the names of
    additional keyword arguments, whose default is None."""

    templates: tuple[tuple[tuple[Span, Operand | None], str], ...] = ()
    prelude: tuple[str, ...] = ()
    keywords: tuple[str, ...] = ()

    def __or__(self, other: "Edits") -> "Edits":
        ours = dict(self.templates)
        if any(ours.get(key, text) != text for key, text in other.templates):
            raise Uneditable("the forward has been edited in another way at the same place")
        parts = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return Edits(*(tuple(dict.fromkeys((*mine, *theirs))) for mine, theirs in parts))


def method_at(place: CallSite) -> tuple[nn.Module, str]:
    """The module and the name of the method that a place belongs to."""
    owner, code = place.owner, place.code
    where = f"{code.co_name} in {code.co_filename.rpartition('/')[2]}"
    if owner is None:
        raise Uneditable(f"{where} is not a method of a module")
    if isinstance(owner, GraphModule):
        raise Uneditable("this forward is generated anew for every copy; convert the model that it was generated from")
    for name, value in vars(owner).items():
        if isinstance(value, EditedMethod) and value.function.__code__ is code:
            return owner, name
    found = [n for kind in type(owner).__mro__ for n, v in vars(kind).items() if getattr(v, "__code__", None) is code]
    names = [name for name in found if getattr(getattr(type(owner), name), "__code__", None) is code]
    if not names or names[0] in vars(owner):
        raise Uneditable(f"{where} is not a method of {type(owner).__name__} itself (a decorator or super() calls it)")
    return owner, names[0]


def add_edit(known: dict[tuple[nn.Module, str], Edits], place: CallSite, edits: Edits) -> None:
    """Add edits of the method that a place belongs to, if they can be made together with the known ones."""
    owner, name = method_at(place)
    if None in place.span:
        raise Uneditable(f"{place.code.co_qualname} was compiled without columns (python -X no_debug_ranges)")
    before, edits = vars(owner).get(name), known.get((owner, name), Edits()) | edits
    compiled(getattr(type(owner), name), edits if before is None else before.edits | edits)
    known[owner, name] = edits


class EditedMethod:
    """A method of one instance in the place of the method of its class; :func:`~minimand.nn.revert` removes it."""

    def __init__(self, module: nn.Module, name: str, edits: Edits) -> None:
        self.module, self.name, self.edits = module, name, edits
        self.function = compiled(getattr(type(module), name), edits)
        # torch.export reads the code and the signature of a forward.
        self.__code__ = self.function.__code__
        self.__signature__ = inspect.signature(types.MethodType(self.function, module))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the edited function."""
        return self.function(self.module, *args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return EditedMethod, (self.module, self.name, self.edits)


def compiled(function: types.FunctionType, edits: Edits) -> types.FunctionType:
    """A function with edits."""
    made = _edited(function.__code__, edits)
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    closure = tuple(cells[name] for name in made.co_freevars)
    result = types.FunctionType(made, function.__globals__, function.__name__, function.__defaults__, closure)
    result.__kwdefaults__ = {**(function.__kwdefaults__ or {}), **dict.fromkeys(edits.keywords)}
    return result


@functools.lru_cache(256)
def _edited(code: types.CodeType, edits: Edits) -> types.CodeType:
    lines, where = linecache.getlines(code.co_filename), code.co_qualname
    if not lines:
        raise Uneditable(f"the source text of {where} is not available")
    tree = ast.parse("".join(lines))
    # Notebooks compile each statement on its own, which changes the code a little.
    alone = [part for part in tree.body if part.lineno <= code.co_firstlineno <= (part.end_lineno or 0)]
    units = [unit for unit in (tree, ast.Module(alone, [])) if _found(unit, code) == code]
    if not units:
        raise Uneditable(f"the source text of {where} has changed since it was imported")
    editor = _Editor(edits, code)
    tree = ast.fix_missing_locations(editor.visit(units[0]))
    try:
        made = _found(tree, code)
    except SyntaxError:
        made = None
    if editor.pending or made is None:
        raise Uneditable(f"{where} has no call or addition at the recorded place that can be edited")
    return made


def _found(outer: ast.Module | types.CodeType, like: types.CodeType) -> types.CodeType | None:
    """The code of the same function inside the tree, or the code, of a file."""
    if isinstance(outer, ast.Module):
        outer = compile(outer, like.co_filename, "exec", dont_inherit=True)
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
    if isinstance(node, ast.Call) and not any(isinstance(part, ast.Starred) for part in node.args):
        given = [*node.args, *(part.value for part in node.keywords if part.arg == "input")]
        return [node.func.value, *given] if len(given) < count and isinstance(node.func, ast.Attribute) else given
    return []


class _Editor(ast.NodeTransformer):
    """Applies the edits of one function to the tree of its file."""

    def __init__(self, edits: Edits, code: types.CodeType) -> None:
        self.edits, self.code, self.templates = edits, code, dict(edits.templates)
        self.pending = set(self.templates)

    def visit(self, node: ast.AST) -> Any:
        """Edit the parts of a node, then the node."""
        if isinstance(node, ast.Expr) and "__1" in self.templates.get((_span(node.value), None), ""):
            raise Uneditable(f"{self.code.co_qualname} adds in place without using the result")
        node = self.generic_visit(node)
        if isinstance(node, ast.FunctionDef) and self._is_method(node):
            start = 1 if ast.get_docstring(node, clean=False) is not None else 0
            node.body[start:start] = [part for text in self.edits.prelude for part in self._parsed(text, node.body[0])]
            node.args.kwonlyargs += [ast.arg(name) for name in self.edits.keywords]
            node.args.kw_defaults += [ast.Constant(None) for _ in self.edits.keywords]
        span = _span(node) if isinstance(node, ast.Call | ast.BinOp | ast.AugAssign) else None
        if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name) and span in dict(self.pending):
            # An addition in place becomes one out of place.
            left = ast.copy_location(ast.Name(node.target.id, ast.Load()), node.target)
            total = self._edited(ast.copy_location(ast.BinOp(left, node.op, node.value), node))
            return ast.copy_location(ast.Assign([node.target], total), node)
        return node if span is None or isinstance(node, ast.AugAssign) else self._edited(node)

    def _edited(self, node: Any) -> Any:
        for span, operand in list(self.pending):
            if operand is not None and span == _span(node):
                node = self._with_operand(node, operand)
        return self._replaced(node) if (_span(node), None) in self.pending else node

    def _is_method(self, node: ast.FunctionDef) -> bool:
        lines = [node.lineno, *(part.lineno for part in node.decorator_list)]
        return node.name == self.code.co_name and min(lines) == self.code.co_firstlineno

    def _with_operand(self, node: Any, which: Operand) -> Any:
        """A node with one operand edited."""
        for operand in _operands(node, which[1])[which[0] : which[0] + 1]:
            made = self._filled((_span(node), which), node, {"__0": operand})
            _substitute(node, lambda part: made if part is operand else part)  # noqa: B023
        return node

    def _replaced(self, node: Any) -> Any:
        template = self.templates[_span(node), None]
        if "__f" in template and (not isinstance(node, ast.Call) or len(node.args) != 1 or node.keywords):
            raise Uneditable(f"{self.code.co_qualname} calls it with more than its input")
        parts = {f"__{i}": part for i, part in enumerate(_operands(node, 2 if "__1" in template else 1))}
        parts |= {"__e": node} | ({"__f": node.func} if isinstance(node, ast.Call) else {})
        return self._filled((_span(node), None), node, parts) if "__0" in parts or "__e" in template else node

    def _filled(self, key: Any, node: Any, parts: dict[str, ast.expr]) -> ast.expr:
        """A template with the parts of the expression that it replaces."""
        (statement,) = self._parsed(self.templates[key], node)
        self.pending.discard(key)
        _substitute(statement, lambda part: parts.get(part.id, part) if isinstance(part, ast.Name) else part)
        assert isinstance(statement, ast.Expr)
        return statement.value

    def _parsed(self, text: str, like: Any) -> list[ast.stmt]:
        """Statements at the place of a node; ``__s`` becomes the method's first argument."""
        body = ast.parse(text).body
        for node in (inner for statement in body for inner in ast.walk(statement)):
            if hasattr(node, "lineno"):
                ast.copy_location(node, like)
            if isinstance(node, ast.Name) and node.id == "__s":
                node.id = self.code.co_varnames[0]
        return body


def _substitute(root: ast.AST, new: Callable[[Any], Any]) -> None:
    """Replace the nodes below a node."""
    for node in list(ast.walk(root)):
        for field, value in ast.iter_fields(node):
            if isinstance(value, list):
                value[:] = map(new, value)
            elif isinstance(value, ast.AST):
                setattr(node, field, new(value))
