"""Hooks of mkdocs, for `make site`: pages of the verbs, and of files outside docs/ that documents link to."""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from longstride.launcher.cli import GROUPS, parser_of
from longstride.launcher.verbs import Verb

ROOT = Path(__file__).parent.parent
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "CONTRIBUTING.md", "CHANGELOG.md": "CHANGELOG.md"}
_LINK = re.compile(r"\]\((?!https?:|#)(?P<link>[^)#\s]+)(?:#L(?P<line>\d+)|(?P<anchor>#[^)]*))?\)")
_PICTURES = (".png", ".svg")


def on_files(files: Files, config: Any) -> Files:
    """Add README and its neighbours, a page for each verb, and the files outside docs/ that a document links to."""
    texts = {path.relative_to(ROOT).as_posix(): path.read_text("utf-8") for path in (ROOT / "docs").rglob("*.md")}
    for name, page in PAGES.items():
        texts[name] = (ROOT / name).read_text("utf-8")
        files.append(File.generated(config, page, content=relink(texts[name], name)))
    for verb in (verb for verbs in GROUPS.values() for verb in verbs):
        files.append(File.generated(config, page_of(verb), content=describe(verb)))
    files.append(File.generated(config, "verbs/index.md", content=list_verbs()))
    for name, text in texts.items():
        for match in _LINK.finditer(text):
            path = target(match["link"], name)
            if (uri := uri_of(path)) in files.src_uris:
                continue
            if Path(path).suffix in _PICTURES:
                files.append(File.generated(config, uri, abs_src_path=str(ROOT / path)))
            else:
                files.append(File.generated(config, uri, content=show_source(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: Any, files: Files) -> str:
    """Point links of a page of docs/ to where the site has their targets."""
    return relink(markdown, f"docs/{page.file.src_uri}") if page.file.abs_src_path else markdown


def target(link: str, name: str) -> str:
    """Return the path in the repository that a link of the file `name` leads to."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(name), link))


def uri_of(path: str) -> str:
    """Return the page or picture of the site that shows a path of the repository."""
    if path in PAGES:
        return PAGES[path]
    if path.startswith("docs/") and not (ROOT / path).is_dir():
        return path.removeprefix("docs/")
    return path if Path(path).suffix in _PICTURES else f"source/{path}.md"


def relink(markdown: str, name: str) -> str:
    """Return the text of the file `name` with links that hold on the site; a line of a source file keeps its number."""
    folder = posixpath.dirname(uri_of(name)) or "."

    def replace(match: re.Match[str]) -> str:
        """Return one link as the site needs it."""
        anchor = f"#__codelineno-0-{match['line']}" if match["line"] else match["anchor"] or ""
        return f"]({posixpath.relpath(uri_of(target(match['link'], name)), folder)}{anchor})"

    return _LINK.sub(replace, markdown)


def show_source(path: Path) -> str:
    """Return a page with the lines of a source file, or of all source files of a folder."""
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*.*") if file.suffix in (".py", ".toml"))
    blocks = [
        f'## {file.relative_to(path.parent)}\n\n````{file.suffix[1:]} linenums="1"\n{file.read_text("utf-8")}````\n'
        for file in files
    ]
    return "\n".join(["---\nsearch:\n  exclude: true\n---", f"# {path.relative_to(ROOT)}", *blocks])


def page_of(verb: Verb) -> str:
    """Return the URI of a verb's page."""
    return f"verbs/{verb.words.replace(' ', '_')}.md"


def list_verbs() -> str:
    """Return the page that lists all verbs by what they are for."""
    lines = ["# Commands", ""]
    for title, verbs in GROUPS.items():
        lines += [f"## {title[0].upper()}{title[1:]}", "", "| command | what it does |", "|---|---|"]
        lines += [f"| [`longstride {verb.words}`](../{page_of(verb)}) | {verb.summary} |" for verb in verbs] + [""]
    return "\n".join(lines)


def describe(verb: Verb) -> str:
    """Return a verb's page, from its parser: what it does, examples, and a table of its options."""
    parser = parser_of(verb)
    lines = [f"# longstride {verb.words}", "", parser.description or "", "", "```sh", *verb.examples, "```", ""]
    lines += ["| option | meaning |", "|---|---|"]
    for action in parser._actions[1:]:  # without --help
        value = "" if action.nargs == 0 else str(action.metavar or "|".join(map(str, action.choices or [])))
        names = [f"{name} {value}".strip() for name in action.option_strings] or [value or action.dest]
        meaning = (action.help or "") % {**vars(action), "prog": parser.prog}
        lines.append(f"| {' or '.join(f'`{name}`' for name in names)} | {meaning} |")
    return "\n".join([*lines, ""])
