"""Hold docstrings, names and documents to the project's writing style, as far as a program can see it."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("launcher", "sparse_model", "kernels", "data_pipelines", "longstride", "benchmarks", "tests/harness")
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef

#: A function's docstring begins with one of these, or with its third person.
_VERBS = """
abort accept acquire adapt add adjust adopt advance agree aggregate align allocate allow append apply approximate
arrange ask assemble assert assign attach attend average await back balance begin benchmark bind block bound break
bring broadcast buffer build bundle cache calculate call cancel cap cast catch center change check choose chunk claim
clamp classify clean clear clip close cluster collect combine compare compile complete compose compress compute
concatenate configure confirm connect construct consume continue convert copy correct count cover crash create cut
deal decide declare decode decompress decorate decrease define delay delete deliver derive descend describe
deserialise detach detect determine differentiate disable discard dispatch display distribute divide do download draw
drive drop dump embed emit enable encode end enforce ensure enter enumerate escape estimate evaluate evict exchange
exclude execute exercise exit expand expect explain export expose express extend extract fail fall fetch fill filter
find finish fit fix flag flatten flip flush fold follow force forget fork format forward free freeze fuse gather
generate get give grant group grow guard guess halve handle hash help hide hold identify ignore implement import
include increase index infer inform initialise insert inspect install integrate interpolate interpret interrupt
intersect invert invoke issue iterate join keep kill label launch leave let lift limit link list listen load locate
lock log look lower make map mark mask match measure merge mirror mix mock move multiply name narrow negate normalise
note notify number offer omit open order overlap override pack pad parse partition pass patch pause perform permute
pick pin place plan play plot poll pool populate predict prefetch prepare prepend preserve prevent print probe process
produce profile prohibit project promise propagate protect prove provide prune publish pull push put quantise query
queue quote raise rank reach read rebuild receive recompute reconstruct record recover redirect reduce refer refresh
refuse register reject release reload remember remove rename render repeat replace replay report represent request
require rescale reset reshape resolve resort respect respond restart restore restrict resume retrieve retry return
reuse reverse rewind rewrite roll rotate round route run sample save say scale scan scatter schedule score search seek
select send separate serialise serve set shard share shift show shrink shuffle shut sign signal simplify simulate
size skip sleep slice smooth solve sort specify split spread stack stand start state stop store stream strip submit
subtract suggest sum summarise support suppress surround swap switch synchronise synthesise tag take tell terminate
test throw tile time tokenise touch trace track train transfer transform translate transpose traverse treat trim
truncate try turn undo unfold unify uninstall unlock unpack unwrap update upload use validate vary verify visit wait
walk warm warn watch weigh widen wrap write yield zero
"""
VERBS = frozenset(_VERBS.split())
FRAGMENT = re.compile(r"(Of|Behind|Beside|So|Where|What|Which|Likewise|As|The same|By|For|In|With|From|To|On|At)\b")
_VAGUE = """
given found told asked said made seen whole kept rest own one other here beside more wanted known held left each
"""
VAGUE = frozenset(_VAGUE.split())
#: How many times the four packages may still bind a vague name; `left` and `rest` are now and then the right word.
VAGUE_NAMES = 150


def documented(source: str) -> Iterator[tuple[Definition, str]]:
    """Yield each class and function that has a docstring, with the docstring."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, Definition) and (text := ast.get_docstring(node)):
            yield node, text


def is_verb(word: str) -> bool:
    """Whether `word` is a listed verb, in the imperative or the third person."""
    word = word.lower().rstrip(".,:;")
    stems = {word, word.removesuffix("s"), word.removesuffix("es"), re.sub("ies$", "y", word)}
    return any(piece in VERBS for stem in stems for piece in (stem, stem.split("-")[-1]))


def fault(node: Definition, docstring: str) -> str | None:
    """Say what is wrong with the beginning of a docstring, or return None."""
    if FRAGMENT.match(docstring):
        return "begins like a fragment"
    if isinstance(node, ast.ClassDef) or any("property" in ast.unparse(mark) for mark in node.decorator_list):
        return None
    first = docstring.split()[0]
    return None if first == "Whether" or is_verb(first) else "does not begin with a verb"


@pytest.mark.parametrize(
    ("docstring", "expected"),
    [
        ("Return the mask.", None),
        ("Writes a file.", None),
        ("Whether all keys are read.", None),
        ("Copies rows.", None),
        ("Of all layers.", "begins like a fragment"),
        ("The mask of a pattern.", "does not begin with a verb"),
    ],
)
def test_faults_of_docstrings(docstring: str, expected: str | None) -> None:
    node, text = next(documented(f'def f():\n    """{docstring}"""'))
    assert fault(node, text) == expected


@pytest.mark.parametrize("folder", FOLDERS)
def test_docstrings_begin_with_a_verb(folder: str) -> None:
    faults = [
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}: {text.splitlines()[0][:60]!r} {problem}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        for node, text in documented(path.read_text())
        if (problem := fault(node, text))
    ]
    assert not faults, f"{len(faults)} docstrings:\n" + "\n".join(faults)


def test_few_vague_names() -> None:
    bound = [
        f"{path.relative_to(ROOT)}:{node.lineno} {name}"
        for folder in FOLDERS[:4]
        for path in sorted((ROOT / folder).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if (name := vague_name(node))
    ]
    assert len(bound) <= VAGUE_NAMES, f"{len(bound)} names:\n" + "\n".join(bound)


def vague_name(node: ast.AST) -> str | None:
    """Return the name that an assignment or an argument binds, if it says nothing of its value."""
    name = node.id if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) else None
    name = node.arg if isinstance(node, ast.arg) else name
    return name if name in VAGUE else None


def sentences(markdown: str) -> Iterator[str]:
    """Yield the sentences of a page's paragraphs and list items, without code blocks, tables and headings."""
    text = re.sub(r"^(```|~~~).*?^\1", "", markdown, flags=re.M | re.S)
    text = re.sub(r"^(\||#|<|!\[).*$", "", text, flags=re.M)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", re.sub(r"`[^`]*`", "code", text))
    for paragraph in re.split(r"\n\s*\n|^\s*(?:[-*]|\d+\.) ", text, flags=re.M):
        yield from (s for s in re.split(r"(?<=[.!?:;])\s+", " ".join(paragraph.split())) if s)


def test_documents_have_short_sentences() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    lengths = {f"{page.relative_to(ROOT)}: {s}": len(s.split()) for page in pages for s in sentences(page.read_text())}
    long = [sentence for sentence, words in lengths.items() if words > 28]
    assert len(long) <= 20, f"{len(long)} sentences:\n" + "\n".join(long)
    assert sum(lengths.values()) / len(lengths) <= 15
