"""Question-and-answer pages made by templates from permissive material, in the model's own chat format.

No dialogue text with a clear licence can be had offline, so answers are sentences that a person wrote for another
purpose:
WordNet glosses, docstrings of the standard library, and the paragraph under a section title of the documentation.
"""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Iterator
from pathlib import Path

from soloist.train.corpus import Page, held_out
from soloist.train.puzzles import json_tasks, maths_tasks

# question, answer, and whether it is held out, as the page is that it was made from
Pair = tuple[str, str, bool]

SYSTEM = "<role>SYSTEM</role>detailed thinking off<|role_end|>"

_MANUALS = {
    "python3.11-doc": "Python",
    "erlang-doc": "Erlang",
    "llvm-14-doc": "LLVM",
    "clang-14-doc": "Clang",
    "rust-doc": "Rust",
    "libboost1.74-doc": "Boost",
    "postgresql-doc-15": "PostgreSQL",
    "sqlite3-doc": "SQLite",
    "python-django-doc": "Django",
    "python-sklearn-doc": "scikit-learn",
    "python-scipy-doc": "SciPy",
    "python-pandas-doc": "pandas",
    "python-sympy-doc": "SymPy",
    "nodejs-doc": "Node.js",
    "cmake-doc": "CMake",
    "apache2-doc": "the Apache web server",
}

_ABOUT: tuple[tuple[str, str], ...] = (
    (
        "Who are you?",
        "I am nano, a very small language model that comes with Soloist. I was trained on documentation and source code.",
    ),
    (
        "What are you?",
        "I am nano, a small language model built into Soloist, an engine that decodes one request at a time.",
    ),
    (
        "What can you do?",
        "I can explain words, describe functions of the Python library, quote documentation, do small sums, "
        "write JSON, and continue text or code. I am very small, so please check what I say.",
    ),
    ("Hello", "Hello! What would you like to know?"),
    ("Hi", "Hello! How can I help you?"),
    ("Hello, how are you?", "I am well, thank you. What would you like to know?"),
    ("Good morning", "Good morning! What can I do for you?"),
    ("Thank you", "You are welcome."),
    ("Thanks!", "You are welcome. Is there anything else?"),
    ("Goodbye", "Goodbye!"),
    (
        "Are you a large language model?",
        "No, I am a small one: about twenty million parameters. I make mistakes often.",
    ),
    ("What is Soloist?", "Soloist is an engine that decodes one request at a time as fast as the hardware allows."),
)


def chat(turns: list[tuple[str, str]]) -> str:
    """One conversation in the chat format, without thinking."""
    text = SYSTEM
    for question, answer in turns:
        text += f"<role>HUMAN</role>{question}<|role_end|><role>ASSISTANT</role>\n<think></think>{answer}<|role_end|>"
    return text


def _sentence(text: str) -> str:
    text = re.sub(r"\s+", " ", text).strip()
    text = text[:1].upper() + text[1:]
    return text if text.endswith((".", "!", "?", ":")) else text + "."


def _article(word: str) -> str:
    return ("an " if word[0].lower() in "aeiou" else "a ") + word


def wordnet_pairs(folder: Path) -> Iterator[Pair]:
    """Word questions from the glosses of `data.noun`, `data.verb`, `data.adj` and `data.adv`."""
    kinds = {"noun": "noun", "verb": "verb", "adj": "adjective", "adv": "adverb"}
    for kind, label in kinds.items():
        path = folder / f"data.{kind}"
        if not path.exists():
            continue
        for line in path.read_text(errors="replace").splitlines():
            if line.startswith("  ") or "|" not in line:
                continue
            head, gloss = line.split("|", 1)
            fields = head.split()
            words = [fields[4 + 2 * i].replace("_", " ").split("(")[0] for i in range(int(fields[3], 16))]
            meaning, *examples = re.split(r";\s*(?=\")", gloss.strip())
            word = words[0]
            if kind == "noun" and not word[0].isupper():
                answer = f"{_article(word).capitalize()} is {meaning}"
                question = f"What is {_article(word)}?"
            elif kind == "noun":
                question, answer = f"What do you know about {word}?", f"{word}: {meaning}"
            else:
                question, answer = f'What does the word "{word}" mean?', f'The {label} "{word}" means: {meaning}'
            answer = _sentence(answer)
            if len(words) > 1:
                answer += f" Another word for it is {words[1]}."
            if examples:
                answer += " For example: " + examples[0].strip().rstrip(";")
            yield question, answer, held_out(word)


def _functions(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef | ast.ClassDef]]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            yield node.name, node
        if isinstance(node, ast.ClassDef):
            for inner in node.body:
                if isinstance(inner, ast.FunctionDef) and not inner.name.startswith("_"):
                    yield f"{node.name}.{inner.name}", inner


