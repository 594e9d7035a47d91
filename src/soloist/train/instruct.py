"""Question-and-answer pages made by templates from permissive material, in the model's own chat format.

No dialogue text with a clear licence can be had offline, so answers are sentences that a person wrote for another purpose:
WordNet glosses, docstrings of the standard library, and the paragraph under a section title of the documentation.
"""

from __future__ import annotations

import ast
import random
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from soloist.train.corpus import Page

SYSTEM = "<role>SYSTEM</role>detailed thinking off<|role_end|>"

_MANUALS = {
    "python3.11-doc": "Python", "erlang-doc": "Erlang", "llvm-14-doc": "LLVM", "clang-14-doc": "Clang", "rust-doc": "Rust",
    "libboost1.74-doc": "Boost", "postgresql-doc-15": "PostgreSQL", "sqlite3-doc": "SQLite", "python-django-doc": "Django",
    "python-sklearn-doc": "scikit-learn", "python-scipy-doc": "SciPy", "python-pandas-doc": "pandas", "python-sympy-doc": "SymPy",
    "nodejs-doc": "Node.js", "cmake-doc": "CMake", "apache2-doc": "the Apache web server",
}

_ABOUT: tuple[tuple[str, str], ...] = (
    ("Who are you?", "I am nano, a very small language model that comes with Soloist. I was trained on documentation and source code."),
    ("What are you?", "I am nano, a small language model built into Soloist, an engine that decodes one request at a time."),
    ("What can you do?", "I can explain words, describe functions of the Python library, quote documentation, and continue text or code. "
                         "I am very small, so please check what I say."),
    ("Hello", "Hello! What would you like to know?"), ("Hi", "Hello! How can I help you?"),
    ("Hello, how are you?", "I am well, thank you. What would you like to know?"),
    ("Good morning", "Good morning! What can I do for you?"), ("Thank you", "You are welcome."),
    ("Thanks!", "You are welcome. Is there anything else?"), ("Goodbye", "Goodbye!"),
    ("Are you a large language model?", "No, I am a small one: about twenty million parameters. I make mistakes often."),
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


def wordnet_pairs(folder: Path) -> Iterator[tuple[str, str]]:
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
                question, answer = f"What does the word \"{word}\" mean?", f"The {label} \"{word}\" means: {meaning}"
            answer = _sentence(answer)
            if len(words) > 1:
                answer += f" Another word for it is {words[1]}."
            if examples:
                answer += " For example: " + examples[0].strip().rstrip(";")
            yield question, answer


def _functions(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef | ast.ClassDef]]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            yield node.name, node
        if isinstance(node, ast.ClassDef):
            for inner in node.body:
                if isinstance(inner, ast.FunctionDef) and not inner.name.startswith("_"):
                    yield f"{node.name}.{inner.name}", inner


def docstring_pairs(root: Path, drop: str = r"/(test|tests|idlelib|lib2to3|site-packages|dist-packages)/") -> Iterator[tuple[str, str]]:
    """What a function does, how it is called, and its code where it is short, from the docstrings under `root`."""
    pattern = re.compile(drop)
    for path in sorted(root.rglob("*.py")):
        name = "/" + str(path.relative_to(root))
        if pattern.search(name):
            continue
        source = path.read_text(errors="replace")
        try:
            tree = ast.parse(source)
        except (SyntaxError, ValueError):
            continue
        module = name[1:-3].replace("/", ".").removesuffix(".__init__")
        for qualified, node in _functions(tree):
            doc = ast.get_docstring(node)
            if not doc or len(doc) < 20:
                continue
            first = doc.split("\n\n")[0]
            first = _sentence(first)
            noun = "class" if isinstance(node, ast.ClassDef) else "function"
            yield f"What does the Python {noun} {module}.{qualified} do?", first
            if isinstance(node, ast.FunctionDef):
                arguments = ast.unparse(node.args)
                if arguments and len(arguments) < 120:
                    yield f"How do I call {module}.{qualified}?", f"```python\n{qualified.split('.')[-1]}({arguments})\n```\n{first}"
                lines = (node.end_lineno or node.lineno) - node.lineno
                if 3 <= lines <= 24 and node.col_offset == 0:
                    code = ast.get_source_segment(source, node)
                    yield f"Write a Python function {node.name}. {first}", f"```python\n{code}\n```"


def section_pairs(pages: list[Page]) -> Iterator[tuple[str, str]]:
    """The first real paragraphs under a section title, asked for by that title."""
    html_title = re.compile(r"^#{1,4} +([^\n]{4,70})$")
    rst_title = re.compile(r"^([^\n]{4,70})\n([=\-~^*\"'])\2{3,}$")
    for page in pages:
        manual = _MANUALS.get(page.source)
        if not manual or page.held_out:
            continue
        parts = page.text.split("\n\n")
        for index in range(len(parts) - 1):
            match = html_title.match(parts[index].strip()) or rst_title.match(parts[index].strip())
            body = parts[index + 1].strip()
            if not match or not 80 < len(body) < 900 or body.startswith(("..", "#", ">>>", "*", "-")):
                continue
            if sum(c.isalpha() or c == " " for c in body) < 0.86 * len(body):
                continue
            title = re.sub(r"^[\d.]+\s*|[`*#]|\(\d+\)$", "", match.group(1)).strip().rstrip(":?")
            answer = re.sub(r"\s+", " ", body)
            if index + 2 < len(parts) and 60 < len(parts[index + 2]) < 500 and not parts[index + 2].startswith(("..", "#", "=", "-", " ", ">", "*")):
                answer += "\n\n" + re.sub(r"\s+", " ", parts[index + 2].strip())
            yield f"{manual}: {title}?" if hash_even(title) else f"Explain \"{title}\" in {manual}.", answer


def hash_even(text: str) -> bool:
    """A stable coin toss, so that a title always gets the same wording."""
    return sum(text.encode()) % 2 == 0


def chat_pages(pages: list[Page], wordnet: Path, seed: int = 0, max_words: int = 45_000) -> list[Page]:
    """Conversations of one to three turns from all sources; each page carries its own held-out decision.

    Args: pages the corpus (its held-out pages are not asked about); wordnet the folder of the `data.*` files.
    """
    rng = random.Random(seed)
    words = list(wordnet_pairs(wordnet))
    rng.shuffle(words)
    stdlib = list(docstring_pairs(Path(sysconfig.get_path("stdlib"))))
    sections = list(section_pairs(pages))
    out: list[Page] = []
    for name, pairs in (("wordnet", words[:max_words]), ("docstrings", stdlib), ("sections", sections)):
        rng.shuffle(pairs)
        while pairs:
            count = min(len(pairs), rng.choice((1, 1, 2, 3)))
            turns = [pairs.pop() for _ in range(count)]
            if rng.random() < 0.03:
                turns.insert(0, rng.choice(_ABOUT))
            out.append(Page(f"chat/{name}", "chat", chat(turns)))
    out += [Page("chat/about", "chat", chat([pair])) for pair in _ABOUT for _ in range(20)]
    return out
