"""Text to train on: permissively licensed documentation and source code, cleaned, de-duplicated and split.

The documentation comes from unpacked Debian packages (`apt-get download NAME`, `dpkg-deb -x`), the code from Python
packages
that are installed anyway. Every source names its licence, and the list of them travels with the weights.
Held-out pages are chosen by a hash of their text, so the split does not depend on order, machine or seed.
"""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import html
import json
import re
import subprocess
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from soloist.errors import UserError
from soloist.train.sources import SOURCES, Source, licence_of

HELD_OUT_EVERY = 50
MIN_PAGE_CHARS = 200


def held_out(text: str) -> bool:
    """True for about one text in `HELD_OUT_EVERY`, decided by the text alone."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") % HELD_OUT_EVERY == 0


@dataclasses.dataclass(frozen=True)
class Page:
    """One document: where it came from, its domain (docs, code, chat, maths or json), its text, its split and its file.

    A page made from another page has the split of that page, so that nothing held out is ever trained on.
    """

    source: str
    domain: str
    text: str
    held_out: bool
    title: str = ""


_DROP_BLOCKS = re.compile(
    r"<(script|style|nav|svg|head|header|footer|noscript)\b[^>]*>.*?</\1\s*>|<!--.*?-->|<\?xml[^>]*>|<!DOCTYPE[^>]*>",
    re.S | re.I,
)
_NAV_DIVS = re.compile(
    r'<div class="(?:navheader|navfooter|fancy_toc|related|sphinxsidebar|toc|apidocs?|spirit-nav)"[^>]*>.*?</div>', re.S
)
_PERMALINK = re.compile(r'<a class="(?:headerlink|anchor|id_link|srclink)"[^>]*>.*?</a>|¶', re.S)
_PRE = re.compile(r"<pre\b[^>]*>(.*?)</pre\s*>", re.S | re.I)
_HEADING = re.compile(r"<h([1-6])\b[^>]*>(.*?)</h\1\s*>", re.S | re.I)
_BLOCK = re.compile(
    r"</?(p|div|section|article|main|ul|ol|dl|dt|dd|table|tr|blockquote|br|hr|body|html|pre|li|h[1-6])\b[^>]*>", re.I
)
_CELL = re.compile(r"</?(td|th)\b[^>]*>", re.I)
_TAG = re.compile(r"<[^>]+>")


def html_text(source: str) -> str:
    """Plain text of an HTML page: paragraphs separated by blank lines, headings marked with '#', `<pre>` kept
    verbatim."""
    source = _PERMALINK.sub("", _NAV_DIVS.sub("", _DROP_BLOCKS.sub("", source)))
    kept: list[str] = []

    def stash(match: re.Match[str]) -> str:
        kept.append(html.unescape(_TAG.sub("", match.group(1))).strip("\n").rstrip())
        return f"\n\n\x01{len(kept) - 1}\x01\n\n"

    source = _PRE.sub(stash, source)
    source = re.sub(r"\s+", " ", source)
    source = _HEADING.sub(lambda m: f"\n\n{'#' * int(m.group(1))} {_TAG.sub('', m.group(2)).strip()}\n\n", source)
    source = _CELL.sub(" ", source)
    source = _BLOCK.sub("\n\n", source)
    text = html.unescape(_TAG.sub("", source))
    paragraphs = [re.sub(r"[ \t\xa0]+", " ", part).strip() for part in re.split(r"\n\s*\n", text)]
    restored = [kept[int(p.split("\x01")[1])] if p.startswith("\x01") else p for p in paragraphs]
    return "\n\n".join(p for p in restored if p)


def _read(path: Path) -> str:
    raw = gzip.decompress(path.read_bytes()) if path.suffix in (".gz", ".dz") else path.read_bytes()
    return raw.decode("utf-8", errors="replace")


def unpack(packages: Path, into: Path) -> None:
    """Unpack every `*.deb` of a folder into `into/NAME`, without installing anything."""
    for package in sorted(packages.glob("*.deb")):
        target = into / package.name.split("_")[0]
        if not target.exists():
            subprocess.run(["dpkg-deb", "-x", str(package), str(target)], check=True)


def _files(source: Source, root: Path) -> list[Path]:
    patterns = {"html": ["*.html"], "rst": ["*.txt"], "gzip": ["*.gz", "*.dz"], "code": ["*.py"]}[source.kind]
    found = sorted(path for pattern in patterns for path in root.rglob(pattern))
    keep = re.compile(source.keep) if source.keep else None
    drop = re.compile(source.drop) if source.drop else None
    chosen = []
    for path in found:
        name = "/" + str(path.relative_to(root))
        if source.kind == "rst" and "_sources" not in name:
            continue
        if (keep and not keep.search(name)) or (drop and drop.search(name)):
            continue
        chosen.append(path)
    return chosen


def _root(source: Source, unpacked: Path) -> Path | None:
    """Folder of one source, or None where it is absent on this machine."""
    if source.kind != "code":
        root = unpacked / source.name
        return root if root.is_dir() else None
    if source.name == "stdlib":
        return Path(sysconfig.get_path("stdlib"))
    root = Path(sysconfig.get_path("purelib")) / source.name
    return root if root.is_dir() else None


def raw_pages(source: Source, unpacked: Path) -> Iterator[tuple[str, str]]:
    """File name and cleaned text of every page of one source, before de-duplication."""
    root = _root(source, unpacked)
    if root is None:
        return
    for path in _files(source, root):
        title, text = str(path.relative_to(root)), _read(path)
        if source.kind == "html":
            text = html_text(text)
        if source.kind == "gzip":
            # one long file is cut into pages of a few screens at blank lines
            parts = re.split(r"\n\s*\n", text.replace("\r", ""))
            for start in range(0, len(parts), 40):
                yield title, "\n\n".join(parts[start : start + 40])
            continue
        yield title, text


def _unseen(text: str, kind: str, seen: set[bytes]) -> str:
    """Drop paragraphs that occurred before anywhere in the corpus (API pages repeat themselves)."""
    kept = []
    for paragraph in re.split(r"\n[ \t]*\n", text):
        if kind == "html" and len(paragraph) < 24 and not paragraph.startswith("#"):
            continue
        if len(paragraph) > 24:
            key = hashlib.blake2b(paragraph.strip().encode(), digest_size=8).digest()
            if key in seen:
                continue
            seen.add(key)
        kept.append(paragraph.rstrip())
    return "\n\n".join(kept).strip()


def _readable(text: str) -> bool:
    """False for pages that are mostly digits, symbols or one endless line."""
    letters = sum(ch.isalpha() or ch.isspace() for ch in text[:4000])
    return letters / max(1, len(text[:4000])) > 0.6 and max(map(len, text[:8000].split("\n"))) < 4000


def build_pages(unpacked: Path, sources: tuple[Source, ...] = SOURCES) -> list[Page]:
    """Read, clean and de-duplicate all sources, capped per source.

    Raises: UserError where none of the documentation packages is there.
    """
    seen: set[bytes] = set()
    pages: list[Page] = []
    for source in sources:
        used = 0
        found = list(raw_pages(source, unpacked))
        # pages in hash order, so that a cap takes an even sample instead of the start of the alphabet
        found.sort(key=lambda page: hashlib.blake2b(page[1][:4000].encode(), digest_size=8).digest())
        for title, text in found:
            text = _unseen(text, source.kind, seen)
            if len(text) < MIN_PAGE_CHARS or not _readable(text):
                continue
            used += len(text.encode())
            pages.append(Page(source.name, source.domain, text, held_out(text), title))
            if used >= source.max_bytes:
                break
    if not any(page.domain == "docs" for page in pages):
        wanted = ", ".join(s.name for s in sources if s.kind != "code")
        raise UserError(
            f"no documentation found in {unpacked}; download Debian packages ({wanted}) with "
            "apt-get download and pass their folder"
        )
    return pages


def write_pages(pages: list[Page], folder: Path) -> dict[str, int]:
    """Write `train.jsonl`, `heldout.jsonl` and `corpus.json` (bytes per source). Returns bytes per split and domain."""
    folder.mkdir(parents=True, exist_ok=True)
    totals: dict[str, int] = {}
    per_source: dict[str, int] = {}
    with (folder / "train.jsonl").open("w") as train, (folder / "heldout.jsonl").open("w") as held:
        for page in pages:
            size = len(page.text.encode())
            key = f"{'heldout' if page.held_out else 'train'}/{page.domain}"
            totals[key] = totals.get(key, 0) + size
            per_source[page.source] = per_source.get(page.source, 0) + size
            line = json.dumps(dataclasses.asdict(page), ensure_ascii=False)
            (held if page.held_out else train).write(line + "\n")
    sources = {name: {"bytes": size, "licence": licence_of(name)} for name, size in per_source.items()}
    card = {"totals": totals, "sources": sources}
    (folder / "corpus.json").write_text(json.dumps(card, indent=1))
    return totals


def read_pages(path: Path) -> list[Page]:
    """Read pages that `write_pages` wrote."""
    with path.open() as lines:
        return [Page(**json.loads(line)) for line in lines]
