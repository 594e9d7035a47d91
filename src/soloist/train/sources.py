"""Where the training text comes from: every source with its licence and the pages that are left out."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Source:
    """One origin of text.

    `kind` says how it is read: html, rst (Sphinx sources), gzip (one long plain text) or code (Python files);
    `keep` and `drop` are patterns on the path inside the package.
    """

    name: str
    kind: str
    licence: str
    keep: str = ""
    drop: str = ""
    max_bytes: int = 8_000_000

    @property
    def domain(self) -> str:
        """docs or code."""
        return "code" if self.kind == "code" else "docs"


_SPHINX_NOISE = r"/(genindex|search|release|whatsnew|changelog|_modules|_downloads)|/release[.]"
_RUST_NOISE = (
    r"/(src|core_arch|core_simd|implementors|second-edition|first-edition)/|/arch/|/os/raw|intrinsics"
    r"|print[.]html|/simd/"
)
_STDLIB_NOISE = r"/(test|tests|idlelib|lib2to3|site-packages|dist-packages|encodings)/|pydoc_data"
_LLVM = "Apache-2.0 WITH LLVM-exception"

# Debian documentation packages; the licences are those of their copyright files.
DOCUMENTATION: tuple[Source, ...] = (
    Source("python3.11-doc", "rst", "PSF-2.0", drop=r"whatsnew/|changelog"),
    Source("erlang-doc", "html", "Apache-2.0", drop=r"notes|/man/|users_guide[.]|index"),
    Source("llvm-14-doc", "rst", _LLVM, drop=r"ReleaseNotes"),
    Source("clang-14-doc", "rst", _LLVM, drop=r"ReleaseNotes"),
    Source("rust-doc", "html", "MIT OR Apache-2.0", drop=_RUST_NOISE),
    Source("libboost1.74-doc", "html", "BSL-1.0"),
    Source("postgresql-doc-15", "html", "PostgreSQL", drop=r"/release"),
    Source("sqlite3-doc", "html", "blessing (public domain)", drop=r"releaselog|/changes|/src|/matrix|/session/|doclist"),
    Source("python-django-doc", "html", "BSD-3-Clause", drop=_SPHINX_NOISE + "|/releases/"),
    Source("python-sklearn-doc", "rst", "BSD-3-Clause", drop=r"whats_new"),
    Source("python-scipy-doc", "html", "BSD-3-Clause", drop=_SPHINX_NOISE),
    Source("python-pandas-doc", "html", "BSD-3-Clause", drop=_SPHINX_NOISE),
    Source("python-sympy-doc", "rst", "BSD-3-Clause"),
    Source("nodejs-doc", "html", "MIT", drop=r"/all[.]html"),
    Source("cmake-doc", "rst", "BSD-3-Clause", drop=r"release/"),
    Source("apache2-doc", "html", "Apache-2.0", keep=r"/manual/en/"),
    Source("python-astropy-doc", "rst", "BSD-3-Clause", drop=r"whatsnew|changelog|CHANGES"),
    Source("python-dask-doc", "rst", "BSD-3-Clause", drop=r"changelog"),
    Source("python-statsmodels-doc", "rst", "BSD-3-Clause", drop=r"/release/|/generated/"),
    Source("python-skimage-doc", "rst", "BSD-3-Clause", drop=r"release"),
    Source("python-sqlalchemy-doc", "html", "MIT", drop=_SPHINX_NOISE + "|/changelog/"),
    Source("python-xarray-doc", "rst", "Apache-2.0", drop=r"whats-new"),
    Source("python-tornado-doc", "rst", "Apache-2.0", drop=r"releases"),
    Source("python-jinja2-doc", "rst", "BSD-3-Clause", drop=r"changes"),
    Source("python-werkzeug-doc", "rst", "BSD-3-Clause", drop=r"changes"),
    Source("sphinx-doc", "rst", "BSD-2-Clause", drop=r"changes"),
    Source("ghc-doc", "rst", "BSD-3-Clause", drop=r"release|notes"),
    Source("twisted-doc", "rst", "MIT"),
    Source("tomcat10-docs", "html", "Apache-2.0", drop=r"changelog"),
    Source("jargon-text", "gzip", "public domain", keep=r"jargon[.]txt"),
    Source("dict-devil", "gzip", "public domain", keep=r"[.]dict[.]dz"),
)

# Python source, read from the interpreter and from packages that are installed beside it.
CODE: tuple[Source, ...] = (
    Source("stdlib", "code", "PSF-2.0", drop=_STDLIB_NOISE, max_bytes=16_000_000),
    Source(
        "sympy",
        "code",
        "BSD-3-Clause",
        drop=r"/(tests|benchmarks|_antlr|_lean)/|parser_data|hyperexpand",
        max_bytes=6_000_000,
    ),
    Source("networkx", "code", "BSD-3-Clause", drop=r"/tests/", max_bytes=4_000_000),
    Source(
        "torch",
        "code",
        "BSD-3-Clause",
        drop=r"/(testing|_inductor/fx_passes/serialized)|_C/|onnx",
        max_bytes=12_000_000,
    ),
    Source("numpy", "code", "BSD-3-Clause", drop=r"/tests/", max_bytes=4_000_000),
    Source(
        "transformers",
        "code",
        "Apache-2.0",
        max_bytes=6_000_000,
        keep=r"/(modular_|configuration_|tokenization_|generation|trainer|utils/|pipelines/)",
    ),
)

# What the conversations are made of; written by templates from other pages, see instruct.py and puzzles.py.
DERIVED: dict[str, str] = {
    "wordnet": "WordNet-3.0",
    "docstrings": "PSF-2.0",
    "sections": "as the quoted manual",
    "about": "Apache-2.0",
    "maths": "Apache-2.0",
    "json": "Apache-2.0",
}

SOURCES = DOCUMENTATION + CODE


def licence_of(name: str) -> str:
    """SPDX name of a source's licence. Raises: KeyError for an unknown source, so that none goes unrecorded."""
    return DERIVED[name] if name in DERIVED else {s.name: s.licence for s in SOURCES}[name]
