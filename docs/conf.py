"""Sphinx's settings. ``python -m sphinx -W --keep-going -b html docs build/docs`` builds the site from these pages.

The pages are Markdown that a forge shows as well: links go to files, and to sections by the names that GitHub gives
them. With ``-W`` a link to a missing page, file or section fails the build.
"""

import re
from pathlib import Path

import sparklog

project = "sparklog"
version = release = sparklog.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinxcontrib.mermaid"]

myst_enable_extensions = ["colon_fence"]
myst_fence_as_directive = ["mermaid"]
myst_heading_anchors = 4
highlight_language = "none"

# Names are shown without their modules: users import all of them from ``sparklog``.
add_module_names = False
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 100

# Diagrams are drawn by the browser, in the colours of the mode that the reader has chosen.
mermaid_init_config = {"startOnLoad": False, "deterministicIds": True}
mermaid_height = "auto"
mermaid_fullscreen = False

html_theme = "furo"
html_title = f"sparklog {release}"
html_static_path = ["_static"]
html_css_files = ["sparklog.css"]
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False


# Pages of the site whose text is a file of the project's root, where a forge expects it.
ROOT = Path(__file__).resolve().parent.parent
ROOT_FILES = {"index": "README.md", "changelog": "CHANGELOG.md", "contributing": "CONTRIBUTING.md"}
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|[#/])[^)#\s]+")


def put_root_file(app, page, source):
    """Replace what a page says before its first list of pages by the root's file, and mend links to and from there."""
    up = "../" * (page.count("/") + 1)
    pages = {up + file: f"/{name}.md" for name, file in ROOT_FILES.items()}
    if page in ROOT_FILES:
        app.env.note_dependency(str(ROOT / ROOT_FILES[page]))
        text = LINK.sub(lambda link: _from_docs(link[0]), (ROOT / ROOT_FILES[page]).read_text("utf-8"))
        _, fence, lists = source[0].partition("```{toctree}")
        source[0] = f"{text}\n{fence}{lists}"
    source[0] = LINK.sub(lambda link: pages.get(link[0], link[0]), source[0])


def _from_docs(target):
    return target.removeprefix("docs/") if target.startswith("docs/") else f"../{target}"


def setup(app):
    app.connect("source-read", put_root_file)