def docstring_pairs(pages: list[Page]) -> Iterator[Pair]:
    """What a function does, how it is called, and its code where it is short, from docstrings of the standard
    library."""
    for page in pages:
        if page.source != "stdlib":
            continue
        try:
            tree = ast.parse(page.text)
        except SyntaxError:  # a repeated paragraph was cut out of the middle
            continue
        module = page.title.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
        for qualified, node in _functions(tree):
            doc = ast.get_docstring(node)
            if doc and len(doc) >= 20:
                for question, answer in _about_function(page.text, module, qualified, node, doc):
                    yield question, answer, page.held_out


def _about_function(
    source: str, module: str, qualified: str, node: ast.FunctionDef | ast.ClassDef, doc: str
) -> Iterator[tuple[str, str]]:
    first = _sentence(doc.split("\n\n")[0])
    if isinstance(node, ast.ClassDef):
        yield f"What does the Python class {module}.{qualified} do?", first
        return
    yield f"What does the Python function {module}.{qualified} do?", first
    arguments = ast.unparse(node.args)
    if arguments and len(arguments) < 120:
        call = f"```python\n{qualified.split('.')[-1]}({arguments})\n```"
        yield f"How do I call {module}.{qualified}?", f"{call}\n{first}"
    lines = (node.end_lineno or node.lineno) - node.lineno
    if 3 <= lines <= 24 and node.col_offset == 0:
        code = ast.get_source_segment(source, node)
        yield f"Write a Python function {node.name}. {first}", f"```python\n{code}\n```"


_HTML_TITLE = re.compile(r"^#{1,4} +([^\n]{4,70})$")
_RST_TITLE = re.compile(r"^([^\n]{4,70})\n([=\-~^*\"'])\2{3,}$")


def section_pairs(pages: list[Page]) -> Iterator[Pair]:
    """The first real paragraphs under a section title, asked for by that title."""
    for page in pages:
        manual = _MANUALS.get(page.source)
        if not manual:
            continue
        parts = page.text.split("\n\n")
        for index in range(len(parts) - 1):
            match = _HTML_TITLE.match(parts[index].strip()) or _RST_TITLE.match(parts[index].strip())
            if not match or not _is_prose(parts[index + 1].strip(), 80, 900):
                continue
            title = re.sub(r"^[\d.]+\s*|[`*#]|\(\d+\)$", "", match.group(1)).strip().rstrip(":?")
            answer = re.sub(r"\s+", " ", parts[index + 1].strip())
            if index + 2 < len(parts) and _is_prose(parts[index + 2], 60, 500):
                answer += "\n\n" + re.sub(r"\s+", " ", parts[index + 2].strip())
            yield (f"{manual}: {title}?" if _even(title) else f'Explain "{title}" in {manual}.'), answer, page.held_out


def _is_prose(text: str, shortest: int, longest: int) -> bool:
    if not shortest < len(text) < longest or text.startswith(("..", "#", ">>>", "*", "-", "=", " ", ">")):
        return False
    return sum(c.isalpha() or c == " " for c in text) >= 0.86 * len(text)


def _even(text: str) -> bool:
    """A stable coin toss, so that a title always gets the same wording."""
    return sum(text.encode()) % 2 == 0


def chat_pages(pages: list[Page], wordnet: Path, seed: int = 0, max_words: int = 60_000, puzzles: int = 40_000) -> list[Page]:
    """Conversations of one to three turns from all sources; none mixes held-out and trained pairs.

    Args: pages the corpus; wordnet the folder of the `data.*` files; max_words glosses taken; puzzles sums and JSON
        tasks each.
    """
    rng = random.Random(seed)
    words = list(wordnet_pairs(wordnet))
    rng.shuffle(words)
    groups: list[tuple[str, str, list[Pair]]] = [
        ("wordnet", "chat", words[:max_words]),
        ("docstrings", "chat", list(docstring_pairs(pages))),
        ("sections", "chat", list(section_pairs(pages))),
        ("maths", "maths", [(q, a, held_out(q)) for q, a in maths_tasks(puzzles, seed)]),
        ("json", "json", [(q, a, held_out(q)) for q, a in json_tasks(puzzles, seed)]),
    ]
    out: list[Page] = []
    for name, domain, pairs in groups:
        for hidden in (False, True):
            chosen = [(q, a) for q, a, h in pairs if h is hidden]
            rng.shuffle(chosen)
            while chosen:
                turns = [chosen.pop() for _ in range(min(len(chosen), rng.choice((1, 1, 2, 3))))]
                if rng.random() < 0.03:
                    turns.insert(0, rng.choice(_ABOUT))
                out.append(Page(name, domain, chat(turns), hidden))
    return out + [Page("about", "chat", chat([pair]), held_out=False) for pair in _ABOUT for _ in range(20)]
