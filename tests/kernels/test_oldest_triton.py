"""What the oldest Triton that vitfast runs on cannot compile, found in the source: nothing here has that Triton."""

import ast
from pathlib import Path

import pytest

KERNELS = sorted((Path(__file__).parents[2] / "kernels").glob("*.py"))


def jit_functions(path: Path) -> list[ast.FunctionDef]:
    functions = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)]
    return [f for f in functions if any("jit" in ast.unparse(decorator) for decorator in f.decorator_list)]


@pytest.mark.parametrize("path", KERNELS, ids=lambda path: path.name)
def test_no_kernel_function_returns_none_or_keeps_it_in_a_tuple(path):
    """Triton 3.6 makes a tensor of what is returned and of what a tuple of the kernel's own holds."""
    for function in jit_functions(path):
        optional = {
            target.id
            for node in ast.walk(function)
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.IfExp) and _is_none(node.value.orelse)
            for target in node.targets
        }
        for node in ast.walk(function):
            if isinstance(node, ast.Return):
                parts = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]
                assert not any(part is not None and _is_none(part) for part in parts), (path.name, node.lineno)
            if isinstance(node, ast.Tuple) and isinstance(node.ctx, ast.Load):
                held = {part.id for part in node.elts if isinstance(part, ast.Name)}
                assert not held & optional, (path.name, node.lineno, held & optional)


def _is_none(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def test_there_are_kernels():
    assert sum(len(jit_functions(path)) for path in KERNELS) > 60
