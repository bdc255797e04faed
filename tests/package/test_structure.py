"""The shape of the package's code: imports form no circle, and a function fits on a screen."""

from __future__ import annotations

import ast
import io
import tokenize
from functools import cache
from graphlib import TopologicalSorter
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


def imported_by(name: str) -> set[str]:
    """Return the modules of the package that a module imports by statements, also inside functions or for types."""
    path, found = modules()[name], set()
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(syntax(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*parents, *([node.module] if node.module else [])])
            # "from . import checkpoints" imports a module, "from .checkpoints import flush" one of its names.
            found |= {f"{base}.{alias.name}" if f"{base}.{alias.name}" in modules() else base for alias in node.names}
    return found & modules().keys() - {name}


def test_imports_form_no_circle() -> None:
    """Thirteen files formed one, by an import inside a function and one for types."""
    imports = {name: imported_by(name) for name in modules()}
    assert len(imports) > 100
    assert "django_ratequota.engine.limiter" in imports["django_ratequota.runtime"]
    TopologicalSorter(imports).prepare()  # raises CycleError with the circle


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
