"""The documentation site: ``make docs``."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent
sys.path[:0] = [str(DOCS), str(DOCS.parent / "src")]

import onnxtrain  # noqa: E402
from sitegen import api, command_line, profiles  # noqa: E402
from sitegen.contents import toctrees  # noqa: E402

project = "onnxtrain"
author = "the onnxtrain authors"
copyright = "the onnxtrain authors, Apache-2.0"
version = release = onnxtrain.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
source_suffix = {".md": "myst-nb"}
exclude_patterns = ["_build", "sitegen"]
suppress_warnings = ["mystnb.unknown_mime_type"]

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4
nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 300
nb_execution_in_temp = True
nb_merge_streams = True

autodoc_typehints = "none"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
napoleon_google_docstring = True
napoleon_use_rtype = False

html_theme = "furo"
html_title = "onnxtrain"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False


GENERATED = DOCS / "generated"
api.write(GENERATED / "api")
(GENERATED / "command-line.md").write_text(command_line.page(), encoding="utf-8")
(GENERATED / "profiles.md").write_text(profiles.page(), encoding="utf-8")


PLAYGROUND = DOCS.parent / "web" / "site" / "dist"
FRAME = (
    "<p>Open them here: "
    + ", ".join(
        f'<a href="../site/{folder}/index.html">{name}</a>'
        for folder, name in (
            *(("playground", "Playground"), ("draw", "Draw"), ("teach", "Teach")),
            *(("write", "Write"), ("model", "Your model"), ("style", "Style")),
        )
    )
    + ".</p>\n"
    '<iframe src="../site/playground/index.html" title="a net that learns in this page" '
    'loading="lazy" style="width: 100%; height: 48rem; border: 1px solid #ccc"></iframe>'
)


def _fill(app: Any, name: str, source: list[str]) -> None:
    """Put the tables of contents, and the page that trains if it is built, where they belong."""
    del app
    if name == "index":
        source[0] = source[0].replace("<!-- contents -->", toctrees())
    if name == "gallery/pages" and PLAYGROUND.exists():
        source[0] = source[0].replace("<!-- playground -->", FRAME)


def _read_anew(*_: Any) -> list[str]:
    """Return pages whose content depends on more than their source."""
    return ["index", "gallery/pages"]


def _copy_playground(app: Any, error: Exception | None) -> None:
    if error is None and PLAYGROUND.exists():
        site = Path(app.outdir) / "site"
        shutil.copytree(PLAYGROUND, site, dirs_exist_ok=True)
        for page in site.glob("**/index.html"):  # here, the documentation is one level up
            text = page.read_text("utf-8")
            page.write_text(
                text.replace('../" hidden>Documentation', '../">Documentation'), "utf-8"
            )


def setup(app: Any) -> None:
    """Connect what is ours."""
    app.connect("env-get-outdated", _read_anew)
    app.connect("source-read", _fill)
    app.connect("build-finished", _copy_playground)
