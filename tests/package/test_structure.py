"""The shape of the package's code: no two files import each other, and a function fits on a screen."""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import django_ratequota

PACKAGE = Path(django_ratequota.__file__).parent
#: Most lines of code of a function: without blank lines, comments and docstrings.
SCREEN = 60
_LAYOUT = {tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.COMMENT, tokenize.ENDMARKER}
Function = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def modules() -> dict[str, Path]:
    """Return the file of each module of the package, by its dotted name."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def syntax(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def is_for_types_only(node: ast.AST) -> bool:
    """Whether a statement is ``if TYPE_CHECKING:``, whose body is never run."""
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def executed(node: ast.AST) -> Iterator[ast.AST]:
    """Yield all nodes below that are run at some time."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and is_for_types_only(child):
            continue
        yield child
        yield from executed(child)


def imported_by(name: str) -> set[str]:
    """Return the modules of the package that a module imports by statements, also inside functions."""
    path, found = modules()[name], set()
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in executed(syntax(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*parents, *([node.module] if node.module else [])])
            # "from . import checkpoints" imports a module, "from .checkpoints import flush" one of its names.
            found |= {f"{base}.{alias.name}" if f"{base}.{alias.name}" in modules() else base for alias in node.names}
    return found & modules().keys() - {name}


def test_no_two_files_import_each_other() -> None:
    imports = {name: imported_by(name) for name in modules()}
    assert len(imports) > 100
    assert "django_ratequota.engine.limiter" in imports["django_ratequota.runtime"]
    mutual = [(one, other) for one in imports for other in imports[one] if one < other and one in imports[other]]
    assert sorted(mutual) == []


def code_lines(path: Path) -> set[int]:
    """Return the numbers of a file's lines that hold code: no blank lines, comments and docstrings."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if token.type not in _LAYOUT:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(syntax(path)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return lines


def test_every_function_fits_on_a_screen() -> None:
    lengths = {}
    for name, path in modules().items():
        code = code_lines(path)
        for node in ast.walk(syntax(path)):
            if isinstance(node, Function):
                body = range(node.lineno, (node.end_lineno or node.lineno) + 1)
                lengths[f"{name}.{node.name}:{node.lineno}"] = len(code.intersection(body))
    assert max(lengths.values()) > SCREEN // 2
    assert {function: length for function, length in lengths.items() if length > SCREEN} == {}
