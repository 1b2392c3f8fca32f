"""Print every text that the four packages may show, with its file and line: `python docs/messages.py`."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = ("launcher", "sparse_model", "kernels", "data_pipelines")
#: Functions that print a message or make one; exceptions are found by `raise`.
SPEAKERS = {"append", "error", "Problem", "report", "say", "warn", "warning"}


def texts(node: ast.AST) -> Iterator[str]:
    """Yield the strings of several words in an expression, each f-string as one."""
    if isinstance(node, ast.JoinedStr):
        text = ast.unparse(node)[2:-1]
    else:
        text = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
        for child in ast.iter_child_nodes(node):
            yield from texts(child)
    if " " in text.strip():
        yield " ".join(text.split())


def messages(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and text of each string that is raised, reported or collected, or has a name such as ``rule``."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name in SPEAKERS or name.endswith(("Error", "problem")):
                yield from ((node.lineno, text) for part in [*node.args, *node.keywords] for text in texts(part))
        elif isinstance(node, ast.Assign):  # a part that is put together with others later
            yield from ((node.lineno, text) for text in texts(node.value))


if __name__ == "__main__":
    for path in sorted(p for package in PACKAGES for p in (ROOT / package).rglob("*.py")):
        for line, text in sorted(set(messages(path.read_text(encoding="utf-8")))):
            print(f"{path.relative_to(ROOT)}:{line}  {text}")
