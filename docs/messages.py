"""Print every message that the four packages may show: `python docs/messages.py` lists `file:line  message`."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = ("launcher", "sparse_model", "kernels", "data_pipelines")
#: Functions that print a message or make one; exceptions are found by `raise`.
SPEAKERS = {"append", "error", "Problem", "report", "say", "warn", "warning"}


def text_of(node: ast.AST) -> str:
    """Return a string expression as text; empty for other expressions."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return ast.unparse(node)[2:-1]
    return ""


def messages(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and text of each message: strings of several words that are raised, reported or collected."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name in SPEAKERS or name.endswith(("Error", "problem")):
                for argument in [*node.args, *(k.value for k in node.keywords)]:
                    if " " in (text := text_of(argument)).strip():
                        yield node.lineno, " ".join(text.split())


if __name__ == "__main__":
    for path in sorted(p for package in PACKAGES for p in (ROOT / package).rglob("*.py")):
        for line, text in sorted(set(messages(path.read_text(encoding="utf-8")))):
            print(f"{path.relative_to(ROOT)}:{line}  {text}")
